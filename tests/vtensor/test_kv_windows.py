"""Sliding windows: what no later token can see gives its memory back, and all that one can see is as it was written."""

import dataclasses
import random
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.faults import BROKEN, fail
from tests.vtensor.caches import (
    ACTIVE,
    BUSY_CYCLES,
    DEFERRED,
    FREE,
    Busy,
    Pattern,
    lengths,
    make,
    page,
    spec,
    states,
    stats,
)
from vtensor.allocator.driver import Call, Driver

ROWS = 4  # a page group, in layers that have no width of their own


def models(device: str) -> dict[str, list[vt.LayerSpec]]:
    """Layers with windows."""
    wide = spec(device, 2.5)  # rows that straddle page groups
    narrow = dataclasses.replace(spec(device, ROWS), value_head_dim=spec(device, 3 * ROWS).head_dim)
    return {
        "of one token": [spec(device, ROWS, window=1)],
        "of seven": [spec(device, ROWS, window=7)] * 3,
        "of a multiple of a page group": [spec(device, ROWS, window=16)] * 2,
        "of all that fits": [spec(device, ROWS, window=256)],
        "and full layers": [spec(device, ROWS, window=9), spec(device, ROWS)] * 2,
        "of three lengths, two widths": [
            dataclasses.replace(wide, window=5),
            dataclasses.replace(narrow, window=17),
            spec(device, ROWS),
            dataclasses.replace(wide, window=40),
        ],
        "over a latent": [
            vt.LayerSpec(1, page(device) // 8, page(device) // 16, is_latent=True, window=11),
            spec(device, ROWS),
        ],
        "rows longer than a page group": [spec(device, 0.4, window=3), spec(device, 0.7)],
    }


MODELS = list(models("cpu"))
LAYOUTS: list[dict[str, Any]] = [{}, {"layers_per_slice": 1}, {"layout": "per_layer"}]


def windowed(device: str, model: str, **options: Any) -> vt.KVCacheManager:
    return make(device, *models(device)[model], max_context_tokens=256, **options)


# -- how much -------------------------------------------------------------------------------------------------------


def in_service(cache: vt.KVCacheManager, window: int | None) -> int:
    """Page groups in service in the layers with a window."""
    slots, groups = cache._slots.arrays, cache._layout.groups
    held = (slots.high - slots.low).sum(axis=1)
    return sum(int(held[i]) * group.num_buffers for i, group in enumerate(groups) if group.window == window)


def needed(cache: vt.KVCacheManager, window: int | None, first: int, tokens: int) -> int:
    """Page groups below the rows `first` to `tokens` of a slot, in the layers with a window."""
    size, rows = page(str(cache.device)), [b.row_bytes for b in cache.config.buffers if b.spec.window == window]
    return sum(-(-tokens * row // size) - first * row // size for row in rows)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("lookahead", [0, 1, 6])
@pytest.mark.parametrize("model", MODELS)
def test_a_window_keeps_what_it_needs_and_no_page_group_more(
    model: str, lookahead: int, layout: dict[str, Any], device: str
) -> None:
    with windowed(device, model, lookahead_tokens=lookahead, **layout) as cache:
        windows = {buffer.spec.window for buffer in cache.config.buffers}
        cache.alloc_reqid()
        before = 0
        for tokens in [30, *range(31, 257)]:
            assert cache.step(lengths(cache, {0: tokens}))
            num_passed = 0
            for window in windows:
                first = 0 if window is None else max(0, before - window + 1 - lookahead)
                assert in_service(cache, window) == needed(cache, window, first, tokens)
                num_passed += needed(cache, window, 0, tokens) - needed(cache, window, first, tokens)
            if tokens % 9 == 0 or tokens > 250:
                found = stats(cache)
                assert found.num_passed == num_passed
                service = found.mapped_page_groups - found.ahead_page_groups
                assert service == sum(in_service(cache, window) for window in windows)
                assert cache.residency()[0].committed_bytes == service * page(device)
                ahead = [needed(cache, window, 0, min(tokens + lookahead, 256)) for window in windows]
                assert found.ahead_page_groups == sum(ahead) - sum(needed(cache, w, 0, tokens) for w in windows)
                rows = {b: min(tokens, b.spec.window or tokens) for b in cache.config.buffers}
                assert found.used_bytes == sum(count * buffer.row_bytes for buffer, count in rows.items())
            before = tokens
        for window in windows - {
            None
        }:  # in plain words: what the window holds, look-ahead, and a page group for borders
            rows = [b.row_bytes for b in cache.config.buffers if b.spec.window == window]
            most = sum(-(-(window + lookahead) * row // page(device)) + 1 for row in rows)
            assert in_service(cache, window) <= most
        assert in_service(cache, None) == needed(cache, None, 0, 256)  # full layers have all
        cache.check_integrity()


@pytest.mark.parametrize("size_classes", [1, 5])
def test_a_long_prompt_has_all_of_its_memory_for_one_iteration(size_classes: int, device: str) -> None:
    # Where the pool has large handles, a window has small ones all the same: they go one by one.
    with make(device, spec(device, ROWS, window=8), max_context_tokens=256, size_classes=size_classes) as cache:
        pattern = Pattern(cache)
        cache.alloc_reqid()
        assert cache.step([200, 0, 0, 0])
        assert stats(cache).mapped_page_groups == 50
        pattern.write(0, 0, 200)
        pattern.check(0, 200, position=0)  # every token's query sees its window
        assert cache.step([201, 0, 0, 0])
        assert stats(cache).mapped_page_groups == 51 - 193 // 4
        pattern.write(0, 200, 201)
        pattern.check(0, 201)


@pytest.mark.parametrize("window", [1, 6, 13, 32])
def test_decoding_goes_on_forever_in_the_memory_of_a_window(window: int, device: str) -> None:
    # What has been passed is given back in the step that needs it: exactly so many page groups are enough.
    layers = spec(device, ROWS, window=window), spec(device, 1.5, window=window)

    def serve(capacity: int) -> bool:
        with make(device, *layers, max_context_tokens=256, capacity=capacity) as cache:
            pattern = Pattern(cache)
            cache.alloc_reqid()
            for tokens in range(1, 257):
                if not cache.step(lengths(cache, {0: tokens})):
                    return False
                pattern.write(0, tokens - 1, tokens)
                pattern.check(0, tokens)
            return True

    rows, size, peak = [layer.resolved(torch.bfloat16).bytes_per_token for layer in layers], page(device), 0
    for tokens in range(1, 257):
        first = max(0, tokens - 1 - window)  # the first that the step before has left
        peak = max(peak, sum(-(-tokens * row // size) - first * row // size for row in rows))
    assert serve(peak)
    assert not serve(peak - 1)


# -- which bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("model", MODELS)
def test_every_query_sees_the_data_of_its_window(model: str, chunk: int, layout: str, device: str) -> None:
    # Three slots out of step, in so little memory that page groups go from one to another all the time.
    random_ = random.Random(f"{model} {chunk}")
    rows = sum(layer.resolved(torch.bfloat16).bytes_per_token for layer in models(device)[model])
    capacity = 2 * 256 * rows // page(device) + 20  # two slots without windows, and some borders
    options = {"lookahead_tokens": random_.choice([0, 1, 3]), "capacity": capacity}
    with windowed(device, model, layout=layout, **options) as cache:
        pattern = Pattern(cache)
        counts = dict.fromkeys([cache.alloc_reqid() for _ in range(3)], 0)
        most = 160 if chunk == 1 else 256
        while min(counts.values()) < most:
            grown = {slot: min(most, count + random_.choice([0, chunk, chunk + 1])) for slot, count in counts.items()}
            result = cache.step(lengths(cache, grown))
            if not result:
                slot = max(counts, key=lambda slot: counts[slot])
                cache.free_reqid(slot)
                del counts[slot]
                continue
            for slot, count in grown.items():
                if count > counts[slot]:
                    pattern.write(slot, counts[slot], count)
                    pattern.check(slot, count, position=counts[slot])  # what the first new token's query sees, and on
                elif count:
                    pattern.check(slot, count)  # the last token once more
            counts = grown
        cache.check_integrity()


@pytest.mark.parametrize("model", MODELS)
def test_a_step_that_is_made_again_keeps_what_its_iteration_sees(model: str, device: str) -> None:
    # The first of the new tokens sees furthest back, however often the engine asked before it ran.
    with windowed(device, model, lookahead_tokens=1) as cache:
        pattern = Pattern(cache)
        cache.alloc_reqid()
        before = 0
        for tokens in (40, 75, 76, 130, 133):
            for _ in range(3):
                assert cache.step(lengths(cache, {0: tokens}))
            pattern.write(0, before, tokens)
            pattern.check(0, tokens, position=before)
            before = tokens
        assert cache.step(lengths(cache, {0: 134}))
        pattern.check(0, 133, position=133)


@pytest.mark.parametrize(("lookahead", "layout"), [(1, "sliced"), (4, "sliced"), (4, "per_layer")])
@pytest.mark.parametrize("model", MODELS)
def test_a_sequence_may_be_shortened_by_look_ahead_at_any_time(
    model: str, lookahead: int, layout: str, device: str
) -> None:
    # Speculative decoding: some tokens are drafted and as many, or fewer, taken back; sometimes a step is made twice,
    # and sometimes what remains is shortened once more.
    random_ = random.Random(f"{model} {lookahead}")
    with windowed(device, model, lookahead_tokens=lookahead, layout=layout) as cache:
        pattern = Pattern(cache)
        cache.alloc_reqid()
        count = longest = 0
        while count < 150:
            grown = min(256, count + random_.randint(1, lookahead + 1))
            assert cache.step(lengths(cache, {0: grown}))
            pattern.write(0, count, grown)
            pattern.check(0, grown, position=count)
            for _ in range(random_.choice([0, 0, 1, 2])):
                assert cache.step(lengths(cache, {0: grown}))  # without a new token
                pattern.check(0, grown)
            count, longest = grown, max(longest, grown)
            for _ in range(random_.choice([0, 1, 1, 2])):  # down to so many fewer than there ever were
                count = random_.randint(max(1, min(count, longest - lookahead)), count)
                assert cache.step(lengths(cache, {0: count}))
                pattern.check(0, count)
        cache.check_integrity()


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_deeper_cut_is_refused_and_changes_nothing(model: str, lookahead: int, device: str) -> None:
    with windowed(device, model, lookahead_tokens=lookahead) as cache:
        pattern = Pattern(cache)
        cache.alloc_reqid(), cache.alloc_reqid()
        for tokens in [40, *range(41, 131)]:
            assert cache.step(lengths(cache, {0: tokens, 1: 9}))
            pattern.write(0, 0 if tokens == 40 else tokens - 1, tokens)
            if tokens == 40:
                pattern.write(1, 0, 9)
        pattern.check(0, 130)
        # Refused is what would see a row that has no memory any more, and nothing else.
        windows = [buffer for buffer in cache.config.buffers if buffer.spec.window is not None]
        size, lacks = page(device), {}
        for tokens in range(1, 131):
            lacks[tokens] = any(
                max(0, tokens - b.spec.window) * b.row_bytes // size
                < max(0, 129 - b.spec.window + 1 - lookahead) * b.row_bytes // size
                for b in windows
            )
        assert not any(lacks[tokens] for tokens in range(130 - lookahead, 131))
        before = stats(cache), cache.residency(), cache._region.space.arrays.table.tolist()
        for tokens in (tokens for tokens in lacks if lacks[tokens]):
            with pytest.raises(vt.RequestError, match=rf"seq_lens\[0\]={tokens}: .*shorten by fewer tokens"):
                cache.step(lengths(cache, {0: tokens, 1: 12}))
            assert (stats(cache), cache.residency(), cache._region.space.arrays.table.tolist()) == before
        shortest = min(tokens for tokens in lacks if not lacks[tokens])
        assert cache.step(lengths(cache, {0: shortest, 1: 12}))
        pattern.check(0, shortest)
        pattern.check(1, 9, position=9)
        cache.check_integrity()


# -- ends and beginnings ----------------------------------------------------------------------------------------------


def is_blank(cache: vt.KVCacheManager, slot: int, tokens: int) -> bool:
    """Whether all rows of a slot read as zeros."""
    layers = range(cache.config.num_layers)
    return not any(view[slot, :tokens].any() for layer in layers for view in cache.layer(layer))


@pytest.mark.parametrize("scrub", [False, True])
@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
@pytest.mark.parametrize("model", ["and full layers", "of three lengths, two widths", "of seven"])
def test_what_is_freed_and_used_again_shows_nothing_of_others(
    model: str, layout: str, scrub: bool, device: str
) -> None:
    # At once, or after the mapper is done; by the same slot or another one.
    random_ = random.Random(model)
    with windowed(device, model, layout=layout, scrub=scrub, lookahead_tokens=1, max_batch_size=2) as cache:
        pattern, full = Pattern(cache), sum(b.spec.window is None for b in cache.config.buffers)
        for salt in range(20):
            prompt = random_.randint(1, 60)
            reqid = cache.alloc_reqid(random_.choice([None, prompt]))
            assert cache.step(lengths(cache, {reqid: prompt}))
            if scrub:
                assert is_blank(cache, reqid, prompt)
            pattern.write(reqid, 0, prompt, salt)
            tokens = prompt
            for tokens in range(prompt + 1, prompt + random_.choice([1, 30])):
                assert cache.step(lengths(cache, {reqid: tokens}))
                pattern.write(reqid, tokens - 1, tokens, salt)
                pattern.check(reqid, tokens, salt=salt)
            has_passed = bool(cache._slots.arrays.low[:, reqid].any())
            cache.free_reqid(reqid)
            assert states(cache)[reqid] in (DEFERRED, FREE)
            if salt % 2:
                found = stats(cache)
                assert states(cache)[reqid] == (DEFERRED if full or not has_passed else FREE)
                if has_passed and not full:
                    assert cache.residency()[reqid].committed_bytes == 0
                assert found.num_reclaiming_slots == 0
            cache.check_integrity()


def test_full_layers_of_a_freed_slot_are_kept(device: str, driver: Driver) -> None:
    with make(device, spec(device, 1), spec(device, 1, window=4)) as cache:
        cache.alloc_reqid()
        for tokens in (20, 21):
            assert cache.step(lengths(cache, {0: tokens}))
        cache.free_reqid(0)
        found = stats(cache)
        assert (found.mapped_page_groups, found.ahead_page_groups, found.num_deferred_slots) == (21, 0, 1)
        assert found.num_passed + found.num_reclaimed == 21
        assert cache.alloc_reqid(prompt_tokens=10) == 0
        result = cache.step(lengths(cache, {0: 10}))
        assert (result.num_mapped, stats(cache).mapped_page_groups) == (10, 31)


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("scrub", [False, True])
def test_an_end_right_behind_a_passing_window(scrub: bool, nth: int, device: str, driver: Driver) -> None:
    # Two page groups or more wait to be unmapped when the request ends; one of the calls that follow fails.
    with make(device, *[spec(device, 1, window=4)] * 2, layers_per_slice=1, scrub=scrub) as cache:
        pattern = Pattern(cache)
        cache.alloc_reqid(), cache.alloc_reqid()
        for tokens in (12, 13):
            assert cache.step(lengths(cache, {0: tokens, 1: 3}))
        pattern.write(0, 9, 13), pattern.write(1, 0, 3)
        with fail(driver, Call.UNMAP, nth, BROKEN):
            cache.free_reqid(0)
            cache._region.space.settle()
            cache._memory._collect()
            cache.check_integrity()
            assert cache.alloc_reqid() == 0
            assert cache.step(lengths(cache, {0: 13, 1: 3}))
        if scrub:
            assert is_blank(cache, 0, 13)
        pattern.write(0, 0, 13, salt=1)
        pattern.check(0, 13, position=0, salt=1)
        pattern.check(1, 3)
        found = stats(cache)
        assert found.mapped_page_groups == 2 * (13 + 3)
        assert found.num_failed_releases <= 1
        assert (found.num_passed + found.num_reclaimed) % 2 in (0, 1)
        cache.free_reqid(0), cache.free_reqid(1)
        cache.check_integrity()


@pytest.mark.parametrize("wait", [False, True])
def test_each_page_group_that_goes_is_counted_once(wait: bool, device: str, driver: Driver) -> None:
    # By windows, by the end of a request, by the end of its slot: whatever overlaps, and whatever was never there.
    options = {"deferred_reclamation": False, "lookahead_tokens": 2}
    with make(device, spec(device, 1), spec(device, 1, window=4), **options) as cache:
        total = 0
        for _ in range(3):
            reqid = cache.alloc_reqid()
            for tokens in range(20, 30):
                assert cache.step(lengths(cache, {reqid: tokens}))
            if wait:
                stats(cache)
            cache.free_reqid(reqid)
            found = stats(cache)
            total += 2 * 31
            assert found.mapped_page_groups == 0
            assert found.num_passed + found.num_reclaimed == total


def test_what_a_window_has_passed_waits_for_the_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(device, spec(device, 1, window=4), capacity=30) as cache:
        busy = Busy(cache, monkeypatch)
        cache.alloc_reqid()
        for tokens in range(1, 21):
            assert cache.step(lengths(cache, {0: tokens}))
        found = stats(cache)
        assert (found.mapped_page_groups, found.ahead_page_groups, found.num_passed) == (20, 16, 0)
        with pytest.raises(vt.UnmappedAccessError):  # though it is there, nobody may look at it
            cache.layer(0)[0][0, :4].clone()
        busy.is_busy = False
        found = stats(cache)
        assert (found.mapped_page_groups, found.ahead_page_groups, found.num_passed) == (4, 0, 16)
        busy.is_busy = True
        for tokens in range(21, 47):
            assert cache.step(lengths(cache, {0: tokens}))
        assert (busy.num_stops, stats(cache).num_passed) == (0, 16)
        assert cache.step(lengths(cache, {0: 47}))  # the 31st page group: now somebody has to wait
        assert busy.num_stops == 1
        assert states(cache)[0] == ACTIVE


@pytest.mark.gpu
def test_a_window_moves_on_behind_a_running_kernel() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    gpu = "cuda:0"
    with make(gpu, spec(gpu, 1, window=4), capacity=16) as cache:
        side = torch.cuda.Stream()
        cache.record_stream(side)
        cache.alloc_reqid()
        assert cache.step([12, 0, 0, 0])
        keys, _ = cache.layer(0, plain=True)
        keys[0, :12] = 3
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY_CYCLES)
            read = keys[0, :12].float().mean()
        for tokens in range(13, 60):  # takes what the window has passed, again and again
            assert cache.step([tokens, 0, 0, 0])
            keys[0, tokens - 1] = 9
        assert read.item() == 3
        del keys, _


@pytest.mark.parametrize("window", [64, 65, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 70])
def test_a_window_longer_than_any_sequence_passes_nothing(window: int, device: str) -> None:
    # Rows of an odd number of bytes: 64-bit arithmetic on such a window would come out positive.
    layer = vt.LayerSpec(1, 65, window=window, dtype=torch.float8_e5m2, is_latent=True)
    with make(device, layer, lookahead_tokens=4, overread_tokens=5) as cache:
        cache.alloc_reqid()
        for tokens in (30, 31, 64):
            assert cache.step(lengths(cache, {0: tokens}))
            assert cache.residency()[0].used_bytes == tokens * 65
            cache.check_integrity()
        assert stats(cache).num_passed == 0
