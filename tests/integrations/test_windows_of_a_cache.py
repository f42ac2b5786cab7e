"""Layers with a sliding window in a VirtualCache: what they give back, and what they keep for who shortens them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers.cache_utils import DynamicCache

from tests.helpers.hf_models import RELEASE, generate, make_inputs, make_model, shared_model
from vtensor.errors import OutOfPagesError, RequestError
from vtensor.integrations.transformers import VirtualCache

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

LAYERS, WINDOW, DIM = 3, 8, 16
FAMILY = "gemma3, windows"  # 8 tokens, 8 tokens, all tokens
PAGE_TOKENS = 16  # of the two layers with windows, and 32 of the other


def make_cache(**options: Any) -> VirtualCache:
    settings = {"page_group_bytes": 8192, "lookahead_tokens": 0, "max_batch_size": 4, "rollback_tokens": 0, **options}
    return VirtualCache(shared_model(FAMILY).config, 512, **settings)


def states(first: int, end: int, batch: int = 2, layer: int = 0) -> torch.Tensor:
    """K of some positions: each number occurs once."""
    positions = torch.arange(first, end, dtype=torch.float32)[None, None, :, None]
    sequences = torch.arange(batch, dtype=torch.float32)[:, None, None, None]
    return (positions + 1000 * sequences + 10_000 * layer).expand(batch, 2, end - first, DIM)


def go_on(cache: VirtualCache, num_tokens: int, batch: int = 2) -> list[torch.Tensor]:
    """One forward; returns the K of each layer that it sees."""
    start = cache.get_seq_length()
    found = []
    for layer in range(LAYERS):
        new = states(start, start + num_tokens, batch, layer)
        keys, values = cache.update(new, -new, layer)
        assert torch.equal(values, -keys)
        found.append(keys)
    return found


def seen(start: int, end: int, layer: int, batch: int = 2) -> torch.Tensor:
    first = max(0, start - WINDOW + 1) if layer < 2 else 0
    return states(first, end, batch, layer)


def test_a_forward_sees_its_windows_and_the_rest_goes_back() -> None:
    with make_cache() as cache:
        start = 0
        for num_tokens in [5, 1, 1, 3, 1, 40, 1, 1, 100, *[1] * 20]:
            sizes = [cache.get_mask_sizes(num_tokens, layer) for layer in range(LAYERS)]
            keys = go_on(cache, num_tokens)
            for layer in range(LAYERS):
                expected = seen(start, start + num_tokens, layer)
                assert torch.equal(keys[layer], expected)
                assert sizes[layer] == (expected.shape[2], start + num_tokens - expected.shape[2])
            start += num_tokens
            cache.manager.check_integrity()
        assert cache.get_seq_length() == start == 173
        # Of each of two sequences: 8 tokens in a page group or two, and 173 in six.
        assert cache.manager.stats().mapped_page_groups <= 2 * (2 + 6)


def test_memory_of_a_window_does_not_grow() -> None:
    mistral = make_model("mistral, window", num_hidden_layers=2)
    held = []
    with VirtualCache.for_model(mistral, page_group_bytes=4096, lookahead_tokens=0, rollback_tokens=4) as cache:
        start, new = 0, torch.zeros(1, 2, 1, DIM)
        while start < 200:
            for layer in range(2):
                cache.update(new, new, layer)
            start += 1
            held.append(cache.manager.stats().mapped_page_groups)
    assert max(held) == 3, "12 tokens of 512 bytes lie in at most 3 page groups, the new one included"
    assert held[-1] <= 3


@pytest.mark.parametrize("num_rollback", [0, 4])
def test_shortened_by_as_much_as_it_keeps(num_rollback: int) -> None:
    with make_cache(rollback_tokens=num_rollback) as cache:
        go_on(cache, 60)
        go_on(cache, 1)
        for _ in range(20):
            go_on(cache, 1)  # 81: the last one grew from 80
        with pytest.raises(RequestError, match=f"rollback_tokens={num_rollback + 1} or more"):
            cache.crop(-(1 + num_rollback + 1))
        assert cache.get_seq_length() == 81
        cache.crop(-(1 + num_rollback))
        kept = 80 - num_rollback
        assert [cache.get_seq_length(layer) for layer in range(LAYERS)] == [kept] * LAYERS
        for num_tokens in (1, 3, 30):
            start = cache.get_seq_length()
            keys = go_on(cache, num_tokens)
            for layer in range(LAYERS):
                assert torch.equal(keys[layer], seen(start, start + num_tokens, layer))
        cache.manager.check_integrity()


def test_all_of_the_last_update_can_be_taken_back() -> None:
    with make_cache() as cache:
        go_on(cache, 30)
        go_on(cache, 25)
        cache.crop(-25)
        keys = go_on(cache, 2)
        assert torch.equal(keys[0], seen(30, 32, 0))


def test_a_sequence_within_its_window_can_always_be_shortened() -> None:
    with make_cache() as cache:
        for _ in range(WINDOW):
            go_on(cache, 1)
        cache.crop(-6)
        assert torch.equal(go_on(cache, 1)[0], seen(2, 3, 0))


def test_a_cache_begins_anew_after_reset() -> None:
    with make_cache() as cache:
        for num_tokens in (40, 1, 1):
            go_on(cache, num_tokens)
        cache.reset()
        go_on(cache, 6)
        go_on(cache, 3)
        cache.crop(-7)
        assert torch.equal(go_on(cache, 1)[0], seen(2, 3, 0))
        cache.crop(-99)
        assert torch.equal(go_on(cache, 9)[1], seen(0, 9, 1))
        cache.manager.check_integrity()


def test_sequences_change_places_behind_their_windows() -> None:
    with make_cache(rollback_tokens=2) as cache:
        for num_tokens in (50, *[1] * 30):
            go_on(cache, num_tokens)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([2, 0, 3, 1]))
        cache.crop(-3)  # one of the last update, two that are kept for this
        order = [1, 0, 1, 0]
        for layer in range(LAYERS):
            new = torch.full((4, 2, 1, DIM), 7.0)
            keys, values = cache.update(new, -new, layer)
            expected = torch.cat([seen(77, 77, layer)[order], new], dim=2)
            assert torch.equal(keys, expected)
            assert torch.equal(values, -expected)
        cache.manager.check_integrity()


def test_a_copy_holds_what_the_windows_hold() -> None:
    with make_cache(rollback_tokens=2) as cache:
        for num_tokens in (50, *[1] * 30):
            go_on(cache, num_tokens)
        with copy.deepcopy(cache) as copied:
            for one in (copied, cache):
                with pytest.raises(RequestError, match="rollback_tokens=3 or more"):
                    one.crop(-4)
                one.crop(-3)
                for layer, keys in enumerate(go_on(one, 3)):
                    assert torch.equal(keys, seen(77, 80, layer))
            copied.manager.check_integrity()


def test_a_shortage_in_the_middle_of_a_forward_takes_the_forward_back() -> None:
    # Two managers, since gemma4's heads are wider without a window: the second one's layers are short of memory.
    if RELEASE < (5, 8):
        pytest.skip("the release does not know gemma4")
    model = shared_model("gemma4, two head widths")
    with VirtualCache(
        model.config, 512, page_group_bytes=4096, capacity_bytes=6 * 4096, lookahead_tokens=0, rollback_tokens=0
    ) as cache:
        heads, width = [2, 2, 2], [16, 16, 32]

        def forward(num_tokens: int) -> None:
            for layer in range(3):
                new = torch.full((1, heads[layer], num_tokens, width[layer]), float(cache.layers[layer].num_tokens))
                cache.update(new, new, layer)

        forward(8)  # 8 tokens of 512 bytes: one page group in each
        with pytest.raises(OutOfPagesError, match="holds its 8 tokens"):
            forward(24)  # 32 tokens: 4 in the first manager, 4 in the second, of 6
        assert [layer.get_seq_length() for layer in cache.layers] == [8, 8, 8]
        forward(4)
        assert [layer.get_seq_length() for layer in cache.layers] == [12, 12, 12]
        assert cache.layers[2].keys[0, 0, :, 0].tolist() == [0.0] * 8 + [8.0] * 4
        for manager in cache.managers:
            manager.check_integrity()


class TestGenerations:
    @pytest.mark.parametrize("attention", [None, "vtensor"])
    @pytest.mark.parametrize("family", [FAMILY, "gpt-oss, windows and sinks"])
    def test_drafts(self, family: str, attention: str | None) -> None:
        model, inputs = shared_model(family, attention), make_inputs(batch=1, length=30)
        inputs["input_ids"][:, 15:] = inputs["input_ids"][:, :15]  # so that there is something to look up
        options = {"eos_token_id": 2, "max_new_tokens": 24}
        expected = generate(shared_model(family), inputs, **options)
        assistant = make_model("llama", num_hidden_layers=1)
        for kind in ({"prompt_lookup_num_tokens": 5}, {"assistant_model": assistant}):
            with VirtualCache.for_model(model, page_group_bytes=4096) as cache:
                assert torch.equal(generate(model, inputs, cache, **options, **kind), expected)
                cache.manager.check_integrity()

    @pytest.mark.parametrize("attention", [None, "vtensor"])
    def test_beams(self, attention: str | None) -> None:
        model, inputs = shared_model(FAMILY, attention), make_inputs()
        options = {"num_beams": 3, "max_new_tokens": 20}
        with VirtualCache.for_model(model, page_group_bytes=4096) as cache:
            found = generate(model, inputs, cache, **options)
            assert torch.equal(found, generate(shared_model(FAMILY), inputs, **options))
            cache.manager.check_integrity()

    @pytest.mark.parametrize("attention", [None, "vtensor"])
    @pytest.mark.parametrize("family", ["llama", FAMILY])
    def test_a_prompt_in_chunks(self, family: str, attention: str | None) -> None:
        model, inputs = shared_model(family, attention), make_inputs(length=29)
        options = {"max_new_tokens": 10, "prefill_chunk_size": 7}
        theirs = DynamicCache(config=model.config)  # some releases are wrong here, by themselves
        expected = generate(shared_model(family), inputs, theirs, **options)
        with VirtualCache.for_model(model, page_group_bytes=4096) as cache:
            assert torch.equal(generate(model, inputs, cache, **options), expected)
            cache.manager.check_integrity()
