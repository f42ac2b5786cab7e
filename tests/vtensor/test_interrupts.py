"""Ctrl-C at any moment: the books balance afterwards, and no interrupt is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from vtensor.interrupts import interrupts_held

UNDER_FIRE = """
import os, random, signal, threading, time
import numpy as np, vtensor as vt
config = vt.KVCacheConfig(num_layers=4, num_kv_heads=2, head_dim=64, max_batch_size=6, max_context_tokens=4096)
random.seed(0)
hits = 0
for trial in range(120):
    cache = vt.KVCacheManager(config, device="cpu", capacity_bytes=75 << 16)
    delay = random.random() * 0.004
    killer = threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGINT)))
    try:
        killer.start()
        for _ in range(10_000):
            requests = [cache.alloc_reqid(random.choice([None, 300])) for _ in range(3)]
            lengths = np.zeros(6, np.int64)
            lengths[requests] = [random.randint(1, 2000) for _ in requests]
            cache.step(lengths)
            for reqid in requests:
                cache.free_reqid(reqid)
    except KeyboardInterrupt:
        hits += 1
    killer.join()
    cache.check_integrity()
    cache.close()
    assert cache.pool.stats().total_page_groups == 0
print(hits)
"""


def test_steps_under_fire() -> None:
    done = subprocess.run([sys.executable, "-c", UNDER_FIRE], capture_output=True, text=True, cwd="/", timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "120"), done.stderr


def test_an_interrupt_comes_at_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():  # noqa: PT012 - the block is the subject
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("name", ["SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_so_does_every_signal_that_programs_are_ended_with(name: str) -> None:
    class Ended(Exception):
        pass

    def end(number: int, frame: object) -> None:
        raise Ended

    number, done = getattr(signal, name), []
    before = signal.signal(number, end)

    def kill_and_go_on() -> None:
        with interrupts_held():
            os.kill(os.getpid(), number)
            done.append(name)

    try:
        with pytest.raises(Ended):
            kill_and_go_on()
    finally:
        signal.signal(number, before)
    assert done == [name]


def test_an_error_is_kept_as_the_context_of_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_held():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("bad")
    assert isinstance(caught.value.__context__, ValueError)


def test_another_thread_changes_no_handler() -> None:
    seen = []

    def body() -> None:
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
