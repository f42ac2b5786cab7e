"""Layers on several devices: a manager for each; and generations that run out of memory, and go on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers.cache_utils import DynamicCache

from tests.helpers.hf_models import HELD, expected_tokens, generate, make_inputs, make_model, shared_model
from vtensor.errors import OutOfPagesError, RequestError
from vtensor.integrations import virtual_cache
from vtensor.integrations.transformers import VirtualCache

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

APART = ["cpu", torch.device("cpu", 0), "cpu"]  # to the cache two devices, of which there is but one here


@pytest.mark.parametrize("attention", [None, "vtensor"])
def test_a_manager_for_each_device(attention: str | None) -> None:
    model, inputs = shared_model("gemma3, windows", attention), make_inputs()
    with VirtualCache.for_model(model, device=APART, page_group_bytes=4096) as cache:
        found = generate(model, inputs, cache, max_new_tokens=16)
        assert torch.equal(found, expected_tokens("gemma3, windows", True, 16))
        assert [manager.config.num_layers for manager in cache.managers] == [2, 1]
        with pytest.raises(RequestError, match="2 managers: use `managers`"):
            _ = cache.manager
        with copy.deepcopy(cache) as copied:
            copied.batch_repeat_interleave(1)
            cache.reorder_cache(torch.tensor([1, 0]))
            for one, other in zip(copied.layers, cache.layers, strict=True):
                assert torch.equal(one.keys[[1, 0]], other.keys)
        for manager in cache.managers:
            manager.check_integrity()


def test_its_devices_share_what_the_cache_may_hold() -> None:
    with VirtualCache(
        shared_model().config, 64, device=APART, page_group_bytes=4096, capacity_bytes=4 * 4096, lookahead_tokens=0
    ) as cache:
        new = torch.zeros(1, 2, 9, 16)  # 4,608 bytes in the first manager, 2,304 in the second
        for layer in range(3):
            cache.update(new, new, layer)
        assert len({manager.pool for manager in cache.managers}) == 1
        with pytest.raises(OutOfPagesError, match="holds its 9 tokens"):
            cache.update(torch.zeros(1, 2, 24, 16), torch.zeros(1, 2, 24, 16), 0)
        for layer in range(3):
            cache.update(new[:, :, :7], new[:, :, :7], layer)
        for _ in range(2):
            # 17 tokens: 3 page groups in the first manager, and then 2 in the second.
            with pytest.raises(OutOfPagesError, match="holds its 16 tokens"):
                cache.begin_step()
            assert [group.num_tokens for group in cache._groups] == [16, 16]


def test_the_devices_are_those_of_the_model() -> None:
    model = make_model()
    assert virtual_cache._devices(model) is None
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": 0, "model.layers.2": "meta"}
    model.model.layers[2].self_attn.to("meta")
    model.model.layers[1].self_attn._hf_hook = type(
        "Hook", (), {"execution_device": "cuda:1"}
    )()  # its weights are elsewhere
    assert virtual_cache._devices(model) == [torch.device(name) for name in ("cpu", "cuda:1", "meta")]


@pytest.mark.gpu
def test_a_layer_on_another_device_is_told() -> None:
    with VirtualCache(shared_model().config, 64) as cache:
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)
        new = torch.zeros(1, 2, 1, 16, device="cuda")
        with pytest.raises(RequestError, match="for_model"):
            cache.update(new, new, 1)


@pytest.mark.parametrize("attention", [None, "vtensor"])
@pytest.mark.parametrize("family", ["llama", "gemma3, windows"])
def test_a_generation_that_runs_out_of_memory(family: str, attention: str | None) -> None:
    model, inputs = shared_model(family, attention), make_inputs()
    expected = generate(shared_model(family), inputs, max_new_tokens=40)
    options: dict[str, Any] = {"page_group_bytes": 4096, "lookahead_tokens": 0, "capacity_bytes": 12 * 4096}
    with VirtualCache.for_model(model, **options) as cache:
        with pytest.raises(OutOfPagesError, match="more capacity_bytes"):
            generate(model, inputs, cache, max_new_tokens=200)
        held = cache.get_seq_length()
        assert 20 < held < 200
        assert {layer.get_seq_length() for layer in cache.layers} == {held}
        cache.manager.check_integrity()
        cache.crop(-1)
        cache.reset()
        short = {"max_new_tokens": held - 9}
        assert torch.equal(generate(model, inputs, cache, **short)[:, :30], expected[:, :30])
        cache.manager.check_integrity()


@pytest.mark.parametrize("family", [family for family in HELD if "linear" in family or "conv" in family])
def test_other_layers_go_along(family: str) -> None:
    """Copies, beams and reset of models whose other layers are transformers' own."""
    model, inputs = shared_model(family), make_inputs()
    expected = generate(model, inputs, num_beams=3, max_new_tokens=12)
    with VirtualCache.for_model(model) as cache:
        assert torch.equal(generate(model, inputs, cache, num_beams=3, max_new_tokens=12), expected)
        cache.reset()
        prefix = {"input_ids": inputs["input_ids"][1:, :6], "attention_mask": inputs["attention_mask"][1:, :6]}
        theirs = DynamicCache(config=model.config)  # some releases are wrong here, by themselves
        with torch.no_grad():
            model(**prefix, past_key_values=cache)
            model(**prefix, past_key_values=theirs)
        whole = {name: value[1:] for name, value in inputs.items()}
        expected = generate(model, whole, theirs, max_new_tokens=12)
        with copy.deepcopy(cache) as copied:
            assert torch.equal(generate(model, whole, copied, max_new_tokens=12), expected)
        assert torch.equal(generate(model, whole, cache, max_new_tokens=12), expected)
