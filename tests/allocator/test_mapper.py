"""The mapper: places mapped ahead, taken out of service, given back later; jobs cancelled, failed, many, at the end."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.child import in_child, in_interpreter
from tests.helpers.faults import BROKEN, fail, hold, record
from tests.helpers.memory import fill_place, handles, place_value, ranges, rows
from tests.helpers.threads import Background, in_threads, wait_until
from vtensor.allocator import handles as handles_module
from vtensor.allocator import mapper as mapper_module
from vtensor.allocator import mapper_native, plan, words
from vtensor.allocator.address_space import AddressSpace, Shortage
from vtensor.allocator.driver import Call, get_driver
from vtensor.allocator.driver.base import OUT_OF_MEMORY
from vtensor.allocator.mapper import Job, Mapper, StandingJob, get_mapper
from vtensor.allocator.native import packed
from vtensor.allocator.page_pool import PagePool
from vtensor.errors import ClosedError, DriverError, ForkedError, VTensorError

MakePool = Callable[..., PagePool]
MINE, THEIRS = 2, 3
HOST_ONLY = pytest.mark.parametrize("device", ["cpu"], indirect=True)
FOUR = 4  # size classes: handles of 1, 2, 4 and 8 places
NUM_PLACES = 32


@pytest.fixture
def pool(make_pool: MakePool) -> PagePool:
    return make_pool(48, size_classes=FOUR)


@pytest.fixture
def make_space(pool: PagePool) -> Callable[..., AddressSpace]:
    def make(num_places: int = NUM_PLACES, pool: PagePool = pool) -> AddressSpace:
        return AddressSpace(pool, num_places * pool.page_group_bytes)

    return make


@pytest.fixture
def space(make_space: Callable[..., AddressSpace]) -> AddressSpace:
    return make_space()


MakeSpace = Callable[..., AddressSpace]


def ahead(space: AddressSpace, *spans: tuple[int, int], content: int = MINE, largest: int = 15) -> Job:
    """Have spans of places mapped ahead, each by itself."""
    return space.commit_ahead(rows(*spans, content=content, largest=largest))


def settle(space: AddressSpace) -> None:
    """Wait for the mapper, and for what it zeroed: whoever unmaps what was mapped ahead has to."""
    space.settle()
    space.pool.driver.finish(get_mapper(space.pool.driver).stream)


def table(space: AddressSpace) -> list[int]:
    """For each place 0, or 1 where it is in service, or -1 where it is mapped and not in service."""
    return np.sign(space.arrays.table[: space.num_places]).tolist()  # type: ignore[no-any-return]


def values(space: AddressSpace, *places: int) -> list[int]:
    return [place_value(space, place) for place in places]


def leave_dirty(space: AddressSpace, count: int, number: int = 66) -> None:
    """Have the pool's next handles hold something of another owner, and be of 8 places as far as they can."""
    space.commit(ranges((0, count)), content=THEIRS)
    for place in range(count):
        fill_place(space, place, number)
    space.decommit(ranges((0, count)), forget_content=False)


def leave_own(space: AddressSpace, *spans: tuple[int, int]) -> None:
    """Leave handles of these sizes free that hold what is one's own.

    The mapper maps them and gives the device nothing to do, so that they may be unmapped again at once.
    """
    space.commit(ranges(*spans), content=MINE)
    space.decommit(ranges(*spans), forget_content=False)


def break_off(outcome: object) -> None:
    raise KeyError


def wait_until_ahead(space: AddressSpace, number: int) -> None:
    """Wait for places to be mapped ahead, without asking whether the job is done."""
    wait_until(lambda: space.num_ahead == number)


def is_cancelled(job: Job) -> bool:
    return bool(job.words[1])


def has_somebody_at_the_door(pool: PagePool) -> bool:
    """Whether a thread waits for its turn."""
    return bool(pool.arrays.header[words.DOOR])


# -- mapped ahead -------------------------------------------------------------------------------------------------


def test_what_is_mapped_ahead_is_not_in_service(space: AddressSpace, pool: PagePool) -> None:
    job = ahead(space, (2, 8), (12, 3))
    job.wait()
    assert (job.is_done, job.has_failed, job.num_done, job.num_page_groups) == (True, False, 2, 11)
    assert handles(space) == [(2, 8), (12, 2), (14, 1)]
    assert (space.num_mapped, space.num_ahead, space.count_missing(ranges((0, 16)))) == (11, 11, 16)
    assert (pool.stats().mapped_page_groups, pool.num_available) == (11, 37)
    assert space.is_settled
    outcomes: list[Any] = []
    with record(pool.driver) as calls:
        number = space.commit(ranges((0, 16)), content=MINE, on_mapped=lambda outcome: outcomes.append(outcome.copy()))
    assert number == 16
    assert [(outcome[words.NUM_CHANGED], outcome[words.NUM_READY]) for outcome in outcomes] == [(16, 11)]
    assert (calls.count(Call.MAP), calls.count(Call.CREATE)) == (3, 3)  # places 0 and 1, 10 and 11, 15
    assert table(space)[:17] == [1] * 16 + [0]
    assert (space.num_ahead, space.count_missing(ranges((0, 16)))) == (0, 0)
    assert values(space, *range(16)) == [0] * 16


def test_a_commit_that_finds_everything_ready_makes_no_call(space: AddressSpace) -> None:
    ahead(space, (0, 8)).wait()
    settle(space)
    outcomes: list[int] = []
    with record(space.pool.driver) as calls:
        for expected in (8, 0):
            assert space.commit(ranges((0, 8)), content=MINE, on_mapped=lambda o: outcomes.append(o[5])) == expected
    assert (len(calls), outcomes) == (0, [8])


def test_a_part_of_a_large_handle_comes_into_service(space: AddressSpace, pool: PagePool) -> None:
    ahead(space, (0, 8)).wait()
    settle(space)
    with record(pool.driver) as calls:
        assert space.commit(ranges((2, 3)), content=MINE) == 3
        for place in (2, 3, 4):
            fill_place(space, place, place)
        assert space.count_missing(ranges((0, 8))) == 5
        assert table(space)[:9] == [-1, -1, 1, 1, 1, -1, -1, -1, 0]
        assert space.decommit(ranges((0, 5)), forget_content=True) == 0  # a handle goes whole
        assert space.commit(ranges((4, 3)), content=MINE) == 2
        assert space.commit(ranges((0, 4)), content=MINE) == 2
    assert len(calls) == 0
    assert values(space, *range(7)) == [0, 0, 2, 3, 4, 0, 0]
    assert (space.num_ahead, space.num_mapped) == (1, 8)
    assert space.decommit(ranges((0, 8)), forget_content=False) == 8
    assert (space.num_ahead, space.num_mapped, pool.stats().free_page_groups) == (0, 0, 8)


@pytest.mark.parametrize("user", [MINE, THEIRS])
def test_it_is_zeroed_by_the_mapper_and_not_again(make_space: MakeSpace, user: int) -> None:
    space, other = make_space(), make_space()
    leave_dirty(other, 12)
    with record(space.pool.driver) as calls:
        ahead(space, (4, 12)).wait()
    zeroed = [made.arguments for made in calls if made.call is Call.ZERO]
    size, stream = space.page_group_bytes, get_mapper(space.pool.driver).stream
    assert zeroed == [(space.base + 4 * size, 0, 12 * size, stream)]
    assert calls.count(Call.CREATE) == 0
    settle(space)
    with record(space.pool.driver) as calls:
        space.commit(ranges((4, 12)), content=user)
    assert calls.count(Call.ZERO) == (user != MINE)  # but for another user
    assert values(space, *range(4, 16)) == [0] * 12


def test_memory_of_ones_own_is_not_zeroed(space: AddressSpace) -> None:
    space.commit(ranges((0, 8)), content=MINE)
    for place in range(8):
        fill_place(space, place, 5)
    space.decommit(ranges((0, 8)), forget_content=False)
    with record(space.pool.driver) as calls:
        ahead(space, (8, 8)).wait()
        space.commit(ranges((8, 8)), content=MINE)
    assert calls.count(Call.ZERO) == 0
    assert values(space, *range(8, 16)) == [5] * 8


