"""Slots: who holds which, what a freed one keeps, and what can be taken from it again."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vtensor.allocator.page_pool import PagePool
from vtensor.allocator.words import LARGEST_SIZE_CLASS, RANGE_WORDS
from vtensor.interrupts import interrupts_held
from vtensor.kvcache.layout import CacheLayout

if TYPE_CHECKING:
    from vtensor.allocator.plan import SpaceArrays

__all__ = ["SlotState", "SlotTable"]

Int64 = npt.NDArray[np.int64]


class SlotState(IntEnum):
    """What a slot is doing.

    ::

                alloc_reqid            free_reqid             a watermark (in a shortage, at once)
           FREE ---------> ACTIVE ----------------> DEFERRED ----------------------> RECLAIMING
            ^ |              ^      alloc_reqid      |   ^                             |     |
            | |              +-----------------------+   |                             |     |
            | |              +-----------------------------------alloc_reqid-----------+     |
            | +------------------------------------------+                                   |
            |         mapped ahead (eager slot)                      unmapped                |
            +--------------------------------------------------------------------------------+

    FREE holds nothing. DEFERRED holds what its last request did, or what was mapped ahead for the next one, until
    somebody needs it. RECLAIMING is out of service, and unmapped as soon as the device has finished with it.
    """

    FREE = 0
    ACTIVE = 1
    DEFERRED = 2
    RECLAIMING = 3


class SlotTable:
    """State of all slots of a cache, one row a slot and layer group (see `plan.SlotArrays`). Makes no driver call.

    Parameters
    ----------
    layout : CacheLayout
    pool : PagePool
        Gives out the marks by which the data of different dtypes is told apart.
    lookahead_tokens : int
        As for `KVCacheManager`.
    """

    def __init__(self, layout: CacheLayout, pool: PagePool, lookahead_tokens: int) -> None:
        from vtensor.allocator.native import packed
        from vtensor.kvcache import plan

        self.plan: Any = plan
        config = layout.config
        shape = (len(layout.groups), config.max_batch_size)
        marks = {dtype: pool.new_content() for dtype in {group.dtype for group in layout.groups}}
        self.arrays = plan.SlotArrays(
            state=np.zeros(config.max_batch_size, np.int8),
            seq_lens=np.zeros(config.max_batch_size, np.int64),
            computed=np.zeros(config.max_batch_size, np.int64),
            low=np.zeros(shape, np.int64),
            high=np.zeros(shape, np.int64),
            shared=np.zeros(shape, np.int64),
            extent=np.zeros(shape, np.int64),
            asked=np.zeros(shape, np.int64),
            passed=np.zeros(shape, np.int64),
            groups=np.array(
                [
                    (
                        group.num_buffers,
                        group.row_bytes,
                        group.slot_places,
                        group.first_place,
                        min(group.window or 0, config.max_context_tokens),  # a longer one passes nothing either
                        marks[group.dtype],
                        # What a window passes is taken away place by place.
                        LARGEST_SIZE_CLASS if group.window is None else 0,
                    )
                    for group in layout.groups
                ],
                np.int64,
            ),
            prompts=np.zeros(1 + plan.NUM_PROMPTS, np.int64),
            max_tokens=config.max_context_tokens,
            page_group_bytes=layout.page_group_bytes,
            overread_tokens=config.overread_tokens,
            lookahead_tokens=lookahead_tokens,
        )
        self.words = packed(self.arrays)
        self.has_windows = any(group.window is not None for group in layout.groups)
        self.rows_a_slot = sum(group.num_buffers for group in layout.groups)
        no_job = np.zeros(0, np.int64)
        nothing, answer = np.zeros(config.max_batch_size, np.int64), np.zeros(plan.ANSWER_WORDS, np.int64)
        with interrupts_held():  # an interrupt while LLVM loads code may crash the process; loaded now, no step waits
            plan.step(self.words, no_job, no_job, -1, nothing, answer)
            plan.needed_ranges(self.arrays, nothing)
            plan.apply_step(self.arrays, nothing, answer)
            plan.ahead_ranges(self.arrays, nothing)
            plan.spare_ranges(self.arrays, 0, 1, False)
            plan.passed_ranges(self.arrays, 0)
            plan.slot_ranges(self.arrays, nothing[:0], False)
        self._freed_at = np.zeros(config.max_batch_size, np.int64)
        self._num_freed = 0
        self._spare: int | None = None

    def in_state(self, state: SlotState) -> Int64:
        """Slots in a state, in ascending order."""
        return np.flatnonzero(self.arrays.state == state)

    def deferred_oldest_first(self) -> Int64:
        """Deferred slots in the order in which they were freed."""
        deferred = self.in_state(SlotState.DEFERRED)
        return deferred[np.argsort(self._freed_at[deferred])]

    def places(self, slots: Int64) -> Int64:
        """Places of each of some slots, over all buffers, that hold page groups or were to hold them."""
        return np.asarray((self.arrays.extent[:, slots] * self.arrays.groups[:, :1]).sum(axis=0))

    def ranges(self, slots: Int64 | list[int], *, in_service: bool = False) -> Int64:
        """Ranges of places of some slots, slot by slot, `rows_a_slot` each: all that may be mapped, or in service."""
        return self.plan.slot_ranges(self.arrays, np.asarray(slots, np.int64), in_service)  # type: ignore[no-any-return]

    def covers(self, slots: Int64, tokens: int) -> npt.NDArray[np.bool_]:
        """Whether each of some slots holds enough for a prompt of so many tokens, in places that it starts with."""
        arrays, plan = self.arrays, self.plan
        needed = -(-(tokens + arrays.overread_tokens) * arrays.groups[:, plan.ROW_BYTES] // arrays.page_group_bytes)
        return np.asarray((arrays.extent[:, slots] >= needed[:, None]).all(axis=0))

    def choose(self, prompt_tokens: int | None) -> int | None:
        """The slot for a new request, or None where all are taken.

        With a known prompt: the deferred slot that fits best, the smallest that covers it or else the largest, if there
        is one. Otherwise the lowest that is not active.
        """
        deferred = self.in_state(SlotState.DEFERRED)
        if prompt_tokens and len(deferred):
            covers, held = self.covers(deferred, prompt_tokens), self.places(deferred)
            if covers.any():
                return int(deferred[np.where(covers, held, np.iinfo(np.int64).max).argmin()])
            return int(deferred[held.argmax()])
        idle = np.flatnonzero(self.arrays.state != SlotState.ACTIVE)
        return int(idle[0]) if len(idle) else None

    def activate(self, slot: int) -> None:
        """Give a slot to a new request, with the places that it holds."""
        self.arrays.state[slot] = SlotState.ACTIVE
        self.arrays.seq_lens[slot] = self.arrays.computed[slot] = 0
        self.arrays.asked[:, slot] = self.arrays.high[:, slot]
        if slot == self._spare:
            self._spare = None

    def defer(self, slot: int) -> Int64:
        """End a slot's request; it keeps its places, but where a window has passed the first of them.

        Returns
        -------
        ndarray of int64, shape [n, 4]
            Ranges of places that go out of service for that reason.
        """
        arrays, plan = self.arrays, self.plan
        self._set_freed(slot)
        arrays.seq_lens[slot] = 0
        out = np.empty((0, RANGE_WORDS), np.int64)
        windowed = arrays.low[:, slot] > 0
        if windowed.any():
            rows = self.ranges([slot])
            rows_group = np.repeat(np.arange(len(arrays.groups)), arrays.groups[:, plan.NUM_BUFFERS])
            out = rows[windowed[rows_group]]
            for part in (arrays.low, arrays.high, arrays.passed):
                part[windowed, slot] = 0
        arrays.state[slot] = SlotState.DEFERRED if arrays.extent[:, slot].any() else SlotState.FREE
        return out

    def _set_freed(self, slot: int) -> None:
        self._num_freed += 1
        self._freed_at[slot] = self._num_freed

    def for_spare(self) -> int | None:
        """The slot that waits as a spare one, or else one that is free, None where there is neither."""
        if self._spare is not None and self.arrays.state[self._spare] == SlotState.DEFERRED:
            return self._spare
        free = self.in_state(SlotState.FREE)
        return int(free[0]) if len(free) else None

    def spare(self, slot: int, tokens: int) -> Int64:
        """Have a slot wait for a prompt of so many tokens; ranges of places that are to be mapped ahead for it."""
        ranges = self.plan.spare_ranges(self.arrays, slot, tokens, True)
        self._set_freed(slot)
        self.arrays.state[slot] = SlotState.DEFERRED
        self._spare = slot
        return ranges  # type: ignore[no-any-return]

    def check_spare(self, space: SpaceArrays) -> None:
        """Note how far the spare slot is mapped, if not all that was to be mapped ahead is there."""
        slot = self._spare
        if slot is not None and self.arrays.state[slot] == SlotState.DEFERRED:
            self.plan.recede(self.arrays, space, slot)
            if not self.arrays.extent[:, slot].any():
                self.arrays.state[slot] = SlotState.FREE

    def median_prompt(self) -> int:
        """The median length of the last prompts, 0 where none is known."""
        number = min(int(self.arrays.prompts[0]), self.plan.NUM_PROMPTS)
        return int(np.median(self.arrays.prompts[1 : 1 + number])) if number else 0

    def withdraw(self, slot: int) -> None:
        """Take a deferred slot out of service."""
        self.arrays.state[slot] = SlotState.RECLAIMING
        for part in (self.arrays.low, self.arrays.high, self.arrays.shared, self.arrays.passed):
            part[:, slot] = 0

    def has_left(self, slot: int, ranges: Int64) -> None:
        """Note that a slot without a request holds nothing in some ranges any more, which are whole layer groups."""
        arrays, plan = self.arrays, self.plan
        first_places = arrays.groups[:, plan.FIRST_PLACE]
        gone = np.unique(np.searchsorted(first_places, ranges[:, 0], side="right") - 1)
        arrays.extent[gone, slot] = arrays.high[gone, slot]
        if not arrays.extent[:, slot].any():
            arrays.state[slot] = SlotState.FREE
