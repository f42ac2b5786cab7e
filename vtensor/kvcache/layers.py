"""LayerSpec: what a layer keeps of a token; Buffer: what of it lies side by side.

A cache is one reservation, cut into buffers. A token takes one row of every buffer. A row consists of **parts**, each K
or V of one layer. All layers of a buffer have one spec, so all parts have one dtype and lie aligned to it::

    sliced, three layers       | K of layer 0 | V of layer 0 | K of 1 | V of 1 | K of 2 | V of 2 |
    sliced, latent             | layer 0      | layer 1      | layer 2      |      V of a layer is the head of its K
    per_layer                  | K of layer 0 |      and another buffer        | V of layer 0 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

__all__ = ["Buffer", "LayerSpec", "check_dtype", "check_positive", "per_layer_buffers", "sliced_buffers"]

_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps of each token. Immutable and validated.

    Parameters
    ----------
    num_kv_heads, head_dim : int
        KV heads (on this rank) and elements a head of K.
    value_head_dim : int, optional
        Elements a head of V. None: `head_dim`.
    is_latent : bool
        The layer keeps one latent a token (multi-head latent attention), which is K; its first `value_head_dim`
        elements of every head are V, which has no memory of its own. DeepSeek-V3: 1 head of 576, of which V is 512.
    dtype : torch.dtype, optional
        fp8 (e4m3fn, e5m2), fp16, bf16, fp32 or fp64. None: that of the `KVCacheConfig`.
    window : int, optional
        A sliding window: the query at position p sees the keys p - window + 1 to p, so that what lies before is needed
        no more. None: it sees all of them.

    Raises
    ------
    ValueError
        The message names the value and the rule.

    Examples
    --------
    >>> latent = LayerSpec(num_kv_heads=1, head_dim=576, value_head_dim=512, is_latent=True, dtype=torch.bfloat16)
    >>> latent.key_bytes, latent.value_bytes, latent.bytes_per_token
    (1152, 0, 1152)
    """

    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    is_latent: bool = False
    dtype: torch.dtype | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        check_positive("num_kv_heads", self.num_kv_heads)
        check_positive("head_dim", self.head_dim)
        if self.value_head_dim is not None:
            check_positive("value_head_dim", self.value_head_dim)
        if not isinstance(self.is_latent, bool):
            raise ValueError(f"is_latent={self.is_latent!r} must be True or False")
        if self.is_latent and self.resolved_value_head_dim > self.head_dim:
            raise ValueError(
                f"value_head_dim={self.value_head_dim} must be at most head_dim={self.head_dim} where is_latent=True: "
                "V is the first elements of K"
            )
        if self.dtype is not None:
            check_dtype(self.dtype)
        if self.window is not None:
            check_positive("window", self.window)

    def resolved(self, dtype: torch.dtype) -> LayerSpec:
        """The same, with every default filled in; `dtype` where the layer has none of its own."""
        return replace(self, value_head_dim=self.resolved_value_head_dim, dtype=self.dtype or dtype)

    @property
    def resolved_value_head_dim(self) -> int:
        """Elements a head of V."""
        return self.value_head_dim or self.head_dim

    @property
    def resolved_dtype(self) -> torch.dtype:
        """The layer's own dtype.

        Raises
        ------
        ValueError
            It has none: only `KVCacheConfig.layer_specs` know the config's.
        """
        if self.dtype is None:
            raise ValueError(
                "dtype=None must be filled in to count bytes; take the spec from KVCacheConfig.layer_specs"
            )
        return self.dtype

    @property
    def key_bytes(self) -> int:
        """Memory of K (or of the latent) of one token."""
        return self.num_kv_heads * self.head_dim * self.resolved_dtype.itemsize

    @property
    def value_bytes(self) -> int:
        """Memory of V of one token; 0 where it is a part of the latent."""
        return 0 if self.is_latent else self.num_kv_heads * self.resolved_value_head_dim * self.resolved_dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Memory of K and V of one token."""
        return self.key_bytes + self.value_bytes


@dataclass(frozen=True)
class Buffer:
    """Part of a reservation in which the same parts of every token lie side by side.

    Attributes
    ----------
    spec : LayerSpec
        Of all its layers, resolved.
    parts : tuple of (int, bool)
        Layer, and whether it is its V: in the order in which they lie in a row.
    """

    spec: LayerSpec
    parts: tuple[tuple[int, bool], ...]

    @property
    def num_layers(self) -> int:
        """Layers that have a part in it."""
        return len({layer for layer, _ in self.parts})

    @property
    def row_bytes(self) -> int:
        """What one token takes in it."""
        return sum(self._part_bytes(is_value) for _, is_value in self.parts)

    def offsets(self) -> Iterator[tuple[tuple[int, bool], int]]:
        """Each part, and the byte of a row at which it starts."""
        start = 0
        for layer, is_value in self.parts:
            yield (layer, is_value), start
            start += self._part_bytes(is_value)

    def _part_bytes(self, is_value: bool) -> int:
        return self.spec.value_bytes if is_value else self.spec.key_bytes


def sliced_buffers(specs: Sequence[LayerSpec], layers_per_slice: Callable[[LayerSpec, int], int]) -> tuple[Buffer, ...]:
    """Slices: for each spec, in the order of their first layers, the layers that have it, so many at a time.

    `layers_per_slice` says how many, given the spec and the number of layers that have it.
    """
    layers_of: dict[LayerSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_of.setdefault(spec, []).append(layer)
    buffers = []
    for spec, layers in layers_of.items():
        most = layers_per_slice(spec, len(layers))
        for first in range(0, len(layers), most):
            parts = [part for layer in layers[first : first + most] for part in _parts(layer, spec)]
            buffers.append(Buffer(spec, tuple(parts)))
    return tuple(buffers)


def per_layer_buffers(specs: Sequence[LayerSpec]) -> tuple[Buffer, ...]:
    """K and V of each layer by itself, in the order of the layers."""
    return tuple(Buffer(spec, (part,)) for layer, spec in enumerate(specs) for part in _parts(layer, spec))


def _parts(layer: int, spec: LayerSpec) -> list[tuple[int, bool]]:
    return [(layer, False)] if spec.is_latent else [(layer, False), (layer, True)]


def check_positive(name: str, value: object) -> None:
    """Raise `ValueError`, with the name and the value, unless the value is an integer above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name}={value!r} must be a positive integer")


def check_dtype(dtype: object) -> None:
    """Raise `ValueError`, with the value, unless K and V may have that dtype."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(str(known) for known in _DTYPES)}")
