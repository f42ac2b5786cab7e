"""VirtualTensor: a torch.Tensor over reserved addresses, by which no operation reaches memory that is not there."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
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

    def __init__(self, pool: PagePool, device: torch.device, size_bytes: int) -> None:
        graveyard.sweep()
        self.space = AddressSpace(pool, size_bytes)
        self.device = device
        self.streams = StreamUse(device)
        self.content = pool.new_content()
        self.decommit_epoch = 0
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
            return self.space.commit(ranges, content=self.content, stream=stream)
        except Shortage:
            graveyard.drain()
        try:
            return self.space.commit(ranges, content=self.content, stream=stream)
        except Shortage as shortage:
            raise out_of_pages(self.space, what, shortage) from None

    def decommit(self, ranges: npt.NDArray[np.int64], *, forget_content: bool) -> None:
        """Take page groups away, with which the device has finished; views check again what they can reach."""
        self.decommit_epoch += 1
        self.space.decommit(ranges, forget_content=forget_content)


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
    VIEW = "returns views, reads nothing"
    METADATA = "reads and writes nothing"
    ACCESS = "reads or writes its arguments"
    REFUSED = "would move the tensor away from its addresses"


_METADATA_OPERATORS = {
    "aten::empty_like",
    "aten::full_like",
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
_REFUSED_OPERATORS = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::record_stream"}


@cache
def _effect(operator: Any) -> _Effect:
    """What an operator does to the memory of its arguments, from its schema."""
    name = operator._schema.name
    if name in _REFUSED_OPERATORS:
        return _Effect.REFUSED
    if name in _METADATA_OPERATORS:
        return _Effect.METADATA
    aliases = [value.alias_info for value in operator._schema.returns]
    if aliases and all(alias is not None and not alias.is_write for alias in aliases):
        return _Effect.VIEW
    return _Effect.ACCESS


def _virtual_tensors(arguments: Any) -> Iterator[VirtualTensor]:
    for argument in arguments:
        if isinstance(argument, VirtualTensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _virtual_tensors(argument)


class VirtualTensor(torch.Tensor):
    """A tensor whose addresses are reserved at once and whose memory is mapped on demand.

    It is an ordinary strided tensor, which kernels take as it is. Before an operation reads or writes it, the page
    groups that the operation may touch are committed (``on_touch="commit"``; they read as zeros), or the operation is
    refused with `UnmappedAccessError` if one is missing (``on_touch="raise"``). Views are virtual too; results of
    arithmetic are plain tensors. A raw pointer taken with `data_ptr` is not watched: `commit` first.

    Made by `vtensor.empty` and by `KVCacheManager.layer`, never by its constructor.
    """

    _region: Region | None
    _on_touch: OnTouch
    _seen_epoch: int

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
        if effect is _Effect.ACCESS:
            for tensor in _virtual_tensors((*args, *kwargs.values())):
                tensor._touch(func)
        elif effect is _Effect.REFUSED:
            raise VTensorError(
                f"{func} is not for virtual tensors: their storage never moves; use .plain() or a copy (.clone())"
            )
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        if effect is _Effect.VIEW:
            parent = next(_virtual_tensors(args))
            return _map_tensors(lambda view: VirtualTensor.wrap(view, parent._region, parent._on_touch), result)
        return result

    def _touch(self, operation: Any) -> None:
        """Make sure that every byte of this view has memory behind it."""
        region = self._region
        if region is None or self._seen_epoch == region.decommit_epoch:
            return
        ranges = self._footprint()
        missing = region.space.count_missing(ranges)
        if missing:
            if self._on_touch == "raise":
                raise self._unmapped(operation, ranges, missing)
            region.commit(ranges, f"{operation} on a virtual tensor of shape {tuple(self.shape)}")
        region.streams.current()
        self._seen_epoch = region.decommit_epoch

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
            None: all. An int n: the first n rows. Otherwise a basic index, as in ``x[rows]``.

        Returns
        -------
        VirtualTensor
            This tensor.

        Raises
        ------
        OutOfPagesError
            Not enough page groups; nothing was changed.
        """
        part = self if rows is None else self[:rows] if isinstance(rows, int) else self[rows]
        if not isinstance(part, VirtualTensor):
            raise ValueError(f"rows={rows!r} is not a basic index: use an int, slices, or a tuple of them")
        if part._region is not None:
            part._region.commit(part._footprint(), f"commit of shape {tuple(part.shape)}")
        return self

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory behind this view's page groups."""
        return int(self.residency().sum()) * self._page_group_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of addresses that this view's page groups span, with memory or without."""
        if self._region is None:
            return 0
        return int(self._footprint()[:, 1].sum()) * self._page_group_bytes

    @property
    def _page_group_bytes(self) -> int:
        return 0 if self._region is None else self._region.space.page_group_bytes

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
        header += f", reserved={format_bytes(self.reserved_bytes)}, resident={format_bytes(self.resident_bytes)}"
        if self.resident_bytes < self.reserved_bytes:
            return f"VirtualTensor({header})"
        return f"VirtualTensor({header},\n{self.plain().detach()!r})"

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

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain copy of this view's data, not of the whole storage."""
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain tensor of this view's data, not of the whole storage."""
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        return copied.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def share_memory_(self) -> VirtualTensor:
        """Refused: other processes cannot see these addresses."""
        raise VTensorError("a virtual tensor cannot move to shared memory: share a copy, x.clone().share_memory_()")


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return function(result)
    if isinstance(result, list | tuple):
        return type(result)(_map_tensors(function, item) for item in result)
    return result
