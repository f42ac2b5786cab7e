"""KVCacheConfig: what is refused, and the numbers that follow from it."""

import copy
import dataclasses
import pickle
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
FULL = vt.LayerSpec(num_kv_heads=4, head_dim=256)
WINDOW = vt.LayerSpec(num_kv_heads=4, head_dim=256, window=1024)
LATENT = vt.LayerSpec(num_kv_heads=1, head_dim=576, value_head_dim=512, is_latent=True)


def mixed(layers: Any, **changes: Any) -> vt.KVCacheConfig:
    return vt.KVCacheConfig(**{"layers": layers, "max_batch_size": 8, "max_context_tokens": 4096, **changes})


@pytest.mark.parametrize("name", [*SIZES, "layers_per_slice", "max_size_class_bytes", "expected_context_tokens"])
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


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
def test_an_absurd_number_of_layers_is_refused_at_once(layout: str) -> None:
    with pytest.raises(ValueError, match=r"^num_layers=1,000,000,000 must be at most 65,536$"):
        config(num_layers=10**9, num_kv_heads=1, head_dim=1, max_batch_size=1, max_context_tokens=1, layout=layout)
    with pytest.raises(ValueError, match=r"^num_layers=65,537 must be at most 65,536$"):
        vt.KVCacheConfig(layers=[vt.LayerSpec(1, 1)] * 65_537, max_batch_size=1, max_context_tokens=1)
    tiny = config(num_layers=65_536, layout=layout, num_kv_heads=1, head_dim=1, max_batch_size=1, max_context_tokens=1)
    assert tiny.bytes_per_token == 65_536 * 2 * 2


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


# -- what a call may leave out ----------------------------------------------------------------------------------------


def test_the_order_of_the_arguments() -> None:
    by_position = vt.KVCacheConfig(
        4, 2, 64, 8, 1000, torch.float16, "sliced", 2, 4096, 8192, [vt.LayerSpec(2, 64)] * 4, 7, 99
    )
    assert by_position == config(
        dtype=torch.float16,
        layers_per_slice=2,
        page_group_bytes=4096,
        max_size_class_bytes=8192,
        layers=(vt.LayerSpec(2, 64),) * 4,
        overread_tokens=7,
        expected_context_tokens=99,
    )
    assert vt.KVCacheConfig(4, 2, 64, 8, 1000) == config()


@pytest.mark.parametrize("name", SIZES[:-1])
def test_what_is_left_out_is_told(name: str) -> None:
    given = {other: value for other, value in SMALL.items() if other != name}
    with pytest.raises(ValueError, match=f"^{name}=None must be a positive integer"):
        vt.KVCacheConfig(**given)
    with pytest.raises(
        ValueError, match=r"^num_layers=None .*; give num_layers, num_kv_heads, head_dim, or else layers$"
    ):
        vt.KVCacheConfig(max_batch_size=8, max_context_tokens=4096)


@pytest.mark.parametrize("name", ["max_batch_size", "max_context_tokens"])
def test_layers_say_nothing_of_slots(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=None must be a positive integer$"):
        mixed([FULL], **{name: None})


# -- layers that are given one by one ---------------------------------------------------------------------------------


def test_layers_are_enough() -> None:
    given = [WINDOW, FULL, LATENT]
    cfg = vt.KVCacheConfig(layers=given, max_batch_size=8, max_context_tokens=4096)
    given.clear()
    assert cfg.layers == (WINDOW, FULL, LATENT)
    assert (cfg.num_layers, cfg.num_kv_heads, cfg.head_dim) == (3, None, None)
    assert [(spec.dtype, spec.value_head_dim, spec.window) for spec in cfg.layer_specs] == [
        (torch.bfloat16, 256, 1024),
        (torch.bfloat16, 256, None),
        (torch.bfloat16, 512, None),
    ]
    assert mixed([FULL] * 3, num_layers=3, num_kv_heads=4, head_dim=256).layers == (FULL,) * 3
    assert config().layer_specs == (vt.LayerSpec(2, 64, 64, dtype=torch.bfloat16),) * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": []}, "layers=[] must be a sequence of at least one LayerSpec"),
        ({"layers": ()}, "layers=() must be a sequence of at least one LayerSpec"),
        ({"layers": 3}, "layers=3 must be a sequence of at least one LayerSpec"),
        ({"layers": FULL}, f"layers={FULL!r} must be a sequence of at least one LayerSpec"),
        ({"layers": {FULL}}, "layers={LayerSpec(num_kv_heads=4"),
        ({"layers": [FULL, None]}, "layers[1]=None must be a LayerSpec"),
        ({"layers": [vt.LayerSpec]}, "layers[0]=<class 'vtensor.kvcache.layers.LayerSpec'> must be a LayerSpec"),
        ({"layers": "ab"}, "layers[0]='a' must be a LayerSpec"),
        ({"num_layers": 2}, "num_layers=2 must be len(layers)=3; leave it out"),
        ({"num_layers": True}, "num_layers=True must be a positive integer"),
        ({"num_layers": 3.0}, "num_layers=3.0 must be a positive integer"),
        ({"num_kv_heads": 4}, "num_kv_heads=4 must be layers[2].num_kv_heads=1; leave it out"),
        ({"head_dim": 128}, "head_dim=128 must be layers[0].head_dim=256; leave it out"),
        ({"head_dim": 0}, "head_dim=0 must be a positive integer"),
        ({"layers_per_slice": 4}, "layers_per_slice=4 must be at most num_layers=3"),
        ({"dtype": torch.int8}, "dtype=torch.int8 must be one of torch.float8_e4m3fn"),
    ],
)
def test_layers_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        mixed(**{"layers": [WINDOW, FULL, LATENT], **changes})


