"""Region: reserved addresses as a torch storage, with the streams that use it."""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vtensor.allocator import graveyard
from vtensor.allocator.address_space import AddressSpace, Shortage, out_of_pages
from vtensor.allocator.page_pool import PagePool
from vtensor.errors import ClosedError
from vtensor.streams import StreamUse, check_not_capturing

__all__ = ["Region"]


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
