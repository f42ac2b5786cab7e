"""Indexing: which page groups of a tensor an operator with index tensors reads or writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vtensor.footprint import footprint_at

__all__ = ["indexed_ranges", "is_indexed", "is_sparse_addition", "unread_indices"]

Int64 = npt.NDArray[np.int64]
# Where the parts begin that are accessed, in elements, and the shape and strides of each.
_Parts = tuple[Int64, tuple[int, ...], tuple[int, ...]]
_MOST_BLOCKS = 1 << 24  # beyond that, to find them takes longer than to commit the whole


class _Unread(threading.local):
    depth = 0


_unread = _Unread()


class unread_indices(ContextDecorator):
    """Within it, index tensors are not read: an operation with one is taken to touch all of the view that it indexes.

    To know which page groups an index tensor on a GPU names, it has to be read, which waits for the device. Here the
    whole view is committed, or shown as zeros to a read, instead. (What is committed as a whole beforehand, with
    `VirtualTensor.commit`, costs neither.) Of this thread only, so not of a backward, which has threads of its own; may
    be nested. An index out of range is for the kernel to find, as it is with any tensor.

    Examples
    --------
    >>> import torch, vtensor as vt
    >>> x = vt.empty(1 << 20, device="cpu")
    >>> with vt.unread_indices():
    ...     x[:65_536][torch.tensor([3, 5])] = 1
    >>> x.resident_bytes
    262144
    """

    def __enter__(self) -> None:
        _unread.depth += 1

    def __exit__(self, *error: object) -> None:
        _unread.depth -= 1


def _as_numpy(index: torch.Tensor) -> npt.NDArray[Any]:
    """Values of an index tensor. On a GPU this waits for it."""
    index = index.detach().cpu()
    return (index if type(index) is torch.Tensor else index.clone()).numpy()  # a virtual one is only read


def _offsets(
    values: npt.NDArray[Any], dim: int, size: int, stride: int, tensor: torch.Tensor, *, wraps: bool
) -> tuple[Int64, npt.NDArray[np.bool_] | None]:
    """Offsets of indices along a dimension, and which of them are in range, where any is not.

    On the host torch finds the others before it gets there. `wraps`: whether negative ones count from the end.

    Raises
    ------
    IndexError
        One is out of range, of a tensor on a GPU, whose kernel would find it as well, and end the process's context.
    """
    values = values.astype(np.int64)
    is_good = (values >= (-size if wraps else 0)) & (values < size)
    if not is_good.all() and tensor.device.type != "cpu":
        bad = int(values.ravel()[(~is_good).argmax()])
        raise IndexError(f"index {bad} is out of bounds for dimension {dim} of {size}")
    if wraps:
        values = np.where(values < 0, values + size, values)
    return values * stride, None if is_good.all() else is_good


def _along(tensor: torch.Tensor, dim: Any, index: torch.Tensor, *, wraps: bool = False) -> _Parts | None:
    """Slices along a dimension."""
    if not isinstance(dim, int) or tensor.dim() == 0 or not -tensor.dim() <= dim < tensor.dim():
        return None
    dim %= tensor.dim()
    shape, strides = tuple(tensor.shape), tensor.stride()
    offsets, is_good = _offsets(_as_numpy(index).ravel(), dim, shape[dim], strides[dim], tensor, wraps=wraps)
    rest = [other for other in range(tensor.dim()) if other != dim]
    offsets = offsets if is_good is None else offsets[is_good]
    return offsets, tuple(shape[other] for other in rest), tuple(strides[other] for other in rest)


def _along_from_both_ends(tensor: torch.Tensor, dim: Any, index: torch.Tensor) -> _Parts | None:
    return _along(tensor, dim, index, wraps=True)


def _along_reduced(tensor: torch.Tensor, dim: Any, index: torch.Tensor, include_self: Any) -> _Parts | None:
    """As `_along`. Without the values that were there a host's kernel fills first, from the end too, then looks."""
    return _along(tensor, dim, index, wraps=include_self is False and tensor.device.type == "cpu")


