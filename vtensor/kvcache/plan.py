"""The compiled part of `KVCacheManager`: lengths in, ranges of places out. Imported on first use (numba).

All ranges are rows as `plan.commit` of the allocator takes them: first place, number of places, mark, size class.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vtensor.allocator.handles import PoolArrays, head_of, pool_at, size_class_of
from vtensor.allocator.mapper_native import POOL, RANGES, SPACE, is_free, submit_again
from vtensor.allocator.native import compiled, int8_at, int64_at
from vtensor.allocator.plan import SpaceArrays, commit_ready, space_at
from vtensor.allocator.words import CLASS_SHIFT, RANGE_WORDS

__all__ = [
    "ANSWER_WORDS",
    "BAD_LENGTH",
    "CONTENT",
    "FIRST_PLACE",
    "GROUP_WORDS",
    "HAS_PASSED",
    "LARGEST",
    "NEGATIVE",
    "NOTHING",
    "NOT_ACTIVE",
    "NUM_BUFFERS",
    "NUM_PROMPTS",
    "NUM_SERVED",
    "PROBLEM",
    "ROW_BYTES",
    "SERVED",
    "SLOT",
    "SLOT_PLACES",
    "TOO_LONG",
    "TO_COMMIT",
    "WANTS_AHEAD",
    "WINDOW",
    "WINDOW_PASSED",
    "SlotArrays",
    "ahead_ranges",
    "apply_step",
    "needed_ranges",
    "passed_ranges",
    "recede",
    "slot_ranges",
    "spare_ranges",
    "step",
    "surplus_ranges",
]

Int64 = npt.NDArray[np.int64]

# What `step` returns, see there.
NOTHING, SERVED, TO_COMMIT, BAD_LENGTH = 0, 1, 2, 3
# What its answer says: what is wrong with which slot's length; page groups that came into service; whether there are
# places to map ahead of the next step, whether the mapper was asked for them; whether windows have passed places.
PROBLEM, SLOT, NUM_SERVED, WANTS_AHEAD, HAS_ASKED, HAS_PASSED, ANSWER_WORDS = 0, 1, 2, 3, 4, 5, 6
NEGATIVE, TOO_LONG, NOT_ACTIVE, WINDOW_PASSED = 1, 2, 3, 4
# Words of a layer group. WINDOW: 0 for none. CONTENT: the mark of its data. LARGEST: its largest size class.
NUM_BUFFERS, ROW_BYTES, SLOT_PLACES, FIRST_PLACE, WINDOW, CONTENT, LARGEST, GROUP_WORDS = 0, 1, 2, 3, 4, 5, 6, 7
# Lengths of the prompts that were prefilled last, in a ring; before them their number.
NUM_PROMPTS = 32
_ACTIVE = 1


class SlotArrays(NamedTuple):
    """State of the slots.

    A slot holds, in each buffer of group g, the places [low[g], high[g]) of its own range; those below shared[g] are
    aliases that other slots see as well. Beyond them, some places up to extent[g] are mapped ahead, and so may be some
    that a window has passed (below low), until the device has finished with them::

        slot   | passed ... | shared ....... | private ........ | ahead .. |          | up to max_context_tokens
                           low            shared              high       extent
    """

    state: npt.NDArray[np.int8]  # [B], a SlotState
    seq_lens: Int64  # [B], tokens held
    computed: Int64  # [B], of those, the ones that were held before the iteration that is under way
    low: Int64  # [G, B]
    high: Int64  # [G, B]
    shared: Int64  # [G, B]
    extent: Int64  # [G, B]
    asked: Int64  # [G, B]: up to where the request's steps, or their look-ahead, asked for places
    passed: Int64  # [G, B]: up to where `passed_ranges` has told what windows have passed
    groups: Int64  # [G, GROUP_WORDS]
    prompts: Int64  # [1 + NUM_PROMPTS]
    max_tokens: int
    page_group_bytes: int
    overread_tokens: int
    lookahead_tokens: int


@compiled
def _slots_at(words: Int64) -> SlotArrays:
    """Slots from their arrays and numbers as `native.packed` them."""
    batch, num_groups = words[1], words[19] // GROUP_WORDS
    shape = (num_groups, batch)
    return SlotArrays(
        int8_at(words[0], batch),
        int64_at(words[2], batch),
        int64_at(words[4], batch),
        int64_at(words[6], words[7]).reshape(shape),
        int64_at(words[8], words[9]).reshape(shape),
        int64_at(words[10], words[11]).reshape(shape),
        int64_at(words[12], words[13]).reshape(shape),
        int64_at(words[14], words[15]).reshape(shape),
        int64_at(words[16], words[17]).reshape(shape),
        int64_at(words[18], words[19]).reshape((num_groups, GROUP_WORDS)),
        int64_at(words[20], words[21]),
        words[22],
        words[23],
        words[24],
        words[25],
    )


# What the loops below call takes numbers and at most one array: to pass on the slots counts references to all arrays.


@compiled
def _end(tokens: int, row_bytes: int, page_group_bytes: int) -> int:
    """Places that hold so many tokens."""
    return (tokens * row_bytes + page_group_bytes - 1) // page_group_bytes


@compiled
def _write_row(words: Int64, row: Int64, batch: int, buffer: int, slot: int, first: int, end: int) -> None:
    """Places `first` to `end` of a slot in a buffer of the layer group with these words."""
    row[0] = words[FIRST_PLACE] + (buffer * batch + slot) * words[SLOT_PLACES] + first
    row[1], row[2], row[3] = end - first, words[CONTENT], words[LARGEST]


@compiled
def _find_problem(slots: SlotArrays, seq_lens: Int64, answer: Int64) -> bool:
    """Whether a length is bad; the answer says which, and why."""
    state, held, low, groups = slots.state, slots.seq_lens, slots.low, slots.groups
    for slot in range(len(seq_lens)):
        tokens, problem = seq_lens[slot], 0
        if tokens == 0:
            continue
        if tokens < 0:
            problem = NEGATIVE
        elif tokens > slots.max_tokens:
            problem = TOO_LONG
        elif state[slot] != _ACTIVE:
            problem = NOT_ACTIVE
        elif tokens < held[slot]:
            for group in range(len(groups)):
                window = groups[group, WINDOW]
                if window > 0:
                    first_byte = max(0, tokens - window - slots.overread_tokens) * groups[group, ROW_BYTES]
                    if first_byte < low[group, slot] * slots.page_group_bytes:
                        problem = WINDOW_PASSED
        if problem != 0:
            answer[PROBLEM], answer[SLOT] = problem, slot
            return True
    return False


@compiled
def _num_needed(slots: SlotArrays, seq_lens: Int64) -> int:
    """Rows of `needed_ranges`."""
    high, groups, size, overread = slots.high, slots.groups, slots.page_group_bytes, slots.overread_tokens
    number = 0
    for group in range(len(groups)):
        row_bytes, num_buffers = groups[group, ROW_BYTES], groups[group, NUM_BUFFERS]
        for slot in range(len(seq_lens)):  # no division for each slot
            if seq_lens[slot] > 0 and (seq_lens[slot] + overread) * row_bytes > high[group, slot] * size:
                number += num_buffers
    return number


@compiled
def needed_ranges(slots: SlotArrays, seq_lens: Int64) -> Int64:
    """What the slots need for these lengths and do not have."""
    high, groups, size, batch = slots.high, slots.groups, slots.page_group_bytes, len(seq_lens)
    ranges = np.empty((_num_needed(slots, seq_lens), RANGE_WORDS), np.int64)
    row = 0
    for group in range(len(groups)):
        words, row_bytes = groups[group], groups[group, ROW_BYTES]
        for buffer in range(words[NUM_BUFFERS]):
            for slot in range(batch):
                tokens = seq_lens[slot] + slots.overread_tokens
                if seq_lens[slot] > 0 and tokens * row_bytes > high[group, slot] * size:
                    end = _end(tokens, row_bytes, size)
                    _write_row(words, ranges[row], batch, buffer, slot, high[group, slot], end)
                    row += 1
    return ranges


@compiled
def step(slot_words: Int64, job: Int64, queue: Int64, zero_calls: int, seq_lens: Int64, answer: Int64) -> int:
    """A step, as far as it needs no memory but what was mapped ahead, in one call.

    A length of 0 leaves its slot as it is. What may be needed next is handed to the mapper with the standing job, if
    that is free.

    Parameters
    ----------
    slot_words : ndarray of int64
        The slots' arrays and numbers, packed.
    job, queue : ndarray of int64
        A standing job over the cache's addresses, and where to hand it over. An empty queue: there is no such job,
        since no step asked for look-ahead so far; then every need is left to be committed.
    zero_calls : int
        As for `commit_ready`.

    Returns
    -------
    int
        `BAD_LENGTH`: the answer says what is wrong. `TO_COMMIT`: `needed_ranges` are to be committed, then comes
        `apply_step`. In both cases nothing was changed. `SERVED`: the answer says with how many page groups, and what
        is left to do. `NOTHING`: the lengths were taken over, and there is nothing left to do.
    """
    slots = _slots_at(slot_words)
    answer[:] = 0
    if _find_problem(slots, seq_lens, answer):
        return BAD_LENGTH
    if _num_needed(slots, seq_lens) > 0:
        if len(queue) == 0:
            return TO_COMMIT
        ranges = needed_ranges(slots, seq_lens)
        answer[NUM_SERVED] = commit_ready(pool_at(job[POOL:]), space_at(job[SPACE:]), ranges, zero_calls)
        if answer[NUM_SERVED] == 0:
            return TO_COMMIT
    apply_step(slots, seq_lens, answer)
    if answer[WANTS_AHEAD] != 0 and len(queue) > 0 and is_free(queue, job):
        most = len(seq_lens) * slots.groups[:, NUM_BUFFERS].sum()
        ranges = int64_at(job[RANGES], most * RANGE_WORDS).reshape((most, RANGE_WORDS))
        submit_again(queue, job, _write_ahead(slots, seq_lens, ranges))
        answer[WANTS_AHEAD], answer[HAS_ASKED] = 0, 1
    return SERVED if answer.any() else NOTHING


@compiled
def apply_step(slots: SlotArrays, seq_lens: Int64, answer: Int64) -> None:
    """Take over lengths whose places are all there. Shorter ones keep their places as surplus.

    What lies before a window moves out of service: all that no token of the coming iteration can see, nor one of the
    `lookahead_tokens` before it, should those be taken back. More tokens than before say that the iteration before has
    run; as many may ask again for the same one, or compute its last token again. Kernels that read whole tiles begin up
    to `overread_tokens` before the window.
    """
    held, low, high, extent, passed = slots.seq_lens, slots.low, slots.high, slots.extent, slots.passed
    asked, prompts, groups, size = slots.asked, slots.prompts, slots.groups, slots.page_group_bytes
    computed, batch = slots.computed, len(seq_lens)
    for slot in range(batch):
        if seq_lens[slot] > held[slot]:
            computed[slot] = held[slot]
        elif seq_lens[slot] > 0:
            computed[slot] = min(computed[slot], seq_lens[slot] - 1)
    for group in range(len(groups)):
        row_bytes, window = groups[group, ROW_BYTES], groups[group, WINDOW]
        for slot in range(batch):
            if seq_lens[slot] == 0:
                continue
            tokens = seq_lens[slot] + slots.overread_tokens
            if tokens * row_bytes > high[group, slot] * size:
                high[group, slot] = _end(tokens, row_bytes, size)
                asked[group, slot] = max(asked[group, slot], high[group, slot])
                extent[group, slot] = max(extent[group, slot], high[group, slot])
            tokens = min(seq_lens[slot] + slots.lookahead_tokens, slots.max_tokens) + slots.overread_tokens
            if tokens * row_bytes > asked[group, slot] * size:
                answer[WANTS_AHEAD] = 1
            if window > 0:
                first = computed[slot] - window + 1 - slots.lookahead_tokens - slots.overread_tokens
                first = max(0, first)
                if first * row_bytes >= (low[group, slot] + 1) * size:
                    low[group, slot] = first * row_bytes // size
                if passed[group, slot] < low[group, slot]:
                    answer[HAS_PASSED] = 1
    for slot in range(batch):
        if seq_lens[slot] > 0:
            if held[slot] == 0:
                prompts[1 + prompts[0] % NUM_PROMPTS] = seq_lens[slot]
                prompts[0] += 1
            held[slot] = seq_lens[slot]


@compiled
def ahead_ranges(slots: SlotArrays, seq_lens: Int64) -> Int64:
    """What the slots of a step may need in the next one, in the smallest size class; it is noted as asked for."""
    ranges = np.empty((len(seq_lens) * slots.groups[:, NUM_BUFFERS].sum(), RANGE_WORDS), np.int64)
    return ranges[: _write_ahead(slots, seq_lens, ranges)].copy()


@compiled
def _write_ahead(slots: SlotArrays, seq_lens: Int64, ranges: Int64) -> int:
    """Write `ahead_ranges` into an array that is long enough; how many rows."""
    asked, extent, groups, size = slots.asked, slots.extent, slots.groups, slots.page_group_bytes
    lookahead, overread, batch = slots.lookahead_tokens, slots.overread_tokens, len(seq_lens)
    row = 0
    for group in range(len(groups)):
        words, row_bytes = groups[group], groups[group, ROW_BYTES]
        for slot in range(batch):
            first = asked[group, slot]
            tokens = min(seq_lens[slot] + lookahead, slots.max_tokens) + overread
            if seq_lens[slot] > 0 and tokens * row_bytes > first * size:
                asked[group, slot] = _end(tokens, row_bytes, size)
                extent[group, slot] = max(extent[group, slot], asked[group, slot])
                for buffer in range(words[NUM_BUFFERS]):
                    _write_row(words, ranges[row], batch, buffer, slot, first, asked[group, slot])
                    ranges[row, 3] = 0  # so that each can be taken away again by itself
                    row += 1
    return row


@compiled
def spare_ranges(slots: SlotArrays, slot: int, tokens: int, note: bool) -> Int64:
    """What a slot that holds no tokens lacks for a prompt of so many; `note` enters it as mapped ahead."""
    ranges = np.empty((slots.groups[:, NUM_BUFFERS].sum(), RANGE_WORDS), np.int64)
    row = 0
    for group in range(len(slots.groups)):
        first = slots.extent[group, slot]
        end = _end(tokens + slots.overread_tokens, slots.groups[group, ROW_BYTES], slots.page_group_bytes)
        end = max(first, end)
        for buffer in range(slots.groups[group, NUM_BUFFERS]):
            _write_row(slots.groups[group], ranges[row], len(slots.state), buffer, slot, first, end)
            row += 1
        if note:
            slots.extent[group, slot] = end
    return ranges


@compiled
def passed_ranges(slots: SlotArrays, slot: int) -> Int64:
    """What windows of a slot have passed since the last time this was asked."""
    ranges = np.empty((slots.groups[:, NUM_BUFFERS].sum(), RANGE_WORDS), np.int64)
    row = 0
    for group in range(len(slots.groups)):
        first, end = slots.passed[group, slot], slots.low[group, slot]
        if end > first:
            for buffer in range(slots.groups[group, NUM_BUFFERS]):
                _write_row(slots.groups[group], ranges[row], len(slots.state), buffer, slot, first, end)
                row += 1
            slots.passed[group, slot] = end
    return ranges[:row].copy()


@compiled
def recede(slots: SlotArrays, space: SpaceArrays, slot: int) -> None:
    """Lower a slot's extent to where something is mapped, in whatever buffer."""
    for group in range(len(slots.groups)):
        words, end = slots.groups[group], slots.extent[group, slot]
        is_mapped = False
        while end > slots.high[group, slot] and not is_mapped:
            end -= 1
            for buffer in range(words[NUM_BUFFERS]):
                if space.table[words[FIRST_PLACE] + (buffer * len(slots.state) + slot) * words[SLOT_PLACES] + end] != 0:
                    is_mapped = True
        slots.extent[group, slot] = end + is_mapped


