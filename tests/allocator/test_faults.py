"""All or nothing: whichever driver call of an operation fails, everything is as it was, and trying again works."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.faults import BROKEN, Calls, fail, record
from tests.helpers.memory import access_at, fill_place, place_value, ranges
from vtensor.allocator import words
from vtensor.allocator.address_space import AddressSpace, Shortage
from vtensor.allocator.driver import Call
from vtensor.allocator.driver.base import OUT_OF_MEMORY
from vtensor.allocator.page_pool import PagePool
from vtensor.errors import DriverError

MINE, THEIRS = 2, 3
NUM_PLACES = 16
OPERATIONS = ["commit", "decommit", "alias", "alias read-only", "close"]
# Kinds of calls that each operation makes, apart from those that only undoing makes.
CALLS = {
    "commit": [Call.CREATE, Call.MAP, Call.SET_ACCESS],
    "decommit": [Call.UNMAP],
    "alias": [Call.MAP, Call.SET_ACCESS],
    "alias read-only": [Call.MAP, Call.SET_ACCESS],
    "close": [Call.UNMAP, Call.FREE],
}
CASES = [(operation, call) for operation in OPERATIONS for call in CALLS[operation]]


class Rig:
    """A pool with free page groups of two owners, and a space with runs, holes and aliases, some of them read-only.

    ::

        place    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
        space    .  .  .  m  m  .  .  .  m  r  m  .  .  r  .  .     m: committed   r: read-only alias   .: empty
    """

    num_places = NUM_PLACES

    def __init__(self, device: str) -> None:
        from vtensor.allocator.driver import get_driver

        size = get_driver(device).granularity_bytes
        self.device = device
        self.pool = PagePool(device, capacity_bytes=32 * size, page_group_bytes=size, max_size_class_bytes=size)
        self.driver = self.pool.driver
        self.space, self.other = (AddressSpace(self.pool, NUM_PLACES * size) for _ in range(2))
        self.other.commit(ranges((0, 8)), content=THEIRS)
        for place in range(8):
            fill_place(self.other, place, 100 + place)
        self.space.commit(ranges((3, 2), (8, 1), (10, 1)), content=MINE)
        for place in (3, 4, 8, 10):
            fill_place(self.space, place, 10 + place)
        self.space.alias(9, self.other, 0, 1, writable=False)
        self.space.alias(13, self.other, 1, 1, writable=False)
        self.space.commit(ranges((0, 1)), content=MINE)
        self.space.decommit(ranges((0, 1)), forget_content=False)
        self.other.decommit(ranges((4, 2)), forget_content=False)

    def do(self, operation: str) -> None:
        if operation == "commit":
            self.space.commit(ranges((0, 12), (14, 2)), content=MINE)
        elif operation == "decommit":
            self.space.decommit(ranges((3, 1), (4, 10)), forget_content=True)
        elif operation == "close":
            self.space.close()
        else:
            self.other.alias(10, self.space, 8, 3, writable=operation == "alias")

    def check_done(self, operation: str) -> None:
        values = self.values(self.space), self.values(self.other)
        before = {3: 13, 4: 14, 8: 18, 9: 100, 10: 20, 13: 101}
        others = {place: 100 + place for place in (0, 1, 2, 3, 6, 7)}
        expected = {
            "commit": ({place: 0 for place in range(NUM_PLACES) if place != 12} | before, others),
            "decommit": ({}, others),
            "alias": (before, others | {10: 18, 11: 100, 12: 20}),
            "alias read-only": (before, others | {10: 18, 11: 100, 12: 20}),
            "close": ({}, others),
        }
        assert values == expected[operation]

    def values(self, space: AddressSpace) -> dict[int, int]:
        """What each place holds that has memory."""
        places = [place for place in range(self.num_places) if space.arrays.table[place]]
        return {place: place_value(space, place) for place in places}

    def state(self) -> dict[str, Any]:
        """All that a failed operation must leave alone."""
        arrays, stats = self.pool.arrays, self.pool.stats()
        found: dict[str, Any] = {
            "totals": (stats.total_page_groups, stats.free_page_groups, stats.mapped_page_groups),
            "free": arrays.free[: stats.free_page_groups].tolist(),
            "content of what is free": [int(arrays.content[group]) for group in arrays.free[: stats.free_page_groups]],
        }
        for name, space in (("space", self.space), ("other", self.other)):
            groups = space.mapped_page_groups()
            found[name] = {
                "table": space.arrays.table[: self.num_places].tolist(),
                "read-only": space.arrays.access[: self.num_places].tolist(),
                "num_mapped": space.num_mapped,
                "closed": space.closed,
                "values": self.values(space),
                "content": [int(arrays.content[group]) for group in groups],
            }
            if self.device == "cpu":
                size = space.page_group_bytes
                found[name]["access"] = [access_at(space.base + place * size) for place in range(self.num_places)]
        if self.device == "cpu":
            found["live_bytes"] = self.driver.live_bytes  # type: ignore[attr-defined]
        return found

    def check(self) -> None:
        self.space.check_integrity()
        self.other.check_integrity()

    def close(self) -> None:
        for space in (self.space, self.other):
            space.close()
        self.pool.close()


@pytest.fixture
def make_rig(device: str) -> Iterator[Callable[[], Rig]]:
    rigs: list[Rig] = []

    def make() -> Rig:
        rigs.append(Rig(device))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.check()
        rig.close()


def calls_of(rig: Rig, operation: str) -> Calls:
    """What an undisturbed operation calls."""
    with record(rig.driver) as calls:
        rig.do(operation)
    return calls


@pytest.mark.parametrize("operation", OPERATIONS)
def test_undisturbed(make_rig: Callable[[], Rig], operation: str) -> None:
    # What the tests below rely on: several calls of each kind, over several runs, and the result.
    rig = make_rig()
    calls = calls_of(rig, operation)
    rig.check_done(operation)
    expected = {
        # Fresh memory is known to be zero on the host only.
        "commit": {Call.CREATE: 6, Call.MAP: 9, Call.SET_ACCESS: 4, Call.ZERO: 1 if rig.device == "cpu" else 4},
        "decommit": {Call.UNMAP: 4},
        "alias": {Call.MAP: 3, Call.SET_ACCESS: 1},
        "alias read-only": {Call.MAP: 3, Call.SET_ACCESS: 1},
        "close": {Call.UNMAP: 3, Call.FREE: 1},
    }
    assert {call: calls.count(call) for call in Call if calls.count(call)} == expected[operation]


@pytest.mark.parametrize("code", [BROKEN, OUT_OF_MEMORY])
@pytest.mark.parametrize(("operation", "call"), CASES)
def test_every_call_may_fail(make_rig: Callable[[], Rig], operation: str, call: Call, code: int) -> None:
    for nth in range(1, 1 + calls_of(make_rig(), operation).count(call)):
        rig = make_rig()
        before = rig.state()
        is_shortage = call is Call.CREATE and code == OUT_OF_MEMORY
        with (
            fail(rig.driver, call, nth, code) as calls,
            pytest.raises(Shortage if is_shortage else DriverError) as caught,
        ):
            rig.do(operation)
        assert [made.code for made in calls if made.code] == [code]
        rig.check()
        assert_unchanged(rig, before, operation, call)
        if isinstance(caught.value, DriverError):
            assert caught.value.call == call.symbol
            assert call is Call.FREE or "nothing was changed" in str(caught.value)
        else:
            assert caught.value.page_groups == 6 - (nth - 1)
        rig.do(operation)
        rig.check()
        rig.check_done(operation)


def assert_unchanged(rig: Rig, before: dict[str, Any], operation: str, call: Call) -> None:
    """The state is as before, but for a close whose last call failed: all is unmapped, and closing can be repeated."""
    after = rig.state()
    if (operation, call) == ("close", Call.FREE):
        assert after["other"] == before["other"]
        assert (after["space"]["num_mapped"], after["space"]["closed"]) == (0, False)
    else:
        assert after == before


@pytest.mark.parametrize("operation", OPERATIONS)
def test_many_failures_in_a_row(make_rig: Callable[[], Rig], operation: str) -> None:
    # Nothing wears out: a hundred failed attempts leave what one leaves.
    call = CALLS[operation][0]
    count = calls_of(make_rig(), operation).count(call)
    rig = make_rig()
    before = rig.state()
    for attempt in range(100):
        with fail(rig.driver, call, 1 + attempt % count), pytest.raises(DriverError):
            rig.do(operation)
    assert rig.state() == before
    rig.do(operation)
    rig.check_done(operation)


# -- the undo fails too -------------------------------------------------------------------------------------------


def num_stuck(error: DriverError) -> int:
    """Page groups that the message speaks of."""
    found = re.search(r"undoing failed as well: (\d+) page groups", str(error))
    if found is None:
        assert "nothing was changed" in str(error)
        return 0
    return int(found[1])


def changed_places(before: dict[str, Any], after: dict[str, Any]) -> list[int]:
    """Places of either space that are not what they were."""
    return [
        place
        for name in ("space", "other")
        for place in range(len(before[name]["table"]))
        if before[name]["table"][place] != after[name]["table"][place]
    ]


DOUBLE_FAULTS = [
    ("commit", Call.MAP, Call.UNMAP),
    ("commit", Call.SET_ACCESS, Call.UNMAP),
    ("decommit", Call.UNMAP, Call.MAP),
    ("decommit", Call.UNMAP, Call.SET_ACCESS),
    ("close", Call.UNMAP, Call.MAP),
    ("alias", Call.MAP, Call.UNMAP),
    ("alias", Call.SET_ACCESS, Call.UNMAP),
    ("alias read-only", Call.SET_ACCESS, Call.UNMAP),
]


@pytest.mark.parametrize("times", [1, 1 << 40], ids=["once", "always"])
@pytest.mark.parametrize(("operation", "call", "undo"), DOUBLE_FAULTS)
def test_undo_may_fail_too(make_rig: Callable[[], Rig], operation: str, call: Call, undo: Call, times: int) -> None:
    found_stuck = 0
    for nth, nth_undo in itertools.product(range(1, 1 + calls_of(make_rig(), operation).count(call)), range(1, 5)):
        rig = make_rig()
        before = rig.state()
        with (
            fail(rig.driver, call, nth),
            fail(rig.driver, undo, nth_undo, 998, times),
            pytest.raises(DriverError) as caught,
        ):
            rig.do(operation)
        rig.check()
        assert (caught.value.call, caught.value.name) == (call.symbol, rig.driver.explain(call, BROKEN)[0])
        assert_others_untouched(rig, before)
        stuck = num_stuck(caught.value)
        assert stuck == len(changed_places(before, tables(rig)))
        found_stuck += stuck
        # What is left can be taken away and made anew, and its memory shows nothing of another owner.
        for space in (rig.space, rig.other):
            space.decommit(ranges((0, NUM_PLACES)), forget_content=False)
        rig.check()
        rig.space.commit(ranges((0, NUM_PLACES)), content=MINE)
        assert set(rig.values(rig.space).values()) <= {0, 13, 14, 18, 20}
    assert found_stuck > 0


def tables(rig: Rig) -> dict[str, Any]:
    return {
        name: {"table": space.arrays.table[: rig.num_places].tolist()}
        for name, space in (("space", rig.space), ("other", rig.other))
    }


def assert_others_untouched(rig: Rig, before: dict[str, Any]) -> None:
    """Memory of a place that is as it was holds what it held."""
    for name, space in (("space", rig.space), ("other", rig.other)):
        for place, number in before[name]["values"].items():
            if space.arrays.table[place] == before[name]["table"][place]:
                assert place_value(space, place) == number


def test_what_is_written_to_stuck_memory_is_seen_by_nobody_else(make_rig: Callable[[], Rig]) -> None:
    # A run that was mapped and opened, and could not be unmapped when the next one failed.
    rig = make_rig()
    rig.other.decommit(ranges((0, 4)), forget_content=False)  # what THEIRS gave back last is taken first
    with fail(rig.driver, Call.MAP, 2), fail(rig.driver, Call.UNMAP, 1), pytest.raises(DriverError) as caught:
        rig.space.commit(ranges((0, 1), (5, 1)), content=MINE)
    assert num_stuck(caught.value) == 1
    fill_place(rig.space, 0, 77)
    rig.space.decommit(ranges((0, 1)), forget_content=False)
    rig.other.commit(ranges((0, 4)), content=THEIRS)
    assert 77 not in rig.values(rig.other).values()


def test_release_that_fails_in_an_undo_loses_no_page_group(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    before = rig.pool.stats()
    with (
        fail(rig.driver, Call.MAP, 9),
        fail(rig.driver, Call.RELEASE, 2) as calls,
        pytest.raises(DriverError, match="cuMemMap"),
    ):
        rig.do("commit")
    assert calls.count(Call.RELEASE) == 6  # what was made for the commit
    rig.check()
    after = rig.pool.stats()
    assert (after.total_page_groups, after.free_page_groups) == (
        before.total_page_groups + 1,
        before.free_page_groups + 1,
    )
    rig.do("commit")
    rig.check_done("commit")


def test_create_that_fails_releases_what_was_made(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    with fail(rig.driver, Call.CREATE, 5) as calls, pytest.raises(DriverError, match="cuMemCreate"):
        rig.do("commit")
    assert [made.call for made in calls] == [Call.CREATE] * 5 + [Call.RELEASE] * 4
    assert int(rig.pool.arrays.header[words.NUM_TOTAL]) == rig.pool.stats().total_page_groups


# -- handles of several sizes -------------------------------------------------------------------------------------


class MixedRig(Rig):
    """As above, but with handles of 1, 2, 4 and 8 places, and so little room that a commit has to merge some.

    ::

        place    0  1  2  3  4 ... 7  8  9  10 ... 23  24 ... 31
        space    .  .  .  m  .     .  [ m ] .       .   [  r  ]     r: read-only alias of a handle of eight
        free     [4], [1], [1], [1]: what THEIRS left
    """

    num_places = 32

    def __init__(self, device: str) -> None:
        from vtensor.allocator.driver import get_driver

        size = get_driver(device).granularity_bytes
        self.device = device
        self.pool = PagePool(device, capacity_bytes=36 * size, page_group_bytes=size, max_size_class_bytes=8 * size)
        self.driver = self.pool.driver
        self.space, self.other = (AddressSpace(self.pool, self.num_places * size) for _ in range(2))
        self.other.commit(ranges((0, 8), (8, 4), (12, 4), (16, 1), (18, 1), (20, 1)), content=THEIRS)
        for place in (*range(16), 16, 18, 20):
            fill_place(self.other, place, 100 + place)
        self.space.commit(ranges((3, 1), (8, 2)), content=MINE)
        for place in (3, 8, 9):
            fill_place(self.space, place, 10 + place)
        self.space.alias(24, self.other, 0, 8, writable=False)
        self.other.decommit(ranges((12, 20)), forget_content=False)

    def do(self, operation: str) -> None:
        if operation == "commit":
            self.space.commit(ranges((0, 24)), content=MINE)
        elif operation == "decommit":
            self.space.decommit(ranges((0, 10), (20, 12)), forget_content=True)
        elif operation == "close":
            self.space.close()
        else:
            self.other.alias(20, self.other, 0, 12, writable=operation == "alias")

    def check_done(self, operation: str) -> None:
        before = {3: 13, 8: 18, 9: 19} | {24 + place: 100 + place for place in range(8)}
        others = {place: 100 + place for place in range(12)}
        expected = {
            "commit": ({place: 0 for place in range(24)} | before, others),
            "decommit": ({}, others),
            "alias": (before, others | {20 + place: 100 + place for place in range(12)}),
            "alias read-only": (before, others | {20 + place: 100 + place for place in range(12)}),
            "close": ({}, others),
        }
        assert (self.values(self.space), self.values(self.other)) == expected[operation]

    def state(self) -> dict[str, Any]:
        """All that a failed operation must leave alone; merging free handles for it leaves as much room."""
        found = super().state()
        for merged in ("totals", "free", "content of what is free", "live_bytes"):
            found.pop(merged, None)
        return found | {"available": self.pool.num_available, "mapped": self.pool.stats().mapped_page_groups}

    def free(self) -> int:
        return self.pool.stats().free_page_groups


MIXED_CALLS = {**CALLS, "commit": [Call.CREATE, Call.RELEASE, Call.MAP, Call.SET_ACCESS, Call.ZERO]}
MIXED_CASES = [(operation, call) for operation in OPERATIONS for call in MIXED_CALLS[operation]]


@pytest.fixture
def make_mixed(device: str) -> Iterator[Callable[[], MixedRig]]:
    """Make one after the other: the last one is checked and closed, so that all memory is the next one's."""
    rigs: list[MixedRig] = []

    def end() -> None:
        while rigs:
            rig = rigs.pop()
            rig.check()
            rig.close()

    def make() -> MixedRig:
        end()
        rigs.append(MixedRig(device))
        return rigs[-1]

    yield make
    end()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_undisturbed_with_several_sizes(make_mixed: Callable[[], MixedRig], operation: str) -> None:
    rig = make_mixed()
    calls = calls_of(rig, operation)
    rig.check_done(operation)
    num_zeroed = 2 if rig.device == "cpu" else 3
    expected = {
        # [2], [1] taken, then [4] taken, then [8], [4], and [2] in the place of two of one.
        "commit": {Call.CREATE: 4, Call.RELEASE: 2, Call.MAP: 6, Call.SET_ACCESS: 3, Call.ZERO: num_zeroed},
        "decommit": {Call.UNMAP: 3},
        "alias": {Call.MAP: 2, Call.SET_ACCESS: 1},
        "alias read-only": {Call.MAP: 2, Call.SET_ACCESS: 1},
        "close": {Call.UNMAP: 3, Call.FREE: 1},
    }
    assert {call: calls.count(call) for call in Call if calls.count(call)} == expected[operation]
    if operation == "commit":
        assert rig.pool.num_available == 0


