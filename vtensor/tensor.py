"""VirtualTensor: a torch.Tensor over reserved addresses, by which no operation reaches memory that is not there."""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import EllipsisType, FrameType
from typing import Any, ClassVar, Literal, Protocol, cast, get_args

import numpy as np
import numpy.typing as npt
import torch

from vtensor.allocator.page_pool import PagePool
from vtensor.devices import device_name, resolve_device
from vtensor.eager import eager, skip_our_frames
from vtensor.effects import Effect, effect_of, fills_with_zeros, out_names, stays_within, written_arguments
from vtensor.errors import UnmappedAccessError, VTensorError
from vtensor.footprint import covered, dense_blocks, footprint, merged
from vtensor.indexing import indexed_ranges, is_indexed
from vtensor.pools import default_pool
from vtensor.region import READ_LIMIT_BYTES, Region
from vtensor.streams import is_capturing
from vtensor.units import format_bytes

__all__ = ["NotForGraphs", "OnTouch", "VirtualTensor"]

OnTouch = Literal["commit", "raise"]
_MOST_BLOCKS = 1024  # beyond that, to write zeros piece by piece takes longer than it saves
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
# From the size of a page group to ranges of them, or None for all of a view.
Select = Callable[[int], npt.NDArray[np.int64] | None] | None


_offset: Callable[[torch.Tensor], int] = torch.Tensor.storage_offset  # type: ignore[assignment]


def _is_tracing() -> bool:
    return torch._guards.TracingContext.try_get() is not None


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
        with self._reading(name):
            return method(self)

    read.__name__, read.__doc__ = name, method.__doc__
    return read


class _Absent:
    """An attribute of the base class that a subclass does not have."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError("not for virtual tensors")


_TENSOR_DATA: Any = torch.Tensor.data


# Where Dynamo meets this, a graph ends; a torch without it takes what is not for graphs as an error.
_GraphBreak: Any = getattr(torch._subclasses, "UnsupportedFakeTensorException", RuntimeError)


class NotForGraphs(VTensorError, _GraphBreak):  # type: ignore[misc]
    """What is asked for needs a tensor's memory, and a graph is being made, where it has none: the graph ends there."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.reason = message  # as Dynamo shows it


