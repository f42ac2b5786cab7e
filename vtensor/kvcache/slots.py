"""Slots: who holds which, what a freed one keeps, and what can be taken from it again."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from vtensor.interrupts import interrupts_held
from vtensor.kvcache.layout import CacheLayout

__all__ = ["SlotState", "SlotTable"]


class SlotState(IntEnum):
    """What a slot is doing.

    ::

            alloc_reqid            free_reqid             reclaimed, or taken over
        FREE ---------> ACTIVE ----------------> DEFERRED ------------------------> FREE, or ACTIVE

    FREE holds no page group. DEFERRED holds those of its last request, until somebody needs them.
    """

    FREE = 0
    ACTIVE = 1
    DEFERRED = 2


class SlotTable:
    """State of all slots of a cache, one row a slot and layer group (see `plan.SlotArrays`). Makes no driver call."""

    def __init__(self, layout: CacheLayout) -> None:
        from vtensor.kvcache import plan

        self.plan: Any = plan
        config = layout.config
        shape = (len(layout.groups), config.max_batch_size)
        self.arrays = plan.SlotArrays(
            state=np.zeros(config.max_batch_size, np.int8),
            seq_lens=np.zeros(config.max_batch_size, np.int64),
            low=np.zeros(shape, np.int64),
            high=np.zeros(shape, np.int64),
            shared=np.zeros(shape, np.int64),
            groups=np.array(
                [(group.num_buffers, group.row_bytes, group.slot_places, group.first_place) for group in layout.groups],
                np.int64,
            ),
            limits=np.array([config.max_context_tokens, layout.page_group_bytes], np.int64),
        )
        with interrupts_held():  # an interrupt while LLVM loads code may crash the process
            plan.plan_step(self.arrays, np.zeros(config.max_batch_size, np.int64), np.zeros(2, np.int64))
        self._freed_at = np.zeros(config.max_batch_size, np.int64)
        self._num_freed = 0

    def in_state(self, state: SlotState) -> npt.NDArray[np.int64]:
        """Slots in a state, in ascending order."""
        return np.flatnonzero(self.arrays.state == state)

    def deferred_oldest_first(self) -> npt.NDArray[np.int64]:
        """Deferred slots in the order in which they were freed."""
        deferred = self.in_state(SlotState.DEFERRED)
        return deferred[np.argsort(self._freed_at[deferred])]

    def page_groups(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Page groups that each of some slots holds, over all buffers."""
        held = self.arrays.high[:, slots] - self.arrays.low[:, slots]
        return np.asarray((held * self.arrays.groups[:, :1]).sum(axis=0))

    def choose(self, prompt_tokens: int | None) -> int | None:
        """The slot for a new request, or None where all are active.

        With a known prompt: the deferred slot that fits best, the smallest that covers it or else the largest, if there
        is one. Otherwise the lowest that is not active.
        """
        deferred = self.in_state(SlotState.DEFERRED)
        if prompt_tokens and len(deferred):
            arrays = self.arrays
            page_group_bytes = int(arrays.limits[1])
            needed = -(-prompt_tokens * arrays.groups[:, 1] // page_group_bytes)
            covers = (arrays.high[:, deferred] >= needed[:, None]).all(axis=0)
            held = self.page_groups(deferred)
            if covers.any():
                return int(deferred[np.where(covers, held, np.iinfo(np.int64).max).argmin()])
            return int(deferred[held.argmax()])
        idle = np.flatnonzero(self.arrays.state != SlotState.ACTIVE)
        return int(idle[0]) if len(idle) else None

    def activate(self, slot: int) -> None:
        """Give a slot to a new request, with the page groups that it holds."""
        self.arrays.state[slot] = SlotState.ACTIVE
        self.arrays.seq_lens[slot] = 0

    def defer(self, slot: int) -> None:
        """End a slot's request; it keeps its page groups."""
        self._num_freed += 1
        self._freed_at[slot] = self._num_freed
        self.arrays.seq_lens[slot] = 0
        self.arrays.state[slot] = SlotState.DEFERRED if self.arrays.high[:, slot].any() else SlotState.FREE

    def clear(self, slots: npt.NDArray[np.int64]) -> None:
        """Note that deferred slots hold nothing any more."""
        self.arrays.state[slots] = SlotState.FREE
        self.arrays.low[:, slots] = 0
        self.arrays.high[:, slots] = 0
        self.arrays.shared[:, slots] = 0
