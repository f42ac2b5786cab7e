"""Random sequences over two address spaces of one pool, some with a failing call, against a model in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.helpers.faults import BROKEN, fail, record
from tests.helpers.memory import fill_place, place_value, ranges
from vtensor.allocator.address_space import AddressSpace, Shortage
from vtensor.allocator.driver import Call, get_driver
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
