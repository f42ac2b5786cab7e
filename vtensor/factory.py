"""Creation of virtual tensors, as torch creates tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, get_args

import torch

from vtensor.allocator.page_pool import PagePool
from vtensor.eager import eager
from vtensor.effects import is_zero
from vtensor.errors import ReservationError
from vtensor.region import region_of
from vtensor.tensor import VirtualTensor
from vtensor.watched import OnTouch

__all__ = ["as_virtual", "empty", "empty_like", "empty_strided", "full", "zeros", "zeros_like"]

_MOST_ELEMENTS = 1 << 48  # a process has 2^47 bytes of addresses; beyond 2^63 torch cannot count


@eager
def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    on_touch: OnTouch = "commit",
    pool: PagePool | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    max_rows: int | None = None,
) -> VirtualTensor:
    """Reserve a tensor of any size: addresses now, memory where and when it is touched. It reads as zeros.

    Operations commit the page groups that they write to. What they read where nothing was ever written is zeros, which
    cost no memory: on a CPU nothing at all, on a GPU a read-only mapping (some 30 us a page group, once). Slices, ints
    and index tensors touch what they name; an index tensor on a GPU is read for that, which waits for the device. One
    operation may read 1 TiB of zeros of a tensor, and not more.

    Parameters
    ----------
    *size : int or sequence of int
        As for `torch.empty`.
    dtype, device, layout, requires_grad, pin_memory, memory_format
        As for `torch.empty`. The device is a CPU or a CUDA device, the layout strided, and nothing is pinned.
    on_touch : {"commit", "raise"}
        Where no memory is: commit it for writes and show zeros to reads, or raise `UnmappedAccessError` for both.
    pool : PagePool, optional
        Where page groups come from. Default: one pool a device, without a fixed capacity.
    max_rows : int, optional
        Reserve addresses for so many rows (dimension 0), of which the tensor has `size[0]` at first: it grows in place,
        by `VirtualTensor.append_` and `VirtualTensor.resize_rows_`.

    Returns
    -------
    VirtualTensor
        Of the given size; contiguous unless `memory_format` says otherwise.

    Raises
    ------
    ValueError
        A negative size, an option that is not for virtual tensors, or a pool of another device.
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
    _check_options(layout, pin_memory)
    if max_rows is not None:
        _check_max_rows(max_rows, shape, memory_format)
    # What torch makes of the options, without memory.
    meta = torch.empty(
        shape if max_rows is None else (max_rows, *shape[1:]), dtype=dtype, device="meta", memory_format=memory_format
    )
    tensor = VirtualTensor.reserve(meta, device, on_touch, pool, num_rows=None if max_rows is None else shape[0])
    return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]


@eager
def zeros(*size: int | Sequence[int], **options: Any) -> VirtualTensor:
    """As `empty`, whose tensors read as zeros; the name says that one relies on it.

    Parameters
    ----------
    *size, **options
        As for `empty`.

    >>> import vtensor as vt
    >>> vt.zeros(1 << 20, 1 << 18, device="cpu")[7, :3].tolist()
    [0.0, 0.0, 0.0]
    """
    return empty(*size, **options)


@eager
def full(size: Sequence[int], fill_value: complex, *, requires_grad: bool = False, **options: Any) -> VirtualTensor:
    """A tensor filled with a value. Unless that is 0, all of it is committed.

    Parameters
    ----------
    size : sequence of int
    fill_value : number
        Also says the dtype where none is given, as for `torch.full`.
    requires_grad, **options
        As for `empty`.

    Raises
    ------
    OutOfPagesError
        Not enough page groups for all of it.
    """
    shape = _shape((size,))
    dtype = torch.full((), fill_value, dtype=options.pop("dtype", None), device="meta").dtype
    tensor = empty(*shape, dtype=dtype, **options)
    if not is_zero(fill_value):
        tensor.fill_(fill_value)
    return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]


@eager
def empty_like(
    input: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    on_touch: OnTouch = "commit",
    pool: PagePool | None = None,
    layout: torch.layout | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> VirtualTensor:
    """A virtual tensor like another tensor, plain or virtual: shape, dtype, device, and strides where they are dense.

    Parameters
    ----------
    input : Tensor
        Its values are not read.
    dtype, device, layout, requires_grad, pin_memory, memory_format
        As for `torch.empty_like`.
    on_touch, pool
        As for `empty`; not taken over from `input`.
    """
    if not isinstance(input, torch.Tensor):
        raise ValueError(f"input={input!r} must be a tensor")
    _check_options(input.layout if layout is None else layout, pin_memory)
    meta = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device="meta")
    meta = torch.empty_like(meta, dtype=dtype, memory_format=memory_format)
    tensor = VirtualTensor.reserve(meta, input.device if device is None else device, on_touch, pool)
    return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]


