"""Memory of a device in `vtensor bench hf`, counted in the same way whoever takes it."""

from __future__ import annotations

from typing import Any

import torch

from vtensor.bench.hf_model import free_memory
from vtensor.integrations.transformers import VirtualCache
from vtensor.units import MIB

__all__ = ["Watch", "cache_bytes", "mapped_bytes"]


class Watch:
    """Memory of a device from now on, whoever takes it; on a CPU nobody looks."""

    def __init__(self, device: str) -> None:
        free_memory(device, in_cycles=True)
        self._device = None if device == "cpu" else device
        if self._device is not None:
            self._allocated, self._free = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
            self.forget_peak()

    def forget_peak(self) -> None:
        """Peaks count from here."""
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self, name: str, mapped_bytes: int) -> dict[str, float]:
        """The most that torch had, and what is mapped by us."""
        if self._device is None:
            return {}
        return {name: (torch.cuda.max_memory_allocated(self._device) - self._allocated + mapped_bytes) / MIB}

    def device(self) -> dict[str, float]:
        """What the device has less; torch keeps what it had at its peak."""
        if self._device is None:
            return {}
        torch.cuda.synchronize(self._device)
        return {"device": (self._free - torch.cuda.mem_get_info(self._device)[0]) / MIB}


def mapped_bytes(cache: Any) -> int:
    """What a cache has of its device beside torch's allocations."""
    if not isinstance(cache, VirtualCache):
        return 0
    return sum(manager.pool.stats().total_page_groups * manager.pool.page_group_bytes for manager in cache.managers)


def cache_bytes(cache: Any) -> int:
    """What a cache has of its device."""
    if isinstance(cache, VirtualCache):
        return mapped_bytes(cache)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
