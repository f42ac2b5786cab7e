"""Pools: where virtual tensors that name no pool get their memory."""

from __future__ import annotations

import os
import threading

import torch

from vtensor.allocator.page_pool import PagePool
from vtensor.devices import device_name

__all__ = ["default_pool"]

_pools: dict[str, PagePool] = {}
_lock = threading.Lock()


def _forget() -> None:
    """In a forked child: pools are the parent's, and so is a lock that another of its threads held."""
    global _pools, _lock, _inherited
    _inherited, _pools, _lock = _pools, {}, threading.Lock()


_inherited: dict[str, PagePool] = {}  # kept alive in a child, where they can serve nobody
os.register_at_fork(after_in_child=_forget)


def default_pool(device: torch.device) -> PagePool:
    """The pool of tensors that name none: one a device, of no fixed capacity."""
    name = device_name(device)
    with _lock:
        if name not in _pools:
            _pools[name] = PagePool(name)
        return _pools[name]
