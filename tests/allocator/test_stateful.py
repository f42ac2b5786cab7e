"""Random sequences over two address spaces of one pool, some with a failing call, against a model in plain Python.

Twice: with handles of one size, where the model knows each page group; and with handles of several sizes, some of them
mapped ahead, where it knows what the places in service hold, and what no place may ever show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.helpers.faults import BROKEN, fail, record
from tests.helpers.memory import fill_place, handles, place_value, ranges, rows
from vtensor.allocator.address_space import AddressSpace, Shortage
from vtensor.allocator.driver import Call, get_driver
from vtensor.allocator.mapper import Job, get_mapper
from vtensor.allocator.page_pool import PagePool
from vtensor.errors import DriverError

CAPACITY, NUM_PLACES = 6, 5
NOBODY, UNKNOWN = 0, -1
Row = tuple[int, int]


@dataclass(eq=False)
class Cell:
    """A page group: what it holds, whose data that is, and how many places show it."""

    value: int = 0
    owner: int = NOBODY
    num_places: int = 1


@dataclass
class Place:
    """What a space holds at one place."""

    cell: Cell
    writable: bool = True


def runs(places: list[int]) -> list[list[int]]:
    """Places in ascending order, cut where they are not neighbours."""
    found: list[list[int]] = []
    for place in places:
        if found and found[-1][-1] == place - 1:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def cut(first: int, count: int, gap: int) -> list[Row]:
    """One range, or two with a gap in between."""
    end = min(first + count, NUM_PLACES)
    if first + 1 + gap < end:
        return [(first, 1), (first + 1 + gap, end - first - 1 - gap)]
    return [(first, end - first)]


SPACES = st.integers(0, 1)
ROWS = st.builds(cut, st.integers(0, NUM_PLACES - 1), st.integers(0, NUM_PLACES), st.integers(0, 2))
PLACES = st.integers(0, NUM_PLACES - 1)
CALLS = [Call.CREATE, Call.MAP, Call.SET_ACCESS, Call.UNMAP, Call.FREE, Call.RELEASE]
FAULTS = st.none() | st.none() | st.tuples(st.sampled_from(CALLS), st.integers(1, 4))
Fault = tuple[Call, int] | None


class Machine(RuleBasedStateMachine):
    """Every step is made twice, by the library and by the model; afterwards all that can be seen must agree."""

    device: str

    @initialize()
    def start(self) -> None:
        size = get_driver(self.device).granularity_bytes
        self.pool = PagePool(
            self.device, capacity_bytes=CAPACITY * size, page_group_bytes=size, max_size_class_bytes=size
        )
        self.spaces = [self._new_space(), self._new_space()]
        self.marks = [self.pool.new_content(), self.pool.new_content()]
        self.model: list[dict[int, Place]] = [{}, {}]
        self.free: list[Cell] = []  # the last is taken first
        self.of_new = NOBODY if self.pool.driver.fresh_memory_is_zero else UNKNOWN
        self.next_value = 1

    def _new_space(self) -> AddressSpace:
        return AddressSpace(self.pool, NUM_PLACES * self.pool.page_group_bytes)

    def _try(self, do: Callable[[], Any], fault: Fault) -> bool:
        """Whether it worked; where it did not, the fault was the reason."""
        if fault is None:
            do()
            return True
        with fail(self.pool.driver, *fault, BROKEN) as calls:
            failed = None
            try:
                do()
            except DriverError as error:
                failed = error.call
        assert [made.call.symbol for made in calls if made.code] == ([failed] if failed else [])
        return failed is None

    # -- the model's own page groups ------------------------------------------------------------------------------

    def _release(self, cells: list[Cell]) -> None:
        for cell in reversed(cells):
            cell.num_places -= 1
            if cell.num_places == 0:
                self.free.append(cell)

    def _cells(self) -> list[Cell]:
        """Page groups that are mapped, each once."""
        return list({id(place.cell): place.cell for held in self.model for place in held.values()}.values())

    # -- steps ----------------------------------------------------------------------------------------------------

    @rule(number=SPACES, rows=ROWS, fault=FAULTS)
    def commit(self, number: int, rows: list[Row], fault: Fault) -> None:
        held, mark = self.model[number], self.marks[number]
        empty = [[place for place in range(first, first + count) if place not in held] for first, count in rows]
        wanted = [run for places in empty for run in runs(places)]
        num_wanted = sum(map(len, wanted))
        num_new = max(0, num_wanted - len(self.free))
        missing = len(self._cells()) + len(self.free) + num_new - CAPACITY
        commit = lambda: self.spaces[number].commit(ranges(*rows), content=mark)  # noqa: E731
        if num_new and missing > 0:
            with record(self.pool.driver) as calls, pytest.raises(Shortage) as caught:
                commit()
            assert (caught.value.page_groups, len(calls)) == (missing, 0)
        elif self._try(commit, fault):
            for run in wanted:
                cells = [self.free.pop() if self.free else Cell(owner=self.of_new) for _ in run]
                is_dirty = any(cell.owner not in (mark, NOBODY) for cell in cells)
                for place, cell in zip(run, cells, strict=True):
                    held[place] = Place(cell)
                    cell.owner, cell.num_places = mark, 1
                    if is_dirty:
                        cell.value = 0

    @rule(number=SPACES, rows=ROWS, forget=st.booleans(), fault=FAULTS)
    def decommit(self, number: int, rows: list[Row], forget: bool, fault: Fault) -> None:
        held = self.model[number]
        present = [[place for place in range(first, first + count) if place in held] for first, count in rows]
        gone = [run for places in present for run in runs(places)]
        if self._try(lambda: self.spaces[number].decommit(ranges(*rows), forget_content=forget), fault):
            for run in gone:
                cells = [held.pop(place).cell for place in run]
                for cell in cells:
                    cell.owner = UNKNOWN if forget else cell.owner
                self._release(cells)

    @rule(
        number=SPACES,
        source=SPACES,
        to=PLACES,
        start=PLACES,
        count=st.integers(0, 3),
        writable=st.booleans(),
        fault=FAULTS,
    )
    def alias(self, number: int, source: int, to: int, start: int, count: int, writable: bool, fault: Fault) -> None:
        held, origin = self.model[number], self.model[source]
        is_possible = (
            max(to, start) + count <= NUM_PLACES
            and not any(to + step in held for step in range(count))
            and all(start + step in origin for step in range(count))
        )
        do = lambda: self.spaces[number].alias(to, self.spaces[source], start, count, writable=writable)  # noqa: E731
        if not is_possible:
            with pytest.raises(ValueError, match=r"outside|already hold|not all committed"):
                do()
        elif self._try(do, fault):
            for step in range(count):
                cell = origin[start + step].cell
                cell.num_places += 1
                held[to + step] = Place(cell, writable)

    @rule(number=SPACES, place=PLACES)
    def write(self, number: int, place: int) -> None:
        found = self.model[number].get(place)
        if found and found.writable:
            found.cell.value = self.next_value
            fill_place(self.spaces[number], place, self.next_value)
            self.next_value = self.next_value % 255 + 1

    @rule(number=SPACES, fault=FAULTS)
    def close_and_reopen(self, number: int, fault: Fault) -> None:
        held, space = self.model[number], self.spaces[number]
        if self._try(space.close, fault):
            assert space.closed
            self.spaces[number] = self._new_space()
        elif fault and fault[0] is not Call.FREE:
            return  # as it was
        for run in runs(sorted(held)):
            self._release([held.pop(place).cell for place in run])

    @rule(fault=FAULTS)
    def trim(self, fault: Fault) -> None:
        size = self.pool.page_group_bytes
        if fault and fault[0] is Call.RELEASE and fault[1] <= len(self.free):
            with fail(self.pool.driver, *fault), pytest.raises(DriverError):
                self.pool.trim()
            self.free = [self.free[fault[1] - 1]]
        else:
            assert self.pool.trim() == len(self.free) * size
            self.free = []

    # -- what must agree ------------------------------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        stats, mapped = self.pool.stats(), len(self._cells())
        assert (stats.mapped_page_groups, stats.free_page_groups) == (mapped, len(self.free))
        assert stats.total_page_groups == mapped + len(self.free) <= CAPACITY
        for space, held in zip(self.spaces, self.model, strict=True):
            table = space.arrays.table[:NUM_PLACES].tolist()
            assert [bool(group) for group in table] == [place in held for place in range(NUM_PLACES)]
            assert space.num_mapped == len(held)
            for place, what in held.items():
                assert place_value(space, place) == what.cell.value
            space.check_integrity()
        groups: dict[int, int] = {}
        for space, held in zip(self.spaces, self.model, strict=True):
            for place, what in held.items():
                assert groups.setdefault(int(space.arrays.table[place]), id(what.cell)) == id(what.cell)
        if self.device == "cpu":
            assert self.pool.driver.live_bytes == stats.total_page_groups * self.pool.page_group_bytes  # type: ignore[attr-defined]

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for space in self.spaces:
                space.close()
            self.pool.close()


def test_random_sequences(device: str) -> None:
    machine = type("Machine", (Machine,), {"device": device})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=120 if device == "cpu" else 40,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# -- handles of several sizes, some of them mapped ahead ----------------------------------------------------------


NUM_WIDE, ROOM = 12, 14
WIDE_ROWS = st.lists(st.tuples(st.integers(0, NUM_WIDE - 1), st.integers(0, NUM_WIDE)), min_size=1, max_size=3).map(
    lambda spans: apart(spans)
)
WIDE_PLACES = st.integers(0, NUM_WIDE - 1)
WIDE_CALLS = [Call.CREATE, Call.RELEASE, Call.MAP, Call.SET_ACCESS, Call.UNMAP, Call.ZERO]
WIDE_FAULTS = st.just(()) | st.lists(
    st.tuples(st.sampled_from(WIDE_CALLS), st.integers(1, 4)), max_size=2, unique_by=lambda fault: fault[0]
).map(tuple)
Faults = tuple[tuple[Call, int], ...]


def apart(spans: list[Row]) -> list[Row]:
    """Rows in ascending order that neither overlap nor end behind the last place."""
    found: list[Row] = []
    for first, count in sorted(spans):
        first = max(first, sum(found[-1]) if found else 0)
        if first < NUM_WIDE:
            found.append((first, min(count, NUM_WIDE - first)))
    return found


def places_of(spans: list[Row]) -> list[int]:
    return [place for first, count in spans for place in range(first, first + count)]


@dataclass(eq=False)
class Shown:
    """What the places of one page group show, and whose mark that goes by."""

    value: int
    owner: int


@dataclass
class Side:
    """A space, and what is known of its places.

    `hidden` holds what places out of service held when they left it.
    """

    space: AddressSpace
    mark: int
    held: dict[int, Shown] = field(default_factory=dict)
    hidden: dict[int, Shown] = field(default_factory=dict)


class MixedMachine(RuleBasedStateMachine):
    """What is in service shows what was written to it; what comes into service shows zeros, or what was its owner's."""

    device: str

    @initialize()
    def start(self) -> None:
        size = get_driver(self.device).granularity_bytes
        self.pool = PagePool(
            self.device, capacity_bytes=ROOM * size, page_group_bytes=size, max_size_class_bytes=4 * size
        )
        self.sides = [Side(self._new_space(), self.pool.new_content()) for _ in range(2)]
        self.next_value = 1
        self.owner_of: dict[int, int] = {}  # of what was ever written
        self.forgotten: set[int] = set()

    def _new_space(self) -> AddressSpace:
        return AddressSpace(self.pool, NUM_WIDE * self.pool.page_group_bytes)

    # -- what the tables say --------------------------------------------------------------------------------------

    def _entries(self, side: Side) -> list[int]:
        return side.space.arrays.table[:NUM_WIDE].tolist()  # type: ignore[no-any-return]

    def _heads(self) -> list[int]:
        """For every handle that is mapped its number, once for each time."""
        return [abs(self._entries(side)[first]) for side in self.sides for first, _ in handles(side.space)]

    def _head_at(self, side: Side, place: int) -> int:
        first = next(first for first, count in handles(side.space) if first <= place < first + count)
        return abs(self._entries(side)[first])

    def _whole(self, side: Side, spans: list[Row]) -> list[int]:
        """Places of the handles that lie within one of some spans."""
        return places_of(
            [
                (first, count)
                for first, count in handles(side.space)
                if any(start <= first and first + count <= start + length for start, length in spans)
            ]
        )

    def _cannot_come_back(self, side: Side, places: list[int]) -> bool:
        """Whether a place out of service is an alias."""
        heads, entries = self._heads(), self._entries(side)
        return any(
            side.space.arrays.access[place] or heads.count(self._head_at(side, place)) > 1
            for place in places
            if entries[place] < 0
        )

    # -- trying ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _failing(self, faults: Faults) -> Iterator[list[Any]]:
        with ExitStack() as stack:
            calls = [stack.enter_context(record(self.pool.driver))]
            for which, nth in faults:
                stack.enter_context(fail(self.pool.driver, which, nth))
            yield calls

    def _try(self, do: Callable[[], Any], faults: Faults) -> str | None:
        """What it raised, as text, which must be a fault's; None where it worked."""
        failed = None
        with self._failing(faults) as (calls,):
            try:
                do()
            except DriverError as error:
                failed = error
            assert failed is None or failed.call in [made.call.symbol for made in calls if made.code == BROKEN]
        return None if failed is None else str(failed)

    def _finish(self, job: Job) -> None:
        job.wait()
        self._finish_zeroing()

    def _finish_zeroing(self) -> None:
        self.pool.driver.finish(get_mapper(self.pool.driver).stream)

    def _leave(self, side: Side, places: list[int], forget: bool) -> None:
        """Note that places are empty."""
        for place in places:
            shown = side.held.pop(place, None) or side.hidden.pop(place, None)
            if forget and shown is not None and shown.value:
                self.forgotten.add(shown.value)

    def _adapt(self, side: Side, forget: bool) -> None:
        """After a failure whose undoing may have failed too: what is gone is gone; what is stuck is out of service."""
        for place, entry in enumerate(self._entries(side)):
            if entry == 0:
                self._leave(side, [place], forget)
            elif entry < 0 and place in side.held:
                side.hidden[place] = side.held.pop(place)

    # -- steps ----------------------------------------------------------------------------------------------------

    @rule(number=SPACES, spans=WIDE_ROWS, largest=st.integers(0, 3), faults=WIDE_FAULTS)
    def commit(self, number: int, spans: list[Row], largest: int, faults: Faults) -> None:
        side = self.sides[number]
        entries, places = self._entries(side), places_of(spans)
        wanted, available = sum(entries[place] == 0 for place in places), self.pool.num_available
        missing = [place for place in places if entries[place] <= 0]
        do = lambda: side.space.commit(rows(*spans, content=side.mark, largest=largest), content=side.mark)  # noqa: E731
        if self._cannot_come_back(side, places):
            with pytest.raises(ValueError, match="was withdrawn"):
                do()
        elif wanted > available:
            with record(self.pool.driver) as calls, pytest.raises(Shortage) as caught:
                do()
            assert (caught.value.page_groups, len(calls)) == (wanted - available, 0)
        elif self._try(do, faults) is None:
            for place in missing:
                shown = Shown(place_value(side.space, place), side.mark)
                if shown.value:
                    assert self.owner_of[shown.value] == side.mark
                    assert shown.value not in self.forgotten
                side.held[place] = shown
                side.hidden.pop(place, None)
        else:
            for place in missing:
                side.hidden.pop(place, None)  # it may have been zeroed, or taken away

    @rule(number=SPACES, spans=WIDE_ROWS, largest=st.integers(0, 3), faults=WIDE_FAULTS)
    def commit_ahead(self, number: int, spans: list[Row], largest: int, faults: Faults) -> None:
        side = self.sides[number]
        entries, available = self._entries(side), self.pool.num_available
        num_done = num_mapped = 0
        for span in spans:
            wanted = sum(entries[place] == 0 for place in places_of([span]))
            if self._cannot_come_back(side, places_of([span])) or wanted > available - num_mapped:
                break
            num_done, num_mapped = num_done + 1, num_mapped + wanted
        with self._failing(faults) as (calls,):
            job = side.space.commit_ahead(rows(*spans, content=side.mark, largest=largest))
            self._finish(job)
            is_broken = any(made.code == BROKEN for made in calls)
        assert job.has_failed == (job.num_done < len(spans))
        if not is_broken:
            assert (job.num_done, job.num_page_groups) == (num_done, num_mapped)
        assert job.num_done <= num_done

    @rule(number=SPACES, spans=WIDE_ROWS)
    def withdraw(self, number: int, spans: list[Row]) -> None:
        side = self.sides[number]
        with record(self.pool.driver) as calls:
            side.space.withdraw(ranges(*spans))
        assert len(calls) == 0
        for place in places_of(spans):
            if place in side.held:
                side.hidden[place] = side.held.pop(place)

    @rule(number=SPACES, spans=WIDE_ROWS, forget=st.booleans(), faults=WIDE_FAULTS)
    def decommit(self, number: int, spans: list[Row], forget: bool, faults: Faults) -> None:
        side = self.sides[number]
        whole, before = self._whole(side, spans), self._entries(side)
        self._finish_zeroing()
        changed: list[int] = []
        error = self._try(lambda: changed.append(side.space.decommit(ranges(*spans), forget_content=forget)), faults)
        if error is None:
            assert changed == [len(whole)]
            self._leave(side, whole, forget)
        elif "nothing was changed" in error:
            assert self._entries(side) == before
        else:
            self._adapt(side, forget)

    @rule(number=SPACES, spans=WIDE_ROWS, forget=st.booleans(), faults=WIDE_FAULTS)
    def decommit_later(self, number: int, spans: list[Row], forget: bool, faults: Faults) -> None:
        side = self.sides[number]
        whole = [self._whole(side, [span]) for span in spans]
        self._finish_zeroing()
        with self._failing(faults):
            job = side.space.decommit_later(ranges(*spans), forget_content=forget)
            self._finish(job)
        assert job.num_page_groups == sum(map(len, whole[: job.num_done]))
        assert job.has_failed == (job.num_done < len(spans))
        assert faults or not job.has_failed
        for places in whole[: job.num_done]:
            self._leave(side, places, forget)
        if job.has_failed:
            self._adapt(side, forget)

    @rule(
        number=SPACES, source=SPACES, to=WIDE_PLACES, pick=st.integers(0, 20), count=st.integers(0, 8),
        shift=st.sampled_from([0, 0, 0, 1]), writable=st.booleans(), faults=WIDE_FAULTS,
    )  # fmt: skip
    def alias(
        self, number: int, source: int, to: int, pick: int, count: int, shift: int, writable: bool, faults: Faults
    ) -> None:
        side, origin = self.sides[number], self.sides[source]
        there = handles(origin.space) or [(0, 1)]
        start, size = there[pick % len(there)]  # mostly a handle, sometimes more or less
        start, count = start + shift, count if pick % 3 == 0 else size
        empty = [place for place in range(NUM_WIDE) if not self._entries(side)[place]]
        to = empty[to % len(empty)] if empty and to % 4 else to
        places = range(start, start + count)
        is_possible = (
            max(to, start) + count <= NUM_WIDE
            and not any(self._entries(side)[to : to + count])
            and all(place in origin.held for place in places)
            and self._whole(origin, [(start, count)]) == list(places)
        )
        before = self._entries(side)
        do = lambda: side.space.alias(to, origin.space, start, count, writable=writable)  # noqa: E731
        if not is_possible:
            with pytest.raises(ValueError, match=r"outside|already hold|not all committed|in part"):
                do()
        elif (error := self._try(do, faults)) is None:
            side.held.update({to + step: origin.held[start + step] for step in range(count)})
        elif "nothing was changed" in error:
            assert self._entries(side) == before

    @rule(number=SPACES, pick=st.integers(0, 20))
    def write(self, number: int, pick: int) -> None:
        side = self.sides[number]
        writable = [place for place in sorted(side.held) if not side.space.arrays.access[place]]
        if writable and self.next_value < 256:
            place = writable[pick % len(writable)]
            shown = side.held[place]
            shown.value = self.next_value
            self.owner_of[shown.value] = shown.owner
            fill_place(side.space, place, shown.value)
            self.next_value += 1

    @precondition(lambda self: self.pool.num_available < 4)
    @rule(number=SPACES, faults=WIDE_FAULTS)
    def close_and_reopen(self, number: int, faults: Faults) -> None:
        side = self.sides[number]
        if self._try(side.space.close, faults) is None:
            self._leave(side, list(range(NUM_WIDE)), False)
            side.space = self._new_space()
        else:
            self._adapt(side, False)

    @precondition(lambda self: self.pool.stats().free_page_groups > 0)
    @rule(faults=WIDE_FAULTS)
    def trim(self, faults: Faults) -> None:
        before = self.pool.stats()
        if self._try(self.pool.trim, faults) is None:
            assert self.pool.stats().free_page_groups == 0
        assert self.pool.stats().mapped_page_groups == before.mapped_page_groups

    # -- what must agree ------------------------------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        for side in self.sides:
            side.space.check_integrity()
            entries = self._entries(side)
            assert {place for place in range(NUM_WIDE) if entries[place] > 0} == side.held.keys()
            assert {place: place_value(side.space, place) for place in side.held} == {
                place: shown.value for place, shown in side.held.items()
            }
            assert all(entries[place] < 0 for place in side.hidden)
            assert side.space.num_ahead == sum(entry < 0 for entry in entries)
        stats = self.pool.stats()
        mapped = {abs(entry) for side in self.sides for entry in self._entries(side) if entry}
        assert stats.mapped_page_groups == len(mapped) == ROOM - self.pool.num_available
        assert stats.total_page_groups == len(mapped) + stats.free_page_groups <= ROOM
        size = self.pool.page_group_bytes
        in_bytes = sum(handle * number for handle, number in stats.num_handles.items())
        assert in_bytes == stats.total_page_groups * size
        if self.device == "cpu":
            assert self.pool.driver.live_bytes == in_bytes  # type: ignore[attr-defined]

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for side in self.sides:
                side.space.close()
            self.pool.close()


def test_random_sequences_with_several_sizes(device: str) -> None:
    machine = type("Machine", (MixedMachine,), {"device": device})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=120 if device == "cpu" else 30,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
