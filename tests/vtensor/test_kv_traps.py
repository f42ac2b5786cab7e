"""Bugs that peers shipped, where they concern a cache: leaks, lost data, broken captures, half-mapped slots."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

import vtensor as vt
from tests.helpers.faults import BROKEN, fail
from tests.vtensor.caches import (
    ACTIVE,
    BUSY_CYCLES,
    IN_THE_BACKGROUND,
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
from vtensor.allocator import graveyard
from vtensor.allocator.driver import Call, Driver, get_driver

IN_LARGE_HANDLES: dict[str, Any] = {**IN_THE_BACKGROUND, "size_classes": 4}


def mixed(device: str) -> list[vt.LayerSpec]:
    return [spec(device, 1), spec(device, 1.5, window=7), spec(device, 3, dtype=torch.float32)]


def free_bytes(device: str) -> int:
    """Memory that the device has free, or, on the host, that nobody holds."""
    graveyard.drain()
    driver = get_driver(device)
    if device == "cpu":
        return -int(driver.live_bytes)  # type: ignore[attr-defined]
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other workers use the device's memory, too: run this test without -n")
    torch.cuda.synchronize()
    return driver.memory_info()[0]


# -- 2: growth, and the end of it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, IN_LARGE_HANDLES], ids=len)
@pytest.mark.parametrize("settled", [False, True])
def test_grow_three_times_and_close(settled: bool, options: dict[str, Any], device: str) -> None:
    make(device, *mixed(device), **options).close()
    before = free_bytes(device)
    for _ in range(20):
        cache = make(device, *mixed(device), **options)
        reqid = cache.alloc_reqid()
        for tokens in (5, 20, 60):
            assert cache.step(lengths(cache, {reqid: tokens}))
        if settled:
            stats(cache)
        cache.close()
        cache.close()
    assert abs(free_bytes(device) - before) < (1 if device == "cpu" else 64 << 20)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_access_that_cannot_be_had_leaves_old_bytes(nth: int, device: str, driver: Driver) -> None:
    with make(device, *mixed(device), lookahead_tokens=2) as cache:
        pattern = Pattern(cache)
        cache.alloc_reqid()
        assert cache.step([10, 0, 0, 0])
        pattern.write(0, 0, 10)
        stats(cache)
        with fail(driver, Call.SET_ACCESS, nth, BROKEN), pytest.raises(vt.DriverError, match="nothing was changed"):
            cache.step([30, 0, 0, 0])
        pattern.check(0, 10)
        cache.check_integrity()
        assert cache.step([30, 0, 0, 0])
        pattern.check(0, 10)


# -- 5: near the end of memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("options", [{}, IN_LARGE_HANDLES, {**IN_LARGE_HANDLES, "scrub": True}], ids=len)
def test_churn_near_the_end_of_memory_ends_in_answers(options: dict[str, Any], faulty: bool, device: str) -> None:
    # A thousand calls, of which many cannot be met and some make no sense: true, false or a typed exception, and what
    # requests hold stays as it is.
    random_, num_calls = random.Random(faulty), {"true": 0, "false": 0, "refused": 0, "failed": 0}
    calls = [Call.CREATE, Call.MAP, Call.SET_ACCESS, Call.UNMAP, Call.ZERO]
    with make(device, *mixed(device), capacity=300, max_batch_size=6, **options) as cache:
        pattern, counts = Pattern(cache), dict[int, int]()
        for salt in range(1000 if device == "cpu" else 300):
            with ExitStack() as stack:
                if faulty and random_.random() < 0.2:
                    code = random_.choice([BROKEN, 2])
                    stack.enter_context(fail(cache.pool.driver, random_.choice(calls), random_.randint(1, 2), code))
                try:
                    kind = random_.random()
                    if kind < 0.2:
                        counts[cache.alloc_reqid(random_.choice([None, 0, 30, 64, 65, -1]))] = 0
                    elif kind < 0.4:
                        slot = random_.randint(-1, 6)
                        cache.free_reqid(slot)
                        del counts[slot]
                    else:
                        grown = {slot: random_.choice([count, count + 1, 64, 70, -3]) for slot, count in counts.items()}
                        if random_.random() < 0.7:
                            grown = {slot: min(max(count, 1), 64) for slot, count in grown.items()}
                        if random_.random() < 0.05:
                            grown[random_.randrange(6)] = 9
                        if cache.step(lengths(cache, grown)):
                            num_calls["true"] += 1
                            for slot, count in grown.items():
                                if count > counts[slot]:
                                    pattern.write(slot, counts[slot], count)
                                pattern.check(slot, count, min(counts[slot], count - 1))
                            counts |= grown
                        else:
                            num_calls["false"] += 1
                except (vt.RequestError, vt.OutOfSlotsError):
                    num_calls["refused"] += 1
                except vt.DriverError:
                    assert faulty
                    num_calls["failed"] += 1
            for slot, count in counts.items():
                if count:
                    pattern.check(slot, count)
            if salt % 10 == 0:
                cache.check_integrity()
                assert {slot for slot in range(6) if states(cache)[slot] == ACTIVE} == set(counts)
        found = stats(cache)
        assert found.total_page_groups <= 300
        assert min(vars_of(found)) >= 0
    assert min(num_calls[what] for what in ("true", "false", "refused")) > 10, num_calls
    assert (num_calls["failed"] > 0) == faulty


def vars_of(found: vt.KVCacheStats) -> list[int]:
    """Every number in the statistics."""
    return [
        *(value for name in found.__dataclass_fields__ if isinstance(value := getattr(found, name), int)),
        *found.num_driver_calls.values(),
    ]


# -- 16: vAttention's own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, IN_LARGE_HANDLES], ids=len)
def test_a_sequence_that_is_too_long_maps_nothing(options: dict[str, Any], device: str) -> None:
    with make(device, *mixed(device), **options) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        assert cache.step([3, 64, 0, 0])
        before = stats(cache)
        for wrong in (65, 66, 1 << 31, 1 << 62):
            with pytest.raises(vt.RequestError, match="at most max_context_tokens=64"):
                cache.step([9, wrong, 0, 0])
            assert stats(cache) == before
        assert cache.residency()[0].seq_len == 3


@pytest.mark.slow
def test_numbers_of_terabytes_do_not_wrap(device: str) -> None:
    # More page groups than 31 bits count; their table is read from end to end, so there is one step.
    tokens = (1 << 31) + 5
    config = vt.KVCacheConfig(1, 1, page("cpu") // 4, 2, tokens, page_group_bytes=page(device))
    with vt.KVCacheManager(config, device, capacity_bytes=4 * page(device), eager_slot=False) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        per_page_group = page(device) // page("cpu")
        result = cache.step([tokens, 1])
        assert result.shortfall_page_groups == -(-tokens // per_page_group) + 1 - 4
        assert result.num_mapped == 0
        assert cache.step([2, 1])
        with pytest.raises(vt.RequestError):
            cache.step([tokens + 1, 1])


def test_a_request_without_a_prompt_has_a_slot_of_its_own(device: str) -> None:
    with make(device, **IN_LARGE_HANDLES) as cache:
        assert sorted(cache.alloc_reqid(prompt_tokens=0) for _ in range(4)) == [0, 1, 2, 3]
        with pytest.raises(vt.OutOfSlotsError):
            cache.alloc_reqid(prompt_tokens=0)
        for reqid in range(4):
            cache.free_reqid(reqid)
        assert cache.alloc_reqid(0) != cache.alloc_reqid(0)


@pytest.mark.parametrize("length", [63, 61, 1])
def test_slots_end_where_their_mappings_end(length: int, device: str) -> None:
    # Lengths at which a slot is no multiple of a page group: the last row of each slot and the first of the next.
    with make(device, spec(device, 1.5), spec(device, 4), max_context_tokens=length, lookahead_tokens=3) as cache:
        pattern = Pattern(cache)
        for reqid in range(4):
            assert cache.alloc_reqid() == reqid
        assert cache.step([length] * 4)
        assert stats(cache).mapped_page_groups == 4 * places(cache, length)
        for slot in range(4):
            pattern.write(slot, 0, length)
        for slot in range(4):
            pattern.check(slot, length)


def test_lengths_that_are_too_few_are_not_read_beyond(device: str) -> None:
    with make(device, max_batch_size=4) as cache:
        cache.alloc_reqid()
        whole = np.array([5, 0, 0, 0, 60, 60])
        for part in (whole[:3], whole[:0], whole[:5], whole):
            with pytest.raises(vt.RequestError, match="seq_lens has shape"):
                cache.step(part)
        assert cache.step(whole[:4])
        assert cache.residency()[0].seq_len == 5


# -- a GPU: 3, what is still being read; 4, graphs --------------------------------------------------------------------


TAKERS: dict[str, dict[str, Any]] = {
    "a step": {},
    "another cache": {},
    "the watermark": {"low_watermark": 0.9, "high_watermark": 1.0},
    "reclamation that is not deferred": {"deferred_reclamation": False},
    "trimming": {},
    "trimming by another cache": {},
}


@pytest.mark.gpu
@pytest.mark.parametrize("who", TAKERS)
def test_what_a_side_stream_reads_is_not_taken(who: str, gpu: str) -> None:
    pool = vt.PagePool(gpu, capacity_bytes=16 * page(gpu), page_group_bytes=page(gpu), max_size_class_bytes=page(gpu))
    with make(gpu, spec(gpu, 1), pool=pool, **TAKERS[who]) as cache, make(gpu, spec(gpu, 1), pool=pool) as other:
        side = torch.cuda.Stream()
        cache.record_stream(side)
        cache.alloc_reqid(), cache.alloc_reqid(), other.alloc_reqid()
        assert cache.step([12, 1, 0, 0])
        keys, _ = cache.layer(0, plain=True)
        others, _ = other.layer(0, plain=True)
        keys[0, :12] = 3
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY_CYCLES)
            read = keys[0, :12].float().mean()
        if who.startswith("trimming"):
            assert cache.step([1, 1, 0, 0])
        else:
            cache.free_reqid(0)
        if who in ("another cache", "trimming by another cache"):
            assert other.step([14, 0, 0, 0])
            others[0, :14] = 9
        else:
            for tokens in (2, 3, 14):
                assert cache.step([0, tokens, 0, 0])
                keys[1, :tokens] = 9
        assert read.item() == 3
        del keys, others, _
    close(pool)


@pytest.mark.gpu
@pytest.mark.parametrize("while_mapping", [False, True])
def test_a_graph_replays_right_while_memory_comes_and_goes(while_mapping: bool, gpu: str) -> None:
    # It was captured before anything grew, perhaps while the mapper was at work; what it reads never moves.
    random_ = random.Random(0)
    options = {**IN_LARGE_HANDLES, "capacity": 40, "lookahead_tokens": 20 if while_mapping else 1}
    with make(gpu, spec(gpu, 1), **options) as cache:
        pattern, graph = Pattern(cache), torch.cuda.CUDAGraph()
        assert cache.alloc_reqid() == 0
        assert cache.step([6, 0, 0, 0])
        pattern.write(0, 0, 6)
        keys, values = cache.layer(0, plain=True)
        seen = torch.zeros(2, device=gpu)
        expected = torch.stack([view[0, :6].float().sum() for view in (keys, values)])
        torch.cuda.synchronize()
        if while_mapping:
            assert cache.step([7, 0, 0, 0])  # 20 page groups more are to be mapped
        with torch.cuda.graph(graph):
            seen.copy_(torch.stack([view[0, :6].float().sum() for view in (keys, values)]))
        counts = {0: 7}
        for number in range(60):
            seen.zero_()
            graph.replay()
            free = [slot for slot in range(1, 4) if slot not in counts]
            if free and random_.random() < 0.6:
                counts[cache.alloc_reqid(random_.choice([None, 10]))] = 0
            grown = {slot: min(count + random_.choice([1, 8]), 30) for slot, count in counts.items()}
            if cache.step(lengths(cache, grown)):
                for slot in grown:
                    keys[slot, counts[slot] : grown[slot]] = 11  # not what the graph reads
                counts = grown
            for slot in list(counts):
                if slot and random_.random() < 0.4:
                    cache.free_reqid(slot)
                    del counts[slot]
            if number % 3 == 0:
                graph.replay()
            assert (seen == expected).all(), number
        cache.check_integrity()
        del keys, values, graph


@pytest.mark.gpu
def test_a_captured_kernel_follows_what_grows(gpu: str) -> None:
    # The graph knows the addresses of all slots, and reads the lengths on the device: captured with one token, it is
    # right with any number, in slots that were freed and reclaimed in between, too.
    from tests.vtensor.tiles import sum_of_tiles  # it needs triton

    random_, tile = random.Random(0), 16
    config = vt.KVCacheConfig(64, 2, 64, 4, 500, torch.float16, layers_per_slice=64, overread_tokens=tile - 1)
    with vt.KVCacheManager(config, gpu, capacity_bytes=60 * page(gpu), lookahead_tokens=3) as cache:
        pattern, graph = Pattern(cache), torch.cuda.CUDAGraph()
        reqid = cache.alloc_reqid()
        assert cache.step(lengths(cache, {reqid: 1}))
        pattern.write(reqid, 0, 1)
        view = cache.layer(7, plain=True)[0]
        on_gpu, sums = torch.zeros(4, dtype=torch.int64, device=gpu), torch.zeros(4, 2, 64, device=gpu)
        on_gpu.copy_(torch.tensor(lengths(cache, {reqid: 1})))
        sum_of_tiles[4, 2](view, sums, on_gpu, *view.stride()[:3], tile=tile, head_dim=64)  # it compiles
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            sum_of_tiles[4, 2](view, sums, on_gpu, *view.stride()[:3], tile=tile, head_dim=64)
        counts, salts = {reqid: 1}, {reqid: 0}
        for salt in range(1, 60):
            if len(counts) < 4 and random_.random() < 0.5:
                slot = cache.alloc_reqid()
                counts[slot], salts[slot] = 0, salt
            grown = {slot: min(count + random_.choice([1, 60]), 500) for slot, count in counts.items()}
            if not cache.step(lengths(cache, grown)):
                slot = max(counts, key=lambda slot: counts[slot])
                cache.free_reqid(slot)
                del counts[slot]
                continue
            for slot in grown:
                pattern.write(slot, counts[slot], grown[slot], salts[slot])
            counts = grown
            on_gpu.copy_(torch.tensor(lengths(cache, counts)))
            graph.replay()
            for slot, count in counts.items():
                expected = pattern.numbers(7, 0, slot, 0, count, salts[slot]).float().sum()
                assert (sums[slot] == expected).all(), (slot, count)
            if random_.random() < 0.2:
                slot = random_.choice(list(counts))
                graph.replay()  # still running when the slot is freed
                cache.free_reqid(slot)
                del counts[slot]
                on_gpu[slot] = 0
        del view, graph
