"""Models whose layers differ, in everything that a layer may differ in, served by one cache from beginning to end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.vtensor.caches import Pattern, is_zero, lengths, make, page, spec, stats

FP8, FP16, BF16, FP32 = torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32
Layers = list[vt.LayerSpec]


def latent(device: str, **options: Any) -> vt.LayerSpec:
    """As DeepSeek-V3's, 576 of which 512, but of a size that a page group holds three of."""
    return vt.LayerSpec(1, page(device) // 6, page(device) // 7, is_latent=True, **options)


MODELS: dict[str, Callable[[str], Layers]] = {
    "heads": lambda device: [
        vt.LayerSpec(heads, page(device) // divisor) for heads, divisor in ((1, 16), (3, 32), (2, 80), (8, 64))
    ],
    "V narrower than K, and wider": lambda device: [
        vt.LayerSpec(2, page(device) // 24, page(device) // 32),
        vt.LayerSpec(2, page(device) // 48, page(device) // 16),
    ],
    "latents": lambda device: [latent(device)] * 5,
    "latents with windows, and not": lambda device: [latent(device, window=12), latent(device)] * 2,
    "dtypes": lambda device: [spec(device, 4, dtype=dtype) for dtype in (FP8, BF16, FP32, FP16)] * 2,
    "dtypes in rows of one length": lambda device: [
        vt.LayerSpec(2, page(device) // 16, dtype=BF16),
        vt.LayerSpec(2, page(device) // 8, dtype=FP8),
        vt.LayerSpec(2, page(device) // 32, dtype=FP32),
    ],
    "all of it": lambda device: [
        latent(device, dtype=FP32),
        spec(device, 3, window=10),
        vt.LayerSpec(3, page(device) // 40, page(device) // 64, dtype=FP8, window=30),
        spec(device, 0.6),
        latent(device, dtype=FP8, window=7),
        spec(device, 4, dtype=FP32),
    ],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "in steps only": {},
    "large handles": {"size_classes": 5, "lookahead_tokens": 1, "eager_slot": True},
    "little memory": {"lookahead_tokens": 2, "eager_slot": True, "low_watermark": 0.1, "high_watermark": 0.2},
    "scrubbed": {"scrub": True, "deferred_reclamation": False, "lookahead_tokens": 1},
    "over-read": {"overread_tokens": 9, "lookahead_tokens": 1},
}


def bytes_per_token(layers: Layers) -> int:
    """By hand: K and V, or the latent alone."""
    total = 0
    for layer in layers:
        width = layer.head_dim if layer.is_latent else layer.head_dim + (layer.value_head_dim or layer.head_dim)
        total += layer.num_kv_heads * width * (layer.dtype or BF16).itemsize
    return total


@pytest.mark.parametrize(
    ("layout", "option"), [*(("sliced", option) for option in OPTIONS), ("per_layer", "little memory")]
)
@pytest.mark.parametrize("model", MODELS)
def test_a_mixed_model_is_served(model: str, option: str, layout: str, device: str) -> None:
    random_, layers, options = random.Random(f"{model} {option}"), MODELS[model](device), dict(OPTIONS[option])
    if option == "little memory":  # a slot and a half of four
        options["capacity"] = 96 * bytes_per_token(layers) // page(device) + 4 * len(layers)
    with make(device, *layers, layout=layout, **options) as cache:
        pattern, counts, salts, num_short = Pattern(cache), dict[int, int](), dict[int, int](), 0
        for number in range(45):
            if len(counts) < 4 and random_.random() < 0.4:
                reqid = cache.alloc_reqid(random_.choice([None, 10, 40]))
                counts[reqid], salts[reqid] = 0, number
            grown = {slot: min(64, count + random_.choice([0, 1, 1, 17])) for slot, count in counts.items()}
            if not cache.step(lengths(cache, grown)):
                num_short += 1
                slot = random_.choice(list(counts))
                cache.free_reqid(slot)
                del counts[slot]
                continue
            for slot, count in grown.items():
                if scrubbed := option == "scrubbed" and counts[slot] == 0 and count:
                    assert all(is_zero(view[slot, :count]) for i in range(len(layers)) for view in cache.layer(i))
                if count > counts[slot] or scrubbed:
                    pattern.write(slot, counts[slot], count, salts[slot])
                if count:
                    pattern.check(slot, count, position=min(counts[slot], count - 1), salt=salts[slot])
            counts = grown
            for slot in [slot for slot, count in counts.items() if count == 64 or random_.random() < 0.05]:
                cache.free_reqid(slot)
                del counts[slot]
        assert (num_short > 0) == (option == "little memory")
        cache.check_integrity()


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_a_mixed_model_are_counted(model: str, layout: str, device: str) -> None:
    layers = MODELS[model](device)
    with make(device, *layers, layout=layout) as cache:
        assert cache.config.bytes_per_token == bytes_per_token(layers)
        cache.alloc_reqid(), cache.alloc_reqid()
        assert cache.step([5, 64, 0, 0])
        found, slots = stats(cache), cache.residency()
        seen = sum(
            bytes_per_token([layer]) * min(tokens, layer.window or tokens) for layer in layers for tokens in (5, 64)
        )
        assert found.used_bytes == seen
        at_least = 69 * bytes_per_token(layers)
        borders = 2 * 2 * len(layers) * page(device)
        assert at_least <= found.committed_bytes < at_least + borders
        assert [slot.committed_bytes for slot in slots[2:]] == [0, 0]
        assert sum(slot.committed_bytes for slot in slots) == found.committed_bytes
        assert 5 <= slots[0].committed_tokens <= slots[1].committed_tokens == 64


def test_values_of_a_latent_are_the_head_of_its_keys(device: str) -> None:
    with make(device, *[latent(device)] * 2, layers_per_slice=1) as cache:
        cache.alloc_reqid()
        assert cache.step([9, 0, 0, 0])
        for layer in (0, 1):
            keys, values = cache.layer(layer)
            keys[0, :9] = torch.arange(9, dtype=keys.dtype, device=device)[:, None, None] + layer
            assert (values[0, :9] == keys[0, :9, :, : values.shape[3]]).all()
            values[0, :9] += 1
            assert (keys[0, :9, 0, 0].cpu().float() == torch.arange(9) + layer + 1).all()
            del keys, values