def test_numbers_of_mixed_layers() -> None:
    cfg = mixed([WINDOW, FULL, LATENT, WINDOW], page_group_bytes=4096)
    assert cfg.bytes_per_token == 3 * 2 * 2048 + 1152
    assert cfg.resolved_layers_per_slice == 2
    assert cfg.head_bytes == 2048  # K, or V, of a window or a full layer
    assert cfg.row_bytes == 2 * 2 * 2048  # two window layers
    assert cfg.slot_bytes == 4096 * cfg.row_bytes
    assert cfg.tokens_per_page_group == 0
    assert cfg.reserved_bytes == 8 * 4096 * cfg.bytes_per_token
    apart = dataclasses.replace(cfg, layout="per_layer")
    assert (apart.resolved_layers_per_slice, apart.row_bytes, apart.bytes_per_token) == (1, 2048, cfg.bytes_per_token)
    wide = mixed([vt.LayerSpec(2, 64, 96)], page_group_bytes=4096)
    assert (wide.head_bytes, wide.bytes_per_token) == (2 * 96 * 2, 2 * (64 + 96) * 2)


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
@pytest.mark.parametrize("page_group_bytes", [4096, 65_536, 2 * MIB])
def test_reserved_bytes_of_mixed_layers(layout: Any, page_group_bytes: int) -> None:
    layers = ([WINDOW] * 5 + [FULL, LATENT]) * 5
    cfg = mixed(layers, max_context_tokens=1001, overread_tokens=23, layout=layout, page_group_bytes=page_group_bytes)
    assert CacheLayout.of(cfg, page_group_bytes).num_places * page_group_bytes == cfg.reserved_bytes
    assert cfg.reserved_bytes >= 8 * 1024 * cfg.bytes_per_token
    assert cfg.reserved_bytes < 8 * (1024 * cfg.bytes_per_token + len(cfg.buffers) * page_group_bytes)


@pytest.mark.parametrize(
    ("layers", "slices"),
    [
        ([WINDOW] * 17 + [FULL], [9, 8, 1]),
        (([WINDOW] * 5 + [FULL]) * 10 + [WINDOW] * 2, [13, 13, 13, 13, 10]),  # Gemma 3 27B
        ([WINDOW, FULL] * 18, [9, 9, 9, 9]),  # gpt-oss-120b
        ([FULL] * 3 + [LATENT] * 58, [3, 15, 15, 15, 13]),
    ],
)
def test_automatic_slices_are_of_one_spec(layers: list[vt.LayerSpec], slices: list[int]) -> None:
    cfg = mixed(layers)
    assert [buffer.num_layers for buffer in cfg.buffers] == slices
    assert all(cfg.layer_specs[layer] == buffer.spec for buffer in cfg.buffers for layer, _ in buffer.parts)


def test_a_number_of_layers_per_slice_is_the_most() -> None:
    cfg = mixed([WINDOW] * 7 + [FULL] * 2, layers_per_slice=3)
    assert [buffer.num_layers for buffer in cfg.buffers] == [3, 3, 1, 2]


# -- slices for the expected context ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected_context_tokens", "num_slices"),
    [(None, 2), (131_072, 2), (2000, 2), (320, 2), (319, 1), (100, 1), (1, 1)],  # 2 x 1 MiB is 5 % of 320 tokens
)
def test_short_contexts_have_fewer_slices(expected_context_tokens: int | None, num_slices: int) -> None:
    cfg = vt.KVCacheConfig(**LLAMA_3_8B, expected_context_tokens=expected_context_tokens)
    assert len(cfg.buffers) == num_slices


