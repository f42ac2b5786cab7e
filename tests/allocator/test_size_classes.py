"""Handles of several sizes: which are taken, what goes whole, how they are split and merged; counts stay exact.

Below, ``[4, 1]`` are handles of four places and of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.faults import BROKEN, Calls, fail, record
from tests.helpers.memory import access_at, fill_place, handles, place_value, ranges, rows
from vtensor.allocator import words
from vtensor.allocator.address_space import AddressSpace, Shortage
from vtensor.allocator.driver import Call, get_driver
from vtensor.allocator.driver.base import OUT_OF_MEMORY
from vtensor.allocator.page_pool import PagePool
from vtensor.errors import DriverError, OutOfPagesError, VTensorError

MakePool = Callable[..., PagePool]
MINE, THEIRS = 2, 3
HOST_ONLY = pytest.mark.parametrize("device", ["cpu"], indirect=True)
FOUR = 4  # size classes: handles of 1, 2, 4 and 8 places


def sizes(space: AddressSpace) -> list[int]:
    """Places of each handle, in the order of their addresses."""
    return [size for _, size in handles(space)]


def commit_alone(space: AddressSpace, first: int, count: int, content: int = MINE) -> None:
    """Commit places with a handle each."""
    space.commit(rows((first, count), content=content, largest=0), content=content)


def fill_places(space: AddressSpace, places: range, number: int) -> None:
    for place in places:
        fill_place(space, place, number)


def values(space: AddressSpace, places: range) -> list[int]:
    return [place_value(space, place) for place in places]


def free_handles(pool: PagePool) -> list[int]:
    """How many handles of each class are free."""
    return pool.arrays.classes.reshape(-1, words.CLASS_WORDS)[:, words.NUM_FREE_HANDLES].tolist()  # type: ignore[no-any-return]


def made_sizes(calls: Calls, pool: PagePool) -> list[int]:
    """Page groups of each handle that was asked of the driver."""
    return [made.arguments[1] // pool.page_group_bytes for made in calls if made.call is Call.CREATE]


@pytest.fixture
def limit_device() -> Iterator[Callable[[PagePool, int], None]]:
    """Let the host have so many page groups of a pool's, its own included, and no more."""
    from vtensor.allocator.driver import host_native as native

    real = int(native.STATE[native.LIMIT_BYTES])

    def limit(pool: PagePool, num_page_groups: int) -> None:
        others = int(native.STATE[native.LIVE_BYTES]) - pool.stats().total_page_groups * pool.page_group_bytes
        native.STATE[native.LIMIT_BYTES] = others + num_page_groups * pool.page_group_bytes

    yield limit
    native.STATE[native.LIMIT_BYTES] = real


# -- which handles are taken --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size_classes", "count", "expected"),
    [
        (1, 5, [1, 1, 1, 1, 1]),
        (2, 5, [2, 2, 1]),
        (4, 1, [1]),
        (4, 7, [4, 2, 1]),
        (4, 8, [8]),
        (4, 23, [8, 8, 4, 2, 1]),
        (6, 23, [16, 4, 2, 1]),
        (6, 32, [32]),
    ],
)
def test_the_largest_that_fit(make_pool: MakePool, size_classes: int, count: int, expected: list[int]) -> None:
    pool = make_pool(32, size_classes=size_classes)
    space = AddressSpace(pool, 40 * pool.page_group_bytes)
    with record(pool.driver) as calls:
        assert space.commit(ranges((3, count)), content=MINE) == count
    assert sizes(space) == expected
    assert handles(space)[0][0] == 3
    assert made_sizes(calls, pool) == expected
    assert [calls.count(call) for call in (Call.MAP, Call.SET_ACCESS)] == [len(expected), 1]
    # Counts are in page groups of the smallest size, whatever lies below.
    stats = pool.stats()
    assert (stats.total_page_groups, stats.mapped_page_groups, stats.free_page_groups) == (count, count, 0)
    assert (space.num_mapped, pool.num_available) == (count, 32 - count)
    in_bytes = {size * pool.page_group_bytes: expected.count(size) for size in expected}
    assert stats.num_handles == in_bytes
    assert values(space, range(3, 3 + count)) == [0] * count
    with record(pool.driver) as calls:
        space.decommit(ranges((0, 40)), forget_content=False)
    assert [made.call for made in calls] == [Call.UNMAP]
    assert (pool.stats().free_page_groups, pool.stats().num_handles) == (count, in_bytes)


