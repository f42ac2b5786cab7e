"""The compiled half of `PagePool`: handles taken, given back, split and merged by size class. No GIL.

A pool counts in **page groups** of its smallest size. A **handle** of size class c is one physical allocation of 2^c
page groups, which have neighbouring numbers; each class numbers its own in a range that is wide enough for the whole
device, so that the number of a page group tells its class and its handle::

    class 0: |0|1|2|3|4|5|6|7| ...      class 1: |M M+1|M+2 M+3| ...      class 2: |2M 2M+1 2M+2 2M+3| ...

Where a class runs dry and the capacity is used up, free handles of other classes are released and one of the right size
is created in their place: that is how handles are split and merged.

Everything here runs in a **turn**: whoever changes a pool, or an address space over it, holds the pool's turn for one
plan. A plan makes driver calls, but never waits for the device, for Python or for another lock. Two mutexes make turns
fair: who waits for a turn holds the door, so whoever has just had one (the mapper, between the parts of its work)
queues behind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vtensor.allocator.driver.base import OUT_OF_MEMORY, SUCCESS, Call
from vtensor.allocator.native import call, compiled, int32_at, int64_at, lock, unlock
from vtensor.allocator.words import (
    CAPACITY,
    CLASS_SHIFT,
    CLASS_WORDS,
    CODE,
    DOOR,
    FAILED_CALL,
    FRESH_IS_ZERO,
    NEXT_GROUP,
    NUM_CALLS,
    NUM_CHANGED,
    NUM_FREE,
    NUM_FREE_HANDLES,
    NUM_TOTAL,
    NUM_VACANT_HANDLES,
    PAGE_GROUP_BYTES,
    PROPERTIES,
    STUCK_CONTENT,
    TURN,
    UNKNOWN_CONTENT,
    ZEROS,
    ZEROS_GROUP,
)

__all__ = [
    "CALLED",
    "OUT_OF_HANDLES",
    "POOL_WORDS",
    "PoolArrays",
    "count_calls",
    "end_turn",
    "exchange",
    "give_back",
    "head_of",
    "make",
    "num_available",
    "pool_at",
    "release_free",
    "shut",
    "size_class_of",
    "take",
    "take_turn",
    "top_of_free",
    "undo_take",
]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]

# What `take` answers when it has no handle: the device has no more memory, or a call failed otherwise.
OUT_OF_HANDLES, CALLED = -1, -2

_CREATE, _RELEASE = int(Call.CREATE), int(Call.RELEASE)


class PoolArrays(NamedTuple):
    """Native state of a `PagePool`; `words` tells what the blocks hold.

    `handles` to `vacant` are indexed by page group, of which the first of a handle speaks for all of it.
    """

    header: Int64
    classes: Int64  # a block for each size class
    handles: Int64
    num_mappings: Int32  # 0: free
    content: Int64  # whose data it last held, a mark that the user chose
    free: Int32  # a stack of free handles for each class, which starts where its page groups do
    vacant: Int32  # likewise of page groups without a handle
    entry_points: Int64
    constants: Int64


POOL_WORDS = 2 * len(PoolArrays._fields)


@compiled
def pool_at(words: Int64) -> PoolArrays:
    """A pool from its arrays as `native.packed` them."""
    return PoolArrays(
        int64_at(words[0], words[1]),
        int64_at(words[2], words[3]),
        int64_at(words[4], words[5]),
        int32_at(words[6], words[7]),
        int64_at(words[8], words[9]),
        int32_at(words[10], words[11]),
        int32_at(words[12], words[13]),
        int64_at(words[14], words[15]),
        int64_at(words[16], words[17]),
    )


@compiled
def take_turn(pool: PoolArrays) -> None:
    """Wait until nobody else works on the pool."""
    lock(pool.header.ctypes.data + DOOR * 8)
    lock(pool.header.ctypes.data + TURN * 8)
    unlock(pool.header.ctypes.data + DOOR * 8)


@compiled
def end_turn(pool: PoolArrays) -> None:
    """Let the next one work on the pool."""
    unlock(pool.header.ctypes.data + TURN * 8)


@compiled
def size_class_of(shift: int, group: int) -> int:
    """The size class of the handle that a page group belongs to. `shift`: the pool's CLASS_SHIFT.

    What loops call takes numbers only: to pass on a pool counts references to all its arrays, up and down.
    """
    return group >> shift


@compiled
def head_of(shift: int, group: int) -> int:
    """The first page group of the handle that a page group belongs to. `shift`: the pool's CLASS_SHIFT."""
    return group & ~((1 << (group >> shift)) - 1)


@compiled
def num_available(pool: PoolArrays) -> int:
    """Page groups that are free, or may still be created."""
    return int(pool.header[CAPACITY] - (pool.header[NUM_TOTAL] - pool.header[NUM_FREE]))


