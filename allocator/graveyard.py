"""Graveyard: what the device may still be using waits here until it is not.

Memory must not be unmapped under a running kernel, and nobody should wait for the kernel either. So whoever gives
something up records events on the streams that used it, and buries the release with them. `sweep` carries out what is
due; every operation that takes memory sweeps first, and a shortage waits for the rest with `drain`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Event", "bury", "drain", "num_buried", "sweep"]


class Event(Protocol):
    """A point in a stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Wait until it has."""


Record = Callable[[], Sequence[Event]]
Release = Callable[[], None]

# Any thread may bury, also a finalizer that the collector runs in the middle of the code below: so graves are moved
# with single calls of a deque, which nothing can interrupt, and only the digging has a lock.
_graves: deque[tuple[Record | Sequence[Event], Release]] = deque()
_digging = threading.RLock()
_num_open = 0  # taken out of the deque, and not yet released or put back


def bury(events: Record | Sequence[Event], release: Release) -> None:
    """Call `release` once the events have passed.

    `events` may also be a function that records them: it is called at the first sweep, for those who give something up
    while they cannot record (during a graph capture).
    """
    _graves.append((events, release))


def num_buried() -> int:
    """Releases that are still due."""
    return len(_graves) + _num_open


def sweep() -> None:
    """Carry out every release whose events have passed. Does not wait, neither for events nor for other threads."""
    if _graves and _digging.acquire(blocking=False):
        _dig(wait=False)


def drain() -> None:
    """Wait for all events and carry out every release; those that another thread is at are done, too, on return."""
    _digging.acquire()
    _dig(wait=True)


def _dig(wait: bool) -> None:
    """Open every grave once, and release `_digging`. An error leaves the others buried."""
    global _num_open
    waiting: list[tuple[Record | Sequence[Event], Release]] = []
    try:
        for _ in range(len(_graves)):
            if not _graves:  # a finalizer swept in the middle of this
                break
            events, release = _graves.popleft()
            _num_open += 1
            try:
                if callable(events):
                    events = events()
                has_passed = _have_passed(events, wait)
            except BaseException:
                waiting.append((events, release))
                raise
            if has_passed:
                try:
                    release()
                finally:
                    _num_open -= 1
            else:
                waiting.append((events, release))
    finally:
        _graves.extendleft(reversed(waiting))
        _num_open -= len(waiting)
        _digging.release()


def _have_passed(events: Sequence[Event], wait: bool) -> bool:
    if wait:
        for event in events:
            event.synchronize()
    return wait or all(event.query() for event in events)


def _forget() -> None:
    """In a forked child: what was buried is the parent's, and so is a lock that another of its threads held."""
    global _graves, _digging, _num_open, _inherited
    _inherited, _graves, _digging, _num_open = _graves, deque(), threading.RLock(), 0


_inherited: deque[tuple[Record | Sequence[Event], Release]] | None = None  # kept, so that no event of the parent's dies
os.register_at_fork(after_in_child=_forget)
