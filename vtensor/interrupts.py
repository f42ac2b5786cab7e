"""Interrupts: Ctrl-C comes after a change of the books, not in the middle of it."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the signal module wraps it in enumerations, at 4 us a call
import threading
from types import TracebackType

__all__ = ["interrupts_held"]

_SIGINT = int(_signal.SIGINT)
_is_held = False  # changed by the main thread only


class interrupts_held:
    """Hold back SIGINT until the end of the block, for steps between which the books do not balance.

    Python raises KeyboardInterrupt between any two instructions of the main thread, most likely right after a native
    call, where the time goes. Other threads are never interrupted, and handlers that are not Python's are let be.
    Blocks may be nested: the outermost one counts.
    """

    __slots__ = ("_handler", "_received")

    def __enter__(self) -> None:
        global _is_held
        self._handler = None
        if _is_held or threading.current_thread() is not threading.main_thread():
            return
        handler = _signal.getsignal(_SIGINT)
        if not callable(handler):
            return
        self._received: list[int] = []
        _is_held = True
        _signal.signal(_SIGINT, lambda number, frame: self._received.append(number))
        self._handler = handler

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _is_held
        if self._handler is not None:
            _is_held = False
            _signal.signal(_SIGINT, self._handler)
            if self._received:
                self._handler(self._received[-1], None)
