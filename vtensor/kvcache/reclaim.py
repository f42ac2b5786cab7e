"""SlotMemory: gives memory to slots, and gets it back from those that can do without.

A slot that was freed keeps its page groups (DEFERRED) until somebody needs them, and so does a request that was
shortened (surplus). They are taken when memory is short: at once in a step that needs them, deferred slots first,
oldest first, then surplus; or before that, as soon as less than a watermark is left, by the mapper. What a sliding
window has passed goes back in the same way. Nothing is unmapped before the device has finished with it, and a slot or
place that waits to be unmapped is out of service at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtensor.allocator import graveyard
from vtensor.allocator.address_space import Shortage
from vtensor.allocator.mapper import Job
from vtensor.interrupts import interrupts_held
from vtensor.kvcache.slots import SlotState, SlotTable
from vtensor.kvcache.turn import Turn
from vtensor.region import Region
from vtensor.streams import DeviceEvent

__all__ = ["SlotMemory"]

Int64 = npt.NDArray[np.int64]


@dataclass(eq=False)
class _Leaving:
    """Places of a slot that are out of service: they wait for the device, and then for the mapper to unmap them."""

    slot: int
    ranges: Int64
    events: Sequence[DeviceEvent]
    is_passed: bool  # by windows of a request that goes on; otherwise whole layer groups of a slot without one
    job: Job | None = None
    end: int = 0  # of its ranges among those of the job

    @property
    def is_unmapped(self) -> bool:
        return self.job is not None and self.job.is_done and self.job.num_done >= self.end


class SlotMemory:
    """The memory below a cache's slots. Not safe for several threads: the manager's lock is held.

    Parameters
    ----------
    region : Region
        The cache's addresses.
    slots : SlotTable
        Who holds what; kept in step with what is mapped.
    lock : RLock
        The manager's, which is held in every call but `give_up`.
    turn : Turn
        Likewise.
    deferred_reclamation, scrub : bool
    low_watermark, high_watermark : float
        As for `KVCacheManager`.
    """

    def __init__(
        self,
        region: Region,
        slots: SlotTable,
        lock: threading.RLock,
        turn: Turn,
        *,
        deferred_reclamation: bool,
        scrub: bool,
        low_watermark: float,
        high_watermark: float,
    ) -> None:
        self._region = region
        self._slots = slots
        self._lock = lock
        self._turn = turn
        self._deferred_reclamation = deferred_reclamation
        self._scrub = scrub
        self._watermarks = low_watermark, high_watermark
        self._events: dict[int, list[DeviceEvent]] = {}  # of deferred slots: when the device has finished
        self._leaving: list[_Leaving] = []
        self._unmapping: deque[tuple[Job, bool]] = deque()  # jobs, and whether they are for what windows have passed
        self._check_in = 0  # page groups that may still be mapped before the watermark is looked at again
        self.num_reclaimed = self.num_trimmed = self.num_passed = self.num_failed = 0
        with interrupts_held():  # loads the compiled code, as `SlotTable` does
            self._surplus(np.zeros_like(slots.arrays.seq_lens), cut=False)
            slots.plan.recede(slots.arrays, region.space.arrays, 0)

    # -- commit -----------------------------------------------------------------------------------------------------

    def commit(self, ranges: Int64, seq_lens: Int64) -> tuple[int, int, int]:
        """Commit ranges of places, if need be with what slots can do without.

        `seq_lens` are the lengths that the slots are to have; what they or the ones before need is not touched.

        Returns
        -------
        int, int, int
            Page groups that came into service, those of them that were mapped ahead, and page groups that are missing.
        """
        region = self._region
        remedies = iter((self._settle, graveyard.drain))
        torch_was_asked = False
        while True:
            try:
                return *region.try_commit(ranges), 0
            except Shortage as shortage:
                missing = shortage.page_groups
            remedy = next(remedies, None)
            if remedy is not None:
                remedy()
            elif self.reclaim(missing, seq_lens):
                pass  # each time leaves less to reclaim, so this ends, whatever others do to the pool meanwhile
            elif not torch_was_asked and region.ask_torch():
                torch_was_asked = True
            elif region.space.pool.ask_holders(missing - self._num_reclaimable(seq_lens), but=self):
                pass
            else:
                return 0, 0, missing - self._num_reclaimable(seq_lens)

    def _settle(self) -> None:
        """Have the mapper end what it is at, and take away at once what waits for the device."""
        self._region.space.settle(cancel=True)
        self._finish_ahead()
        self._collect()
        self._flush()

    def _flush(self) -> None:
        """Unmap what is out of service, once the device has finished with it."""
        while self._leaving:
            leaving = self._leaving[0]
            for event in leaving.events:
                event.synchronize()
            self._count(self._decommit(leaving.ranges), leaving.is_passed)
            self._leaving.pop(0)
            self._has_left(leaving)

    # -- reclamation ------------------------------------------------------------------------------------------------

    def _num_reclaimable(self, seq_lens: Int64) -> int:
        deferred = self._slots.in_state(SlotState.DEFERRED)
        return self._num_mapped(self._slots.ranges(deferred)) + self._num_mapped(self._surplus(seq_lens, cut=False))

    def _num_mapped(self, ranges: Int64) -> int:
        table = self._region.space.arrays.table
        return sum(int(np.count_nonzero(table[first : first + count])) for first, count, _, _ in ranges.tolist())

    def _surplus(self, seq_lens: Int64, *, cut: bool) -> Int64:
        space, slots = self._region.space, self._slots
        ranges = slots.plan.surplus_ranges(slots.arrays, space.pool.arrays, space.arrays, seq_lens, cut)
        return ranges  # type: ignore[no-any-return]

    def reclaim(self, missing: int, seq_lens: Int64) -> bool:
        """Give so many page groups back to the pool, if there are so many to give; else do nothing, and say so."""
        if self._num_reclaimable(seq_lens) < missing:
            return False
        self._finish_ahead()
        deferred = self._slots.deferred_oldest_first()
        for slot in deferred.tolist():
            if missing <= 0:
                return True
            missing -= self._take_from(slot)
        if missing > 0:
            self._trim(seq_lens)
        return True

    def give_up(self, missing: int) -> int:
        """Give up to so many page groups to others that use the pool: deferred slots first, then surplus.

        Comes from other threads and for other caches, which hold their own locks: where this one is busy it gives
        nothing, rather than wait.
        """
        with interrupts_held():
            if not self._lock.acquire(blocking=False):
                return 0
            try:
                if self._turn.is_taken or self._region.space.closed or self._region.streams.is_any_capturing():
                    return 0
                with self._turn:
                    return self._give(missing)
            finally:
                self._lock.release()

    def _give(self, missing: int) -> int:
        before = self._region.space.num_mapped
        self._settle()
        for slot in self._slots.deferred_oldest_first().tolist():
            if before - self._region.space.num_mapped >= missing:
                break
            self._take_from(slot)
        if before - self._region.space.num_mapped < missing:
            self._trim(np.zeros_like(self._slots.arrays.seq_lens))
        return before - self._region.space.num_mapped

    def _trim(self, seq_lens: Int64) -> None:
        """Take surplus out of service, and unmap it once the device has finished with it."""
        surplus = self._surplus(seq_lens, cut=False)
        if not len(surplus):
            return
        extent = self._slots.arrays.extent
        before = extent.copy()
        self._region.withdraw(surplus)
        self._surplus(seq_lens, cut=True)
        try:
            self._region.streams.finish()
            self.num_trimmed += self._decommit(surplus)
        except BaseException:
            extent[:] = before  # it is still mapped, ahead
            raise

    def _take_from(self, slot: int) -> int:
        """Unmap all that a deferred slot holds, once the device has finished with it; the number of page groups."""
        before = self._region.space.num_mapped
        self._give_up(slot)
        self._flush()
        return before - self._region.space.num_mapped

    def _decommit(self, ranges: Int64) -> int:
        return self._region.decommit(ranges, forget_content=self._scrub)

    def _finish_ahead(self) -> None:
        """Wait until what was mapped ahead is zeroed as well, before somebody unmaps it."""
        if self._region.space.num_ahead:
            self._region.finish_mapper()

    # -- in the background ------------------------------------------------------------------------------------------

    def note_mapped(self, num_mapped: int) -> None:
        """Note that so many page groups came into service."""
        self._check_in -= num_mapped

    def is_check_due(self) -> bool:
        """Whether `keep_watermark` may have something to do."""
        pool = self._region.space.pool
        if pool.capacity_bytes is not None:
            return pool.num_available < int(self._watermarks[0] * pool.headroom()[1])
        return self._check_in <= 0  # to ask the device takes time

    def keep_watermark(self) -> None:
        """When less than the low watermark is left, give up deferred slots up to the high one, oldest first."""
        if not self.is_check_due():
            return
        # First what is on its way, then what is there: what arrives in between must not be missed, or too much goes.
        going = [0] * len(self._slots.arrays.state)
        for leaving in self._leaving:
            going[leaving.slot] += self._num_mapped(leaving.ranges)
        available, total = self._region.space.pool.headroom()
        low, high = (int(part * total) for part in self._watermarks)
        if available >= low:
            self._check_in = max(1, (available - low) // 4)  # others may use the same memory
            return
        available += sum(going)
        deferred = self._slots.deferred_oldest_first().tolist()
        if not deferred:
            self._check_in = max(1, total // 64)  # there is nothing to give up, and asking the device takes time
        for slot in deferred:
            if available >= high:
                break
            available += self._num_mapped(self._slots.ranges([slot])) - going[slot]
            self._give_up(slot)
        self.sweep()

    def _give_up(self, slot: int) -> None:
        """Have all that a slot without a request holds unmapped."""
        self._let_go(slot, self._slots.ranges([slot]), self._call_back(slot))
        self._slots.withdraw(slot)

    def _call_back(self, slot: int) -> list[DeviceEvent]:
        """Have nothing of a slot leave any more; the events for which its next user has to wait."""
        events = self._events.pop(slot, [])
        for leaving in [leaving for leaving in self._leaving if leaving.slot == slot]:
            self._leaving.remove(leaving)
            events.extend(leaving.events)
            if leaving.job is not None:
                leaving.job.cancel()
                leaving.job.wait()
        return events

    def pass_windows(self) -> None:
        """Put out of service what windows have passed; it is unmapped once the device has finished with it."""
        slots, events = self._slots, self._region.streams.record()
        for slot in np.flatnonzero((slots.arrays.passed < slots.arrays.low).any(axis=0)).tolist():
            self._let_go(slot, slots.plan.passed_ranges(slots.arrays, slot), events, is_passed=True)

    def _let_go(self, slot: int, ranges: Int64, events: Sequence[DeviceEvent], *, is_passed: bool = False) -> None:
        self._region.withdraw(ranges)
        self._leaving.append(_Leaving(slot, ranges, events, is_passed))

    def sweep(self) -> None:
        """Give back, or have given back, what the device has finished with."""
        graveyard.sweep()
        if self._leaving or self._unmapping:
            with interrupts_held():
                self._sweep()

    def _sweep(self) -> None:
        self._collect()
        if not self._region.has_mapper_zeroed():
            return  # what is to go may be what it zeroes
        waiting = [leaving for leaving in self._leaving if leaving.job is None and _have_passed(leaving.events)]
        for is_passed in (True, False):  # apart, as they are counted apart
            ready = [leaving for leaving in waiting if leaving.is_passed == is_passed]
            if ready:
                self._unmap(ready, is_passed)

    def _unmap(self, ready: list[_Leaving], is_passed: bool) -> None:
        ranges = np.concatenate([leaving.ranges for leaving in ready])
        job = self._region.space.decommit_later(ranges, forget_content=self._scrub)
        self._unmapping.append((job, is_passed))
        end = 0
        for leaving in ready:
            end += len(leaving.ranges)
            leaving.job, leaving.end = job, end

    def _collect(self) -> None:
        """Take note of what the mapper has unmapped; what it could not, or was not let, is tried again."""
        while self._unmapping and self._unmapping[0][0].is_done:
            job, is_passed = self._unmapping.popleft()
            self._count(job.num_page_groups, is_passed)
            self.num_failed += job.has_failed
        kept = []
        for one in self._leaving:
            if one.is_unmapped:
                self._has_left(one)
                continue
            if one.job is not None and one.job.is_done:
                one.job = None
            if one.job is None and one.is_passed and self._slots.arrays.state[one.slot] != SlotState.ACTIVE:
                continue  # its request has ended, and gave up the rest of the layer group together with this
            kept.append(one)
        self._leaving = kept

    def _count(self, number: int, is_passed: bool) -> None:
        if is_passed:
            self.num_passed += number
        else:
            self.num_reclaimed += number

    def _has_left(self, leaving: _Leaving) -> None:
        if not leaving.is_passed:
            self._slots.has_left(leaving.slot, leaving.ranges)

    # -- slots ------------------------------------------------------------------------------------------------------

    def hand_over(self, slot: int) -> None:
        """Give a slot, with the page groups that it holds, to a new request: after the last one's kernels."""
        streams = self._region.streams
        streams.current()
        events = self._call_back(slot)
        streams.wait(events)
        if self._scrub:
            try:
                self._zero(slot)
            except BaseException:
                self._events[slot] = events
                self._give_up(slot)
                raise
        self._slots.activate(slot)

    def defer(self, slot: int) -> None:
        """End a slot's request; its page groups wait for the device, and for somebody who needs them."""
        events = self._region.streams.record()
        ranges = self._slots.defer(slot)
        if len(ranges):
            self._let_go(slot, ranges, events)
        if self._slots.arrays.state[slot] == SlotState.DEFERRED:
            self._events[slot] = events
            if not self._deferred_reclamation:
                self._give_up(slot)

    def _zero(self, slot: int) -> None:
        region = self._region
        space, size = region.space, region.space.page_group_bytes
        if space.num_ahead:
            space.settle()
            region.wait_for_mapper()
        for first, count in space.mapped_runs(self._slots.ranges([slot])):
            space.pool.driver.zero(space.base + first * size, count * size, region.streams.current())


def _have_passed(events: Sequence[DeviceEvent]) -> bool:
    return all(event.query() for event in events)
