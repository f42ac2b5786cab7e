"""Creation of virtual tensors, as torch creates tensors."""

from __future__ import annotations

import math
import operator
import os
import threading
from collections.abc import Sequence
from typing import Any, get_args

import torch

from vtensor.allocator.page_pool import PagePool
from vtensor.devices import device_name, resolve_device
from vtensor.region import Region
from vtensor.tensor import OnTouch, VirtualTensor

__all__ = ["empty"]

_pools: dict[str, PagePool] = {}
_lock = threading.Lock()


def _forget() -> None:
    """In a forked child: pools are the parent's, and so is a lock that another of its threads held."""
    global _pools, _lock, _inherited
    _inherited, _pools, _lock = _pools, {}, threading.Lock()


_inherited: dict[str, PagePool] = {}  # kept alive in a child, where they can serve nobody
os.register_at_fork(after_in_child=_forget)


def _default_pool(device: torch.device) -> PagePool:
    """The pool of tensors that name none: one a device, of no fixed capacity."""
    name = device_name(device)
    with _lock:
        if name not in _pools:
            _pools[name] = PagePool(name)
        return _pools[name]


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    on_touch: OnTouch = "commit",
    pool: PagePool | None = None,
    requires_grad: bool = False,
) -> VirtualTensor:
    """Reserve a tensor of any size: addresses now, memory where and when it is touched. It reads as zeros.

    Operations commit the page groups that they read or write. An index tensor (``x[tensor]``, `embedding`) touches
    the whole tensor that it indexes; slices and ints touch what they name.

    Parameters
    ----------
    *size : int or sequence of int
        As for `torch.empty`.
    dtype, device, requires_grad
        As for `torch.empty`; the device is a CPU or a CUDA device.
    on_touch : {"commit", "raise"}
        What an operation does that reads or writes where no memory is: commit it, or raise `UnmappedAccessError`.
    pool : PagePool, optional
        Where page groups come from. Default: one pool a device, without a fixed capacity.

    Returns
    -------
    VirtualTensor
        Contiguous, of the given size.

    Raises
    ------
    ValueError
        A negative size, an unknown `on_touch`, or a pool of another device.
    ReservationError
        More addresses than are free.

    Examples
    --------
    >>> import torch, vtensor as vt
    >>> x = vt.empty(1 << 20, 1 << 18, dtype=torch.float32, device="cpu")
    >>> x.reserved_bytes == 1 << 40, x.resident_bytes
    (True, 0)
    >>> _ = x[1000, :4].fill_(1)
    >>> x[1000, :6].tolist(), x.resident_bytes
    ([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], 65536)
    """
    shape = _shape(size)
    if on_touch not in get_args(OnTouch):
        raise ValueError(f"on_touch={on_touch!r} must be one of {get_args(OnTouch)}")
    dtype = torch.empty(0, dtype=dtype, device="meta").dtype  # what torch makes of None, or of Python's float
    where = resolve_device(device)
    if pool is not None:
        if not isinstance(pool, PagePool):
            raise ValueError(f"pool={pool!r} must be a PagePool")
        pool.check_open()
        if pool.driver.device != device_name(where):
            raise ValueError(f"pool of {pool.driver.device} cannot hold a tensor on {where}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        nothing = torch.empty(shape, dtype=dtype, device=where, requires_grad=requires_grad)
        return VirtualTensor.wrap(nothing, None, on_touch)
    region = Region(pool or _default_pool(where), where, num_bytes)
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    tensor = VirtualTensor.wrap(region.view(dtype, 0, shape, strides), region, on_touch)
    region.drop()  # from here on the tensor and its views keep the memory
    tensor.requires_grad_(requires_grad)
    return tensor


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    dims = size[0] if len(size) == 1 and not hasattr(size[0], "__index__") else size
    shape = tuple(operator.index(dim) for dim in dims)
    if any(dim < 0 for dim in shape):
        raise ValueError(f"size={shape}: every dimension must be zero or more")
    return shape
