"""VirtualCache and our attention with models of many families: token for token what transformers' own generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from tests.helpers.hf_models import HELD, NOT_HELD, RELEASE, expected_tokens, generate, make_inputs, shared_model
from vtensor.integrations import attention_function
from vtensor.integrations.transformers import VirtualCache

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

NUM_TOKENS = 16  # the windows move, the second chunk begins
NO_KERNEL = {  # layers whose attention is computed in torch, of how many
    "llama4, chunks": (2, 3),
    "gemma3n, shared KV": (0, 4),
    "qwen3-next, linear attention": (0, 2),
    "lfm2, convolutions": (0, 1),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often attention was computed by what."""
    counts = dict.fromkeys(("decode_attention", "sdpa_attention_forward", "_in_torch"), 0)

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name in counts:
        monkeypatch.setattr(attention_function, name, counted(name, getattr(attention_function, name)))
    return counts


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("family", HELD)
def test_transformers_attention_over_virtual_layers(family: str, padded: bool) -> None:
    model, inputs = shared_model(family), make_inputs(padded=padded)
    expected = expected_tokens(family, padded, NUM_TOKENS)
    with VirtualCache.for_model(model, page_group_bytes=4096) as cache:
        assert torch.equal(generate(model, inputs, cache, max_new_tokens=NUM_TOKENS), expected)
        for manager in cache.managers:
            manager.check_integrity()
        cache.reset()
        assert torch.equal(generate(model, inputs, cache, max_new_tokens=3), expected[:, : 9 + 3])


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("family", HELD)
def test_our_attention_over_virtual_layers(family: str, padded: bool, calls: dict[str, int]) -> None:
    model, inputs = shared_model(family, "vtensor"), make_inputs(padded=padded)
    with VirtualCache.for_model(model, page_group_bytes=4096) as cache:
        found = generate(model, inputs, cache, max_new_tokens=NUM_TOKENS)
    assert torch.equal(found, expected_tokens(family, padded, NUM_TOKENS))
    in_torch, layers = NO_KERNEL.get(family, (0, 3))
    if padded and family.startswith("deepseek-v3") and RELEASE >= (5, 24):
        in_torch = layers  # what it caches are latents, so its K and V are not where the cache holds them
    assert calls["decode_attention"] == (layers - in_torch) * NUM_TOKENS
    assert calls["sdpa_attention_forward"] + calls["_in_torch"] == in_torch * NUM_TOKENS


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("family", HELD)
def test_our_attention_over_transformers_cache(family: str, padded: bool, calls: dict[str, int]) -> None:
    model, inputs = shared_model(family, "vtensor"), make_inputs(padded=padded)
    found = generate(model, inputs, max_new_tokens=NUM_TOKENS)
    assert torch.equal(found, expected_tokens(family, padded, NUM_TOKENS))
    assert (calls["decode_attention"] == 0) == padded  # kernels do not reach behind padding there


@pytest.mark.parametrize("family", [family for family in NOT_HELD if family not in HELD and "mimo" not in family])
def test_families_that_the_release_caches_otherwise(family: str) -> None:
    if RELEASE < (5, 5) and "gemma4" in family:
        pytest.skip("the release does not know the family")
    with pytest.raises(ValueError, match="use the model's default cache"):
        VirtualCache.for_model(shared_model(family))
