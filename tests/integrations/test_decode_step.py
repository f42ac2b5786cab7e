"""DecodeStep: the same logits as the model's own forward, whatever the cache has become meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from tests.helpers.hf_models import HELD, RELEASE, make_inputs, make_model, prefilled, shared_model  # noqa: E402
from vtensor.errors import OutOfPagesError, RequestError  # noqa: E402
from vtensor.integrations import attention_function  # noqa: E402
from vtensor.integrations.decode_step import DecodeStep  # noqa: E402
from vtensor.integrations.transformers import VirtualCache  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

REFUSED = {  # what the step says of families that it does not serve
    "llama4, chunks": "layer 0 of Llama4ForCausalLM is not computed by kernels",
    "qwen3-next, linear attention": "layers that are not attention",
    "lfm2, convolutions": "layers that are not attention",
}
if RELEASE >= (5, 24):
    REFUSED["deepseek-v3, other width of V"] = "is not computed by kernels"  # it caches latents


def forward(model: Any, cache: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The model's own forward of a token; grows the mask in place of the caller's."""
    positions = (mask.cumsum(1) - 1)[:, -1:]
    with torch.no_grad():
        logits: torch.Tensor = model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits
    return logits


def check(
    family: str, padded: bool, num_tokens: int, device: str = "cpu", compile: bool = False, **options: Any
) -> None:
    """As many tokens by steps and by forwards."""
    model = make_model(family, device, "vtensor") if device != "cpu" else shared_model(family, "vtensor")
    inputs = make_inputs(device, padded=padded)
    mask = inputs["attention_mask"]
    (cache, tokens), (other, _) = (prefilled(model, inputs, **options) for _ in range(2))
    with cache, other:
        step = DecodeStep(model, cache, mask, compile=compile)
        for _ in range(num_tokens):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            found, expected = step(tokens), forward(model, other, tokens, mask)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            tokens = expected.argmax(-1)
        for one, two in zip(cache.layers, other.layers, strict=True):
            if getattr(one, "keys", None) is not None:
                torch.testing.assert_close(one.keys, two.keys[:, :, -one.keys.shape[2] :], rtol=1e-4, atol=1e-4)
        for manager in cache.managers:
            manager.check_integrity()


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("family", [family for family in HELD if family not in REFUSED])
def test_the_same_as_forwards(family: str, padded: bool) -> None:
    check(family, padded, 10, page_group_bytes=4096)


@pytest.mark.skipif(RELEASE < (5, 5), reason="masks are then made of positions on the device")
def test_compiled() -> None:
    model, inputs = shared_model("gpt-oss, windows and sinks", "vtensor"), make_inputs()
    (cache, tokens), (other, _) = (prefilled(model, inputs) for _ in range(2))
    sizes = []

    def backend(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Any:
        names = [str(node.target) for node in module.graph.nodes]
        sizes.append((sum("attend" in name for name in names), sum("append_kv" in name for name in names)))
        return module.forward

    with cache, other:
        mask = inputs["attention_mask"]
        step, uncompiled = DecodeStep(model, cache, mask, compile={"backend": backend}), DecodeStep(model, other, mask)
        torch.testing.assert_close(step(tokens), uncompiled(tokens))
    torch._dynamo.reset()
    assert [size for size in sizes if any(size)] == [(3, 3)], "all layers are in one graph"


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("family", ["llama", "gemma3, windows", "gpt-oss, windows and sinks"])
def test_one_graph_while_the_cache_grows(family: str, padded: bool, compile: bool) -> None:
    if compile and RELEASE < (5, 5):
        pytest.skip("masks are then made of positions on the device")
    check(family, padded, 300, "cuda", compile)


@pytest.mark.parametrize("family", [family for family in HELD if family in REFUSED])
def test_families_that_are_refused(family: str) -> None:
    model, inputs = shared_model(family, "vtensor"), make_inputs(padded=False)
    cache, tokens = prefilled(model, inputs)
    with cache:
        with pytest.raises(RequestError, match=REFUSED[family]):
            DecodeStep(model, cache)(tokens)
        assert cache.get_seq_length() == 9
        mask = torch.ones(2, 10, dtype=torch.long)
        assert forward(model, cache, tokens, mask).shape[1] == 1


def test_drafts_are_taken_back_and_forwards_come_between() -> None:
    model, inputs = shared_model("gemma3, windows", "vtensor"), make_inputs(padded=False)
    cache, tokens = prefilled(model, inputs, page_group_bytes=4096)
    with cache:
        step = DecodeStep(model, cache)
        first = [step(tokens) for _ in range(12)]
        cache.crop(-11)
        again = [step(tokens), forward(model, cache, tokens, torch.ones(2, 12, dtype=torch.long)), step(tokens)]
        for one, other in zip(again, first[1:], strict=False):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert cache.get_seq_length() == 9 + 1 + 3


def test_a_shortage_changes_nothing() -> None:
    model, inputs = shared_model("llama", "vtensor"), make_inputs(padded=False)
    cache, tokens = prefilled(model, inputs, page_group_bytes=4096, capacity_bytes=4 * 4096, lookahead_tokens=0)
    with cache:
        step = DecodeStep(model, cache)
        step(tokens)
        for _ in range(2):
            with pytest.raises(OutOfPagesError, match="more capacity_bytes"):
                step(tokens)
            assert cache.get_seq_length() == 10, "a token takes 768 bytes, so two page groups hold 10"
            cache.crop(-1)
            step(tokens)
        cache.manager.check_integrity()


def test_nobody_looks_at_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which in a capture nobody could."""
    model, inputs = shared_model("gemma3, windows", "vtensor"), make_inputs()
    cache, tokens = prefilled(model, inputs)
    with cache:
        step = DecodeStep(model, cache, inputs["attention_mask"])
        monkeypatch.setattr(attention_function, "left_padding", lambda mask: pytest.fail("it looks"))
        for _ in range(3):
            step(tokens)


class TestMisuse:
    def test_another_attention(self) -> None:
        cache, _ = prefilled(shared_model(), make_inputs(padded=False))
        with cache, pytest.raises(RequestError, match=r"'sdpa'; call model.set_attn_implementation\('vtensor'\)"):
            DecodeStep(shared_model(), cache)

    def test_no_prompt(self) -> None:
        model = shared_model("llama", "vtensor")
        with VirtualCache.for_model(model) as cache, pytest.raises(RequestError, match="holds no prompt"):
            DecodeStep(model, cache)

    @pytest.mark.parametrize(
        ("mask", "told"),
        [
            (torch.ones(2, 8), r"must be \[2, 9\]"),
            (torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1]] * 2), "all on the left"),
        ],
        ids=["short", "holes"],
    )
    def test_masks(self, mask: torch.Tensor, told: str) -> None:
        model = shared_model("llama", "vtensor")
        cache, _ = prefilled(model, make_inputs(padded=False))
        with cache, pytest.raises(RequestError, match=told):
            DecodeStep(model, cache, mask)

    def test_another_batch(self) -> None:
        model = shared_model("llama", "vtensor")
        cache, tokens = prefilled(model, make_inputs(padded=False))
        with cache:
            step = DecodeStep(model, cache)
            with pytest.raises(RequestError, match=r"it must be \[2, 1\]"):
                step(tokens[:1])
            cache.batch_select_indices(torch.tensor([0]))
            with pytest.raises(RequestError, match="changed places"):
                step(tokens)