def test_gaps_are_filled_each_by_itself(make_pool: MakePool) -> None:
    pool = make_pool(64, size_classes=FOUR)
    space = AddressSpace(pool, 32 * pool.page_group_bytes)
    space.commit(ranges((3, 1), (12, 2)), content=MINE)
    fill_places(space, range(12, 14), 7)
    assert space.commit(ranges((0, 23)), content=MINE) == 20
    assert handles(space) == [(0, 2), (2, 1), (3, 1), (4, 8), (12, 2), (14, 8), (22, 1)]
    assert values(space, range(12, 15)) == [7, 7, 0]


def test_ranges_are_filled_each_by_itself_and_mapped_together(make_pool: MakePool) -> None:
    pool = make_pool(64, size_classes=FOUR)
    space = AddressSpace(pool, 32 * pool.page_group_bytes)
    with record(pool.driver) as calls:
        space.commit(ranges((0, 4), (4, 4), (8, 0), (8, 3)), content=MINE)
    assert handles(space) == [(0, 4), (4, 4), (8, 2), (10, 1)]
    assert calls.count(Call.SET_ACCESS) == 1


def test_a_range_bounds_its_handles(make_pool: MakePool) -> None:
    pool = make_pool(64, size_classes=FOUR)
    space = AddressSpace(pool, 64 * pool.page_group_bytes)
    spans = np.array([(0, 3, MINE, 0), (8, 9, MINE, 1), (24, 9, MINE, 2), (40, 9, MINE, 15)], np.int64)
    space.commit(spans, content=MINE)
    assert sizes(space) == [1, 1, 1, 2, 2, 2, 2, 1, 4, 4, 1, 8, 1]


def test_a_pool_bounds_its_handles(device: str) -> None:
    size = get_driver(device).granularity_bytes
    pool = PagePool(device, capacity_bytes=16 * size, page_group_bytes=size, max_size_class_bytes=4 * size)
    assert pool.max_size_class_bytes == 4 * size
    space = AddressSpace(pool, 16 * size)
    space.commit(rows((0, 9), content=MINE), content=MINE)
    assert sizes(space) == [4, 4, 1]
    space.close()
    pool.close()


def test_sizes_by_default(device: str) -> None:
    pool = PagePool(device, capacity_bytes=128 << 20)
    assert pool.max_size_class_bytes == 32 * pool.page_group_bytes
    space = AddressSpace(pool, 64 * pool.page_group_bytes)
    space.commit(ranges((0, 40)), content=MINE)
    assert sizes(space) == [32, 8]
    space.close()
    pool.close()


@pytest.mark.parametrize("factor", [0, -1, 3, 6, 1.5, 1 << 16, 1 << 40])
def test_bad_max_size_class(device: str, factor: float) -> None:
    size = get_driver(device).granularity_bytes
    value = int(factor * size)
    with pytest.raises(ValueError, match="times a power of two") as caught:
        PagePool(device, page_group_bytes=size, max_size_class_bytes=value)
    assert f"max_size_class_bytes={value!r}" in str(caught.value)
    assert f"{size:,}" in str(caught.value)


@pytest.mark.parametrize("value", [True, 2.0**21, "2MiB", 2048, float("inf")])
def test_max_size_class_of_a_bad_kind(device: str, value: object) -> None:
    with pytest.raises(ValueError, match="times a power of two") as caught:
        PagePool(device, max_size_class_bytes=value)  # type: ignore[arg-type]
    assert f"max_size_class_bytes={value!r}" in str(caught.value)


@HOST_ONLY
@pytest.mark.parametrize("num_page_groups", [1, 3, 64])
def test_classes_larger_than_the_pool(make_pool: MakePool, num_page_groups: int) -> None:
    pool = make_pool(num_page_groups, size_classes=16)
    space = AddressSpace(pool, 128 * pool.page_group_bytes)
    for count in range(1, num_page_groups + 1):
        space.commit(ranges((0, count)), content=MINE)
    space.decommit(ranges((0, 128)), forget_content=False)
    assert space.commit(ranges((0, num_page_groups)), content=MINE) == num_page_groups
    assert sizes(space) == [1 << bit for bit in reversed(range(16)) if num_page_groups >> bit & 1]
    with pytest.raises(Shortage):
        space.commit(ranges((64, 1)), content=MINE)


