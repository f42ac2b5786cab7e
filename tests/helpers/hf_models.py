"""Tiny transformers models of many families, with random weights: what they generate, and what their caches hold."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from vtensor.integrations.transformers import VirtualCache  # noqa: E402

VOCABULARY = 128
WINDOW = 8
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HYBRID = ["sliding_attention", "sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": None}),
    "mistral, window": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2-moe, windows that the attention is not told of": (
        "Qwen2Moe",
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1, **EXPERTS},
    ),
    "gemma2, windows and softcap": (
        "Gemma2",
        {"sliding_window": WINDOW, "head_dim": 16, "attn_logit_softcapping": 0.5},
    ),
    "gemma3, windows": ("Gemma3", {"sliding_window": WINDOW, "head_dim": 16, "layer_types": HYBRID}),
    "gpt-oss, windows and sinks": (
        "GptOss",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": HYBRID,
        },
    ),
    "deepseek-v3, other width of V": ("DeepseekV3", MLA),
    "llama4, chunks": (
        "Llama4",
        {
            "attention_chunk_size": WINDOW,
            "head_dim": 16,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        },
    ),
    "gemma3n, shared KV": (
        "Gemma3n",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 1,
            "layer_types": [*HYBRID, "sliding_attention"],
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "altup_num_inputs": 2,
            **PER_LAYER,
        },
    ),
    "gemma4, two head widths": (
        "Gemma4",
        {"sliding_window": WINDOW, "head_dim": 16, "global_head_dim": 32, "layer_types": HYBRID, **PER_LAYER},
    ),
    "mimo-v2, two numbers of heads": ("MiMoV2Flash", {"sliding_window": WINDOW, "head_dim": 32, "v_head_dim": 16}),
    "qwen3-next, linear attention": (
        "Qwen3Next",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "decoder_sparse_step": 1,
            **EXPERTS,
        },
    ),
    "lfm2, convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
}
NOT_HELD = {  # by VirtualCache with releases before; transformers itself has other caches for them there
    "gemma4, two head widths": (5, 8),
    "mimo-v2, two numbers of heads": (5, 24),
    "qwen3-next, linear attention": (5, 8),
    "lfm2, convolutions": (5, 8),
}
RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
HELD = [family for family in FAMILIES if NOT_HELD.get(family, (0, 0)) <= RELEASE]


def make_model(family: str = "llama", device: str = "cpu", attention: str | None = None, **changes: Any) -> Any:
    """A model of a family with random weights, always the same."""
    name, options = FAMILIES[family]
    settings = {name: value for name, value in {**SMALL, **options, **changes}.items() if value is not None}
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    if attention is None and name in ("GptOss", "Gemma2"):
        attention = "eager"  # sdpa has no sinks, and leaves out a softcap
    torch.manual_seed(0)
    config = config_class(**settings, attn_implementation=attention)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif "proj" in name:
                parameter.mul_(4)  # otherwise a token hardly depends on those before it
    return model


@functools.cache
def shared_model(family: str = "llama", attention: str | None = None) -> Any:
    """The same, made once: for tests that leave it as it is."""
    return make_model(family, attention=attention)


def make_inputs(
    device: str = "cpu", batch: int = 2, length: int = 9, *, padded: bool = True
) -> dict[str, torch.Tensor]:
    """A batch, left-padded unless it is of one sequence."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(tokens)
    if batch > 1 and padded:
        mask[0, :4] = 0
    return {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}


def generate(model: Any, inputs: dict[str, torch.Tensor], cache: Any = None, **options: Any) -> Any:
    """What a model says: 40 tokens, greedily, unless the options say otherwise."""
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    if cache is not None:
        settings["past_key_values"] = cache
    return model.generate(**inputs, **settings)


@functools.cache
def expected_tokens(family: str, padded: bool, num_tokens: int) -> torch.Tensor:
    """With transformers' own attention and cache."""
    return generate(shared_model(family), make_inputs(padded=padded), max_new_tokens=num_tokens)


def prefilled(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> tuple[VirtualCache, torch.Tensor]:
    """A cache with the prompts in it, and what they lead to, [B, 1]."""
    cache = VirtualCache.for_model(model, **options)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(**inputs, position_ids=positions, past_key_values=cache).logits
    return cache, logits[:, -1:].argmax(-1)
