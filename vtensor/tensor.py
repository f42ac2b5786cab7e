"""VirtualTensor: a torch.Tensor over reserved addresses, by which no operation reaches memory that is not there."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from types import EllipsisType
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch

from vtensor.allocator import graveyard
from vtensor.allocator.address_space import AddressSpace, Shortage, out_of_pages
from vtensor.allocator.page_pool import PagePool
from vtensor.errors import ClosedError, UnmappedAccessError, VTensorError
from vtensor.footprint import footprint
from vtensor.streams import StreamUse, check_not_capturing
from vtensor.units import format_bytes

__all__ = ["OnTouch", "Region", "VirtualTensor"]

OnTouch = Literal["commit", "raise"]


class Region:
    """Reserved addresses as one torch storage, with the streams that use it.

    The memory lives as long as the *storage*, that is as long as any view of it, plain or virtual, and not as long as
    any tensor object: a `detach` in inference mode drops the tensor that one would have tied it to.
    """

    def __init__(self, pool: PagePool, device: torch.device, size_bytes: int, *, owner: str = "") -> None:
        graveyard.sweep()
        self.space = AddressSpace(pool, size_bytes)
        self.device = device
        self.owner = owner  # who alone commits and decommits; empty: every view may
        self.process_id = os.getpid()
        self.streams = StreamUse(device)
        self.content = pool.new_content()
        self.decommit_epoch = 0
        # Streams that may still be zeroing what they committed, and the event after it; by the event's id.
        self._zeroing: dict[int, tuple[int, Any]] = {}
        storage = torch._C._construct_storage_from_data_pointer(self.space.base, device, self.space.size_bytes)
        self._release = weakref.finalize(storage, _bury, self.space, self.streams, os.getpid())
        self._release.atexit = False  # at exit the process takes everything down at once
        self._storage = weakref.ref(storage)
        self._bytes: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def view(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        """A plain tensor over the region; sizes, strides and offset in elements."""
        if self._bytes is None:
            raise ClosedError("this memory was closed")
        return torch.empty(0, dtype=dtype, device=self.device).set_(
            self._bytes.untyped_storage(), offset, shape, strides
        )

    @property
    def is_viewed(self) -> bool:
        """Whether a tensor, plain or virtual, still uses the storage."""
        return self._release.alive

    def drop(self) -> None:
        """Let go of the storage; the memory goes back once no view is left and the device has finished."""
        self._bytes = None

    def commit(self, ranges: npt.NDArray[np.int64], what: str) -> int:
        """Commit page groups, in the order of the current stream; waits for dying memory before it gives up.

        Raises
        ------
        OutOfPagesError
            Not enough page groups; nothing was changed.
        """
        check_not_capturing(self.device, f"committing memory for {what}")
        graveyard.sweep()
        stream = self.streams.current()
        try:
            num_mapped = self.space.commit(ranges, content=self.content, stream=stream)
        except Shortage:
            graveyard.drain()
            try:
                num_mapped = self.space.commit(ranges, content=self.content, stream=stream)
            except Shortage as shortage:
                raise out_of_pages(self.space, what, shortage) from None
        if num_mapped and self.device.type == "cuda":
            event = torch.cuda.current_stream(self.device).record_event()
            self._zeroing[id(event)] = stream, event
        return num_mapped

    def use(self) -> None:
        """Note the current stream as a user, and let it wait until other streams have zeroed what they committed.

        Neighbours in a page group need not know of each other: whose stream commits it must not zero it afterwards. A
        capture waits for nothing, since torch starts it on an idle device.
        """
        current = self.streams.current()
        if self._zeroing and not torch.cuda.is_current_stream_capturing():
            for key, (stream, event) in list(self._zeroing.items()):
                if event.query():
                    self._zeroing.pop(key, None)
                elif stream != current:
                    torch.cuda.current_stream(self.device).wait_event(event)

    def decommit(self, ranges: npt.NDArray[np.int64], *, forget_content: bool) -> None:
        """Take page groups away, with which the device has finished; views check again what they can reach."""
        try:
            self.space.decommit(ranges, forget_content=forget_content)
        finally:
            self.decommit_epoch += 1  # afterwards: a view that looks meanwhile must look again


def _bury(space: AddressSpace, streams: StreamUse, process_id: int) -> None:
    """Give up the memory of a dead storage as soon as the device has finished with it."""
    if os.getpid() != process_id:
        return  # a forked child must not touch the parent's memory
    if streams.device.type == "cpu":
        space.close()
    elif torch.cuda.is_current_stream_capturing():
        graveyard.bury(streams.record, space.close)
    else:
        graveyard.bury(streams.record(), space.close)
        graveyard.sweep()


class _Effect(Enum):
    COMPOSITE = "is made of other operators"
    VIEW = "returns views, reads nothing"
    RESHAPE = "makes its first argument another view, reads nothing"
    METADATA = "reads and writes nothing"
    ACCESS = "reads or writes its arguments"
    REFUSED = "would move the tensor away from its addresses"


_METADATA_OPERATORS = {
    "aten::empty_like",
    "aten::full_like",
    "aten::is_pinned",
    "aten::is_same_size",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::new_full",
    "aten::new_ones",
    "aten::new_zeros",
    "aten::ones_like",
    "aten::rand_like",
    "aten::randint_like",
    "aten::randn_like",
    "aten::zeros_like",
}
_VIEW_OPERATORS = {"aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::_unsafe_view"}  # not in their schemas
_REFUSED_OPERATORS = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::record_stream"}


@cache
def _effect(func: Any) -> _Effect:
    """What an operator does to the memory of its arguments, from its schema."""
    name = func._schema.name
    if name in _REFUSED_OPERATORS:
        return _Effect.REFUSED
    if func._can_decompose():
        return _Effect.COMPOSITE  # inference mode leaves them whole, and reshape, to, contiguous may view or may copy
    if name in _METADATA_OPERATORS:
        return _Effect.METADATA
    if torch.Tag.inplace_view in func.tags:
        return _Effect.RESHAPE
    if name in _VIEW_OPERATORS:
        return _Effect.VIEW
    aliases = [value.alias_info for value in func._schema.returns]
    if aliases and all(alias is not None and not alias.is_write for alias in aliases):
        return _Effect.VIEW
    return _Effect.ACCESS


@cache
def _out_names(func: Any) -> tuple[str, ...]:
    """The ``out=`` arguments of an operator."""
    return tuple(argument.name for argument in func._schema.arguments if argument.is_out)


def _all_tensors(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _all_tensors(argument)


def _virtual_tensors(arguments: Any) -> Iterator[VirtualTensor]:
    return (tensor for tensor in _all_tensors(arguments) if isinstance(tensor, VirtualTensor))


def _touching(name: str) -> Any:
    """A method of `torch.Tensor` that reads the value, also where torch does not ask for it by an operator."""
    method = getattr(torch.Tensor, name)

    def read(self: VirtualTensor) -> Any:
        self._touch(name)
        return method(self)

    read.__name__, read.__doc__ = name, method.__doc__
    return read


class _Absent:
    """An attribute of the base class that a subclass does not have."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError("not for virtual tensors")