@pytest.mark.parametrize(("operation", "call"), MIXED_CASES)
def test_every_call_may_fail_with_several_sizes(make_mixed: Callable[[], MixedRig], operation: str, call: Call) -> None:
    for nth in range(1, 1 + calls_of(make_mixed(), operation).count(call)):
        rig = make_mixed()
        before, free_before = rig.state(), rig.free()
        with fail(rig.driver, call, nth) as calls, pytest.raises(DriverError) as caught:
            rig.do(operation)
        assert (caught.value.call, [made.code for made in calls if made.code]) == (call.symbol, [BROKEN])
        assert call is Call.FREE or "nothing was changed" in str(caught.value)
        rig.check()
        assert_unchanged(rig, before, operation, call)
        # What was free is, but for what had been released to make room. What was made since is gone, unless it was
        # mapped already, and all that failed was to zero it.
        num_released, num_made = (
            sum(made.call is which and made.code == 0 for made in calls) for which in (Call.RELEASE, Call.CREATE)
        )
        if call is Call.ZERO:
            assert rig.free() == free_before - 2 + 16
        elif operation == "commit":
            assert rig.free() == free_before - (num_released - num_made)
        assert_books_and_memory_agree(rig)
        rig.do(operation)
        rig.check()
        rig.check_done(operation)


