"""LayerSpec and CacheLayout: where the bytes of every layer lie, be they alike or not."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vtensor as vt
from vtensor.allocator.driver import get_driver
from vtensor.kvcache.layout import CacheLayout, LayerView

FP8, BF16, FP32, FP64 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64
MIB = 1 << 20

MLA = vt.LayerSpec(num_kv_heads=1, head_dim=576, value_head_dim=512, is_latent=True)
FULL = vt.LayerSpec(num_kv_heads=4, head_dim=256)
WINDOW = dataclasses.replace(FULL, window=1024)
WIDE_KEYS = vt.LayerSpec(num_kv_heads=2, head_dim=192, value_head_dim=128)


def layout_of(layers: list[vt.LayerSpec], **options: Any) -> CacheLayout:
    shape = {"max_batch_size": 3, "max_context_tokens": 1001, "page_group_bytes": 4096}
    config = vt.KVCacheConfig(layers=layers, **{**shape, **options})
    return CacheLayout.of(config, config.resolved_page_group_bytes)


def groups_of(layout: CacheLayout) -> list[tuple[int, int, int | None, torch.dtype]]:
    return [(group.num_buffers, group.row_bytes, group.window, group.dtype) for group in layout.groups]


# -- LayerSpec --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "value_head_dim", "window"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True, [3], torch.tensor(3)])
def test_what_must_be_a_positive_integer(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} must be a positive integer")):
        vt.LayerSpec(**{"num_kv_heads": 2, "head_dim": 64, name: value})


@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim"])
def test_what_has_no_default(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=None must be a positive integer$"):
        vt.LayerSpec(**{"num_kv_heads": 2, "head_dim": 64, name: None})


@pytest.mark.parametrize("value", [None, 0, 1, "yes"])
def test_latent_or_not(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^is_latent={value!r} must be True or False$"):
        vt.LayerSpec(1, 576, is_latent=value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, "float16", float])
def test_dtypes_that_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"^dtype=.* must be one of torch\.float8_e4m3fn, .*torch\.float64$"):
        vt.LayerSpec(2, 64, dtype=dtype)


def test_a_latent_holds_its_values() -> None:
    with pytest.raises(
        ValueError, match=r"^value_head_dim=577 must be at most head_dim=576 where is_latent=True: V is the first"
    ):
        vt.LayerSpec(1, 576, 577, is_latent=True)
    assert vt.LayerSpec(1, 576, 576, is_latent=True).resolved_value_head_dim == 576
    assert vt.LayerSpec(1, 576, is_latent=True).resolved_value_head_dim == 576  # all of it
    assert vt.LayerSpec(1, 64, 577).resolved_value_head_dim == 577  # V of its own may be wider


def test_a_spec_is_a_value() -> None:
    assert vt.LayerSpec(2, 64) == vt.LayerSpec(num_kv_heads=2, head_dim=64)
    assert len({vt.LayerSpec(2, 64), vt.LayerSpec(2, 64), vt.LayerSpec(2, 64, window=8)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.window = 3  # type: ignore[misc]


def test_defaults_are_filled_in() -> None:
    assert vt.LayerSpec(2, 64).resolved(BF16) == vt.LayerSpec(2, 64, 64, dtype=BF16)
    assert vt.LayerSpec(2, 64, 32, dtype=FP8, window=5).resolved(BF16) == vt.LayerSpec(2, 64, 32, False, FP8, 5)
    spec = vt.LayerSpec(2, 64, 32, dtype=FP32)
    assert spec.resolved(BF16) == spec


@pytest.mark.parametrize("what", ["key_bytes", "value_bytes", "bytes_per_token", "resolved_dtype"])
def test_without_a_dtype_there_are_no_bytes(what: str) -> None:
    with pytest.raises(ValueError, match=r"^dtype=None must be filled in .* KVCacheConfig\.layer_specs$"):
        getattr(vt.LayerSpec(2, 64), what)
    assert getattr(vt.LayerSpec(2, 64, dtype=BF16), what)


@pytest.mark.parametrize(
    ("spec", "key_bytes", "value_bytes"),
    [
        (vt.LayerSpec(8, 128), 2048, 2048),
        (vt.LayerSpec(8, 128, 64), 2048, 1024),
        (vt.LayerSpec(8, 128, dtype=FP8), 1024, 1024),
        (vt.LayerSpec(3, 7, 5, dtype=FP64), 168, 120),
        (MLA, 1152, 0),
    ],
)
def test_bytes_of_a_layer(spec: vt.LayerSpec, key_bytes: int, value_bytes: int) -> None:
    spec = spec.resolved(BF16)
    assert (spec.key_bytes, spec.value_bytes) == (key_bytes, value_bytes)
    assert spec.bytes_per_token == key_bytes + value_bytes


# -- layers that are alike: the numbers of the first release ----------------------------------------------------------

# Configuration; groups; places; offset and strides of K of layer 0, V of layer 0, V of layer n/2, V of the last layer.
PINNED = {
    "llama-3-8b": (
        vt.KVCacheConfig(32, 8, 128, 64, 131_072),
        [(2, 65_536, 4096, 0)],
        524_288,
        [(0, 4_294_967_296, 32_768), (1024, 4_294_967_296, 32_768)],
        [(274_877_907_968, 4_294_967_296, 32_768), (274_877_938_688, 4_294_967_296, 32_768)],
    ),
    "rows that straddle": (
        vt.KVCacheConfig(28, 8, 128, 4, 1001, layers_per_slice=14),
        [(2, 57_344, 28, 0)],
        224,
        [(0, 29_360_128, 28_672), (1024, 29_360_128, 28_672)],
        [(117_441_536, 29_360_128, 28_672), (117_468_160, 29_360_128, 28_672)],
    ),
    "a rest, odd heads, fp32": (
        vt.KVCacheConfig(7, 3, 80, 5, 1001, FP32, layers_per_slice=3, page_group_bytes=4096),
        [(2, 5760, 1408, 0), (1, 1920, 470, 14_080)],
        16_430,
        [(0, 1_441_792, 1440), (240, 1_441_792, 1440)],
        [(7_209_200, 1_441_792, 1440), (14_418_160, 481_280, 480)],
    ),
    "per layer": (
        vt.KVCacheConfig(7, 3, 80, 5, 1001, FP32, "per_layer", page_group_bytes=4096),
        [(14, 960, 235, 0)],
        16_450,
        [(0, 240_640, 240), (1_203_200, 240_640, 240)],
        [(8_422_400, 240_640, 240), (15_641_600, 240_640, 240)],
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_layers_that_are_alike_lie_where_they_always_did(name: str) -> None:
    config, groups, num_places, first, later = PINNED[name]
    layout = CacheLayout.of(config, config.resolved_page_group_bytes)
    assert [(g.num_buffers, g.row_bytes, g.slot_places, g.first_place) for g in layout.groups] == groups
    assert all((group.window, group.dtype) == (None, config.dtype) for group in layout.groups)
    assert layout.num_places == num_places
    views = [(0, False), (0, True), (config.num_layers // 2, True), (config.num_layers - 1, True)]
    heads, dim = config.num_kv_heads, config.head_dim
    for (layer, is_value), (offset, slot, token) in zip(views, first + later, strict=True):
        shape = (config.max_batch_size, config.max_context_tokens, heads, dim)
        assert layout.layer_view(layer, is_value) == LayerView(config.dtype, offset, shape, (slot, token, dim, 1))


@pytest.mark.parametrize("options", [{}, {"layers_per_slice": 3}, {"layout": "per_layer"}, {"dtype": FP8}])
def test_the_same_layers_given_one_by_one(options: dict[str, Any]) -> None:
    shape = {"max_batch_size": 3, "max_context_tokens": 1001, **options}
    alike = vt.KVCacheConfig(num_layers=7, num_kv_heads=3, head_dim=80, **shape)
    given_singly = vt.KVCacheConfig(layers=[vt.LayerSpec(3, 80)] * 7, **shape)
    assert given_singly.layer_specs == alike.layer_specs
    assert given_singly.buffers == alike.buffers
    numbers = ["head_bytes", "row_bytes", "bytes_per_token", "slot_bytes", "reserved_bytes", "tokens_per_page_group"]
    assert [getattr(given_singly, name) for name in numbers] == [getattr(alike, name) for name in numbers]
    ours, theirs = CacheLayout.of(given_singly, 4096), CacheLayout.of(alike, 4096)
    assert ours.groups == theirs.groups
    assert all(ours.layer_view(*part) == theirs.layer_view(*part) for part in parts_of(alike))


# -- layers that are not ----------------------------------------------------------------------------------------------


def test_latents_have_no_values_of_their_own() -> None:
    layout = layout_of([MLA] * 61)  # DeepSeek-V3
    assert layout.config.bytes_per_token == 61 * 1152
    assert groups_of(layout) == [(3, 16 * 1152, None, BF16), (1, 13 * 1152, None, BF16)]
    key, value = layout.layer_view(17, False), layout.layer_view(17, True)
    assert key.shape == (3, 1001, 1, 576)
    assert value.shape == (3, 1001, 1, 512)
    assert (key.offset, key.strides) == (value.offset, value.strides)
    assert key.strides[1:] == (16 * 576, 576, 1)
    assert layout.layer_view(1, False).offset == 576  # the next layer's follows at once
    apart = layout_of([MLA] * 61, layout="per_layer")
    assert groups_of(apart) == [(61, 1152, None, BF16)]
    assert apart.layer_view(1, True).strides == (apart.groups[0].slot_places * 2048, 576, 576, 1)


def test_heads_of_a_latent_keep_the_stride_of_keys() -> None:
    layout = layout_of([vt.LayerSpec(2, 96, 64, is_latent=True)])
    assert layout.layer_view(0, True).shape == (3, 1001, 2, 64)
    assert layout.layer_view(0, True).strides[1:] == (192, 96, 1)


def test_windows_and_full_layers_are_apart() -> None:
    layers = ([WINDOW] * 5 + [FULL]) * 10 + [WINDOW] * 2  # Gemma 3 27B
    layout = layout_of(layers, max_context_tokens=131_072, page_group_bytes=2 * MIB)
    row = 2 * 4 * 256 * 2
    assert groups_of(layout) == [(4, 13 * row, 1024, BF16), (1, 10 * row, None, BF16)]
    assert layout.config.buffers[0].parts[:4] == ((0, False), (0, True), (1, False), (1, True))
    assert {layer for layer, _ in layout.config.buffers[4].parts} == set(range(5, 60, 6))
    assert layout.layer_view(6, False).offset == 5 * 2 * 4 * 256  # the sixth window layer
    assert layout.layer_view(11, False).offset - layout.layer_view(5, False).offset == 2 * 4 * 256
    apart = layout_of(layers, layout="per_layer")
    assert groups_of(apart) == [(104, row // 2, 1024, BF16), (20, row // 2, None, BF16)]


def test_layers_of_one_window_have_a_group_for_each() -> None:
    layers = [dataclasses.replace(FULL, window=window) for window in (128, 256, 128)]
    assert [(g.num_buffers, g.window) for g in layout_of(layers).groups] == [(1, 128), (1, 256)]
    assert [(g.num_buffers, g.window) for g in layout_of(layers, layout="per_layer").groups] == [(4, 128), (2, 256)]


def test_keys_and_values_of_different_width() -> None:
    layout = layout_of([WIDE_KEYS] * 5, layers_per_slice=2)
    assert groups_of(layout) == [(2, 2560, None, BF16), (1, 1280, None, BF16)]
    key, value = layout.layer_view(1, False), layout.layer_view(1, True)
    assert (key.offset, value.offset) == (640, 640 + 384)
    assert (key.shape[2:], value.shape[2:]) == ((2, 192), (2, 128))
    assert (key.strides[1:], value.strides[1:]) == ((1280, 192, 1), (1280, 128, 1))
    apart = layout_of([WIDE_KEYS] * 5, layout="per_layer")
    assert groups_of(apart) == [(5, 768, None, BF16), (5, 512, None, BF16)]
    assert apart.layer_view(0, True).offset * 2 == 5 * 3 * apart.groups[0].slot_places * 4096  # behind all K


def test_dtypes_are_apart_though_rows_are_equal() -> None:
    layers = [vt.LayerSpec(2, 64, dtype=BF16), vt.LayerSpec(2, 128, dtype=FP8)] * 2
    layout = layout_of(layers)
    assert groups_of(layout) == [(1, 1024, None, BF16), (1, 1024, None, FP8)]
    assert [layout.layer_view(layer, True).dtype for layer in range(4)] == [BF16, FP8] * 2
    size = layout.groups[0].slot_places * 4096
    assert layout.layer_view(1, False).offset == 3 * size  # in elements of one byte
    assert groups_of(layout_of(layers, layout="per_layer")) == [(4, 256, None, BF16), (4, 256, None, FP8)]


def test_specs_with_rows_of_one_length_share_a_group() -> None:
    layers = [vt.LayerSpec(2, 64), vt.LayerSpec(1, 128), vt.LayerSpec(3, 64), vt.LayerSpec(4, 32)]
    layout = layout_of(layers)
    assert groups_of(layout) == [(3, 512, None, BF16), (1, 768, None, BF16)]
    assert [layout.layer_view(layer, False).shape[2:] for layer in range(4)] == [(2, 64), (1, 128), (3, 64), (4, 32)]
    places = [layout.layer_view(layer, False).offset * 2 // 4096 for layer in range(4)]
    size = layout.groups[0].slot_places * 3
    assert places == [0, size, 3 * size, 2 * size]  # the group lies together, whatever lies between its layers


def test_a_dtype_of_its_own_that_is_the_configs() -> None:
    layers = [vt.LayerSpec(2, 64), vt.LayerSpec(2, 64, 64, dtype=BF16)]
    assert len(layout_of(layers).config.buffers) == 1
    assert len(layout_of(layers, dtype=FP8).config.buffers) == 2


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
@pytest.mark.parametrize("overread_tokens", [0, 1, 23, 224, 5000])
def test_room_for_over_reading(layout: Any, overread_tokens: int) -> None:
    made = layout_of([WINDOW, FULL, MLA], layout=layout, overread_tokens=overread_tokens)
    assert made.config.slot_tokens == 1001 + overread_tokens
    for group in made.groups:
        assert group.slot_places == -(-(1001 + overread_tokens) * group.row_bytes // 4096)
    assert made.num_places * 4096 == made.config.reserved_bytes
    for part in parts_of(made.config):
        view = made.layer_view(*part)
        assert view.shape[1] == 1001
        assert view.strides[0] >= (1001 + overread_tokens) * view.strides[1]


# -- whatever the layers ----------------------------------------------------------------------------------------------


def parts_of(config: vt.KVCacheConfig) -> Iterator[tuple[int, bool]]:
    return ((layer, is_value) for layer in range(config.num_layers) for is_value in (False, True))


@st.composite
def specs(draw: st.DrawFn) -> vt.LayerSpec:
    head_dim = draw(st.sampled_from([1, 3, 8, 80]))
    is_latent = draw(st.booleans())
    value_head_dim = draw(st.none() | st.integers(1, head_dim if is_latent else 9))
    dtype, window = draw(st.sampled_from([None, FP8, BF16, FP32, FP64])), draw(st.sampled_from([None, 1, 7, 5000]))
    return vt.LayerSpec(draw(st.integers(1, 3)), head_dim, value_head_dim, is_latent, dtype, window)


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    kinds = draw(st.lists(specs(), min_size=1, max_size=3))
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=7))
    slices = {"layers_per_slice": draw(st.just("auto") | st.integers(1, len(layers)))}
    max_context_tokens = draw(st.integers(1, 20))
    config = vt.KVCacheConfig(
        layers=layers,
        max_batch_size=draw(st.integers(1, 3)),
        max_context_tokens=max_context_tokens,
        dtype=draw(st.sampled_from([FP8, BF16])),
        page_group_bytes=draw(st.sampled_from([64, 4096])),
        overread_tokens=draw(st.sampled_from([0, 1, 9])),
        expected_context_tokens=draw(st.none() | st.integers(1, max_context_tokens)),
        **draw(st.sampled_from([slices, {"layout": "per_layer"}])),
    )
    return CacheLayout.of(config, config.resolved_page_group_bytes)


def slot_bounds(layout: CacheLayout) -> Iterator[tuple[int, int, int, int]]:
    """Start, end and row length in bytes, and the slot, of each slot of each buffer: from the groups alone."""
    for group in layout.groups:
        size = group.slot_places * layout.page_group_bytes
        for number in range(group.num_buffers * layout.config.max_batch_size):
            start = group.first_place * layout.page_group_bytes + number * size
            yield start, start + size, group.row_bytes, number % layout.config.max_batch_size


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_every_byte_is_one_tokens_of_one_layer(layout: CacheLayout) -> None:
    config = layout.config
    bounds = {start: (end, row, slot) for start, end, row, slot in slot_bounds(layout)}
    starts = sorted(bounds)
    ends = [bounds[start][0] for start in starts]
    assert starts == [0, *ends[:-1]]  # slots follow each other without a gap
    assert ends[-1] == layout.num_places * layout.page_group_bytes == config.reserved_bytes

    taken = torch.zeros(config.reserved_bytes, dtype=torch.int8)
    for layer, is_value in parts_of(config):
        spec, view = config.layer_specs[layer], layout.layer_view(layer, is_value)
        size = view.dtype.itemsize
        head_dim = spec.value_head_dim if is_value else spec.head_dim
        assert view.dtype == spec.dtype
        assert view.shape == (config.max_batch_size, config.max_context_tokens, spec.num_kv_heads, head_dim)
        for slot in range(config.max_batch_size):
            first = (view.offset + slot * view.strides[0]) * size
            slot_start = max(start for start in starts if start <= first)
            end, row_bytes, its_slot = bounds[slot_start]
            assert its_slot == slot
            assert view.strides[1] * size == row_bytes
            part_bytes = ((spec.num_kv_heads - 1) * view.strides[2] + head_dim) * size
            assert first - slot_start + part_bytes <= row_bytes  # within its row
            assert first + (config.slot_tokens - 1) * row_bytes + part_bytes <= end  # to the last over-read row
        if is_value and spec.is_latent:
            key = layout.layer_view(layer, False)
            assert (view.offset, view.strides) == (key.offset, key.strides)
            assert view.shape[3] <= key.shape[3]
        else:
            sizes, strides = [*view.shape[:3], head_dim * size], [stride * size for stride in view.strides[:3]]
            taken.as_strided(sizes, [*strides, 1], view.offset * size).add_(1)
    assert int(taken.max()) == 1  # no byte twice
    tokens = config.max_batch_size * config.max_context_tokens
    assert int(taken.sum()) == tokens * config.bytes_per_token  # and none too few


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_groups_are_told_apart(layout: CacheLayout) -> None:
    config = layout.config
    keys = [(group.row_bytes, group.window, group.dtype) for group in layout.groups]
    assert len(set(keys)) == len(keys)
    assert sum(group.num_buffers for group in layout.groups) == len(config.buffers)
    assert config.row_bytes == max(group.row_bytes for group in layout.groups)
    assert config.slot_bytes == max(group.slot_places for group in layout.groups) * layout.page_group_bytes
    assert sorted({part for buffer in config.buffers for part in buffer.parts}) == sorted(
        part for part in parts_of(config) if not (part[1] and config.layer_specs[part[0]].is_latent)
    )
    for part in parts_of(config):
        spec, view = config.layer_specs[part[0]], layout.layer_view(*part)
        place = view.offset * view.dtype.itemsize // layout.page_group_bytes
        group = [group for group in layout.groups if group.first_place <= place][-1]
        assert (group.window, group.dtype) == (spec.window, spec.dtype)


# -- in memory --------------------------------------------------------------------------------------------------------

MIXED = {
    "mla": [MLA] * 3,
    "windows and full": [WINDOW, WINDOW, FULL] * 2,
    "wide keys": [WIDE_KEYS] * 3,
    "fp8 and bf16": [vt.LayerSpec(2, 64, dtype=FP8), vt.LayerSpec(2, 64), vt.LayerSpec(3, 80, dtype=FP32)] * 2,
    "all of it": [MLA, WINDOW, WIDE_KEYS, vt.LayerSpec(1, 96, 64, is_latent=True, dtype=FP8), FULL],
}


@pytest.mark.parametrize("layout", [{}, {"layers_per_slice": 1}, {"layout": "per_layer"}, {"overread_tokens": 224}])
@pytest.mark.parametrize("name", MIXED)
def test_every_token_of_every_layer_is_its_own(name: str, layout: dict[str, Any], device: str) -> None:
    config = vt.KVCacheConfig(
        layers=MIXED[name],
        max_batch_size=3,
        max_context_tokens=700,
        page_group_bytes=max(4096, get_driver(device).granularity_bytes),
        **layout,
    )
    counts = [700, 0, 123]
    with vt.KVCacheManager(config, device) as cache:
        for _ in counts:
            cache.alloc_reqid()
        assert cache.step(counts)
        for what in ("write", "read"):
            for layer, is_value in parts_of(config):
                spec = config.layer_specs[layer]
                view = cache.layer(layer)[is_value]
                assert view.dtype == spec.dtype
                for slot, count in enumerate(counts):
                    part = view[slot, :count]
                    expected = 2 * layer + (is_value and not spec.is_latent) + 1  # small: exact in fp8
                    if what == "write":
                        part.fill_(expected)
                    else:
                        assert (part.float() == expected).all(), (layer, is_value, slot)
