"""Threads of a test that may hang: what does not end in time is an error."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable

__all__ = ["Background", "in_threads", "wait_until"]


class Background:
    """`body`, running in a thread."""

    def __init__(self, body: Callable[[], object]) -> None:
        self._body = body
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._body()
        except BaseException as error:
            self._error = error

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def join(self, timeout_s: float = 60) -> None:
        """Wait until it has ended, and raise what it raised."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            faulthandler.dump_traceback()
            raise TimeoutError(f"a thread has not ended after {timeout_s} s")
        if self._error is not None:
            raise self._error


def in_threads(*bodies: Callable[[], object], timeout_s: float = 120) -> None:
    """Run all at once, each in a thread, and raise what one of them raised."""
    running = [Background(body) for body in bodies]
    for one in running:
        one.join(timeout_s)


def wait_until(is_true: Callable[[], object], timeout_s: float = 30) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it has not come true after {timeout_s} s")
        time.sleep(0.001)
