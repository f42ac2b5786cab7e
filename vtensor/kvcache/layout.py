"""Where the bytes of a KV cache lie in its one reservation.

The reservation is cut into **buffers** of `max_batch_size` slots, a buffer being a slice (sliced) or the K or the V of
a layer (per_layer). A token takes one row of every buffer. Buffers with rows of the same length form a **layer group**:
their slots always hold the same number of page groups, so the cache's state is kept once a slot and group::

    | buffer 0: slot 0 | slot 1 | ... | slot B-1 | buffer 1: slot 0 | slot 1 | ...
                 |
                 row 0 | row 1 | row 2 | ... | row L-1 | padding to the next page group
                   |
                   layer 0: K V | layer 1: K V | ...     (sliced: K and V are [H, D])
"""

from __future__ import annotations

from dataclasses import dataclass

from vtensor.kvcache.config import KVCacheConfig
from vtensor.units import ceil_div

__all__ = ["CacheLayout", "LayerGroup"]


@dataclass(frozen=True)
class LayerGroup:
    """Buffers with rows of the same length.

    Attributes
    ----------
    num_buffers : int
    row_bytes : int
        What a token takes in each of them.
    slot_places : int
        Places (of one page group each) of a slot in each of them.
    first_place : int
        Where the first buffer starts in the reservation.
    """

    num_buffers: int
    row_bytes: int
    slot_places: int
    first_place: int


@dataclass(frozen=True)
class CacheLayout:
    """Layer groups of a cache, and the strided view that is a layer's K or V."""

    config: KVCacheConfig
    page_group_bytes: int
    groups: tuple[LayerGroup, ...]

    @classmethod
    def of(cls, config: KVCacheConfig, page_group_bytes: int) -> CacheLayout:
        """The layout of a configuration with a given page group size."""
        if config.layout == "per_layer":
            shapes = [(2 * config.num_layers, config.head_bytes)]
        else:
            full, rest = divmod(config.num_layers, config.resolved_layers_per_slice)
            shapes = [(full, config.row_bytes)]
            if rest:
                shapes.append((1, 2 * rest * config.head_bytes))
        groups: list[LayerGroup] = []
        first_place = 0
        for num_buffers, row_bytes in shapes:
            slot_places = ceil_div(config.max_context_tokens * row_bytes, page_group_bytes)
            groups.append(LayerGroup(num_buffers, row_bytes, slot_places, first_place))
            first_place += num_buffers * config.max_batch_size * slot_places
        return cls(config, page_group_bytes, tuple(groups))

    @property
    def num_places(self) -> int:
        """Places in the whole reservation."""
        last = self.groups[-1]
        return last.first_place + last.num_buffers * self.config.max_batch_size * last.slot_places

    def layer_view(self, layer: int, is_value: bool) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Offset, shape [B, L, H, D] and strides of a layer's K or V, in elements."""
        config = self.config
        if config.layout == "per_layer":
            group, buffer, inner = self.groups[0], 2 * layer + is_value, 0
        else:
            buffer, position = divmod(layer, config.resolved_layers_per_slice)
            inner = 2 * position + is_value
            group = self.groups[0]
            if buffer >= group.num_buffers:
                group, buffer = self.groups[1], 0
        element_bytes = config.dtype.itemsize
        slot_bytes = group.slot_places * self.page_group_bytes
        start = group.first_place * self.page_group_bytes + buffer * config.max_batch_size * slot_bytes
        return (
            (start + inner * config.head_bytes) // element_bytes,
            (config.max_batch_size, config.max_context_tokens, config.num_kv_heads, config.head_dim),
            (slot_bytes // element_bytes, group.row_bytes // element_bytes, config.head_dim, 1),
        )
