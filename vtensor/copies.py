"""Copies: of a whole virtual tensor what has memory, in memory and in files; of a view its data."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from vtensor.allocator.page_pool import PagePool
from vtensor.footprint import dense_blocks, merged
from vtensor.pools import default_pool
from vtensor.region import Region
from vtensor.watched import OnTouch, Watched, offset_of

__all__ = ["Reserve", "by_value", "deep_copy", "reduce", "restore"]

Int64 = npt.NDArray[np.int64]


class Reserve(Protocol):
    """As `VirtualTensor.reserve`, which this module does not know."""

    def __call__(
        self,
        meta: torch.Tensor,
        device: torch.device | str | None,
        on_touch: OnTouch,
        pool: PagePool | None,
        *,
        num_rows: int | None = None,
    ) -> Watched:
        """A new tensor."""


def deep_copy(tensor: Watched, memo: dict[int, Any], reserve: Reserve) -> torch.Tensor:
    """Of a whole virtual tensor another one, of the same pool, in which the same has memory; of a view its data.

    Raises
    ------
    RuntimeError
        The tensor is no leaf, as torch has it.
    OutOfPagesError
        Not enough page groups.
    """
    if not tensor.is_leaf:
        raise RuntimeError(
            "only tensors that are leaves of a graph can be deep-copied; use x.detach(), or a copy (.clone())"
        )
    copied = memo[id(tensor)] = _like(tensor, _copy(tensor, reserve) if _is_whole(tensor) else tensor.detach().clone())
    own = {name: value for name, value in vars(tensor).items() if not hasattr(Watched, name)}
    vars(copied).update(copy.deepcopy(own, memo))
    if tensor.grad is not None:
        copied.grad = copy.deepcopy(tensor.grad, memo)
    return copied


def reduce(tensor: Watched, protocol: Any, restore: Callable[..., torch.Tensor]) -> Any:
    """What to pickle: of a whole tensor what has memory, which `restore` is called with; a view as a plain tensor."""
    if not _is_whole(tensor) or _is_saving_in_old_format():
        return _like(tensor, tensor.detach().clone()).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
    spans = _spans(tensor)
    nothing = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    data = torch.cat([nothing, *_parts(tensor, spans)])
    most = _most(tensor)
    how = (tensor._on_touch, _num_rows(tensor), tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))
    return restore, (tuple(most.shape), most.stride(), most.dtype, how, spans.tolist(), data)


def restore(
    reserve: Reserve,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    how: tuple[OnTouch, int | None, bool, bool],
    spans: list[tuple[int, int]],
    data: torch.Tensor,
) -> torch.Tensor:
    """The virtual tensor that was pickled, on the device on which its data is loaded.

    Raises
    ------
    ValueError
        The data does not fit the tensor: the file is not one that was saved.
    """
    on_touch, num_rows, requires_grad, is_parameter = how
    if type(data) is not torch.Tensor or data.device.type not in ("cpu", "cuda"):  # map_location="meta", say
        rows = shape if num_rows is None else (num_rows, *shape[1:])
        tensor = torch.empty_strided(rows, strides, dtype=dtype, device=data.device)
        return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
    meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    tensor = reserve(meta, data.device, on_touch, None, num_rows=num_rows)
    blocks = np.array(spans, np.int64).reshape(-1, 2)
    starts, numbers = blocks[:, 0], blocks[:, 1]
    end = 0 if tensor._region is None else tensor._region.data_bytes
    if (starts < 0).any() or (numbers < 1).any() or (starts > end).any() or (numbers > end - starts).any():
        raise ValueError(f"a span of {spans} lies outside a tensor of {end:,} bytes")
    if data.dtype is not torch.uint8 or data.dim() != 1 or len(data) != numbers.sum():
        raise ValueError(f"a tensor of shape {tuple(data.shape)} and {data.dtype} is not what {len(spans)} spans hold")
    _put(tensor, blocks, torch.split(data, numbers.tolist()) if spans else ())
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def by_value(tensor: Watched) -> Any:
    """What to send to another process: bytes. Torch would send a handle, of a copy that is gone by then."""
    return pickle.loads, (pickle.dumps(tensor),)


def _is_whole(tensor: Watched) -> bool:
    """Whether this is all that there is of a virtual tensor, rather than a view of a part."""
    region = tensor._memory("a copy")
    if tensor.is_conj() or tensor.is_neg():
        return False
    if region is None:
        return tensor.numel() == 0  # otherwise it has moved to plain memory (`x.data = ...`, `module.half()`)
    if tensor._max_rows is not None:
        return True
    blocks = dense_blocks(offset_of(tensor), tensor.shape, tensor.stride(), tensor.element_size(), 1)
    is_all = blocks is not None and blocks.tolist() == [[0, region.data_bytes]]
    return is_all and tensor.numel() * tensor.element_size() == region.data_bytes and not region.owner


def _copy(tensor: Watched, reserve: Reserve) -> Watched:
    pool = None if tensor._region is None else tensor._region.space.pool
    if pool is default_pool(tensor.device):
        pool = None
    copied = reserve(_most(tensor), tensor.device, tensor._on_touch, pool, num_rows=_num_rows(tensor))
    spans = _spans(tensor)
    _put(copied, spans, _parts(tensor, spans))
    return copied


def _spans(tensor: Watched) -> Int64:
    """What of a whole tensor has memory: rows of (first byte, number of bytes)."""
    if tensor._region is None:
        return np.empty((0, 2), np.int64)
    return tensor._region.held_bytes(np.array([[0, tensor.numel() * tensor.element_size()]]))


def _parts(tensor: Watched, spans: Int64) -> list[torch.Tensor]:
    region = cast(Region, tensor._region)
    return [region.bytes_of(start, number) for start, number in spans.tolist()]


def _most(tensor: Watched) -> torch.Tensor:
    """Shape, strides and dtype; of a tensor that grows in place, when it has all of its rows."""
    shape = tensor.shape if tensor._max_rows is None else (tensor._max_rows, *tensor.shape[1:])
    return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _num_rows(tensor: Watched) -> int | None:
    return None if tensor._max_rows is None else len(tensor)


def _put(tensor: Watched, spans: Int64, parts: Iterable[torch.Tensor]) -> None:
    """Write bytes: spans of (first byte, number), and what is to be there."""
    if not len(spans):
        return
    region = cast(Region, tensor._region)
    region.commit(merged(spans, region.space.page_group_bytes), "a copy of a virtual tensor")
    for own, part in zip(_parts(tensor, spans), parts, strict=True):
        own.copy_(part)


def _like(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """A copy, as the tensor is a parameter, or requires grad."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _is_saving_in_old_format() -> bool:
    """Whether `torch.save` writes its old format, which reads data only after all objects are made: too late for us."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.serialization._legacy_save.__code__:
        frame = frame.f_back
    return frame is not None
