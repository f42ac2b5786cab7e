"""What benchmarks do with a KV cache: fill it with requests, start them over, prove that their tokens are there."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vtensor.allocator.driver import get_driver
from vtensor.errors import VTensorError
from vtensor.kvcache import KVCacheConfig, KVCacheManager, StepResult
from vtensor.units import ceil_div

__all__ = ["FullBatch", "check_tokens", "finish", "settle", "stepped"]

Int64 = npt.NDArray[np.int64]

_PATIENCE_S = 60.0
_LARGEST_MARK = 127  # every dtype of a cache holds the integers up to here, but fp8: those that a head of it can tell


class FullBatch:
    """A cache in which every slot has a request, as an engine under load has it.

    Freed memory goes back to the cache's pool at once, which keeps it, so that after the first start nothing needs to
    be created or zeroed: the state that a server is in after a while.

    Parameters
    ----------
    config : KVCacheConfig
    device : str
    most_tokens : int
        The longest that every request becomes. Sets the pool's capacity, with room to look ahead.
    options
        For the `KVCacheManager`.
    """

    def __init__(self, config: KVCacheConfig, device: str, *, most_tokens: int, **options: Any) -> None:
        page_group_bytes = config.page_group_bytes or get_driver(device).default_page_group_bytes
        buffers = ceil_div(config.num_layers, config.resolved_layers_per_slice)
        per_slot = buffers * (ceil_div(most_tokens * config.row_bytes, page_group_bytes) + 1)
        # A quarter more, for the watermarks below which background work begins.
        capacity_bytes = config.max_batch_size * per_slot * page_group_bytes * 5 // 4
        self.cache = KVCacheManager(
            config,
            device,
            capacity_bytes=capacity_bytes,
            deferred_reclamation=False,
            eager_slot=False,
            **options,
        )

    def restart(self, lengths: Int64) -> None:
        """End every request, wait until all memory is back in the pool, and admit new ones of these lengths."""
        cache, num_active = self.cache, self.cache.stats().num_active_slots
        for reqid in range(num_active):
            cache.free_reqid(reqid)
        settle(cache)
        for _ in range(cache.config.max_batch_size):
            cache.alloc_reqid()
        stepped(cache, lengths)
        finish(cache.device)


def stepped(cache: KVCacheManager, lengths: Int64) -> StepResult:
    """`step`, where a shortage is a failure."""
    result = cache.step(lengths)
    if not result:
        raise VTensorError(f"{result.shortfall_page_groups} page groups are missing in {cache!r}")
    return result


def finish(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def settle(cache: KVCacheManager) -> None:
    """Wait until a cache without requests, which defers nothing, has given all its memory back to its pool."""
    finish(cache.device)
    nothing = np.zeros(cache.config.max_batch_size, np.int64)
    deadline = time.monotonic() + _PATIENCE_S
    while cache.stats().committed_bytes:
        if time.monotonic() > deadline:
            raise VTensorError(f"{cache!r} still holds {cache.stats().committed_bytes:,} bytes after {_PATIENCE_S} s")
        cache.step(nothing)  # carries out what is due
        time.sleep(0.0005)


def check_tokens(cache: KVCacheManager, lengths: Int64) -> None:
    """Write to the first and the last token of every request, in the first layer's K and the last one's V; read back.

    Raises
    ------
    VTensorError
        A token reads differently (two requests share memory), or has no memory.
    """
    key, value = cache.layer(0)[0], cache.layer(cache.config.num_layers - 1)[1]
    requests = np.flatnonzero(lengths).tolist()
    places = [(slot, token) for slot in requests for token in (0, int(lengths[slot]) - 1)]
    for slot, token in places:
        key[slot, token] = slot % _LARGEST_MARK
        value[slot, token] = -(slot % _LARGEST_MARK)
    for slot, token in places:
        mark = slot % _LARGEST_MARK
        if not (torch.eq(key[slot, token], mark).all() and torch.eq(value[slot, token], -mark).all()):
            raise VTensorError(f"token {token} of slot {slot} of {cache!r} does not read as it was written")
    cache.check_integrity()