@HOST_ONLY
@pytest.mark.parametrize(("shift", "largest"), [(20, 128), (28, 64), (29, 4), (30, 1), (31, 1), (34, 1)])
def test_as_many_classes_as_can_be_numbered(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, shift: int, largest: int
) -> None:
    # Page groups have numbers of 31 bits: where there may be very many of them, there is no room for every class.
    driver = get_driver("cpu")
    real = driver.memory_info()
    monkeypatch.setattr(type(driver), "memory_info", lambda self: (real[0], (1 << shift) * 4096 - 4096))
    pool = make_pool(None, size_classes=8)
    assert pool.max_size_class_bytes == largest * pool.page_group_bytes
    space = AddressSpace(pool, 128 * pool.page_group_bytes)
    space.commit(ranges((0, 128)), content=MINE)
    assert sizes(space) == [largest] * (128 // largest)
    fill_places(space, range(128), 1)
    space.check_integrity()


# -- what is free is taken again ----------------------------------------------------------------------------------


def test_a_handle_is_made_once(make_pool: MakePool) -> None:
    pool = make_pool(64, size_classes=FOUR)
    space = AddressSpace(pool, 64 * pool.page_group_bytes)
    with record(pool.driver) as calls:
        for _ in range(5):
            space.commit(ranges((0, 15), (20, 7)), content=MINE)
            space.decommit(ranges((0, 64)), forget_content=False)
    assert made_sizes(calls, pool) == [8, 4, 2, 1, 4, 2, 1]
    assert calls.count(Call.RELEASE) == 0


def test_handles_of_other_sizes_are_kept_while_there_is_room(make_pool: MakePool) -> None:
    pool = make_pool(64, size_classes=FOUR)
    space = AddressSpace(pool, 64 * pool.page_group_bytes)
    space.commit(ranges((0, 8)), content=MINE)
    space.decommit(ranges((0, 8)), forget_content=False)
    with record(pool.driver) as calls:
        commit_alone(space, 0, 3)
        space.commit(ranges((8, 4)), content=MINE)
    assert calls.count(Call.RELEASE) == 0
    assert free_handles(pool) == [0, 0, 0, 1]
    assert pool.stats().total_page_groups == 15


def test_shortage_counts_page_groups_of_all_sizes(make_pool: MakePool) -> None:
    pool = make_pool(13, size_classes=FOUR)
    space = AddressSpace(pool, 64 * pool.page_group_bytes)
    space.commit(ranges((0, 7)), content=MINE)
    space.decommit(ranges((0, 4)), forget_content=False)
    before = pool.stats(), space.arrays.table[:64].tolist(), free_handles(pool)
    with record(pool.driver) as calls, pytest.raises(Shortage) as caught:
        space.commit(ranges((8, 9), (30, 5)), content=MINE)
    assert (caught.value.page_groups, len(calls)) == (4, 0)
    assert (pool.stats(), space.arrays.table[:64].tolist(), free_handles(pool)) == before
    assert space.commit(ranges((8, 9), (30, 1)), content=MINE) == 10
    assert (pool.num_available, pool.stats().total_page_groups) == (0, 13)


# -- split and merge ----------------------------------------------------------------------------------------------


@HOST_ONLY
@pytest.mark.parametrize("is_device_full", [False, True])
def test_small_handles_become_a_large_one(
    make_pool: MakePool, limit_device: Callable[[PagePool, int], None], is_device_full: bool
) -> None:
    pool = make_pool(None if is_device_full else 10, size_classes=FOUR)
    limit_device(pool, 10)  # more than the capacity, even for a moment, would be an error
    space = AddressSpace(pool, 64 * pool.page_group_bytes)
    commit_alone(space, 0, 10)
    fill_places(space, range(10), 9)
    space.decommit(ranges((0, 9)), forget_content=False)
    with record(pool.driver) as calls:
        assert space.commit(ranges((16, 8)), content=MINE) == 8
    assert (sizes(space), calls.count(Call.RELEASE), calls.count(Call.ZERO)) == ([1, 8], 8, 0)
    codes = [made.code for made in calls if made.code]
    assert codes == ([OUT_OF_MEMORY] if is_device_full else [])
    assert values(space, range(16, 24)) == [0] * 8
    assert (place_value(space, 9), pool.num_available > 0, free_handles(pool)) == (9, True, [1, 0, 0, 0])
    assert pool.driver.live_bytes == 10 * pool.page_group_bytes  # type: ignore[attr-defined]
    space.check_integrity()


@HOST_ONLY
@pytest.mark.parametrize("is_device_full", [False, True])
def test_a_large_handle_becomes_small_ones(
    make_pool: MakePool, limit_device: Callable[[PagePool, int], None], is_device_full: bool
) -> None:
    pool = make_pool(None if is_device_full else 18, size_classes=FOUR)
    limit_device(pool, 18)
    space = AddressSpace(pool, 64 * pool.page_group_bytes)
    space.commit(ranges((0, 18)), content=MINE)
    fill_places(space, range(18), 9)
    space.decommit(ranges((0, 16)), forget_content=False)
    with record(pool.driver) as calls:
        commit_alone(space, 32, 3)
    assert (sizes(space), calls.count(Call.RELEASE)) == ([2, 1, 1, 1], 1)
    assert made_sizes(calls, pool) == [1] * (4 if is_device_full else 3)
    assert values(space, range(32, 35)) == [0] * 3
    assert (free_handles(pool), pool.stats().total_page_groups) == ([0, 0, 0, 1], 13)
    commit_alone(space, 40, 13)
    assert (pool.stats().total_page_groups, free_handles(pool)) == (18, [0, 0, 0, 0])
    assert values(space, range(16, 18)) == [9, 9]
    space.check_integrity()


def test_room_is_made_with_the_largest_that_are_not_too_large(make_pool: MakePool) -> None:
    pool = make_pool(16, size_classes=FOUR)
    space = AddressSpace(pool, 64 * pool.page_group_bytes)
    space.commit(ranges((0, 8), (10, 2), (14, 2), (18, 1), (20, 1)), content=MINE)
    space.decommit(ranges((0, 32)), forget_content=False)
    # Handles that are free before, and after 4 more places: 2 are missing at first, then 4, and 4 again.
    for first, before, after in ((0, [2, 2, 0, 1], [2, 1, 0, 1]), (8, [2, 1, 0, 1], [0, 0, 0, 1]), (16, None, [0] * 4)):
        assert before is None or free_handles(pool) == before
        with record(pool.driver) as calls:
            space.commit(ranges((first, 4)), content=MINE)
        assert made_sizes(calls, pool) == [4]
        assert free_handles(pool) == after
    assert (pool.stats().total_page_groups, pool.num_available) == (12, 4)


@HOST_ONLY
@pytest.mark.parametrize("num_more", range(8))
@pytest.mark.parametrize("largest", [0, 1, 15])
def test_shortage_of_the_device_is_exact(
    make_pool: MakePool, limit_device: Callable[[PagePool, int], None], num_more: int, largest: int
) -> None:
    pool = make_pool(None, size_classes=FOUR)
    space = AddressSpace(pool, 64 * pool.page_group_bytes)
    space.commit(ranges((0, 8), (8, 2), (10, 1), (12, 4)), content=MINE)
    fill_places(space, range(12, 16), 5)
    space.decommit(ranges((0, 8), (10, 1)), forget_content=False)
    assert (free_handles(pool), pool.stats().total_page_groups) == ([1, 0, 0, 1], 15)
    limit_device(pool, 15 + num_more)
    before = space.arrays.table[:64].tolist()
    can_be_had = 9 + num_more
    for wanted in (can_be_had + 1, 24):
        with record(pool.driver) as calls, pytest.raises(Shortage) as caught:
            space.commit(rows((0, 8), (32, wanted - 8), content=MINE, largest=largest), content=MINE)
        assert caught.value.page_groups == wanted - can_be_had
        assert calls.count(Call.MAP) == 0
        assert space.arrays.table[:64].tolist() == before
        stats = pool.stats()
        assert stats.mapped_page_groups == 6
        assert pool.driver.live_bytes == stats.total_page_groups * pool.page_group_bytes  # type: ignore[attr-defined]
        space.check_integrity()
    spans = rows((0, 8), (32, can_be_had - 8), content=MINE, largest=largest)
    assert space.commit(spans, content=MINE) == can_be_had
    assert set(values(space, range(8))) == {0}
    assert values(space, range(12, 16)) == [5] * 4


def test_where_only_small_handles_can_be_had(make_pool: MakePool) -> None:
    pool = make_pool(64, size_classes=FOUR)
    space = AddressSpace(pool, 64 * pool.page_group_bytes)
    with fail(pool.driver, Call.CREATE, 1, OUT_OF_MEMORY, times=2) as calls:
        assert space.commit(ranges((0, 9)), content=MINE) == 9
    assert made_sizes(calls, pool) == [8, 4, 2, 2, 2, 2, 1]
    assert sizes(space) == [2, 2, 2, 2, 1]
    with fail(pool.driver, Call.CREATE, 1, OUT_OF_MEMORY, times=4) as calls, pytest.raises(Shortage) as caught:
        space.commit(ranges((16, 9)), content=MINE)
    assert (made_sizes(calls, pool), caught.value.page_groups) == ([8, 4, 2, 1], 9)
    # Each commit begins anew with the largest.
    space.commit(ranges((16, 9)), content=MINE)
    assert sizes(space) == [2, 2, 2, 2, 1, 8, 1]


@HOST_ONLY
def test_where_small_handles_run_out(make_pool: MakePool, limit_device: Callable[[PagePool, int], None]) -> None:
    # The first of 8 can be had, then nothing above 1, and of those two.
    pool = make_pool(64, size_classes=FOUR)
    space = AddressSpace(pool, 64 * pool.page_group_bytes)
    limit_device(pool, 10)
    with fail(pool.driver, Call.CREATE, 2, OUT_OF_MEMORY, times=2) as calls, pytest.raises(Shortage) as caught:
        space.commit(ranges((0, 15)), content=MINE)
    assert (made_sizes(calls, pool), caught.value.page_groups) == ([8, 4, 2, 1, 1, 1], 5)
    assert (calls.count(Call.RELEASE), pool.stats().total_page_groups, space.num_mapped) == (3, 0, 0)


@pytest.mark.parametrize("size_classes", [1, FOUR, 6])
@pytest.mark.parametrize(("first", "then"), [(0, 15), (15, 0), (15, 15), (1, 2), (2, 1)])
def test_60_percent_then_70_percent(make_pool: MakePool, size_classes: int, first: int, then: int) -> None:
    pool = make_pool(100, size_classes=size_classes)
    space = AddressSpace(pool, 100 * pool.page_group_bytes)
    space.commit(rows((0, 60), content=MINE, largest=first), content=MINE)
    space.close()
    assert pool.stats().free_page_groups == 60
    space = AddressSpace(pool, 100 * pool.page_group_bytes)
    assert space.commit(rows((30, 70), content=THEIRS, largest=then), content=THEIRS) == 70
    assert values(space, range(30, 100, 7)) == [0] * 10
    assert pool.stats().total_page_groups <= 100


def test_churn_near_the_limit(make_pool: MakePool, device: str) -> None:
    # A thousand random commits: a shortage is the only answer but success, and it is exact.
    pool = make_pool(40, size_classes=FOUR)
    random = np.random.default_rng(1)
    spaces = [AddressSpace(pool, 48 * pool.page_group_bytes) for _ in range(2)]
    num_shortages = 0
    for _ in range(1000):
        number = int(random.integers(2))
        space = spaces[number]
        first = int(random.integers(48))
        span = rows(
            (first, int(random.integers(1, 49 - first))), content=MINE + number, largest=int(random.integers(5))
        )
        if random.random() < 0.6:
            missing, available = space.count_missing(span), pool.num_available
            if missing <= available:
                assert space.commit(span, content=MINE + number) == missing
            else:
                with pytest.raises(Shortage) as caught:
                    space.commit(span, content=MINE + number)
                assert caught.value.page_groups == missing - available
                num_shortages += 1
        else:
            whole = sum(
                size for place, size in handles(space) if place >= first and place + size <= first + int(span[0, 1])
            )
            assert space.decommit(span, forget_content=bool(random.integers(2))) == whole
        stats = pool.stats()
        assert stats.mapped_page_groups == sum(one.num_mapped for one in spaces)
        assert stats.total_page_groups <= 40
        assert 0 <= pool.num_available <= 40
        if device == "cpu":
            assert pool.driver.live_bytes == stats.total_page_groups * pool.page_group_bytes  # type: ignore[attr-defined]
        pool.check_integrity()
    assert 50 < num_shortages < 500


# -- what memory holds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heir", [MINE, THEIRS])
@pytest.mark.parametrize("forget", [False, True])
def test_a_handle_changes_hands_as_a_whole(make_pool: MakePool, heir: int, forget: bool) -> None:
    pool = make_pool(15, size_classes=FOUR)
    space = AddressSpace(pool, 32 * pool.page_group_bytes)
    space.commit(ranges((0, 15)), content=MINE)
    for place in range(15):
        fill_place(space, place, 40 + place)
    space.decommit(ranges((0, 15)), forget_content=forget)
    with record(pool.driver) as calls:
        space.commit(ranges((16, 15)), content=heir)
    kept = heir == MINE and not forget
    assert values(space, range(16, 31)) == ([40 + place for place in range(15)] if kept else [0] * 15)
    assert calls.count(Call.CREATE) == 0
    assert calls.count(Call.ZERO) == (0 if kept else 1)


def test_only_dirty_handles_are_zeroed(make_pool: MakePool) -> None:
    # Handles of 4 places, taken in this order: theirs, mine, theirs, theirs.
    pool = make_pool(16, size_classes=3)
    size = pool.page_group_bytes
    space, other = (AddressSpace(pool, 32 * size) for _ in range(2))
    for owner, content, first in ((other, THEIRS, 0), (space, MINE, 0), (other, THEIRS, 4), (other, THEIRS, 8)):
        owner.commit(ranges((first, 4)), content=content)
        fill_places(owner, range(first, first + 4), 60 + content)
    for owner, first in ((other, 8), (other, 4), (space, 0), (other, 0)):
        owner.decommit(ranges((first, 4)), forget_content=False)
    with record(pool.driver) as calls:
        space.commit(ranges((10, 16)), content=MINE)
    zeroed = [made.arguments for made in calls if made.call is Call.ZERO]
    assert zeroed == [(space.base + first * size, 0, count * size, 0) for first, count in ((10, 4), (18, 8))]
    assert values(space, range(10, 26)) == [0] * 4 + [60 + MINE] * 4 + [0] * 8


# -- handles go whole ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ((0, 8), 0),  # ends within the first
        ((2, 7), 0),
        ((3, 7), 0),
        ((2, 8), 8),
        ((0, 10), 8),
        ((2, 9), 8),  # cuts the second
        ((9, 5), 4),  # begins within the first
        ((3, 13), 6),
        ((10, 4), 4),
        ((11, 6), 3),
        ((0, 32), 15),
    ],
)
def test_decommit_takes_whole_handles(make_pool: MakePool, span: tuple[int, int], expected: int) -> None:
    pool = make_pool(16, size_classes=FOUR)
    space = AddressSpace(pool, 32 * pool.page_group_bytes)
    space.commit(ranges((2, 15)), content=MINE)
    assert handles(space) == [(2, 8), (10, 4), (14, 2), (16, 1)]
    for place in range(2, 17):
        fill_place(space, place, place)
    with record(pool.driver) as calls:
        assert space.decommit(ranges(span), forget_content=True) == expected
    assert calls.count(Call.UNMAP) == (expected > 0)
    left = [place for place in range(32) if space.arrays.table[place]]
    assert len(left) == 15 - expected
    assert [place_value(space, place) for place in left] == left
    assert pool.stats().free_page_groups == expected
    assert space.commit(ranges((2, 15)), content=MINE) == expected
    assert [place_value(space, place) for place in range(2, 17)] == [
        place if place in left else 0 for place in range(2, 17)
    ]


