"""generate of our own against that of transformers: the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from tests.helpers.hf_models import expected_tokens, make_inputs, shared_model
from tests.helpers.hf_models import generate as theirs
from vtensor.errors import OutOfPagesError
from vtensor.integrations.generation import generate
from vtensor.integrations.transformers import VirtualCache

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("chunk_tokens", [None, 4])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("family", ["llama", "gemma3, windows", "gpt-oss, windows and sinks"])
def test_the_same_tokens(family: str, padded: bool, chunk_tokens: int | None) -> None:
    model = shared_model(family)
    attention = model.config._attn_implementation
    found = generate(model, **make_inputs(padded=padded), max_new_tokens=16, chunk_tokens=chunk_tokens)
    assert torch.equal(found, expected_tokens(family, padded, 16))
    assert model.config._attn_implementation == attention


def test_sequences_that_end() -> None:
    model, inputs = shared_model(), make_inputs(batch=3)
    free = theirs(model, inputs, max_new_tokens=40)[:, 9:]
    ends = [int(free[0, 3]), int(free[1, 20]), int(free[2, 12])]
    for some in (ends, ends[:1], ends[2]):
        for num_tokens in (2, 25, 40):
            expected = theirs(model, inputs, max_new_tokens=num_tokens, eos_token_id=some)
            assert torch.equal(generate(model, **inputs, max_new_tokens=num_tokens, eos_token_id=some), expected)


def test_tokens_of_the_callers_choice() -> None:
    model, inputs = shared_model(), make_inputs()
    second = generate(model, **inputs, max_new_tokens=3, choose=lambda logits: logits.topk(2).indices[:, 1])
    first = generate(model, **inputs, max_new_tokens=1)
    assert (second[:, 9] != first[:, 9]).all()
    again = generate(model, second[:, :10], torch.ones(2, 10), max_new_tokens=1)
    assert again.dtype == inputs["input_ids"].dtype


def test_a_cache_of_the_callers() -> None:
    model, inputs = shared_model(), make_inputs()
    with VirtualCache.for_model(model, page_group_bytes=4096) as cache:
        for _ in range(2):
            found = generate(model, **inputs, max_new_tokens=16, cache=cache)
            assert torch.equal(found, expected_tokens("llama", True, 16))
            assert cache.get_seq_length() == 9 + 15
            with pytest.raises(ValueError, match="cache holds 24 tokens"):
                generate(model, **inputs, max_new_tokens=16, cache=cache)
            cache.reset()
        cache.manager.check_integrity()


def test_a_shortage() -> None:
    model, inputs = shared_model(), make_inputs()
    options: dict[str, Any] = {"page_group_bytes": 4096, "capacity_bytes": 8 * 4096, "lookahead_tokens": 0}
    with VirtualCache.for_model(model, **options) as cache:
        with pytest.raises(OutOfPagesError, match="more capacity_bytes"):
            generate(model, **inputs, max_new_tokens=40, cache=cache)
        assert cache.get_seq_length() == 4 * 4096 // 768
        cache.reset()
        found = generate(model, **inputs, max_new_tokens=8, cache=cache)
        assert torch.equal(found, expected_tokens("llama", True, 8))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_new_tokens": 0}, "max_new_tokens=0"), ({"max_new_tokens": 1, "chunk_tokens": -1}, "chunk_tokens=-1")],
)
def test_misuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} must be a positive integer"):
        generate(shared_model(), **make_inputs(), **options)
