"""Region: reserved addresses as a torch storage, with the streams that use it."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from vtensor.allocator import graveyard
from vtensor.allocator.address_space import AddressSpace, Shortage, out_of_pages
from vtensor.allocator.mapper import get_mapper
from vtensor.allocator.page_pool import PagePool
from vtensor.allocator.words import NUM_READY, NUM_ZEROED, ZERO_CALLS
from vtensor.errors import ClosedError, UnmappedAccessError
from vtensor.interrupts import interrupts_held
from vtensor.streams import DeviceEvent, StreamUse, check_not_capturing, is_capturing, relaxed_capture
from vtensor.units import format_bytes
from vtensor.unpicklable import Unpicklable

__all__ = ["READ_LIMIT_BYTES", "Region", "region_of"]

Int64 = npt.NDArray[np.int64]

READ_LIMIT_BYTES = 1 << 40
"""Zeros that one operation may read of a tensor. On a host 1 TiB takes minutes, and 2 GiB of page tables."""

# Held while an operation is given to the device that reads zeros shown by an alias, and while memory takes the place of
# such an alias. One for all regions, since an operation may read several.
_shown_lock = threading.RLock()


# By first address: regions that are kept by who made them, and those that are there for their views only.
_owned: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
_viewed: dict[int, Region] = {}
_numbers = itertools.count(1)
_numbered: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()


def region_of(tensor: torch.Tensor) -> Region | None:
    """The region in which a tensor's memory lies, None where that is not ours."""
    address = tensor.data_ptr()
    for region in (*_viewed.copy().values(), *_owned.values()):  # a copy: the garbage collector may take some away
        if region.device == tensor.device and 0 <= address - region.space.base < region.space.size_bytes:
            return region
    return None


def _forget() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _shown_lock
    _shown_lock = threading.RLock()


os.register_at_fork(after_in_child=_forget)