class GraphHooks(Protocol):
    """What this module asks of `vtensor.traced`, which knows it."""

    def key(self, tensor: VirtualTensor) -> torch.Tensor:
        """What names a tensor in graphs."""

    def is_named(self, tensor: VirtualTensor, key: torch.Tensor) -> bool:
        """Whether this is what names a tensor now."""

    def unflatten(self, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> VirtualTensor:
        """A tensor from its key."""

    def put_in_graph(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator does while a graph is made."""


class VirtualTensor(torch.Tensor):
    """A tensor whose addresses are reserved at once and whose memory is mapped on demand.

    It is an ordinary strided tensor, which kernels take as it is. Before an operation writes to it, the page groups
    that the operation may touch are committed; what an operation reads where none are is zeros
    (``on_touch="commit"``). Or the operation is refused with `UnmappedAccessError` if one is missing
    (``on_touch="raise"``). Views are virtual too; results of arithmetic are plain tensors. Operators that are not
    torch's own may write to all that they get, and so may who takes a view with `numpy` or DLPack: what they are given
    is committed. A raw pointer taken with `data_ptr` is not watched: `commit` first.

    Made by `vtensor.empty` and its like, `vtensor.as_virtual` and `KVCacheManager.layer`, never by its constructor.
    """

    _region: Region | None = None
    _on_touch: OnTouch = "commit"
    _seen_epoch: int = -1
    _max_rows: int | None = None  # of a tensor that grows in place
    # In a graph of torch.compile that is being made: what stands for the memory, and what a view is named by.
    _stand_in: Any = None
    _own_key: torch.Tensor | None = None
    graph_hooks: ClassVar[GraphHooks]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, *args: object, **kwargs: object) -> VirtualTensor:
        """Refuse: there is no storage to be a view of."""
        raise TypeError("VirtualTensor has no constructor: use vtensor.empty(...)")

    @staticmethod
    def wrap(plain: torch.Tensor, region: Region | None, on_touch: OnTouch, seen_epoch: int = -1) -> VirtualTensor:
        """A virtual tensor over a plain view of a region (None: of an empty tensor).

        `seen_epoch` is the region's `decommit_epoch` at which all of the view was seen to have memory.
        """
        tensor = torch.Tensor._make_subclass(VirtualTensor, plain, plain.requires_grad)
        tensor._region = region
        tensor._on_touch = on_touch
        tensor._seen_epoch = seen_epoch
        return tensor

    @staticmethod
    def reserve(
        meta: torch.Tensor,
        device: torch.device | str | None,
        on_touch: OnTouch,
        pool: PagePool | None,
        *,
        num_rows: int | None = None,
    ) -> VirtualTensor:
        """Addresses for a tensor of this shape, these strides and this dtype, and nothing else of it.

        With `num_rows` it grows in place: the shape is the largest, and it has so many rows at first.
        """
        if on_touch not in get_args(OnTouch):
            raise ValueError(f"on_touch={on_touch!r} must be one of {get_args(OnTouch)}")
        if meta.dtype in _QUANTIZED:
            raise ValueError(
                f"dtype={meta.dtype} has a scale besides its values, for which a virtual tensor has no place"
            )
        where = resolve_device(device)
        if pool is not None:
            if not isinstance(pool, PagePool):
                raise ValueError(f"pool={pool!r} must be a PagePool")
            pool.check_open()
            if pool.driver.device != device_name(where):
                raise ValueError(f"pool of {pool.driver.device} cannot hold a tensor on {where}")
        shape, strides, dtype = tuple(meta.shape), meta.stride(), meta.dtype
        if 0 in shape:
            tensor = VirtualTensor.wrap(torch.empty_strided(shape, strides, dtype=dtype, device=where), None, on_touch)
            return tensor if num_rows is None else tensor._growing(num_rows)
        num_elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        size_bytes = num_elements * dtype.itemsize
        region = Region(pool or default_pool(where), where, size_bytes, readable_holes=on_touch == "commit")
        tensor = VirtualTensor.wrap(region.view(dtype, 0, shape, strides), region, on_touch)
        region.drop()  # from here on the tensor and its views keep the memory
        return tensor if num_rows is None else tensor._growing(num_rows)

    # -- operations -----------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator below autograd, once its memory is there."""
        kwargs = kwargs or {}
        effect = effect_of(func)
        if effect is Effect.COMPOSITE:
            return func.decompose(*args, **kwargs)
        if effect is Effect.ACCESS or effect is Effect.FILL:
            try:
                if effect is Effect.FILL and fills_with_zeros(args) and _zero(args[0]):
                    return args[0]
                return _access(func, args, kwargs)
            except NotForGraphs:
                return cls.graph_hooks.put_in_graph(func, args, kwargs)
        if effect is Effect.REFUSED:
            if _moves_nothing(func, args, kwargs):
                return args[0]
            if not isinstance(args[0], VirtualTensor) and func is torch.ops.aten.resize_as_.default:
                return args[0].resize_(args[1].shape)
            raise VTensorError(
                f"{func} is not for virtual tensors: their storage never moves; use .plain() or a copy (.clone())"
            )
        parent = args[0] if args else None
        if isinstance(parent, VirtualTensor) and parent._region is None and parent._stand_in is not None:
            return cls.graph_hooks.put_in_graph(func, args, kwargs)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        if isinstance(parent, VirtualTensor):
            if effect is Effect.RESHAPE:
                parent._seen_epoch, parent._max_rows = -1, None
            elif effect is Effect.VIEW:
                seen_epoch = parent._seen_epoch if stays_within(func) else -1
                return _map_tensors(
                    lambda view: VirtualTensor.wrap(view, parent._region, parent._on_touch, seen_epoch), result
                )
        return result

    # -- torch.compile: see module traced ---------------------------------------------------------------------------

    def _memory(self, operation: Any) -> Region | None:
        """The region, or None of an empty tensor."""
        if self._region is None and self._stand_in is not None:
            raise NotForGraphs(f"{operation} of a virtual tensor is not for graphs: it needs the tensor's own memory")
        return self._region

    @property
    def _key(self) -> torch.Tensor:
        """What names this tensor in a graph; the same tensor as long as it names the same, which guards ask for."""
        if self._stand_in is None and (self._own_key is None or not self.graph_hooks.is_named(self, self._own_key)):
            self._own_key = self.graph_hooks.key(self)
        return cast(torch.Tensor, self._own_key)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """As torch asks for it: the tensors that stand for this one in a graph, and what a graph is made for."""
        skip_our_frames()
        if self._stand_in is not None:
            return ["_key"], self._stand_in.context
        begins = _offset(self) == 0
        return ["_key"], (self.dtype, self.device, self._on_touch, begins, self.is_conj(), self.is_neg())

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> VirtualTensor:
        """As torch asks for it."""
        return VirtualTensor.graph_hooks.unflatten(inner, context, size, stride)

    def _stable_hash_for_caching(self) -> str:
        """As torch asks for it, to tell whether a graph made by another process is for this tensor."""
        return repr((tuple(self.shape), self.stride(), self.requires_grad, self.__tensor_flatten__()))

    # Each view is described to a graph as if it were all that there is of a storage of its own. What else shows that
    # memory, and where it lies in it, is for `run` to know; torch would make one a view of the other again, with
    # offsets that it cannot always solve for.

    def _is_view(self) -> bool:
        return not _is_tracing() and torch.Tensor._is_view(self)

    def storage_offset(self) -> int:
        """As of any tensor."""
        return 0 if _is_tracing() and self._stand_in is None else _offset(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        """As of any tensor: all addresses of the reservation, whether or not there is memory. Nobody watches it."""
        if _is_tracing() and self._stand_in is None:
            return torch.UntypedStorage(1)  # type: ignore[no-untyped-call]
        return torch.Tensor.untyped_storage(self)

    # -- memory for an operation ------------------------------------------------------------------------------------

    def _begin_reading(self, operation: Any, select: Select = None) -> bool:
        """Make sure that this view can be read; whether that holds until `Region.end_reading` only.

        `select` says which page groups are enough, for an operation that does not read everything.
        """
        region = self._region
        if region is None:
            self._memory(operation)
            return False
        if self._on_touch == "raise":
            self._touch(operation, select)
            return False
        if os.getpid() != region.process_id:
            region.space.check_open()
        if region.space.has_readable_holes:
            if region.data_bytes > READ_LIMIT_BYTES and (
                self.numel() * self.element_size() > READ_LIMIT_BYTES or not self.is_contiguous()
            ):
                region.check_read(self._footprint(select), _Named(operation, self))
            return False
        has_shown = False
        epoch = region.decommit_epoch
        if self._seen_epoch != epoch and region.space.is_full:
            self._seen_epoch = epoch
        if self._seen_epoch != epoch:
            has_shown = region.begin_reading(self._footprint(select), _Named(operation, self))
            if not has_shown and select is None:
                self._seen_epoch = epoch
        region.use()
        return has_shown

    @contextmanager
    def _reading(self, operation: Any) -> Iterator[None]:
        """The time in which this view is read, otherwise than by an operator."""
        has_shown = self._begin_reading(operation)
        try:
            yield
        finally:
            if has_shown:
                Region.end_reading()

    def _touch(self, operation: Any, select: Select = None) -> None:
        """Make sure that this view has memory behind it, which may be written to."""
        region = self._region
        if region is None:
            self._memory(operation)
            return
        if os.getpid() != region.process_id:
            region.space.check_open()  # raises: a forked child has nothing at these addresses
        epoch = region.decommit_epoch
        if self._seen_epoch != epoch and region.space.is_full:
            self._seen_epoch = epoch
        if self._seen_epoch != epoch:
            ranges = self._footprint(select)
            missing = region.space.count_missing(ranges)
            if missing:
                if self._on_touch == "raise":
                    raise self._unmapped(operation, ranges, missing)
                region.commit(ranges, _Named(operation, self))
            if select is None:
                self._seen_epoch = epoch
        region.use()  # after the check: whoever committed what is there now has noted when it is zeroed

    def _begin_writing(self, operation: Any, select: Select = None) -> None:
        """Make sure that this view can be written to."""
        self._touch(operation, select)
        if self._region is not None:
            self._region.num_writes += 1

    def _unmapped(self, operation: Any, ranges: npt.NDArray[np.int64], missing: int) -> UnmappedAccessError:
        region = cast(Region, self._region)
        first = next(
            int(start + (~region.space.have_memory(start, start + count)).argmax())
            for start, count in ranges.tolist()
            if not region.space.have_memory(start, start + count).all()
        )
        size = region.space.page_group_bytes
        address = region.space.base + first * size
        return UnmappedAccessError(
            f"{_Named(operation, self)} touches {missing} page groups without "
            f"memory, the first at bytes {first * size:,}..{(first + 1) * size:,} ({address:#x}) of its reservation; "
            "commit them first (.commit(), or step() of a cache), or use on_touch='commit'"
        )

    def _footprint(self, select: Select = None) -> npt.NDArray[np.int64]:
        region = cast(Region, self._region)
        if select is not None:
            ranges = select(region.space.page_group_bytes)
            if ranges is not None:
                return ranges
        if self.is_contiguous() and (number := self.numel()):
            size, element_bytes = region.space.page_group_bytes, self.element_size()
            first = _offset(self) * element_bytes
            end = first + number * element_bytes - 1
            return np.array([[first // size, end // size - first // size + 1]])
        return footprint(_offset(self), self.shape, self.stride(), self.element_size(), region.space.page_group_bytes)

    def _covered(self) -> npt.NDArray[np.int64]:
        region = cast(Region, self._region)
        return covered(
            _offset(self),
            self.shape,
            self.stride(),
            self.element_size(),
            region.space.page_group_bytes,
            region.data_bytes,
        )

    # -- memory ---------------------------------------------------------------------------------------------------

    @eager
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
        region = self._memory("commit")
        part = self._part(rows)
        if region is not None:
            if region.owner:
                raise VTensorError(f"this memory belongs to a {region.owner}, where only step() commits")
            epoch = region.decommit_epoch
            region.commit(part._footprint(), f"commit of shape {tuple(part.shape)}")
            if part is self:
                self._seen_epoch = epoch
        return self

    @eager
    def decommit(self, rows: int | slice | tuple[Any, ...] | None = None) -> int:
        """Give back the memory below this tensor, or below a part of it, once the device has finished with it.

        What is given back reads as zeros. Memory goes back as it was committed: a page group that holds anything else
        as well, or that is part of a larger handle which does, keeps its memory and its data.

        Parameters
        ----------
        rows : int, slice or tuple, optional
            As for `commit`.

        Returns
        -------
        int
            Bytes that went back to the pool.

        Raises
        ------
        ValueError, IndexError
            As for `commit`.
        VTensorError
            The memory is a KV cache's, or a CUDA graph is being captured.
        """
        region = self._memory("decommit")
        part = self._part(rows)
        if region is None:
            return 0
        if region.owner:
            raise VTensorError(f"this memory belongs to a {region.owner}; free_reqid gives it back")
        given_back = region.give_back(part._covered(), f"decommit of shape {tuple(part.shape)}")
        return given_back * region.space.page_group_bytes

    def _part(self, rows: int | slice | tuple[Any, ...] | None) -> VirtualTensor:
        return self if rows is None else cast(VirtualTensor, self.detach()[_basic_index(rows, self.shape)])

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory behind this view's page groups."""
        return self._resident_and_reserved_bytes()[0]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of addresses that this view's page groups span, with memory or without."""
        return self._resident_and_reserved_bytes()[1]

    @eager
    def _resident_and_reserved_bytes(self) -> tuple[int, int]:
        region = self._memory("the residency")
        if region is None:
            return 0, 0
        space, ranges = region.space, self._footprint()
        reserved = int(ranges[:, 1].sum())
        return (reserved - space.count_missing(ranges)) * space.page_group_bytes, reserved * space.page_group_bytes

    @eager
    def residency(self) -> npt.NDArray[np.bool_]:
        """For each page group of this view, in ascending order of addresses, whether it has memory."""
        region = self._memory("the residency")
        if region is None:
            return np.empty(0, bool)
        parts = [region.space.have_memory(first, first + count) for first, count in self._footprint()]
        return np.concatenate(parts) if parts else np.empty(0, bool)

    @eager
    def record_stream(self, stream: Any) -> None:
        """Declare that a stream uses this memory: it is not unmapped before that stream has finished with it."""
        region = self._memory("record_stream")
        if region is not None:
            region.streams.add(stream)

    @eager
    def plain(self) -> torch.Tensor:
        """The same memory as a plain tensor: no checks, no cost. Reading what is not committed ends the process."""
        return self._plain()

    def _plain(self) -> torch.Tensor:
        self._memory("plain")
        with torch._C._DisableTorchDispatch():
            # Not a view where it need not be: views cost more, and torch.compile looks at what they are of.
            return self.as_subclass(torch.Tensor) if self.requires_grad else self.detach()

    # -- growth in place --------------------------------------------------------------------------------------------

    @property
    def max_rows(self) -> int | None:
        """Rows for which a tensor that grows in place has addresses; None for any other."""
        return self._max_rows

    @eager
    def append_(self, rows: torch.Tensor) -> VirtualTensor:
        """Add rows at the end, in place: nothing is copied but the rows, and no address changes.

        Views of the rows before stay good. Made for tensors from ``vtensor.empty(..., max_rows=...)``.

        Parameters
        ----------
        rows : Tensor, shape [n, *self.shape[1:]] or self.shape[1:]
            n rows, or one; converted to this tensor's dtype and device.

        Returns
        -------
        VirtualTensor
            This tensor, n rows longer.

        Raises
        ------
        ValueError
            Rows of another shape, or more than `max_rows`. Nothing was changed.
        VTensorError
            A tensor that does not grow, or that requires grad.
        OutOfPagesError
            Not enough page groups. Nothing was changed.
        """
        max_rows = self._check_grows("append_")
        shape = tuple(self.shape)
        is_rows = isinstance(rows, torch.Tensor) and tuple(rows.shape) in (shape[1:], (*rows.shape[:1], *shape[1:]))
        if not is_rows:
            one = ", ".join(map(str, shape[1:]))
            raise ValueError(f"rows={_describe(rows)} must be a tensor of shape [n, {one}], or [{one}] for one row")
        number = 1 if rows.dim() < len(shape) else len(rows)
        if shape[0] + number > max_rows:
            raise ValueError(f"{number} rows more than {shape[0]:,} are beyond max_rows={max_rows:,}")
        new = self._rows(shape[0], shape[0] + number)
        try:
            new.copy_(rows.detach())
        except BaseException:
            with suppress(VTensorError):  # the first error is the one to tell of; what is left is beyond the last row
                new._zero_held(1)
            raise
        self._set_rows(shape[0] + number)
        return self

    @eager
    def resize_rows_(self, num_rows: int) -> VirtualTensor:
        """Change the number of rows, in place: rows that come are zero, those that go give their memory back.

        Made for tensors from ``vtensor.empty(..., max_rows=...)``. Shrinking waits for the device. Views that reach
        beyond the new end read zeros there.

        Parameters
        ----------
        num_rows : int
            0 to `max_rows`.

        Returns
        -------
        VirtualTensor
            This tensor.

        Raises
        ------
        ValueError
            A number out of range. Nothing was changed.
        VTensorError
            A tensor that does not grow, or that requires grad; or during a graph capture.
        """
        max_rows = self._check_grows("resize_rows_")
        if isinstance(num_rows, bool) or not isinstance(num_rows, int | np.integer) or not 0 <= num_rows <= max_rows:
            raise ValueError(f"num_rows={num_rows!r} must be 0 to max_rows={max_rows:,}")
        num_rows = int(num_rows)
        if num_rows < len(self) and self._region is not None:
            # All that lies behind: what an append_ that failed had committed goes as well.
            self._region.give_back(self._rows(num_rows, max_rows)._covered(), "resize_rows_")
            self._rows(num_rows, len(self))._zero_held(1)
        self._set_rows(num_rows)
        return self

    def _check_grows(self, what: str) -> int:
        self._memory(what)
        if self._max_rows is None:
            raise VTensorError(f"{what} is for tensors that grow in place: vtensor.empty(n, ..., max_rows=...)")
        if self.requires_grad:
            raise VTensorError(f"{what}: a tensor that grows in place cannot require grad; use .detach() views of it")
        if self._region is not None:
            self._region.space.check_open()
        return self._max_rows

    def _rows(self, first: int, end: int) -> VirtualTensor:
        """Rows of a tensor that grows, also those that it does not have yet."""
        offset = _offset(self) + first * self.stride(0)
        return cast(VirtualTensor, self.detach().as_strided((end - first, *self.shape[1:]), self.stride(), offset))

    def _growing(self, num_rows: int) -> VirtualTensor:
        self._max_rows = len(self)
        self._set_rows(num_rows)
        return self

    def _set_rows(self, num_rows: int) -> None:
        with torch._C._DisableTorchDispatch():
            self.as_strided_((num_rows, *self.shape[1:]), self.stride(), _offset(self))
        self._seen_epoch = -1

    def _zero_held(self, most_blocks: int) -> bool:
        """Zero what has memory of this view. False, and nothing done, where it consists of more blocks."""
        region = self._region
        if region is None:
            return True
        blocks = dense_blocks(_offset(self), self.shape, self.stride(), self.element_size(), most_blocks)
        if blocks is None:
            return False
        for start, number in region.held_bytes(blocks).tolist():
            region.bytes_of(start, number).zero_()
        region.num_writes += 1
        return True

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
        return f"VirtualTensor({header},\n{self._plain().detach()!r})"

    def __format__(self, spec: str) -> str:
        """Format the value where a format is asked for, and a header otherwise."""
        return format(self.item(), spec) if spec and self.dim() == 0 else object.__format__(self, spec)

    # torch.tensor([x[0], x[1]]) calls these and then bypasses the dispatcher.
    __bool__, __int__, __float__, __complex__, __index__ = map(
        _touching, ("__bool__", "__int__", "__float__", "__complex__", "__index__")
    )

    @eager
    def tolist(self) -> Any:
        """Values as nested lists."""
        with self._reading("tolist"):
            return self._plain().tolist()

    @eager
    def numpy(self, *, force: bool = False) -> npt.NDArray[Any]:
        """The same memory as an array (host only, as for any tensor)."""
        self._touch("numpy")
        return self._plain().numpy(force=force)

    @eager
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self._touch("__dlpack__")
        return self._plain().__dlpack__(*args, **kwargs)

    __dlpack_c_exchange_api__ = _Absent()  # it would hand out the memory behind our back

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """As of any tensor on a GPU."""
        interface: dict[str, Any] = self._plain().detach().__cuda_array_interface__  # an AttributeError on the host
        self._touch("__cuda_array_interface__")
        return interface

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor; setting it moves this tensor to the memory of another one, plain or virtual."""
        return cast(torch.Tensor, _TENSOR_DATA.__get__(self))

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        _TENSOR_DATA.__set__(self, other)
        self._region, self._on_touch, self._seen_epoch, self._max_rows = None, "commit", -1, None
        if isinstance(other, VirtualTensor):
            self._region, self._on_touch = other._region, other._on_touch

    @eager
    def __copy__(self) -> torch.Tensor:
        """Another tensor over the same memory."""
        return self.detach().requires_grad_(self.requires_grad)

    @eager
    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Of a whole virtual tensor another one, of the same pool, in which the same has memory; of a view its data."""
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors that are leaves of a graph can be deep-copied; use x.detach(), or a copy (.clone())"
            )
        copied = memo[id(self)] = self._like(self._whole_copy() if self._is_whole() else self.detach().clone())
        own = {name: value for name, value in vars(self).items() if not hasattr(VirtualTensor, name)}
        vars(copied).update(copy.deepcopy(own, memo))
        if self.is_leaf and self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    @eager
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, of a whole tensor, as a virtual one of what has memory; of a view as a plain tensor of its data."""
        if not self._is_whole() or _is_saving_in_old_format():
            return self._like(self.detach().clone()).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        spans = self._spans()
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        data = torch.cat([nothing, *self._parts(spans)])
        most = self._most()
        how = (self._on_touch, self._num_rows(), self.requires_grad, isinstance(self, torch.nn.Parameter))
        return _restore, (tuple(most.shape), most.stride(), most.dtype, how, spans.tolist(), data)

    def _is_whole(self) -> bool:
        """Whether this is all that there is of a virtual tensor, rather than a view of a part."""
        region = self._memory("a copy")
        if self.is_conj() or self.is_neg():
            return False
        if region is None or self._max_rows is not None:
            return True
        blocks = dense_blocks(_offset(self), self.shape, self.stride(), self.element_size(), 1)
        is_all = blocks is not None and blocks.tolist() == [[0, region.data_bytes]]
        return is_all and self.numel() * self.element_size() == region.data_bytes and not region.owner

    def _whole_copy(self) -> VirtualTensor:
        pool = None if self._region is None else self._region.space.pool
        if pool is default_pool(self.device):
            pool = None
        copied = VirtualTensor.reserve(self._most(), self.device, self._on_touch, pool, num_rows=self._num_rows())
        spans = self._spans()
        copied._put(spans, self._parts(spans))
        return copied

    def _spans(self) -> npt.NDArray[np.int64]:
        """What of a whole tensor has memory: rows of (first byte, number of bytes)."""
        if self._region is None:
            return np.empty((0, 2), np.int64)
        return self._region.held_bytes(np.array([[0, self.numel() * self.element_size()]]))

    def _parts(self, spans: npt.NDArray[np.int64]) -> list[torch.Tensor]:
        region = cast(Region, self._region)
        return [region.bytes_of(start, number) for start, number in spans.tolist()]

    def _most(self) -> torch.Tensor:
        """Shape, strides and dtype; of a tensor that grows in place, when it has all of its rows."""
        shape = self.shape if self._max_rows is None else (self._max_rows, *self.shape[1:])
        return torch.empty_strided(shape, self.stride(), dtype=self.dtype, device="meta")

    def _num_rows(self) -> int | None:
        return None if self._max_rows is None else len(self)

    def _put(self, spans: npt.NDArray[np.int64], parts: Iterable[torch.Tensor]) -> None:
        """Write bytes: spans of (first byte, number), and what is to be there."""
        if not len(spans):
            return
        region = cast(Region, self._region)
        region.commit(merged(spans, region.space.page_group_bytes), "a copy of a virtual tensor")
        for own, part in zip(self._parts(spans), parts, strict=True):
            own.copy_(part)

    def _like(self, copied: torch.Tensor) -> torch.Tensor:
        """As this one is a parameter, or requires grad."""
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(copied, self.requires_grad)
        return copied.requires_grad_(self.requires_grad)

    @eager
    def share_memory_(self) -> VirtualTensor:
        """Refused: other processes cannot see these addresses."""
        raise VTensorError("a virtual tensor cannot move to shared memory: share a copy, x.clone().share_memory_()")


def _restore(
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
    tensor = VirtualTensor.reserve(meta, data.device, on_touch, None, num_rows=num_rows)
    blocks = np.array(spans, np.int64).reshape(-1, 2)
    starts, numbers = blocks[:, 0], blocks[:, 1]
    end = 0 if tensor._region is None else tensor._region.data_bytes
    if (starts < 0).any() or (numbers < 1).any() or (starts > end).any() or (numbers > end - starts).any():
        raise ValueError(f"a span of {spans} lies outside a tensor of {end:,} bytes")
    if data.dtype is not torch.uint8 or data.dim() != 1 or len(data) != numbers.sum():
        raise ValueError(f"{_describe(data)} of {data.dtype} is not what {len(spans)} spans hold")
    tensor._put(blocks, torch.split(data, numbers.tolist()) if spans else ())
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_restore])  # it checks what it is given


def _is_saving_in_old_format() -> bool:
    """Whether `torch.save` writes its old format, which reads data only after all objects are made: too late for us."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.serialization._legacy_save.__code__:
        frame = frame.f_back
    return frame is not None


class _Named:
    """What was to be done, for an error."""

    __slots__ = ("operation", "tensor")

    def __init__(self, operation: object, tensor: torch.Tensor) -> None:
        self.operation, self.tensor = operation, tensor

    def __str__(self) -> str:
        return f"{self.operation} on a virtual tensor of shape {tuple(self.tensor.shape)}"


def _zero(tensor: torch.Tensor) -> bool:
    """Write zeros where a view has memory: the rest reads as zeros. False where to do it as usual is better."""
    if not isinstance(tensor, VirtualTensor) or tensor._memory("zero_") is None or tensor._on_touch == "raise":
        return False
    region = cast(Region, tensor._region)
    if os.getpid() != region.process_id:
        region.space.check_open()
    if tensor._seen_epoch == region.decommit_epoch or region.space.is_full or is_capturing(region.device):
        return False  # a graph's replays would not know what has memory by then
    if not region.space.count_missing(tensor._footprint()):
        return False
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return False  # torch refuses it
    return tensor._zero_held(_MOST_BLOCKS)


def _moves_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a resize is to the shape that is there."""
    if func is torch.ops.aten.resize_.default:
        shape = tuple(args[1])
    elif func is torch.ops.aten.resize_as_.default:
        shape = tuple(args[1].shape)
    else:
        return False
    memory_format = kwargs.get("memory_format", args[2] if len(args) > 2 else None)
    return tuple(args[0].shape) == shape and memory_format in (None, torch.preserve_format)


def _access(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that reads or writes its arguments: what it writes to is committed, what it reads can be read."""
    positions, names = written_arguments(func)
    select: Select = functools.partial(indexed_ranges, func, args, kwargs) if is_indexed(func, args) else None
    reads: list[tuple[VirtualTensor, Select]] = []
    for index, argument in enumerate(args):
        if isinstance(argument, VirtualTensor):
            if index in positions:
                argument._begin_writing(func, select if index == 0 else None)
            else:
                reads.append((argument, select if index == 0 else None))
        elif isinstance(argument, list | tuple):
            for tensor in _virtual_tensors(argument):
                if index in positions:
                    tensor._begin_writing(func)
                else:
                    reads.append((tensor, None))
    for name, argument in kwargs.items():
        for tensor in _virtual_tensors((argument,)):
            if name in names:
                tensor._begin_writing(func)
            else:
                reads.append((tensor, None))
    num_held = 0
    try:
        for tensor, part in reads:  # after what is written was committed, which takes zeros that are shown away
            num_held += tensor._begin_reading(func, part)
        if kwargs and any(True for _ in _virtual_tensors(kwargs.get(name) for name in out_names(func))):
            return _write_out(func, args, kwargs)
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)
    finally:
        for _ in range(num_held):
            Region.end_reading()


def _describe(value: Any) -> str:
    """A tensor's shape, for an error; its values may not be there."""
    return f"<tensor of shape {tuple(value.shape)}>" if isinstance(value, torch.Tensor) else repr(value)


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return function(result)
    if isinstance(result, list | tuple):
        return type(result)(_map_tensors(function, item) for item in result)
    return result


def _write_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator with ``out=``, which torch resizes where it does not fit: here, into what has no memory."""
    names = [name for name in out_names(func) if name in kwargs]
    others = (*args, *(value for name, value in kwargs.items() if name not in names))
    inputs = {id(tensor._region) for tensor in _virtual_tensors(others)}
    with torch._C._DisableTorchDispatch():
        stand_ins = {name: _map_tensors(lambda out: _out_buffer(out, inputs), kwargs[name]) for name in names}
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
    if not isinstance(target, VirtualTensor):
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
