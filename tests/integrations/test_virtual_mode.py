"""transformers' own StaticCache with virtual tensors in it, by `vt.virtual()` alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import vtensor as vt  # noqa: E402
from tests.helpers.hf_models import generate, make_inputs, make_model  # noqa: E402
from vtensor.allocator.driver import get_driver  # noqa: E402


def test_a_static_cache_takes_what_it_holds(device: str) -> None:
    model, inputs = make_model(device=device), make_inputs(device)
    page_group_bytes = get_driver(device).default_page_group_bytes
    length = 16 * page_group_bytes // 64  # a head of a request has 16 page groups
    expected = generate(model, inputs, cache_implementation="dynamic")
    with vt.virtual(1 << 20):
        cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        tokens = generate(model, inputs, cache, disable_compile=True)
    assert torch.equal(tokens, expected)
    for layer in cache.layers:
        for part in (layer.keys, layer.values):
            held: Any = part
            assert type(held) is vt.VirtualTensor
            assert held.resident_bytes == held.nbytes // 16