@compiled
def count_calls(pool: PoolArrays, which: int, number: int) -> None:
    """Count driver calls that were made elsewhere. Takes a turn."""
    take_turn(pool)
    pool.header[NUM_CALLS + which] += number
    end_turn(pool)


@compiled
def _push_free(pool: PoolArrays, head: int) -> None:
    size_class = size_class_of(pool.constants[CLASS_SHIFT], head)
    words = pool.classes[size_class * CLASS_WORDS : (size_class + 1) * CLASS_WORDS]
    pool.num_mappings[head] = 0
    pool.free[(size_class << pool.constants[CLASS_SHIFT]) + words[NUM_FREE_HANDLES]] = head
    words[NUM_FREE_HANDLES] += 1
    pool.header[NUM_FREE] += 1 << size_class


@compiled
def _pop_free(pool: PoolArrays, size_class: int) -> int:
    words = pool.classes[size_class * CLASS_WORDS : (size_class + 1) * CLASS_WORDS]
    words[NUM_FREE_HANDLES] -= 1
    pool.header[NUM_FREE] -= 1 << size_class
    return int(pool.free[(size_class << pool.constants[CLASS_SHIFT]) + words[NUM_FREE_HANDLES]])


@compiled
def _forget(pool: PoolArrays, head: int) -> None:
    """Note that a page group's number has no handle."""
    size_class = size_class_of(pool.constants[CLASS_SHIFT], head)
    words = pool.classes[size_class * CLASS_WORDS : (size_class + 1) * CLASS_WORDS]
    pool.num_mappings[head] = 0
    pool.vacant[(size_class << pool.constants[CLASS_SHIFT]) + words[NUM_VACANT_HANDLES]] = head
    words[NUM_VACANT_HANDLES] += 1
    pool.header[NUM_TOTAL] -= 1 << size_class


@compiled
def _destroy(pool: PoolArrays, head: int) -> int:
    """Release a handle that is neither free nor mapped; the error code. One that the driver does not take is free."""
    pool.header[NUM_CALLS + _RELEASE] += 1
    code = call(pool.entry_points[_RELEASE], (pool.handles[head],))
    if code == SUCCESS:
        _forget(pool, head)
    else:
        _push_free(pool, head)
    return int(code)


@compiled
def give_back(pool: PoolArrays, heads: Int32) -> None:
    """One mapping less for each handle; those without a mapping are free."""
    for index in range(len(heads) - 1, -1, -1):  # so that they are taken again in this order
        pool.num_mappings[heads[index]] -= 1
        if pool.num_mappings[heads[index]] == 0:
            _push_free(pool, heads[index])


@compiled
def _drop_zeros(pool: PoolArrays) -> None:
    """Let go of the page group of zeros, which came on top of the capacity, if nobody shows it."""
    group = pool.header[ZEROS_GROUP] - 1
    if group >= 0 and pool.num_mappings[group] == 1:
        pool.header[ZEROS_GROUP] = 0
        pool.header[CAPACITY] -= 1
        _push_free(pool, group)


