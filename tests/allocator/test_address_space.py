"""AddressSpace: commit, decommit, alias; what memory holds when it changes hands; ranges; refcounts; ends of life."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tests.helpers.faults import fail, record
from tests.helpers.memory import access_at, fill_place, place_value, ranges
from vtensor.allocator import native
from vtensor.allocator.address_space import AddressSpace, Shortage
from vtensor.allocator.driver import Call, Driver
from vtensor.allocator.page_pool import PagePool
from vtensor.errors import ClosedError, DriverError, ReservationError, VTensorError

MakePool = Callable[..., PagePool]
MakeSpace = Callable[..., AddressSpace]
MINE, THEIRS = 2, 3
HOST_ONLY = pytest.mark.parametrize("device", ["cpu"], indirect=True)


def mapped(space: AddressSpace) -> list[int]:
    """Places that the table says hold something."""
    return np.flatnonzero(space.arrays.table[: space.num_places]).tolist()  # type: ignore[no-any-return]


# -- commit and decommit ------------------------------------------------------------------------------------------


def test_commit_maps_what_is_missing(make_space: MakeSpace) -> None:
    space = make_space()
    assert space.commit(ranges((2, 3)), content=MINE) == 3
    assert space.commit(ranges((0, 8)), content=MINE) == 5
    assert space.commit(ranges((0, 8)), content=MINE) == 0
    assert mapped(space) == list(range(8))
    assert (space.num_mapped, space.committed_bytes) == (8, 8 * space.page_group_bytes)
    assert space.count_missing(ranges((6, 4), (12, 1))) == 3


def test_committed_bytes_are_there_and_stay(make_space: MakeSpace) -> None:
    space = make_space()
    space.commit(ranges((1, 2), (5, 1)), content=MINE)
    for place in (1, 2, 5):
        assert place_value(space, place) == 0
        fill_place(space, place, place)
    space.commit(ranges((0, 16)), content=MINE)
    assert [place_value(space, place) for place in range(7)] == [0, 1, 2, 0, 0, 5, 0]
    space.decommit(ranges((0, 1), (3, 2), (6, 10)), forget_content=False)
    assert mapped(space) == [1, 2, 5]
    assert [place_value(space, place) for place in (1, 2, 5)] == [1, 2, 5]


def test_decommit_takes_what_is_there(make_space: MakeSpace) -> None:
    space = make_space()
    space.commit(ranges((0, 3), (6, 3)), content=MINE)
    assert space.decommit(ranges((2, 5)), forget_content=False) == 2
    assert space.decommit(ranges((2, 5)), forget_content=False) == 0
    assert mapped(space) == [0, 1, 7, 8]


def test_runs_share_their_calls(make_space: MakeSpace) -> None:
    space = make_space()
    with record(space.pool.driver) as calls:
        space.commit(ranges((0, 5), (8, 3)), content=MINE)
    assert [calls.count(call) for call in (Call.CREATE, Call.MAP, Call.SET_ACCESS)] == [8, 8, 2]
    with record(space.pool.driver) as calls:
        space.decommit(ranges((0, 16)), forget_content=False)
    assert [made.call for made in calls] == [Call.UNMAP] * 2


@pytest.mark.parametrize("mark", [{}, {"content": 0}, {"content": -1}])
def test_data_has_an_owner(make_space: MakeSpace, mark: dict[str, int]) -> None:
    # What is written under no mark would pass for zeros, and be shown to whoever comes next.
    space = make_space()
    with record(space.pool.driver) as calls, pytest.raises(ValueError, match="new_content"):
        space.commit(ranges((0, 1)), **mark)
    assert (len(calls), space.num_mapped) == (0, 0)


@pytest.mark.parametrize("rows", [(), ((0, 0),), ((3, 0), (16, 0))], ids=str)
def test_nothing_asked_for_is_no_driver_call(make_space: MakeSpace, rows: tuple[tuple[int, int], ...]) -> None:
    space, other = make_space(), make_space()
    other.commit(ranges((0, 1)), content=MINE)
    with record(space.pool.driver) as calls:
        assert space.commit(ranges(*rows), content=MINE) == 0
        assert space.decommit(ranges(*rows), forget_content=True) == 0
        for first, _ in rows:
            space.alias(first, other, 0, 0)
        assert space.count_missing(ranges(*rows)) == 0
    assert len(calls) == 0
    assert space.num_mapped == 0


BAD_RANGES = [
    (-1, 1),
    (0, -1),
    (0, 17),
    (16, 1),
    (15, 2),
    (2**63 - 1, 1),
    (1, 2**63 - 1),
    (2**62, 2**62),
    (-(2**63), 1),
]


@pytest.mark.parametrize("row", BAD_RANGES)
def test_range_outside(make_space: MakeSpace, row: tuple[int, int]) -> None:
    space, other = make_space(), make_space()
    space.commit(ranges((0, 2)), content=MINE)
    with record(space.pool.driver) as calls:
        for do in (
            lambda: space.commit(ranges((4, 2), row), content=MINE),
            lambda: space.decommit(ranges((0, 2), row), forget_content=True),
            lambda: other.alias(row[0], space, 0, row[1]),
            lambda: other.alias(0, space, *row),
        ):
            with pytest.raises(ValueError, match="outside the 16 places"):
                do()
    assert len(calls) == 0
    assert mapped(space) == [0, 1]


def test_size_is_rounded_up(pool: PagePool) -> None:
    size = pool.page_group_bytes
    assert [AddressSpace(pool, asked).size_bytes for asked in (1, size, size + 1, 6912)] == [
        size, size, 2 * size, -(-6912 // size) * size
    ]  # fmt: skip


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_no_size(pool: PagePool, size_bytes: int) -> None:
    with pytest.raises(ValueError, match="positive multiple"):
        AddressSpace(pool, size_bytes)


@pytest.mark.parametrize("size_bytes", [1 << 47, 1 << 62, (1 << 64) + 1, 1 << 80])
def test_more_than_the_address_space(pool: PagePool, size_bytes: int) -> None:
    with pytest.raises(ReservationError):
        AddressSpace(pool, size_bytes)


@pytest.mark.parametrize("nth", [1, 2])
def test_table_without_memory_gives_the_reservation_back(
    nth: int, pool: PagePool, make_space: MakeSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = native.sparse_array, []

    def sparse_array(length: int, dtype: np.dtype[np.generic]) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        asked.append(length)
        if len(asked) == nth:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(length, dtype)

    monkeypatch.setattr(native, "sparse_array", sparse_array)
    with (
        record(pool.driver) as calls,
        pytest.raises(ReservationError, match=r"table of 16 places.*Cannot allocate memory.*overcommit") as caught,
    ):
        make_space()
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value.__cause__, OSError)
    assert asked == [16] * nth
    assert [made.call for made in calls] == [Call.RESERVE, Call.FREE]
    monkeypatch.undo()
    assert len(list(pool._spaces)) == 0
    assert make_space().commit(ranges((0, 16)), content=MINE) == 16


def test_interrupted_making_gives_the_reservation_back(
    pool: PagePool, make_space: MakeSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def adopt(space: AddressSpace) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "adopt", adopt)
    with record(pool.driver) as calls, pytest.raises(KeyboardInterrupt):
        make_space()
    assert [made.call for made in calls] == [Call.RESERVE, Call.FREE]


def test_last_places_of_terabytes(make_pool: MakePool) -> None:
    pool = make_pool(16, page_group_bytes=2 << 20)
    space = AddressSpace(pool, 12 << 40)
    last = space.num_places - 1
    space.commit(ranges((0, 1), (last // 2, 1), (last, 1)), content=MINE)
    for place in (0, last // 2, last):
        fill_place(space, place, 7)
        assert place_value(space, place) == 7
    assert space.mapped_page_groups().tolist() == [0, 1, 2]


# -- what memory holds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("heir", [MINE, THEIRS])
@pytest.mark.parametrize("in_other_space", [False, True])
def test_memory_is_zeroed_when_it_changes_hands(
    make_space: MakeSpace, forget: bool, heir: int, in_other_space: bool
) -> None:
    space, other = make_space(), make_space()
    space.commit(ranges((0, 4)), content=MINE)
    for place in range(4):
        fill_place(space, place, 40 + place)
    space.decommit(ranges((0, 4)), forget_content=forget)
    target = other if in_other_space else space
    target.commit(ranges((8, 4)), content=heir)
    kept = heir == MINE and not forget
    assert [place_value(target, place) for place in range(8, 12)] == ([40, 41, 42, 43] if kept else [0] * 4)


def test_zeroed_memory_belongs_to_the_heir(make_space: MakeSpace) -> None:
    space = make_space()
    for mark, number, expected in ((MINE, 1, 0), (THEIRS, 2, 0), (THEIRS, 3, 2), (MINE, 4, 0)):
        space.commit(ranges((0, 2)), content=mark)
        assert [place_value(space, place) for place in (0, 1)] == [expected] * 2
        fill_place(space, 0, number)
        fill_place(space, 1, number)
        space.decommit(ranges((0, 2)), forget_content=False)


def test_forgotten_memory_is_zeroed_once(make_space: MakeSpace) -> None:
    space = make_space()
    space.commit(ranges((0, 1)), content=MINE)
    fill_place(space, 0, 9)
    space.decommit(ranges((0, 1)), forget_content=True)
    space.commit(ranges((0, 1)), content=MINE)
    fill_place(space, 0, 8)
    space.decommit(ranges((0, 1)), forget_content=False)
    space.commit(ranges((0, 1)), content=MINE)
    assert place_value(space, 0) == 8


def test_memory_that_was_trimmed_comes_back_as_zeros(make_space: MakeSpace) -> None:
    space = make_space()
    space.commit(ranges((0, 2)), content=MINE)
    fill_place(space, 0, 9)
    fill_place(space, 1, 9)
    space.decommit(ranges((0, 2)), forget_content=False)
    space.pool.trim()
    space.commit(ranges((0, 2)), content=MINE)
    assert [place_value(space, place) for place in (0, 1)] == [0, 0]


@pytest.mark.parametrize("nth", [1, 2])
def test_zeroing_that_fails_is_undone(make_space: MakeSpace, nth: int) -> None:
    space, other = make_space(), make_space()
    other.commit(ranges((0, 4)), content=THEIRS)
    for place in range(4):
        fill_place(other, place, 66)
    other.decommit(ranges((0, 3)), forget_content=False)
    with fail(space.pool.driver, Call.ZERO, nth), pytest.raises(DriverError, match="cuMemsetD8Async"):
        space.commit(ranges((0, 1), (2, 2)), content=MINE)
    assert space.num_mapped == 0
    assert place_value(other, 3) == 66
    space.check_integrity()
    space.commit(ranges((0, 1), (2, 2)), content=MINE)
    assert [place_value(space, place) for place in (0, 2, 3)] == [0, 0, 0]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, MemoryError])
def test_interrupt_shows_nobody_elses_data(
    interrupt: type[BaseException], make_space: MakeSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, other = make_space(), make_space()
    space.commit(ranges((1, 1)), content=MINE)
    fill_place(space, 1, 11)
    other.commit(ranges((0, 4)), content=THEIRS)
    for place in range(4):
        fill_place(other, place, 66)
    other.decommit(ranges((0, 3)), forget_content=False)
    driver_type, log = type(space.pool.driver), []
    real_finish = driver_type.finish

    def finish(self: Driver, stream: int) -> None:
        log.append("finish")
        assert space.num_mapped == 4, "the device may still be writing to what is taken away"
        real_finish(self, stream)

    def on_mapped(outcome: Any) -> None:
        log.append("on_mapped")
        raise interrupt

    monkeypatch.setattr(driver_type, "finish", finish)
    with pytest.raises(interrupt):
        space.commit(ranges((0, 4)), content=MINE, on_mapped=on_mapped)
    assert mapped(space) == [1]
    assert space.num_mapped == 1
    assert (place_value(space, 1), place_value(other, 3)) == (11, 66)
    assert log[:2] == ["on_mapped", "finish"]
    assert log[2:] in ([], ["finish"])  # the mapper's stream as well, where the device has a mapper
    space.check_integrity()
    monkeypatch.undo()
    for heir in (MINE, THEIRS):  # nor does the interrupted owner, or the former one, find them unzeroed later
        space.commit(ranges((0, 4)), content=heir)
        assert [place_value(space, place) for place in range(4)] == [0, 11, 0, 0]
        space.decommit(ranges((0, 1), (2, 2)), forget_content=False)


def test_on_mapped_is_called_once_if_anything_was_mapped(make_space: MakeSpace) -> None:
    space, calls = make_space(), []
    for span, expected in (((0, 2), [2]), ((0, 2), []), ((0, 6), [6]), ((1, 1), [])):
        calls.clear()
        space.commit(ranges(span), content=MINE, on_mapped=lambda outcome: calls.append(space.num_mapped))
        assert calls == expected


# -- alias --------------------------------------------------------------------------------------------------------


def test_alias_counts_once(pool: PagePool, make_space: MakeSpace) -> None:
    space, other = make_space(), make_space()
    space.commit(ranges((0, 3)), content=MINE)
    other.alias(4, space, 1, 2)
    space.alias(8, space, 0, 1)
    assert pool.stats().mapped_page_groups == 3
    assert (space.num_mapped, other.num_mapped) == (4, 2)
    assert other.committed_bytes == 2 * pool.page_group_bytes
    groups = space.mapped_page_groups().tolist()
    assert other.mapped_page_groups().tolist() == groups[1:3]
    assert groups[3] == groups[0]


def test_alias_shows_the_same_bytes(make_space: MakeSpace) -> None:
    space, other = make_space(), make_space()
    space.commit(ranges((0, 3)), content=MINE)
    for place in range(3):
        fill_place(space, place, 10 + place)
    other.alias(5, space, 0, 3)
    assert [place_value(other, place) for place in (5, 6, 7)] == [10, 11, 12]
    fill_place(other, 6, 99)
    assert place_value(space, 1) == 99


@pytest.mark.parametrize("first_to_go", [0, 1, 2])
def test_memory_lives_as_long_as_one_alias(pool: PagePool, make_space: MakeSpace, first_to_go: int) -> None:
    spaces = [make_space() for _ in range(3)]
    spaces[0].commit(ranges((0, 2)), content=MINE)
    fill_place(spaces[0], 1, 21)
    spaces[1].alias(0, spaces[0], 0, 2)
    spaces[2].alias(0, spaces[1], 0, 2)
    order = [spaces[(first_to_go + step) % 3] for step in range(3)]
    for gone, left in itertools.pairwise(order):
        gone.decommit(ranges((0, 2)), forget_content=False)
        assert (pool.stats().mapped_page_groups, pool.stats().free_page_groups) == (2, 0)
        assert place_value(left, 1) == 21
        pool.check_integrity()
    order[-1].close()
    assert (pool.stats().mapped_page_groups, pool.stats().free_page_groups) == (0, 2)


def test_aliases_in_one_run_go_together(pool: PagePool, make_space: MakeSpace) -> None:
    space = make_space()
    space.commit(ranges((0, 1)), content=MINE)
    for place in (1, 2, 3):
        space.alias(place, space, 0, 1)
    fill_place(space, 2, 5)
    assert [place_value(space, place) for place in range(4)] == [5] * 4
    assert space.decommit(ranges((0, 4)), forget_content=False) == 4
    assert pool.stats().free_page_groups == 1


def test_forgetting_one_alias_keeps_the_others_bytes(make_space: MakeSpace) -> None:
    space, other = make_space(), make_space()
    space.commit(ranges((0, 1)), content=MINE)
    fill_place(space, 0, 5)
    other.alias(0, space, 0, 1)
    other.decommit(ranges((0, 1)), forget_content=True)
    assert place_value(space, 0) == 5
    space.decommit(ranges((0, 1)), forget_content=False)
    space.commit(ranges((0, 1)), content=MINE)
    assert place_value(space, 0) == 0


def test_read_only_alias_reads(make_space: MakeSpace) -> None:
    space, other = make_space(), make_space()
    space.commit(ranges((0, 2)), content=MINE)
    fill_place(space, 1, 5)
    other.alias(3, space, 0, 2, writable=False)
    assert place_value(other, 4) == 5
    fill_place(space, 1, 6)
    assert place_value(other, 4) == 6
    if space.pool.driver.kind == "host":
        size = space.page_group_bytes
        assert access_at(other.base + 4 * size) == "r--s"
        assert access_at(space.base + size) == "rw-s"


@HOST_ONLY
def test_place_of_a_read_only_alias_becomes_writable_with_the_next_commit(make_space: MakeSpace) -> None:
    space, other = make_space(), make_space()
    space.commit(ranges((0, 1)), content=MINE)
    other.alias(0, space, 0, 1, writable=False)
    other.decommit(ranges((0, 1)), forget_content=False)
    other.commit(ranges((0, 1)), content=MINE)
    other.commit(ranges((2, 1)), content=MINE)
    assert access_at(other.base) == "rw-s"
    with fail(other.pool.driver, Call.UNMAP, 2), pytest.raises(DriverError):  # undone, it is what it was last
        other.decommit(ranges((0, 3)), forget_content=False)
    assert access_at(other.base) == "rw-s"
    fill_place(other, 0, 3)


def test_bad_aliases(make_pool: MakePool, make_space: MakeSpace) -> None:
    space, other = make_space(), make_space()
    stranger = AddressSpace(make_pool(4), 4 * space.page_group_bytes)
    for one in (space, stranger):
        one.commit(ranges((0, 2)), content=MINE)
    other.commit(ranges((5, 1)), content=MINE)
    with record(space.pool.driver) as calls:
        for match, do in (
            ("one pool", lambda: other.alias(0, stranger, 0, 1)),
            ("4..6 already hold", lambda: other.alias(4, space, 0, 2)),
            ("1..3 of the source are not all committed", lambda: other.alias(0, space, 1, 2)),
            ("0..1 already hold", lambda: space.alias(0, space, 1, 1)),
        ):
            with pytest.raises(ValueError, match=match):
                do()
    assert len(calls) == 0
    other.close()
    with pytest.raises(ClosedError):
        space.alias(8, other, 0, 1)
    with pytest.raises(ClosedError):
        other.alias(8, space, 0, 1)


@HOST_ONLY
def test_alias_waits_for_its_source(make_space: MakeSpace) -> None:
    # Otherwise a page group could be freed between the look at the source's table and the alias.
    space, other = make_space(), make_space()
    space.commit(ranges((0, 1)), content=MINE)
    thread = threading.Thread(target=lambda: other.alias(0, space, 0, 1))
    with space._lock:
        thread.start()
        thread.join(0.2)
        was_waiting = thread.is_alive()
    thread.join(10)
    assert was_waiting
    assert mapped(other) == [0]


@HOST_ONLY
def test_aliases_in_both_directions_lock_in_one_order(make_space: MakeSpace) -> None:
    # Otherwise two threads could wait for each other for ever.
    order: list[str] = []

    class Lock:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            order.append(self.name)

        def __exit__(self, *error: object) -> None:
            order.append(f"-{self.name}")

    one, two = make_space(), make_space()
    for space, name in ((one, "one"), (two, "two")):
        space.commit(ranges((0, 1)), content=MINE)
        space._lock = Lock(name)  # type: ignore[assignment]
    one.alias(1, two, 0, 1)
    first, order[:] = order.copy(), []
    two.alias(1, one, 0, 1)
    taken = [[name for name in names if not name.startswith("-")][:2] for names in (order, first)]
    assert taken[0] == taken[1]
    assert sorted(taken[0]) == ["one", "two"]


# -- ends of life -------------------------------------------------------------------------------------------------


def test_grow_three_times_and_close(make_pool: MakePool) -> None:
    pool = make_pool(None)
    space = AddressSpace(pool, 64 * pool.page_group_bytes)
    for count in (4, 16, 64):
        space.commit(ranges((0, count)), content=MINE)
        assert space.num_mapped == count
    with record(pool.driver) as calls:
        space.close()
        space.close()
    counts = [calls.count(call) for call in (Call.UNMAP, Call.RELEASE, Call.FREE)]
    assert counts == [1, 64, 1]
    assert pool.stats().total_page_groups == 0


def test_use_after_close(pool: PagePool, make_space: MakeSpace) -> None:
    space = make_space()
    space.commit(ranges((0, 2)), content=MINE)
    space.close()
    for do in (
        lambda: space.commit(ranges((0, 1)), content=MINE),
        lambda: space.decommit(ranges((0, 1)), forget_content=False),
        lambda: space.alias(0, space, 1, 1),
    ):
        with pytest.raises(ClosedError, match="were given back"):
            do()
    assert (space.closed, space.num_mapped, pool.stats().mapped_page_groups) == (True, 0, 0)
    assert "closed" in repr(space)
    space.check_integrity()


def test_repr_says_what_matters(make_space: MakeSpace) -> None:
    space = make_space()
    space.commit(ranges((0, 1)), content=MINE)
    assert f"{space.base:#x}" in repr(space)
    assert space.pool.driver.device in repr(space)


def test_churn_near_the_limit(pool: PagePool, make_space: MakeSpace) -> None:
    random = np.random.default_rng(0)
    spaces = [make_space(24), make_space(24)]
    held: list[dict[int, int]] = [{}, {}]
    missing: list[int] = []
    expected: list[int] = []
    for step in range(400):
        number = int(random.integers(2))
        space, contents = spaces[number], held[number]
        first = int(random.integers(24))
        span = ranges((first, int(random.integers(1, min(12, 25 - first)))))
        places = range(first, first + int(span[0, 1]))
        if random.random() < 0.6:
            try:
                space.commit(span, content=MINE + number)
            except Shortage as shortage:
                missing.append(shortage.page_groups)
                new = [place for place in places if place not in contents]
                expected.append(len(new) - (16 - len(held[0]) - len(held[1])))
            else:
                for place in places:
                    if place not in contents:
                        contents[place] = 1 + step % 250
                        fill_place(space, place, contents[place])
        else:
            space.decommit(span, forget_content=bool(random.integers(2)))
            for place in places:
                contents.pop(place, None)
        assert mapped(space) == sorted(contents)
        for place, number_there in contents.items():
            assert place_value(space, place) == number_there
    assert missing == expected
    assert 20 < len(missing) < 300


# -- zeros where nothing is ---------------------------------------------------------------------------------------


def test_zeros_are_shown_where_nothing_is(make_space: MakeSpace, pool: PagePool) -> None:
    space, other = make_space(), make_space()
    space.commit(ranges((4, 2)), content=MINE)
    for place in (4, 5):
        fill_place(space, place, 9)
    before = pool.stats()
    assert space.show_zeros(ranges((2, 6), (10, 1))) == 5
    assert space.show_zeros(ranges((0, 16))) == 9
    assert other.show_zeros(ranges((0, 2))) == 2
    after = pool.stats()
    assert (before.mapped_page_groups, after.mapped_page_groups, pool.num_available) == (2, 2, before_available(before))
    assert (space.num_mapped, space.num_shown, space.committed_bytes) == (16, 14, 2 * space.page_group_bytes)
    assert [place_value(space, place) for place in range(16)] == [9 if place in (4, 5) else 0 for place in range(16)]
    assert space.count_missing(ranges((0, 16))) == 14
    assert space.count_missing(ranges((0, 16)), with_shown=False) == 0
    assert space.held_runs().tolist() == [[4, 2]]
    assert space.shown_ranges(ranges((3, 4))).tolist() == [[3, 1], [6, 1]]
    pool.check_integrity()
    with pytest.raises(ValueError, match="shows zeros"):
        space.commit(ranges((3, 2)), content=MINE)
    assert space.decommit(space.shown_ranges(ranges((0, 4))), forget_content=False) == 0
    assert space.commit(ranges((0, 4)), content=MINE) == 4
    assert (space.num_shown, [place_value(space, place) for place in range(8)]) == (10, [0, 0, 0, 0, 9, 9, 0, 0])
    pool.check_integrity()


def before_available(stats: Any) -> int:
    return int(stats.capacity_page_groups - stats.mapped_page_groups)


def test_zeros_come_on_top_of_the_capacity_and_go_with_trim(make_pool: MakePool) -> None:
    pool = make_pool(4, size_classes=1)
    full, space = (AddressSpace(pool, 8 * pool.page_group_bytes) for _ in range(2))
    full.commit(ranges((0, 4)), content=MINE)
    assert space.show_zeros(ranges((0, 8))) == 8
    assert [place_value(space, place) for place in range(8)] == [0] * 8
    assert (pool.num_available, pool.stats().total_page_groups, pool.stats().capacity_page_groups) == (0, 4, 4)
    assert sum(pool.stats().num_handles.values()) == 5
    assert pool.trim() == 0
    pool.check_integrity()
    space.close()
    assert pool.trim() == 0  # what comes on top is not counted
    assert sum(pool.stats().num_handles.values()) == 4
    with pytest.raises(Shortage):
        full.commit(ranges((0, 5)), content=MINE)


def test_a_pool_whose_zeros_are_shown_is_not_closed(make_pool: MakePool) -> None:
    pool = make_pool(4)
    space = AddressSpace(pool, 8 * pool.page_group_bytes)
    space.show_zeros(ranges((2, 3)))
    with pytest.raises(VTensorError, match="still has 1 mapped page groups"):
        pool.close()
    assert [place_value(space, place) for place in (2, 4)] == [0, 0]
    assert space.commit(ranges((6, 2)), content=MINE) == 2
    space.close()
    pool.close()


@pytest.mark.parametrize("size_classes", [1, 3])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_what_comes_into_readable_holes_is_zero_before(make_pool: MakePool, size_classes: int) -> None:
    pool = make_pool(16, size_classes=size_classes)
    size = pool.page_group_bytes
    space, dirty = AddressSpace(pool, 16 * size, readable_holes=True), AddressSpace(pool, 16 * size)
    assert [place_value(space, place) for place in range(16)] == [0] * 16
    dirty.commit(ranges((0, 16)), content=THEIRS)
    for place in range(16):
        fill_place(dirty, place, 66)
    dirty.decommit(ranges((0, 16)), forget_content=False)
    with record(pool.driver) as calls:
        assert space.commit(ranges((3, 9)), content=MINE) == 9
    assert calls.count(Call.ZERO) == 0
    assert calls.count(Call.RELEASE) == calls.count(Call.CREATE) > 0
    assert [place_value(space, place) for place in range(16)] == [0] * 16
    for place in range(3, 12):
        fill_place(space, place, 5)
    assert space.decommit(ranges((0, 12)), forget_content=False) == 9
    assert [place_value(space, place) for place in range(16)] == [0] * 16
    pool.check_integrity()


@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("call", [Call.RELEASE, Call.CREATE, Call.MAP, Call.SET_ACCESS])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_commit_into_readable_holes_that_fails(make_pool: MakePool, call: Call, nth: int) -> None:
    pool = make_pool(16, size_classes=1)
    space, dirty = (AddressSpace(pool, 16 * pool.page_group_bytes, readable_holes=True) for _ in range(2))
    dirty.commit(ranges((0, 6)), content=THEIRS)
    for place in range(6):
        fill_place(dirty, place, 66)
    dirty.decommit(ranges((0, 6)), forget_content=False)
    with fail(pool.driver, call, nth) as calls, suppress(DriverError):
        space.commit(ranges((0, 2), (4, 2)), content=MINE)
        assert calls.count(call) < nth
    assert space.num_mapped in (0, 4)
    assert [place_value(space, place) for place in range(16)] == [0] * 16
    pool.check_integrity()
    space.commit(ranges((0, 2), (4, 2)), content=MINE)
    assert [place_value(space, place) for place in range(16)] == [0] * 16
    pool.check_integrity()
