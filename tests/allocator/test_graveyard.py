"""The graveyard: what is due is released once, what is not due waits, whatever happens while it is looked at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.child import in_child
from vtensor.allocator import graveyard


class Event:
    """A point in an imagined stream."""

    def __init__(self, passed: bool = False, when_asked: Callable[[], None] | None = None) -> None:
        self.passed = passed
        self.num_queries = self.num_waits = 0
        self._when_asked = when_asked

    def query(self) -> bool:
        self.num_queries += 1
        if self._when_asked is not None:
            when_asked, self._when_asked = self._when_asked, None
            when_asked()
        return self.passed

    def synchronize(self) -> None:
        self.num_waits += 1
        self.passed = True


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    graveyard.drain()
    assert graveyard.num_buried() == 0
    yield
    graveyard.drain()
    assert graveyard.num_buried() == 0


def test_release_waits_for_every_event() -> None:
    released: list[str] = []
    events = [Event(), Event(True)]
    graveyard.bury(events, lambda: released.append("x"))
    graveyard.sweep()
    assert (released, graveyard.num_buried()) == ([], 1)
    events[0].passed = True
    graveyard.sweep()
    assert (released, graveyard.num_buried()) == (["x"], 0)
    graveyard.sweep()
    graveyard.drain()
    assert released == ["x"]
    assert [event.num_waits for event in events] == [0, 0]


def test_sweep_takes_what_is_due_and_leaves_the_rest() -> None:
    released: list[int] = []
    events = [Event(number % 2 == 0) for number in range(6)]
    for number, event in enumerate(events):
        graveyard.bury([event], lambda number=number: released.append(number))  # type: ignore[misc]
    graveyard.sweep()
    assert (released, graveyard.num_buried()) == ([0, 2, 4], 3)
    graveyard.drain()
    assert released == [0, 2, 4, 1, 3, 5]
    assert [event.num_waits for event in events] == [0, 1, 0, 1, 0, 1]


def test_no_events_is_due_at_once() -> None:
    released: list[int] = []
    graveyard.bury([], lambda: released.append(1))
    assert released == []
    graveyard.sweep()
    assert released == [1]


def test_events_recorded_later() -> None:
    released: list[int] = []
    recorded: list[Event] = []

    def record() -> list[Event]:
        recorded.append(Event())
        return recorded[-1:]

    graveyard.bury(record, lambda: released.append(1))
    assert recorded == []
    graveyard.sweep()
    graveyard.sweep()
    assert len(recorded) == 1  # once; afterwards it is the event that is asked
    recorded[0].passed = True
    graveyard.sweep()
    assert released == [1]


def test_release_may_bury_and_sweep() -> None:
    released: list[str] = []

    def release() -> None:
        released.append("first")
        graveyard.bury([], lambda: released.append("second"))
        graveyard.sweep()

    graveyard.bury([], release)
    graveyard.sweep()
    assert released == ["first", "second"]


def test_finalizer_in_the_middle_of_a_sweep() -> None:
    # The collector may run while events are looked at, and a dead tensor's finalizer buries and sweeps.
    released: list[str] = []

    def die() -> None:
        graveyard.bury([late], lambda: released.append("of the dead"))
        graveyard.bury([], lambda: released.append("due of the dead"))
        graveyard.sweep()

    late = Event()
    graveyard.bury([Event(True)], lambda: released.append("due"))
    graveyard.bury([Event(when_asked=die)], lambda: released.append("asks"))
    graveyard.bury([Event()], lambda: released.append("last"))
    graveyard.sweep()
    assert sorted(released) == ["due", "due of the dead"]
    assert graveyard.num_buried() == 3
    graveyard.drain()
    assert sorted(released) == ["asks", "due", "due of the dead", "last", "of the dead"]


def test_finalizer_that_leaves_nothing_to_sweep() -> None:
    released: list[str] = []
    graveyard.bury([Event(when_asked=graveyard.sweep)], lambda: released.append("asks"))
    graveyard.bury([Event(True)], lambda: released.append("last"))
    graveyard.sweep()
    assert (released, graveyard.num_buried()) == (["last"], 1)


def test_release_that_fails_does_not_keep_the_others() -> None:
    released: list[int] = []

    def fail() -> None:
        raise RuntimeError("broken")

    for number in range(3):
        graveyard.bury([], fail if number == 1 else lambda number=number: released.append(number))  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="broken"):
        graveyard.sweep()
    assert (released, graveyard.num_buried()) == ([0], 1)
    graveyard.sweep()
    assert (released, graveyard.num_buried()) == ([0, 2], 0)


@pytest.mark.parametrize("wait", [False, True])
def test_event_that_fails_loses_no_grave(wait: bool) -> None:
    released: list[int] = []

    def fail() -> None:
        raise RuntimeError("broken")

    class Broken(Event):
        def synchronize(self) -> None:
            self.passed = True
            if self._when_asked is not None:
                self.query()

    broken = Broken(True, when_asked=fail)
    for number in range(3):
        graveyard.bury([broken] if number == 1 else [Event(True)], lambda number=number: released.append(number))  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="broken"):
        (graveyard.drain if wait else graveyard.sweep)()
    assert len(released) + graveyard.num_buried() == 3
    graveyard.drain()
    assert sorted(released) == [0, 1, 2]


@pytest.mark.parametrize("stage", ["query", "release"])
def test_drain_waits_for_a_sweep_elsewhere(stage: str) -> None:
    # Who drains because memory is short must not go on while another thread is still giving back what was due.
    order: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    def slowly() -> None:
        started.set()
        go_on.wait(10)

    def release() -> None:
        if stage == "release":
            slowly()
        order.append("released")

    def drain() -> None:
        graveyard.drain()
        order.append("drained")

    graveyard.bury([Event(True, when_asked=slowly if stage == "query" else None)], release)
    graveyard.bury([Event()], lambda: order.append("released last"))
    threads = [threading.Thread(target=graveyard.sweep), threading.Thread(target=drain)]
    threads[0].start()
    assert started.wait(10)
    assert graveyard.num_buried() == 2
    graveyard.sweep()  # waits for nobody: otherwise the first grave would be closed by now
    assert (order, graveyard.num_buried(), threads[0].is_alive()) == ([], 2, True)
    threads[1].start()
    time.sleep(0.1)
    assert order == []
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert order == ["released", "released last", "drained"]


def test_many_threads() -> None:
    released: list[int] = []

    def work(start: int) -> None:
        for number in range(start, start + 500):
            graveyard.bury([Event(number % 3 == 0)], lambda number=number: released.append(number))  # type: ignore[misc]
            (graveyard.drain if number % 50 == 0 else graveyard.sweep)()

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 500, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    graveyard.drain()
    assert sorted(released) == list(range(1500))


def test_child_does_not_bury_its_parents_dead() -> None:
    released: list[int] = []
    events = [Event(), Event(True)]
    for event in events:
        graveyard.bury([event], lambda: released.append(1))

    def sweep() -> tuple[int, int, list[int]]:
        before = graveyard.num_buried()
        graveyard.drain()
        graveyard.bury([], lambda: released.append(2))
        graveyard.sweep()
        return before, graveyard.num_buried(), released

    assert in_child(sweep) == (0, "(0, 0, [2])")
    assert graveyard.num_buried() == 2
    graveyard.drain()
    assert released == [1, 1]


def test_fork_while_another_thread_sweeps() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slowly() -> None:
        asked.set()
        go_on.wait(10)

    graveyard.bury([Event(True, when_asked=slowly)], lambda: None)
    sweeper = threading.Thread(target=graveyard.sweep)
    sweeper.start()
    assert asked.wait(10)

    def use() -> int:
        graveyard.bury([], lambda: None)
        graveyard.sweep()
        return graveyard.num_buried()

    outcome = in_child(use, timeout_s=10)
    go_on.set()
    sweeper.join(10)
    assert outcome == (0, "0")