@eager
def zeros_like(input: torch.Tensor, **options: Any) -> VirtualTensor:
    """As `empty_like`, whose tensors read as zeros.

    Parameters
    ----------
    input : Tensor
        Its values are not read.
    **options
        As for `empty_like`.
    """
    return empty_like(input, **options)


@eager
def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    on_touch: OnTouch = "commit",
    pool: PagePool | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> VirtualTensor:
    """A tensor with strides of one's own, as `torch.empty_strided`. It reads as zeros.

    Parameters
    ----------
    size, stride : sequence of int
        Strides in elements, none negative.
    dtype, device, layout, requires_grad, pin_memory
        As for `torch.empty_strided`.
    on_touch, pool
        As for `empty`.
    """
    shape = _shape((size,))
    _check_options(layout, pin_memory)
    strides = tuple(operator.index(step) for step in stride)
    if any(step < 0 for step in strides):
        raise ValueError(f"stride={strides}: none may be negative")
    meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return VirtualTensor.reserve(meta, device, on_touch, pool).requires_grad_(requires_grad)  # type: ignore[return-value]


@eager
def as_virtual(tensor: torch.Tensor, *, on_touch: OnTouch | None = None) -> VirtualTensor:
    """A virtual tensor over the memory of a tensor that lies in reserved addresses: the same memory, watched again.

    Parameters
    ----------
    tensor : Tensor
        Plain or virtual: a `plain` one, a layer of a cache, or what came back from DLPack or NumPy over such memory.
    on_touch : {"commit", "raise"}, optional
        As for `empty`. Default: "commit", or "raise" in a KV cache, where only `step` commits.

    Returns
    -------
    VirtualTensor
        Of the same shape and strides, detached.

    Raises
    ------
    ValueError
        The tensor lies in other memory, or ``on_touch="commit"`` is not for it.

    Examples
    --------
    >>> import vtensor as vt
    >>> x = vt.empty(1 << 40, device="cpu")
    >>> y = vt.as_virtual(x[5:].plain())
    >>> y.reserved_bytes == x.reserved_bytes, y[:3].tolist()
    (True, [0.0, 0.0, 0.0])
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise ValueError(f"{type(tensor).__name__} is no strided tensor, which alone can lie in reserved addresses")
    region = region_of(tensor)
    if region is None:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} lies in memory that is not vtensor's; copy it "
            "into one from vtensor.empty(...)"
        )
    if on_touch is None:
        on_touch = "raise" if region.owner else "commit"
    if on_touch not in get_args(OnTouch) or (region.owner and on_touch != "raise"):
        allowed = ("raise",) if region.owner else get_args(OnTouch)
        raise ValueError(f"on_touch={on_touch!r} must be one of {allowed} for this memory")
    plain = tensor.plain() if isinstance(tensor, VirtualTensor) else tensor
    return VirtualTensor.wrap(plain.detach(), region, on_touch)


def _check_options(layout: torch.layout, pin_memory: bool) -> None:
    if layout is not torch.strided:
        raise ValueError(f"layout={layout} must be torch.strided: virtual tensors are dense addresses")
    if pin_memory:
        raise ValueError(f"pin_memory={pin_memory!r} must be False: page groups come and go")


def _check_max_rows(max_rows: int, shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    if not shape:
        raise ValueError(f"max_rows={max_rows!r} needs a dimension to grow: give a size")
    if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < max(shape[0], 1):
        raise ValueError(f"max_rows={max_rows!r} must be an integer of at least size[0]={shape[0]:,}, and of 1")
    if memory_format is not torch.contiguous_format:
        raise ValueError(f"memory_format={memory_format} must be torch.contiguous_format where max_rows is given")


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    dims = size[0] if len(size) == 1 and not hasattr(size[0], "__index__") else size
    shape = tuple(operator.index(dim) for dim in dims)
    if any(dim < 0 for dim in shape):
        raise ValueError(f"size={shape}: every dimension must be zero or more")
    if math.prod(shape) >= _MOST_ELEMENTS or max(shape, default=0) >= 1 << 63:
        raise ReservationError(f"size={shape} is more than the 128 TiB of addresses that a process has")
    return shape
