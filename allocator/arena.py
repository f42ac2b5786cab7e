"""Arena: addresses from which torch's segments are cut, whose memory can be taken away and put back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import _disable_current_modes

from vtensor.allocator.address_space import AddressSpace, Shortage, check_outcome, out_of_pages
from vtensor.allocator.page_pool import PagePool
from vtensor.allocator.words import (
    ARENA_HEADER_WORDS,
    COUNT,
    END_MAPPED,
    FAILED_BYTES,
    FIRST,
    FIRST_MAPPED,
    IS_ASLEEP,
    KEEPS_FREE,
    MOST_PLACES,
    NUM_FAILED,
    NUM_LEFT_OVER,
    NUM_SEGMENTS,
    NUM_WAITING_CALLS,
    OUTCOME_WORDS,
    PROCESS_ID,
    SEGMENT_PLACES,
    SHORTFALL,
    WAITING_CALLS,
)
from vtensor.errors import DriverError, VTensorError
from vtensor.interrupts import interrupts_held
from vtensor.units import MIB, format_bytes
from vtensor.unpicklable import Unpicklable

__all__ = ["Arena", "MemoryStats", "Offload", "check_offload"]

Offload = Literal["cpu", "discard"]
_BUFFER_BYTES = 256 * MIB  # a power of two: torch rounds pinned memory up to one


def check_offload(offload: object) -> None:
    """Raise `ValueError` unless it is an `Offload`."""
    if offload not in get_args(Offload):
        raise ValueError(f"offload={offload!r} must be 'cpu' or 'discard'")


@dataclass(frozen=True)
class MemoryStats:
    """Memory of torch's segments at one moment, in bytes.

    Attributes
    ----------
    reserved_bytes : int
        Of all segments that torch has, asleep or not. torch's own ``memory_reserved`` counts the same.
    committed_bytes : int
        Device memory behind them.
    asleep_bytes : int
        Of segments whose memory was taken away.
    offloaded_bytes : int
        Host memory that holds their content. (When they are awake torch keeps it, pinned, for the next time.)
    peak_reserved_bytes : int
        The most that was ever reserved; of several arenas the sum of that, also if it was not at the same time.
    num_segments : int
        Segments that torch has.
    num_failed : int
        Segments that torch asked for in vain.
    """

    reserved_bytes: int = 0
    committed_bytes: int = 0
    asleep_bytes: int = 0
    offloaded_bytes: int = 0
    peak_reserved_bytes: int = 0
    num_segments: int = 0
    num_failed: int = 0

    def __add__(self, other: MemoryStats) -> MemoryStats:
        return MemoryStats(*(mine + theirs for mine, theirs in zip(self._values(), other._values(), strict=True)))

    def _values(self) -> list[int]:
        return [getattr(self, name) for name in self.__dataclass_fields__]


@dataclass(frozen=True)
class _Copy:
    """Part of a segment in host memory."""

    segment: int  # its first place
    address: int
    buffer: torch.Tensor
    offset: int
    size_bytes: int


class Arena(Unpicklable):
    """A range of addresses for segments of torch's allocator.

    torch takes and returns segments through `allocate_callback` and `free_callback`, from any thread and without the
    GIL. A segment is backed by page groups of the pool, stitched together at neighbouring addresses, in the largest
    handles that fit; they hold whatever they last held. A segment that torch returns gives its memory back once the
    stream for which torch asked for it has done what it was given.

    Parameters
    ----------
    pool : PagePool
        Where page groups come from. Where it keeps none that are free, they go back to the device.
    size_bytes : int
        Of addresses; many times what all segments together may take.

    Attributes
    ----------
    allocate_callback, free_callback : int
        Addresses of C functions: ``void *allocate(ssize_t size, int device, cudaStream_t stream)``, which returns 0
        where there is no memory, and ``void free(void *, ssize_t size, int device, cudaStream_t stream)``.
    """

    def __init__(self, pool: PagePool, size_bytes: int) -> None:
        from vtensor.allocator import native, segments

        self.space = AddressSpace(pool, size_bytes)
        self._native: Any = segments
        self._arrays = segments.ArenaArrays(
            np.zeros(ARENA_HEADER_WORDS, np.int64), native.sparse_array(self.space.num_places, np.int32)
        )
        header = self._arrays.header
        header[KEEPS_FREE], header[PROCESS_ID] = pool.keeps_free_page_groups, os.getpid()
        self.space.sleeper = header
        header[WAITING_CALLS : WAITING_CALLS + NUM_WAITING_CALLS] = pool.driver.waiting_calls
        self._words = np.concatenate([self.space.words, native.packed(self._arrays)])
        address = int(self._words.ctypes.data)
        self.allocate_callback = native.bound(segments.ALLOCATE, address, "int64(int64, int32, int64)")
        self.free_callback = native.bound(segments.FREE, address, "void(int64, int64, int32, int64)")
        self._lock = threading.RLock()
        self._is_changing = False
        self._is_away = False  # whether memory was taken away; if so:
        self._copies: list[_Copy] | None = None  # None: what was there was dropped
        with interrupts_held():  # load compiled code now: nobody should wait for it later, or interrupt it
            outcome = np.zeros(OUTCOME_WORDS, np.int64)
            segments.fall_asleep(self._words, outcome)
            segments.map_segments(self._words, outcome)
            segments.wake_up(self._words, outcome)
            segments.sweep(self._words, outcome)

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<Arena {self.space.pool.driver.device}: {stats.num_segments} segments, "
            f"{format_bytes(stats.reserved_bytes)}, {format_bytes(stats.committed_bytes)} committed>"
        )

    @property
    def is_asleep(self) -> bool:
        """Whether the segments' memory is away."""
        return bool(self._arrays.header[IS_ASLEEP])

    @property
    def last_failed_bytes(self) -> int:
        """Bytes of the last segment that torch asked for in vain."""
        return int(self._arrays.header[FAILED_BYTES])

    def stats(self) -> MemoryStats:
        """What the segments take, now."""
        header, size = self._arrays.header.copy(), self.space.page_group_bytes
        buffers = {id(copy.buffer): copy.buffer.numel() for copy in self._copies or ()}
        reserved = int(header[SEGMENT_PLACES]) * size
        return MemoryStats(
            reserved_bytes=reserved,
            committed_bytes=self.space.num_mapped * size,
            asleep_bytes=reserved if header[IS_ASLEEP] else 0,
            offloaded_bytes=sum(buffers.values()),
            peak_reserved_bytes=int(header[MOST_PLACES]) * size,
            num_segments=int(header[NUM_SEGMENTS]),
            num_failed=int(header[NUM_FAILED]),
        )

    def sleep(self, offload: Offload = "cpu") -> int:
        """Take the memory of all segments away, and keep their addresses. Waits for the device.

        Until `wake` no segment can be allocated, and nothing may use those that are there; they may be freed.

        Parameters
        ----------
        offload : {"cpu", "discard"}
            Keep what they hold in host memory, pinned for a GPU; or drop it.

        Returns
        -------
        int
            Bytes that went back; 0 where the arena was asleep already, which changes nothing.

        Raises
        ------
        VTensorError
            No host memory for the content; nothing was changed.
        DriverError
            The driver refused; nothing was changed. Where undoing failed as well, as the message says, or free memory
            could not be released, the arena is asleep, and nothing is lost.
        ClosedError
            The arena was closed.
        """
        check_offload(offload)
        self.space.pool.driver.check_process()
        return self._change(lambda: self._sleep(offload))

    def _sleep(self, offload: Offload) -> int:
        self.space.check_open()
        pool, driver = self.space.pool, self.space.pool.driver
        if self._is_away:
            pool.trim_unless_kept()  # what an error or an interrupt may have left
            return 0
        outcome, copies = np.zeros(OUTCOME_WORDS, np.int64), None
        driver.finish_device()
        try:
            with interrupts_held():
                segments = self._native.fall_asleep(self._words, outcome)
                check_outcome(pool, outcome)
            driver.finish_device()  # of what it was given in between
            if offload == "cpu":
                copies = self._copied_out(segments)
            with interrupts_held():
                try:
                    number = self._unmap()
                finally:
                    if self.space.count_missing(segments):  # so too where undoing failed: the copies have it
                        self._copies, self._is_away = copies, True
        except BaseException:
            if not self._is_away:
                with interrupts_held():
                    self._stop_copying()
                    self._wake_up()
            raise
        self._is_away = True
        pool.trim_unless_kept()
        return number * self.space.page_group_bytes

    def wake(self) -> int:
        """Put memory back below all segments, with what they held; zeros, where that was dropped.

        Returns
        -------
        int
            Bytes that were committed; 0 where the arena was awake already.

        Raises
        ------
        OutOfPagesError
            Not enough memory; the arena sleeps on, and nothing is lost.
        DriverError
            The driver refused; the arena sleeps on.
        """
        self.space.pool.driver.check_process()
        return self._change(self._wake)

    def _wake(self) -> int:
        self.space.check_open()
        pool = self.space.pool
        if not self._is_away:
            if self.is_asleep:  # it was interrupted on the way
                self._wake_up()
            return 0
        outcome = np.zeros(OUTCOME_WORDS, np.int64)
        try:
            with interrupts_held():
                segments = self._native.map_segments(self._words, outcome)
                if outcome[SHORTFALL]:
                    raise out_of_pages(self.space, "waking up", Shortage(int(outcome[SHORTFALL])))
                check_outcome(pool, outcome)
            self._fill(segments)
        except BaseException:
            with interrupts_held():
                self._stop_copying()
                self._unmap()
                with suppress(DriverError):  # what went wrong first is worth more
                    pool.trim_unless_kept()
            raise
        with interrupts_held():
            self._wake_up()
            self._copies, self._is_away = None, False
        return int(segments[:, COUNT].sum()) * self.space.page_group_bytes

    def sweep(self) -> int:
        """Take away what torch gave back and could not be unmapped at once. Waits for the device, if there is any.

        Returns
        -------
        int
            Segments that were left over.

        Raises
        ------
        DriverError
            The driver refuses again.
        """
        self.space.pool.driver.check_process()
        return self._change(self._sweep)

    def _sweep(self) -> int:
        self.space.check_open()
        number = int(self._arrays.header[NUM_LEFT_OVER])
        if number and not self.is_asleep:
            outcome = np.zeros(OUTCOME_WORDS, np.int64)
            self.space.pool.driver.finish_device()
            with interrupts_held():
                self._native.sweep(self._words, outcome)
                check_outcome(self.space.pool, outcome)
        self.space.pool.trim_unless_kept()
        return number

    def _change(self, action: Callable[[], int]) -> int:
        """Do what changes whether the segments have memory; one thread does, and nobody in the middle of it."""
        with self._lock:
            if self._is_changing:  # a finalizer, or a signal's handler
                raise VTensorError(f"{self!r} is just falling asleep or waking up in this thread")
            try:
                self._is_changing = True
                return action()
            finally:
                self._is_changing = False

    def _wake_up(self) -> None:
        outcome = np.zeros(OUTCOME_WORDS, np.int64)
        with interrupts_held():
            self._native.wake_up(self._words, outcome)

    @cached_property
    def _stream(self) -> int:
        return self.space.pool.driver.new_stream()

    def _copied_out(self, segments: npt.NDArray[np.int64]) -> list[_Copy]:
        """Copies of all segments, in buffers that they share."""
        driver, size = self.space.pool.driver, self.space.page_group_bytes
        left = int(segments[:, COUNT].sum()) * size
        copies: list[_Copy] = []
        buffer, offset = self._host_buffer(0), 0
        for first, count in segments[:, [FIRST, COUNT]].tolist():
            address, end = self.space.base + first * size, self.space.base + (first + count) * size
            while address < end:
                if offset == buffer.numel():
                    buffer, offset = self._host_buffer(min(left, _BUFFER_BYTES)), 0
                number = min(end - address, buffer.numel() - offset)
                driver.copy_to_host(buffer.data_ptr() + offset, address, number, self._stream)
                copies.append(_Copy(first, address, buffer, offset, number))
                address, offset, left = address + number, offset + number, left - number
        driver.finish(self._stream)
        return copies

    def _host_buffer(self, size_bytes: int) -> torch.Tensor:
        is_gpu = self.space.pool.driver.kind == "cuda"
        try:
            with torch._C.DisableTorchFunction(), _disable_current_modes():  # real memory, and none of ours
                return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_gpu)
        except RuntimeError as error:
            raise VTensorError(
                f"{format_bytes(size_bytes)} of host memory for what {self!r} holds cannot be had: {error}. Nothing "
                "was changed; free some, or drop the content (offload='discard')"
            ) from error

    def _fill(self, segments: npt.NDArray[np.int64]) -> None:
        """Write what segments held, or zeros."""
        driver, size = self.space.pool.driver, self.space.page_group_bytes
        if self._copies is None:
            for first, count in segments[:, [FIRST, COUNT]].tolist():
                driver.zero(self.space.base + first * size, count * size, self._stream)
        else:
            alive = set(segments[:, FIRST].tolist())
            for copy in self._copies:
                if copy.segment in alive:
                    host_address = copy.buffer.data_ptr() + copy.offset
                    driver.copy_to_device(copy.address, host_address, copy.size_bytes, self._stream)
        driver.finish(self._stream)

    def _stop_copying(self) -> None:
        """After an error: let nothing be copied any more from or to what is given up."""
        with suppress(DriverError):
            self.space.pool.driver.finish(self._stream)

    def _unmap(self) -> int:
        """Take all memory away; page groups."""
        header = self.space.arrays.header
        first, end = int(header[FIRST_MAPPED]), int(header[END_MAPPED])
        if first >= end:
            return 0
        return self.space.decommit(np.array([[first, end - first]], np.int64), forget_content=True)

    def check_integrity(self) -> None:
        """Compare the books with the addresses; nobody may allocate or free meanwhile.

        Raises
        ------
        VTensorError
            They do not agree; the message says where.
        """
        self.space.pool.check_integrity()
        header, lengths = self._arrays.header, self._arrays.lengths
        starts = np.flatnonzero(lengths)
        counts = np.abs(lengths[starts])
        problems = []
        if (starts[1:] < starts[:-1] + counts[:-1]).any():
            problems.append("two segments overlap")
        if (int((lengths > 0).sum()), int(lengths[lengths > 0].sum())) != (
            header[NUM_SEGMENTS],
            header[SEGMENT_PLACES],
        ):
            problems.append("segments are counted wrongly")
        if int((lengths < 0).sum()) != header[NUM_LEFT_OVER]:
            problems.append("what is left over is counted wrongly")
        covered = np.zeros(self.space.num_places + 1, np.int32)
        np.add.at(covered, starts, 1)
        np.add.at(covered, starts + counts, -1)
        is_mapped, is_covered = self.space.arrays.table != 0, np.cumsum(covered[:-1]) > 0
        if (is_mapped & ~is_covered).any() or (not self.is_asleep and (is_covered & ~is_mapped).any()):
            problems.append("mapped places are not those of segments")
        if problems:
            raise VTensorError(f"{self!r}: " + "; ".join(problems))

    def close(self) -> None:
        """Give the addresses back. A second call does nothing.

        Raises
        ------
        VTensorError
            torch still has segments.
        """
        self._change(self._close)

    def _close(self) -> int:
        if self.space.closed:
            return 0
        outcome, was_asleep = np.zeros(OUTCOME_WORDS, np.int64), self.is_asleep
        self.space.pool.driver.finish_device()
        with interrupts_held():
            segments = self._native.fall_asleep(self._words, outcome)  # from here on none comes
            check_outcome(self.space.pool, outcome)
            if len(segments):
                if not was_asleep:
                    self._wake_up()
                raise VTensorError(f"{self!r} cannot be closed: torch still has segments; drop their tensors, and trim")
            self.space.close()
        return 0
