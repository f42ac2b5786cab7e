"""LayerRows: where the K and V of several layers lie, for caches that are modules. One growth serves all layers."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from vtensor.allocator.page_pool import PagePool
from vtensor.factory import empty
from vtensor.integrations.first_slots import FirstSlots
from vtensor.kvcache import KVCacheConfig, KVCacheManager
from vtensor.pools import default_pool
from vtensor.units import round_up

__all__ = ["LayerRows", "ManagedRows", "Pair", "ZeroedRows"]

Pair = tuple[torch.Tensor, torch.Tensor]


class LayerRows(Protocol):
    """K and V of all layers, [max_batch_size, max_context_tokens, num_kv_heads, head_dim] each."""

    device: torch.device

    @property
    def committed_bytes(self) -> int:
        """Memory below the rows."""

    def reserve(self, batch: int, held: int, num_tokens: int) -> None:
        """Have memory for so many tokens of sequences 0 .. batch - 1, which hold `held`; all or nothing.

        Raises
        ------
        OutOfPagesError
            No memory; nothing has changed.
        """

    def shorten(self, batch: int, held: int, num_tokens: int) -> None:
        """Hold no more than so many tokens; with 0, no sequences either."""

    def plain(self, index: int) -> Pair:
        """K and V of a layer for kernels, and to be written to, after `reserve`."""

    def close(self) -> None:
        """Give the memory back."""


class ManagedRows:
    """Rows of a `KVCacheManager`: memory is mapped ahead of need. What holds no token must not be read."""

    def __init__(self, config: KVCacheConfig, device: torch.device, pool: PagePool | None) -> None:
        self.device = device
        self._manager = KVCacheManager(config, device, pool=pool, eager_slot=False)  # no other requests will come
        self._slots = FirstSlots(self._manager, "Free memory, or give it a pool with more")

    @property
    def committed_bytes(self) -> int:
        """As of `LayerRows`."""
        return self._manager.stats().committed_bytes

    def reserve(self, batch: int, held: int, num_tokens: int) -> None:
        """As of `LayerRows`; never waits for the device."""
        self._slots.resize(batch)
        self._slots.step(num_tokens, held)

    def shorten(self, batch: int, held: int, num_tokens: int) -> None:
        """As of `LayerRows`; the page groups stay with their slots until somebody needs them."""
        if num_tokens:
            self._slots.step(num_tokens, held)
        else:
            self._slots.resize(0)

    def plain(self, index: int) -> Pair:
        """As of `LayerRows`."""
        return self._manager.layer(index, plain=True)

    def close(self) -> None:
        """As of `LayerRows`."""
        self._manager.close()


class ZeroedRows:
    """Rows of one virtual tensor, [max_batch_size, max_context_tokens, layers, 2, heads, width].

    What holds no token reads as zeros, without memory: masked attention over the whole length finds no NaN there.
    """

    def __init__(self, config: KVCacheConfig, device: torch.device, pool: PagePool | None) -> None:
        spec = config.layer_specs[0]
        self.device = device
        with torch.inference_mode(False):  # later updates may be in any mode
            self._rows = empty(
                config.max_batch_size,
                config.max_context_tokens,
                config.num_layers,
                2,
                spec.num_kv_heads,
                spec.head_dim,
                dtype=spec.dtype,
                device=device,
                pool=pool,
            )
            self._plain = self._rows.plain()
        row_bytes = math.prod(self._rows.shape[2:]) * self._rows.element_size()
        self._tokens_at_once = max(1, (pool or default_pool(device)).page_group_bytes // row_bytes)
        self._committed = 0  # tokens of each sequence

    @property
    def committed_bytes(self) -> int:
        """As of `LayerRows`."""
        return self._rows.resident_bytes

    def reserve(self, batch: int, held: int, num_tokens: int) -> None:
        """As of `LayerRows`. On a GPU memory takes the place of zeros that were read: that waits for the device."""
        if num_tokens > self._committed:
            end = min(round_up(num_tokens, self._tokens_at_once), self._rows.shape[1])
            self._rows.commit((slice(batch), slice(self._committed, end)))
            self._committed = end

    def shorten(self, batch: int, held: int, num_tokens: int) -> None:
        """As of `LayerRows`; what held tokens reads as zeros. To hold none gives memory back, after the device."""
        if num_tokens:
            self._plain[:batch, num_tokens:held].zero_()
        else:
            self._committed = 0
            self._rows.decommit()

    def plain(self, index: int) -> Pair:
        """As of `LayerRows`."""
        return self._plain[:, :, index, 0], self._plain[:, :, index, 1]

    def readable(self, index: int, batch: int) -> Pair:
        """K and V of a layer and so many sequences, of their whole length, [batch, heads, tokens, width]."""
        with torch.inference_mode(False):
            rows = self._rows[:batch, :, index].permute(2, 0, 3, 1, 4)
            return rows[0], rows[1]

    def close(self) -> None:
        """As of `LayerRows`; views that are still in use keep the memory."""
        del self._rows, self._plain