def test_two_halves_in_one_call_are_no_whole(make_pool: MakePool) -> None:
    pool = make_pool(8, size_classes=FOUR)
    space = AddressSpace(pool, 8 * pool.page_group_bytes)
    space.commit(ranges((0, 8)), content=MINE)
    assert space.decommit(ranges((0, 4), (4, 4)), forget_content=True) == 0
    assert space.decommit(ranges((0, 8)), forget_content=True) == 8


def test_a_neighbour_of_the_same_number_is_no_part(make_pool: MakePool) -> None:
    # Handles whose page groups have neighbouring numbers lie side by side; one of them goes.
    pool = make_pool(12, size_classes=3)
    space = AddressSpace(pool, 12 * pool.page_group_bytes)
    space.commit(ranges((0, 12)), content=MINE)
    for place in range(12):
        fill_place(space, place, place + 1)
    assert space.decommit(ranges((3, 6)), forget_content=True) == 4
    assert handles(space) == [(0, 4), (8, 4)]
    assert values(space, range(4)) + values(space, range(8, 12)) == [1, 2, 3, 4, 9, 10, 11, 12]


# -- alias --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writable", [True, False])
def test_alias_of_whole_handles(make_pool: MakePool, writable: bool) -> None:
    pool = make_pool(15, size_classes=FOUR)
    space, other = (AddressSpace(pool, 32 * pool.page_group_bytes) for _ in range(2))
    space.commit(ranges((1, 15)), content=MINE)
    for place in range(1, 16):
        fill_place(space, place, place)
    with record(pool.driver) as calls:
        other.alias(3, space, 9, 6, writable=writable)
    assert [calls.count(call) for call in (Call.MAP, Call.SET_ACCESS, Call.CREATE)] == [2, 1, 0]
    assert handles(other) == [(3, 4), (7, 2)]
    assert values(other, range(3, 9)) == list(range(9, 15))
    assert (pool.stats().mapped_page_groups, other.num_mapped, space.num_mapped) == (15, 6, 15)
    fill_place(space, 12, 99)
    assert place_value(other, 6) == 99
    if pool.driver.kind == "host":
        assert {access_at(other.base + place * pool.page_group_bytes) for place in range(3, 9)} == {
            "rw-s" if writable else "r--s"
        }
    # Handles are counted one by one: the source goes, the alias of two of them stays.
    assert space.decommit(ranges((0, 32)), forget_content=True) == 15
    assert (pool.stats().mapped_page_groups, free_handles(pool)) == (6, [1, 0, 0, 1])
    assert values(other, range(3, 9)) == [9, 10, 11, 99, 13, 14]
    pool.check_integrity()
    assert other.decommit(ranges((3, 5)), forget_content=True) == 4
    other.close()
    assert pool.stats().mapped_page_groups == 0


