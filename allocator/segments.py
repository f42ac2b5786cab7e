"""The compiled half of `Arena`: torch's segments, laid out in an address space and backed by page groups. No GIL.

torch's allocator asks for a **segment** and gives it back through C callbacks, from any thread, with its own lock held
and perhaps the GIL. So these wait for nothing but their turn at the pool (see `handles`), and, before memory is taken
away, for the stream that used it. A segment lies on neighbouring places, with whatever its page groups last held.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from vtensor.allocator.driver.base import SUCCESS
from vtensor.allocator.handles import POOL_WORDS, PoolArrays, end_turn, pool_at, release_free, take_turn
from vtensor.allocator.native import call, callback, compiled, int32_at, int64_at
from vtensor.allocator.plan import SPACE_WORDS, SpaceArrays, map_as_it_is, space_at, unmap
from vtensor.allocator.words import (
    CAPTURE_MODE,
    CODE,
    CONTEXT,
    COUNT,
    FAILED_BYTES,
    FINISH_STREAM,
    FIRST,
    FIRST_FREE,
    IS_ASLEEP,
    IS_CAPTURING,
    KEEPS_FREE,
    LARGEST,
    LARGEST_SIZE_CLASS,
    MOST_PLACES,
    NUM_FAILED,
    NUM_LEFT_OVER,
    NUM_SEGMENTS,
    NUM_WAITING_CALLS,
    OUTCOME_WORDS,
    PAGE_GROUP_BYTES,
    POP_CONTEXT,
    PROCESS_ID,
    PUSH_CONTEXT,
    RANGE_WORDS,
    SEGMENT_PLACES,
    WAITING_CALLS,
)

__all__ = [
    "ALLOCATE",
    "ARENA_WORDS",
    "FREE",
    "ArenaArrays",
    "fall_asleep",
    "map_segments",
    "sweep",
    "wake_up",
]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]

_getpid = types.ExternalFunction("getpid", types.int32())
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class ArenaArrays(NamedTuple):
    """Native state of an `Arena`, beside that of its pool and its space."""

    header: Int64
    lengths: Int32  # of the segment that starts at a place, in places; -n: torch gave it back, but it is still mapped


ARENA_WORDS = POOL_WORDS + SPACE_WORDS + 2 * len(ArenaArrays._fields)


@compiled
def _space_in(words: Int64) -> SpaceArrays:
    return space_at(words[POOL_WORDS:])


@compiled
def _arena_in(words: Int64) -> ArenaArrays:
    own = words[POOL_WORDS + SPACE_WORDS :]
    return ArenaArrays(int64_at(own[0], own[1]), int32_at(own[2], own[3]))


@compiled
def _find(arena: ArenaArrays, count: int) -> int:
    """The first place from which so many are free, or -1."""
    place, num_free = arena.header[FIRST_FREE], 0
    while place < len(arena.lengths):
        length = abs(arena.lengths[place])
        num_free = 0 if length > 0 else num_free + 1
        place += max(length, 1)
        if num_free == count:
            return int(place - count)
    return -1


@compiled
def _range_of(first: int, count: int) -> Int64:
    ranges = np.zeros((1, RANGE_WORDS), np.int64)
    ranges[0, FIRST], ranges[0, COUNT], ranges[0, LARGEST] = first, count, LARGEST_SIZE_CLASS
    return ranges


@compiled
def _allocate(words: Int64, size_bytes: int) -> int:
    """The address of a new segment, 0 where there is no memory for it, or none may be taken."""
    pool, space, arena = pool_at(words), _space_in(words), _arena_in(words)
    size = pool.constants[PAGE_GROUP_BYTES]
    if _getpid() != arena.header[PROCESS_ID]:  # in a forked child, nor wait for a turn that was the parent's
        return 0
    is_possible = 0 <= size_bytes <= len(arena.lengths) * size
    count = max(1, (size_bytes + size - 1) // size) if is_possible else 0
    outcome, address = np.zeros(OUTCOME_WORDS, np.int64), 0
    take_turn(pool)
    first = -1 if arena.header[IS_ASLEEP] or not is_possible else _find(arena, count)
    if first >= 0 and map_as_it_is(pool, space, _range_of(first, count), outcome):
        arena.lengths[first] = count
        if first == arena.header[FIRST_FREE]:
            arena.header[FIRST_FREE] = first + count
        arena.header[NUM_SEGMENTS] += 1
        arena.header[SEGMENT_PLACES] += count
        arena.header[MOST_PLACES] = max(arena.header[MOST_PLACES], arena.header[SEGMENT_PLACES])
        address = space.base + first * size
    else:
        arena.header[NUM_FAILED] += 1
        arena.header[FAILED_BYTES] = size_bytes
        if first >= 0 and (space.table[first : first + count] != 0).any():  # undoing failed as well
            arena.lengths[first] = -count
            arena.header[NUM_LEFT_OVER] += 1
    end_turn(pool)
    return int(address)


@compiled
def _finish(calls: Int64, stream: int) -> bool:
    """Wait for a stream, as cudaFree would; False where that cannot be, as it is being captured."""
    if calls[FINISH_STREAM] == 0:
        return True
    mode, context, capture = np.full(1, _RELAXED, np.int32), np.zeros(1, np.int64), np.zeros(1, np.int32)
    if call(calls[PUSH_CONTEXT], (calls[CONTEXT],)) != SUCCESS:  # the stream may be the context's default
        return False
    call(calls[CAPTURE_MODE], (mode.ctypes.data,))  # so that no other thread's capture need mind
    code = call(calls[IS_CAPTURING], (stream, capture.ctypes.data))
    if code == SUCCESS and capture[0] != 0:  # to wait for it would end the capture
        code = -1
    if code == SUCCESS:
        code = call(calls[FINISH_STREAM], (stream,))
    call(calls[CAPTURE_MODE], (mode.ctypes.data,))
    call(calls[POP_CONTEXT], (context.ctypes.data,))
    return bool(code == SUCCESS)


@compiled
def _forget_segment(arena: ArenaArrays, first: int) -> None:
    """Note that a segment is gone, and its places are free."""
    arena.lengths[first] = 0
    arena.header[FIRST_FREE] = min(arena.header[FIRST_FREE], first)


@compiled
def _free(words: Int64, address: int, stream: int) -> None:
    """Take a segment away, once its stream has done what it was given."""
    pool, space, arena = pool_at(words), _space_in(words), _arena_in(words)
    if _getpid() != arena.header[PROCESS_ID]:  # a forked child must not touch the parent's memory
        return
    is_idle = _finish(arena.header[WAITING_CALLS : WAITING_CALLS + NUM_WAITING_CALLS], stream)
    outcome = np.zeros(OUTCOME_WORDS, np.int64)
    take_turn(pool)
    size, offset = pool.constants[PAGE_GROUP_BYTES], address - space.base
    first = offset // size
    is_place = offset >= 0 and first < len(arena.lengths) and offset == first * size
    count = arena.lengths[first] if is_place else 0
    if count > 0:
        arena.header[NUM_SEGMENTS] -= 1
        arena.header[SEGMENT_PLACES] -= count
        if not arena.header[IS_ASLEEP]:
            if is_idle:
                unmap(pool, space, _range_of(first, count), True, outcome)
            if is_idle and outcome[CODE] == SUCCESS:
                _forget_segment(arena, first)
            else:
                arena.lengths[first] = -count
                arena.header[NUM_LEFT_OVER] += 1
        elif (space.table[first : first + count] != 0).any():
            arena.lengths[first] = -count  # somebody is just copying it, and unmaps all of it then
            arena.header[NUM_LEFT_OVER] += 1
        else:
            _forget_segment(arena, first)
    end_turn(pool)
    if not arena.header[KEEPS_FREE]:
        release_free(pool, False, outcome)


@compiled
def _sweep(pool: PoolArrays, space: SpaceArrays, arena: ArenaArrays, outcome: Int64) -> None:
    """Take away what torch gave back and could not be unmapped then. Within a turn."""
    outcome[:] = 0
    place = 0
    while place < len(arena.lengths) and arena.header[NUM_LEFT_OVER] > 0:
        length = arena.lengths[place]
        if length < 0:
            unmap(pool, space, _range_of(place, -length), True, outcome)
            if outcome[CODE] != SUCCESS:
                return
            _forget_segment(arena, place)
            arena.header[NUM_LEFT_OVER] -= 1
        place += max(abs(length), 1)


@compiled
def sweep(words: Int64, outcome: Int64) -> None:
    """Take away what torch gave back and could not be unmapped then. The device has finished with it. Takes a turn."""
    pool, space, arena = pool_at(words), _space_in(words), _arena_in(words)
    take_turn(pool)
    outcome[:] = 0
    if not arena.header[IS_ASLEEP]:
        _sweep(pool, space, arena, outcome)
    end_turn(pool)


@compiled
def _segments_in(arena: ArenaArrays) -> Int64:
    """Segments that torch has: rows of ranges (first place, number of places, 0, largest size class)."""
    rows, number, place = np.zeros((arena.header[NUM_SEGMENTS], RANGE_WORDS), np.int64), 0, 0
    while number < len(rows):
        length = arena.lengths[place]
        if length > 0:
            rows[number, FIRST], rows[number, COUNT], rows[number, LARGEST] = place, length, LARGEST_SIZE_CLASS
            number += 1
        place += max(abs(length), 1)
    return rows


@compiled
def fall_asleep(words: Int64, outcome: Int64) -> Int64:
    """Let no segment be allocated or unmapped from now on; all there are, as ranges. Takes a turn.

    What was left over is taken away; where that fails, nothing is changed, and the outcome says why.
    """
    pool, space, arena = pool_at(words), _space_in(words), _arena_in(words)
    take_turn(pool)
    _sweep(pool, space, arena, outcome)
    if outcome[CODE] == SUCCESS:
        arena.header[IS_ASLEEP] = 1
    rows = _segments_in(arena)
    end_turn(pool)
    return rows


@compiled
def map_segments(words: Int64, outcome: Int64) -> Int64:
    """Put memory below all segments, with whatever it holds, or below none; the segments, as ranges. Takes a turn."""
    pool, space, arena = pool_at(words), _space_in(words), _arena_in(words)
    take_turn(pool)
    rows = _segments_in(arena)
    map_as_it_is(pool, space, rows, outcome)
    end_turn(pool)
    return rows


@compiled
def wake_up(words: Int64, outcome: Int64) -> None:
    """Let segments be allocated and unmapped again. Takes a turn.

    What torch gave back meanwhile is taken away; a failure of that, which the outcome tells of, leaves it for later.
    """
    pool, space, arena = pool_at(words), _space_in(words), _arena_in(words)
    take_turn(pool)
    arena.header[IS_ASLEEP] = 0
    _sweep(pool, space, arena, outcome)
    end_turn(pool)


# -- as torch calls them, after the address of the arena's words (see `native.bound`) -------------------------------


@callback("int64(int64, int64, int32, int64)")
def _allocate_callback(words: int, size_bytes: int, device: int, stream: int) -> int:
    return _allocate(int64_at(words, ARENA_WORDS), size_bytes)


@callback("void(int64, int64, int64, int32, int64)")
def _free_callback(words: int, address: int, size_bytes: int, device: int, stream: int) -> None:
    _free(int64_at(words, ARENA_WORDS), address, stream)


ALLOCATE, FREE = int(_allocate_callback.address), int(_free_callback.address)
