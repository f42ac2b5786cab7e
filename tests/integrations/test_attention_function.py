"""model.set_attn_implementation("vtensor"): what goes to the kernels, and what is computed in torch, is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from tests.helpers.hf_models import SMALL, WINDOW, generate, make_inputs, make_model, shared_model  # noqa: E402
from vtensor.integrations import attention_function  # noqa: E402
from vtensor.integrations.attention_function import Pattern, attention, mask  # noqa: E402
from vtensor.integrations.transformers import VirtualCache  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

WITH_WINDOWS = ["gemma2, windows and softcap", "gemma3, windows", "gpt-oss, windows and sinks"]


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call of the kernels."""
    found: list[dict[str, Any]] = []
    decode_attention = attention_function.decode_attention

    def noting(*args: Any, **options: Any) -> Any:
        found.append(options)
        return decode_attention(*args, **options)

    monkeypatch.setattr(attention_function, "decode_attention", noting)
    return found


def logits(family: str, attention: str | None, **inputs: Any) -> torch.Tensor:
    return shared_model(family, attention)(**inputs, use_cache=inputs.get("past_key_values") is not None).logits


def assert_close(found: torch.Tensor, expected: torch.Tensor, is_token: torch.Tensor | None = None) -> None:
    if is_token is not None:
        found, expected = found[is_token], expected[is_token]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_is_told_by_name_and_back(kernel_calls: list[Any]) -> None:
    model, inputs = make_model(), make_inputs()
    expected = generate(model, inputs, max_new_tokens=3)
    model.set_attn_implementation("vtensor")
    with VirtualCache.for_model(model) as cache:
        assert torch.equal(generate(model, inputs, cache, max_new_tokens=3), expected)
    assert len(kernel_calls) == 3 * 3
    model.set_attn_implementation("sdpa")
    assert torch.equal(generate(model, inputs, max_new_tokens=3), expected)
    assert len(kernel_calls) == 3 * 3


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("family", ["llama", *WITH_WINDOWS])
@torch.no_grad()
def test_without_a_cache(family: str, padding: str, kernel_calls: list[Any]) -> None:
    inputs = make_inputs(length=21, padded=False)
    is_token = inputs["attention_mask"]
    is_token[0, {"none": slice(0), "left": slice(5), "right": slice(16, 21), "holes": slice(4, 7)}[padding]] = 0
    found, expected = logits(family, "vtensor", **inputs), logits(family, None, **inputs)
    assert_close(found, expected, is_token.bool())
    assert len(kernel_calls) == (3 if padding == "none" else 0)


@pytest.mark.parametrize("family", ["llama", *WITH_WINDOWS])
@torch.no_grad()
def test_padding_on_the_left_in_chunks(family: str, kernel_calls: list[Any]) -> None:
    inputs = make_inputs(batch=3, length=40, padded=False)
    is_token = inputs["attention_mask"]
    is_token[0, :5] = 0
    is_token[2, :23] = 0  # the first two chunks of it are padding alone
    expected = logits(family, None, **inputs)
    found, start = [], 0
    with VirtualCache.for_model(shared_model(family)) as cache:
        for count in (11, 12, 1, 1, 15):
            end = start + count
            chunk = {"input_ids": inputs["input_ids"][:, start:end], "attention_mask": is_token[:, :end]}
            positions = (is_token.cumsum(1) - 1).clamp(min=0)[:, start:end]
            found.append(logits(family, "vtensor", **chunk, position_ids=positions, past_key_values=cache))
            start = end
    positions = (is_token.cumsum(1) - 1).clamp(min=0)
    expected = logits(family, None, **inputs, position_ids=positions)
    assert_close(torch.cat(found, dim=1), expected, is_token.bool())
    assert len(kernel_calls) == 5 * 3


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
@torch.no_grad()
def test_padding_where_a_slot_is_no_whole_number_of_rows(layout: str, kernel_calls: list[Any]) -> None:
    # A row of 3 layers is no part of a slot, of whole page groups.
    model, inputs = shared_model("llama", "vtensor"), make_inputs(batch=2)
    with VirtualCache.for_model(model, 100, layout=layout, page_group_bytes=4096) as cache:
        found = generate(model, inputs, cache, max_new_tokens=6)
        key, _ = cache.manager.layer(0)
        assert (key.stride(0) % key.stride(1) != 0) == (layout == "sliced")
    assert torch.equal(found, generate(shared_model(), inputs, max_new_tokens=6))
    assert len(kernel_calls) == 6 * 3


