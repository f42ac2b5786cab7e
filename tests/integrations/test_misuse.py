"""What callers do in an order that nobody thought of: they are told, and nothing is lost or wrong."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from tests.helpers.child import in_interpreter  # noqa: E402
from tests.helpers.hf_models import make_inputs, make_model, prefilled, shared_model  # noqa: E402
from vtensor.errors import RequestError  # noqa: E402
from vtensor.integrations.module import KVCache  # noqa: E402
from vtensor.integrations.transformers import DecodeStep, VirtualCache, generate  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


class InterruptedError_(Exception):
    """What ends a forward."""


def fail(*_: Any) -> None:
    raise InterruptedError_


def lengths(cache: Any) -> list[int]:
    return [layer.num_tokens for layer in cache.layers]


@pytest.mark.parametrize("layer", [0, 1])
def test_a_step_that_is_interrupted_in_any_layer(layer: int) -> None:
    model = make_model("llama", "cpu", "vtensor")
    (cache, tokens), (other, _) = (prefilled(model, make_inputs(padded=False)) for _ in range(2))
    with cache, other:
        step, expected = DecodeStep(model, cache), DecodeStep(model, other)
        handle = model.model.layers[layer].mlp.register_forward_hook(fail)
        held = lengths(cache)
        for _ in range(2):
            with pytest.raises(InterruptedError_):
                step(tokens)
            assert lengths(cache) == held
        handle.remove()
        for _ in range(3):
            logits = step(tokens)
            assert torch.equal(logits, expected(tokens))
            tokens = logits[:, -1:].argmax(-1)


def test_a_forward_that_is_interrupted_and_cropped() -> None:
    model = make_model("llama", "cpu", "sdpa")
    (cache, tokens), (other, _) = (prefilled(model, make_inputs(padded=False)) for _ in range(2))
    with cache, other, torch.no_grad():
        held = lengths(cache)
        handle = model.model.layers[0].mlp.register_forward_hook(fail)
        with pytest.raises(InterruptedError_):
            model(tokens, past_key_values=cache)
        handle.remove()
        assert cache.get_seq_length() == held[0] + 1
        cache.crop(-1)
        assert lengths(cache) == held
        logits = [model(tokens, past_key_values=each).logits for each in (cache, other)]
        assert torch.equal(*logits)


def test_a_step_after_a_reset_and_another_prompt() -> None:
    model = shared_model("llama", "vtensor")
    inputs = make_inputs(padded=True)
    cache, tokens = prefilled(model, inputs)
    with cache:
        step = DecodeStep(model, cache, inputs["attention_mask"])
        step(tokens)
        cache.reset()
        with torch.no_grad():
            model(torch.ones(2, 9, dtype=torch.long), past_key_values=cache)
        with pytest.raises(RequestError, match="make a new DecodeStep"):
            step(tokens)
        step = DecodeStep(model, cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(RequestError, match="changed places"):
            step(tokens)


def test_padding_near_the_longest_length() -> None:
    model = shared_model("llama", "vtensor")
    ids, mask = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    with VirtualCache.for_model(model, 9) as cache:
        assert generate(model, ids, max_new_tokens=6, cache=cache).shape == (2, 10)
    with VirtualCache.for_model(model, 9) as cache, pytest.raises(RequestError, match="need addresses for 10"):
        generate(model, ids, mask, max_new_tokens=6, cache=cache)
    with VirtualCache.for_model(model, 11) as cache:
        assert generate(model, ids, mask, max_new_tokens=6, cache=cache).shape == (2, 10)


@pytest.mark.parametrize("tokens", [torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool)], ids=["float", "bool"])
def test_tokens_that_are_no_integers(tokens: torch.Tensor) -> None:
    model = shared_model("llama", "vtensor")
    cache, _ = prefilled(model, make_inputs(padded=False))
    with cache, pytest.raises(RequestError, match="must be integers"):
        DecodeStep(model, cache)(tokens)


def test_no_sequence_at_all() -> None:
    model = shared_model("llama", "sdpa")
    cache, tokens = prefilled(model, make_inputs(padded=False))
    with cache, torch.no_grad():
        held = cache.get_seq_length()
        with pytest.raises(RequestError, match="reset"):
            cache.batch_select_indices(torch.tensor([], dtype=torch.long))
        model(tokens, past_key_values=cache)
        assert cache.get_seq_length() == held + 1


def test_values_that_need_gradients() -> None:
    model = make_model("llama", "cpu", "sdpa")
    model.requires_grad_(False)
    model.model.layers[-1].self_attn.v_proj.weight.requires_grad_()
    with VirtualCache.for_model(model) as cache, pytest.raises(RequestError, match="no_grad"):
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache)


def test_parts_of_a_cache_are_not_copied_by_themselves() -> None:
    model = shared_model("llama", "vtensor")
    cache, _ = prefilled(model, make_inputs(padded=False))
    with cache:
        for part in (cache.layers, cache.layers[0], cache._groups[0], DecodeStep(model, cache)):
            with pytest.raises(RequestError, match="cop"):
                copy.deepcopy(part)
        with copy.deepcopy(cache) as copied:
            assert copied.get_seq_length() == cache.get_seq_length()


def test_states_of_another_model() -> None:
    cache, _ = prefilled(shared_model("llama", "sdpa"), make_inputs(padded=False))
    with cache, torch.no_grad():
        num_layers, layer = len(cache.layers), cache.layers[0]
        key, value = layer.keys[:, :, :1], layer.values[:, :, :1]
        with pytest.raises(RequestError, match=f"a cache of {num_layers} layers"):
            cache.update(key, value, num_layers)
        wider = torch.cat([key, key], dim=-1)
        with pytest.raises(RequestError, match="make a VirtualCache for each model"):
            cache.update(wider, wider, 0)
        with pytest.raises(RequestError, match="alike but for their width"):
            cache.update(key, value[:, :1], 0)


def test_a_step_made_in_inference_mode() -> None:
    model = shared_model("llama", "vtensor")
    cache, tokens = prefilled(model, make_inputs(padded=False))
    with cache:
        with torch.inference_mode():
            step = DecodeStep(model, cache)
            step(tokens)
        step(tokens)


def test_two_generations_at_once_share_a_model() -> None:
    model = make_model("llama", "cpu", "sdpa")
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = generate(model, ids, max_new_tokens=12)
    found: list[Any] = []
    first_has_begun, second_is_done = threading.Event(), threading.Event()

    def choose(logits: torch.Tensor) -> torch.Tensor:
        first_has_begun.set()
        second_is_done.wait(30)
        return logits.argmax(-1)

    thread = threading.Thread(target=lambda: found.append(generate(model, ids, max_new_tokens=12, choose=choose)))
    thread.start()
    first_has_begun.wait(30)
    found.append(generate(model, ids, max_new_tokens=12))
    second_is_done.set()
    thread.join()
    assert len(found) == 2
    assert all(torch.equal(one, expected) for one in found)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "at least one token"),
        ({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]), "max_new_tokens": 1}, "all zeros of a row before"),
        ({"choose": lambda logits: logits.topk(2).indices}, "choose returned shape"),
    ],
)
def test_arguments_of_generate(changes: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "max_new_tokens": 3, **changes}
    model = make_model("llama", "cpu", "sdpa")
    with pytest.raises(ValueError, match=told):
        generate(model, **given)
    assert model.config._attn_implementation == "sdpa"


def test_a_choice_of_shape_b_1() -> None:
    model, ids = shared_model("llama", "sdpa"), torch.tensor([[1, 2, 3], [4, 5, 6]])
    found = generate(model, ids, max_new_tokens=5, choose=lambda logits: logits.argmax(-1, keepdim=True))
    assert torch.equal(found, generate(model, ids, max_new_tokens=5))


def test_a_compiled_model_and_a_fresh_cache() -> None:
    # In a process of its own, in which nothing of the cache has run before it is compiled.
    result = in_interpreter("""
        import torch
        from tests.helpers.hf_models import make_model
        from vtensor.integrations.transformers import VirtualCache
        model, ids = make_model("llama", "cpu", "sdpa"), torch.tensor([[1, 2, 3], [4, 5, 6]])
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad(), VirtualCache.for_model(model) as cache, VirtualCache.for_model(model) as other:
            for _ in range(3):
                logits = compiled(ids, past_key_values=cache).logits
                torch.testing.assert_close(logits, model(ids, past_key_values=other).logits)
                ids = logits[:, -1:].argmax(-1)
    """)
    assert result.returncode == 0, result.stderr[-2000:]


def test_module_caches() -> None:
    (cache,) = KVCache.for_layers(1, 2, 64, 2, 16, torch.float32)
    new = torch.randn(2, 2, 3, 16)
    positions: Any
    for positions in ([0, 1, 2], None, torch.tensor([0.0, 1.0, 2.0])):
        with pytest.raises(RequestError, match="input_pos is of"):
            cache.update(positions, new, new)
    with pytest.raises(RequestError, match="input_pos has shape"):
        cache.update(torch.tensor(0), new[0], new[0])
    cache.update(torch.arange(3), new, new)
    with pytest.raises(RequestError, match="q has 9 queries"):
        cache.attend(torch.randn(2, 4, 9, 16))
    cache.close()
