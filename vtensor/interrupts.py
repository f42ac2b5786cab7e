"""Interrupts: Ctrl-C and its like come after a change of the books, not in the middle of it."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the signal module wraps it in enumerations, at 4 us a call
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["interrupts_held"]

# What programs are interrupted with; profilers' signals are let be. A handler of Python's may raise between any two
# instructions.
_SIGNALS = tuple(
    int(getattr(_signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
)
_is_held = False  # changed by the main thread only


class interrupts_held:
    """Hold back signals until the end of the block, where the books do not balance within it.

    These are SIGINT, SIGTERM, SIGALRM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2. Handlers of others must not raise.

    Python calls a handler, which may raise (KeyboardInterrupt, SystemExit), between any two instructions of the main
    thread, most likely right after a native call, where the time goes. Other threads are never interrupted, and
    handlers that are not Python's are let be. Blocks may be nested: the outermost one counts.
    """

    __slots__ = ("_handlers", "_received")

    def __enter__(self) -> None:
        global _is_held
        self._handlers: list[tuple[int, Callable[..., Any]]] = []
        if _is_held or threading.current_thread() is not threading.main_thread():
            return
        self._received: list[int] = []
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    # Runs the old handler, if a signal is pending: it may raise here.
                    _signal.signal(number, lambda number, frame: self._received.append(number))
                    self._handlers.append((number, handler))
        except BaseException:
            self._restore()
            raise
        _is_held = bool(self._handlers)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _is_held
        if self._handlers:
            _is_held = False
            self._restore()
            for number in self._received:
                dict(self._handlers)[number](number, None)

    def _restore(self) -> None:
        for number, handler in self._handlers:
            _signal.signal(number, handler)
