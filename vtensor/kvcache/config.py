"""KVCacheConfig: the shape of a KV cache, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from vtensor.units import MIB, TIB, ceil_div, format_bytes, round_up

__all__ = ["KVCacheConfig", "Layout", "check_positive"]

Layout = Literal["sliced", "per_layer"]

_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_ADDRESS_SPACE_BYTES = 128 * TIB
_MOST_LAYERS_PER_SLICE = 16


@dataclass(frozen=True)
class KVCacheConfig:
    """The shape of a KV cache. Immutable and validated.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        Layers, KV heads (on this rank) and elements a head, of K and of V alike.
    max_batch_size, max_context_tokens : int
        Slots, and the most tokens that one slot may hold. Both cost addresses only, never memory.
    dtype : torch.dtype
        fp8 (e4m3fn, e5m2), fp16, bf16, fp32 or fp64.
    layout : {"sliced", "per_layer"}
        ``sliced``: the K and V of `layers_per_slice` layers of one token lie side by side, so that a page group holds
        few tokens of many layers. ``per_layer``: K and V of each layer apart, as in the paper (arXiv:2405.04437, 5).
    layers_per_slice : int or "auto"
        ``auto``: as few slices of at most 16 layers as will do, as equal as they can be. Not for ``per_layer``.
    page_group_bytes : int, optional
        None: the driver's default (CUDA 2 MiB, host 64 KiB).

    Raises
    ------
    ValueError
        The message names the value and the rule.

    Examples
    --------
    >>> config = KVCacheConfig(num_layers=32, num_kv_heads=8, head_dim=128, max_batch_size=64,
    ...                        max_context_tokens=131_072, dtype=torch.bfloat16)
    >>> config.resolved_layers_per_slice, config.tokens_per_page_group, config.bytes_per_token
    (16, 32, 131072)
    >>> config.reserved_bytes == 64 * 131_072 * config.bytes_per_token
    True
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_batch_size: int
    max_context_tokens: int
    dtype: torch.dtype = torch.bfloat16
    layout: Layout = "sliced"
    layers_per_slice: int | Literal["auto"] = "auto"
    page_group_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "max_batch_size", "max_context_tokens"):
            check_positive(name, getattr(self, name))
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(str(dtype) for dtype in _DTYPES)}")
        if self.layout not in get_args(Layout):
            raise ValueError(f"layout={self.layout!r} must be one of {get_args(Layout)}")
        if self.page_group_bytes is not None:
            check_positive("page_group_bytes", self.page_group_bytes)
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
        if self.reserved_bytes >= _ADDRESS_SPACE_BYTES:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} x max_context_tokens={self.max_context_tokens:,} x "
                f"{self.bytes_per_token:,} bytes a token is {format_bytes(self.reserved_bytes)} of addresses; "
                f"it must be less than {format_bytes(_ADDRESS_SPACE_BYTES)}, the address space of a process"
            )

    @property
    def resolved_layers_per_slice(self) -> int:
        """Layers in a slice (the last slice may have fewer); 1 where the layout has no slices."""
        if self.layout == "per_layer":
            return 1
        if self.layers_per_slice == "auto":
            return ceil_div(self.num_layers, ceil_div(self.num_layers, _MOST_LAYERS_PER_SLICE))
        return self.layers_per_slice

    @property
    def resolved_page_group_bytes(self) -> int:
        """`page_group_bytes`, or 2 MiB: what CUDA would take. A manager's own config holds the true value."""
        return self.page_group_bytes or 2 * MIB

    @property
    def head_bytes(self) -> int:
        """K (or V) of one token in one layer."""
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.head_bytes

    @property
    def row_bytes(self) -> int:
        """What one token takes in one full slice (``sliced``), or in the K of one layer (``per_layer``)."""
        return self.head_bytes if self.layout == "per_layer" else 2 * self.resolved_layers_per_slice * self.head_bytes

    @property
    def tokens_per_page_group(self) -> int:
        """Whole tokens in a page group, for display: pages are counted in bytes, and rows may straddle them."""
        return self.resolved_page_group_bytes // self.row_bytes

    @property
    def slot_bytes(self) -> int:
        """Addresses of one slot in one buffer: a full slice, or K or V of a layer. A whole number of page groups."""
        return round_up(self.max_context_tokens * self.row_bytes, self.resolved_page_group_bytes)

    @property
    def reserved_bytes(self) -> int:
        """Addresses of the whole cache."""
        if self.layout == "per_layer":
            return 2 * self.num_layers * self.max_batch_size * self.slot_bytes
        full, rest = divmod(self.num_layers, self.resolved_layers_per_slice)
        rest_bytes = round_up(2 * rest * self.head_bytes * self.max_context_tokens, self.resolved_page_group_bytes)
        return self.max_batch_size * (full * self.slot_bytes + rest_bytes)


def check_positive(name: str, value: object) -> None:
    """Raise `ValueError`, with the name and the value, unless the value is an integer above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name}={value!r} must be a positive integer")
