"""Turn: calls to a cache that come in the middle of another one, from the same thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

from vtensor.errors import VTensorError

__all__ = ["Turn"]


class Turn:
    """Whether a cache is in the middle of a call, and what is to be done after it. The cache's lock is held.

    A lock keeps other threads out, but not the garbage collector: it may run a finalizer at any allocation of any
    call, and that one may end a request, or close the cache. Such calls take effect when the outer one has ended; all
    others are refused. Enter it where interrupts are held, so that it is left again.

    Attributes
    ----------
    is_taken : bool
    """

    def __init__(self) -> None:
        self.is_taken = False
        self._later: deque[Callable[[], None]] = deque()

    def check(self, what: str) -> None:
        """Refuse a call that comes in the middle of another one."""
        if self.is_taken:
            raise VTensorError(
                f"{what} was called in the middle of another call to the same cache, by a finalizer or a callback of "
                "the same thread; only free_reqid and close may be, and take effect after it"
            )

    def later(self, action: Callable[[], None]) -> None:
        """Have something done when the turn has ended."""
        self._later.append(action)

    @property
    def has_later(self) -> bool:
        """Whether something is to be done when the turn has ended."""
        return bool(self._later)

    def __enter__(self) -> None:
        self.is_taken = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_taken = False
        self.do_later()

    def do_later(self) -> None:
        """Do what had to wait, and what comes to wait meanwhile."""
        while self._later:
            self._later.popleft()()