_TENSOR_DATA: Any = torch.Tensor.data


class VirtualTensor(torch.Tensor):
    """A tensor whose addresses are reserved at once and whose memory is mapped on demand.

    It is an ordinary strided tensor, which kernels take as it is. Before an operation reads or writes it, the page
    groups that the operation may touch are committed (``on_touch="commit"``; they read as zeros), or the operation is
    refused with `UnmappedAccessError` if one is missing (``on_touch="raise"``). Views are virtual too; results of
    arithmetic are plain tensors. A raw pointer taken with `data_ptr` is not watched: `commit` first.

    Made by `vtensor.empty` and by `KVCacheManager.layer`, never by its constructor.
    """

    _region: Region | None = None
    _on_touch: OnTouch = "commit"
    _seen_epoch: int = -1

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, *args: object, **kwargs: object) -> VirtualTensor:
        """Refuse: there is no storage to be a view of."""
        raise TypeError("VirtualTensor has no constructor: use vtensor.empty(...)")

    @staticmethod
    def wrap(plain: torch.Tensor, region: Region | None, on_touch: OnTouch) -> VirtualTensor:
        """A virtual tensor over a plain view of a region (None: of an empty tensor)."""
        tensor = torch.Tensor._make_subclass(VirtualTensor, plain, plain.requires_grad)
        tensor._region = region
        tensor._on_touch = on_touch
        tensor._seen_epoch = -1
        return tensor

    # -- operations -----------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator below autograd, once its memory is there."""
        kwargs = kwargs or {}
        effect = _effect(func)
        if effect is _Effect.COMPOSITE:
            return func.decompose(*args, **kwargs)
        if effect is _Effect.ACCESS:
            for tensor in _virtual_tensors((*args, *kwargs.values())):
                tensor._touch(func)
            if kwargs and any(True for _ in _virtual_tensors(kwargs.get(name) for name in _out_names(func))):
                return _write_out(func, args, kwargs)
        elif effect is _Effect.REFUSED:
            raise VTensorError(
                f"{func} is not for virtual tensors: their storage never moves; use .plain() or a copy (.clone())"
            )
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        parent = args[0] if args else None
        if isinstance(parent, VirtualTensor):
            if effect is _Effect.RESHAPE:
                parent._seen_epoch = -1
            elif effect is _Effect.VIEW:
                return _map_tensors(lambda view: VirtualTensor.wrap(view, parent._region, parent._on_touch), result)
        return result

    def _touch(self, operation: Any) -> None:
        """Make sure that every byte of this view has memory behind it."""
        region = self._region
        if region is None:
            return
        if os.getpid() != region.process_id:
            region.space.check_open()  # raises: a forked child has nothing at these addresses
        region.use()
        epoch = region.decommit_epoch
        if self._seen_epoch == epoch:
            return
        ranges = self._footprint()
        missing = region.space.count_missing(ranges)
        if missing:
            if self._on_touch == "raise":
                raise self._unmapped(operation, ranges, missing)
            region.commit(ranges, f"{operation} on a virtual tensor of shape {tuple(self.shape)}")
        self._seen_epoch = epoch

    def _unmapped(self, operation: Any, ranges: npt.NDArray[np.int64], missing: int) -> UnmappedAccessError:
        region = cast(Region, self._region)
        table = region.space.arrays.table
        first = next(place for start, count in ranges for place in range(start, start + count) if table[place] == 0)
        size = region.space.page_group_bytes
        address = region.space.base + first * size
        return UnmappedAccessError(
            f"{operation} on a virtual tensor of shape {tuple(self.shape)} touches {missing} page groups without "
            f"memory, the first at bytes {first * size:,}..{(first + 1) * size:,} ({address:#x}) of its reservation; "
            "commit them first (.commit(), or step() of a cache), or use on_touch='commit'"
        )

    def _footprint(self) -> npt.NDArray[np.int64]:
        region = cast(Region, self._region)
        return footprint(
            int(self.storage_offset()), self.shape, self.stride(), self.element_size(), region.space.page_group_bytes
        )

    # -- memory ---------------------------------------------------------------------------------------------------

    def commit(self, rows: int | slice | tuple[Any, ...] | None = None) -> VirtualTensor:
        """Put memory below this tensor, or below a part of it; what has memory already keeps it.

        Parameters
        ----------
        rows : int, slice or tuple, optional
            None: all. An int n: the first n rows. Otherwise a basic index, as in ``x[rows]``: slices, ints, ``...``.

        Returns
        -------
        VirtualTensor
            This tensor.

        Raises
        ------
        ValueError
            Not a basic index, or a number of rows that the tensor does not have.
        IndexError
            A basic index out of range.
        VTensorError
            The memory is a KV cache's, where only `step` commits.
        OutOfPagesError
            Not enough page groups; nothing was changed.
        """
        part = self if rows is None else cast(VirtualTensor, self.detach()[_basic_index(rows, self.shape)])
        region = self._region
        if region is not None:
            if region.owner:
                raise VTensorError(f"this memory belongs to a {region.owner}, where only step() commits")
            region.commit(part._footprint(), f"commit of shape {tuple(part.shape)}")
        return self

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory behind this view's page groups."""
        return self._resident_and_reserved_bytes()[0]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of addresses that this view's page groups span, with memory or without."""
        return self._resident_and_reserved_bytes()[1]

    def _resident_and_reserved_bytes(self) -> tuple[int, int]:
        if self._region is None:
            return 0, 0
        space, ranges = self._region.space, self._footprint()
        reserved = int(ranges[:, 1].sum())
        return (reserved - space.count_missing(ranges)) * space.page_group_bytes, reserved * space.page_group_bytes

    def residency(self) -> npt.NDArray[np.bool_]:
        """For each page group of this view, in ascending order of addresses, whether it has memory."""
        if self._region is None:
            return np.empty(0, bool)
        table = self._region.space.arrays.table
        parts = [table[first : first + count] != 0 for first, count in self._footprint()]
        return np.concatenate(parts) if parts else np.empty(0, bool)

    def record_stream(self, stream: Any) -> None:
        """Declare that a stream uses this memory: it is not unmapped before that stream has finished with it."""
        if self._region is not None:
            self._region.streams.add(stream)

    def plain(self) -> torch.Tensor:
        """The same memory as a plain tensor: no checks, no cost. Reading what is not committed ends the process."""
        with torch._C._DisableTorchDispatch():
            return self.as_subclass(torch.Tensor)

    # -- exits to Python and to other libraries ---------------------------------------------------------------------

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """Header, and the values only where all of them have memory."""
        header = f"shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'"
        if self._region is None or self._region.space.closed:
            return f"VirtualTensor({header})"
        resident, reserved = self._resident_and_reserved_bytes()
        header += f", reserved={format_bytes(reserved)}, resident={format_bytes(resident)}"
        if resident < reserved or os.getpid() != self._region.process_id:
            return f"VirtualTensor({header})"
        return f"VirtualTensor({header},\n{self.plain().detach()!r})"

    def __format__(self, spec: str) -> str:
        """Format the value where a format is asked for, and a header otherwise."""
        return format(self.item(), spec) if spec and self.dim() == 0 else object.__format__(self, spec)

    # torch.tensor([x[0], x[1]]) calls these and then bypasses the dispatcher.
    __bool__, __int__, __float__, __complex__, __index__ = map(
        _touching, ("__bool__", "__int__", "__float__", "__complex__", "__index__")
    )

    def tolist(self) -> Any:
        """Values as nested lists."""
        self._touch("tolist")
        return self.plain().tolist()

    def numpy(self, *, force: bool = False) -> npt.NDArray[Any]:
        """The same memory as an array (host only, as for any tensor)."""
        self._touch("numpy")
        return self.plain().numpy(force=force)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self._touch("__dlpack__")
        return self.plain().__dlpack__(*args, **kwargs)

    __dlpack_c_exchange_api__ = _Absent()  # it would hand out the memory behind our back

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """As of any tensor on a GPU."""
        interface: dict[str, Any] = self.plain().detach().__cuda_array_interface__  # an AttributeError on the host
        self._touch("__cuda_array_interface__")
        return interface

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor; setting it moves this tensor to the memory of another one, plain or virtual."""
        return cast(torch.Tensor, _TENSOR_DATA.__get__(self))

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        _TENSOR_DATA.__set__(self, other)
        self._region, self._on_touch, self._seen_epoch = None, "commit", -1
        if isinstance(other, VirtualTensor):
            self._region, self._on_touch = other._region, other._on_touch

    def __copy__(self) -> torch.Tensor:
        """Another tensor over the same memory."""
        return self.detach().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain copy of this view's data, not of the whole storage."""
        copied = memo[id(self)] = self._plain_copy()
        if self.is_leaf and self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain tensor of this view's data, not of the whole storage."""
        return self._plain_copy().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _plain_copy(self) -> torch.Tensor:
        copied = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(copied, self.requires_grad)
        return copied.requires_grad_(self.requires_grad)

    def share_memory_(self) -> VirtualTensor:
        """Refused: other processes cannot see these addresses."""
        raise VTensorError("a virtual tensor cannot move to shared memory: share a copy, x.clone().share_memory_()")


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return function(result)
    if isinstance(result, list | tuple):
        return type(result)(_map_tensors(function, item) for item in result)
    return result