def test_asking_twice_maps_once(space: AddressSpace) -> None:
    space.commit(ranges((2, 2)), content=MINE)
    jobs = [ahead(space, (0, 8)) for _ in range(3)]
    for job in jobs:
        job.wait()
    assert [job.num_page_groups for job in jobs] == [6, 0, 0]
    assert [job.num_done for job in jobs] == [1, 1, 1]
    assert table(space)[:9] == [-1, -1, 1, 1, -1, -1, -1, -1, 0]


def test_bounds_of_ranges(space: AddressSpace) -> None:
    job = space.commit_ahead(np.array([(0, 4, MINE, 0), (8, 4, MINE, 1), (16, 4, MINE, 15)], np.int64))
    job.wait()
    assert [size for _, size in handles(space)] == [1, 1, 1, 1, 2, 2, 4]


def test_nothing_asked_for_is_no_call(space: AddressSpace) -> None:
    with record(space.pool.driver) as calls:
        jobs = [ahead(space), ahead(space, (3, 0), (32, 0)), space.decommit_later(ranges(), forget_content=True)]
        for job in jobs:
            job.wait()
    assert len(calls) == 0
    assert [(job.num_done, job.has_failed) for job in jobs] == [(0, False), (2, False), (0, False)]


@pytest.mark.parametrize("row", [(-1, 1), (0, -1), (0, 33), (32, 1), (2**63 - 1, 1), (1, 2**63 - 1)])
def test_ranges_outside(space: AddressSpace, row: tuple[int, int]) -> None:
    with record(space.pool.driver) as calls:
        for do in (
            lambda: ahead(space, (0, 1), row),
            lambda: space.withdraw(ranges((0, 1), row)),
            lambda: space.decommit_later(ranges((0, 1), row), forget_content=True),
        ):
            with pytest.raises(ValueError, match="outside the 32 places"):
                do()
    assert len(calls) == 0
    assert space.is_settled


def test_ranges_without_a_mark(make_space: MakeSpace) -> None:
    # Nobody's: they hold zeros, whoever commits them.
    space, other = make_space(), make_space()
    leave_dirty(other, 8)
    space.commit_ahead(ranges((0, 4), (4, 4))).wait()
    settle(space)
    assert space.num_ahead == 8
    space.commit(ranges((0, 8)), content=MINE)
    assert values(space, *range(8)) == [0] * 8


def test_ranges_are_copied(space: AddressSpace) -> None:
    leave_own(space, (20, 1), (0, 2))
    with hold(space.pool.driver, Call.MAP) as held:
        first = ahead(space, (20, 1))
        held.wait_until_begun()
        asked, given_back = rows((0, 2), content=MINE), rows((20, 1), content=MINE)
        jobs = first, space.commit_ahead(asked), space.decommit_later(given_back, forget_content=True)
        asked[:], given_back[:] = rows((8, 8), content=MINE), rows((0, 2), content=MINE)
        held.release()
        for job in jobs:
            job.wait()
    assert table(space) == [-1, -1] + [0] * 30


# -- out of service -----------------------------------------------------------------------------------------------


def test_withdrawn_places_are_missing_and_come_back(space: AddressSpace, pool: PagePool) -> None:
    space.commit(ranges((0, 12)), content=MINE)
    for place in range(12):
        fill_place(space, place, place + 1)
    with record(pool.driver) as calls:
        space.withdraw(ranges((2, 4), (10, 4)))
        space.withdraw(ranges((2, 1)))
        assert table(space)[:13] == [1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, 0]
        assert (space.num_mapped, space.num_ahead, space.count_missing(ranges((0, 12)))) == (12, 6, 6)
        assert pool.stats().mapped_page_groups == 12
        space.check_integrity()
        assert space.commit(ranges((0, 5)), content=MINE) == 3
        assert space.commit(ranges((0, 12)), content=MINE) == 3
    assert len(calls) == 0
    assert values(space, *range(12)) == list(range(1, 13))


def test_withdrawn_places_are_zeroed_for_another_user(space: AddressSpace) -> None:
    space.commit(ranges((0, 8)), content=MINE)
    for place in range(8):
        fill_place(space, place, 7)
    space.withdraw(ranges((0, 8)))
    with record(space.pool.driver) as calls:
        space.commit(ranges((0, 8)), content=THEIRS)
    assert calls.count(Call.ZERO) == 1
    assert values(space, *range(8)) == [0] * 8


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_two_users_of_one_handle(make_space: MakeSpace, is_withdrawn: bool) -> None:
    # Zeroing for the second must not reach what the first one has in service.
    space, other = make_space(), make_space()
    leave_dirty(other, 8)
    if is_withdrawn:
        space.commit(ranges((0, 8)), content=MINE)
        for place in range(8):
            fill_place(space, place, 5)
        space.withdraw(ranges((0, 8)))
    else:
        ahead(space, (0, 8)).wait()
        settle(space)
    space.commit(ranges((2, 3)), content=MINE)
    for place in (2, 3, 4):
        fill_place(space, place, 7)
    space.commit(ranges((5, 2)), content=THEIRS)
    assert values(space, *range(2, 7)) == [7, 7, 7, 0, 0]
    fill_place(space, 5, 9)
    space.commit(ranges((0, 8)), content=THEIRS)
    assert values(space, *range(8)) == [0, 0, 7, 7, 7, 9, 0, 0]
    space.decommit(ranges((0, 8)), forget_content=False)
    for heir in (MINE, THEIRS):
        space.commit(ranges((8, 8)), content=heir)
        assert values(space, *range(8, 16)) == [0] * 8
        space.decommit(ranges((8, 8)), forget_content=False)


@pytest.mark.parametrize("writable", [True, False])
def test_a_withdrawn_alias_does_not_come_back(make_space: MakeSpace, writable: bool) -> None:
    # What it shows is not its own: zeroing it, or writing to it, would reach whoever else shows it.
    space, other = make_space(), make_space()
    other.commit(ranges((0, 4)), content=THEIRS)
    for place in range(4):
        fill_place(other, place, 5)
    space.alias(8, other, 0, 4, writable=writable)
    space.withdraw(ranges((8, 4)))
    with record(space.pool.driver) as calls:
        for content in (MINE, THEIRS):
            with pytest.raises(ValueError, match=r"alias that was withdrawn"):
                space.commit(ranges((6, 8)), content=content)
            job = ahead(space, (6, 8), content=content)
            job.wait()
            assert (job.has_failed, job.num_page_groups) == (True, 0)
    assert len(calls) == 0
    assert (values(other, *range(4)), table(space)) == ([5] * 4, [0] * 8 + [-1] * 4 + [0] * 20)
    assert space.decommit(ranges((8, 4)), forget_content=False) == 4
    space.commit(ranges((6, 8)), content=MINE)
    assert (values(other, *range(4)), values(space, *range(6, 14))) == ([5] * 4, [0] * 8)


def test_a_withdrawn_source_comes_back_once_its_aliases_are_gone(make_space: MakeSpace) -> None:
    space, other = make_space(), make_space()
    space.commit(ranges((0, 4)), content=MINE)
    for place in range(4):
        fill_place(space, place, 5)
    other.alias(0, space, 0, 4)
    space.withdraw(ranges((1, 2)))
    with pytest.raises(ValueError, match=r"alias that was withdrawn"):
        space.commit(ranges((0, 4)), content=MINE)
    other.close()
    assert space.commit(ranges((0, 4)), content=MINE) == 2
    assert values(space, *range(4)) == [5] * 4


def test_alias_minds_what_is_out_of_service(make_space: MakeSpace) -> None:
    space, other = make_space(), make_space()
    space.commit(ranges((0, 4)), content=MINE)
    ahead(other, (0, 4)).wait()
    with record(space.pool.driver) as calls:
        with pytest.raises(ValueError, match=r"3\.\.7 already hold"):
            other.alias(3, space, 0, 4)
        space.withdraw(ranges((3, 1)))
        with pytest.raises(ValueError, match=r"0\.\.4 of the source are not all committed"):
            other.alias(8, space, 0, 4)
    assert len(calls) == 0