@compiled
def release_free(pool: PoolArrays, with_zeros: bool, outcome: Int64) -> None:
    """Give all free handles back to the device. Takes a turn. The outcome tells of the first one that failed.

    `with_zeros`: also the page group of zeros, where nobody shows it.
    """
    take_turn(pool)
    outcome[:] = 0
    total_before = pool.header[NUM_TOTAL] - (pool.header[ZEROS_GROUP] != 0)
    if with_zeros:
        _drop_zeros(pool)
    for size_class in range(len(pool.classes) // CLASS_WORDS):
        start = size_class << pool.constants[CLASS_SHIFT]
        number = pool.classes[size_class * CLASS_WORDS + NUM_FREE_HANDLES]
        heads = pool.free[start : start + number].copy()
        pool.classes[size_class * CLASS_WORDS + NUM_FREE_HANDLES] = 0
        pool.header[NUM_FREE] -= number << size_class
        for head in heads:
            code = _destroy(pool, head)
            if code != SUCCESS and outcome[CODE] == SUCCESS:
                outcome[FAILED_CALL], outcome[CODE] = _RELEASE, code
    outcome[NUM_CHANGED] = total_before - (pool.header[NUM_TOTAL] - (pool.header[ZEROS_GROUP] != 0))
    end_turn(pool)


@compiled
def shut(pool: PoolArrays) -> int:
    """Let nothing be taken from now on, if nothing is mapped; the number of page groups that are. Takes a turn.

    Zeros that somebody shows count as one.
    """
    take_turn(pool)
    _drop_zeros(pool)
    num_mapped = int(pool.header[NUM_TOTAL] - pool.header[NUM_FREE])
    if num_mapped == 0:
        pool.header[CAPACITY] = 0
    end_turn(pool)
    return num_mapped


@compiled
def _make_room(pool: PoolArrays, wanted: int, outcome: Int64) -> bool:
    """Release free handles of at least `wanted` page groups, if there are any to release; False after an error.

    First the largest that are not too large, then the smallest that is.
    """
    num_classes = len(pool.classes) // CLASS_WORDS
    for attempt in range(2 * num_classes):
        size_class = num_classes - 1 - attempt if attempt < num_classes else attempt - num_classes
        while wanted > 0 and pool.classes[size_class * CLASS_WORDS + NUM_FREE_HANDLES] > 0:
            if attempt < num_classes and 1 << size_class > wanted:
                break
            code = _destroy(pool, _pop_free(pool, size_class))
            if code != SUCCESS:
                outcome[FAILED_CALL], outcome[CODE] = _RELEASE, code
                return False
            wanted -= 1 << size_class
    return True


@compiled
def top_of_free(pool: PoolArrays, size_class: int) -> int:
    """The free handle that would be taken next, -1 where none is free."""
    number = pool.classes[size_class * CLASS_WORDS + NUM_FREE_HANDLES]
    if number == 0:
        return -1
    return int(pool.free[(size_class << pool.constants[CLASS_SHIFT]) + number - 1])


@compiled
def take(pool: PoolArrays, size_class: int, outcome: Int64) -> int:
    """A handle with one mapping to its name: its first page group, free before or, as by `make`, created now."""
    if pool.classes[size_class * CLASS_WORDS + NUM_FREE_HANDLES] == 0:
        return make(pool, size_class, outcome)
    head = _pop_free(pool, size_class)
    pool.num_mappings[head] = 1
    return head


@compiled
def exchange(pool: PoolArrays, size_class: int, outcome: Int64) -> int:
    """A new handle, as by `make`, for the free one that would be taken next, which is released."""
    code = _destroy(pool, _pop_free(pool, size_class))
    if code != SUCCESS:
        outcome[FAILED_CALL], outcome[CODE] = _RELEASE, code
        return CALLED
    return make(pool, size_class, outcome)


@compiled
def make(pool: PoolArrays, size_class: int, outcome: Int64) -> int:
    """A new handle with one mapping to its name: its first page group.

    Never goes above the capacity: the caller has seen to it that so many page groups are available (`num_available`).
    Returns `OUT_OF_HANDLES` where the device has no memory for it, although nothing in the pool is free any more, and
    `CALLED` after another failure of the driver, which the outcome names.
    """
    header, size = pool.header, 1 << size_class
    words = pool.classes[size_class * CLASS_WORDS : (size_class + 1) * CLASS_WORDS]
    excess = header[NUM_TOTAL] + size - header[CAPACITY]
    if excess > 0 and not _make_room(pool, excess, outcome):
        return CALLED
    handle = np.zeros(1, np.int64)
    while True:
        header[NUM_CALLS + _CREATE] += 1
        code = call(
            pool.entry_points[_CREATE],
            (handle.ctypes.data, size * pool.constants[PAGE_GROUP_BYTES], pool.constants[PROPERTIES], 0),
        )
        if code == SUCCESS:
            break
        if code != OUT_OF_MEMORY:
            outcome[FAILED_CALL], outcome[CODE] = _CREATE, code
            return CALLED
        if header[NUM_FREE] == 0:
            return OUT_OF_HANDLES
        if not _make_room(pool, size, outcome):
            return CALLED
    start = size_class << pool.constants[CLASS_SHIFT]
    if words[NUM_VACANT_HANDLES] > 0:
        words[NUM_VACANT_HANDLES] -= 1
        head = pool.vacant[start + words[NUM_VACANT_HANDLES]]
    else:
        head = start + words[NEXT_GROUP]
        words[NEXT_GROUP] += size
    header[NUM_TOTAL] += size
    pool.handles[head] = handle[0]
    pool.num_mappings[head] = 1
    pool.content[head] = ZEROS if pool.constants[FRESH_IS_ZERO] else UNKNOWN_CONTENT
    return int(head)


@compiled
def undo_take(pool: PoolArrays, heads: Int32, is_new: npt.NDArray[np.bool_], is_stuck: npt.NDArray[np.bool_]) -> None:
    """Free handles that were free before, and release those that were made; those that are stuck may hold anything."""
    for index in range(len(heads) - 1, -1, -1):
        if is_stuck[index]:
            pool.content[heads[index]] = STUCK_CONTENT
        elif is_new[index]:
            _destroy(pool, heads[index])
        else:
            give_back(pool, heads[index : index + 1])