@pytest.mark.parametrize("span", [(1, 4), (5, 4), (5, 8), (1, 9), (9, 5), (10, 5), (2, 7), (1, 1), (8, 1)])
def test_alias_that_cuts_a_handle(make_pool: MakePool, span: tuple[int, int]) -> None:
    pool = make_pool(15, size_classes=FOUR)
    space, other = (AddressSpace(pool, 32 * pool.page_group_bytes) for _ in range(2))
    space.commit(ranges((1, 15)), content=MINE)
    assert handles(space) == [(1, 8), (9, 4), (13, 2), (15, 1)]
    before = pool.stats(), pool.arrays.num_mappings.tolist(), space.arrays.table[:32].tolist()
    with record(pool.driver) as calls, pytest.raises(ValueError, match="in part") as caught:
        other.alias(0, space, *span)
    assert len(calls) == 0
    assert f"{span[0]}..{sum(span)}" in str(caught.value)
    assert "max_size_class_bytes" in str(caught.value)
    assert (pool.stats(), pool.arrays.num_mappings.tolist(), space.arrays.table[:32].tolist()) == before
    assert other.num_mapped == 0
    pool.check_integrity()


# -- giving back, books -------------------------------------------------------------------------------------------


def test_trim_gives_back_every_size(make_pool: MakePool) -> None:
    pool = make_pool(32, size_classes=FOUR)
    size = pool.page_group_bytes
    space = AddressSpace(pool, 32 * size)
    space.commit(ranges((0, 15), (16, 15)), content=MINE)
    space.decommit(ranges((0, 15)), forget_content=False)
    with record(pool.driver) as calls:
        assert pool.trim() == 15 * size
        assert pool.trim() == 0
    assert [made.call for made in calls] == [Call.RELEASE] * 4
    assert pool.stats().num_handles == {size << bit: 1 for bit in range(4)}
    pool.check_integrity()
    space.commit(ranges((0, 15)), content=MINE)
    assert pool.stats().num_handles == {size << bit: 2 for bit in range(4)}
    groups = space.mapped_page_groups().tolist()
    assert len(set(groups)) == 30
    assert pool.arrays.classes.reshape(-1, words.CLASS_WORDS)[:, words.NEXT_GROUP].tolist() != [0] * 4