@compiled
def slot_ranges(slots: SlotArrays, chosen: Int64, in_service: bool) -> Int64:
    """The places of some slots, a row a buffer, slot by slot: those in service, or all that may be mapped."""
    ranges = np.empty((len(chosen) * slots.groups[:, NUM_BUFFERS].sum(), RANGE_WORDS), np.int64)
    row = 0
    for slot in chosen:
        for group in range(len(slots.groups)):
            first = slots.low[group, slot] if in_service else 0
            end = slots.high[group, slot] if in_service else slots.extent[group, slot]
            for buffer in range(slots.groups[group, NUM_BUFFERS]):
                _write_row(slots.groups[group], ranges[row], len(slots.state), buffer, slot, first, end)
                row += 1
    return ranges


@compiled
def surplus_ranges(slots: SlotArrays, pool: PoolArrays, space: SpaceArrays, seq_lens: Int64, cut: bool) -> Int64:
    """What active slots hold beyond the tokens they have and will have; `cut` takes it off the books.

    It begins where in every buffer of a group a handle does. What a step shortens is surplus for later steps only:
    should this one fail, nothing is lost.
    """
    batch = len(slots.state)
    ranges = np.empty((batch * slots.groups[:, NUM_BUFFERS].sum(), RANGE_WORDS), np.int64)
    row = 0
    for slot in range(batch):
        if slots.state[slot] != _ACTIVE:
            continue
        for group in range(len(slots.groups)):
            end = slots.extent[group, slot]
            tokens = max(seq_lens[slot], slots.seq_lens[slot])
            first = slots.shared[group, slot]
            if tokens > 0:
                tokens += slots.overread_tokens
                first = max(first, _end(tokens, slots.groups[group, ROW_BYTES], slots.page_group_bytes))
            first = _handle_border(slots, pool, space, group, slot, first, end)
            if first < end:
                for buffer in range(slots.groups[group, NUM_BUFFERS]):
                    _write_row(slots.groups[group], ranges[row], len(slots.state), buffer, slot, first, end)
                    row += 1
                if cut:
                    slots.high[group, slot] = min(slots.high[group, slot], first)
                    slots.asked[group, slot] = min(slots.asked[group, slot], first)
                    slots.extent[group, slot] = first
    return ranges[:row].copy()


@compiled
def _handle_border(
    slots: SlotArrays, pool: PoolArrays, space: SpaceArrays, group: int, slot: int, first: int, end: int
) -> int:
    """The first place from `first` on that lies within a handle in no buffer of the group."""
    words = slots.groups[group]
    buffer = 0
    while buffer < words[NUM_BUFFERS] and first < end:
        place = words[FIRST_PLACE] + (buffer * len(slots.state) + slot) * words[SLOT_PLACES] + first
        page_group = abs(space.table[place]) - 1
        buffer += 1
        if page_group >= 0:
            offset = page_group - head_of(pool.constants[CLASS_SHIFT], page_group)
            if offset > 0:
                first += (1 << size_class_of(pool.constants[CLASS_SHIFT], page_group)) - offset
                buffer = 0  # the others must agree
    return first
