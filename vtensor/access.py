"""Access: running an operator, once the memory that it writes to or reads is there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch

from vtensor.effects import out_names, written_arguments
from vtensor.errors import VTensorError
from vtensor.footprint import dense_blocks, merged
from vtensor.indexing import indexed_ranges, is_indexed, is_sparse_addition
from vtensor.region import Region
from vtensor.streams import is_capturing
from vtensor.watched import Named, Select, Watched, offset_of

__all__ = ["access", "copy_held", "map_tensors", "moves_nothing", "zero"]

_MOST_BLOCKS = 1024  # beyond that, to write zeros piece by piece takes longer than it saves


def access(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that reads or writes its arguments: what it writes to is committed, what it reads can be read."""
    positions, names = written_arguments(func)
    select: Select = functools.partial(indexed_ranges, func, args, kwargs) if is_indexed(func, args) else None
    reads: list[tuple[Watched, Select]] = []
    writes: list[tuple[Watched, Select]] = []
    for index, argument in enumerate(args):
        if isinstance(argument, Watched):
            (writes if index in positions else reads).append((argument, select if index == 0 else None))
        elif isinstance(argument, list | tuple):
            for tensor in _virtual_tensors(argument):
                (writes if index in positions else reads).append((tensor, None))
    for name, argument in kwargs.items():
        for tensor in _virtual_tensors((argument,)):
            (writes if name in names else reads).append((tensor, None))
    for tensor, part in reads:
        if tensor._on_touch == "raise":
            tensor._begin_reading(func, part)  # before anything is committed
    for tensor, part in writes:
        tensor._begin_writing(func, part)
    num_held = 0
    try:
        for tensor, part in reads:  # after what is written was committed, which takes zeros that are shown away
            if tensor._on_touch != "raise":
                num_held += tensor._begin_reading(func, part)
        if kwargs and any(True for _ in _virtual_tensors(kwargs.get(name) for name in out_names(func))):
            return _write_out(func, args, kwargs)
        if is_sparse_addition(func, args) and isinstance(args[0], Watched) and offset_of(args[0]):
            return _add_sparse(func, args, kwargs)
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)
    finally:
        for _ in range(num_held):
            Region.end_reading()


def _add_sparse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add a sparse tensor to a view that does not begin its storage: torch 2.13 counts where it begins twice."""
    target = args[0]
    with torch._C._DisableTorchDispatch():
        part = _out_buffer(target, set())
        if part.shape == target.shape:
            func(part, *args[1:], **kwargs)
        else:
            target.copy_(func(target.clone(), *args[1:], **kwargs))
    return target


def zero(tensor: torch.Tensor) -> bool:
    """Write zeros where a view has memory: the rest reads as zeros. False where to do it as usual is better."""
    if not isinstance(tensor, Watched) or tensor._memory("zero_") is None or tensor._on_touch == "raise":
        return False
    region = cast(Region, tensor._region)
    region.check_process()
    if tensor._is_seen(region) or is_capturing(region.device):
        return False  # a graph's replays would not know what has memory by then
    if not region.space.count_missing(tensor._footprint()):
        return False
    if _is_expanded(tensor):
        return False  # torch refuses it
    return tensor._zero_held(_MOST_BLOCKS)


def copy_held(target: torch.Tensor, source: Any) -> bool:
    """Copy what has memory of one virtual tensor to another of the same layout, and have zeros where nothing has.

    False, and nothing done, where to do it as usual is better.
    """
    if not isinstance(target, Watched) or not isinstance(source, Watched):
        return False
    to, of = target._memory("copy_"), source._memory("copy_")
    if to is None or of is None or "raise" in (target._on_touch, source._on_touch):
        return False
    if (target.shape, target.stride(), target.dtype) != (source.shape, source.stride(), source.dtype):
        return False
    if _is_expanded(target):
        return False  # torch refuses it
    if to is of:
        return offset_of(target) == offset_of(source) and (target.is_conj(), target.is_neg()) == (
            source.is_conj(),
            source.is_neg(),
        )
    if any(tensor.is_conj() or tensor.is_neg() for tensor in (target, source)):
        return False
    for region in (to, of):
        region.check_process()
    if of.space.is_full or is_capturing(to.device) or is_capturing(of.device):
        return False
    there, here = (
        dense_blocks(offset_of(tensor), tensor.shape, tensor.stride(), tensor.element_size(), 1)
        for tensor in (target, source)
    )
    if here is None or there is None or not len(here):
        return False
    spans = of.held_bytes(here)
    if spans[:, 1].sum() == here[0, 1]:
        return False  # all of it, in one operation
    moved = spans + np.array([there[0, 0] - here[0, 0], 0])
    to.commit(merged(moved, to.space.page_group_bytes), Named("copy_", target))
    target._zero_held(1)
    for (start, number), own in zip(spans.tolist(), moved[:, 0].tolist(), strict=True):
        to.bytes_of(own, number).copy_(of.bytes_of(start, number))
    return True


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def moves_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a resize is to the shape that is there."""
    if func is torch.ops.aten.resize_.default:
        shape = tuple(args[1])
    elif func is torch.ops.aten.resize_as_.default:
        shape = tuple(args[1].shape)
    else:
        return False
    memory_format = kwargs.get("memory_format", args[2] if len(args) > 2 else None)
    return tuple(args[0].shape) == shape and memory_format in (None, torch.preserve_format)


