"""The compiled heart of the allocator: page groups taken and given back, plans carried out and undone. No GIL.

A **plan** is a list of runs over one address space, each a number of neighbouring places and the page groups that go
there or come from there. It is carried out run by run; when a driver call fails, what was done is undone in reverse
order, so that a plan either holds completely or leaves everything as it was. An undo that fails too leaves its places
**stuck**: they stay on the books as they really are, and the caller is told. The ranges of one call do not overlap.

State that several threads share is arrays behind a native mutex (`PoolArrays.header`), since callbacks of torch's
allocator, which must not take the GIL, will take page groups as well. The mutex is never held during a driver call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vtensor.allocator.driver.base import OUT_OF_MEMORY, SUCCESS, Call
from vtensor.allocator.native import call, compiled, lock, unlock

__all__ = [
    "CAPACITY",
    "CODE",
    "END_MAPPED",
    "FAILED_CALL",
    "FIRST_MAPPED",
    "NUM_CALLS",
    "NUM_CHANGED",
    "NUM_FREE",
    "NUM_MAPPED",
    "NUM_STUCK",
    "NUM_TOTAL",
    "OUTCOME_WORDS",
    "SHORTFALL",
    "SPACE_HEADER_WORDS",
    "UNLIMITED",
    "PoolArrays",
    "SpaceArrays",
    "alias",
    "commit",
    "count_missing",
    "decommit",
    "release_free",
]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Int8 = npt.NDArray[np.int8]
Bool = npt.NDArray[np.bool_]

# Words of a pool's header, whose first eight are its mutex.
CAPACITY, NUM_TOTAL, NUM_FREE, NUM_VACANT, NEXT_INDEX = 8, 9, 10, 11, 12
NUM_CALLS = 16  # one counter for each Call
HEADER_WORDS = 32
UNLIMITED = -1
# Words of a space's header; all that is mapped lies in the places FIRST_MAPPED .. END_MAPPED - 1.
NUM_MAPPED, FIRST_MAPPED, END_MAPPED = 0, 1, 2
SPACE_HEADER_WORDS = 8
# Words of an outcome.
NUM_CHANGED, SHORTFALL, FAILED_CALL, CODE, NUM_STUCK = 0, 1, 2, 3, 4
OUTCOME_WORDS = 8
_NOTHING = 0  # an empty place in a space's table
_ALL_MAPPED = -1
# What a page group holds: zeros, something unknown, or (positive) data of the user who gave that mark.
ZEROS, UNKNOWN_CONTENT = 0, -1

_CREATE, _MAP, _SET_ACCESS, _UNMAP, _RELEASE = (
    int(Call.CREATE),
    int(Call.MAP),
    int(Call.SET_ACCESS),
    int(Call.UNMAP),
    int(Call.RELEASE),
)


class PoolArrays(NamedTuple):
    """Native state of a `PagePool`. A page group is an index into the first three arrays."""

    header: Int64
    handles: Int64
    num_mappings: Int32  # 0: free
    content: Int64  # whose data it last held, a mark that the user chose
    free: Int32  # stack of free page groups
    vacant: Int32  # stack of indices without a page group
    entry_points: Int64
    constants: Int64  # creation properties, read-write access, read-only access, page group bytes, fresh is zero


class SpaceArrays(NamedTuple):
    """Native state of an `AddressSpace`."""

    header: Int64
    table: Int32  # one a place: 0 nothing, n > 0 page group n - 1
    read_only: Int8  # one a place: 1 where its page group can only be read
    base: int


# -- the pool ---------------------------------------------------------------------------------------------------


@compiled
def _give_back(pool: PoolArrays, groups: Int32) -> None:
    """One mapping less for each page group; those without a mapping are free. Under the mutex."""
    for index in range(len(groups) - 1, -1, -1):  # so that they are taken again in this order
        group = groups[index]
        pool.num_mappings[group] -= 1
        if pool.num_mappings[group] == 0:
            pool.free[pool.header[NUM_FREE]] = group
            pool.header[NUM_FREE] += 1


@compiled
def release(pool: PoolArrays, groups: Int32) -> None:
    """One mapping less for each page group; those without a mapping are free."""
    lock(pool.header.ctypes.data)
    _give_back(pool, groups)
    unlock(pool.header.ctypes.data)


@compiled
def _destroy(pool: PoolArrays, groups: Int32) -> int:
    """Release handles of page groups that nobody else can reach any more; the first error code.

    A page group that the driver does not take back is free.
    """
    header = pool.header
    codes = np.empty(len(groups), np.int64)
    for index in range(len(groups)):
        codes[index] = call(pool.entry_points[_RELEASE], (pool.handles[groups[index]],))
    first_error = SUCCESS
    lock(pool.header.ctypes.data)
    for index in range(len(groups) - 1, -1, -1):
        pool.num_mappings[groups[index]] = 0
        if codes[index] == SUCCESS:
            pool.vacant[header[NUM_VACANT]] = groups[index]
            header[NUM_VACANT] += 1
            header[NUM_TOTAL] -= 1
        else:
            first_error = codes[index]
            pool.free[header[NUM_FREE]] = groups[index]
            header[NUM_FREE] += 1
    header[NUM_CALLS + _RELEASE] += len(groups)
    unlock(pool.header.ctypes.data)
    return first_error


@compiled
def release_free(pool: PoolArrays) -> int:
    """Give all free page groups back to the device; the first error code."""
    lock(pool.header.ctypes.data)
    groups = pool.free[: pool.header[NUM_FREE]].copy()
    pool.header[NUM_FREE] = 0
    unlock(pool.header.ctypes.data)
    return _destroy(pool, groups)


@compiled
def _acquire(pool: PoolArrays, groups: Int32, outcome: Int64) -> int:
    """Fill `groups` with page groups, each with one mapping to its name; all of them or none.

    Free ones first, then new ones up to the capacity: returns how many are of the first kind. On failure it returns -1,
    the outcome says how many are missing, or which error the driver gave, and the pool is as before.
    """
    header, wanted = pool.header, len(groups)
    lock(header.ctypes.data)
    num_free = min(wanted, header[NUM_FREE])
    num_new = wanted - num_free
    limit = len(pool.handles)  # what the device has memory for
    if header[CAPACITY] != UNLIMITED:
        limit = min(limit, header[CAPACITY])
    if header[NUM_TOTAL] + num_new > limit:
        outcome[SHORTFALL] = header[NUM_TOTAL] + num_new - limit
        unlock(header.ctypes.data)
        return -1
    for index in range(num_free):
        header[NUM_FREE] -= 1
        groups[index] = pool.free[header[NUM_FREE]]
        pool.num_mappings[groups[index]] = 1
    for index in range(num_free, wanted):
        if header[NUM_VACANT] > 0:
            header[NUM_VACANT] -= 1
            groups[index] = pool.vacant[header[NUM_VACANT]]
        else:
            groups[index] = header[NEXT_INDEX]
            header[NEXT_INDEX] += 1
    header[NUM_TOTAL] += num_new
    header[NUM_CALLS + _CREATE] += num_new
    unlock(header.ctypes.data)

    handle = np.zeros(1, np.int64)
    for index in range(num_free, wanted):
        group = groups[index]
        code = call(
            pool.entry_points[_CREATE],
            (handle.ctypes.data, pool.constants[3], pool.constants[0], 0),
        )
        if code != SUCCESS:
            if code == OUT_OF_MEMORY:
                outcome[SHORTFALL] = wanted - index
            else:
                outcome[FAILED_CALL], outcome[CODE] = _CREATE, code
            lock(header.ctypes.data)
            _give_back(pool, groups[:num_free])
            for unmade in range(index, wanted):
                pool.vacant[header[NUM_VACANT]] = groups[unmade]
                header[NUM_VACANT] += 1
            header[NUM_TOTAL] -= wanted - index
            header[NUM_CALLS + _CREATE] -= wanted - index - 1
            unlock(header.ctypes.data)
            _destroy(pool, groups[num_free:index])
            return -1
        pool.handles[group] = handle[0]
        pool.num_mappings[group] = 1
        pool.content[group] = ZEROS if pool.constants[4] else UNKNOWN_CONTENT
    return num_free  # type: ignore[no-any-return]


@compiled
def _undo_acquire(pool: PoolArrays, groups: Int32, num_recycled: int, is_stuck: Bool) -> None:
    """Leave the pool as `_acquire` met it, but for page groups that are stuck. They may hold anything."""
    for index in range(len(groups)):
        if is_stuck[index]:
            pool.content[groups[index]] = UNKNOWN_CONTENT
    release(pool, groups[:num_recycled][~is_stuck[:num_recycled]])
    _destroy(pool, groups[num_recycled:][~is_stuck[num_recycled:]])


# -- runs -------------------------------------------------------------------------------------------------------


@compiled
def _count(pool: PoolArrays, which: int, number: int) -> None:
    lock(pool.header.ctypes.data)
    pool.header[NUM_CALLS + which] += number
    unlock(pool.header.ctypes.data)


@compiled
def _unmap_run(pool: PoolArrays, space: SpaceArrays, first: int, count: int) -> int:
    page_group_bytes = pool.constants[3]
    _count(pool, _UNMAP, 1)
    return call(  # type: ignore[no-any-return]
        pool.entry_points[_UNMAP], (space.base + first * page_group_bytes, count * page_group_bytes)
    )


@compiled
def _map_run(pool: PoolArrays, space: SpaceArrays, first: int, groups: Int32, read_only: bool, outcome: Int64) -> int:
    """Map page groups at neighbouring places, open them, and enter them into the table.

    Returns `_ALL_MAPPED`. After a failure, which the outcome names, it returns how many of the first are stuck: those
    are mapped and in the table, but not open; normally there are none.
    """
    page_group_bytes = pool.constants[3]
    address = space.base + first * page_group_bytes
    done = 0
    failed, code = _MAP, SUCCESS
    for group in groups:
        code = call(
            pool.entry_points[_MAP],
            (address + done * page_group_bytes, page_group_bytes, 0, pool.handles[group], 0),
        )
        if code != SUCCESS:
            break
        done += 1
    _count(pool, _MAP, len(groups) if code == SUCCESS else done + 1)
    if code == SUCCESS:
        failed = _SET_ACCESS
        _count(pool, _SET_ACCESS, 1)
        access = pool.constants[2] if read_only else pool.constants[1]
        code = call(pool.entry_points[_SET_ACCESS], (address, done * page_group_bytes, access, 1))
        if code == SUCCESS:
            _record(space, first, groups, read_only)
            return _ALL_MAPPED
    outcome[FAILED_CALL], outcome[CODE] = failed, code
    if done == 0 or _unmap_run(pool, space, first, done) == SUCCESS:
        return 0
    _record(space, first, groups[:done], read_only)
    return done


@compiled
def _record(space: SpaceArrays, first: int, groups: Int32, read_only: bool) -> None:
    """Enter mapped page groups into the table."""
    for index in range(len(groups)):
        space.table[first + index] = groups[index] + 1
        if read_only:
            space.read_only[first + index] = 1
    space.header[NUM_MAPPED] += len(groups)
    space.header[FIRST_MAPPED] = min(space.header[FIRST_MAPPED], first)
    space.header[END_MAPPED] = max(space.header[END_MAPPED], first + len(groups))


@compiled
def _find_runs(space: SpaceArrays, ranges: Int64, mapped: bool) -> Int64:
    """Maximal runs of mapped (or of empty) places within each range: rows of (first place, number of places, 0)."""
    runs = np.zeros((0, 3), np.int64)
    for writing in (False, True):  # count them, then note them
        found = 0
        for row in range(len(ranges)):
            place, end = ranges[row, 0], ranges[row, 0] + ranges[row, 1]
            while place < end:
                first = place
                while place < end and (space.table[place] != _NOTHING) == mapped:
                    place += 1
                if place > first:
                    if writing:
                        runs[found, 0], runs[found, 1] = first, place - first
                    found += 1
                else:
                    place += 1
        if not writing:
            runs = np.zeros((found, 3), np.int64)
    return runs


@compiled
def _take_from_table(space: SpaceArrays, first: int, count: int) -> Int32:
    """Clear places of the table and return the page groups that were there."""
    groups = np.empty(count, np.int32)
    for index in range(count):
        groups[index] = space.table[first + index] - 1
        space.table[first + index] = _NOTHING
        if space.read_only[first + index]:
            space.read_only[first + index] = 0
    space.header[NUM_MAPPED] -= count
    return groups


@compiled
def _restore_run(pool: PoolArrays, space: SpaceArrays, first: int, count: int, outcome: Int64) -> int:
    """Map what was just unmapped and is still in the table, as it was; how many page groups that failed for."""
    failed, end = 0, first + count
    while first < end:
        read_only = space.read_only[first] != 0
        count = 1
        while first + count < end and (space.read_only[first + count] != 0) == read_only:
            count += 1
        groups = _take_from_table(space, first, count)
        num_stuck = _map_run(pool, space, first, groups, read_only, outcome)
        if num_stuck != _ALL_MAPPED:
            release(pool, groups[num_stuck:])
            failed += count
        first += count
    return failed


# -- plans ------------------------------------------------------------------------------------------------------


@compiled
def commit(pool: PoolArrays, space: SpaceArrays, ranges: Int64, content: int, outcome: Int64) -> Int64:
    """Put a page group below every empty place of the ranges, rows of (first place, number of places).

    Returns
    -------
    ndarray of int64, shape [n, 3]
        The runs that were mapped: first place, number of places, and 1 where the memory may hold what somebody else
        left (`content` is the caller's mark for its own data). Empty after a failure, which `outcome` describes.
    """
    outcome[:] = 0
    runs = _find_runs(space, ranges, False)
    groups = np.empty(runs[:, 1].sum(), np.int32)
    num_recycled = _acquire(pool, groups, outcome) if len(groups) else -1
    if num_recycled < 0:
        return runs[:0]
    taken = 0
    for row in range(len(runs)):
        first, count = runs[row, 0], runs[row, 1]
        num_stuck = _map_run(pool, space, first, groups[taken : taken + count], False, outcome)
        if num_stuck != _ALL_MAPPED:
            is_stuck = np.zeros(len(groups), np.bool_)
            is_stuck[taken : taken + num_stuck] = True
            for undone in range(row - 1, -1, -1):
                first, count = runs[undone, 0], runs[undone, 1]
                taken -= count
                if _unmap_run(pool, space, first, count) == SUCCESS:
                    _take_from_table(space, first, count)
                else:
                    is_stuck[taken : taken + count] = True
            _undo_acquire(pool, groups, num_recycled, is_stuck)
            outcome[NUM_STUCK] = is_stuck.sum()
            return runs[:0]
        taken += count
    for row in range(len(runs)):
        for place in range(runs[row, 0], runs[row, 0] + runs[row, 1]):
            group = space.table[place] - 1
            if pool.content[group] not in (content, ZEROS):
                runs[row, 2] = 1
            pool.content[group] = content
    outcome[NUM_CHANGED] = len(groups)
    return runs


@compiled
def decommit(pool: PoolArrays, space: SpaceArrays, ranges: Int64, forget_content: bool, outcome: Int64) -> None:
    """Take away every page group mapped in the ranges; all of them or none.

    `forget_content` has the page groups zeroed before anybody uses them again.
    """
    outcome[:] = 0
    runs = _find_runs(space, ranges, True)
    for row in range(len(runs)):
        code = _unmap_run(pool, space, runs[row, 0], runs[row, 1])
        if code != SUCCESS:
            lost = 0
            for undone in range(row - 1, -1, -1):
                lost += _restore_run(pool, space, runs[undone, 0], runs[undone, 1], outcome)
            outcome[FAILED_CALL], outcome[CODE], outcome[NUM_STUCK] = _UNMAP, code, lost
            return
    for row in range(len(runs)):
        groups = _take_from_table(space, runs[row, 0], runs[row, 1])
        if forget_content:
            for group in groups:
                pool.content[group] = UNKNOWN_CONTENT
        release(pool, groups)
        outcome[NUM_CHANGED] += len(groups)


@compiled
def alias(
    pool: PoolArrays,
    space: SpaceArrays,
    first: int,
    source: SpaceArrays,
    source_first: int,
    count: int,
    writable: bool,
    outcome: Int64,
) -> None:
    """Map the page groups of one place at another as well. The target places are empty, the source places are not."""
    outcome[:] = 0
    if count == 0:
        return
    groups = source.table[source_first : source_first + count] - np.int32(1)
    lock(pool.header.ctypes.data)
    for group in groups:
        pool.num_mappings[group] += 1
    unlock(pool.header.ctypes.data)
    num_stuck = _map_run(pool, space, first, groups, not writable, outcome)
    if num_stuck == _ALL_MAPPED:
        outcome[NUM_CHANGED] = count
    else:
        release(pool, groups[num_stuck:])
        outcome[NUM_STUCK] = num_stuck


@compiled
def count_missing(space: SpaceArrays, ranges: Int64) -> int:
    """Number of places in the ranges without a page group."""
    missing = 0
    for row in range(len(ranges)):
        for place in range(ranges[row, 0], ranges[row, 0] + ranges[row, 1]):
            if space.table[place] == _NOTHING:
                missing += 1
    return missing