# -- given back later ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forget", [False, True])
def test_what_is_given_back_later(space: AddressSpace, pool: PagePool, forget: bool) -> None:
    space.commit(ranges((0, 15)), content=MINE)
    assert handles(space) == [(0, 8), (8, 4), (12, 2), (14, 1)]
    for place in range(15):
        fill_place(space, place, 5)
    space.withdraw(ranges((0, 12), (14, 1)))
    job = space.decommit_later(ranges((0, 9), (8, 4), (14, 1), (20, 3)), forget_content=forget)
    job.wait()
    assert (job.num_done, job.num_page_groups, job.has_failed) == (4, 13, False)
    assert (handles(space), space.num_ahead, pool.stats().free_page_groups) == ([(12, 2)], 0, 13)
    space.commit(ranges((16, 13)), content=MINE)
    assert values(space, *range(16, 29)) == [0 if forget else 5] * 13


def test_jobs_are_carried_out_in_their_order(space: AddressSpace) -> None:
    leave_own(space, (0, 8), (8, 2), (16, 1))
    with hold(space.pool.driver, Call.MAP) as held:
        jobs = [ahead(space, (0, 8)), ahead(space, (8, 2))]
        held.wait_until_begun()
        jobs += [space.decommit_later(ranges((0, 10)), forget_content=False), ahead(space, (0, 1))]
        assert [job.is_done for job in jobs] == [False] * 4
        held.release()
        jobs[-1].wait()
        assert [job.is_done for job in jobs] == [True] * 4
    assert table(space)[:11] == [-1] + [0] * 10
    assert [job.num_page_groups for job in jobs] == [8, 2, 10, 1]


# -- no memory, and failures --------------------------------------------------------------------------------------


def test_a_look_ahead_ends_where_memory_does(space: AddressSpace, pool: PagePool) -> None:
    space.commit(ranges((0, 30)), content=MINE)
    other = AddressSpace(pool, 64 * pool.page_group_bytes)
    job = ahead(other, (0, 8), (8, 4), (12, 7), (20, 1))
    job.wait()
    assert (job.num_done, job.num_page_groups, job.has_failed) == (2, 12, True)
    assert table(other)[:22] == [-1] * 12 + [0] * 10
    assert (pool.num_available, other.num_ahead) == (6, 12)
    with pytest.raises(Shortage) as caught:
        other.commit(ranges((0, 20)), content=MINE)  # 8 to map: what is ready is no shortage
    assert caught.value.page_groups == 2
    assert other.num_ahead == 12
    assert other.commit(ranges((0, 18)), content=MINE) == 18
    assert pool.num_available == 0


CALLS_A_RANGE = {Call.CREATE: 2, Call.MAP: 2, Call.SET_ACCESS: 1}


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, BROKEN])
@pytest.mark.parametrize(
    ("call", "nth"), [(call, nth) for call, number in CALLS_A_RANGE.items() for nth in range(1, 3 * number + 1)]
)
def test_a_failure_is_the_end_of_its_job_only(
    space: AddressSpace, pool: PagePool, call: Call, nth: int, code: int
) -> None:
    times = 2 if (call, code) == (Call.CREATE, OUT_OF_MEMORY) else 1  # for the large handle, and again for a small one
    with fail(pool.driver, call, nth, code, times) as calls:
        job = ahead(space, (0, 3), (4, 3), (8, 3))
        job.wait()
    num_done = (nth - 1) // CALLS_A_RANGE[call]
    assert (job.num_done, job.has_failed, job.num_page_groups) == (num_done, True, 3 * num_done)
    assert calls.count(Call.CREATE) <= 2 * (num_done + 1)  # nothing for the ranges behind it
    assert table(space)[:12] == [-1, -1, -1, 0] * num_done + [0] * (12 - 4 * num_done)
    assert pool.num_available == 48 - 3 * num_done
    space.check_integrity()
    again = ahead(space, (0, 3), (4, 3), (8, 3))
    again.wait()
    assert (again.num_done, again.num_page_groups) == (3, 9 - 3 * num_done)
    assert space.commit(ranges((0, 12)), content=MINE) == 12
    assert values(space, *range(12)) == [0] * 12


@pytest.mark.parametrize("nth", [1, 2])
def test_zeroing_that_fails_in_the_mapper_shows_nobody_elses_data(make_space: MakeSpace, nth: int) -> None:
    space, other = make_space(), make_space()
    leave_dirty(other, 16)
    with fail(space.pool.driver, Call.ZERO, nth):
        job = ahead(space, (0, 8), (8, 8), (16, 1))
        job.wait()
    assert (job.num_done, job.has_failed) == (nth - 1, True)
    settle(space)
    assert table(space) == [-1] * (8 * nth) + [0] * (32 - 8 * nth)  # they wait for whoever needs them
    with record(space.pool.driver) as calls:
        space.commit(ranges((8 * (nth - 1), 3)), content=MINE)
    assert calls.count(Call.ZERO) == 1
    space.commit(ranges((0, 16)), content=MINE)
    assert values(space, *range(16)) == [0] * 16


@pytest.mark.parametrize("nth", [1, 2])
def test_zeroing_that_fails_where_some_was_ready(make_space: MakeSpace, nth: int) -> None:
    # Ready, but of another mark; and dirty. Nothing comes into service, nothing is shown.
    space, other = make_space(), make_space()
    leave_dirty(other, 8)
    ahead(space, (0, 4), content=THEIRS, largest=0).wait()
    leave_dirty(other, 8)
    settle(space)
    space.commit(ranges((4, 1)), content=MINE)
    fill_place(space, 4, 9)
    with fail(space.pool.driver, Call.ZERO, nth), pytest.raises(DriverError, match="cuMemsetD8Async") as caught:
        space.commit(ranges((0, 13)), content=MINE)
    assert "nothing was changed" in str(caught.value)
    assert [place for place, sign in enumerate(table(space)) if sign > 0] == [4]
    assert place_value(space, 4) == 9
    space.check_integrity()
    space.commit(ranges((0, 13)), content=MINE)
    assert values(space, *range(13)) == [0] * 4 + [9] + [0] * 8


# Which call fails, in which range, and how many places are left mapped that are not open.
DOUBLE_FAULTS = [(Call.MAP, 2, 0, 8), (Call.MAP, 4, 16, 8), (Call.SET_ACCESS, 1, 0, 12), (Call.SET_ACCESS, 2, 16, 12)]


