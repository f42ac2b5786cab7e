"""KVCacheManager: the contract of alloc_reqid, step and free_reqid, over the host and over a GPU."""

import dataclasses
import gc
import itertools
import mmap
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vtensor as vt
from tests.helpers.child import in_child
from tests.helpers.faults import BROKEN, fail, record
from vtensor.allocator import graveyard
from vtensor.allocator.driver import Call, Driver, get_driver
from vtensor.kvcache import SlotState

SMALL = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 64, "max_batch_size": 4}


def page(device: str) -> int:
    """Bytes of the smallest page group that both a test and its device can live with."""
    return int(max(4096, get_driver(device).granularity_bytes))


# Nothing in the background, and all handles of one size: memory is where the arithmetic says.
IN_STEPS_ONLY = {"lookahead_tokens": 0, "eager_slot": False, "low_watermark": 0.0, "high_watermark": 0.0}


def make(device: str, **options: Any) -> vt.KVCacheManager:
    """A small cache that maps in its steps only. What is no field of its configuration goes to the manager."""
    fields = {field.name for field in dataclasses.fields(vt.KVCacheConfig)}
    shape = {**SMALL, "max_context_tokens": 64 * page(device) // 2048, "page_group_bytes": page(device)}
    options = {**IN_STEPS_ONLY, **options}
    shape |= {name: options.pop(name) for name in list(options) if name in fields}
    if "pool" in options:
        shape["page_group_bytes"] = None
    else:
        shape.setdefault("max_size_class_bytes", shape["page_group_bytes"])
    return vt.KVCacheManager(vt.KVCacheConfig(**shape), device, **options)


def one_size_pool(device: str, num_page_groups: int) -> vt.PagePool:
    """A pool in which every handle is one page group."""
    size = page(device)
    return vt.PagePool(device, capacity_bytes=num_page_groups * size, page_group_bytes=size, max_size_class_bytes=size)


def tokens_for(cache: vt.KVCacheManager, page_groups: int) -> int:
    """The most tokens that so many page groups of a full slice hold."""
    return page_groups * cache.pool.page_group_bytes // cache.config.row_bytes


def expected_page_groups(config: vt.KVCacheConfig, tokens: int) -> int:
    """Page groups of one slot, counted in bytes, without the library's layout."""
    size, head_bytes = config.resolved_page_group_bytes, config.num_kv_heads * config.head_dim * config.dtype.itemsize
    if config.layout == "per_layer":
        return 2 * config.num_layers * -(-tokens * head_bytes // size)
    per_slice = config.resolved_layers_per_slice
    slices = [min(per_slice, config.num_layers - first) for first in range(0, config.num_layers, per_slice)]
    return sum(-(-tokens * 2 * layers * head_bytes // size) for layers in slices)


def snapshot(cache: vt.KVCacheManager) -> tuple[Any, ...]:
    """All that a refused call must leave as it was; the counts of driver calls may grow where calls failed."""
    stats = dataclasses.replace(cache.stats(), num_driver_calls={})
    return stats, cache.residency(), cache._region.space.arrays.table[:4096].tolist(), sorted(cache._memory._events)


def lengths(cache: vt.KVCacheManager, **by_slot: int) -> list[int]:
    """Lengths of all slots, from s0=..., s1=..."""
    return [by_slot.get(f"s{slot}", 0) for slot in range(cache.config.max_batch_size)]


def states(cache: vt.KVCacheManager) -> list[SlotState]:
    return [slot.state for slot in cache.residency()]


def held(cache: vt.KVCacheManager) -> list[int]:
    """Page groups that each slot holds."""
    return [slot.committed_bytes // cache.pool.page_group_bytes for slot in cache.residency()]


FREE, ACTIVE, DEFERRED = SlotState.FREE, SlotState.ACTIVE, SlotState.DEFERRED

SHAPES: dict[str, dict[str, Any]] = {
    "one layer a slice": {"layers_per_slice": 1},
    "two of four": {"layers_per_slice": 2},
    "three of four": {"layers_per_slice": 3},
    "all": {"layers_per_slice": 4},
    "auto": {},
    "per layer": {"layout": "per_layer"},
    "fp8": {"dtype": torch.float8_e4m3fn},
    "fp32, three of seven": {"dtype": torch.float32, "num_layers": 7, "layers_per_slice": 3},
    "fp64, per layer": {"dtype": torch.float64, "layout": "per_layer"},
    "odd heads": {"num_kv_heads": 3, "head_dim": 80, "layers_per_slice": 3},
    "odd heads, per layer": {"num_kv_heads": 5, "head_dim": 96, "layout": "per_layer"},
}


@pytest.fixture(params=SHAPES)
def cache(request: pytest.FixtureRequest, device: str) -> Iterator[vt.KVCacheManager]:
    with make(device, **SHAPES[request.param]) as cache:
        yield cache


# -- where the tokens lie -------------------------------------------------------------------------------------------


def test_views(cache: vt.KVCacheManager, device: str) -> None:
    config = cache.config
    shape = (4, config.max_context_tokens, config.num_kv_heads, config.head_dim)
    for layer in range(config.num_layers):
        for plain in (False, True):
            for view in cache.layer(layer, plain=plain):
                assert view.shape == shape
                assert view.dtype == config.dtype
                assert view.device == torch.device(device)
                assert view.stride()[2:] == (config.head_dim, 1)
                assert view.data_ptr() % 16 == 0
                assert (view.stride(0) * view.element_size()) % cache.pool.page_group_bytes == 0
                assert type(view) is (torch.Tensor if plain else vt.VirtualTensor)
        assert [view.data_ptr() for view in cache.layer(layer)] == [
            view.data_ptr() for view in cache.layer(layer, plain=True)
        ]
    assert cache.stats().committed_bytes == 0


def test_no_two_elements_share_a_byte(cache: vt.KVCacheManager) -> None:
    # Every row of heads of the first, second and last tokens, of every layer and slot: intervals that do not overlap.
    config = cache.config
    row = config.num_kv_heads * config.head_dim * config.dtype.itemsize
    starts = []
    for layer in range(config.num_layers):
        for view in cache.layer(layer, plain=True):
            size = view.element_size()
            for slot in range(config.max_batch_size):
                for token in (0, 1, 2, config.max_context_tokens // 2, config.max_context_tokens - 1):
                    starts.append(view.data_ptr() + (slot * view.stride(0) + token * view.stride(1)) * size)
    starts.sort()
    assert len(set(starts)) == len(starts)
    assert all(second - first >= row for first, second in itertools.pairwise(starts))
    base, size_bytes = cache._region.space.base, cache._region.space.size_bytes
    assert base <= starts[0]
    assert starts[-1] + row <= base + size_bytes


def test_every_token_of_every_layer_is_its_own(cache: vt.KVCacheManager) -> None:
    config = cache.config
    counts = [5, config.max_context_tokens // 3, 0, config.max_context_tokens]
    for _ in counts:
        cache.alloc_reqid()
    assert cache.step(counts)
    for number, slot, view in written(cache, counts):
        view.fill_(number % 13 + slot)
    for number, slot, view in written(cache, counts):
        assert (view.float() == number % 13 + slot).all(), (number, slot)


def written(cache: vt.KVCacheManager, counts: list[int]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """A number, the slot, and its tokens for each K and V of each layer."""
    for layer in range(cache.config.num_layers):
        for is_value, view in enumerate(cache.layer(layer)):
            for slot, count in enumerate(counts):
                yield 2 * layer + is_value + 3 * slot, slot, view[slot, :count]


MODELS: dict[str, dict[str, Any]] = {
    # 28 layers, 14 a slice: rows of 57,344 bytes straddle page groups; and L x row_bytes is no multiple of one.
    "28 layers": {"num_layers": 28, "layers_per_slice": 14, "num_kv_heads": 8, "head_dim": 128},
    "28 layers, 4 heads (Qwen2.5-7B)": {"num_layers": 28, "num_kv_heads": 4, "head_dim": 128},
    "30 layers": {"num_layers": 30, "layers_per_slice": 15, "num_kv_heads": 8, "head_dim": 128},
    "30 layers, 3 heads (SmolLM2-135M)": {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64},
    "32 layers, 96 (Phi-3-mini)": {"num_layers": 32, "num_kv_heads": 32, "head_dim": 96},
    "26 layers, 256 (Gemma)": {"num_layers": 26, "num_kv_heads": 1, "head_dim": 256, "dtype": torch.bfloat16},
    "31 layers": {"num_layers": 31, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16},
    "30 layers, per layer": {"num_layers": 30, "num_kv_heads": 3, "head_dim": 80, "layout": "per_layer"},
}


@pytest.mark.parametrize("context", [131_072, 131_071, 4_097])
@pytest.mark.parametrize("name", MODELS)
def test_no_slot_touches_its_neighbour(name: str, context: int, device: str) -> None:
    # Memory only below the first and the last rows of every slot, put there by hand: with whole slots it would be GB.
    cache = make(device, max_context_tokens=context, page_group_bytes=None, **MODELS[name])
    config, space = cache.config, cache._region.space
    ends = torch.tensor([0, 1, config.max_context_tokens - 2, config.max_context_tokens - 1])
    layers = sorted({0, 1, config.resolved_layers_per_slice - 1, config.num_layers - 1})
    views = {}
    try:
        for layer in layers:
            for is_value, (tracked, plain) in enumerate(
                zip(cache.layer(layer), cache.layer(layer, plain=True), strict=True)
            ):
                for slot in range(config.max_batch_size):
                    for token in ends.tolist():
                        space.commit(tracked[slot, token]._footprint(), content=1)  # type: ignore[attr-defined]
                        views[layer, is_value, slot, token] = plain[slot, token]
        generator = torch.Generator().manual_seed(0)
        patterns = {}
        for key, view in views.items():
            patterns[key] = torch.randn(view.shape, generator=generator).to(view.dtype)
            view.copy_(patterns[key])
        for key, view in views.items():
            assert torch.equal(view.cpu(), patterns[key]), key
        assert space.committed_bytes < (2 << 30)
    finally:
        if device != "cpu":
            torch.cuda.synchronize()
        space.decommit(np.array([[0, space.num_places]], np.int64), forget_content=True)
        views.clear()
        cache.close()


# -- step -----------------------------------------------------------------------------------------------------------


def test_growth_is_exact_to_the_byte(cache: vt.KVCacheManager) -> None:
    config = cache.config
    for _ in range(4):
        cache.alloc_reqid()
    one = max(1, tokens_for(cache, 1))
    before = 0
    for tokens in sorted({1, 2, one - 1 or 1, one, one + 1, 2 * one + 1, 5 * one, config.max_context_tokens}):
        tokens = min(tokens, config.max_context_tokens)
        counts = [tokens, 1, min(3, tokens), 0]
        result = cache.step(counts)
        assert result
        assert result.shortfall_page_groups == 0
        expected = [expected_page_groups(config, count) for count in counts]
        assert held(cache) == expected
        assert result.num_mapped == sum(expected) - before
        assert result.num_mapped_by_mapper == 0
        before = sum(expected)
        stats = cache.stats()
        assert stats.mapped_page_groups == before
        assert stats.committed_bytes == before * cache.pool.page_group_bytes
        assert stats.used_bytes == sum(counts) * config.bytes_per_token
        slot = cache.residency()[0]
        assert tokens <= slot.committed_tokens <= config.max_context_tokens
        assert slot.seq_len == tokens
        cache.check_integrity()


@pytest.mark.parametrize("per_slice", [1, 3, 4])
def test_token_by_token(per_slice: int, device: str) -> None:
    with make(device, layers_per_slice=per_slice, num_kv_heads=1, max_context_tokens=3000) as cache:
        reqid = cache.alloc_reqid()
        counts = [0] * 4
        steps = range(1, 3001) if device == "cpu" else range(1, 3001, 37)
        for tokens in steps:
            counts[reqid] = tokens
            assert cache.step(counts)
            assert cache.stats().mapped_page_groups == expected_page_groups(cache.config, tokens)


def test_a_row_longer_than_a_page_group(device: str) -> None:
    heads = 2 * page(device) // (2 * 4 * 256 * 2)
    with make(device, num_kv_heads=heads * 3 // 2, head_dim=256, max_context_tokens=9) as cache:
        assert cache.config.tokens_per_page_group == 0
        cache.alloc_reqid()
        for tokens in (1, 2, 9):
            assert cache.step(lengths(cache, s0=tokens))
            assert held(cache)[0] == expected_page_groups(cache.config, tokens)
        key, _ = cache.layer(3)
        key[0].fill_(2)
        assert (key[0] == 2).all()


def test_a_step_that_needs_nothing_makes_no_driver_call(device: str, driver: Driver) -> None:
    with make(device) as cache:
        cache.alloc_reqid()
        cache.step(lengths(cache, s0=1))
        with record(driver) as calls:
            for tokens in (1, tokens_for(cache, 1), 2):
                result = cache.step(lengths(cache, s0=tokens))
                assert result
                assert (result.num_mapped, result.waited_us) == (0, 0.0)
                assert cache.residency()[0].seq_len == tokens
        assert len(calls) == 0


def test_a_shorter_sequence_keeps_its_page_groups(device: str, driver: Driver) -> None:
    with make(device) as cache:
        cache.alloc_reqid()
        many = tokens_for(cache, 8)
        cache.step(lengths(cache, s0=many))
        cache.layer(0)[0][0, :many].fill_(3)
        with record(driver) as calls:
            assert cache.step(lengths(cache, s0=1))
            assert cache.residency()[0].seq_len == 1
            assert held(cache)[0] == 8
            assert cache.step(lengths(cache, s0=many))
        assert len(calls) == 0
        assert (cache.layer(0)[0][0, :many] == 3).all()


def test_a_slot_that_sits_out_keeps_everything(device: str) -> None:
    with make(device) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        cache.step(lengths(cache, s0=30, s1=7))
        cache.layer(2)[1][0, :30].fill_(3)
        before = snapshot(cache)
        assert cache.step([0, 0, 0, 0])
        assert snapshot(cache) == before
        assert cache.step(lengths(cache, s1=7))
        assert snapshot(cache) == before
        assert cache.residency()[0].seq_len == 30
        assert (cache.layer(2)[1][0, :30] == 3).all()


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        np.array,
        lambda counts: np.array(counts, np.int32),
        lambda counts: np.array(counts, np.uint8),
        lambda counts: np.array(counts + counts)[:4],
        lambda counts: np.repeat(counts, 2)[::2],
        torch.tensor,
        lambda counts: torch.tensor(counts, dtype=torch.int32),
        lambda counts: torch.tensor(counts).repeat_interleave(2)[::2],
        lambda counts: [np.int64(count) for count in counts],
        lambda counts: [torch.tensor(count) for count in counts],
    ],
)
def test_lengths_in_every_form(convert: Callable[[list[int]], Any]) -> None:
    with make("cpu") as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        given = convert([5, 9, 0, 0])
        assert cache.step(given)
        assert [slot.seq_len for slot in cache.residency()] == [5, 9, 0, 0]
        assert list(map(int, given)) == [5, 9, 0, 0]


@pytest.mark.filterwarnings("ignore")  # torch's own, of nested and quantized tensors
def test_tensors_that_are_no_lists_of_lengths_are_refused() -> None:
    config = vt.KVCacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, max_batch_size=2, max_context_tokens=64)
    with vt.KVCacheManager(config, "cpu") as cache:
        cache.alloc_reqid()
        for odd in (
            torch.nested.nested_tensor([torch.tensor([1, 2])], dtype=torch.int64),
            torch.tensor([1, 0]).to_sparse(),
            torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        ):
            with pytest.raises(vt.RequestError, match="seq_lens is no list of integers"):
                cache.step(odd)
        with pytest.raises(vt.RequestError, match=r"seq_lens\[0\]=-1: a length is 0 or more"):
            cache.step(torch._neg_view(torch.tensor([1, 0])))
        assert cache.step(torch._neg_view(torch.tensor([-3, 0])))
        assert cache.residency()[0].seq_len == 3


@pytest.mark.parametrize("new", [0, 1, 9, 1 << 40, -5])
@pytest.mark.parametrize("convert", [np.array, torch.tensor])
@pytest.mark.parametrize("by_thread", [False, True])
def test_lengths_that_change_while_memory_is_mapped(
    new: int, convert: Callable[[list[int]], Any], by_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make("cpu") as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        unit = tokens_for(cache, 1)
        given = convert([2 * unit, 3 * unit, 0, 0])
        try_commit, changes = cache._region.try_commit, []

        def change() -> None:
            given[:3] = new
            changes.append(new)

        def commit_and_change(ranges: Any) -> int:
            num_mapped = try_commit(ranges)
            if by_thread:
                thread = threading.Thread(target=change)
                thread.start()
                thread.join()
            else:
                change()
            return num_mapped

        monkeypatch.setattr(cache._region, "try_commit", commit_and_change)
        result = cache.step(given)
        assert (bool(result), result.num_mapped, changes) == (True, 5, [new])
        assert [slot.seq_len for slot in cache.residency()] == [2 * unit, 3 * unit, 0, 0]
        assert held(cache) == [2, 3, 0, 0]
        assert given.tolist() == [new, new, new, 0]
        cache.check_integrity()


# -- shortage -------------------------------------------------------------------------------------------------------


def test_a_shortage_is_falsy_exact_and_changes_nothing(device: str) -> None:
    with make(device, capacity_bytes=10 * page(device)) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        assert cache.step(lengths(cache, s0=tokens_for(cache, 6), s1=tokens_for(cache, 2)))
        before = snapshot(cache)
        for counts, shortfall in (
            (lengths(cache, s0=tokens_for(cache, 6), s1=tokens_for(cache, 5)), 1),
            (lengths(cache, s0=tokens_for(cache, 8) + 1, s1=tokens_for(cache, 2)), 1),
            (lengths(cache, s0=tokens_for(cache, 9), s1=tokens_for(cache, 4)), 3),
            (lengths(cache, s0=tokens_for(cache, 6), s1=tokens_for(cache, 60)), 56),
        ):
            result = cache.step(counts)
            assert not result
            assert result.shortfall_page_groups == shortfall
            assert result.num_mapped == 0
            assert snapshot(cache) == before
            cache.check_integrity()
        assert cache.step(lengths(cache, s0=tokens_for(cache, 6), s1=tokens_for(cache, 4)))
        assert cache.stats().free_page_groups == 0


def test_the_shortfall_is_what_more_capacity_would_have_done(device: str) -> None:
    # With slices of both kinds, a deferred slot and surplus: the number is exact, one less would not have been enough.
    def attempt(capacity: int) -> vt.StepResult:
        with make(device, layers_per_slice=3, capacity_bytes=capacity * page(device)) as cache:
            for _ in range(3):
                cache.alloc_reqid()
            unit = tokens_for(cache, 1)
            assert cache.step(lengths(cache, s0=2 * unit, s1=3 * unit, s2=4 * unit))
            cache.free_reqid(0)
            assert cache.step(lengths(cache, s1=unit, s2=4 * unit))
            return cache.step(lengths(cache, s1=unit, s2=40 * unit))

    shortfall = attempt(15).shortfall_page_groups
    assert shortfall > 1
    assert attempt(15 + shortfall)
    assert attempt(15 + shortfall - 1).shortfall_page_groups == 1


def test_a_shortage_takes_deferred_slots_oldest_first_then_surplus(device: str) -> None:
    with make(device, max_batch_size=5, capacity_bytes=20 * page(device)) as cache:
        for _ in range(5):
            cache.alloc_reqid()
        unit = tokens_for(cache, 1)
        cache.step([4 * unit] * 5)
        for reqid in (2, 0, 1):
            cache.free_reqid(reqid)
        assert cache.step(lengths(cache, s3=unit, s4=4 * unit))  # slot 3 has a surplus of three
        assert held(cache) == [4, 4, 4, 4, 4]
        cache.layer(0)[0][3, :unit].fill_(3)

        assert cache.step(lengths(cache, s3=unit, s4=5 * unit))  # 1 needed: the oldest deferred slot goes, whole
        assert held(cache) == [4, 4, 0, 4, 5]
        assert states(cache) == [DEFERRED, DEFERRED, FREE, ACTIVE, ACTIVE]
        assert cache.step(lengths(cache, s3=unit, s4=9 * unit))  # 3 are free by now
        assert held(cache) == [0, 4, 0, 4, 9]
        assert cache.step(lengths(cache, s3=unit, s4=15 * unit))  # 3 free, 4 deferred
        assert held(cache) == [0, 0, 0, 4, 15]
        assert cache.step(lengths(cache, s3=unit, s4=18 * unit))  # 1 free, then the surplus
        assert held(cache) == [0, 0, 0, 1, 18]
        assert (cache.layer(0)[0][3, :unit] == 3).all()
        cache.check_integrity()
        result = cache.step(lengths(cache, s3=unit, s4=20 * unit))
        assert result.shortfall_page_groups == 1
        assert held(cache) == [0, 0, 0, 1, 18]


def test_a_shortage_that_reclaiming_cannot_answer_reclaims_nothing(device: str) -> None:
    with make(device, capacity_bytes=10 * page(device)) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        unit = tokens_for(cache, 1)
        cache.step(lengths(cache, s0=4 * unit, s1=4 * unit))
        cache.free_reqid(0)
        before = snapshot(cache)
        assert cache.step(lengths(cache, s1=12 * unit)).shortfall_page_groups == 2
        assert snapshot(cache) == before
        assert cache.step(lengths(cache, s1=10 * unit))


def test_one_sequence_shrinks_as_another_grows(device: str) -> None:
    with make(device, capacity_bytes=10 * page(device)) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        unit = tokens_for(cache, 1)
        cache.step(lengths(cache, s0=8 * unit, s1=2 * unit))
        key: Any = cache.layer(0)[0]
        key[0, : 8 * unit] = 5
        # What a step shortens is not for that step to use: had it failed, the tokens would be gone.
        assert cache.step(lengths(cache, s0=unit, s1=9 * unit)).shortfall_page_groups == 7
        assert [slot.seq_len for slot in cache.residency()][:2] == [8 * unit, 2 * unit]
        assert (key[0, : 8 * unit] == 5).all()
        assert cache.step(lengths(cache, s0=unit, s1=2 * unit))
        assert cache.step(lengths(cache, s0=unit, s1=9 * unit))
        assert held(cache)[:2] == [1, 9]


def test_a_failing_driver_takes_no_tokens_of_others(driver: Driver, device: str) -> None:
    # Slot 0 was shortened, slot 1 grows into what it left, and then the driver fails.
    with make(device, capacity_bytes=10 * page(device)) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        unit = tokens_for(cache, 1)
        cache.step(lengths(cache, s0=8 * unit, s1=2 * unit))
        cache.step(lengths(cache, s0=unit, s1=2 * unit))
        with fail(driver, Call.MAP, 1, BROKEN), pytest.raises(vt.DriverError):
            cache.step(lengths(cache, s0=unit, s1=9 * unit))
        for slot in cache.residency():
            assert slot.seq_len <= slot.committed_tokens
        cache.check_integrity()
        assert cache.step(lengths(cache, s0=unit, s1=9 * unit))


def thieving(cache: vt.KVCacheManager, thief: vt.VirtualTensor, times: int, at_most: int) -> None:
    """Have another owner of the pool take what each of the cache's first `times` reclaims has freed."""
    reclaim, page_group_bytes = cache._memory.reclaim, cache.pool.page_group_bytes

    def reclaim_and_lose(missing: int, counts: Any) -> bool:
        nonlocal times
        has_freed = reclaim(missing, counts)
        free = cache.pool.stats().free_page_groups
        if has_freed and free and times:
            times -= 1
            thief.commit(thief.resident_bytes + min(free, at_most) * page_group_bytes)
        return has_freed

    cache._memory.reclaim = reclaim_and_lose  # type: ignore[method-assign]


@pytest.mark.parametrize("from_surplus", [False, True])
@pytest.mark.parametrize("at_most", [1, 3, 6, 64])
@pytest.mark.parametrize("times", [1, 2, 3, 100])
def test_what_was_reclaimed_may_be_stolen_by_others(times: int, at_most: int, from_surplus: bool, device: str) -> None:
    # Slot 0 needs four page groups more. The others hold four each: deferred, or a surplus of three each.
    size = page(device)
    pool = vt.PagePool(device, capacity_bytes=20 * size, page_group_bytes=size, max_size_class_bytes=size)
    thief = vt.empty(64 * size, dtype=torch.uint8, device=device, pool=pool)
    space: Any = thief._region.space  # type: ignore[union-attr]
    with make(device, pool=pool) as cache:
        for _ in range(4):
            cache.alloc_reqid()
        unit = tokens_for(cache, 1)
        assert cache.step([4 * unit] * 4)
        thief.commit(4 * size)
        key: Any = cache.layer(0)[0]
        key[0, : 4 * unit] = 5
        if from_surplus:
            assert cache.step([4 * unit, 1, 1, 1])
            key[1:, :1] = 6
        else:
            for reqid in (1, 2, 3):
                cache.free_reqid(reqid)
        counts = [slot.seq_len for slot in cache.residency()]
        thieving(cache, thief, times, at_most)
        result = cache.step(lengths(cache, s0=8 * unit))
        del cache._memory.reclaim
        short = result.shortfall_page_groups
        assert short == expected_shortfall([9] if from_surplus else [4, 4, 4], times, at_most)
        assert bool(result) == (short == 0)
        cache.check_integrity()
        if short:
            assert [slot.seq_len for slot in cache.residency()] == counts
            for given, expected in ((short - 1, 1), (1, 0)):  # exact: one less would not have been enough
                space.decommit(np.array([[space.num_mapped - given, given]], np.int64), forget_content=True)
                assert cache.step(lengths(cache, s0=8 * unit)).shortfall_page_groups == expected
        assert [slot.seq_len for slot in cache.residency()] == [8 * unit, *counts[1:]]
        assert held(cache)[0] == 8
        assert (key[0, : 4 * unit] == 5).all()
        assert not key[0, 4 * unit : 8 * unit].isnan().any()  # an UnmappedAccessError where a page group is missing
        if from_surplus:
            assert (key[1:, :1] == 6).all()
        cache.check_integrity()


def expected_shortfall(reclaimed: list[int], times: int, at_most: int) -> int:
    """What is missing of four page groups, if a thief takes so much of each of the first so many reclaims."""
    free = 0
    for number, page_groups in enumerate(reclaimed):
        free += page_groups
        free -= min(free, at_most) if number < times else 0
        if free >= 4:
            return 0
    return 4 - free


class _Passed:
    """An event of a device that has finished, but whose release nobody has carried out."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


def test_a_shortage_waits_for_what_others_gave_up(device: str) -> None:
    pool = one_size_pool(device, 8)
    with make(device, pool=pool) as cache:
        other = make(device, pool=pool)
        other.alloc_reqid()
        other.step(lengths(other, s0=tokens_for(other, 6)))
        space = other._region.space
        other._region.streams.finish()
        graveyard.bury([_Passed()], lambda: space.decommit(np.array([[0, 6]], np.int64), forget_content=True))
        slots = other._slots.arrays
        slots.state[0] = slots.high[:, 0] = slots.extent[:, 0] = 0
        cache.alloc_reqid()
        assert cache.step(lengths(cache, s0=tokens_for(cache, 8)))
        other.close()
    pool.close()


def test_a_device_without_memory_is_a_shortage_as_well(device: str, driver: Driver) -> None:
    with make(device) as cache:  # no capacity: the device says when there is no more
        cache.alloc_reqid(), cache.alloc_reqid()
        unit = tokens_for(cache, 1)
        cache.step(lengths(cache, s0=2 * unit, s1=2 * unit))
        cache.free_reqid(0)
        before = snapshot(cache)
        with fail(driver, Call.CREATE, 2, code=2, times=1 << 30):  # two page groups can be had at most: 1 and then none
            result = cache.step(lengths(cache, s1=9 * unit))
        assert not result
        assert result.shortfall_page_groups > 0
        assert snapshot(cache)[1:] == before[1:]
        with fail(driver, Call.CREATE, 1, code=2, times=1 << 30):  # none, but the deferred slot has two
            assert cache.step(lengths(cache, s1=4 * unit))
        assert held(cache)[:2] == [0, 4]
        cache.check_integrity()


# -- slots ----------------------------------------------------------------------------------------------------------


def test_the_lowest_free_slot_comes_first(device: str) -> None:
    with make(device) as cache:
        assert [cache.alloc_reqid() for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(vt.OutOfSlotsError, match="all 4 slots hold active requests"):
            cache.alloc_reqid()
        for reqid in (3, 1, 2):
            cache.free_reqid(reqid)
        assert [cache.alloc_reqid() for _ in range(3)] == [1, 2, 3]
        assert cache.stats().num_active_slots == 4


def test_the_best_fit(device: str) -> None:
    with make(device, max_batch_size=6) as cache:
        for _ in range(6):
            cache.alloc_reqid()
        unit = tokens_for(cache, 1)
        cache.step([0, 3 * unit, 8 * unit, 5 * unit, 2 * unit, 5 * unit])
        for reqid in (0, 5, 3, 2, 1, 4):
            cache.free_reqid(reqid)
        assert states(cache) == [FREE, *[DEFERRED] * 5]  # one that holds nothing is free, and no fit for anybody
        assert cache.alloc_reqid(prompt_tokens=4 * unit) == 3  # the smallest that covers; the lowest of two
        assert cache.alloc_reqid(prompt_tokens=5 * unit) == 5  # covers exactly
        assert cache.alloc_reqid(prompt_tokens=5 * unit) == 2
        assert cache.alloc_reqid(prompt_tokens=5 * unit) == 1  # none covers: the largest
        assert cache.alloc_reqid(prompt_tokens=1) == 4
        assert cache.alloc_reqid(prompt_tokens=1) == 0  # none is deferred: the lowest


def test_without_a_prompt_the_lowest(device: str) -> None:
    with make(device) as cache:
        for _ in range(4):
            cache.alloc_reqid()
        cache.step(lengths(cache, s2=9))
        for reqid in (3, 2, 1):
            cache.free_reqid(reqid)
        assert cache.alloc_reqid() == 1
        assert cache.alloc_reqid(prompt_tokens=0) == 2


def test_a_deferred_slot_is_reused_without_a_driver_call(device: str, driver: Driver) -> None:
    with make(device) as cache:
        cache.alloc_reqid()
        tokens = tokens_for(cache, 3)
        cache.step(lengths(cache, s0=tokens))
        before = [view.data_ptr() for view in cache.layer(1)]
        with record(driver) as calls:
            cache.free_reqid(0)
            assert states(cache)[0] == DEFERRED
            assert cache.stats().used_bytes == 0
            assert cache.stats().num_deferred_slots == 1
            assert cache.alloc_reqid(prompt_tokens=tokens) == 0
            assert cache.residency()[0].seq_len == 0
            assert cache.step(lengths(cache, s0=tokens))
        assert len(calls) == 0
        assert [view.data_ptr() for view in cache.layer(1)] == before


def test_without_deferred_reclamation_memory_goes_back_at_once(device: str) -> None:
    with make(device, deferred_reclamation=False, capacity_bytes=8 * page(device)) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        unit = tokens_for(cache, 1)
        cache.step(lengths(cache, s0=3 * unit, s1=2 * unit))
        if device != "cpu":
            torch.cuda.synchronize()
        cache.free_reqid(0)
        assert states(cache) == [FREE, ACTIVE, FREE, FREE]
        assert held(cache) == [0, 2, 0, 0]
        assert cache.stats().free_page_groups == 3
        assert cache._memory._events == {}
        assert cache.alloc_reqid(prompt_tokens=9) == 0
        assert cache.step(lengths(cache, s0=6 * unit, s1=2 * unit))
        cache.check_integrity()


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("shrink", [True, False])
def test_scrub_shows_no_request_anothers_data(deferred: bool, shrink: bool, device: str) -> None:
    with make(device, scrub=True, deferred_reclamation=deferred, capacity_bytes=8 * page(device)) as cache:
        unit = tokens_for(cache, 1)
        for _ in range(3):
            reqid = cache.alloc_reqid(prompt_tokens=3 * unit)
            cache.step(lengths(cache, **{f"s{reqid}": 3 * unit}))
            for layer in range(4):
                for view in cache.layer(layer):
                    assert not view[reqid, : 3 * unit].any()
                    view[reqid, : 3 * unit].fill_(float("nan"))
            if shrink:
                cache.step(lengths(cache, **{f"s{reqid}": 1}))
            cache.free_reqid(reqid)
        # and across slots, through the pool
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        assert cache.step(lengths(cache, **{f"s{first}": 2 * unit, f"s{second}": 6 * unit}))
        for view in cache.layer(3):
            assert not view[second, : 6 * unit].any()
            assert not view[first, : 2 * unit].any()


def test_without_scrub_nothing_is_zeroed_but_all_is_finite(device: str) -> None:
    with make(device, capacity_bytes=8 * page(device)) as cache:
        unit = tokens_for(cache, 1)
        cache.alloc_reqid()
        cache.step(lengths(cache, s0=3 * unit))
        assert not cache.layer(0)[0][0, : 3 * unit].any()  # what comes into service is zero
        cache.layer(0)[0][0, : 3 * unit].fill_(5)
        cache.free_reqid(0)
        cache.alloc_reqid(prompt_tokens=unit)
        cache.step(lengths(cache, s0=unit))
        assert (cache.layer(0)[0][0, :unit] == 5).all()


# -- wrong use ------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[vt.KVCacheManager], object], str]] = {
    "too few lengths": (lambda cache: cache.step([5, 5, 0]), r"shape \(3,\)"),
    "too many lengths": (lambda cache: cache.step([5, 5, 0, 0, 0]), r"shape \(5,\)"),
    "no lengths": (lambda cache: cache.step([]), r"shape \(0,\)"),
    "a number": (lambda cache: cache.step(5), r"shape \(\)"),
    "none": (lambda cache: cache.step(None), "seq_lens"),
    "two dimensions": (lambda cache: cache.step([[5, 5, 0, 0]]), r"shape \(1, 4\)"),
    "ragged": (lambda cache: cache.step([[5], [5, 0], 0, 0]), "seq_lens"),
    "float list": (lambda cache: cache.step([5.0, 5.0, 0, 0]), "float64"),
    "float array": (lambda cache: cache.step(np.array([5, 5, 0, 0], np.float32)), "float32"),
    "float tensor": (lambda cache: cache.step(torch.tensor([5.0, 5, 0, 0])), "float32"),
    "bfloat16 tensor": (lambda cache: cache.step(torch.tensor([5, 5, 0, 0], dtype=torch.bfloat16)), "bfloat16"),
    "complex tensor": (lambda cache: cache.step(torch.tensor([5j, 5, 0, 0])), "complex64"),
    "bool list": (lambda cache: cache.step([True, True, False, False]), "bool"),
    "bool tensor": (lambda cache: cache.step(torch.tensor([True, True, False, False])), "bool"),
    "strings": (lambda cache: cache.step(["5", "5", "0", "0"]), "dtype"),
    "objects": (lambda cache: cache.step([5, None, 0, 0]), "dtype"),
    "huge integers": (lambda cache: cache.step([5, 1 << 70, 0, 0]), "dtype"),
    "negative": (lambda cache: cache.step([5, -1, 0, 0]), r"seq_lens\[1\]=-1: a length is 0 or more"),
    "negative for an idle slot": (lambda cache: cache.step([5, 5, 0, -1]), r"seq_lens\[3\]=-1"),
    "most negative": (lambda cache: cache.step([5, -(1 << 63), 0, 0]), r"seq_lens\[1\]"),
    "unsigned wrap": (lambda cache: cache.step(np.array([5, (1 << 64) - 1, 0, 0], np.uint64)), r"seq_lens\[1\]"),
    "too long": (
        lambda cache: cache.step([5, cache.config.max_context_tokens + 1, 0, 0]),
        "at most max_context_tokens",
    ),
    "far too long": (lambda cache: cache.step([5, (1 << 63) - 1, 0, 0]), "at most max_context_tokens"),
    "not active": (lambda cache: cache.step([5, 5, 1, 0]), r"seq_lens\[2\]=1: the slot is not active"),
    "not active, deferred": (lambda cache: cache.step([5, 5, 0, 1]), r"seq_lens\[3\]=1: the slot is not active"),
    "the first is right": (lambda cache: cache.step([9999, 5, 0, 7]), r"seq_lens"),
    "meta tensor": (lambda cache: cache.step(torch.ones(4, dtype=torch.int64, device="meta")), "lies on meta"),
    "free what is free": (lambda cache: cache.free_reqid(2), "reqid=2 is not active"),
    "free twice": (lambda cache: cache.free_reqid(3), "reqid=3 is not active"),
    "free negative": (lambda cache: cache.free_reqid(-1), "reqid=-1 must be 0 to 3"),
    "free beyond": (lambda cache: cache.free_reqid(4), "reqid=4 must be 0 to 3"),
    "free a bool": (lambda cache: cache.free_reqid(True), "reqid=True must be 0 to 3"),
    "free a float": (lambda cache: cache.free_reqid(1.0), r"reqid=1\.0 must be 0 to 3"),
    "free a string": (lambda cache: cache.free_reqid("1"), "reqid='1' must be 0 to 3"),
    "free None": (lambda cache: cache.free_reqid(None), "reqid=None must be 0 to 3"),
    "negative prompt": (lambda cache: cache.alloc_reqid(-1), "prompt_tokens=-1 must be 0 to"),
    "long prompt": (
        lambda cache: cache.alloc_reqid(cache.config.max_context_tokens + 1),
        "prompt_tokens=.* must be 0 to",
    ),
    "fractional prompt": (lambda cache: cache.alloc_reqid(1.5), r"prompt_tokens=1\.5 must be 0 to"),
    "prompt of words": (lambda cache: cache.alloc_reqid("hello"), "prompt_tokens='hello' must be 0 to"),
    "no such layer": (lambda cache: cache.layer(4), "layer 4 must be 0 to 3"),
    "layer from the end": (lambda cache: cache.layer(-1), "layer -1 must be 0 to 3"),
    "half a layer": (lambda cache: cache.layer(0.5), r"layer 0\.5 must be 0 to 3"),
    "a layer's name": (lambda cache: cache.layer("0"), "layer '0' must be 0 to 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_raises_and_changes_nothing(name: str, device: str) -> None:
    call, message = WRONG[name]
    with make(device) as cache:
        cache.alloc_reqid(), cache.alloc_reqid(), cache.alloc_reqid(), cache.alloc_reqid()
        cache.step([30, 7, 0, 9])
        cache.free_reqid(2)
        cache.free_reqid(3)
        before = snapshot(cache)
        with pytest.raises(vt.RequestError, match=message) as caught:
            call(cache)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, vt.VTensorError)
        assert snapshot(cache) == before
        cache.check_integrity()
        assert cache.step([30, 7, 0, 0])


def test_numpy_integers_are_integers(device: str) -> None:
    with make(device) as cache:
        assert cache.alloc_reqid(prompt_tokens=np.int64(5)) == 0
        key, value = cache.layer(np.int32(3))
        assert cache.layer(3)[0] is key
        assert cache.layer(3)[1] is value
        cache.step(lengths(cache, s0=5))
        cache.free_reqid(np.int64(0))
        assert states(cache)[0] == DEFERRED


@pytest.mark.gpu
def test_lengths_on_a_gpu_are_refused() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    with make("cuda:0") as cache, pytest.raises(vt.RequestError, match="lies on cuda:0"):
        cache.step(torch.zeros(4, dtype=torch.int64, device="cuda:0"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookahead_tokens": -1}, "lookahead_tokens=-1 must be"),
        ({"lookahead_tokens": 1.0}, r"lookahead_tokens=1\.0 must be"),
        ({"lookahead_tokens": True}, "lookahead_tokens=True must be"),
        ({"low_watermark": 0.5, "high_watermark": 0.4}, r"low_watermark=0\.5, high_watermark=0\.4 must satisfy"),
        ({"low_watermark": -0.1}, r"low_watermark=-0\.1"),
        ({"high_watermark": 1.1}, r"high_watermark=1\.1"),
        ({"low_watermark": float("nan")}, "low_watermark=nan"),
        ({"capacity_bytes": 0}, "capacity_bytes=0"),
        ({"capacity_bytes": 1}, "capacity_bytes=1"),
        ({"page_group_bytes": 4097}, "page_group_bytes=4097"),
        ({"page_group_bytes": 100}, "page_group_bytes=100"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, device: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(device, **options)


def test_a_pool_that_does_not_fit(device: str) -> None:
    pool = vt.PagePool(device, page_group_bytes=2 * page(device))
    config = vt.KVCacheConfig(**SMALL, max_context_tokens=100, page_group_bytes=page(device))
    with pytest.raises(ValueError, match=f"page_group_bytes={page(device)} differs from the pool's {2 * page(device)}"):
        vt.KVCacheManager(config, device, pool=pool)
    with pytest.raises(ValueError, match="give it to the PagePool"):
        make(device, pool=pool, capacity_bytes=1 << 30)
    if device != "cpu":
        with pytest.raises(ValueError, match="cannot hold a cache on cpu"):
            make("cpu", pool=pool)
    pool.close()
    with pytest.raises(vt.ClosedError):
        make(device, pool=pool)


@pytest.mark.parametrize("device_name", ["meta", "tpu"])
def test_bad_devices(device_name: str) -> None:
    config = vt.KVCacheConfig(**SMALL, max_context_tokens=100)
    with pytest.raises((ValueError, RuntimeError), match=device_name):
        vt.KVCacheManager(config, device_name)


def test_only_step_commits(device: str) -> None:
    # A commit of a layer's view would put page groups where no slot knows of them.
    with make(device) as cache:
        key, _ = cache.layer(0)
        for view in (key, key[0, :3]):
            with pytest.raises(vt.VTensorError, match=r"KVCacheManager, where only step\(\) commits"):
                view.commit()
        assert cache.stats().committed_bytes == 0


# -- views ----------------------------------------------------------------------------------------------------------


def test_virtual_views_raise_where_no_step_has_been(cache: vt.KVCacheManager) -> None:
    config = cache.config
    reqid, tokens = cache.alloc_reqid(), min(5, config.max_context_tokens)
    for layer in range(config.num_layers):
        for view in cache.layer(layer):
            for access in (lambda rows: rows.fill_(1), lambda rows: rows.clone(), lambda rows: rows.float() * 2):
                with pytest.raises(vt.UnmappedAccessError):
                    access(view[reqid, :tokens])
    assert cache.stats().committed_bytes == 0
    assert cache.step(lengths(cache, **{f"s{reqid}": tokens}))
    for layer in range(config.num_layers):
        for view in cache.layer(layer):
            rows = view[reqid, :tokens]
            rows.fill_(1)
            assert (rows.float() == 1).all()
            with pytest.raises(vt.UnmappedAccessError):
                view[reqid + 1, 0].fill_(1)
            with pytest.raises(vt.UnmappedAccessError):
                view[reqid, -1].fill_(1)
            with pytest.raises(vt.UnmappedAccessError):
                view.float().sum()
            assert "VirtualTensor" in repr(view)


def test_a_view_that_was_used_once_is_checked_again(device: str) -> None:
    # A view remembers that all of it had memory; what is reclaimed afterwards must end that.
    with make(device, capacity_bytes=8 * page(device)) as cache:
        unit = tokens_for(cache, 1)
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        cache.step(lengths(cache, s0=4 * unit, s1=unit))
        row, surplus = cache.layer(0)[0][first, : 4 * unit], cache.layer(0)[0][second, :unit]
        row.fill_(1), surplus.fill_(1)
        cache.free_reqid(first)
        assert row.float().sum() > 0  # deferred, still there
        assert cache.step(lengths(cache, s1=7 * unit))
        with pytest.raises(vt.UnmappedAccessError):
            row.float().sum()
        assert (surplus == 1).all()
        tail = cache.layer(0)[0][second, 6 * unit : 7 * unit]
        tail.fill_(1)
        cache.step(lengths(cache, s1=unit))
        assert (tail == 1).all()  # surplus, still there
        third = cache.alloc_reqid()
        assert cache.step(lengths(cache, **{f"s{third}": 7 * unit, "s1": unit}))
        with pytest.raises(vt.UnmappedAccessError):
            tail.float().sum()


def test_views_are_refused_after_reclamation_without_deferring(device: str) -> None:
    with make(device, deferred_reclamation=False) as cache:
        reqid = cache.alloc_reqid()
        cache.step(lengths(cache, s0=9))
        row = cache.layer(0)[0][reqid, :9]
        row.fill_(1)
        if device != "cpu":
            torch.cuda.synchronize()
        cache.free_reqid(reqid)
        with pytest.raises(vt.UnmappedAccessError):
            row.fill_(1)


def test_attention_over_views(device: str) -> None:
    with make(device, dtype=torch.float32 if device == "cpu" else torch.float16) as cache:
        torch.manual_seed(0)
        counts = [9, 4, 0, 0]
        cache.alloc_reqid(), cache.alloc_reqid()
        cache.step(counts)
        keys, values = cache.layer(2)
        for slot in (0, 1):
            k, v = torch.randn(2, counts[slot], 2, 64, dtype=keys.dtype, device=device)
            keys[slot, : counts[slot]], values[slot, : counts[slot]] = k, v
            q = torch.randn(1, 2, 1, 64, dtype=keys.dtype, device=device)
            views = [view[slot, : counts[slot]].transpose(0, 1)[None] for view in (keys, values)]
            out = torch.nn.functional.scaled_dot_product_attention(q, *views)
            expected = torch.nn.functional.scaled_dot_product_attention(
                q, k.transpose(0, 1)[None], v.transpose(0, 1)[None]
            )
            assert torch.allclose(out, expected, atol=1e-3)
            assert type(out) is torch.Tensor
        del keys, values, views


# -- lifetime -------------------------------------------------------------------------------------------------------


def live_bytes(device: str, pool: vt.PagePool) -> int:
    gc.collect()
    graveyard.drain()
    return pool.stats().total_page_groups * pool.page_group_bytes


def test_close(device: str) -> None:
    cache = make(device)
    cache.alloc_reqid()
    cache.step(lengths(cache, s0=9))
    pool = cache.pool
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.close()
        cache.close()  # no effect
    assert live_bytes(device, pool) == 0
    assert cache.closed
    assert "closed" in repr(cache)
    cache.check_integrity()
    for call in (
        lambda: cache.alloc_reqid(),
        lambda: cache.step([9, 0, 0, 0]),
        lambda: cache.free_reqid(0),
        lambda: cache.layer(0),
        lambda: cache.stats(),
        lambda: cache.residency(),
        lambda: cache.record_stream(None),
    ):
        with pytest.raises(vt.ClosedError, match="closed"):
            call()


def test_the_context_closes_also_after_an_error(device: str) -> None:
    cache = make(device)

    def body() -> None:
        with cache as entered:
            assert entered is cache
            cache.alloc_reqid()
            cache.step(lengths(cache, s0=9))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        body()
    assert cache.closed
    assert live_bytes(device, cache.pool) == 0


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("keep", [lambda key: key, lambda key: key[0, :9], lambda key: key.detach()[0]])
def test_close_with_live_views_warns_and_keeps_the_memory(plain: bool, keep: Callable[..., Any], device: str) -> None:
    cache = make(device)
    cache.alloc_reqid()
    cache.step(lengths(cache, s0=9))
    cache.layer(0)[0][0, :9].fill_(3)
    kept = keep(cache.layer(0, plain=plain)[0])
    with pytest.warns(ResourceWarning, match="views of its layers are in use"):
        cache.close()
    assert live_bytes(device, cache.pool) > 0
    rows = kept[0, :9] if kept.dim() == 4 else kept[:9]
    assert (rows == 3).all()
    del kept, rows
    assert live_bytes(device, cache.pool) == 0


def test_a_manager_that_nobody_closed_gives_its_memory_back(device: str) -> None:
    for capacity in (None, 64 * page(device)):
        cache = make(device, capacity_bytes=capacity)
        cache.alloc_reqid()
        cache.step(lengths(cache, s0=9))
        cache.layer(0)
        spaces, driver = cache.pool._spaces, get_driver(device)
        if device == "cpu":
            before = driver.live_bytes  # type: ignore[attr-defined]
        myself = [cache]
        myself.append(myself)  # a cycle
        del cache, myself
        gc.collect()
        graveyard.drain()
        assert len(spaces) == 0
        if device == "cpu":
            assert driver.live_bytes < before  # type: ignore[attr-defined]


def test_a_hundred_caches_leave_nothing(device: str, driver: Driver) -> None:
    before = driver.live_bytes if device == "cpu" else torch.cuda.mem_get_info()[0]  # type: ignore[attr-defined]
    for number in range(100):
        cache = make(device, num_layers=1 + number % 3, layout=("sliced", "per_layer")[number % 2])
        cache.alloc_reqid()
        assert cache.step(lengths(cache, s0=9))
        cache.layer(0)[0][0, :9].fill_(1)
        cache.close()
    if device == "cpu":
        assert driver.live_bytes == before  # type: ignore[attr-defined]
    else:
        assert abs(torch.cuda.mem_get_info()[0] - before) < 32 << 20


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
def test_twelve_terabytes_at_once(layout: Any, device: str, driver: Driver) -> None:
    config = vt.KVCacheConfig(60, 4, 128, 500, 200_000, torch.float16, layout=layout)
    make(device).close()  # compiles what has to be compiled

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident_bytes()
    with record(driver) as calls:
        vt.KVCacheManager(config, device, **IN_STEPS_ONLY).close()
    assert [made.call for made in calls] == [Call.RESERVE, Call.FREE]
    with record(driver) as calls:
        cache = vt.KVCacheManager(config, device, **IN_STEPS_ONLY)
    assert [made.call for made in calls] == [Call.RESERVE]
    assert resident_bytes() - before < 64 << 20  # nothing that is done may depend on the size
    with cache:
        stats = cache.stats()
        assert stats.reserved_bytes >= 12_288_000_000_000
        assert stats.committed_bytes == stats.total_page_groups == 0
        reqid = cache.alloc_reqid()
        assert cache.step([1] + [0] * 499)
        assert cache.stats().committed_bytes == expected_page_groups(cache.config, 1) * cache.pool.page_group_bytes
        assert reqid == 0
        key, value = cache.layer(59)
        key[0, 0], value[0, 0] = 1, 2
        assert (key[0, 0].sum().item(), value[0, 0].sum().item()) == (512, 1024)
        del key, value


def test_two_managers_share_a_pool(device: str) -> None:
    pool = one_size_pool(device, 8)
    first, second = make(device, pool=pool), make(device, pool=pool, dtype=torch.float32, num_layers=2)
    assert first.config.page_group_bytes == page(device)
    first.alloc_reqid(), second.alloc_reqid()
    assert first.step(lengths(first, s0=tokens_for(first, 5)))
    first.layer(0)[0][0, : tokens_for(first, 5)].fill_(float("nan"))
    assert second.step(lengths(second, s0=tokens_for(second, 4))).shortfall_page_groups == 1
    assert second.step(lengths(second, s0=tokens_for(second, 3)))
    assert first.stats().mapped_page_groups == 5
    assert second.stats().mapped_page_groups == 3
    assert first.stats().free_page_groups == second.stats().free_page_groups == 0
    first.close()
    assert pool.stats().mapped_page_groups == 3
    assert not pool.closed  # it is not the cache's
    assert second.step(lengths(second, s0=tokens_for(second, 8)))
    view = second.layer(0)[0][0, : tokens_for(second, 8)]
    assert not view.any()  # no trace of the other's NaN
    del view
    second.close()
    pool.check_integrity()
    pool.close()


def test_a_cache_gives_up_for_others_what_it_can_do_without(device: str) -> None:
    pool = one_size_pool(device, 12)
    idle, busy = make(device, pool=pool), make(device, pool=pool, lookahead_tokens=0)
    for tokens in (4, 2):
        idle.alloc_reqid()
        assert idle.step(lengths(idle, **{f"s{idle.stats().num_active_slots - 1}": tokens_for(idle, tokens)}))
    idle.free_reqid(0)  # 4 page groups are deferred
    assert idle.step(lengths(idle, s1=1))  # and one is surplus
    busy.alloc_reqid()
    assert busy.step(lengths(busy, s0=tokens_for(busy, 6)))
    assert busy.step(lengths(busy, s0=tokens_for(busy, 8)))
    assert [slot.state for slot in idle.residency()][:2] == [SlotState.FREE, SlotState.ACTIVE]
    assert busy.step(lengths(busy, s0=tokens_for(busy, 11)))
    assert idle.stats().mapped_page_groups == 1
    result = busy.step(lengths(busy, s0=tokens_for(busy, 12)))
    assert result.shortfall_page_groups == 1
    idle.free_reqid(1)
    x = vt.empty(page(device), dtype=torch.uint8, device=device, pool=pool)
    x.fill_(1)  # others than caches are given it, too
    assert idle.stats().mapped_page_groups == 0
    del x
    busy.close()
    idle.close()
    pool.close()


def test_two_caches_that_are_short_do_not_wait_for_each_other(device: str) -> None:
    pool = one_size_pool(device, 8)
    caches = [make(device, pool=pool) for _ in range(2)]
    errors: list[BaseException] = []

    def serve(cache: vt.KVCacheManager) -> None:
        try:
            for _ in range(200):
                reqid = cache.alloc_reqid()
                cache.step(lengths(cache, **{f"s{reqid}": tokens_for(cache, 6)}))
                cache.free_reqid(reqid)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(cache,), daemon=True) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [thread.is_alive() for thread in threads] == [False, False]
    assert not errors
    for cache in caches:
        cache.check_integrity()
        cache.close()
    pool.close()


def test_calls_from_many_threads(device: str) -> None:
    with make(device, max_batch_size=16, capacity_bytes=512 * page(device)) as cache:
        errors: list[BaseException] = []

        def serve() -> None:
            try:
                for round_ in range(30):
                    reqid = cache.alloc_reqid(prompt_tokens=round_)
                    counts = [0] * 16
                    counts[reqid] = 1 + round_
                    assert cache.step(counts)
                    cache.layer(0)[0][reqid, round_].fill_(reqid)
                    assert (cache.layer(0)[0][reqid, round_] == reqid).all()
                    cache.stats(), cache.residency()
                    cache.free_reqid(reqid)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=serve) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert cache.stats().num_active_slots == 0
        cache.check_integrity()


def test_a_forked_child_is_told() -> None:
    with make("cpu") as cache:
        cache.alloc_reqid()
        cache.step(lengths(cache, s0=9))
        key: Any = cache.layer(0)[0]
        key[0, :9].fill_(3)

        def body() -> object:
            told = 0
            for call in (
                lambda: cache.alloc_reqid(),
                lambda: cache.step([10, 0, 0, 0]),
                lambda: cache.free_reqid(0),
                lambda: cache.layer(1),
                lambda: cache.stats(),
                lambda: cache.residency(),
                lambda: cache.record_stream(None),
                lambda: cache.close(),
                lambda: key[0, :9].sum(),
                lambda: key[0, :9].fill_(4),
            ):
                try:
                    call()
                except vt.ForkedError:
                    told += 1
            with make("cpu") as mine:  # of its own it may have one
                mine.alloc_reqid()
                told += bool(mine.step([5, 0, 0, 0]))
            return told

        assert in_child(body) == (0, "11")
        assert (key[0, :9] == 3).all()
        assert cache.step(lengths(cache, s0=10))
        cache.check_integrity()
        key = None


def test_exit_without_close(tmp_path: Path) -> None:
    code = (
        "import torch, vtensor as vt\n"
        "cache = vt.KVCacheManager(vt.KVCacheConfig(4, 2, 64, 4, 4096), 'cpu')\n"
        "cache.alloc_reqid(); cache.step([9, 0, 0, 0]); keys, values = cache.layer(0)\n"
        "keys[0, :9].fill_(1); cycle = [cache]; cycle.append(cycle)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- failing drivers ------------------------------------------------------------------------------------------------


def step_or_error(cache: vt.KVCacheManager, counts: list[int]) -> vt.StepResult | vt.DriverError:
    try:
        return cache.step(counts)
    except vt.DriverError as error:
        return error


@pytest.mark.parametrize("layout", [{"layers_per_slice": 1}, {"layers_per_slice": 3}, {"layout": "per_layer"}])
@pytest.mark.parametrize("call", [Call.CREATE, Call.MAP, Call.SET_ACCESS])
def test_a_fault_inside_step_changes_nothing(call: Call, layout: dict[str, Any], device: str, driver: Driver) -> None:
    with make(device, **layout) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        unit = max(1, page(device) // (2 * 2 * 64 * 2))
        assert cache.step(lengths(cache, s0=unit, s1=2))
        for layer in range(4):
            cache.layer(layer)[0][0, :unit].fill_(layer + 1)
        before, wanted = snapshot(cache), lengths(cache, s0=3 * unit, s1=2 * unit + 1)
        num_failed, result = 0, None
        while not result:
            with fail(driver, call, num_failed + 1, BROKEN) as calls:
                result = step_or_error(cache, wanted)
            if isinstance(result, vt.DriverError):
                assert call.symbol in str(result)
                assert "nothing was changed" in str(result)
                assert snapshot(cache) == before
                cache.check_integrity()
                num_failed, result = num_failed + 1, None
        assert num_failed == calls.count(call)
        assert num_failed >= 4
        assert held(cache)[:2] == [expected_page_groups(cache.config, count) for count in wanted[:2]]
        for layer in range(4):
            assert (cache.layer(layer)[0][0, :unit] == layer + 1).all()


def test_a_fault_while_reclaiming_costs_no_request_anything(device: str, driver: Driver) -> None:
    with make(device, layout="per_layer", capacity_bytes=32 * page(device)) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        unit = page(device) // cache.config.row_bytes
        assert cache.step(lengths(cache, s0=2 * unit, s1=2 * unit))
        cache.free_reqid(0)
        before = cache.residency()[1:]
        for nth in range(1, 9):
            with (
                fail(driver, Call.UNMAP, nth, BROKEN, times=1 << 20),
                pytest.raises(vt.DriverError, match="cuMemUnmap"),
            ):
                cache.step(lengths(cache, s1=3 * unit))
            assert cache.residency()[1:] == before
            assert states(cache)[0] in (SlotState.RECLAIMING, SlotState.FREE)  # nobody's, and given back when it can be
            cache.check_integrity()
            if states(cache)[0] == SlotState.FREE:
                break
        assert cache.step(lengths(cache, s1=3 * unit))


# -- churn ----------------------------------------------------------------------------------------------------------


class Model:
    """What the manager promises, in plain Python: slots, lengths and a number of page groups."""

    def __init__(self, config: vt.KVCacheConfig, capacity: int) -> None:
        self.config, self.capacity = config, capacity
        self.state = [FREE] * config.max_batch_size
        self.seq_len = [0] * config.max_batch_size
        self.tokens_covered = [0] * config.max_batch_size  # the longest sequence for which there are page groups
        self.deferred: list[int] = []  # oldest first

    def page_groups(self, tokens: int) -> int:
        return expected_page_groups(self.config, tokens)

    def held(self) -> list[int]:
        return [self.page_groups(tokens) for tokens in self.tokens_covered]

    def alloc(self, prompt: int | None) -> int | None:
        if prompt and self.deferred:
            covering = [slot for slot in self.deferred if self.held()[slot] >= self.page_groups(prompt)]
            if covering:
                slot = min(covering, key=lambda slot: (self.held()[slot], slot))
            else:
                slot = min(self.deferred, key=lambda slot: (-self.held()[slot], slot))
        else:
            slot = next((slot for slot, state in enumerate(self.state) if state != ACTIVE), -1)
            if slot < 0:
                return None
        if slot in self.deferred:
            self.deferred.remove(slot)
        self.state[slot], self.seq_len[slot] = ACTIVE, 0
        return slot

    def free(self, slot: int) -> None:
        self.seq_len[slot] = 0
        self.state[slot] = DEFERRED if self.tokens_covered[slot] else FREE
        if self.tokens_covered[slot]:
            self.deferred.append(slot)

    def step(self, counts: list[int]) -> int:
        """Page groups that are missing; 0 where the step was carried out."""
        needed = sum(
            max(0, self.page_groups(count) - self.page_groups(self.tokens_covered[slot]))
            for slot, count in enumerate(counts)
        )
        available = self.capacity - sum(self.held())
        if needed > available:
            kept = [
                max(count, self.seq_len[slot]) if self.state[slot] == ACTIVE else 0 for slot, count in enumerate(counts)
            ]
            surplus = [
                max(0, held - self.page_groups(tokens)) if state == ACTIVE else 0
                for held, tokens, state in zip(self.held(), kept, self.state, strict=True)
            ]
            deferred = sum(self.held()[slot] for slot in self.deferred)
            if available + deferred + sum(surplus) < needed:
                return needed - available - deferred - sum(surplus)
            while self.deferred and available < needed:
                slot = self.deferred.pop(0)
                available += self.held()[slot]
                self.tokens_covered[slot], self.state[slot] = 0, FREE
            if available < needed:
                for slot, tokens in enumerate(kept):
                    if surplus[slot]:
                        self.tokens_covered[slot] = tokens
        for slot, count in enumerate(counts):
            if count:
                self.seq_len[slot] = count
                self.tokens_covered[slot] = max(self.tokens_covered[slot], count)
        return 0


@pytest.mark.parametrize("layout", [{"layers_per_slice": 4}, {"layers_per_slice": 3}, {"layout": "per_layer"}])
def test_churn_near_capacity_against_a_model(layout: dict[str, Any]) -> None:
    batch, capacity, random_ = 12, 150, random.Random(str(layout))
    with make("cpu", max_batch_size=batch, max_context_tokens=100, capacity_bytes=capacity * 4096, **layout) as cache:
        config = cache.config
        model = Model(config, capacity)
        memo = {tokens: expected_page_groups(config, tokens) for tokens in range(101)}
        model.page_groups = memo.__getitem__  # type: ignore[method-assign]
        counts, shortages, sequences = [0] * batch, 0, 0
        for number in range(20_000):
            active = [slot for slot in range(batch) if model.state[slot] == ACTIVE]
            if len(active) < batch and random_.random() < 0.15:
                prompt = random_.choice([None, random_.randint(0, 60)])
                slot = cache.alloc_reqid(prompt)
                assert slot == model.alloc(prompt)
                counts[slot] = random_.randint(1, 60)
                sequences += 1
            elif active and random_.random() < 0.13:
                slot = random_.choice(active)
                cache.free_reqid(slot)
                model.free(slot)
                counts[slot] = 0
            for slot in range(batch):
                if model.state[slot] == ACTIVE and random_.random() < 0.7:
                    grown = counts[slot] + random_.choice([1, 1, 1, 1, 2, 7, -20])
                    counts[slot] = min(max(1, grown), 100)
            given = [count if random_.random() < 0.95 else 0 for count in counts]
            result, missing = cache.step(given), model.step(given)
            assert result.shortfall_page_groups == missing, number
            if missing:
                shortages += 1
                slot = max(range(batch), key=lambda slot: counts[slot])
                cache.free_reqid(slot)
                model.free(slot)
                counts[slot] = 0
            if number % 500 == 0 or number < 50:
                cache.check_integrity()
                assert [slot.seq_len for slot in cache.residency()] == model.seq_len
                assert states(cache) == model.state
                assert held(cache) == model.held()
        cache.check_integrity()
        assert held(cache) == model.held()
        assert shortages > 50
        assert sequences > 500


# -- a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_addresses_never_change(gpu: str) -> None:
    with make(gpu) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        before = [view.data_ptr() for layer in range(4) for view in cache.layer(layer)]
        for tokens in (1, 500, 5, 9000):
            cache.step(lengths(cache, s0=tokens, s1=3))
            assert [view.data_ptr() for layer in range(4) for view in cache.layer(layer)] == before


@pytest.mark.gpu
@pytest.mark.parametrize("deferred", [True, False])
def test_a_slot_is_freed_and_reused_behind_a_running_kernel(deferred: bool, gpu: str) -> None:
    with make(gpu, deferred_reclamation=deferred, capacity_bytes=2 * page(gpu)) as cache:
        unit, side = tokens_for(cache, 1), torch.cuda.Stream()
        cache.record_stream(side)
        first = cache.alloc_reqid()
        cache.step(lengths(cache, s0=2 * unit))
        keys, values = cache.layer(0, plain=True)
        keys[first, : 2 * unit] = 3
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000_000)
            read = keys[first, : 2 * unit].float().sum()
        cache.free_reqid(first)
        second = cache.alloc_reqid(prompt_tokens=2 * unit)
        if deferred:
            assert second == first
        assert cache.step(lengths(cache, **{f"s{second}": 2 * unit}))
        keys[second, : 2 * unit] = 8
        assert read.item() == 3 * 2 * unit * 2 * 64
        assert (keys[second, : 2 * unit] == 8).all()
        del keys, values, read


@pytest.mark.gpu
def test_memory_is_not_taken_from_a_running_kernel(gpu: str) -> None:
    with make(gpu, capacity_bytes=4 * page(gpu)) as cache:
        unit, side = tokens_for(cache, 1), torch.cuda.Stream()
        cache.record_stream(side)
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        cache.step(lengths(cache, s0=3 * unit, s1=unit))
        keys, _ = cache.layer(0, plain=True)
        keys[first, : 3 * unit] = 3
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000_000)
            read = keys[first, : 3 * unit].float().sum()
        cache.free_reqid(first)
        assert cache.step(lengths(cache, **{f"s{second}": 4 * unit}))  # takes slot 0's page groups
        keys[second, : 4 * unit] = 8
        assert read.item() == 3 * 3 * unit * 2 * 64
        del keys, _, read


@pytest.mark.gpu
def test_close_behind_a_running_kernel(gpu: str) -> None:
    cache, side = make(gpu), torch.cuda.Stream()
    cache.record_stream(side)
    cache.alloc_reqid()
    cache.step(lengths(cache, s0=50))
    keys, values = cache.layer(0, plain=True)
    keys[0, :50] = 3
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
        read = keys[0, :50].float().sum()
    del keys, values
    cache.close()
    assert read.item() == 3 * 50 * 128


@pytest.mark.gpu
def test_calls_during_a_capture_raise_and_the_capture_survives(gpu: str) -> None:
    with make(gpu) as cache:
        cache.alloc_reqid()
        cache.step(lengths(cache, s0=9))
        keys, _ = cache.layer(0, plain=True)
        keys[0, :9] = 0
        torch.cuda.synchronize()
        before, graph = snapshot(cache), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            keys[0, :9].add_(1)
            for call in (
                lambda: cache.step(lengths(cache, s0=9000)),
                lambda: cache.alloc_reqid(),
                lambda: cache.free_reqid(0),
                lambda: cache.close(),
            ):
                with pytest.raises(vt.VTensorError, match="capture"):
                    call()
        assert snapshot(cache) == before
        graph.replay()
        cache.step(lengths(cache, s0=9000))  # growth moves nothing
        graph.replay()
        assert (keys[0, :9] == 2).all()
        del keys, _


@pytest.mark.gpu
def test_other_threads_work_while_one_captures_a_graph(gpu: str) -> None:
    """Growing, freeing, taking over and dropping memory in one thread leaves a capture in another one valid."""
    config = vt.KVCacheConfig(2, 2, 64, 4, 1 << 16, dtype=torch.float16)
    with vt.KVCacheManager(config, device=gpu) as cache:
        first = cache.alloc_reqid()
        assert cache.step([100, 0, 0, 0])
        keys, _ = cache.layer(0, plain=True)
        keys[first, :100] = 0
        torch.cuda.synchronize()
        failures: list[BaseException] = []
        side = torch.cuda.Stream()

        def work() -> None:
            try:
                with torch.cuda.stream(side):
                    for round_ in range(5):
                        second = cache.alloc_reqid()
                        assert cache.step([100, (round_ + 1) * 5000, 0, 0])
                        cache.free_reqid(second)
                        other = vt.empty(1 << 22, device=gpu)
                        other.commit()
                        del other
            except BaseException as error:  # shown by the assertion below
                failures.append(error)

        graph, worker = torch.cuda.CUDAGraph(), threading.Thread(target=work)
        with torch.cuda.graph(graph):
            keys[first, :100].add_(1)
            worker.start()
            worker.join(60)
            keys[first, :100].add_(1)
        assert not worker.is_alive()
        assert not failures
        graph.replay()
        torch.cuda.synchronize()
        assert (keys[first, :100] == 2).all()
        del keys, _


@pytest.mark.gpu
def test_torchs_cached_memory_is_asked_for(gpu: str) -> None:
    with make(gpu, num_layers=1, max_context_tokens=1 << 30, num_kv_heads=8, head_dim=128) as cache:
        cache.alloc_reqid()
        free = torch.cuda.mem_get_info()[0]
        block = torch.empty(free // 2, dtype=torch.uint8, device=gpu)
        del block  # torch keeps it
        tokens = int(free * 0.7) // cache.config.row_bytes
        assert cache.step(lengths(cache, s0=tokens))