def _all_tensors(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _all_tensors(argument)


def _virtual_tensors(arguments: Any) -> Iterator[Watched]:
    return (tensor for tensor in _all_tensors(arguments) if isinstance(tensor, Watched))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    """A result of an operator with each tensor in it replaced."""
    if isinstance(result, torch.Tensor):
        return function(result)
    if isinstance(result, list | tuple):
        return type(result)(map_tensors(function, item) for item in result)
    return result


def _write_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator with ``out=``, which torch resizes where it does not fit: here, into what has no memory."""
    names = [name for name in out_names(func) if name in kwargs]
    others = (*args, *(value for name, value in kwargs.items() if name not in names))
    inputs = {id(tensor._region) for tensor in _virtual_tensors(others)}
    with torch._C._DisableTorchDispatch():
        stand_ins = {name: map_tensors(lambda out: _out_buffer(out, inputs), kwargs[name]) for name in names}
        try:
            func(*args, **{**kwargs, **stand_ins})
        except RuntimeError as error:
            if "not resizable" not in str(error):
                raise
            raise VTensorError(f"{func}: an out= does not fit the result; a virtual tensor is never resized") from error
        written = _all_tensors(stand_ins[name] for name in names)
        for target, source in zip(_all_tensors(kwargs[name] for name in names), written, strict=True):
            if target.shape != source.shape:
                raise VTensorError(
                    f"{func}: out= has shape {tuple(target.shape)}, the result has shape {tuple(source.shape)}; "
                    "a virtual tensor is never resized"
                )
            if target.numel() and target.data_ptr() != source.data_ptr():
                target.copy_(source)
    return kwargs[names[0]] if len(names) == 1 else tuple(kwargs[name] for name in names)


def _out_buffer(target: torch.Tensor, input_regions: set[int]) -> torch.Tensor:
    """What an operator may write to instead: the same memory and no byte more, or memory of its own.

    Where an input may overlap, only memory of its own will do: of a storage made for the purpose, torch cannot know.
    """
    if not isinstance(target, Watched):
        return target
    part = torch.empty(0, dtype=target.dtype, device=target.device)
    if (
        id(target._region) in input_regions
        or target.numel() == 0
        or not target.is_contiguous()
        or target.is_conj()
        or target.is_neg()
    ):
        return part
    storage = torch._C._construct_storage_from_data_pointer(target.data_ptr(), target.device, target.nbytes)
    return part.set_(storage, 0, target.shape, target.stride())
