"""Where the bytes of a KV cache lie in its one reservation.

The reservation is cut into **buffers** of `max_batch_size` slots, a buffer being a slice (sliced) or the K or the V of
a layer (per_layer); see `vtensor.kvcache.layers`. A token takes one row of every buffer. Buffers with rows of the same
length, window and dtype form a **layer group** and lie next to each other: their slots always hold the same number of
page groups, so the cache's state is kept once a slot and group::

    | buffer 0: slot 0 | slot 1 | ... | slot B-1 | buffer 1: slot 0 | slot 1 | ...
                 |
                 row 0 | row 1 | row 2 | ... | row L-1 | over-read rows | padding to the next page group
                   |
                   layer 0: K V | layer 1: K V | ...     (sliced: K and V are [H, D])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vtensor.kvcache.config import KVCacheConfig
from vtensor.kvcache.layers import Buffer
from vtensor.units import ceil_div

__all__ = ["CacheLayout", "LayerGroup", "LayerView"]


@dataclass(frozen=True)
class LayerGroup:
    """Buffers with rows of the same length, window and dtype.

    Attributes
    ----------
    num_buffers : int
    row_bytes : int
        What a token takes in each of them.
    slot_places : int
        Places (of one page group each) of a slot in each of them, those of over-read rows included.
    first_place : int
        Where the first buffer starts in the reservation.
    window : int or None
        The query at position p needs the rows p - window + 1 to p; None: all up to p.
    dtype : torch.dtype
    """

    num_buffers: int
    row_bytes: int
    slot_places: int
    first_place: int
    window: int | None
    dtype: torch.dtype


@dataclass(frozen=True)
class LayerView:
    """A layer's K or V as a strided view of the reservation: [B, L, H, D], all in elements of `dtype`."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]


@dataclass(frozen=True)
class CacheLayout:
    """Layer groups of a cache, and the strided view that is a layer's K or V.

    Attributes
    ----------
    config : KVCacheConfig
    page_group_bytes : int
        Bytes of a place.
    groups : tuple of LayerGroup
        In the order in which they lie in the reservation.
    key_parts, value_parts : tuple of (int, int)
        For each layer: its group, and the byte of the reservation at which K (V) of slot 0, token 0 starts. A latent
        has the same for both.
    """

    config: KVCacheConfig
    page_group_bytes: int
    groups: tuple[LayerGroup, ...]
    key_parts: tuple[tuple[int, int], ...]
    value_parts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, config: KVCacheConfig, page_group_bytes: int) -> CacheLayout:
        """The layout of a configuration with a given page group size."""
        members: dict[tuple[int, int | None, torch.dtype], list[Buffer]] = {}
        for buffer in config.buffers:
            spec = buffer.spec
            members.setdefault((buffer.row_bytes, spec.window, spec.resolved_dtype), []).append(buffer)
        groups: list[LayerGroup] = []
        parts: dict[tuple[int, bool], tuple[int, int]] = {}
        place = 0
        for (row_bytes, window, dtype), buffers in members.items():
            slot_places = ceil_div(config.slot_tokens * row_bytes, page_group_bytes)
            group = LayerGroup(len(buffers), row_bytes, slot_places, place, window, dtype)
            for buffer in buffers:
                for part, offset in buffer.offsets():
                    parts[part] = len(groups), place * page_group_bytes + offset
                place += config.max_batch_size * slot_places
            groups.append(group)
        keys = tuple(parts[layer, False] for layer in range(config.num_layers))
        values = tuple(parts.get((layer, True), key) for layer, key in enumerate(keys))
        return cls(config, page_group_bytes, tuple(groups), keys, values)

    @property
    def num_places(self) -> int:
        """Places in the whole reservation."""
        last = self.groups[-1]
        return last.first_place + last.num_buffers * self.config.max_batch_size * last.slot_places

    def layer_view(self, layer: int, is_value: bool) -> LayerView:
        """A layer's K or V. That of a latent's V lies within that of its K, and has the same strides."""
        config, spec = self.config, self.config.layer_specs[layer]
        number, start = (self.value_parts if is_value else self.key_parts)[layer]
        group = self.groups[number]
        element_bytes = group.dtype.itemsize
        head_dim = spec.resolved_value_head_dim if is_value else spec.head_dim
        return LayerView(
            dtype=group.dtype,
            offset=start // element_bytes,
            shape=(config.max_batch_size, config.max_context_tokens, spec.num_kv_heads, head_dim),
            strides=(
                group.slot_places * self.page_group_bytes // element_bytes,
                group.row_bytes // element_bytes,
                spec.head_dim if spec.is_latent else head_dim,
                1,
            ),
        )