@pytest.mark.parametrize("nth", range(1, 5))
def test_trim_whose_release_fails_keeps_that_handle(make_pool: MakePool, nth: int) -> None:
    pool = make_pool(15, size_classes=FOUR)
    space = AddressSpace(pool, 32 * pool.page_group_bytes)
    space.commit(ranges((0, 15)), content=MINE)
    space.close()
    with fail(pool.driver, Call.RELEASE, nth) as calls, pytest.raises(DriverError, match="cuMemRelease"):
        pool.trim()
    assert calls.count(Call.RELEASE) == 4
    pool.check_integrity()
    assert sum(free_handles(pool)) == 1
    left = pool.stats().free_page_groups
    assert pool.stats().total_page_groups == left
    assert pool.trim() == left * pool.page_group_bytes


def damaged_pool(make_pool: MakePool) -> tuple[PagePool, AddressSpace]:
    """Of each class two handles that are mapped, two that are free, and three numbers that have none."""
    pool = make_pool(120, size_classes=FOUR)
    space = AddressSpace(pool, 128 * pool.page_group_bytes)
    for size_class, first in enumerate((0, 8, 24, 56)):
        space.commit(rows((first, 7 << size_class), content=MINE, largest=size_class), content=MINE)
    spans = [(first + (2 << size_class), 3 << size_class) for size_class, first in enumerate((0, 8, 24, 56))]
    space.decommit(ranges(*spans), forget_content=False)
    pool.trim()
    spans = [(first + (5 << size_class), 2 << size_class) for size_class, first in enumerate((0, 8, 24, 56))]
    space.decommit(ranges(*spans), forget_content=False)
    assert free_handles(pool) == [2] * 4
    space.check_integrity()
    return pool, space


