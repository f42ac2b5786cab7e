"""What a cache does before anybody asks, or once nobody needs it: look-ahead, spare slot, watermarks, reclamation."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.faults import BROKEN, delay, fail, num_begun, record
from tests.vtensor.caches import (
    ACTIVE,
    DEFERRED,
    FREE,
    RECLAIMING,
    Busy,
    Pattern,
    close,
    lengths,
    make,
    page,
    places,
    spec,
    states,
    stats,
)
from vtensor.allocator.driver import Call, Driver


def one_size_pool(device: str, num_page_groups: int) -> vt.PagePool:
    size = page(device)
    return vt.PagePool(device, capacity_bytes=num_page_groups * size, page_group_bytes=size, max_size_class_bytes=size)


def stepped(cache: vt.KVCacheManager, by_slot: dict[int, int]) -> tuple[int, int, int]:
    """Make a step: page groups that are missing, that came into service, and that the mapper had ready."""
    result = cache.step(lengths(cache, by_slot))
    return result.shortfall_page_groups, result.num_mapped, result.num_mapped_by_mapper


def begun(cache: vt.KVCacheManager, tokens: int) -> int:
    """A new request that holds so many tokens."""
    slot = cache.alloc_reqid()
    assert cache.step(lengths(cache, {slot: tokens}))
    cache._region.space.settle()
    return slot


# -- look-ahead -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
@pytest.mark.parametrize("growth", [1, 3, 7])
@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_the_next_step_finds_its_memory_ready(lookahead: int, growth: int, layout: str, device: str) -> None:
    # Two layer groups: one with a page group a token, one with less. The slots are not in step.
    with make(device, spec(device, 1), spec(device, 1.5), layout=layout, lookahead_tokens=lookahead) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        held, reach = [0, 0], [0, 0]  # tokens; tokens for which there is memory
        num_asked = num_found = 0
        for tokens in range(1, 65, growth):
            counts = [tokens, min(tokens + 4, 64)]
            needed = ready = 0
            for count, old, far in zip(counts, held, reach, strict=True):
                needed += places(cache, count) - places(cache, old)
                ready += max(0, places(cache, min(far, count)) - places(cache, old))
            assert stepped(cache, dict(enumerate(counts))) == (0, needed, ready)
            num_found += ready
            for slot, count in enumerate(counts):
                far = min(count + lookahead, 64)
                num_asked += max(0, places(cache, far) - places(cache, max(count, reach[slot])))
                held[slot], reach[slot] = count, max(reach[slot], far)
            found = stats(cache)
            assert found.mapped_page_groups == sum(places(cache, far) for far in reach)
            assert found.ahead_page_groups == found.mapped_page_groups - sum(places(cache, count) for count in held)
            assert (found.num_mapped_ahead, found.num_dropped_ahead) == (num_asked, 0)
        assert (num_asked > 0) == (num_found > 0) == (lookahead > 0)
        assert reach[1] == 64  # behind the end of a slot nothing is mapped


def test_a_step_whose_memory_is_ready_leaves_python_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Once its page groups have been in use, and are not zeroed any more: no commit and no job of Python's.
    options: Any = {"deferred_reclamation": False, "eager_slot": False, "capacity_bytes": 400 * page(device)}
    with make(device, spec(device, 1), spec(device, 2), lookahead_tokens=2, **options) as cache:
        cache.free_reqid(begun(cache, 64))
        stats(cache)
        slot = begun(cache, 1)
        pattern = Pattern(cache)
        pattern.write(slot, 0, 1)
        for tokens in range(2, 20):
            with monkeypatch.context() as patch:
                if tokens > 4:
                    patch.setattr(cache._memory, "commit", None)
                    patch.setattr(cache._lookahead, "ask", None)
                needed = places(cache, tokens) - places(cache, tokens - 1)
                assert stepped(cache, {slot: tokens}) == (0, needed, needed)
            pattern.write(slot, tokens - 1, tokens)
            pattern.check(slot, tokens)
            cache._region.space.settle()
            if device != "cpu":
                torch.cuda.synchronize()


def test_only_slots_that_take_part_are_looked_after(device: str) -> None:
    with make(device, spec(device, 1), lookahead_tokens=3) as cache:
        cache.alloc_reqid(), cache.alloc_reqid(), cache.alloc_reqid()
        assert cache.step([5, 9, 0, 0])
        assert stats(cache).mapped_page_groups == 8 + 12
        assert cache.step([6, 0, 0, 0])
        assert stats(cache).mapped_page_groups == 9 + 12
        assert cache.step([4, 0, 2, 0])  # what was shortened has enough
        assert stats(cache).mapped_page_groups == 9 + 12 + 5


def test_look_ahead_that_is_late_does_no_harm(device: str, driver: Driver) -> None:
    # The mapper is at it, or has not begun, when the next step comes: nobody maps twice, nobody misses anything.
    with make(device, spec(device, 1), spec(device, 2), lookahead_tokens=5) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        pattern = Pattern(cache)
        with delay(driver, Call.MAP, 300):
            for tokens in range(1, 60):
                shortfall, num_mapped, num_ready = stepped(cache, {0: tokens, 1: 60})
                assert (shortfall, num_ready <= num_mapped) == (0, True)
                pattern.write(0, tokens - 1, tokens)
                pattern.check(0, tokens)
        assert stats(cache).mapped_page_groups == 2 * places(cache, 64)


def test_look_ahead_without_memory_is_dropped_and_counted(device: str) -> None:
    # A range (four page groups in each of two layers) is mapped whole or not at all; no shortfall tells of it.
    layers = spec(device, 1), spec(device, 1, dtype=torch.float16)
    with make(device, *layers, lookahead_tokens=4, capacity=2 * 11 - 1) as cache:
        cache.alloc_reqid()
        assert stepped(cache, {0: 7}) == (0, 14, 0)
        found = stats(cache)
        assert (found.num_mapped_ahead, found.num_dropped_ahead, found.ahead_page_groups) == (4, 1, 4)
        assert stepped(cache, {0: 8}) == (0, 2, 1)
        assert stats(cache).ahead_page_groups == 5  # three of those, and one more in each layer
        assert stepped(cache, {0: 11}) == (1, 0, 0)
        assert stats(cache).num_dropped_ahead == 1
        assert stepped(cache, {0: 10}) == (0, 4, 2)
        cache.check_integrity()


@pytest.mark.parametrize("call", [Call.CREATE, Call.MAP, Call.SET_ACCESS, Call.ZERO])
def test_look_ahead_that_fails_is_dropped_and_counted(call: Call, device: str, driver: Driver) -> None:
    pool = one_size_pool(device, 40)
    if call is Call.ZERO:  # what another one leaves behind has to be zeroed, also where fresh memory has not
        with make(device, spec(device, 1), pool=pool) as other:
            other.alloc_reqid()
            assert other.step([40, 0, 0, 0])
            Pattern(other).write(0, 0, 40)
    with make(device, spec(device, 1), lookahead_tokens=4, pool=pool) as cache:
        cache.alloc_reqid()
        assert stepped(cache, {0: 3}) == (0, 3, 0)
        assert stats(cache).ahead_page_groups == 4
        with fail(driver, call, 1, BROKEN) as calls:
            assert stepped(cache, {0: 4}) == (0, 1, 1)  # it needs no call; the mapper makes the next one
            found = stats(cache)
        assert [made.call for made in calls if made.code] == [call]
        assert (found.num_mapped_ahead, found.num_dropped_ahead) == (4, 1)
        cache.check_integrity()
        assert stepped(cache, {0: 8}) == (0, 4, 3 + (call is Call.ZERO))  # then it is there, though not yet zeroed
        assert not any(view[0, :8].any() for view in cache.layer(0))
        assert stats(cache).num_dropped_ahead == 1
    close(pool)


# -- what is needed now comes before what may be needed --------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("size_classes", [1, 4])
def test_a_real_need_takes_what_was_mapped_ahead(size_classes: int, is_late: bool, device: str, driver: Driver) -> None:
    with make(device, spec(device, 1), lookahead_tokens=8, capacity=20, size_classes=size_classes) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        pattern = Pattern(cache)
        with delay(driver, Call.MAP, 1000 if is_late else 0):
            assert stepped(cache, {0: 2, 1: 2})[0] == 0
            for slot in (0, 1):
                pattern.write(slot, 0, 2)
            if not is_late:
                assert stats(cache).ahead_page_groups == 16
            shortfall, num_mapped, _ = stepped(cache, {0: 2, 1: 18})
            assert (shortfall, num_mapped) == (0, 16)
        pattern.write(1, 2, 18)
        pattern.check(0, 2)
        pattern.check(1, 18)
        found = stats(cache)
        assert (found.mapped_page_groups, found.ahead_page_groups) == (20, 0)
        if not is_late:
            assert found.num_trimmed == 8  # of slot 0, all that it did not need yet
        assert stepped(cache, {0: 3, 1: 18}) == (1, 0, 0)


def test_look_ahead_that_was_taken_is_made_again(device: str) -> None:
    with make(device, spec(device, 1), lookahead_tokens=8, capacity=20) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        assert stepped(cache, {0: 2, 1: 2})[0] == 0
        stats(cache)
        assert stepped(cache, {1: 18})[0] == 0  # takes all that slot 0 had ahead
        assert stats(cache).ahead_page_groups == 0
        cache.free_reqid(1)
        cache.pool.ask_holders(100)
        assert stepped(cache, {0: 3}) == (0, 1, 0)
        assert stats(cache).ahead_page_groups == 8
        assert stepped(cache, {0: 11}) == (0, 8, 8)


@pytest.mark.parametrize("options", [{}, {"eager_slot": True}, {"lookahead_tokens": 5}], ids=str)
@pytest.mark.parametrize("size_classes", [1, 2, 6])
def test_a_shortfall_is_exact_whatever_was_mapped_ahead(size_classes: int, options: Any, device: str) -> None:
    # With a deferred slot, surplus, look-ahead, a spare slot: one page group less would not have been enough.
    def attempt(capacity: int, pause: Callable[[vt.KVCacheManager], object]) -> int:
        layers = spec(device, 1), spec(device, 1.5)
        with make(device, *layers, size_classes=size_classes, capacity=capacity, **options) as cache:
            for _ in range(3):
                cache.alloc_reqid()
            for counts in ({0: 5, 1: 9, 2: 7}, {0: 6, 1: 4, 2: 7}, {0: 7, 2: 8}):
                assert cache.step(lengths(cache, counts))
                pause(cache)
            cache.free_reqid(0)
            pause(cache)
            before = cache.residency()
            shortfall = stepped(cache, {1: 5, 2: 60})[0]
            if shortfall:
                assert [slot.seq_len for slot in cache.residency()] == [slot.seq_len for slot in before]
            cache.check_integrity()
            return shortfall

    enough = 75  # for all that comes before
    for pause in (stats, lambda cache: None) if size_classes == 1 else (stats,):
        shortfall = attempt(enough, pause)
        assert shortfall > 1
        assert attempt(enough + shortfall, pause) == 0
        assert attempt(enough + shortfall - 1, pause) == 1
        if size_classes == 1:
            assert enough + shortfall == (60 + 40) + (5 + 4)  # slot 2, and what slot 1 holds


# -- the spare slot ---------------------------------------------------------------------------------------------------

EAGER = {"eager_slot": True}


@pytest.mark.parametrize(
    ("prompts", "median"), [([7], 7), ([3, 9, 5], 5), ([20, 2], 11), ([50] * 32 + [6] * 17, 6), ([1] * 100, 1)], ids=str
)
@pytest.mark.parametrize("size_classes", [1, 4])
def test_a_spare_slot_for_the_median_of_the_last_prompts(
    prompts: list[int], median: int, size_classes: int, device: str
) -> None:
    # One request stays; the others come and go in the only slot besides. What they leave goes back at once.
    options = {"deferred_reclamation": False, "size_classes": size_classes, "max_batch_size": 2, **EAGER}
    with make(device, spec(device, 1), spec(device, 1.5), **options) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        assert stepped(cache, {0: prompts[0]})[0] == 0
        for tokens in prompts[1:]:
            assert stepped(cache, {1: tokens})[0] == 0
            cache.free_reqid(1)
            assert cache.alloc_reqid() == 1
        assert stats(cache).num_mapped_ahead == 0  # there was no slot to spare
        cache.free_reqid(1)
        stats(cache)
        assert stepped(cache, {0: 60})[0] == 0
        found = stats(cache)
        assert states(cache) == [ACTIVE, DEFERRED]
        assert cache.residency()[1].committed_bytes == 0  # not in service yet
        assert found.ahead_page_groups == found.num_mapped_ahead == places(cache, median)


def test_there_is_one_spare_slot_that_grows_with_the_median(device: str) -> None:
    with make(device, spec(device, 1), max_batch_size=4, deferred_reclamation=False, **EAGER) as cache:
        stays, tokens = cache.alloc_reqid(), 30
        assert stepped(cache, {stays: 2})[0] == 0
        for prompt, median in ((2, 2), (12, 2), (12, 7), (12, 12), (30, 12), (60, 12)):
            reqid = cache.alloc_reqid()
            tokens += 1
            assert stepped(cache, {stays: tokens, reqid: prompt})[0] == 0
            cache.free_reqid(reqid)
            stats(cache)
            tokens += 1
            assert stepped(cache, {stays: tokens})[0] == 0
            found = stats(cache)
            assert sorted(states(cache)) == [FREE, FREE, ACTIVE, DEFERRED]
            assert found.ahead_page_groups == median


def test_admission_to_the_spare_slot_maps_nothing(device: str, driver: Driver) -> None:
    with make(device, spec(device, 1), max_batch_size=2, **EAGER) as cache:
        assert stepped(cache, {cache.alloc_reqid(): 9}) == (0, 9, 0)
        assert stats(cache).ahead_page_groups == 9
        assert states(cache) == [ACTIVE, DEFERRED]
        with record(driver) as calls:
            assert cache.alloc_reqid(prompt_tokens=9) == 1
            assert stepped(cache, {0: 9, 1: 9}) == (0, 9, 9)
            found = stats(cache)
        assert {made.call for made in calls} <= {Call.ZERO}
        assert (found.ahead_page_groups, found.num_mapped_ahead) == (0, 9)
        assert stepped(cache, {0: 9, 1: 11}) == (0, 2, 0)


def test_the_spare_slot_is_switchable(device: str) -> None:
    with make(device, eager_slot=False) as cache:
        assert stepped(cache, {cache.alloc_reqid(): 9})[0] == 0
        found = stats(cache)
        assert (found.num_mapped_ahead, found.num_deferred_slots) == (0, 0)


def test_no_spare_slot_before_anybody_had_a_prompt(device: str) -> None:
    with make(device, lookahead_tokens=1, **EAGER) as cache:
        cache.alloc_reqid()
        assert cache.step([0, 0, 0, 0])
        assert stats(cache).num_mapped_ahead == 0


def test_a_deferred_slot_that_covers_the_median_is_spare_enough(device: str) -> None:
    with make(device, spec(device, 1), **EAGER) as cache:
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        assert cache.step([6, 6, 0, 0])
        assert stats(cache).ahead_page_groups == 6
        cache.free_reqid(first)
        assert stepped(cache, {second: 7})[0] == 0
        assert states(cache) == [DEFERRED, ACTIVE, DEFERRED, FREE]
        assert stats(cache).num_mapped_ahead == 6
        assert cache.alloc_reqid(prompt_tokens=60) in (first, 2)
        assert cache.alloc_reqid(prompt_tokens=60) in (first, 2)
        assert stepped(cache, {second: 8})[0] == 0
        assert states(cache) == [ACTIVE, ACTIVE, ACTIVE, DEFERRED]
        assert stats(cache).num_mapped_ahead == 12


@pytest.mark.parametrize("lookahead", [0, 4])
@pytest.mark.parametrize("enough", [True, False])
def test_the_spare_slot_stays_above_the_high_watermark(
    enough: bool, lookahead: int, device: str, driver: Driver
) -> None:
    # 30 page groups for the first request, its look-ahead, 30 for the spare slot, and half of all must remain. What the
    # mapper is just at may be counted twice.
    capacity = 2 * (60 + lookahead) + (2 * lookahead if enough else -2)
    watermarks = {"low_watermark": 0.1, "high_watermark": 0.5}
    options = {"capacity": capacity, "lookahead_tokens": lookahead, **watermarks, **EAGER}
    with make(device, spec(device, 1), **options) as cache:
        with delay(driver, Call.MAP, 1000):  # look-ahead is still to come when the spare slot is thought of
            assert stepped(cache, {cache.alloc_reqid(): 30})[0] == 0
            found = stats(cache)
        assert found.num_deferred_slots == enough
        assert found.ahead_page_groups == lookahead + (30 if enough else 0)
        assert capacity - found.mapped_page_groups >= 0.5 * capacity


def test_the_spare_slot_is_given_up_for_a_real_need(device: str) -> None:
    with make(device, spec(device, 1), capacity=20, **EAGER) as cache:
        cache.alloc_reqid()
        assert stepped(cache, {0: 8})[0] == 0
        assert stats(cache).ahead_page_groups == 8
        assert stepped(cache, {0: 21}) == (1, 0, 0)
        assert stats(cache).ahead_page_groups == 8
        assert stepped(cache, {0: 20}) == (0, 12, 0)
        found = stats(cache)
        assert (found.num_reclaimed, found.mapped_page_groups) == (8, 20)
        assert states(cache) == [ACTIVE, FREE, FREE, FREE]


@pytest.mark.parametrize("nth", [1, 2])
def test_best_fit_keeps_no_slot_that_is_empty(nth: int, device: str, driver: Driver) -> None:
    # Not all of the spare slot's memory could be had: it covers no prompt, whatever it was meant for, and is no spare
    # one (vAttention's best fit kept an empty first slot).
    with make(device, spec(device, 1), spec(device, 1, dtype=torch.float16), **EAGER) as cache:
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        cache.free_reqid(first)
        with fail(driver, Call.SET_ACCESS, 2 + nth, BROKEN):  # two are the step's own
            assert stepped(cache, {second: 8}) == (0, 16, 0)
            found = stats(cache)
        assert (found.num_dropped_ahead, found.ahead_page_groups) == (3 - nth, 8 * (nth - 1))
        cache.check_integrity()
        cache.free_reqid(second)
        assert cache.alloc_reqid(prompt_tokens=8) == second  # and not the first, which holds less
        assert states(cache)[first] == (FREE if nth == 1 else DEFERRED)
        assert stepped(cache, {second: 8}) == (0, 0, 0)
        assert stepped(cache, {second: 9}) == (0, 2, 0)
        assert stats(cache).ahead_page_groups == 16  # this time there is one
        assert cache.alloc_reqid(prompt_tokens=8) == first
        assert stepped(cache, {first: 8}) == (0, 16, 16)
        cache.check_integrity()


def test_a_spare_slot_outlives_look_ahead_that_is_dropped_meanwhile(
    device: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Look-ahead fails between the choice of a spare slot and the order to map it.
    with make(device, spec(device, 1), lookahead_tokens=1, **EAGER) as cache:
        spare = cache._slots.spare

        def spare_and_wait(slot: int, tokens: int) -> Any:
            ranges = spare(slot, tokens)
            cache._region.space.settle()
            return ranges

        monkeypatch.setattr(cache._slots, "spare", spare_and_wait)
        cache.alloc_reqid()
        with delay(driver, Call.MAP, 5000), fail(driver, Call.SET_ACCESS, 2, BROKEN):  # the first is the step's own
            assert stepped(cache, {0: 5}) == (0, 5, 0)
            found = stats(cache)
        assert (found.num_dropped_ahead, found.ahead_page_groups) == (1, 5)
        cache.check_integrity()
        assert states(cache)[1] == DEFERRED
        assert cache.alloc_reqid(prompt_tokens=5) == 1
        assert stepped(cache, {1: 5}) == (0, 5, 5)


def test_best_fit_among_what_was_freed_without_a_token(device: str) -> None:
    with make(device, spec(device, 1), max_batch_size=3, lookahead_tokens=1) as cache:
        assert [cache.alloc_reqid() for _ in range(3)] == [0, 1, 2]
        assert stepped(cache, {2: 5})[0] == 0
        for reqid in (0, 1, 2):
            cache.free_reqid(reqid)
        assert states(cache) == [FREE, FREE, DEFERRED]
        assert cache.alloc_reqid(prompt_tokens=60) == 2  # the largest, and not the first, which is empty
        assert cache.alloc_reqid(prompt_tokens=60) == 0


# -- watermarks -------------------------------------------------------------------------------------------------------


def device_of(num_page_groups: int, pool: vt.PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a pool without a capacity believe that its device has so many page groups, all of them its own."""

    def memory_info() -> tuple[int, int]:
        free = num_page_groups - pool.stats().total_page_groups
        return free * pool.page_group_bytes, num_page_groups * pool.page_group_bytes

    monkeypatch.setattr(pool.driver, "memory_info", memory_info)


