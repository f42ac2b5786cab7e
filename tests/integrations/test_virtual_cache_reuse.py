"""VirtualCache used again: after errors, in other modes, by other models, with indices that do not fit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers import LlamaConfig

from vtensor.errors import ClosedError, OutOfPagesError, RequestError
from vtensor.integrations.transformers import VirtualCache

LAYERS, HEADS, DIM = 3, 2, 16


def make_cache(**options: Any) -> VirtualCache:
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=HEADS, vocab_size=64
    )
    return VirtualCache(config, max_cache_len=256, page_group_bytes=4096, **options)


def states(batch: int, tokens: int, heads: int = HEADS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(batch * heads * tokens * DIM, dtype=dtype).view(batch, heads, tokens, DIM)


def fill(cache: VirtualCache, batch: int, tokens: int) -> None:
    for layer in range(LAYERS):
        cache.update(states(batch, tokens), -states(batch, tokens), layer)


@pytest.mark.parametrize("order", [[0, 5], [0, -1], [2, 0]])
def test_no_sequence_beyond_the_batch_is_read(order: list[int]) -> None:
    with make_cache(max_batch_size=8) as cache:
        fill(cache, 4, 5)
        cache.batch_select_indices(torch.tensor([0, 1]))  # 2 and 3 are freed, their K and V still lie there
        keys = cache.layers[0].keys.clone()
        with pytest.raises(RequestError, match="the cache holds 0 to 1"):
            cache.reorder_cache(torch.tensor(order))
        assert torch.equal(cache.layers[0].keys, keys)
        cache.manager.check_integrity()


@pytest.mark.parametrize("again", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_modes_may_change(first: Any, again: Any) -> None:
    with make_cache() as cache:
        with first():
            fill(cache, 1, 3)
        with again():
            keys, _ = cache.update(states(1, 2), states(1, 2), 0)
        assert keys.shape[2] == 5


def test_a_first_update_that_fails_decides_nothing() -> None:
    with make_cache(capacity_bytes=8 * 4096) as cache:
        with pytest.raises(OutOfPagesError, match="still holds its 0 tokens"):
            fill(cache, 8, 100)
        cache.crop(-1)
        fill(cache, 1, 5)
        assert cache.get_seq_length() == 5
        cache.manager.check_integrity()


@pytest.mark.parametrize(
    "other",
    [states(1, 4, heads=1), states(1, 4, dtype=torch.float64), torch.zeros(1, HEADS, 4, 2 * DIM)],
    ids=["one head", "dtype", "head dim"],
)
def test_another_model_is_told(other: torch.Tensor) -> None:
    with make_cache() as cache:
        fill(cache, 1, 4)
        cache.reset()
        with pytest.raises(RequestError, match="make a VirtualCache for each model"):
            cache.update(other, other, 0)
        fill(cache, 1, 4)


def test_a_copy_of_a_cache_in_the_middle_of_a_forward() -> None:
    with make_cache() as cache:
        cache.update(states(1, 4), states(1, 4), 0)  # the other layers have not been called yet
        with copy.deepcopy(cache) as copied:
            assert torch.equal(copied.layers[0].keys, cache.layers[0].keys)
            assert copied.layers[1].keys is None


def test_no_copy_of_a_closed_cache() -> None:
    cache = make_cache()
    fill(cache, 1, 4)
    cache.close()
    with pytest.raises(ClosedError):
        copy.deepcopy(cache)
