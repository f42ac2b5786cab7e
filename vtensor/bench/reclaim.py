"""What it costs to admit a request: `vtensor bench reclaim` (the paper's figure 13).

`alloc_reqid(prompt_tokens=P)` and the first `step` with the whole prompt, together, for prompts of several lengths:

- *cold*: nothing is in the cache or its pool: memory is created, zeroed (on the device's own time) and mapped.
- *deferred slot*: a request that was longer by a few tokens has just ended, and its slot keeps its memory. The check
  demands that this makes no driver call at all.
- *no deferral*: the same with ``deferred_reclamation=False``. The memory of the request that ended was unmapped before
  the clock starts, and waits in the pool; so this is what deferral saves of mapping alone.
- *eager slot*: another request of this length goes on, and none has ended so far; the cache has had the time to map a
  spare slot, as long as the median of recent prompts. The check demands that the caller need not map anything.

The device is idle, and nothing else goes on in the background when the clock starts.

Predicted for an H200 (Llama-3-8B: 128 KiB a token, in two slices, so that P = 1k, 4k and 16k are 64, 256 and 1,024 page
groups of 2 MiB), from earlier measurements: a handle of up to 64 MiB costs 38 us cold and 27 us recycled, and the
prompts need 2, 8 and 32 such handles: 0.08, 0.3 and 1.2 ms cold, 0.05, 0.2 and 0.9 ms without deferral; and 60 us of
Python for the two calls, which is all that is left on a deferred or an eager slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from vtensor.allocator.page_pool import PagePool
from vtensor.bench.batch import Int64, check_tokens, finish, settle, stepped
from vtensor.bench.frame import Benchmark, Metric, Variant, timed_us
from vtensor.devices import device_name, resolve_device
from vtensor.errors import VTensorError
from vtensor.kvcache import KVCacheConfig, KVCacheManager
from vtensor.units import MIB, ceil_div, format_bytes

__all__ = ["benchmark"]

_BATCH_SIZE = 8
_EXTRA_TOKENS = 64  # of the request before, so that its slot covers the prompt and what is looked ahead
_PATIENCE_S = 10.0
_QUIET_S = 0.01
_PYTHON_US = 60.0
_ADMIT, _MAPPED = "alloc_reqid + step", "mapped by the caller"
_METRICS = {_ADMIT: Metric("us"), _MAPPED: Metric("page groups")}


@dataclass(kw_only=True)
class _Admission(Variant):
    """One request after another, in a cache of its own."""

    device: str
    config: KVCacheConfig
    prompt_tokens: int
    pool: PagePool = field(init=False)
    cache: KVCacheManager = field(init=False)
    options: ClassVar[dict[str, Any]] = {"deferred_reclamation": False, "eager_slot": False}

    def set_up(self, resources: ExitStack) -> None:
        # Four times what is needed, so that no watermark comes into play.
        tokens = 4 * (self.prompt_tokens + _EXTRA_TOKENS)
        capacity_bytes = tokens * self.config.bytes_per_token + 64 * MIB
        self.pool = PagePool(self.device, capacity_bytes=capacity_bytes)
        resources.callback(self.pool.close)
        self.open()
        resources.callback(lambda: self.cache.close())

    def open(self) -> None:
        """Make a new cache, on whatever is in the pool."""
        self.cache = KVCacheManager(self.config, self.device, pool=self.pool, **self.options)

    def prepare(self) -> None:
        """Bring the cache to where the request is to find it. At first it is new, later its last request has ended."""

    def prepare_and_wait(self) -> None:
        """The same, until nothing goes on in the background any more."""
        self.prepare()
        finish(self.cache.device)
        _wait_until(lambda: _is_quiet(self.cache), f"{self.cache!r} makes driver calls without end")

    def check(self) -> None:
        self.prepare_and_wait()
        before = self.cache.stats().num_driver_calls
        reqid, num_mapped = self.admit(self.prompt_tokens)
        after = self.cache.stats().num_driver_calls
        self.check_work(num_mapped, {name: after[name] - before[name] for name in after if after[name] > before[name]})
        check_tokens(self.cache, _lengths(reqid, self.prompt_tokens))
        self.cache.free_reqid(reqid)

    def check_work(self, num_mapped: int, driver_calls: Mapping[str, int]) -> None:
        """Raise unless the request took what it was to take."""
        needed = self.prompt_tokens * self.config.bytes_per_token // self.pool.page_group_bytes
        if num_mapped < needed:
            raise VTensorError(f"the caller mapped {num_mapped} page groups, where there should be none but {needed}")

    def measure(self) -> Mapping[str, Sequence[float]]:
        self.prepare_and_wait()
        (reqid, num_mapped), spent_us = timed_us(self.admit, self.prompt_tokens)
        finish(self.cache.device)
        self.cache.free_reqid(reqid)
        return {_ADMIT: [spent_us], _MAPPED: [num_mapped]}

    def admit(self, num_tokens: int) -> tuple[int, int]:
        """Take a slot, and memory for the whole prompt; the slot, and how many page groups the caller had to map."""
        reqid = self.cache.alloc_reqid(prompt_tokens=num_tokens)
        result = stepped(self.cache, _lengths(reqid, num_tokens))
        return reqid, result.num_mapped - result.num_mapped_by_mapper


class _Cold(_Admission):
    def prepare(self) -> None:
        settle(self.cache)
        self.pool.trim()


class _NotDeferred(_Admission):
    def prepare(self) -> None:
        if self.pool.stats().total_page_groups == 0:
            self.cache.free_reqid(self.admit(self.prompt_tokens)[0])
        settle(self.cache)


class _Deferred(_Admission):
    options: ClassVar[dict[str, Any]] = {"deferred_reclamation": True, "eager_slot": False}

    def prepare(self) -> None:
        self.cache.free_reqid(self.admit(self.prompt_tokens + _EXTRA_TOKENS)[0])

    def check_work(self, num_mapped: int, driver_calls: Mapping[str, int]) -> None:
        if num_mapped or driver_calls:
            raise VTensorError(f"on a slot that covers the prompt, {driver_calls or num_mapped} driver calls were made")


class _Eager(_Admission):
    options: ClassVar[dict[str, Any]] = {"deferred_reclamation": True, "eager_slot": True}

    def prepare(self) -> None:
        self.cache.close()
        self.open()
        self.admit(self.prompt_tokens)
        _wait_until(self.has_spare_slot, f"no spare slot of {self.prompt_tokens:,} tokens was mapped")

    def has_spare_slot(self) -> bool:
        """Whether there is memory for a second request like the first."""
        self.cache.step(np.zeros(_BATCH_SIZE, np.int64))  # carries out what is due
        mapped_bytes = self.pool.stats().mapped_page_groups * self.pool.page_group_bytes
        return mapped_bytes >= 2 * self.prompt_tokens * self.config.bytes_per_token

    def check_work(self, num_mapped: int, driver_calls: Mapping[str, int]) -> None:
        if num_mapped:
            raise VTensorError(f"a spare slot was mapped, and yet the caller had to map {num_mapped} page groups")


def _lengths(reqid: int, num_tokens: int) -> Int64:
    """Lengths of all slots, of which one has a request."""
    lengths = np.zeros(_BATCH_SIZE, np.int64)
    lengths[reqid] = num_tokens
    return lengths


def _is_quiet(cache: KVCacheManager) -> bool:
    """Whether nothing is mapped or unmapped in the background."""
    before = cache.stats().num_driver_calls
    time.sleep(_QUIET_S)
    return cache.stats().num_driver_calls == before


def _wait_until(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise VTensorError(f"{complaint} within {_PATIENCE_S:.0f} s")


def benchmark(device: str, *, small: bool = False, rounds: int | None = None) -> Benchmark:
    """The benchmark for a device. `small`: a first look, in about a second."""
    device = device_name(resolve_device(device))
    on_gpu = device != "cpu"
    prompts = (64, 256) if small else (1_024, 4_096, 16_384)
    # Llama-3-8B on a GPU; on the host a 64th of it, on page groups that are a 32nd.
    config = KVCacheConfig(
        num_layers=32 if on_gpu else 4,
        num_kv_heads=8 if on_gpu else 2,
        head_dim=128 if on_gpu else 64,
        max_batch_size=_BATCH_SIZE,
        max_context_tokens=max(prompts) + 2 * _EXTRA_TOKENS,
        dtype=torch.bfloat16,
    )
    kinds: list[tuple[str, type[_Admission], float]] = [
        ("cold", _Cold, 38.0),
        ("deferred slot", _Deferred, 0.0),
        ("no deferral", _NotDeferred, 27.0),
        ("eager slot", _Eager, 0.0),
    ]
    variants = []
    for prompt_tokens in prompts:
        handles = ceil_div(prompt_tokens * config.bytes_per_token, 64 * MIB)
        for name, kind, handle_us in kinds:
            variants.append(
                kind(
                    name=f"{name}, {prompt_tokens:,} tokens",
                    parameters={"prompt_tokens": prompt_tokens, **kind.options},
                    predicted={_ADMIT: _PYTHON_US + handles * handle_us},
                    device=device,
                    config=config,
                    prompt_tokens=prompt_tokens,
                )
            )
    return Benchmark(
        name="reclaim",
        title="Admission of a request: alloc_reqid, and step with its whole prompt",
        device=device,
        metrics=_METRICS,
        variants=variants,
        rounds=(2 if small else 20) if rounds is None else rounds,
        parameters={"small": small, "bytes_per_token": config.bytes_per_token},
        notes=f"{format_bytes(config.bytes_per_token)} a token",
        is_predicted=on_gpu,
    )
