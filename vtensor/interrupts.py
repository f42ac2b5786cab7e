"""Interrupts: Ctrl-C comes after a change of the books, not in the middle of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["interrupts_held"]


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back SIGINT until the end of the block, for steps between which the books do not balance.

    Python raises KeyboardInterrupt between any two instructions of the main thread, most likely right after a native
    call, where the time goes. Other threads are never interrupted, and handlers that are not Python's are let be.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(received[-1], None)