class Region(Unpicklable):
    """Reserved addresses as one torch storage, with the streams that use it.

    The memory lives as long as the *storage*, that is as long as any view of it, plain or virtual, and not as long as
    any tensor object: a `detach` in inference mode drops the tensor that one would have tied it to.
    """

    def __init__(
        self,
        pool: PagePool,
        device: torch.device,
        size_bytes: int,
        *,
        owner: str = "",
        readable_holes: bool = False,
    ) -> None:
        if not is_capturing(device):
            graveyard.sweep()
        self.space = AddressSpace(pool, size_bytes, readable_holes=readable_holes)
        self.data_bytes = size_bytes  # the addresses go on to the end of a page group, and nobody uses those
        self.device = device
        self.owner = owner  # who alone commits and decommits; empty: every view may
        self.process_id = os.getpid()
        self.number = next(_numbers)  # of no other region of this process, before or after
        self.streams = StreamUse(device, pool.peer_devices)
        self.content = pool.new_content()
        self.decommit_epoch = 0
        self.num_writes = 0  # operations that wrote to it, of those that said so
        # By stream that may still be zeroing what it committed: the event after it, or None: nobody wanted one yet.
        self._zeroing: dict[int, DeviceEvent | None] = {}
        self._zeroing_lock = threading.RLock()  # a finalizer may come back in the middle
        # In the mapper's stream, after all that was asked for ahead until then: how often that was, and the event.
        self._mapper_mark: tuple[int, DeviceEvent] | None = None
        self._zero_calls_seen = 0  # of the pool's, when the mapper's stream was last found idle
        _owned[self.space.base] = _numbered[self.number] = self
        storage = torch._C._construct_storage_from_data_pointer(self.space.base, device, self.space.size_bytes)
        self._release = weakref.finalize(storage, _bury, self.space, self.streams, self.process_id)
        self._release.atexit = False  # at exit the process takes everything down at once
        self._bytes: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def view(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        """A plain tensor over the region; sizes, strides and offset in elements."""
        if self._bytes is None:
            raise ClosedError("this memory was closed")
        return self._view(self._bytes.untyped_storage(), dtype, offset, shape, strides)

    def view_again(
        self, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        """As `view`, as long as any view is left, whether or not this region still keeps the storage itself."""
        return self._view(self.storage(), dtype, offset, shape, strides)

    def storage(self) -> object:
        """The storage, as long as any view is left; who keeps it keeps the memory."""
        kept = self._release.peek()
        if kept is None:
            raise ClosedError("this memory was closed")
        return kept[0]

    def _view(
        self,
        storage: object,
        dtype: torch.dtype,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> torch.Tensor:
        with torch.inference_mode(False):  # a view made within it could never be written to outside of it
            return torch.empty(0, dtype=dtype, device=self.device).set_(
                cast(torch.UntypedStorage, storage), offset, shape, strides
            )

    @staticmethod
    def numbered(number: int) -> Region:
        """The region of a number.

        Raises
        ------
        ClosedError
            Its memory is gone.
        """
        region = _numbered.get(number)
        if region is None:
            raise ClosedError("this memory was closed")
        return region

    def check_process(self) -> None:
        """Raise `ForkedError` in a forked child, which has nothing at these addresses."""
        if os.getpid() != self.process_id:
            self.space.check_open()

    @property
    def is_viewed(self) -> bool:
        """Whether a tensor, plain or virtual, still uses the storage."""
        return self._release.alive

    def drop(self) -> None:
        """Let go of the storage; the memory goes back once no view is left and the device has finished."""
        if self._release.alive:
            _viewed[self.space.base] = self
        self._bytes = None

    def try_commit(self, ranges: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Commit page groups, zeroed in the order of the current stream.

        Returns
        -------
        int, int
            Page groups that came into service, and those of them that had been mapped ahead.

        Raises
        ------
        Shortage
            Not enough page groups; nothing was changed.
        """
        stream = self.streams.current()
        was_ready = [0]

        def on_mapped(outcome: npt.NDArray[np.int64]) -> None:
            was_ready[0] = int(outcome[NUM_READY])
            has_to_wait = was_ready[0] > 0 and not self._is_mapper_idle(int(outcome[ZERO_CALLS]))
            if has_to_wait:
                self.wait_for_mapper()
            if has_to_wait or outcome[NUM_ZEROED]:
                self._note_zeroing(stream)

        number = self.space.commit(ranges, content=self.content, stream=stream, on_mapped=on_mapped)
        return number, was_ready[0]

    def commit(self, ranges: npt.NDArray[np.int64], what: object) -> int:
        """Commit page groups as `try_commit`; waits for dying memory, and asks torch for its own, before it gives up.

        `what` it is for, an error says.

        Raises
        ------
        OutOfPagesError
            Not enough page groups; nothing was changed.
        """
        if is_capturing(self.device):
            check_not_capturing(self.device, f"committing memory for {what}")
        if self.space.has_readable_holes:
            return self._insist(lambda: self.try_commit(ranges)[0], what)
        with _shown_lock:
            if self.space.num_shown:
                shown = self.space.shown_ranges(ranges)
                if len(shown):
                    self.streams.finish()
                    self.decommit(shown, forget_content=False)
            return self._insist(lambda: self.try_commit(ranges)[0], what)

    def _insist(self, attempt: Callable[[], int], what: object) -> int:
        """Do what may be short of page groups, after whatever can be done about that."""
        graveyard.sweep()
        remedies = iter((graveyard.drain, self.ask_torch))
        while True:
            try:
                return attempt()
            except Shortage as shortage:
                remedy = next(remedies, None)
                if remedy is None and not self.space.pool.ask_holders(shortage.page_groups):
                    raise out_of_pages(self.space, what, shortage) from None
            if remedy is not None:
                remedy()

    def check_read(self, ranges: npt.NDArray[np.int64], what: object) -> None:
        """Refuse to read more zeros than anybody can want to.

        Raises
        ------
        UnmappedAccessError
            More than `READ_LIMIT_BYTES` of the ranges have no memory.
        """
        size, num_places = self.space.page_group_bytes, int(ranges[:, 1].sum())
        if num_places * size <= READ_LIMIT_BYTES:
            return
        missing = num_places - self.space.num_mapped  # at least; to count them takes time
        if missing * size <= READ_LIMIT_BYTES:
            missing = self.space.count_missing(ranges)
        if missing * size > READ_LIMIT_BYTES:
            raise UnmappedAccessError(
                f"{what} would read {format_bytes(missing * size)} of zeros, where nothing was ever written; the limit "
                f"is {format_bytes(READ_LIMIT_BYTES)}. Read a part of it (x[...]), the one that was written: "
                "x.residency() shows which"
            )

    def begin_reading(self, ranges: npt.NDArray[np.int64], what: object) -> bool:
        """Have zeros shown where the ranges have no memory, for one operation that reads them.

        Returns
        -------
        bool
            Whether there are such places. If so, nobody commits them before `end_reading`, which comes once the
            operation was given to the device.

        Raises
        ------
        OutOfPagesError
            No page group is left for the zeros.
        UnmappedAccessError
            Too many (see `check_read`).
        VTensorError
            A CUDA graph is being captured, whose replays would not know when memory comes in the place of zeros.
        """
        _shown_lock.acquire()
        has_shown = False
        try:
            if self.space.count_missing(ranges):
                check_not_capturing(self.device, f"reading what has no memory, by {what},")
                self.check_read(ranges, what)
                stream = self.streams.current()
                self._insist(lambda: self.space.show_zeros(ranges, stream=stream), what)
                has_shown = True
        finally:
            if not has_shown:
                _shown_lock.release()
        return has_shown

    @staticmethod
    def end_reading() -> None:
        """The end of what `begin_reading` began."""
        _shown_lock.release()

    def held_bytes(self, blocks: Int64) -> Int64:
        """What has memory of blocks of bytes, rows of (first byte, number of bytes): more such rows, ascending.

        What others commit meanwhile may be left out; what is named was zeroed, for the current stream.
        """
        size = self.space.page_group_bytes
        held = self.space.held_runs() * size  # of all of it: there are fewer runs than places
        self.use()
        starts, ends = blocks[:, 0], blocks.sum(axis=1)
        first = np.searchsorted(held.sum(axis=1), starts, side="right")
        counts = np.maximum(0, np.searchsorted(held[:, 0], ends, side="left") - first)
        block = np.repeat(np.arange(len(blocks)), counts)
        run = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        begin, end = np.maximum(starts[block], held[run, 0]), np.minimum(ends[block], held[run].sum(axis=1))
        found: Int64 = np.stack([begin, end - begin], axis=1)[begin < end]
        return found

    def bytes_of(self, start: int, number: int) -> torch.Tensor:
        """A plain uint8 tensor over some bytes, which all have memory."""
        return self.view_again(torch.uint8, start, (number,), (1,))

    def ask_torch(self) -> bool:
        """Have torch give its cached memory back to the device, where that is what we share with it."""
        if self.device.type == "cpu" or self.space.pool.capacity_bytes is not None:
            return False
        torch.cuda.empty_cache()
        return True

    def _note_zeroing(self, stream: int) -> None:
        """Note that the current stream zeroes something. As long as it alone is used, nobody needs an event."""
        if self.device.type == "cuda":
            with self._zeroing_lock:
                self._zeroing[stream] = self.streams.event(stream) if self.streams.are_several else None

    def use(self) -> None:
        """Note the current stream as a user, and let it wait until other streams have zeroed what they committed.

        Neighbours in a page group need not know of each other: whose stream commits it must not zero it afterwards. A
        capture waits for nothing, since torch starts it on an idle device.
        """
        current, zeroing = self.streams.current(), self._zeroing
        if not zeroing or (len(zeroing) == 1 and current in zeroing) or is_capturing(self.device):
            return
        pending = []
        with self._zeroing_lock:
            for stream, noted in list(self._zeroing.items()):
                event = noted or self.streams.event(stream)
                if event is None:
                    continue  # it is being captured: ask again
                if event.query():
                    self._zeroing.pop(stream, None)
                    continue
                self._zeroing[stream] = event
                if stream != current:
                    pending.append(event)
        self.streams.wait(pending)

    # -- the mapper, which zeroes what it maps ahead on a stream of its own --------------------------------------------

    @cached_property
    def _mapper_stream(self) -> torch.cuda.Stream:
        make: Callable[..., torch.cuda.Stream] = torch.cuda.ExternalStream
        return make(get_mapper(self.space.pool.driver).stream, device=self.device)

    def wait_for_mapper(self) -> None:
        """Let the current stream wait until the mapper's stream has zeroed what it was given."""
        if self.device.type == "cuda":
            self.streams.wait([DeviceEvent(self._mapper_stream)])

    def finish_mapper(self) -> None:
        """Wait for that oneself."""
        if self.device.type == "cuda":
            DeviceEvent(self._mapper_stream).synchronize()

    def has_mapper_zeroed(self) -> bool:
        """Whether the mapper is at nothing of this region, and has zeroed what it mapped for it."""
        if not self.space.is_settled:
            return False
        if self.device.type == "cpu":
            return True
        times = self.space.num_asked_ahead
        if self._mapper_mark is None or self._mapper_mark[0] != times:  # no new one: its stream may always be busy
            self._mapper_mark = times, DeviceEvent(self._mapper_stream)
        return self._mapper_mark[1].query()

    @property
    def zero_calls(self) -> int:
        """As for `plan.commit_ready`: those of the pool that are known to have taken effect."""
        return -1 if self.device.type == "cpu" else self._zero_calls_seen

    def _is_mapper_idle(self, zero_calls: int = -1) -> bool:
        """Whether its stream is idle. `zero_calls`: those that were made before; nothing new needs no look."""
        if self.device.type == "cpu" or zero_calls == self._zero_calls_seen:
            return True
        with relaxed_capture():
            is_idle = bool(self._mapper_stream.query())
        if is_idle and zero_calls >= 0:
            self._zero_calls_seen = zero_calls
        return is_idle

    def withdraw(self, ranges: npt.NDArray[np.int64]) -> None:
        """Take places out of service, which stay mapped until somebody decommits or commits them."""
        try:
            self.space.withdraw(ranges)
        finally:
            self.decommit_epoch += 1  # afterwards: a view that looks meanwhile must look again

    def give_back(self, ranges: npt.NDArray[np.int64], what: str) -> int:
        """Take page groups away once the device has finished with them; their places read as zeros from then on.

        Returns
        -------
        int
            Number of page groups that went back to the pool.

        Raises
        ------
        VTensorError
            During a graph capture, whose replays would find nothing there.
        """
        check_not_capturing(self.device, what)
        self.streams.finish()
        return self.decommit(ranges, forget_content=True)

    def decommit(self, ranges: npt.NDArray[np.int64], *, forget_content: bool) -> int:
        """Take page groups away, with which the device has finished; views check again what they can reach."""
        try:
            return self.space.decommit(ranges, forget_content=forget_content)
        finally:
            self.decommit_epoch += 1  # afterwards: a view that looks meanwhile must look again


def _bury(space: AddressSpace, streams: StreamUse, process_id: int) -> None:
    """Give up the memory of a dead storage as soon as the device has finished with it."""
    _viewed.pop(space.base, None)
    if os.getpid() != process_id:
        return  # a forked child must not touch the parent's memory
    with interrupts_held():
        if streams.device.type == "cpu":
            space.close()
        elif is_capturing(streams.device):
            graveyard.bury(streams.record, space.close)
        else:
            graveyard.bury(streams.record(), space.close)
            graveyard.sweep()