@pytest.fixture(params=["capacity", "device"])
def hundred(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> vt.PagePool:
    """A pool of 100 page groups: its capacity, or all that the device has."""
    if request.param == "capacity":
        return one_size_pool(device, 100)
    pool = vt.PagePool(device, page_group_bytes=page(device), max_size_class_bytes=page(device))
    device_of(100, pool, monkeypatch)
    return pool


def three_deferred(device: str, pool: vt.PagePool, low: float, high: float, **options: Any) -> vt.KVCacheManager:
    """A cache that leaves 40 of 100 page groups. Slots 3 to 5 are active, 2, 0, 1 deferred in that order; 10 each."""
    cache = make(
        device, spec(device, 1), pool=pool, max_batch_size=6, low_watermark=low, high_watermark=high, **options
    )
    for _ in range(6):
        cache.alloc_reqid()
    assert stepped(cache, dict.fromkeys(range(6), 10)) == (0, 60, 0)
    for reqid in (2, 0, 1):
        cache.free_reqid(reqid)
    return cache


@pytest.mark.parametrize("growth", [1, 7, 21])
@pytest.mark.parametrize(
    ("high", "given_up"), [(0.2, [2]), (0.29, [2]), (0.3, [2, 0]), (0.35, [2, 0]), (0.45, [2, 0, 1]), (1.0, [2, 0, 1])]
)
def test_below_the_low_watermark_the_oldest_go(
    high: float, given_up: list[int], growth: int, device: str, hundred: vt.PagePool
) -> None:
    with three_deferred(device, hundred, 0.2, high) as cache:
        pattern = Pattern(cache)
        for slot in range(6):
            pattern.write(slot, 0, 10)
        for tokens in range(10 + growth, 31, growth):
            assert stepped(cache, {3: tokens}) == (0, growth, 0)
        assert stepped(cache, {3: 30})[0] == 0  # 20 page groups are left: as many as shall be
        assert stats(cache).num_reclaimed == 0
        assert stepped(cache, {3: 31})[0] == 0
        found = stats(cache)
        expected = [FREE if slot in given_up else DEFERRED for slot in range(3)]
        assert states(cache) == [*expected, ACTIVE, ACTIVE, ACTIVE]
        assert found.num_reclaimed == 10 * len(given_up)
        assert found.mapped_page_groups == 81 - 10 * len(given_up)
        assert cache.pool.headroom()[0] == 19 + 10 * len(given_up)
        for slot in set(range(6)) - set(given_up):
            pattern.check(slot, 10)
        cache.check_integrity()
    close(hundred)


def test_the_watermark_is_looked_at_after_steps_that_were_ready(
    device: str, hundred: vt.PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # When a step looks, the mapper may have taken the next page group or not: 18 or 19 are left, both ask for two.
    with three_deferred(device, hundred, 0.2, 0.35, lookahead_tokens=1) as cache:
        for tokens in range(11, 40):
            assert stepped(cache, {3: tokens})[0] == 0
            cache._region.space.settle()
            if device == "cpu":  # on a GPU new page groups are zeroed, which is no step's business to know
                monkeypatch.setattr(cache._memory, "commit", None)
        assert stats(cache).num_reclaimed == 2 * (10 + 1)  # with what was looked ahead for them
        assert states(cache)[:3] == [FREE, DEFERRED, FREE]
    close(hundred)


def test_what_arrives_while_a_step_looks_counts(
    device: str, hundred: vt.PagePool, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with three_deferred(device, hundred, 0.2, 0.35) as cache:
        space = cache._region.space

        def headroom() -> tuple[int, int]:
            found = vt.PagePool.headroom(hundred)
            space.settle()
            return found

        with delay(driver, Call.UNMAP, 30_000):
            assert stepped(cache, {3: 31})[0] == 0  # 19 are left: two of ten each shall go
            monkeypatch.setattr(hundred, "headroom", headroom)
            cache._memory.keep_watermark()
        assert stats(cache).num_reclaimed == 2 * 10
        assert states(cache)[:3] == [FREE, DEFERRED, FREE]
    close(hundred)


def test_what_is_unmapped_in_the_background_waits_for_the_device(
    device: str, hundred: vt.PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with three_deferred(device, hundred, 0.2, 0.35) as cache:
        busy = Busy(cache, monkeypatch)
        for slot in (3, 4, 5):  # a round in which the events are the busy device's
            cache.free_reqid(slot)
        assert [cache.alloc_reqid() for _ in range(3)] == [0, 1, 2]
        assert stepped(cache, {0: 40}) == (0, 30, 0)
        found = stats(cache)
        assert found.num_reclaiming_slots == 3
        assert states(cache) == [ACTIVE] * 3 + [RECLAIMING] * 3
        assert (found.num_reclaimed, found.mapped_page_groups, found.ahead_page_groups) == (0, 90, 30)
        assert [slot.committed_bytes for slot in cache.residency()[3:]] == [0, 0, 0]  # out of service at once
        cache.check_integrity()
        busy.is_busy = False
        found = stats(cache)
        assert (found.num_reclaiming_slots, found.num_reclaimed, found.mapped_page_groups) == (0, 30, 60)
        assert states(cache) == [ACTIVE] * 3 + [FREE] * 3
        assert busy.num_stops == 0  # nobody had to wait
    close(hundred)


def test_without_watermarks_deferred_slots_stay(device: str, hundred: vt.PagePool) -> None:
    with three_deferred(device, hundred, 0, 0) as cache:
        assert stepped(cache, {3: 50}) == (0, 40, 0)
        assert stats(cache).num_reclaimed == 0
        assert states(cache) == [DEFERRED] * 3 + [ACTIVE] * 3
    close(hundred)


def test_a_watermark_without_anything_to_give_up(device: str, hundred: vt.PagePool) -> None:
    with make(device, spec(device, 1), pool=hundred, low_watermark=0.9, high_watermark=1.0) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        assert stepped(cache, {0: 60, 1: 20}) == (0, 80, 0)
        assert stepped(cache, {0: 60, 1: 25}) == (0, 5, 0)
        assert stats(cache).num_reclaimed == 0
    close(hundred)


def test_what_others_take_counts_as_well(device: str, hundred: vt.PagePool) -> None:
    with three_deferred(device, hundred, 0.2, 0.35) as cache, make(device, spec(device, 1), pool=hundred) as other:
        other.alloc_reqid()
        assert stepped(other, {0: 34}) == (0, 34, 0)
        for tokens in range(11, 17):  # noticed at the latest when a quarter of what was left is used up
            assert stepped(cache, {3: tokens})[0] == 0
        assert stats(cache).num_reclaimed == 30
        assert stepped(other, {0: 60}) == (0, 26, 0)
    close(hundred)


# -- reclamation ------------------------------------------------------------------------------------------------------


def slices(device: str, number: int) -> list[vt.LayerSpec]:
    """Layers for a cache with `layers_per_slice=1`: so many buffers, each with a page group a token."""
    return [spec(device, 1)] * number


@pytest.mark.parametrize("scrub", [False, True])
def test_a_reclaiming_slot_is_handed_over_while_its_unmapping_waits(
    scrub: bool, device: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"deferred_reclamation": False, "scrub": scrub}
    with make(device, *slices(device, 2), layers_per_slice=1, max_batch_size=2, **options) as cache:
        busy, pattern = Busy(cache, monkeypatch), Pattern(cache)
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        assert stepped(cache, {first: 6, second: 3}) == (0, 18, 0)
        pattern.write(first, 0, 6), pattern.write(second, 0, 3)
        cache.free_reqid(first)
        found = stats(cache)
        assert states(cache) == [RECLAIMING, ACTIVE]
        assert (found.num_reclaiming_slots, found.mapped_page_groups, found.ahead_page_groups) == (1, 18, 12)
        with record(driver) as calls:
            assert cache.alloc_reqid(prompt_tokens=5) == first
            assert busy.num_waits == 1  # the stream waits for it, not the caller
            assert busy.num_stops == 0
            assert stepped(cache, {first: 5, second: 3}) == (0, 10, 10)
        assert {made.call for made in calls} <= {Call.ZERO}
        if scrub:
            assert not any(view[first, :5].any() for layer in (0, 1) for view in cache.layer(layer))
        else:
            pattern.check(first, 5)
        pattern.check(second, 3)
        busy.is_busy = False
        found = stats(cache)
        assert (found.num_reclaimed, found.mapped_page_groups, found.ahead_page_groups) == (0, 18, 2)
        assert stepped(cache, {first: 7, second: 3}) == (0, 4, 2)
        cache.check_integrity()


@pytest.mark.parametrize("scrub", [False, True])
def test_a_reclaiming_slot_is_handed_over_while_its_unmapping_runs(scrub: bool, device: str, driver: Driver) -> None:
    options = {"deferred_reclamation": False, "scrub": scrub, "lookahead_tokens": 1}
    with make(device, *slices(device, 8), layers_per_slice=1, max_batch_size=3, **options) as cache:
        pattern = Pattern(cache)
        reqids = [cache.alloc_reqid() for _ in range(3)]
        assert stepped(cache, dict.fromkeys(reqids, 9)) == (0, 3 * 72, 0)
        for reqid in reqids:
            pattern.write(reqid, 0, 9)
        stats(cache)
        with delay(driver, Call.UNMAP, 30_000):
            cache.free_reqid(1)
            while num_begun(Call.UNMAP) == 0:
                time.sleep(0.001)
            cache.free_reqid(2)  # waits for its turn
            assert cache.alloc_reqid() == 1
            assert stepped(cache, {0: 9, 1: 4})[0] == 0
        found = stats(cache)
        assert 0 < found.num_reclaimed < 8 * 10 + 8 * 10 + 1
        assert states(cache) == [ACTIVE, ACTIVE, FREE]
        pattern.check(0, 9)
        if scrub:
            assert not any(view[1, :4].any() for layer in range(8) for view in cache.layer(layer))
        pattern.write(1, 0, 4, salt=1)
        for tokens in range(5, 40):  # nothing is left of what was to be unmapped: look-ahead works as ever
            stats(cache)
            shortfall, num_mapped, num_ready = stepped(cache, {0: 9, 1: tokens})
            assert (shortfall, num_ready) == (0, num_mapped)
            pattern.write(1, tokens - 1, tokens, salt=1)
            pattern.check(1, tokens, salt=1)
        assert stats(cache).mapped_page_groups == 8 * (10 + 40)
        cache.check_integrity()


def test_an_unmapping_that_fails_is_counted_and_tried_again(device: str, driver: Driver) -> None:
    options = {"deferred_reclamation": False, "max_batch_size": 3}
    with make(device, *slices(device, 3), layers_per_slice=1, **options) as cache:
        for _ in range(3):
            cache.alloc_reqid()
        assert stepped(cache, {0: 4, 1: 4, 2: 4}) == (0, 36, 0)
        stats(cache)
        with fail(driver, Call.UNMAP, 2, BROKEN):
            cache.free_reqid(0)
            cache._region.space.settle()
        assert states(cache)[0] == RECLAIMING
        cache.check_integrity()
        found = stats(cache)
        assert (found.num_failed_releases, found.num_reclaimed, found.num_reclaiming_slots) == (1, 12, 0)
        assert found.mapped_page_groups == 24
        with fail(driver, Call.UNMAP, 1, BROKEN, times=2):
            cache.free_reqid(1), cache.free_reqid(2)
            stats(cache)
        found = stats(cache)
        assert found.num_failed_releases == 3
        assert (found.num_reclaimed, found.mapped_page_groups) == (36, 0)
        assert states(cache) == [FREE] * 3


@pytest.mark.parametrize("deferred", [False, True])
def test_a_slot_that_cannot_be_scrubbed_is_not_handed_over(
    deferred: bool, device: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nor is it lost: its memory can be had by others, once the device has finished with it, and so can it.
    with make(device, spec(device, 1), scrub=True, deferred_reclamation=deferred, capacity=10) as cache:
        busy, pattern = Busy(cache, monkeypatch), Pattern(cache)
        cache.alloc_reqid(), cache.alloc_reqid()
        assert stepped(cache, {0: 6, 1: 2})[0] == 0
        pattern.write(0, 0, 6), pattern.write(1, 0, 2)
        cache.free_reqid(0)
        with fail(driver, Call.ZERO, 1, BROKEN), pytest.raises(vt.DriverError, match="cuMemsetD8Async"):
            cache.alloc_reqid(prompt_tokens=6)
        cache.check_integrity()
        assert stats(cache).num_active_slots == 1
        assert busy.num_stops == 0
        assert stepped(cache, {1: 10})[0] == 0
        assert busy.num_stops > 0  # before its memory was taken
        assert not any(view[1, 2:10].any() for view in cache.layer(0))
        assert stats(cache).num_reclaiming_slots == 0
        assert stepped(cache, {1: 1})[0] == 0
        assert cache.alloc_reqid() == 0
        assert stepped(cache, {0: 6})[0] == 0
        assert not any(view[0, :6].any() for view in cache.layer(0))


def test_a_need_that_cannot_wait_unmaps_what_waits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(device, spec(device, 1), capacity=10, deferred_reclamation=False) as cache:
        busy = Busy(cache, monkeypatch)
        cache.alloc_reqid(), cache.alloc_reqid()
        assert stepped(cache, {0: 6, 1: 2})[0] == 0
        cache.free_reqid(0)
        assert stepped(cache, {1: 4}) == (0, 2, 0)  # there is enough
        assert (busy.num_stops, states(cache)[0]) == (0, RECLAIMING)
        assert stepped(cache, {1: 5}) == (0, 1, 0)
        assert (busy.num_stops, states(cache)[0]) == (1, FREE)
        assert stats(cache).num_reclaimed == 6


def test_what_was_shortened_is_surplus_and_then_trimmed(device: str) -> None:
    with make(device, spec(device, 1), spec(device, 2), capacity=30) as cache:
        pattern = Pattern(cache)
        cache.alloc_reqid(), cache.alloc_reqid()
        assert stepped(cache, {0: 12, 1: 2}) == (0, 21, 0)
        pattern.write(0, 0, 12)
        assert stepped(cache, {0: 3, 1: 2}) == (0, 0, 0)
        found = stats(cache)
        assert (found.num_trimmed, found.mapped_page_groups) == (0, 21)
        assert stepped(cache, {0: 12, 1: 2}) == (0, 0, 0)
        pattern.check(0, 12)
        assert stepped(cache, {0: 3, 1: 2}) == (0, 0, 0)
        assert stepped(cache, {0: 3, 1: 16}) == (0, 21, 0)
        found = stats(cache)
        assert (found.num_trimmed, found.num_reclaimed, found.mapped_page_groups) == (13, 0, 29)
        pattern.check(0, 3)
        cache.check_integrity()