@pytest.mark.parametrize(
    ("slot_rows", "value_slot_rows", "by_kernels"), [(64, 64, True), (64, 96, False)], ids=["alike", "apart"]
)
@torch.no_grad()
def test_padding_where_k_and_v_lie_apart(
    slot_rows: int, value_slot_rows: int, by_kernels: bool, kernel_calls: list[Any]
) -> None:
    # As in layout="per_layer" with V of another width, whose slots may be longer, to a whole page group.
    generator = torch.Generator().manual_seed(3)
    key = torch.randn(2, slot_rows, 2, 48, generator=generator)[:, :64]
    value = torch.randn(2, value_slot_rows, 2, 16, generator=generator)[:, :64]
    query = torch.randn(2, 4, 3, 48, generator=generator)
    padding = torch.ones(2, 20, dtype=torch.bool)
    padding[1, :6] = False
    keys, values = (states[:, :20].transpose(1, 2) for states in (key, value))
    seq_lens = torch.full((2,), 20, dtype=torch.int32)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    given = mask(**TestMasks().options(3, 20, attention_mask=padding))
    expected, _ = attention(module, query, keys, values, given)
    assert not kernel_calls
    keys = attention_function.tag(keys, attention_function.Held(key, value, seq_lens, 20))
    found, _ = attention(module, query, keys, values, given)
    assert_close(found, expected)
    assert bool(kernel_calls) == by_kernels


@torch.no_grad()
def test_padding_in_a_slot_that_is_nearly_full(kernel_calls: list[Any]) -> None:
    model, inputs = shared_model("llama", "vtensor"), make_inputs()
    with VirtualCache.for_model(model, 20) as cache:
        found = generate(model, inputs, cache, max_new_tokens=12)
        assert cache.get_seq_length() == 20
    assert torch.equal(found, generate(shared_model(), inputs, max_new_tokens=12))
    assert len(kernel_calls) == 3 * (16 - 9 + 1), "kernels reach 4 rows less, since 4 are padding"


