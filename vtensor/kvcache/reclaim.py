"""SlotMemory: gives memory to slots, and gets it back from those that can do without.

A slot that was freed keeps its page groups (DEFERRED) until somebody needs them, and so does a request that was
shortened (surplus). On a shortage they are taken: deferred slots first, oldest first, then surplus. Nothing is unmapped
before the device has finished with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vtensor.allocator import graveyard
from vtensor.allocator.address_space import Shortage
from vtensor.interrupts import interrupts_held
from vtensor.kvcache.slots import SlotState, SlotTable
from vtensor.region import Region
from vtensor.streams import DeviceEvent

__all__ = ["SlotMemory"]

Int64 = npt.NDArray[np.int64]


class SlotMemory:
    """The memory below a cache's slots. Not safe for several threads: the manager's lock is held.

    Parameters
    ----------
    region : Region
        The cache's addresses.
    slots : SlotTable
        Who holds what; kept in step with what is mapped.
    deferred_reclamation, scrub : bool
        As for `KVCacheManager`.
    """

    def __init__(self, region: Region, slots: SlotTable, *, deferred_reclamation: bool, scrub: bool) -> None:
        self._region = region
        self._slots = slots
        self._deferred_reclamation = deferred_reclamation
        self._scrub = scrub
        self._events: dict[int, list[DeviceEvent]] = {}  # of deferred slots: when the device has finished

    def commit(self, ranges: Int64, seq_lens: Int64) -> tuple[int, int]:
        """Commit ranges of places, if need be with what slots can do without.

        `seq_lens` are the lengths that the slots are to have; what they or the ones before need is not touched.

        Returns
        -------
        int, int
            Page groups that were mapped, and page groups that are missing. One of them is 0.
        """
        region = self._region
        was_drained = torch_was_asked = False
        while True:
            try:
                return region.try_commit(ranges), 0
            except Shortage as shortage:
                missing = shortage.page_groups
            if not was_drained:
                was_drained = True
                graveyard.drain()
            elif self.reclaim(missing, seq_lens):
                pass  # each time leaves less to reclaim, so this ends, whatever others do to the pool meanwhile
            elif not torch_was_asked and region.ask_torch():
                torch_was_asked = True
            else:
                return 0, missing - self._num_reclaimable(seq_lens)

    def _num_reclaimable(self, seq_lens: Int64) -> int:
        slots = self._slots
        held = slots.page_groups(slots.in_state(SlotState.DEFERRED))
        return int(held.sum() + slots.plan.surplus_ranges(slots.arrays, seq_lens, False)[:, 1].sum())

    def reclaim(self, missing: int, seq_lens: Int64) -> bool:
        """Give so many page groups back to the pool, if there are so many to give; else do nothing, and say so."""
        if self._num_reclaimable(seq_lens) < missing:
            return False
        slots, plan = self._slots, self._slots.plan
        deferred = slots.deferred_oldest_first()
        held = slots.page_groups(deferred)
        enough = int(np.searchsorted(np.cumsum(held), missing)) + 1
        self._take_from(deferred[:enough])
        if int(held.sum()) < missing:
            for event in self._region.streams.record():
                event.synchronize()
            surplus = plan.surplus_ranges(slots.arrays, seq_lens, False)
            self._region.decommit(surplus, forget_content=self._scrub)
            plan.surplus_ranges(slots.arrays, seq_lens, True)
        return True

    def _take_from(self, deferred: Int64) -> None:
        """Unmap all that some deferred slots hold, once the device has finished with it."""
        if len(deferred):
            for slot in deferred:
                for event in self._events.get(int(slot), []):
                    event.synchronize()
            ranges = self._slots.plan.slot_ranges(self._slots.arrays, deferred)
            self._region.decommit(ranges, forget_content=self._scrub)
            self._slots.clear(deferred)
            for slot in deferred:
                self._events.pop(int(slot), None)

    def sweep(self) -> None:
        """Give back what the device has finished with: what died elsewhere, and freed slots, if nothing is deferred."""
        graveyard.sweep()
        if not self._deferred_reclamation and self._events:
            done = [slot for slot, events in self._events.items() if _all_passed(events)]
            with interrupts_held():
                self._take_from(np.array(done, np.int64))

    def hand_over(self, slot: int) -> None:
        """Give a slot, with the page groups that it holds, to a new request: after the last one's kernels."""
        self._region.streams.current()
        self._region.streams.wait(self._events.get(slot, []))
        if self._scrub:
            self._zero(slot)
        self._events.pop(slot, None)
        self._slots.activate(slot)

    def defer(self, slot: int) -> None:
        """End a slot's request; its page groups wait for the device, and for somebody who needs them."""
        events = self._region.streams.record()
        self._slots.defer(slot)
        if self._slots.arrays.state[slot] == SlotState.DEFERRED:
            self._events[slot] = events

    def _zero(self, slot: int) -> None:
        space, stream = self._region.space, self._region.streams.current()
        size = space.page_group_bytes
        for first, count in self._slots.plan.slot_ranges(self._slots.arrays, np.array([slot], np.int64)).tolist():
            if count:
                space.pool.driver.zero(space.base + first * size, count * size, stream)


def _all_passed(events: Sequence[DeviceEvent]) -> bool:
    return all(event.query() for event in events)