DAMAGES = [
    "twice free", "free and mapped", "free and vacant", "twice vacant", "no longer free", "no longer vacant",
    "mapped once more", "mapped once less", "taken from the table", "another's place",
]  # fmt: skip
LARGE_DAMAGES = ["without its end", "without its start"]


@pytest.mark.parametrize(
    ("size_class", "damage"),
    [(size_class, damage) for size_class in range(4) for damage in DAMAGES + (LARGE_DAMAGES if size_class else [])],
)
def test_integrity_finds_damage_in_every_class(make_pool: MakePool, size_class: int, damage: str) -> None:
    pool, space = damaged_pool(make_pool)
    arrays, table = pool.arrays, space.arrays.table
    start, size = size_class << int(arrays.constants[words.CLASS_SHIFT]), 1 << size_class
    class_words = arrays.classes[size_class * words.CLASS_WORDS : (size_class + 1) * words.CLASS_WORDS]
    first = (0, 8, 24, 56)[size_class]  # place of a handle; the next one comes right after it
    head = int(table[first]) - 1
    arrays_of_it: tuple[Any, ...] = (*arrays[:7], table, space.arrays.header)
    saved = [array.copy() for array in arrays_of_it]
    if damage == "twice free":
        arrays.free[start] = arrays.free[start + 1]
    elif damage == "free and mapped":
        arrays.free[start] = head
    elif damage == "free and vacant":
        arrays.vacant[start] = arrays.free[start]
    elif damage == "twice vacant":
        arrays.vacant[start] = arrays.vacant[start + 1]
    elif damage == "no longer free":
        class_words[words.NUM_FREE_HANDLES] -= 1
        arrays.header[words.NUM_FREE] -= size
    elif damage == "no longer vacant":
        class_words[words.NUM_VACANT_HANDLES] -= 1
        arrays.header[words.NUM_TOTAL] += size
    elif damage == "mapped once more":
        arrays.num_mappings[head] += 1
    elif damage == "mapped once less":
        arrays.num_mappings[head] -= 1
    elif damage == "taken from the table":
        table[first : first + size] = 0
        space.arrays.header[words.NUM_MAPPED] -= size
    elif damage == "another's place":
        table[first : first + size] = table[first + size : first + 2 * size]
    elif damage == "without its end":
        table[first + size - 1] = 0
        space.arrays.header[words.NUM_MAPPED] -= 1
    else:
        table[first] = 0
        space.arrays.header[words.NUM_MAPPED] -= 1
    with pytest.raises(VTensorError):
        space.check_integrity()
    for array, before in zip(arrays_of_it, saved, strict=True):
        array[:] = before
    space.check_integrity()


