"""The compiled part of `KVCacheManager`: lengths in, ranges of places out. Imported on first use (numba)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vtensor.allocator.native import compiled

__all__ = [
    "NEGATIVE",
    "NOT_ACTIVE",
    "TOO_LONG",
    "SlotArrays",
    "apply_step",
    "plan_step",
    "slot_ranges",
    "surplus_ranges",
]

Int64 = npt.NDArray[np.int64]

# What can be wrong with a length (`problem[0]`; `problem[1]` is the slot).
NEGATIVE, TOO_LONG, NOT_ACTIVE = 1, 2, 3
_ACTIVE = 1


class SlotArrays(NamedTuple):
    """State of the slots.

    A slot holds, in each buffer of group g, the page groups [low[g], high[g]) of its own range; those below shared[g]
    are aliases that other slots see as well::

        slot   | shared ....... | private ........ |                      | up to max_context_tokens
               low            shared             high
    """

    state: npt.NDArray[np.int8]  # [B], a SlotState
    seq_lens: Int64  # [B], tokens held
    low: Int64  # [G, B]
    high: Int64  # [G, B]
    shared: Int64  # [G, B]
    groups: Int64  # [G, 4]: num_buffers, row_bytes, slot_places, first_place
    limits: Int64  # max_context_tokens, page_group_bytes


@compiled
def _places(tokens: int, row_bytes: int, page_group_bytes: int) -> int:
    """Page groups that hold so many tokens."""
    return (tokens * row_bytes + page_group_bytes - 1) // page_group_bytes


@compiled
def plan_step(slots: SlotArrays, seq_lens: Int64, problem: Int64) -> Int64:
    """What the slots need for these lengths and do not have: rows of (first place, number of places).

    A length of 0 leaves its slot as it is. When nothing is needed, the lengths are taken over at once; otherwise
    `apply_step` does that after the ranges were committed. A bad length is told in `problem`, and nothing is done.
    """
    max_tokens, page_group_bytes = slots.limits
    batch = len(seq_lens)
    num_ranges = 0
    for slot in range(batch):
        tokens = seq_lens[slot]
        if tokens == 0:
            continue
        problem[0] = (
            NEGATIVE
            if tokens < 0
            else (TOO_LONG if tokens > max_tokens else (NOT_ACTIVE if slots.state[slot] != _ACTIVE else 0))
        )
        if problem[0] != 0:
            problem[1] = slot
            return np.empty((0, 2), np.int64)
        for group in range(len(slots.groups)):
            if _places(tokens, slots.groups[group, 1], page_group_bytes) > slots.high[group, slot]:
                num_ranges += slots.groups[group, 0]
    ranges = np.empty((num_ranges, 2), np.int64)
    if num_ranges == 0:
        apply_step(slots, seq_lens)
        return ranges
    row = 0
    for group in range(len(slots.groups)):
        num_buffers, row_bytes, slot_places, first_place = slots.groups[group]
        for buffer in range(num_buffers):
            for slot in range(batch):
                if seq_lens[slot] > 0:
                    high = slots.high[group, slot]
                    needed = _places(seq_lens[slot], row_bytes, page_group_bytes)
                    if needed > high:
                        ranges[row, 0] = first_place + (buffer * batch + slot) * slot_places + high
                        ranges[row, 1] = needed - high
                        row += 1
    return ranges


@compiled
def apply_step(slots: SlotArrays, seq_lens: Int64) -> None:
    """Take over lengths whose page groups are all there. Shorter ones keep their page groups as surplus."""
    page_group_bytes = slots.limits[1]
    for slot in range(len(seq_lens)):
        if seq_lens[slot] > 0:
            slots.seq_lens[slot] = seq_lens[slot]
            for group in range(len(slots.groups)):
                needed = _places(seq_lens[slot], slots.groups[group, 1], page_group_bytes)
                slots.high[group, slot] = max(slots.high[group, slot], needed)


@compiled
def slot_ranges(slots: SlotArrays, chosen: Int64) -> Int64:
    """Everything that some slots hold: rows of (first place, number of places)."""
    batch = len(slots.state)
    ranges = np.empty((len(chosen) * slots.groups[:, 0].sum(), 2), np.int64)
    row = 0
    for group in range(len(slots.groups)):
        num_buffers, _, slot_places, first_place = slots.groups[group]
        for slot in chosen:
            for buffer in range(num_buffers):
                start = first_place + (buffer * batch + slot) * slot_places
                ranges[row, 0] = start + slots.low[group, slot]
                ranges[row, 1] = slots.high[group, slot] - slots.low[group, slot]
                row += 1
    return ranges


@compiled
def surplus_ranges(slots: SlotArrays, seq_lens: Int64, cut: bool) -> Int64:
    """What active slots hold beyond the tokens they have and will have; `cut` takes it off the books.

    What a step shortens is surplus for later steps only: should this one fail, nothing is lost.
    """
    batch, page_group_bytes = len(slots.state), slots.limits[1]
    ranges = np.zeros((batch * slots.groups[:, 0].sum(), 2), np.int64)
    row = 0
    for group in range(len(slots.groups)):
        num_buffers, row_bytes, slot_places, first_place = slots.groups[group]
        for slot in range(batch):
            if slots.state[slot] != _ACTIVE:
                continue
            tokens = max(seq_lens[slot], slots.seq_lens[slot])
            needed = max(_places(tokens, row_bytes, page_group_bytes), slots.shared[group, slot])
            if needed < slots.high[group, slot]:
                for buffer in range(num_buffers):
                    ranges[row, 0] = first_place + (buffer * batch + slot) * slot_places + needed
                    ranges[row, 1] = slots.high[group, slot] - needed
                    row += 1
                if cut:
                    slots.high[group, slot] = needed
    return ranges[:row]
