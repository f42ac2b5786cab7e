"""VirtualTensor: a torch.Tensor over reserved addresses, by which no operation reaches memory that is not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from types import EllipsisType
from typing import Any, ClassVar, Protocol, cast, get_args

import numpy as np
import numpy.typing as npt
import torch

from vtensor import copies
from vtensor.access import access, copy_held, map_tensors, moves_nothing, zero
from vtensor.allocator.page_pool import PagePool
from vtensor.devices import device_name, resolve_device
from vtensor.eager import eager, skip_our_frames
from vtensor.effects import Effect, effect_of, fills_with_zeros, stays_within
from vtensor.errors import VTensorError
from vtensor.growth import Growing
from vtensor.pools import default_pool
from vtensor.region import Region
from vtensor.units import format_bytes
from vtensor.watched import NotForGraphs, OnTouch, offset_of

__all__ = ["VirtualTensor"]

_ACCESSES = {Effect.ACCESS, Effect.FILL, Effect.COPY}
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def _is_tracing() -> bool:
    return torch._guards.TracingContext.try_get() is not None


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


class VirtualTensor(Growing):
    """A tensor whose addresses are reserved at once and whose memory is mapped on demand.

    It is an ordinary strided tensor, which kernels take as it is. Before an operation writes to it, the page groups
    that the operation may touch are committed; what an operation reads where none are is zeros
    (``on_touch="commit"``). Or the operation is refused with `UnmappedAccessError` if one is missing
    (``on_touch="raise"``). Views are virtual too; results of arithmetic are plain tensors. Operators that are not
    torch's own may write to all that they get, and so may who takes a view with `numpy` or DLPack: what they are given
    is committed. A raw pointer taken with `data_ptr` is not watched: `commit` first.

    Made by `vtensor.empty` and its like, `vtensor.as_virtual` and `KVCacheManager.layer`, never by its constructor.
    """

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
        if effect in _ACCESSES:
            try:
                if effect is Effect.FILL and fills_with_zeros(args) and zero(args[0]):
                    return args[0]
                if effect is Effect.COPY and copy_held(args[0], args[1]):
                    return args[0]
                return access(func, args, kwargs)
            except NotForGraphs:
                return cls.graph_hooks.put_in_graph(func, args, kwargs)
        if effect is Effect.REFUSED:
            if moves_nothing(func, args, kwargs):
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
                return map_tensors(
                    lambda view: VirtualTensor.wrap(view, parent._region, parent._on_touch, seen_epoch), result
                )
        return result

    # -- torch.compile: see module traced ---------------------------------------------------------------------------

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
        if self.is_conj() or self.is_neg():
            raise NotForGraphs("a conjugate of a virtual tensor cannot come into a graph: give it a copy (.clone())")
        return ["_key"], (self.dtype, self.device, self._on_touch, offset_of(self) == 0)

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
        return 0 if _is_tracing() and self._stand_in is None else offset_of(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        """As of any tensor: all addresses of the reservation, whether or not there is memory. Nobody watches it."""
        if _is_tracing() and self._stand_in is None:
            return torch.UntypedStorage(1)  # type: ignore[no-untyped-call]
        return torch.Tensor.untyped_storage(self)

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
        if given_back:
            self._note_loss()
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
    def apply_(self, callable: Callable[[Any], Any]) -> VirtualTensor:
        """As of any tensor on the host; every element is written."""
        self._begin_writing("apply_")
        self._plain().apply_(callable)
        return self

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
        return copies.deep_copy(self, memo, VirtualTensor.reserve)

    @eager
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, of a whole tensor, as a virtual one of what has memory; of a view as a plain tensor of its data."""
        return copies.reduce(self, protocol, _restore)

    @eager
    def share_memory_(self) -> VirtualTensor:
        """Refused: other processes cannot see these addresses."""
        raise VTensorError("a virtual tensor cannot move to shared memory: share a copy, x.clone().share_memory_()")


def _restore(*saved: Any) -> torch.Tensor:
    """The virtual tensor that was pickled, on the device on which its data is loaded."""
    return copies.restore(VirtualTensor.reserve, *saved)


torch.serialization.add_safe_globals([_restore])  # it checks what it is given
ForkingPickler.register(VirtualTensor, copies.by_value)


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
