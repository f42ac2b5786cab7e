"""Caches for tests, and data by which every token of every layer is told from every other.

Rows are made to measure, so that the arithmetic is the same on a host (page groups of 4 KiB) and on a GPU (2 MiB).
"""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch

import vtensor as vt
from vtensor.allocator import graveyard
from vtensor.allocator.driver import get_driver
from vtensor.kvcache import SlotState

__all__ = [
    "ACTIVE",
    "BUSY_CYCLES",
    "DEFERRED",
    "FREE",
    "IN_THE_BACKGROUND",
    "ONLY_STEPS",
    "RECLAIMING",
    "Busy",
    "Pattern",
    "close",
    "is_zero",
    "lengths",
    "make",
    "page",
    "places",
    "spec",
    "states",
    "stats",
]

FREE, ACTIVE, DEFERRED, RECLAIMING = SlotState
# Nothing in the background, unless a test asks for it.
ONLY_STEPS = {"lookahead_tokens": 0, "eager_slot": False, "low_watermark": 0.0, "high_watermark": 0.0}
IN_THE_BACKGROUND: dict[str, Any] = {
    "lookahead_tokens": 2,
    "eager_slot": True,
    "low_watermark": 0.1,
    "high_watermark": 0.2,
}
BUSY_CYCLES = 200_000_000  # of a GPU's clock: a tenth of a second


def page(device: str) -> int:
    """Bytes of the smallest page group that both a test and its device can live with."""
    return int(max(4096, get_driver(device).granularity_bytes))


