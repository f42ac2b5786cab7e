"""Graveyard: what the device may still be using waits here until it is not.

Memory must not be unmapped under a running kernel, and nobody should wait for the kernel either. So whoever gives
something up records events on the streams that used it, and buries the release with them. `sweep` carries out what is
due; every operation that takes memory sweeps first, and a shortage waits for the rest with `drain`.
"""

from __future__ import annotations

import threading
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

_lock = threading.RLock()
_graves: list[tuple[Record | Sequence[Event], Release]] = []


def bury(events: Record | Sequence[Event], release: Release) -> None:
    """Call `release` once the events have passed.

    `events` may also be a function that records them: it is called at the first sweep, for those who give something up
    while they cannot record (during a graph capture).
    """
    with _lock:
        _graves.append((events, release))


def num_buried() -> int:
    """Releases that are still due."""
    return len(_graves)


def sweep() -> None:
    """Carry out every release whose events have passed. Does not wait."""
    if _graves:
        _dig(wait=False)


def drain() -> None:
    """Wait for all events and carry out every release."""
    if _graves:
        _dig(wait=True)


def _dig(wait: bool) -> None:
    with _lock:
        due, remaining = [], []
        for events, release in _graves:
            recorded = events() if callable(events) else events
            if wait:
                for event in recorded:
                    event.synchronize()
            if wait or all(event.query() for event in recorded):
                due.append(release)
            else:
                remaining.append((recorded, release))
        _graves[:] = remaining
    for release in due:
        release()