@pytest.mark.parametrize("size_class", [1, 2, 3])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_integrity_finds_a_handle_with_a_hole(make_pool: MakePool, size_class: int, is_ahead: bool) -> None:
    pool = make_pool(8, size_classes=FOUR)
    space = AddressSpace(pool, 16 * pool.page_group_bytes)
    size = 1 << size_class
    space.commit(ranges((0, size)), content=MINE)
    if is_ahead:
        space.withdraw(ranges((0, size)))
    table, header = space.arrays.table, space.arrays.header
    table[size], table[size - 1], header[words.END_MAPPED] = table[size - 1], 0, size + 1
    with pytest.raises(VTensorError):
        space.check_integrity()
    table[size - 1], table[size] = table[size], 0
    space.check_integrity()


def test_out_of_pages_speaks_of_page_groups(make_pool: MakePool) -> None:
    from vtensor.allocator.address_space import out_of_pages

    pool = make_pool(9, size_classes=FOUR)
    space = AddressSpace(pool, 32 * pool.page_group_bytes)
    space.commit(ranges((0, 8)), content=MINE)
    with pytest.raises(Shortage) as caught:
        space.commit(ranges((8, 4)), content=MINE)
    error = out_of_pages(space, "a test", caught.value)
    assert isinstance(error, OutOfPagesError)
    assert "a test needs 3 more page groups" in str(error)
    assert "8 are mapped, 0 free" in str(error)


def test_broken_release_while_room_is_made(make_pool: MakePool) -> None:
    pool = make_pool(8, size_classes=FOUR)
    space = AddressSpace(pool, 32 * pool.page_group_bytes)
    commit_alone(space, 0, 8)
    space.decommit(ranges((0, 8)), forget_content=False)
    for nth in range(1, 9):
        # Each attempt gives back those before the one that the driver does not take.
        free_before = pool.stats().free_page_groups
        if free_before < nth:
            break
        with fail(pool.driver, Call.RELEASE, nth, BROKEN), pytest.raises(DriverError, match="cuMemRelease") as caught:
            space.commit(ranges((0, 8)), content=MINE)
        assert "nothing was changed" in str(caught.value)
        assert pool.stats().free_page_groups == free_before - (nth - 1)
        assert pool.num_available == 8
        pool.check_integrity()
    assert space.commit(ranges((0, 8)), content=MINE) == 8
    assert sizes(space) == [8]