def spec(device: str, rows_a_page_group: float, **options: Any) -> vt.LayerSpec:
    """A layer of bf16 of whose tokens so many fill a page group, K and V together: 0.5 takes two page groups each."""
    return vt.LayerSpec(num_kv_heads=2, head_dim=int(page(device) / rows_a_page_group) // 8, **options)


def make(device: str, *layers: vt.LayerSpec, size_classes: int = 1, **options: Any) -> vt.KVCacheManager:
    """A cache of 4 slots of 64 tokens, by default of one layer with 4 tokens a page group; nothing in the background.

    `capacity` is in page groups. What is no field of its configuration goes to the manager.
    """
    fields = {field.name for field in dataclasses.fields(vt.KVCacheConfig)}
    shape: dict[str, Any] = {"layers": layers or (spec(device, 4),), "max_batch_size": 4, "max_context_tokens": 64}
    if "pool" not in options:
        shape |= {"page_group_bytes": page(device), "max_size_class_bytes": page(device) << size_classes - 1}
    if "capacity" in options:
        options["capacity_bytes"] = options.pop("capacity") * page(device)
    options = {**ONLY_STEPS, **options}
    shape |= {name: options.pop(name) for name in list(options) if name in fields}
    return vt.KVCacheManager(vt.KVCacheConfig(**shape), device, **options)


def close(pool: vt.PagePool) -> None:
    """Close a pool, once the memory of closed caches and dead tensors has come back to it."""
    gc.collect()
    graveyard.drain()
    pool.close()


def lengths(cache: vt.KVCacheManager, by_slot: dict[int, int]) -> list[int]:
    """Lengths of all slots."""
    return [by_slot.get(slot, 0) for slot in range(cache.config.max_batch_size)]


def places(cache: vt.KVCacheManager, tokens: int) -> int:
    """Page groups below so many tokens of a slot without a window, over-read rows included."""
    config = cache.config
    size = config.resolved_page_group_bytes
    return sum(-(-(tokens + config.overread_tokens) * buffer.row_bytes // size) for buffer in config.buffers)


def stats(cache: vt.KVCacheManager) -> vt.KVCacheStats:
    """The cache's statistics once the device, and then the mapper, have done what they were given."""
    cache._region.space.settle()
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)
    return cache.stats()


def is_zero(view: torch.Tensor) -> bool:
    """Whether every element is 0; `Tensor.any` knows no fp8 on CUDA."""
    return not (view.float() if view.element_size() == 1 else view).any()


def states(cache: vt.KVCacheManager) -> list[SlotState]:
    """What each slot is doing, now, without waiting for anything."""
    return [SlotState(int(state)) for state in cache._slots.arrays.state]


class Pattern:
    """A number for each token of each K and V of each layer, written through plain views and found again.

    Small integers, which every dtype that a cache may have holds exactly. `salt` tells one request from another. Where
    a row has no memory, it is an assertion that fails, and not the process.
    """

    def __init__(self, cache: vt.KVCacheManager) -> None:
        self._cache = cache  # no views, whose life would outlast the cache's
        tokens = torch.arange(cache.config.max_context_tokens, device=cache.device)[:, None, None] * 7
        numbers = torch.stack([((tokens + offset) % 13 + 1).float() for offset in range(13)])
        self._numbers = {dtype: numbers.to(dtype) for dtype in {spec.dtype for spec in cache.config.layer_specs}}
        self._places = {}  # of each K and V: its first byte, and the bytes of a slot, of a row, and in a row
        for layer in range(cache.config.num_layers):
            for is_value, view in enumerate(cache.layer(layer, plain=True)):
                first, size = view.data_ptr() - cache._region.space.base, view.element_size()
                inside = (view.shape[2] - 1) * view.stride(2) + view.shape[3]
                self._places[layer, is_value] = first, view.stride(0) * size, view.stride(1) * size, inside * size

    def numbers(self, layer: int, is_value: int, slot: int, first: int, end: int, salt: int = 0) -> torch.Tensor:
        """What the tokens `first` to `end` hold, of shape [n, 1, 1]; never 0."""
        spec = self._cache.config.layer_specs[layer]
        offset = layer * 3 + slot * 11 + salt * 4 + (0 if spec.is_latent else is_value * 5)
        return self._numbers[spec.resolved_dtype][offset % 13, first:end]

    def rows(self, layer: int, is_value: int, slot: int, first: int, end: int) -> torch.Tensor:
        """Tokens `first` to `end` of a slot in K or V of a layer: a plain tensor, of which all is mapped."""
        start, slot_bytes, row_bytes, inside = self._places[layer, is_value]
        start += slot * slot_bytes
        size, table = self._cache.pool.page_group_bytes, self._cache._region.space.arrays.table
        last = (start + (end - 1) * row_bytes + inside - 1) // size
        found = table[(start + first * row_bytes) // size : last + 1]
        assert end <= first or (found > 0).all(), f"layer {layer}, slot {slot}, tokens {first} to {end}: {found}"
        return self._cache.layer(layer, plain=True)[is_value][slot, first:end]

    def write(self, slot: int, first: int, end: int, salt: int = 0) -> None:
        """Write the tokens `first` to `end` of a slot in every layer."""
        for layer, is_value in self._places:
            rows = self.rows(layer, is_value, slot, first, end)
            rows.copy_(self.numbers(layer, is_value, slot, first, end, salt))

    def first_visible(self, layer: int, position: int) -> int:
        """The first token that the query at a position sees in a layer."""
        window = self._cache.config.layer_specs[layer].window
        return 0 if window is None else max(0, position - window + 1)

    def check(self, slot: int, length: int, position: int | None = None, salt: int = 0) -> None:
        """Assert that all that the query at a position (by default the last) sees of a slot is as it was written."""
        for layer, is_value in self._places:
            first = self.first_visible(layer, length - 1 if position is None else position)
            found = self.rows(layer, is_value, slot, first, length)
            expected = self.numbers(layer, is_value, slot, first, length, salt)
            if found.element_size() == 1:  # torch compares no fp8
                found, expected = found.float(), expected.float()
            assert (found == expected).all(), (
                f"layer {layer}, {'KV'[is_value]}, slot {slot}, tokens {first} to {length}: "
                f"{found.flatten(1)[:, 0].tolist()} should be {expected.flatten().tolist()}"
            )


class Busy:
    """A device that has not finished with what it was given, until it is told to: in place of a cache's events.

    What says that it has finished waits for the real one, which may be busy with others.
    """

    def __init__(self, cache: vt.KVCacheManager, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_busy = True
        self.num_waits = 0  # of streams for it
        self.num_stops = 0  # of callers for it
        self._device = cache.device
        streams: Any = cache._region.streams
        self._wait_for_others = streams.wait
        monkeypatch.setattr(streams, "record", lambda: [self])
        monkeypatch.setattr(streams, "wait", self._wait)

    def _wait(self, events: list[Any]) -> None:
        others = [event for event in events if event is not self]
        self.num_waits += len(events) - len(others)
        self._wait_for_others(others)

    def query(self) -> bool:
        """Whether it has finished."""
        if not self.is_busy:
            self._finish()
        return not self.is_busy

    def synchronize(self) -> None:
        """Wait until it has finished."""
        self.num_stops += self.is_busy
        self.is_busy = False
        self._finish()

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