@pytest.mark.parametrize(("call", "nth", "stuck", "num_stuck"), DOUBLE_FAULTS)
@pytest.mark.parametrize("offset", [0, 2, 5])
def test_what_could_not_even_be_undone_is_mended_by_a_commit(
    make_space: MakeSpace, call: Call, nth: int, stuck: int, num_stuck: int, offset: int
) -> None:
    # Mapped, not open, full of somebody else's data, and the mapper has nobody to tell.
    space, other = make_space(), make_space()
    leave_dirty(other, 12)
    with fail(space.pool.driver, call, nth), fail(space.pool.driver, Call.UNMAP, 1):
        job = ahead(space, (0, 12), (16, 12))
        job.wait()
    assert (job.has_failed, job.num_done) == (True, stuck // 16)
    settle(space)
    done = range(stuck - stuck // 4)  # the first range, where it is the second one that failed
    assert [place for place, sign in enumerate(table(space)) if sign] == [*done, *range(stuck, stuck + num_stuck)]
    assert space.count_missing(ranges((0, 32))) == 32
    space.check_integrity()
    with fail(space.pool.driver, Call.SET_ACCESS, 1), pytest.raises(DriverError, match="cuMemSetAccess"):
        space.commit(ranges((stuck + offset, 3)), content=MINE)
    assert space.count_missing(ranges((0, 32))) == 32
    space.check_integrity()
    assert space.commit(ranges((stuck + offset, 3)), content=MINE) == 3
    assert values(space, *range(stuck + offset, stuck + offset + 3)) == [0] * 3
    space.commit(ranges((0, 32)), content=MINE)
    assert values(space, *range(32)) == [0] * 32
    for place in range(32):
        fill_place(space, place, place)
    assert values(space, *range(32)) == list(range(32))


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_what_cannot_be_unmapped_stays_out_of_service(space: AddressSpace, pool: PagePool, nth: int) -> None:
    space.commit(ranges((0, 12)), content=MINE)
    for place in range(12):
        fill_place(space, place, 5)
    assert handles(space) == [(0, 8), (8, 4)]
    space.decommit(ranges((0, 8)), forget_content=False)
    space.commit(rows((0, 2), (2, 2), (4, 2), content=MINE), content=MINE)
    space.withdraw(ranges((0, 12)))
    with fail(pool.driver, Call.UNMAP, nth):
        job = space.decommit_later(ranges((0, 2), (2, 2), (4, 2)), forget_content=True)
        job.wait()
    assert (job.num_done, job.num_page_groups, job.has_failed) == (nth - 1, 2 * (nth - 1), True)
    assert table(space)[:13] == [0] * (2 * nth - 2) + [-1] * (8 - 2 * nth) + [0, 0] + [-1] * 4 + [0]
    space.check_integrity()
    job = space.decommit_later(ranges((0, 2), (2, 2), (4, 2)), forget_content=True)
    job.wait()
    assert (job.num_done, job.num_page_groups) == (3, 8 - 2 * nth)
    assert space.num_mapped == 4


# -- cancelled, settled -------------------------------------------------------------------------------------------


def test_a_job_that_is_cancelled_ends_with_the_range_it_is_at(space: AddressSpace) -> None:
    with hold(space.pool.driver, Call.CREATE) as held:
        running, pending = ahead(space, (0, 1), (1, 1), (2, 1)), ahead(space, (8, 1))
        held.wait_until_begun()
        for job in (running, pending):
            job.cancel()
            assert not job.is_done
        last = ahead(space, (16, 2))
        held.release()
        last.wait()
    assert [(job.is_done, job.num_done, job.has_failed) for job in (running, pending, last)] == [
        (True, 1, False),
        (True, 0, False),
        (True, 1, False),
    ]
    last.cancel()  # too late, and no harm
    last.wait()
    assert table(space)[:19] == [-1] + [0] * 15 + [-1, -1, 0]


def test_a_cancelled_job_is_no_failure_and_can_be_asked_for_again(space: AddressSpace) -> None:
    job = ahead(space, *((place, 1) for place in range(32)))
    job.cancel()
    job.wait()
    assert not job.has_failed
    assert space.num_ahead == job.num_page_groups == job.num_done
    ahead(space, (0, 32)).wait()
    assert space.num_ahead == 32


@pytest.mark.parametrize("cancel", [False, True])
def test_settle(make_space: MakeSpace, cancel: bool) -> None:
    space, other = make_space(), make_space()
    with hold(space.pool.driver, Call.CREATE) as held:
        jobs = [ahead(space, (0, 1), (1, 1)), ahead(space, (2, 1)), ahead(space, (3, 1))]
        theirs = ahead(other, (0, 1))
        held.wait_until_begun()
        assert (space.is_settled, other.is_settled) == (False, False)
        settling = Background(lambda: space.settle(cancel=cancel))
        if cancel:  # all of them, before any has ended
            wait_until(lambda: all(map(is_cancelled, jobs)))
        assert settling.is_running
        held.release()
        settling.join()
        assert space.is_settled
        assert [job.num_done for job in jobs] == ([1, 0, 0] if cancel else [2, 1, 1])
        theirs.wait()
        assert not is_cancelled(theirs)
    assert other.is_settled
    space.settle()
    space.settle(cancel=True)


def test_many_wait_for_one_job(space: AddressSpace) -> None:
    with hold(space.pool.driver, Call.CREATE) as held:
        job = ahead(space, (0, 8))
        held.wait_until_begun()
        waiting = [Background(job.wait) for _ in range(8)]
        assert all(one.is_running for one in waiting)
        held.release()
        for one in waiting:
            one.join()
    assert job.is_done


# -- ends of life -------------------------------------------------------------------------------------------------


def test_close_waits_for_what_the_mapper_is_at(space: AddressSpace, pool: PagePool) -> None:
    with record(pool.driver) as calls, hold(pool.driver, Call.MAP) as held:
        running, pending = ahead(space, (0, 8), (8, 8)), ahead(space, (16, 8))
        held.wait_until_begun()
        closing = Background(space.close)
        wait_until(lambda: is_cancelled(running) and is_cancelled(pending))
        assert closing.is_running
        assert not space.closed
        held.release()
        closing.join()
    assert (space.closed, running.num_done, pending.num_done) == (True, 1, 0)
    assert [made.call for made in calls] == [Call.CREATE, Call.MAP, Call.SET_ACCESS] + (
        [] if pool.driver.fresh_memory_is_zero else [Call.ZERO]
    ) + [Call.UNMAP, Call.FREE]
    assert (pool.stats().mapped_page_groups, pool.stats().free_page_groups) == (0, 8)
    for do in (
        lambda: ahead(space, (0, 1)),
        lambda: space.withdraw(ranges((0, 1))),
        lambda: space.decommit_later(ranges((0, 1)), forget_content=False),
    ):
        with pytest.raises(ClosedError, match="were given back"):
            do()


def test_mapped_ahead_and_closed_64_times(device: str) -> None:
    driver = get_driver(device)
    free = []
    for _ in range(65):
        pool = PagePool(device)
        space = AddressSpace(pool, 64 << 20)
        jobs = [
            ahead(space, (first, space.num_places // 4)) for first in range(0, space.num_places, space.num_places // 4)
        ]
        jobs[1].wait()
        space.close()
        pool.close()
        if device == "cpu":
            assert driver.live_bytes == 0  # type: ignore[attr-defined]
        free.append(driver.memory_info()[0])
    assert free[-1] > free[0] - (512 << 20)  # and not 4 GiB less; others use the machine too


@HOST_ONLY
@pytest.mark.parametrize("is_forgotten", [False, True])
def test_close_waits_for_the_mappers_stream(
    make_space: MakeSpace, monkeypatch: pytest.MonkeyPatch, is_forgotten: bool
) -> None:
    # It may still be zeroing what is unmapped.
    space = make_space()
    arrays, driver = space.arrays, space.pool.driver
    ahead(space, (0, 4)).wait()
    log: list[tuple[int, int]] = []
    monkeypatch.setattr(get_mapper(driver), "stream", 77)
    monkeypatch.setattr(type(driver), "finish", lambda self, stream: log.append((stream, int(arrays.header[0]))))
    if is_forgotten:
        del space
        gc.collect()
    else:
        space.close()
    assert (log, arrays.header[words.NUM_MAPPED]) == ([(77, 4)], 0)


def test_close_with_places_that_nobody_needed(make_pool: MakePool) -> None:
    for num_page_groups in (32, None):
        pool = make_pool(num_page_groups, size_classes=FOUR)
        space = AddressSpace(pool, 32 * pool.page_group_bytes)
        for step in range(3):
            ahead(space, (0, 4 << step)).wait()
            space.commit(ranges((0, 1 << step)), content=MINE)
        assert (space.num_mapped, space.num_ahead) == (16, 12)
        space.close()
        space.close()
        assert pool.stats().mapped_page_groups == 0
        assert pool.stats().total_page_groups == (0 if num_page_groups is None else 16)


@pytest.mark.parametrize("in_cycle", [False, True])
def test_a_forgotten_space_waits_for_the_mapper(make_space: MakeSpace, pool: PagePool, in_cycle: bool) -> None:
    spaces = [make_space()]
    watched = weakref.ref(spaces[0])
    with record(pool.driver) as calls, hold(pool.driver, Call.MAP) as held:
        jobs = [ahead(spaces[0], (0, 8), (8, 8)), ahead(spaces[0], (16, 8))]
        held.wait_until_begun()
        if in_cycle:
            spaces[0].itself = spaces[0]  # type: ignore[attr-defined]

        def forget() -> None:
            spaces.clear()
            gc.collect()

        forgetting = Background(forget)
        wait_until(lambda: all(map(is_cancelled, jobs)))
        assert forgetting.is_running
        held.release()
        forgetting.join()
    assert watched() is None
    assert [job.num_done for job in jobs] == [1, 0]
    assert [made.call for made in calls][-2:] == [Call.UNMAP, Call.FREE]
    pool.check_integrity()
    assert pool.stats().mapped_page_groups == 0


@pytest.mark.parametrize("closes", [True, False])
def test_a_forgotten_pool_is_not_kept_by_its_last_job(device: str, closes: bool) -> None:
    size = get_driver(device).granularity_bytes
    pool = PagePool(device, capacity_bytes=32 * size, page_group_bytes=size)
    space = AddressSpace(pool, 32 * size)
    ahead(space, (0, 16))
    wait_until_ahead(space, 16)
    if closes:
        space.close()
    watched, driver = weakref.ref(pool), pool.driver
    with record(driver) as calls:
        del pool, space
        gc.collect()
    assert watched() is None
    assert calls.count(Call.RELEASE) == 1


def test_a_pool_with_jobs_pending_is_not_closed(make_pool: MakePool) -> None:
    pools = [make_pool(8), make_pool(8)]
    spaces = [AddressSpace(pool, 8 * pool.page_group_bytes) for pool in pools]
    with hold(pools[0].driver, Call.CREATE) as held:
        jobs = [ahead(space, (0, 3)) for space in spaces]
        held.wait_until_begun()
        closing = Background(pools[1].close)
        time.sleep(0.2)  # for it to do what it must not
        assert closing.is_running
        held.release()
        with pytest.raises(VTensorError, match="still has 3 mapped page groups"):
            closing.join()
        jobs[1].wait()
    assert not pools[1].closed
    assert spaces[1].num_ahead == 3


def test_nothing_was_mapped_ahead_no_mapper_is_needed() -> None:
    def body() -> list[object]:
        pool = PagePool("cpu", page_group_bytes=4096)
        space = AddressSpace(pool, 8 * 4096)
        space.commit(ranges((0, 8)), content=MINE)
        space.withdraw(ranges((0, 8)))
        with pytest.raises(KeyError):
            space.commit(ranges((0, 8)), content=MINE, on_mapped=break_off)
        space.commit(ranges((0, 8)), content=MINE)
        space.withdraw(ranges((0, 8)))
        space.close()
        pool.close()
        return [*mapper_module._mappers, *(thread.name for thread in threading.enumerate() if "mapper" in thread.name)]

    assert in_child(body) == (0, "[]")


# -- from compiled code ---------------------------------------------------------------------------------------------


def commit_ready(space: AddressSpace, *spans: tuple[int, int], content: int = MINE, zero_calls: int = -1) -> int:
    return int(plan.commit_ready(space.pool.arrays, space.arrays, rows(*spans, content=content), zero_calls))


def test_what_is_ready_comes_into_service_at_once(space: AddressSpace, pool: PagePool) -> None:
    ahead(space, (2, 8), (12, 3)).wait()
    settle(space)
    with record(pool.driver) as calls:
        assert commit_ready(space, (4, 3), (12, 3)) == 6
        assert table(space)[:16] == [0, 0, -1, -1, 1, 1, 1, -1, -1, -1, 0, 0, 1, 1, 1, 0]
        assert commit_ready(space) == 0
    assert (len(calls), space.num_ahead, space.num_mapped) == (0, 5, 11)
    for place in (4, 14):
        fill_place(space, place, 9)
    assert space.commit(ranges((2, 8)), content=MINE) == 5  # the mark is on it: what is in service stays as it is
    assert values(space, 4, 14, 2, 9) == [9, 9, 0, 0]


def leave_empty(space: AddressSpace, other: AddressSpace) -> None:
    space.decommit(ranges((3, 1)), forget_content=False)


def be_in_service(space: AddressSpace, other: AddressSpace) -> None:
    space.commit(ranges((3, 1)), content=MINE)


def show_it_elsewhere(space: AddressSpace, other: AddressSpace) -> None:
    space.commit(ranges((3, 1)), content=MINE)
    other.alias(0, space, 3, 1)
    space.withdraw(ranges((3, 1)))


def hold_a_read_only_alias(space: AddressSpace, other: AddressSpace) -> None:
    space.decommit(ranges((3, 1)), forget_content=False)
    other.commit(ranges((0, 1)), content=MINE)
    space.alias(3, other, 0, 1, writable=False)
    other.decommit(ranges((0, 1)), forget_content=False)
    space.withdraw(ranges((3, 1)))


def hold_data_of_another(space: AddressSpace, other: AddressSpace) -> None:
    space.decommit(ranges((3, 1)), forget_content=False)
    ahead(space, (3, 1), content=THEIRS, largest=0).wait()
    settle(space)


@pytest.mark.parametrize(
    "spoil", [leave_empty, be_in_service, show_it_elsewhere, hold_a_read_only_alias, hold_data_of_another]
)
def test_what_is_not_ready_is_left_to_a_commit(spoil: Callable[..., None], make_space: MakeSpace) -> None:
    space, other = make_space(), make_space()
    leave_dirty(other, 8)
    ahead(space, (0, 8), largest=0).wait()
    settle(space)
    spoil(space, other)
    before = table(space)
    with record(space.pool.driver) as calls:
        assert commit_ready(space, (0, 3), (3, 5)) == 0
    assert (len(calls), table(space)) == (0, before)
    assert commit_ready(space, (4, 4)) == 4


def test_what_is_plainly_not_ready_takes_no_turn(space: AddressSpace, pool: PagePool) -> None:
    # Who is about to commit anyway would otherwise wait for the mapper twice.
    found: list[int] = []
    with hold(pool.driver, Call.CREATE) as held:
        ahead(space, (0, 4))
        held.wait_until_begun()
        asking = Background(lambda: found.extend((commit_ready(space, (8, 1)), commit_ready(space, (0, 1)))))
        wait_until(lambda: not asking.is_running)
        held.release()
    asking.join()
    assert found == [0, 0]


def test_packed_arrays_are_found_again(space: AddressSpace, pool: PagePool) -> None:
    for arrays, unpack in ((pool.arrays, handles_module.pool_at), (space.arrays, plan.space_at)):
        found = unpack(packed(arrays))
        for name, value in arrays._asdict().items():
            other = getattr(found, name)
            if isinstance(value, int):
                assert other == value
            else:
                assert (other.ctypes.data, other.shape, other.dtype) == (value.ctypes.data, value.shape, value.dtype)


def test_what_may_still_be_zeroed_is_left_to_a_commit(space: AddressSpace, pool: PagePool) -> None:
    leave_dirty(space, 8)
    ahead(space, (0, 8)).wait()
    settle(space)
    number = pool.stats().num_driver_calls[Call.ZERO.symbol]
    assert number > 0
    for zero_calls in (0, number - 1, number + 1):
        assert commit_ready(space, (0, 8), zero_calls=zero_calls) == 0
    assert commit_ready(space, (0, 8), zero_calls=number) == 8


def hand_over(job: StandingJob, *spans: tuple[int, int]) -> None:
    job.ranges[: len(spans)] = rows(*spans, content=MINE)
    assert mapper_native.is_free(job.queue, job.words)
    mapper_native.submit_again(job.queue, job.words, len(spans))


def test_a_standing_job_is_handed_over_again_and_again(space: AddressSpace) -> None:
    job = space.standing_job(3)
    assert (job.is_done, job.num_wanted, job.num_page_groups, space.is_settled) == (True, 0, 0, True)
    with hold(space.pool.driver, Call.CREATE) as held:
        hand_over(job, (0, 4), (6, 2))
        held.wait_until_begun()
        assert not mapper_native.is_free(job.queue, job.words)
        assert (job.is_done, job.num_wanted, job.forgive(), space.is_settled) == (False, 6, 0, False)
        held.release()
        space.settle()
    hand_over(job, (0, 4))
    space.settle()
    hand_over(job, (10, 1), (12, 2), (20, 3))
    ahead(space, (30, 1)).wait()
    settle(space)
    assert (job.num_times, job.num_page_groups, job.has_failed, space.num_ahead) == (3, 12, False, 13)
    assert space.num_asked_ahead == 4


def test_a_standing_job_that_ended_early_is_not_handed_over_before_it_is_forgiven(make_pool: MakePool) -> None:
    space = AddressSpace(make_pool(8), NUM_PLACES * make_pool(8).page_group_bytes)
    job = space.standing_job(3)
    hand_over(job, (0, 6), (8, 4), (16, 1))
    space.settle()
    assert (job.is_done, job.num_done, job.num_page_groups) == (True, 1, 6)
    assert not mapper_native.is_free(job.queue, job.words)
    assert (job.forgive(), job.forgive()) == (2, 0)
    hand_over(job, (16, 2))
    settle(space)
    assert (job.num_page_groups, job.forgive()) == (8, 0)


def test_a_standing_job_is_cancelled_and_goes_on(space: AddressSpace) -> None:
    job = space.standing_job(2)
    with hold(space.pool.driver, Call.CREATE) as held:
        hand_over(job, (0, 1), (4, 1))
        held.wait_until_begun()
        job.cancel()
        held.release()
        space.settle(cancel=True)
    assert (job.num_done, job.forgive()) == (1, 1)
    hand_over(job, (4, 1), (8, 1))
    settle(space)
    assert (job.num_done, space.num_ahead) == (2, 3)


@pytest.mark.parametrize("closes", [True, False])
def test_a_standing_job_dies_with_its_space(closes: bool, make_space: MakeSpace, pool: PagePool) -> None:
    space = make_space()
    job = space.standing_job(1)
    with hold(pool.driver, Call.CREATE) as held:
        hand_over(job, (0, 3))
        held.wait_until_begun()
        if closes:
            ending = Background(space.close)
        else:
            words_of_job, spaces = weakref.ref(job), [space]
            del job, space
            ending = Background(lambda: (spaces.clear(), gc.collect()))
            assert words_of_job() is not None  # the mapper is at it
        held.release()
        ending.join()
    assert pool.stats().mapped_page_groups == 0
    if not closes:
        gc.collect()
        assert words_of_job() is None


# -- a commit that is broken off ----------------------------------------------------------------------------------


def test_a_broken_commit_leaves_a_part_of_a_handle_out_of_service(space: AddressSpace) -> None:
    ahead(space, (0, 8)).wait()
    with pytest.raises(KeyError):
        space.commit(ranges((2, 3), (8, 2)), content=MINE, on_mapped=break_off)
    assert table(space)[:11] == [-1] * 8 + [0] * 3
    assert (space.num_ahead, space.count_missing(ranges((0, 10)))) == (8, 10)
    assert space.commit(ranges((2, 3)), content=MINE) == 3
    assert values(space, 2, 3, 4) == [0] * 3


@HOST_ONLY
@pytest.mark.parametrize("why", ["interrupt", "zero"])
def test_a_broken_commit_waits_for_both_streams(
    make_space: MakeSpace, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    # It takes away what the mapper may still be zeroing, and what it was zeroing itself.
    space, other = make_space(), make_space()
    ahead(space, (0, 4)).wait()
    log: list[object] = []
    monkeypatch.setattr(get_mapper(space.pool.driver), "stream", 77)
    monkeypatch.setattr(type(space.pool.driver), "finish", lambda self, stream: log.append((stream, space.num_mapped)))
    leave_dirty(other, 4)
    with (
        fail(space.pool.driver, Call.ZERO, 1 if why == "zero" else 100),
        pytest.raises(KeyError if why == "interrupt" else DriverError),
    ):
        space.commit(ranges((0, 8)), content=MINE, on_mapped=break_off)
    assert log == [(0, 8), (77, 8)]
    assert space.num_mapped == 0


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell that runs the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_while_a_job_is_handed_over(
    space: AddressSpace, monkeypatch: pytest.MonkeyPatch, pool: PagePool
) -> None:
    # Otherwise nobody would wait for it before the addresses are given back.
    real = Mapper._submit

    def submit(self: Mapper, job: Job) -> Job:
        submitted = real(self, job)
        signal.raise_signal(signal.SIGINT)
        return submitted

    monkeypatch.setattr(Mapper, "_submit", submit)
    for do in (lambda: ahead(space, (0, 1)), lambda: space.decommit_later(ranges((8, 1)), forget_content=False)):
        with hold(pool.driver, Call.CREATE) as held:
            blocker = AddressSpace(pool, pool.page_group_bytes)
            with pytest.raises(KeyboardInterrupt):
                ahead(blocker, (0, 1))
            held.wait_until_begun()
            with pytest.raises(KeyboardInterrupt):
                do()
            assert not space.is_settled
            held.release()
            space.settle()
            blocker.close()
            pool.trim()


# -- several at once ----------------------------------------------------------------------------------------------


def test_an_urgent_commit_does_not_wait_for_the_rest_of_a_job(make_space: MakeSpace, pool: PagePool) -> None:
    space, urgent = make_space(), make_space()
    with record(pool.driver) as calls, hold(pool.driver, Call.CREATE) as held:
        job = ahead(space, *((place, 1) for place in range(16)))
        held.wait_until_begun()
        committing = Background(lambda: urgent.commit(ranges((0, 2)), content=MINE))
        wait_until(lambda: has_somebody_at_the_door(pool))
        held.release()
        committing.join()
        job.wait()
    mapped = [made.arguments[0] for made in calls if made.call is Call.MAP]
    assert mapped.index(urgent.base) == 1  # right behind the range that was under way
    assert len(mapped) == 17


def test_turns_are_taken_by_turns(make_space: MakeSpace, pool: PagePool) -> None:
    # Whoever has just had a turn queues behind those who wait.
    space, urgent = make_space(), make_space()
    with record(pool.driver) as calls:
        for number in range(8):
            with hold(pool.driver, Call.CREATE) as held:
                job = ahead(space, (2 * number, 1), (2 * number + 1, 1))
                held.wait_until_begun()
                committing = Background(lambda number=number: urgent.commit(ranges((number, 1)), content=MINE))  # type: ignore[misc]
                wait_until(lambda: has_somebody_at_the_door(pool))
                held.release()
                committing.join()
                job.wait()
    places = [(made.arguments[0] - space.base) // pool.page_group_bytes for made in calls if made.call is Call.MAP]
    of_job = [0 <= place < NUM_PLACES for place in places]
    assert of_job == [True, False, True] * 8


@pytest.mark.parametrize("call", [Call.UNMAP, Call.MAP])
def test_alias_beside_the_mapper(make_space: MakeSpace, pool: PagePool, call: Call) -> None:
    # What it was to show is taken away, or where it was to go is taken, while it waits for its turn.
    space, source = make_space(), make_space()
    source.commit(ranges((0, 4)), content=MINE)
    with hold(pool.driver, call) as held:
        if call is Call.UNMAP:
            job = source.decommit_later(ranges((0, 4)), forget_content=False)
        else:
            job = ahead(space, (0, 4))
        held.wait_until_begun()
        aliasing = Background(lambda: space.alias(2, source, 0, 4))
        wait_until(lambda: has_somebody_at_the_door(pool))
        held.release()
        with pytest.raises(ValueError, match="not all committed" if call is Call.UNMAP else "already hold"):
            aliasing.join()
        job.wait()
    pool.check_integrity()


def test_trim_beside_the_mapper_counts_its_own(make_space: MakeSpace, pool: PagePool) -> None:
    space = make_space()
    space.commit(ranges((0, 4)), content=MINE)
    space.decommit(ranges((0, 4)), forget_content=False)
    given_back: list[int] = []
    with hold(pool.driver, Call.CREATE) as held:
        job = ahead(space, (8, 8))
        held.wait_until_begun()
        trimming = Background(lambda: given_back.append(pool.trim()))
        wait_until(lambda: has_somebody_at_the_door(pool))
        held.release()
        trimming.join()
        job.wait()
    assert given_back == [4 * pool.page_group_bytes]
    assert pool.stats().total_page_groups == 8


def test_a_full_ring_holds_up_who_submits(make_pool: MakePool) -> None:
    pool = make_pool(4)
    space, other = (AddressSpace(pool, 4 * pool.page_group_bytes) for _ in range(2))
    queue = get_mapper(pool.driver).queue
    num_jobs, jobs = 1100, []

    def submit() -> None:
        for _ in range(num_jobs):
            jobs.append(other.decommit_later(ranges((0, 1)), forget_content=False))

    with hold(pool.driver, Call.CREATE) as held:
        first = ahead(space, (0, 1))
        held.wait_until_begun()
        submitting = Background(submit)
        wait_until(lambda: queue[mapper_native._TAIL] - queue[mapper_native._HEAD] == 1024)
        waiting = Background(lambda: ahead(space, (1, 1)).wait())
        assert (submitting.is_running, waiting.is_running, first.is_done) == (True, True, False)
        assert len(jobs) == 1023
        assert queue[mapper_native._TAIL] - queue[mapper_native._HEAD] == 1024
        held.release()
        submitting.join()
        waiting.join()
        first.wait()
    jobs[-1].wait()
    assert [job.num_done for job in jobs] == [1] * num_jobs
    assert all(job.is_done for job in jobs)
    assert table(space) == [-1, -1, 0, 0]


def test_who_waits_for_a_full_ring_is_let_go_at_the_end() -> None:
    queue = np.zeros(mapper_native.QUEUE_WORDS, np.int64)
    jobs = np.zeros((1030, mapper_native.JOB_WORDS), np.int64)
    for job in jobs[:1024]:
        mapper_native.submit(queue, job)
    submitting = [Background(lambda job=job: mapper_native.submit(queue, job)) for job in jobs[1024:]]  # type: ignore[misc]
    assert all(one.is_running for one in submitting)
    mapper_native.stop(queue)
    mapper_native.serve(queue)
    for one, job in zip(submitting, jobs[1024:], strict=True):
        one.join()
        mapper_native.wait(queue, job)
    assert all(mapper_native.is_done(queue, job) for job in jobs)


class BrokenDriver:
    """One whose threads cannot work."""

    device = "cpu"

    def new_stream(self) -> int:
        return 0

    def background_thread(self) -> object:
        raise ZeroDivisionError


def test_a_mapper_that_does_not_start() -> None:
    with pytest.raises(DriverError, match="ZeroDivisionError"):
        Mapper(BrokenDriver())  # type: ignore[arg-type]


@HOST_ONLY
def test_many_threads_submit(make_pool: MakePool) -> None:
    pool = make_pool(8)
    spaces = [AddressSpace(pool, 2 * pool.page_group_bytes) for _ in range(4)]

    def submit(space: AddressSpace) -> None:
        for _ in range(400):
            jobs = [ahead(space, (0, 1)), space.decommit_later(ranges((0, 1)), forget_content=False)]
        jobs[-1].wait()
        assert [job.is_done for job in jobs] == [True, True]

    in_threads(*(lambda space=space: submit(space) for space in spaces))  # type: ignore[misc]
    assert [space.num_mapped for space in spaces] == [0] * 4
    assert all(space.is_settled for space in spaces)


class Actor:
    """Random operations on a space of its own, against a model of what its places in service hold."""

    def __init__(self, pool: PagePool, number: int) -> None:
        self.space = AddressSpace(pool, NUM_PLACES * pool.page_group_bytes)
        self.random = np.random.default_rng(number)
        self.mark, self.number = pool.new_content(), 10 * (1 + number)
        self.held: dict[int, int] = {}
        self.num_shortages = self.num_mapped_ahead = self.num_ready = 0

    def span(self) -> tuple[int, int]:
        first = int(self.random.integers(NUM_PLACES))
        return first, int(self.random.integers(1, min(13, NUM_PLACES + 1 - first)))

    def places(self, *spans: tuple[int, int]) -> set[int]:
        return {place for first, count in spans for place in range(first, first + count)}

    def step(self) -> None:
        space, span = self.space, self.span()
        choice = self.random.random()
        if choice < 0.35:
            self.commit(span)
        elif choice < 0.6:
            job = ahead(space, span, content=self.mark, largest=int(self.random.integers(5)))
            if self.random.random() < 0.2:
                job.cancel()
            if self.random.random() < 0.3:
                job.wait()
                self.num_mapped_ahead += job.num_page_groups
        elif choice < 0.75:
            self.settle()
            whole = [one for one in handles(space) if one[0] >= span[0] and sum(one) <= sum(span)]
            assert space.decommit(ranges(span), forget_content=bool(self.random.integers(2))) == sum(
                size for _, size in whole
            )
            self.forget(self.places(*whole))
        elif choice < 0.95:
            self.settle()
            space.withdraw(ranges(span))
            self.forget(self.places(span))
            if self.random.random() < 0.5:
                # Its other places may share a handle with these, and would go with it.
                whole = [one for one in handles(space) if not self.places(one) & self.held.keys()]
                job = space.decommit_later(ranges(*whole), forget_content=False)
                if self.random.random() < 0.5:
                    job.cancel()
                job.wait()
        else:
            space.settle(cancel=bool(self.random.integers(2)))
        self.check()

    def commit(self, span: tuple[int, int]) -> None:
        outcomes: list[Any] = []
        missing = self.places(span) - self.held.keys()
        try:
            number = self.space.commit(ranges(span), content=self.mark, on_mapped=outcomes.append)
        except Shortage:
            self.num_shortages += 1
            return
        assert number == len(missing)
        self.num_ready += sum(int(outcome[words.NUM_READY]) for outcome in outcomes)
        if self.space.pool.driver.kind == "cuda":
            settle(self.space)
        for place in missing:
            assert place_value(self.space, place) in (0, self.number)  # its own, or nothing
            fill_place(self.space, place, self.number)
            self.held[place] = self.number

    def settle(self) -> None:
        settle(self.space)

    def forget(self, places: set[int]) -> None:
        for place in places:
            self.held.pop(place, None)

    def check(self) -> None:
        signs = self.space.arrays.table[:NUM_PLACES] > 0
        assert set(np.flatnonzero(signs).tolist()) == self.held.keys()
        for place in list(self.held)[:3]:
            assert place_value(self.space, place) == self.number


def test_many_spaces_and_threads_beside_the_mapper(make_pool: MakePool) -> None:
    pool = make_pool(56, size_classes=FOUR)
    actors = [Actor(pool, number) for number in range(4)]

    def act(actor: Actor) -> None:
        for step in range(300):
            actor.step()
            if step % 50 == 7:
                pool.trim()

    in_threads(*(lambda actor=actor: act(actor) for actor in actors))  # type: ignore[misc]
    for actor in actors:
        actor.space.settle()
        actor.space.check_integrity()
        assert all(place_value(actor.space, place) == actor.number for place in actor.held)
    # How often each was met depends on what else the machine does; that each was, does not.
    assert sum(actor.num_shortages for actor in actors) > 0
    assert sum(actor.num_ready for actor in actors) > 0
    assert pool.stats().total_page_groups <= 56


def test_one_mapper_whoever_asks_first() -> None:
    def ask() -> bool:
        found: list[Mapper] = []
        in_threads(*[lambda: found.append(get_mapper(get_driver("cpu")))] * 8)
        mappers = [thread for thread in threading.enumerate() if thread.name.startswith("vtensor mapper")]
        return len(found) == 8 and len(set(map(id, found))) == 1 and len(mappers) == 1 and mappers[0].daemon

    assert in_child(ask) == (0, "True")


# -- the GIL, forks, the end --------------------------------------------------------------------------------------


PREAMBLE = """
    import atexit, os, sys, threading, time
    from tests.helpers.faults import delay
    from tests.helpers.memory import ranges, rows
    from vtensor.allocator.address_space import AddressSpace
    from vtensor.allocator.driver import Call
    from vtensor.allocator.page_pool import PagePool

    def make(num_places=512):
        pool = PagePool("cpu", page_group_bytes=4096, max_size_class_bytes=4096)
        return AddressSpace(pool, num_places * 4096)

    def one_by_one(number):
        return rows(*((place, 1) for place in range(number)), content=2)
"""


def run(code: str, timeout_s: float = 120) -> tuple[str, str, int]:
    """What it prints and complains of, and its exit code."""
    done = in_interpreter("".join((PREAMBLE, code)), timeout_s)
    return done.stdout, done.stderr, done.returncode


def test_mapping_goes_on_while_python_code_holds_the_gil() -> None:
    code = """
    space = make()
    with delay(space.pool.driver, Call.CREATE, 300):
        space.commit_ahead(one_by_one(2)).wait()
        sys.setswitchinterval(1000)  # from here on no thread can take the GIL from this one
        num_ahead, seen = memoryview(space.arrays.header)[3:4], set()
        space.commit_ahead(one_by_one(512))
        deadline = time.monotonic() + 60
        while num_ahead[0] < 512 and time.monotonic() < deadline:
            seen.add(num_ahead[0])
        print(num_ahead[0], len(seen) > 100)
        space.settle()
    """
    assert run(code) == ("512 True\n", "", 0)


ENDS = {
    "jobs pending": """
    space = make()
    for _ in range(100):
        space.commit_ahead(one_by_one(512))
        space.decommit_later(one_by_one(512), forget_content=False)
    """,
    "a job that runs": """
    space = make()
    shim = delay(space.pool.driver, Call.CREATE, 20_000)
    shim.__enter__()
    job = space.commit_ahead(one_by_one(16))
    while not space.num_mapped:
        time.sleep(0.001)
    assert not job.is_done
    """,
    "a handler that still uses it": """
    def handler():
        job = space.commit_ahead(one_by_one(4))
        job.wait()
        space.commit(ranges((0, 8)), content=2)
        space.commit_ahead(one_by_one(16))
        space.withdraw(ranges((0, 8)))
        space.decommit_later(ranges((0, 8)), forget_content=False)
        space.settle()
        space.close()
        space.pool.close()
        print("closed", job.num_done)
    atexit.register(handler)
    space = make()
    space.commit_ahead(one_by_one(512))
    """,
    "a thread that still submits": """
    space = make()
    def submit():
        while True:
            space.commit_ahead(one_by_one(512))
            space.decommit_later(one_by_one(512), forget_content=False)
    threading.Thread(target=submit, daemon=True).start()
    time.sleep(0.2)
    """,
    "a thread that still commits": """
    space = make()
    def work():
        while True:
            space.commit(one_by_one(512), content=2)
            space.decommit(ranges((0, 512)), forget_content=False)
    threading.Thread(target=work, daemon=True).start()
    space.commit_ahead(one_by_one(512))
    time.sleep(0.2)
    """,
    "an error": """
    space = make()
    space.commit_ahead(one_by_one(512))
    sys.exit(7)
    """,
    "a forked child with a mapper of its own": """
    space = make()
    job = space.commit_ahead(one_by_one(512))
    child = os.fork()
    if child == 0:
        space = make()
        job = space.commit_ahead(one_by_one(512))
        job.wait()
        space.commit_ahead(one_by_one(512))
        print("child", job.num_done, flush=True)
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    job.wait()
    print("parent", job.num_done)
    """,
}
PRINTED = {
    "a handler that still uses it": "closed 0\n",
    "a forked child with a mapper of its own": "child 512\nparent 512\n",
}


@pytest.mark.parametrize("what", ENDS)
def test_the_process_ends_with(what: str) -> None:
    assert run(ENDS[what]) == (PRINTED.get(what, ""), "", 7 if what == "an error" else 0)


@HOST_ONLY
def test_fork_while_the_mapper_works(space: AddressSpace, make_space: MakeSpace, pool: PagePool) -> None:
    space.commit(ranges((0, 8)), content=MINE)
    for place in range(8):
        fill_place(space, place, place + 1)

    def use() -> list[str]:
        raised = []
        for do in (
            lambda: ahead(space, (0, 1)),
            lambda: space.withdraw(ranges((0, 1))),
            lambda: space.decommit_later(ranges((0, 1)), forget_content=False),
            lambda: space.commit(ranges((0, 10)), content=MINE),
            space.settle,
            lambda: space.settle(cancel=True),
            space.check_integrity,
            pool.check_integrity,
            pool.trim,
            space.close,
            pool.close,
        ):
            try:
                do()
                raised.append("nothing")
            except ForkedError:
                raised.append("ForkedError")
        assert not space.is_settled
        assert not job.is_done
        # A mapper of its own.
        own = PagePool("cpu", page_group_bytes=4096)
        mine = AddressSpace(own, 64 * 4096)
        mine_job = ahead(mine, (0, 64))
        mine_job.wait()
        raised.append(str(mine.commit(ranges((0, 64)), content=MINE)))
        mine.close()
        own.close()
        return raised

    with hold(pool.driver, Call.CREATE) as held:  # in the middle of a turn
        job, pending = ahead(space, (8, 8), (16, 1)), ahead(space, (20, 1))
        held.wait_until_begun()
        outcome = in_child(use)
        assert outcome == (0, str(["ForkedError"] * 11 + ["64"]))
        held.release()
        pending.wait()
    assert (job.num_done, pending.num_done, space.num_ahead) == (2, 1, 10)
    assert values(space, *range(8)) == list(range(1, 9))
    space.commit(ranges((0, 32)), content=MINE)


@HOST_ONLY
def test_fork_while_another_thread_holds_every_lock(make_space: MakeSpace, pool: PagePool) -> None:
    space, other = make_space(), make_space()
    space.commit(ranges((0, 8)), content=MINE)
    locked, go_on = threading.Event(), threading.Event()

    def hold_locks() -> None:
        with space._lock, other._lock, pool._lock, mapper_module._lock:
            locked.set()
            go_on.wait(60)

    def use() -> list[str]:
        raised = []
        for do in (
            lambda: space.commit(ranges((0, 8)), content=MINE),
            lambda: ahead(space, (0, 8)),
            lambda: space.withdraw(ranges((0, 8))),
            lambda: space.decommit(ranges((0, 8)), forget_content=False),
            lambda: space.decommit_later(ranges((0, 8)), forget_content=False),
            lambda: other.alias(0, space, 0, 8),
            space.settle,
            space.check_integrity,
            space.close,
            lambda: AddressSpace(pool, 1),
            pool.new_content,
            pool.check_integrity,
            pool.trim,
            pool.retire,
            pool.close,
        ):
            try:
                do()
                raised.append("nothing")
            except ForkedError:
                raised.append("ForkedError")
        assert space.count_missing(ranges((0, 9))) == 1  # as in the parent
        own = PagePool("cpu", page_group_bytes=4096)
        mine = AddressSpace(own, 4096)
        ahead(mine, (0, 1)).wait()
        mine.close()
        own.close()
        return raised

    holder = Background(hold_locks)
    assert locked.wait(60)
    outcome = in_child(use)
    go_on.set()
    holder.join()
    assert outcome == (0, str(["ForkedError"] * 15))


@HOST_ONLY
def test_what_a_child_inherits_dies_without_waiting(make_space: MakeSpace, pool: PagePool) -> None:
    spaces: list[AddressSpace] = [make_space()]
    jobs: list[Job] = []

    def die() -> object:
        watched = weakref.ref(spaces[0])
        spaces.clear()
        jobs.clear()
        gc.collect()
        return watched()

    with hold(pool.driver, Call.CREATE) as held:
        jobs.append(ahead(spaces[0], (0, 8)))
        held.wait_until_begun()
        outcome = in_child(die)
        held.release()
        jobs[0].wait()
    assert outcome == (0, "None")
    assert spaces[0].num_ahead == 8


@pytest.fixture(autouse=True)
def _nothing_is_held_up() -> Iterator[None]:
    """A mapper that hangs would hang every test after this one."""
    yield
    queue = get_mapper(get_driver("cpu")).queue
    wait_until(lambda: queue[mapper_native._TAIL] == queue[mapper_native._HEAD])