def _along_elements(tensor: torch.Tensor, dim: Any, index: torch.Tensor) -> _Parts | None:
    """Elements, each at its own place along a dimension."""
    if not isinstance(dim, int) or index.dim() != tensor.dim() or tensor.dim() == 0:
        return None
    if not -tensor.dim() <= dim < tensor.dim():
        return None
    dim %= tensor.dim()
    if any(index.shape[other] > tensor.shape[other] for other in range(tensor.dim()) if other != dim):
        return np.empty(0, np.int64), (), ()  # torch refuses it
    strides = tensor.stride()
    offsets, is_good = _offsets(_as_numpy(index), dim, tensor.shape[dim], strides[dim], tensor, wraps=False)
    for other in range(tensor.dim()):
        if other != dim:
            steps = np.arange(index.shape[other], dtype=np.int64) * strides[other]
            offsets = offsets + steps.reshape([-1 if axis == other else 1 for axis in range(tensor.dim())])
    return (offsets.ravel() if is_good is None else offsets[is_good]), (), ()


def _by_indices(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> _Parts | None:
    """As ``tensor[indices]`` takes index tensors, masks among them."""
    values: list[npt.NDArray[Any] | None] = []
    for index in indices:
        if index is None:
            values.append(None)
        elif index.dtype in (torch.bool, torch.uint8):
            values.extend(_as_numpy(index).nonzero() if index.dim() else [None])
            if index.dim() == 0:
                return None
        else:
            values.append(_as_numpy(index).astype(np.int64))
    if len(values) > tensor.dim():
        return np.empty(0, np.int64), (), ()
    values.extend([None] * (tensor.dim() - len(values)))
    if all(value is None for value in values):
        return None
    given = [(dim, value) for dim, value in enumerate(values) if value is not None]
    try:
        arrays = [given[0][1]] if len(given) == 1 else np.broadcast_arrays(*(value for _, value in given))
    except ValueError:
        return np.empty(0, np.int64), (), ()  # torch refuses it
    shape, strides = tuple(tensor.shape), tensor.stride()
    offsets: Any = 0
    is_good = None
    for (dim, _), array in zip(given, arrays, strict=True):
        along, is_within = _offsets(array, dim, shape[dim], strides[dim], tensor, wraps=True)
        offsets = offsets + along
        if is_within is not None:
            is_good = is_within if is_good is None else is_good & is_within
    if is_good is not None:
        offsets = offsets[is_good]
    rest = [dim for dim, value in enumerate(values) if value is None]
    return offsets.ravel(), tuple(shape[dim] for dim in rest), tuple(strides[dim] for dim in rest)


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> _Parts | None:
    return _along(tensor, 0, index)


def _elements(tensor: torch.Tensor, index: torch.Tensor) -> _Parts | None:
    """Elements by their number in order of rows."""
    values, is_good = _offsets(_as_numpy(index).ravel(), 0, tensor.numel(), 1, tensor, wraps=True)
    values = values if is_good is None else values[is_good]
    places = np.unravel_index(values, tuple(tensor.shape)) if tensor.dim() else ()
    offsets = np.zeros(len(values), np.int64)
    for place, stride in zip(places, tensor.stride(), strict=True):
        offsets += place * stride
    return offsets, (), ()


def _by_coordinates(tensor: torch.Tensor, other: torch.Tensor) -> _Parts | None:
    """What a sparse tensor, which is added in place, has values for."""
    is_coo = other.layout is torch.sparse_coo
    if not is_coo or tensor.shape != other.shape or tensor.dtype != other.dtype or not tensor.is_contiguous():
        return None  # torch refuses it, or works on a copy, all of which it copies back
    places = _as_numpy(other._indices())
    strides, number = tensor.stride(), len(places)
    sizes = np.array(tensor.shape[:number], np.int64).reshape(number, 1)
    is_bad = (places < 0) | (places >= sizes)
    if is_bad.any():  # no kernel looks, on no device
        raise IndexError(
            f"a sparse tensor of shape {tuple(other.shape)} has values at {places[:, is_bad.any(axis=0)][:, 0]}"
        )
    offsets = (places * np.array(strides[:number], np.int64).reshape(number, 1)).sum(axis=0)
    return offsets, tuple(tensor.shape[number:]), strides[number:]


_ADD = torch.ops.aten.add_.Tensor

# By operator: the names of its arguments after the tensor that say where, and who understands them.
_OPERATORS: dict[str, tuple[tuple[str, ...], Callable[..., _Parts | None]]] = {
    **dict.fromkeys(("aten::index", "aten::_unsafe_index"), (("indices",), _by_indices)),
    **dict.fromkeys(("aten::index_put_", "aten::_index_put_impl_"), (("indices",), _by_indices)),
    **dict.fromkeys(
        ("aten::index_select", "aten::index_copy_", "aten::index_add_"),
        (("dim", "index"), _along),
    ),
    "aten::index_reduce_": (("dim", "index", "include_self"), _along_reduced),
    "aten::index_fill_": (("dim", "index"), _along_from_both_ends),
    **dict.fromkeys(
        ("aten::gather", "aten::scatter_", "aten::scatter_add_", "aten::scatter_reduce_"),
        (("dim", "index"), _along_elements),
    ),
    **dict.fromkeys(
        ("aten::embedding", "aten::embedding_renorm_", "aten::_embedding_bag", "aten::_embedding_bag_forward_only"),
        (("indices",), _rows),
    ),
    **dict.fromkeys(("aten::take", "aten::put_"), (("index",), _elements)),
    "aten::add_": (("other",), _by_coordinates),
    "aten::sparse_mask": (("mask",), _by_coordinates),
}


@cache
def _positions(func: Any) -> dict[str, int]:
    return {argument.name: position for position, argument in enumerate(func._schema.arguments)}


def is_sparse_addition(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator adds a sparse tensor to a strided one in place."""
    return func is _ADD and len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].layout is torch.sparse_coo


def is_indexed(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator accesses its first argument where index tensors say, and nowhere else; and may read them."""
    if func is _ADD:
        if not is_sparse_addition(func, args):
            return False
    elif not _has_indices(func):
        return False
    return not _unread.depth


@cache
def _has_indices(func: Any) -> bool:
    return func._schema.name in _OPERATORS and func._schema.name != "aten::add_"  # that has them if it is sparse


# Of 16 bits, whose kernels on a host compute with a wider copy of everything, which they copy back.
_NARROW = (torch.float16, torch.bfloat16)
_WIDENED = ("aten::index_add_", "aten::scatter_", "aten::scatter_add_", "aten::scatter_reduce_")


def _is_exact_on_hosts(func: Any, tensor: torch.Tensor, has_readable_holes: bool) -> bool:
    """Whether a host's kernels touch nothing but what the indices name, or read it where holes can be read."""
    if tensor.dtype in _NARROW and func._schema.name in _WIDENED:
        return False
    return has_readable_holes or tensor.is_contiguous()  # some kernels read a contiguous copy of everything


def _is_exact_on_gpus(func: Any, tensor: torch.Tensor, value_of: Callable[[str], Any]) -> bool:
    """Whether a GPU's kernels touch nothing but what the indices name.

    Those that sort the indices, to add in a fixed order, work on a contiguous copy, all of which they copy back where
    the tensor is not; and one mask is a `masked_fill_`, which stores everywhere. The others go by the strides.
    """
    name = func._schema.name
    if not func._schema.is_mutable:
        return tensor.is_contiguous() or "embedding_bag" not in name
    if value_of("accumulate") or torch.are_deterministic_algorithms_enabled():
        return False
    indices = value_of("indices") if "index_put" in name else ()
    return not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices or ())


def indexed_ranges(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], page_group_bytes: int, has_readable_holes: bool
) -> npt.NDArray[np.int64] | None:
    """The page groups of the first argument that an operator reads or writes.

    Reads the index tensors, for which it waits where they are on a GPU.

    Parameters
    ----------
    func : operator
        One that `is_indexed`.
    args, kwargs
        Of the call.
    page_group_bytes : int
    has_readable_holes : bool
        Whether more may be read than there is memory for.

    Returns
    -------
    ndarray of int64, shape [n, 2], or None
        As of `footprint`. None where it is not known, or would take long to find: any of them.

    Raises
    ------
    IndexError
        An index out of range, of a tensor on a GPU, whose kernels would end every later call with an error.
    """

    def value_of(name: str) -> Any:
        position = _positions(func).get(name, len(args))
        return args[position] if position < len(args) else kwargs.get(name)

    names, find = _OPERATORS[func._schema.name]
    tensor = args[0]
    if value_of("reduce") == "mean":
        return None  # it divides everything
    if tensor.device.type == "cpu":
        if not _is_exact_on_hosts(func, tensor, has_readable_holes):
            return None
    elif not _is_exact_on_gpus(func, tensor, value_of):
        return None
    parts = find(tensor, *(value_of(name) for name in names))
    if parts is None:
        return None
    offsets, shape, strides = parts
    return footprint_at(
        int(torch.Tensor.storage_offset(tensor)),
        offsets,
        shape,
        strides,
        tensor.element_size(),
        page_group_bytes,
        _MOST_BLOCKS,
    )