@pytest.mark.parametrize("num_layers", [1, 16, 17, 33, 49, 80, 126])
@pytest.mark.parametrize("expected_context_tokens", [1, 30, 100, 300, 1000])
def test_slices_waste_at_most_a_twentieth(num_layers: int, expected_context_tokens: int) -> None:
    cfg = config(num_layers=num_layers, num_kv_heads=8, head_dim=128, expected_context_tokens=expected_context_tokens)
    slices = [buffer.num_layers for buffer in cfg.buffers]
    assert sum(slices) == num_layers
    assert len(slices) <= -(-num_layers // 16)
    assert len(slices) == 1 or len(slices) * MIB * 20 <= expected_context_tokens * cfg.bytes_per_token
    assert slices[0] * len(slices) - num_layers < len(slices)  # as equal as can be


def test_each_group_has_its_own_slices() -> None:
    # 4 KiB a token and layer: 36 MiB a window of 256 tokens, 576 MiB the full context; 3 slices waste 3 MiB.
    layers = [dataclasses.replace(FULL, window=256), FULL] * 36
    assert [b.num_layers for b in mixed(layers).buffers] == [12] * 6
    assert [b.num_layers for b in mixed(layers, expected_context_tokens=4096).buffers] == [36, 12, 12, 12]
    assert [b.num_layers for b in mixed(layers, expected_context_tokens=100).buffers] == [36, 36]
    small = mixed(layers, expected_context_tokens=4096, page_group_bytes=65_536)
    assert [b.num_layers for b in small.buffers] == [12] * 6


def test_the_hint_steers_nothing_else() -> None:
    for options in ({"layers_per_slice": 1}, {"layout": "per_layer"}):
        assert config(**options, expected_context_tokens=1).buffers == config(**options).buffers


def test_nobody_expects_more_than_the_most() -> None:
    with pytest.raises(ValueError, match=r"^expected_context_tokens=1,001 must be at most max_context_tokens=1,000$"):
        config(expected_context_tokens=1001)


# -- handles and over-reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 16, 1024])
def test_size_classes_are_powers_of_two(times: int) -> None:
    assert config(page_group_bytes=12_288, max_size_class_bytes=12_288 * times).max_size_class_bytes == 12_288 * times


@pytest.mark.parametrize("size", [1, 4095, 4097, 2048, 3 * 4096, 6 * 4096])
def test_size_classes_that_are_refused(size: int) -> None:
    message = rf"^max_size_class_bytes={size} must be page_group_bytes=4096 times a power of two \(1, 2, 4, \.\.\.\)$"
    with pytest.raises(ValueError, match=message):
        config(page_group_bytes=4096, max_size_class_bytes=size)
    unknown = config(max_size_class_bytes=size)  # as long as nobody knows the page group
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(unknown, page_group_bytes=4096)


@pytest.mark.parametrize("value", [-1, True, False, 2.0, "8", None])
def test_over_reading_that_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^overread_tokens={value!r} must be an integer of 0 or more$"):
        config(overread_tokens=value)


def test_over_reading_takes_addresses_only() -> None:
    plain, more = config(page_group_bytes=4096), config(page_group_bytes=4096, overread_tokens=24)
    assert (more.slot_tokens, plain.slot_tokens) == (1024, 1000)
    assert (more.bytes_per_token, more.row_bytes) == (plain.bytes_per_token, plain.row_bytes)
    assert more.slot_bytes == 1024 * more.row_bytes
    assert more.reserved_bytes == 8 * more.slot_bytes


def test_addresses_count_over_reading_and_every_layer() -> None:
    with pytest.raises(
        ValueError,
        match=r"^max_batch_size=8 x \(max_context_tokens=1,000 \+ overread_tokens=68,719,476,736\) x 2,048 bytes a "
        r"token is 1024 TiB of addresses; it must be less than 128 TiB",
    ):
        config(overread_tokens=1 << 36)
    with pytest.raises(
        ValueError, match=r"x max_context_tokens=1,073,741,824 x 33,920 bytes a token .* less than 128 TiB"
    ):
        mixed([FULL] * 8 + [LATENT], max_context_tokens=1 << 30)
    with pytest.raises(ValueError, match="less than 128 TiB"):  # slots of a page group each
        config(max_batch_size=1 << 27, max_context_tokens=1, page_group_bytes=MIB)


# -- a configuration is a value ---------------------------------------------------------------------------------------

VALUES = {
    "alike": config(),
    "mixed": mixed([WINDOW, FULL, LATENT], overread_tokens=7, expected_context_tokens=99),
    "per layer": mixed([WINDOW, LATENT], layout="per_layer"),
}


@pytest.mark.parametrize("name", VALUES)
def test_copies_are_equal(name: str) -> None:
    cfg = VALUES[name]
    fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    copies = [dataclasses.replace(cfg), vt.KVCacheConfig(**fields), copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg))]
    assert cfg.reserved_bytes  # what is computed once is no part of the value
    assert all(other == cfg and hash(other) == hash(cfg) and repr(other) == repr(cfg) for other in copies)
    assert all(other.reserved_bytes == cfg.reserved_bytes for other in copies)


@pytest.mark.parametrize("name", VALUES)
def test_a_page_group_can_be_filled_in(name: str) -> None:
    cfg = VALUES[name]
    before = cfg.reserved_bytes
    changed = dataclasses.replace(cfg, page_group_bytes=4096)
    assert (changed.page_group_bytes, changed.layers, changed.num_layers) == (4096, cfg.layers, cfg.num_layers)
    assert changed != cfg
    assert changed.reserved_bytes < before  # nothing of the old numbers stays
    assert dataclasses.replace(changed, page_group_bytes=None) == cfg


def test_a_dtype_can_be_changed() -> None:
    cfg = dataclasses.replace(mixed([FULL, dataclasses.replace(FULL, dtype=torch.float32)]), dtype=torch.float8_e5m2)
    assert [spec.dtype for spec in cfg.layer_specs] == [torch.float8_e5m2, torch.float32]