def assert_books_and_memory_agree(rig: Rig) -> None:
    stats = rig.pool.stats()
    in_bytes = sum(size * number for size, number in stats.num_handles.items())
    assert in_bytes == stats.total_page_groups * stats.page_group_bytes
    if rig.device == "cpu":
        assert rig.driver.live_bytes == in_bytes  # type: ignore[attr-defined]


@pytest.mark.parametrize(("nth", "shortage"), [(1, 21), (2, 14), (3, 6), (4, 2)])
def test_a_device_without_memory_is_a_shortage(make_mixed: Callable[[], MixedRig], nth: int, shortage: int) -> None:
    # From the nth creation on it has none, not even for one page group and for what was released to make room.
    rig = make_mixed()
    before = rig.state()
    with fail(rig.driver, Call.CREATE, nth, OUT_OF_MEMORY, 1 << 40) as calls, pytest.raises(Shortage) as caught:
        rig.do("commit")
    assert (caught.value.page_groups, calls.count(Call.MAP)) == (shortage, 0)
    rig.check()
    assert rig.state() == before
    assert_books_and_memory_agree(rig)
    rig.do("commit")
    rig.check_done("commit")


MIXED_DOUBLE_FAULTS = [
    ("commit", Call.CREATE, Call.RELEASE),
    ("commit", Call.MAP, Call.UNMAP),
    ("commit", Call.MAP, Call.RELEASE),
    ("commit", Call.SET_ACCESS, Call.UNMAP),
    ("commit", Call.ZERO, Call.UNMAP),
    ("decommit", Call.UNMAP, Call.MAP),
    ("decommit", Call.UNMAP, Call.SET_ACCESS),
    ("close", Call.UNMAP, Call.MAP),
    ("alias", Call.MAP, Call.UNMAP),
    ("alias read-only", Call.SET_ACCESS, Call.UNMAP),
]


