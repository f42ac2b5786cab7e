"""KVCacheConfig: the shape of a KV cache, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch

from vtensor.kvcache.layers import (
    Buffer,
    LayerSpec,
    check_dtype,
    check_positive,
    per_layer_buffers,
    sliced_buffers,
)
from vtensor.units import MIB, TIB, ceil_div, format_bytes, round_up

__all__ = ["KVCacheConfig", "Layout", "check_positive"]

Layout = Literal["sliced", "per_layer"]

_ADDRESS_SPACE_BYTES = 128 * TIB
_MOST_LAYERS = 65_536  # more than any model has, and few enough to list them
_MOST_LAYERS_PER_SLICE = 16
_MOST_WASTE = 20  # one part in so many


@dataclass(frozen=True)
class KVCacheConfig:
    """The shape of a KV cache. Immutable and validated.

    Layers that are all alike are given by `num_layers`, `num_kv_heads` and `head_dim`; others by `layers`.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        Layers, KV heads (on this rank) and elements a head, of K and of V alike. With `layers` they are left out, or
        agree with it.
    max_batch_size, max_context_tokens : int
        Slots, and the most tokens that one slot may hold. Both cost addresses only, never memory.
    dtype : torch.dtype
        fp8 (e4m3fn, e5m2), fp16, bf16, fp32 or fp64; of every layer that has none of its own.
    layout : {"sliced", "per_layer"}
        ``sliced``: the K and V of `layers_per_slice` layers of one token lie side by side, so that a page group holds
        few tokens of many layers. ``per_layer``: K and V of each layer apart, as in the paper (arXiv:2405.04437, 5).
    layers_per_slice : int or "auto"
        The most layers in a slice; all of them have the same `LayerSpec`. ``auto``: see Notes. Not for ``per_layer``.
    page_group_bytes : int, optional
        None: the driver's default (CUDA 2 MiB, host 64 KiB).
    max_size_class_bytes : int, optional
        The largest physical handle, `page_group_bytes` times a power of two. None: the pool chooses.
    layers : sequence of LayerSpec, optional
        One for each layer, for models that mix them: windows, latents, K and V of different width, several dtypes.
    overread_tokens : int
        Rows past the end of each active slot's tokens that must be readable, for kernels that read whole tiles. A slot
        has addresses for so many rows more; views show `max_context_tokens` all the same.
    expected_context_tokens : int, optional
        How long a typical request is. A hint for ``layers_per_slice="auto"``, and for nothing else.

    Raises
    ------
    ValueError
        The message names the value and the rule.

    Notes
    -----
    ``layers_per_slice="auto"`` takes, for all layers with one spec, as few slices of at most 16 layers as will do, as
    equal as they can be; 8 to 16 layers a slice cost 1-4 % of decode (H200, against 1 layer). A request wastes about
    half a page group in each slice. Where that would be more than 5 % of what its `expected_context_tokens` (at most
    the window) take in these layers, there are fewer slices, down to a single one. The price is the decode of slices
    with more layers: with 32 instead of 16 it is up to 4 % slower in batches, 7 % for a single long request.

    Examples
    --------
    >>> config = KVCacheConfig(num_layers=32, num_kv_heads=8, head_dim=128, max_batch_size=64,
    ...                        max_context_tokens=131_072, dtype=torch.bfloat16)
    >>> config.resolved_layers_per_slice, config.tokens_per_page_group, config.bytes_per_token
    (16, 32, 131072)
    >>> config.reserved_bytes == 64 * 131_072 * config.bytes_per_token
    True

    Six layers of which every third sees everything and the others 1,024 tokens:

    >>> window, full = LayerSpec(num_kv_heads=4, head_dim=256, window=1024), LayerSpec(num_kv_heads=4, head_dim=256)
    >>> config = KVCacheConfig(layers=[window, window, full] * 2, max_batch_size=8, max_context_tokens=32_768)
    >>> config.num_layers, len(config.buffers), config.bytes_per_token
    (6, 2, 24576)
    """

    # None says that it was left out: the first three where `layers` is given, the other two never.
    num_layers: int = None  # type: ignore[assignment]
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_batch_size: int = None  # type: ignore[assignment]
    max_context_tokens: int = None  # type: ignore[assignment]
    dtype: torch.dtype = torch.bfloat16
    layout: Layout = "sliced"
    layers_per_slice: int | Literal["auto"] = "auto"
    page_group_bytes: int | None = None
    max_size_class_bytes: int | None = None
    layers: Sequence[LayerSpec] | None = None
    overread_tokens: int = 0
    expected_context_tokens: int | None = None

    def __post_init__(self) -> None:
        self._check_layers()
        check_positive("max_batch_size", self.max_batch_size)
        check_positive("max_context_tokens", self.max_context_tokens)
        check_dtype(self.dtype)
        if self.layout not in get_args(Layout):
            raise ValueError(f"layout={self.layout!r} must be one of {get_args(Layout)}")
        self._check_page_groups()
        self._check_slices()
        if (
            isinstance(self.overread_tokens, bool)
            or not isinstance(self.overread_tokens, int)
            or self.overread_tokens < 0
        ):
            raise ValueError(f"overread_tokens={self.overread_tokens!r} must be an integer of 0 or more")
        self._check_addresses()

    def _check_layers(self) -> None:
        """Check the layers, however they are given; makes `layers` a tuple and `num_layers` their number."""
        names = ("num_layers", "num_kv_heads", "head_dim")
        for name in names:
            if getattr(self, name) is None and self.layers is None:
                raise ValueError(f"{name}=None must be a positive integer; give {', '.join(names)}, or else layers")
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.layers is not None and (not isinstance(self.layers, Sequence) or not self.layers):
            raise ValueError(f"layers={self.layers!r} must be a sequence of at least one LayerSpec")
        num_layers = self.num_layers if self.layers is None else len(self.layers)
        if num_layers > _MOST_LAYERS:
            raise ValueError(f"num_layers={num_layers:,} must be at most {_MOST_LAYERS:,}")
        if self.layers is None:
            return
        for number, spec in enumerate(self.layers):
            if not isinstance(spec, LayerSpec):
                raise ValueError(f"layers[{number}]={spec!r} must be a LayerSpec")
            for name in ("num_kv_heads", "head_dim"):
                if getattr(self, name) not in (None, getattr(spec, name)):
                    raise ValueError(
                        f"{name}={getattr(self, name)} must be layers[{number}].{name}={getattr(spec, name)}; "
                        "leave it out"
                    )
        if self.num_layers not in (None, len(self.layers)):
            raise ValueError(f"num_layers={self.num_layers} must be len(layers)={len(self.layers)}; leave it out")
        object.__setattr__(self, "num_layers", len(self.layers))
        object.__setattr__(self, "layers", tuple(self.layers))

    def _check_page_groups(self) -> None:
        if self.page_group_bytes is not None:
            check_positive("page_group_bytes", self.page_group_bytes)
        if self.max_size_class_bytes is not None:
            check_positive("max_size_class_bytes", self.max_size_class_bytes)
            if self.page_group_bytes is not None:
                times, rest = divmod(self.max_size_class_bytes, self.page_group_bytes)
                if rest or times.bit_count() != 1:
                    raise ValueError(
                        f"max_size_class_bytes={self.max_size_class_bytes} must be "
                        f"page_group_bytes={self.page_group_bytes} times a power of two (1, 2, 4, ...)"
                    )

    def _check_slices(self) -> None:
        if self.layers_per_slice != "auto":
            check_positive("layers_per_slice", self.layers_per_slice)
            if self.layout == "per_layer":
                raise ValueError(
                    f"layers_per_slice={self.layers_per_slice} is for layout='sliced'; leave it out with 'per_layer'"
                )
            if self.layers_per_slice > self.num_layers:
                raise ValueError(
                    f"layers_per_slice={self.layers_per_slice} must be at most num_layers={self.num_layers}"
                )
        if self.expected_context_tokens is not None:
            check_positive("expected_context_tokens", self.expected_context_tokens)
            if self.expected_context_tokens > self.max_context_tokens:
                raise ValueError(
                    f"expected_context_tokens={self.expected_context_tokens:,} must be at most "
                    f"max_context_tokens={self.max_context_tokens:,}"
                )

    def _check_addresses(self) -> None:
        needed = self.reserved_bytes
        if needed >= _ADDRESS_SPACE_BYTES:
            tokens = f"max_context_tokens={self.max_context_tokens:,}"
            if self.overread_tokens:
                tokens = f"({tokens} + overread_tokens={self.overread_tokens:,})"
            raise ValueError(
                f"max_batch_size={self.max_batch_size} x {tokens} x {self.bytes_per_token:,} bytes a token is "
                f"{format_bytes(needed)} of addresses; it must be less than {format_bytes(_ADDRESS_SPACE_BYTES)}, "
                "the address space of a process"
            )

    # -- layers and buffers ---------------------------------------------------------------------------------------

    @cached_property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps of a token, with every default filled in."""
        if self.layers is None:
            return (self._only_spec(),) * self.num_layers
        return tuple(spec.resolved(self.dtype) for spec in self.layers)

    def _only_spec(self) -> LayerSpec:
        assert self.num_kv_heads is not None  # checked: there are no `layers`
        assert self.head_dim is not None
        return LayerSpec(self.num_kv_heads, self.head_dim).resolved(self.dtype)

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The slices (``sliced``), or the K and the V of each layer (``per_layer``): what lies side by side."""
        if self.layout == "per_layer":
            return per_layer_buffers(self.layer_specs)
        return sliced_buffers(self.layer_specs, self._layers_in_slice)

    def _layers_in_slice(self, spec: LayerSpec, num_layers: int) -> int:
        """The most layers of a slice, of so many that have a spec."""
        if self.layers_per_slice != "auto":
            return self.layers_per_slice
        num_slices = ceil_div(num_layers, _MOST_LAYERS_PER_SLICE)
        if self.expected_context_tokens is not None:
            tokens = min(self.expected_context_tokens, spec.window or self.expected_context_tokens)
            expected_bytes = tokens * num_layers * spec.bytes_per_token
            affordable = 2 * expected_bytes // (_MOST_WASTE * self.resolved_page_group_bytes)
            num_slices = max(1, min(num_slices, affordable))
        return ceil_div(num_layers, num_slices)

    @property
    def resolved_layers_per_slice(self) -> int:
        """Layers in the fullest slice; 1 where the layout has no slices."""
        return max(buffer.num_layers for buffer in self.buffers)

    # -- bytes ----------------------------------------------------------------------------------------------------

    @property
    def resolved_page_group_bytes(self) -> int:
        """`page_group_bytes`, or 2 MiB: what CUDA would take. A manager's own config holds the true value."""
        return self.page_group_bytes or 2 * MIB

    @property
    def slot_tokens(self) -> int:
        """Rows for which a slot has addresses: `max_context_tokens` and `overread_tokens`."""
        return self.max_context_tokens + self.overread_tokens

    @property
    def head_bytes(self) -> int:
        """K (or V) of one token in one layer; the largest of any layer where they differ."""
        return max(max(spec.key_bytes, spec.value_bytes) for spec in self.layer_specs)

    @cached_property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers. A layer with a window counts too: its last tokens take as much."""
        if self.layers is None:
            return self.num_layers * self._only_spec().bytes_per_token
        return sum(spec.bytes_per_token for spec in self.layer_specs)

    @cached_property
    def row_bytes(self) -> int:
        """What one token takes in a slice (``sliced``), or in K or V of a layer (``per_layer``): the largest of any."""
        return max(buffer.row_bytes for buffer in self.buffers)

    @property
    def tokens_per_page_group(self) -> int:
        """Whole tokens, of the largest rows, in a page group; for display, as pages are counted in bytes."""
        return self.resolved_page_group_bytes // self.row_bytes

    @property
    def slot_bytes(self) -> int:
        """Addresses of one slot in the buffer with the largest rows. A whole number of page groups."""
        return round_up(self.slot_tokens * self.row_bytes, self.resolved_page_group_bytes)

    @cached_property
    def reserved_bytes(self) -> int:
        """Addresses of the whole cache, over-read rows included."""
        size = self.resolved_page_group_bytes
        return self.max_batch_size * sum(round_up(self.slot_tokens * buffer.row_bytes, size) for buffer in self.buffers)
