"""Over-reading: rows past the end of what a slot holds, which kernels that read whole tiles may touch."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.vtensor.caches import ACTIVE, Pattern, close, lengths, make, page, spec, states, stats
from vtensor.allocator import graveyard

FP8, FP16, BF16, FP32 = torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32


def poisoned_pool(device: str, num_page_groups: int, size_classes: int = 1) -> vt.PagePool:
    """A pool of which somebody else has used every page group, and left bytes that are NaN in every dtype."""
    size = page(device)
    pool = vt.PagePool(
        device,
        capacity_bytes=num_page_groups * size,
        page_group_bytes=size,
        max_size_class_bytes=size << size_classes - 1,
    )
    poison(pool, num_page_groups)
    assert pool.stats().free_page_groups == num_page_groups
    return pool


def poison(pool: vt.PagePool, num_page_groups: int) -> None:
    """Leave NaN in free page groups of a pool."""
    other = vt.empty(num_page_groups * pool.page_group_bytes, dtype=torch.uint8, device=pool.driver.device, pool=pool)
    other.fill_(255)
    del other
    gc.collect()
    graveyard.drain()


def with_overread(cache: vt.KVCacheManager, layer: int, is_value: int, slot: int, first: int) -> torch.Tensor:
    """Rows of a slot from `first` to the last that may be read past its end, which views do not show."""
    tokens = cache.residency()[slot].seq_len
    view = cache.layer(layer, plain=True)[is_value]
    count = tokens + cache.config.overread_tokens - first
    start = view.storage_offset() + slot * view.stride(0) + first * view.stride(1)
    rows = view.as_strided((count, *view.shape[2:]), view.stride()[1:], start)
    inside = (view.shape[2] - 1) * view.stride(2) + view.shape[3]
    end = (start + (count - 1) * view.stride(1) + inside) * view.element_size()
    size, table = cache.pool.page_group_bytes, cache._region.space.arrays.table
    places = table[start * view.element_size() // size : -(-end // size)]
    assert (places > 0).all(), f"layer {layer}, slot {slot}, rows {first} to {first + count}: {places}"
    return rows


def check_overread(cache: vt.KVCacheManager, pattern: Pattern) -> None:
    """Read, and compute with, all that may be read of all active slots: it is there, and finite."""
    for slot, state in enumerate(states(cache)):
        tokens = cache.residency()[slot].seq_len
        if state != ACTIVE or tokens == 0:
            continue
        for layer in range(cache.config.num_layers):
            first = pattern.first_visible(layer, tokens - 1)
            for is_value in (0, 1):
                rows = with_overread(cache, layer, is_value, slot, first).float()
                weights = torch.zeros(len(rows), device=rows.device)
                weights[: tokens - first] = 1  # as masked attention has it: 0 x NaN would be NaN
                found = torch.einsum("t,thd->hd", weights, rows)
                expected = pattern.numbers(layer, is_value, slot, first, tokens).float().sum()
                assert (found == expected).all(), (layer, is_value, slot, tokens, found.flatten()[0])


MODELS: dict[str, Any] = {
    "one layer": lambda device: [spec(device, 4)],
    "rows that straddle": lambda device: [spec(device, 1.5), spec(device, 0.7)],
    "three dtypes": lambda device: [
        spec(device, 4),
        spec(device, 4, dtype=FP16),
        spec(device, 3, dtype=FP32, window=9),
        spec(device, 2, dtype=FP8),
    ],
    "a latent": lambda device: [vt.LayerSpec(1, page(device) // 8, page(device) // 10, is_latent=True)],
}


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("overread", [1, 13, 224])
@pytest.mark.parametrize("model", MODELS)
def test_rows_past_the_end_are_mapped_and_finite(
    model: str, overread: int, lookahead: int, layout: str, device: str
) -> None:
    # Requests come and go, grow to the end of their slots, are shortened, take over what others left.
    random_ = random.Random(f"{model} {overread} {lookahead}")
    layers = MODELS[model](device)
    pool = poisoned_pool(device, 6 * 64 * len(layers) + 3 * overread * 2 * len(layers), size_classes=3)
    options = {"overread_tokens": overread, "lookahead_tokens": lookahead, "eager_slot": True, "pool": pool}
    with make(device, *layers, layout=layout, max_batch_size=3, **options) as cache:
        pattern, counts = Pattern(cache), dict[int, int]()
        for round_ in range(40):
            if len(counts) < 3 and random_.random() < 0.5:
                counts[cache.alloc_reqid(random_.choice([None, 20]))] = 0
            elif counts and random_.random() < 0.2:
                slot = random_.choice(list(counts))
                cache.free_reqid(slot)
                del counts[slot]
            grown = {slot: min(64, count + random_.choice([0, 1, 9, 40])) for slot, count in counts.items()}
            assert cache.step(lengths(cache, grown))
            for slot, count in grown.items():
                if count > counts[slot]:
                    pattern.write(slot, counts[slot], count)
            counts = grown
            if round_ % 3 == 0:
                check_overread(cache, pattern)
        full = dict.fromkeys(counts, 64)
        assert cache.step(lengths(cache, full))
        for slot in counts:
            if counts[slot] < 64:
                pattern.write(slot, counts[slot], 64)
        check_overread(cache, pattern)  # also behind max_context_tokens
        cache.check_integrity()
    close(pool)


@pytest.mark.parametrize("overread", [0, 5])
def test_over_reading_costs_exactly_its_rows(overread: int, device: str) -> None:
    with make(device, spec(device, 4), spec(device, 0.5), overread_tokens=overread, capacity=200) as cache:
        cache.alloc_reqid()
        for tokens in range(1, 65):
            assert cache.step([tokens, 0, 0, 0])
            assert stats(cache).mapped_page_groups == -(-(tokens + overread) // 4) + 2 * (tokens + overread)
            assert cache.residency()[0].committed_tokens == tokens


def test_what_is_trimmed_leaves_the_rows_past_the_end(device: str) -> None:
    pool = poisoned_pool(device, 30)
    with make(device, spec(device, 1), overread_tokens=4, pool=pool) as cache:
        pattern = Pattern(cache)
        cache.alloc_reqid(), cache.alloc_reqid()
        assert cache.step([20, 1, 0, 0])
        pattern.write(0, 0, 20), pattern.write(1, 0, 1)
        assert cache.step([3, 1, 0, 0])
        assert cache.step([3, 19, 0, 0])  # takes all 30, with 4 rows past each end
        pattern.write(1, 1, 19)
        assert stats(cache).num_trimmed == 17
        check_overread(cache, pattern)
    close(pool)


# Finite numbers, of which a part is NaN in a narrower dtype.
TRAPS = {FP32: (torch.int32, 0x3F807FC0), BF16: (torch.int16, 0x3F7F), FP8: (torch.uint8, 0x38)}


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("deferred", [False, True])
def test_page_groups_that_cross_dtypes_are_zeroed(deferred: bool, lookahead: int, device: str) -> None:
    # What is a number in one layer is NaN in another: it must not go along when page groups pass between them, within
    # one cache or from one to another.
    random_ = random.Random(lookahead)
    pool = poisoned_pool(device, 60)
    layers = spec(device, 1, dtype=FP32), spec(device, 2, dtype=BF16), spec(device, 4, dtype=FP8)
    options = {"overread_tokens": 2, "pool": pool, "lookahead_tokens": lookahead, "deferred_reclamation": deferred}
    num_steps = 0
    with make(device, *layers, **options) as cache, make(device, *layers[::-1], **options) as other:
        for _ in range(60):
            one = random_.choice([cache, other])
            active = [slot for slot in range(4) if states(one)[slot] == ACTIVE]
            for slot in active if len(active) > 2 else active[:1]:
                one.free_reqid(slot)
            stats(one)
            reqid, tokens = one.alloc_reqid(), random_.randint(1, 8)
            if not one.step(lengths(one, {reqid: tokens})):
                one.free_reqid(reqid)
                continue
            stats(one)
            for layer in range(3):
                for is_value in (0, 1):
                    rows = with_overread(one, layer, is_value, reqid, 0)
                    assert rows.float().isfinite().all(), (layer, is_value, reqid, tokens)
                    kind, number = TRAPS[rows.dtype]
                    rows[:tokens].view(kind).fill_(number)
                    assert rows.float().isfinite().all()
                    del rows
            num_steps += 1
    assert num_steps > 20
    close(pool)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 500, 1000])
def test_a_kernel_that_reads_whole_tiles(tokens: int) -> None:
    # As TMA does: the last tile is loaded whole, and what is too much in it is weighted with zero.
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    from tests.vtensor.tiles import sum_of_tiles  # it needs triton

    gpu, tile = "cuda:0", 64
    pool = poisoned_pool(gpu, 150)  # a slice has 32 tokens a page group: tiles often end in another one
    config = vt.KVCacheConfig(128, 2, 64, 4, 1000, torch.float16, layers_per_slice=128, overread_tokens=tile - 1)
    with vt.KVCacheManager(config, gpu, pool=pool) as cache:
        for reqid in range(4):
            assert cache.alloc_reqid() == reqid
        counts = [tokens, 1000, 1, tokens]
        assert cache.step(counts)
        pattern = Pattern(cache)
        for slot, count in enumerate(counts):
            pattern.write(slot, 0, count)
        lengths_on_gpu = torch.tensor(counts, device=gpu)
        for layer in (0, 1, 127):
            for is_value, view in enumerate(cache.layer(layer, plain=True)):
                sums = torch.full((4, 2, 64), float("nan"), device=gpu)
                sum_of_tiles[4, 2](view, sums, lengths_on_gpu, *view.stride()[:3], tile=tile, head_dim=64)
                for slot, count in enumerate(counts):
                    expected = pattern.numbers(layer, is_value, slot, 0, count).float().sum()
                    assert (sums[slot] == expected).all(), (layer, is_value, slot)
                del view
    close(pool)