@torch.no_grad()
def test_a_mask_that_another_device_got_a_copy_of() -> None:
    model, inputs = shared_model("gemma3, windows", "vtensor"), make_inputs(length=21)
    layers = [layer.self_attn for layer in model.model.layers]
    handles = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: (
                args,
                {
                    name: value.clone() if name == "attention_mask" and value is not None else value
                    for name, value in kwargs.items()
                },
            ),
            with_kwargs=True,
        )
        for layer in layers
    ]
    try:
        found = model(**inputs, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    assert_close(found, logits("gemma3, windows", None, **inputs), inputs["attention_mask"].bool())


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("family", ["llama", *WITH_WINDOWS])
def test_gradients_are_computed_in_torch(family: str, padded: bool, kernel_calls: list[Any]) -> None:
    inputs = make_inputs(length=13, padded=padded)
    gradients = []
    for name in (None, "vtensor"):
        model = make_model(family, attention=name)
        found = model(**inputs, use_cache=False).logits
        found[inputs["attention_mask"].bool()].square().mean().backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    assert not kernel_calls


@torch.no_grad()
def test_a_static_cache(kernel_calls: list[Any]) -> None:
    model, inputs = shared_model("llama", "vtensor"), make_inputs()
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    found = generate(model, inputs, cache, max_new_tokens=8, disable_compile=True)
    assert torch.equal(found, generate(shared_model(), inputs, max_new_tokens=8))
    assert not kernel_calls, "it has keys behind the last query"


@torch.no_grad()
def test_sequences_that_are_packed(kernel_calls: list[Any]) -> None:
    tokens = make_inputs(batch=1, length=12)["input_ids"]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    found = logits("llama", "vtensor", input_ids=tokens, position_ids=positions)
    assert_close(found, logits("llama", None, input_ids=tokens, position_ids=positions))
    apart = [logits("llama", "vtensor", input_ids=part) for part in tokens.split([5, 3, 4], dim=1)]
    assert_close(found, torch.cat(apart, dim=1))
    assert len(kernel_calls) == 3 * 3


@torch.no_grad()
def test_a_mask_of_the_callers_own(kernel_calls: list[Any]) -> None:
    tokens = make_inputs(length=10)["input_ids"]
    own = torch.rand(2, 1, 10, 10, generator=torch.Generator().manual_seed(2)) < 0.7
    own |= torch.eye(10, dtype=torch.bool)
    for given in (own, torch.zeros(own.shape).masked_fill(~own, -1e9)):
        found = logits("llama", "vtensor", input_ids=tokens, attention_mask=given)
        assert_close(found, logits("llama", None, input_ids=tokens, attention_mask=given))
    assert not kernel_calls


@torch.no_grad()
def test_widths_that_no_kernel_takes(kernel_calls: list[Any]) -> None:
    models = [make_model("gpt-oss, windows and sinks", attention=name, head_dim=8) for name in (None, "vtensor")]
    inputs = make_inputs()
    expected, found = (generate(model, inputs, max_new_tokens=12) for model in models)
    assert torch.equal(found, expected)
    with VirtualCache.for_model(models[1]) as cache:
        assert torch.equal(generate(models[1], inputs, cache, max_new_tokens=12), expected)
    assert not kernel_calls


@torch.no_grad()
def test_an_encoder(kernel_calls: list[Any]) -> None:
    inputs = make_inputs(length=12)
    found = []
    for name in ("sdpa", "vtensor"):
        torch.manual_seed(0)
        settings = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")}
        config = transformers.BertConfig(**settings, num_hidden_layers=2, attn_implementation=name)
        found.append(transformers.BertModel(config).eval()(**inputs).last_hidden_state)
    assert_close(*found, inputs["attention_mask"].bool())
    assert not kernel_calls


class TestMasks:
    def options(self, num_queries: int, num_keys: int, first_key: int = 0, **more: Any) -> dict[str, Any]:
        """As transformers gives them, which changed with 5.5."""
        past = first_key + num_keys - num_queries
        old = {"cache_position": torch.arange(past, past + num_queries)}
        new = {"q_length": num_queries, "q_offset": past, "device": "cpu"}
        is_new = "q_length" in transformers.masking_utils.sdpa_mask.__code__.co_varnames[:3]
        shape = {"batch_size": 2, "kv_length": num_keys, "kv_offset": first_key}
        return {**shape, **(new if is_new else old), "allow_is_causal_skip": True, **more}

    def window(self, size: int) -> Any:
        return transformers.masking_utils.sliding_window_causal_mask_function(size)

    def test_plain(self) -> None:
        assert mask(**self.options(3, 9)) is None
        assert mask(**self.options(1, 9, attention_mask=torch.ones(2, 9, dtype=torch.bool))) is None

    def test_window(self) -> None:
        found = mask(**self.options(1, WINDOW, 5, mask_function=self.window(WINDOW)))
        assert found is not None
        assert found.shape == (2, 0)
        pattern: Pattern = found._vtensor_pattern
        assert (pattern.window, pattern.starts, pattern.first_key) == (WINDOW, None, 5)

    def test_window_and_padding(self) -> None:
        padding = torch.ones(2, 13, dtype=torch.bool)
        padding[1, :7] = False
        found = mask(**self.options(1, WINDOW, 5, mask_function=self.window(WINDOW), attention_mask=padding))
        assert found is not None
        assert torch.equal(found, padding[:, 5:])
        pattern: Pattern = found._vtensor_pattern
        assert (pattern.window, pattern.starts.tolist(), pattern.most_start) == (WINDOW, [0, 7], 7)

    @pytest.mark.parametrize("kind", ["chunks", "own", "or", "and"])
    def test_all_others_are_made_by_transformers(self, kind: str) -> None:
        utils = transformers.masking_utils
        function = {
            "chunks": utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
            "own": lambda batch, head, query, key: key <= query,
            "or": utils.or_masks(self.window(4), utils.causal_mask_function),
            "and": utils.and_masks(utils.sliding_window_overlay(3), lambda batch, head, query, key: key != 2),
        }[kind]
        options = self.options(3, 9, mask_function=function, allow_is_causal_skip=False)
        found = mask(**options)
        assert found is not None
        assert found.shape == (2, 1, 3, 9)
        assert torch.equal(found, utils.sdpa_mask(**options))

    def test_keys_behind_the_last_query(self) -> None:
        found = mask(**{**self.options(3, 9), "kv_length": 12})
        assert found is not None
        assert found.shape == (2, 1, 3, 12)
        assert not found[..., 9:].any()

    def test_a_mask_of_two_dimensions_that_is_not_ours(self) -> None:
        states = torch.zeros(2, 2, 5, 16)
        holes = torch.tensor([[True, False, True, True, True]] * 2)
        with pytest.raises(ValueError, match="not made by vtensor's mask"):
            attention(torch.nn.Module(), states, states, states, holes)
