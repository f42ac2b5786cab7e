"""KVCacheConfig: what is refused, and the numbers that follow from it."""

import dataclasses
import re
from typing import Any

import pytest
import torch

import vtensor as vt
from vtensor.kvcache.layout import CacheLayout

MIB = 1 << 20
LLAMA_3_8B = {
    "num_layers": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_batch_size": 64,
    "max_context_tokens": 131_072,
    "dtype": torch.bfloat16,
}
SMALL = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 64, "max_batch_size": 8, "max_context_tokens": 1000}


def config(**changes: Any) -> vt.KVCacheConfig:
    return vt.KVCacheConfig(**{**SMALL, **changes})


SIZES = ["num_layers", "num_kv_heads", "head_dim", "max_batch_size", "max_context_tokens", "page_group_bytes"]


@pytest.mark.parametrize("name", [*SIZES, "layers_per_slice"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True, [3], torch.tensor(3)])
def test_what_must_be_a_positive_integer(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} must be a positive integer")):
        config(**{name: value})


@pytest.mark.parametrize("name", SIZES[:-1])
def test_none_is_no_size(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=None must be a positive integer"):
        config(**{name: None})


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, "float16", float, None])
def test_dtypes_that_are_refused(dtype: object) -> None:
    with pytest.raises(ValueError, match=r"^dtype=.* must be one of torch\.float8_e4m3fn, .*torch\.float64$"):
        config(dtype=dtype)


@pytest.mark.parametrize("layout", ["paged", "", None, 1])
def test_layouts_that_are_refused(layout: object) -> None:
    with pytest.raises(ValueError, match=rf"^layout={layout!r} must be one of \('sliced', 'per_layer'\)$"):
        config(layout=layout)


def test_a_slice_has_no_more_layers_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"^layers_per_slice=5 must be at most num_layers=4$"):
        config(layers_per_slice=5)
    assert config(layers_per_slice=4).resolved_layers_per_slice == 4


def test_per_layer_has_no_slices() -> None:
    with pytest.raises(ValueError, match="layers_per_slice=2 is for layout='sliced'"):
        config(layout="per_layer", layers_per_slice=2)
    assert config(layout="per_layer").resolved_layers_per_slice == 1


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
def test_more_addresses_than_a_process_has(layout: str) -> None:
    with pytest.raises(
        ValueError, match=r"max_batch_size=8 x max_context_tokens=68,719,476,736 x .* less than 128 TiB"
    ):
        config(layout=layout, max_context_tokens=1 << 36)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().num_layers = 3  # type: ignore[misc]
    assert config() == config()
    assert hash(config()) == hash(config())


def test_llama_3_8b() -> None:
    auto = vt.KVCacheConfig(**LLAMA_3_8B)
    assert auto.resolved_layers_per_slice == 16
    assert auto.tokens_per_page_group == 32  # of 2 MiB: as many as in the patched driver's 64 KiB
    assert auto.bytes_per_token == 131_072
    assert auto.row_bytes == 65_536
    assert auto.slot_bytes == 131_072 * 65_536
    assert auto.reserved_bytes == 64 * 131_072 * 131_072
    assert vt.KVCacheConfig(**LLAMA_3_8B, layers_per_slice=32).tokens_per_page_group == 16
    apart = vt.KVCacheConfig(**LLAMA_3_8B, layout="per_layer")
    assert apart.tokens_per_page_group == 1024
    assert apart.reserved_bytes == auto.reserved_bytes


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
def test_yi_34b_on_two_gpus_as_in_the_paper(layout: str) -> None:
    yi = vt.KVCacheConfig(
        num_layers=60,
        num_kv_heads=4,
        head_dim=128,
        max_batch_size=500,
        max_context_tokens=200_000,
        dtype=torch.float16,
        layout=layout,
    )
    assert yi.bytes_per_token == 122_880
    assert 500 * 200_000 * yi.bytes_per_token == 12_288_000_000_000
    assert 12_288_000_000_000 <= yi.reserved_bytes < 12_288_000_000_000 * 1.01  # rounded up to page groups


@pytest.mark.parametrize(
    ("num_layers", "per_slice"),
    [
        (1, 1),
        (2, 2),
        (16, 16),
        (17, 9),
        (24, 12),
        (28, 14),
        (30, 15),
        (32, 16),
        (33, 11),
        (60, 15),
        (80, 16),
        (126, 16),
    ],
)
def test_automatic_slices_are_few_and_equal(num_layers: int, per_slice: int) -> None:
    assert config(num_layers=num_layers).resolved_layers_per_slice == per_slice


@pytest.mark.parametrize("num_layers", range(1, 130))
def test_automatic_slices_hold_every_layer(num_layers: int) -> None:
    per_slice = config(num_layers=num_layers).resolved_layers_per_slice
    num_slices = -(-num_layers // per_slice)
    assert per_slice <= 16
    assert num_slices == -(-num_layers // 16)
    assert num_slices * per_slice - num_layers < num_slices


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64]
)
def test_bytes_follow_the_dtype(dtype: torch.dtype) -> None:
    assert config(dtype=dtype).head_bytes == 2 * 64 * dtype.itemsize
    assert config(dtype=dtype).bytes_per_token == 2 * 4 * config(dtype=dtype).head_bytes


def test_a_row_longer_than_a_page_group() -> None:
    large = config(num_kv_heads=64, head_dim=256, page_group_bytes=4096)
    assert large.row_bytes == 2 * 4 * 64 * 256 * 2
    assert large.tokens_per_page_group == 0  # for display; nothing divides by it
    assert large.slot_bytes == 1000 * large.row_bytes


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
@pytest.mark.parametrize("layers_per_slice", ["auto", 1, 3, 4, 7])
@pytest.mark.parametrize("page_group_bytes", [4096, 65_536, 2 * MIB])
def test_reserved_bytes_are_those_of_the_layout(layout: Any, layers_per_slice: Any, page_group_bytes: int) -> None:
    if layout == "per_layer":
        layers_per_slice = "auto"
    cfg = config(num_layers=7, layout=layout, layers_per_slice=layers_per_slice, page_group_bytes=page_group_bytes)
    assert CacheLayout.of(cfg, page_group_bytes).num_places * page_group_bytes == cfg.reserved_bytes
    assert cfg.slot_bytes % page_group_bytes == 0
    assert cfg.slot_bytes >= 1000 * cfg.row_bytes


def test_page_groups_are_2_mib_where_nobody_says_otherwise() -> None:
    assert config().resolved_page_group_bytes == 2 * MIB
    assert config(page_group_bytes=4096).resolved_page_group_bytes == 4096