def _write_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator with ``out=``, which torch resizes where it does not fit: here, into what has no memory."""
    names = [name for name in _out_names(func) if name in kwargs]
    with torch._C._DisableTorchDispatch():
        stand_ins = {name: _map_tensors(_stand_in, kwargs[name]) for name in names}
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


def _stand_in(target: torch.Tensor) -> torch.Tensor:
    """What an operator may write to instead: the same memory and no byte more, or memory of its own."""
    if not isinstance(target, VirtualTensor):
        return target
    part = torch.empty(0, dtype=target.dtype, device=target.device)
    if target.numel() == 0 or not target.is_contiguous() or target.is_conj() or target.is_neg():
        return part
    storage = torch._C._construct_storage_from_data_pointer(target.data_ptr(), target.device, target.nbytes)
    return part.set_(storage, 0, target.shape, target.stride())


def _basic_index(rows: Any, shape: torch.Size) -> Any:
    """The index that `VirtualTensor.commit` means, which reads nothing."""
    if isinstance(rows, int | np.integer) and not isinstance(rows, bool):
        if not shape or not 0 <= rows <= shape[0]:
            raise ValueError(f"rows={rows!r} must be 0 to the number of rows; the shape is {tuple(shape)}")
        return slice(int(rows))
    parts = rows if isinstance(rows, tuple) else (rows,)
    if not all(isinstance(part, int | slice | EllipsisType) and not isinstance(part, bool) for part in parts):
        raise ValueError(f"rows={rows!r} is no basic index: use a number of rows, a slice, or a tuple of these")
    return rows