@pytest.mark.parametrize("times", [1, 1 << 40], ids=["once", "always"])
@pytest.mark.parametrize(("operation", "call", "undo"), MIXED_DOUBLE_FAULTS)
def test_undo_may_fail_too_with_several_sizes(
    make_mixed: Callable[[], MixedRig], operation: str, call: Call, undo: Call, times: int
) -> None:
    found_stuck = 0
    for nth, nth_undo in itertools.product(range(1, 1 + calls_of(make_mixed(), operation).count(call)), range(1, 5)):
        rig = make_mixed()
        before = rig.state()
        with (
            fail(rig.driver, call, nth),
            fail(rig.driver, undo, nth_undo, 998, times) as calls,
            pytest.raises(DriverError) as caught,
        ):
            rig.do(operation)
        rig.check()
        assert_books_and_memory_agree(rig)
        assert_others_untouched(rig, before)
        changed = changed_places(before, tables(rig))
        has_failed_twice = any(made.code == 998 for made in calls)
        if call is Call.ZERO:  # taking away is what fails: all of it stays, out of service
            if has_failed_twice:
                assert (caught.value.call, rig.space.num_ahead, len(changed)) == (undo.symbol, 21, 21)
        elif caught.value.call == Call.RELEASE.symbol:  # it failed where room was to be made, before the other one
            assert (undo, changed) == (Call.RELEASE, [])
        else:
            assert (caught.value.call, caught.value.name) == (call.symbol, rig.driver.explain(call, BROKEN)[0])
            assert num_stuck(caught.value) == len(changed)
        found_stuck += len(changed)
        # Whatever is left, trying again works, and shows nothing of another owner.
        if operation == "commit":
            rig.do(operation)
            rig.check_done(operation)
        for space in (rig.space, rig.other):
            space.decommit(ranges((0, rig.num_places)), forget_content=False)
        assert (rig.space.num_mapped, rig.other.num_mapped) == (0, 0)
        rig.check()
        rig.space.commit(ranges((0, rig.num_places)), content=MINE)
        assert set(rig.values(rig.space).values()) <= {0, 13, 18, 19}
    assert found_stuck > 0 or undo is Call.RELEASE


def test_failed_decommit_leaves_out_of_service_what_was(make_mixed: Callable[[], MixedRig]) -> None:
    for nth in range(1, 4):
        rig = make_mixed()
        rig.space.withdraw(ranges((9, 1), (26, 2)))
        before = rig.state()
        assert rig.space.num_ahead == 3
        with fail(rig.driver, Call.UNMAP, nth), pytest.raises(DriverError):
            rig.do("decommit")
        assert rig.state() == before
        assert rig.space.num_ahead == 3


def test_zeroing_that_fails_may_be_tried_again_by_another_owner(make_mixed: Callable[[], MixedRig]) -> None:
    for nth in (1, 2):
        rig = make_mixed()
        with fail(rig.driver, Call.ZERO, nth), pytest.raises(DriverError, match="cuMemsetD8Async"):
            rig.do("commit")
        assert rig.values(rig.space) == {3: 13, 8: 18, 9: 19} | {24 + place: 100 + place for place in range(8)}
        rig.other.commit(ranges((12, 20)), content=THEIRS)
        # What was zeroed for MINE is nobody's by now; THEIRS finds zeros as well.
        assert set(rig.values(rig.other).values()) <= {0} | {100 + place for place in range(12)}
