"""The compiled half of `AddressSpace`: plans carried out and undone. No GIL.

A **plan** puts page groups below ranges of places, or takes them away, by whole handles (see `handles`). It is carried
out run by run, a run being neighbouring places; when a driver call fails, what was done is undone in reverse order, so
that a plan either holds completely or leaves everything as it was. An undo that fails too leaves its places **stuck**:
they stay on the books, mapped and out of service, and the caller is told; a later commit opens and zeroes them. The
ranges of one call do not overlap.

A place may be mapped **ahead** of need: there is memory below it, but it is not in service, and counts as missing for
everybody but a later commit, which finds it ready and only has to turn the sign of its entry in the table. A place that
was withdrawn is such a place; but an alias cannot come back into service, for what it shows is not its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vtensor.allocator.driver.base import SUCCESS, Call
from vtensor.allocator.handles import (
    CALLED,
    POOL_WORDS,
    PoolArrays,
    end_turn,
    exchange,
    give_back,
    head_of,
    num_available,
    pool_at,
    size_class_of,
    take,
    take_turn,
    top_of_free,
    undo_take,
)
from vtensor.allocator.native import call, compiled, int8_at, int32_at, int64_at
from vtensor.allocator.words import (
    CAPACITY,
    CLASS_SHIFT,
    CLASS_WORDS,
    CODE,
    CONTENT,
    COUNT,
    EMPTY,
    END_MAPPED,
    FAILED_CALL,
    FIRST,
    FIRST_MAPPED,
    HOLES_READABLE,
    LARGEST,
    NUM_ACCESS,
    NUM_AHEAD,
    NUM_CALLS,
    NUM_CHANGED,
    NUM_MAPPED,
    NUM_READY,
    NUM_SHOWN,
    NUM_STUCK,
    NUM_ZEROED,
    PAGE_GROUP_BYTES,
    PARTIAL,
    READ_ONLY,
    READ_ONLY_ALIAS,
    READ_WRITE,
    SHARED,
    SHORTFALL,
    SHOWS_ZEROS,
    STUCK_CONTENT,
    TAKEN,
    UNKNOWN_CONTENT,
    WRITABLE,
    ZERO_CALLS,
    ZEROS,
    ZEROS_GROUP,
)

__all__ = [
    "SPACE_WORDS",
    "SpaceArrays",
    "alias",
    "are_within",
    "commit",
    "commit_by_words",
    "commit_ready",
    "count_missing",
    "count_missing_by_words",
    "decommit",
    "held_runs",
    "hold_zeros",
    "map_as_it_is",
    "show_zeros",
    "space_at",
    "unmap",
    "widen",
    "withdraw",
]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Int8 = npt.NDArray[np.int8]
Bool = npt.NDArray[np.bool_]

_NOTHING = 0  # an empty place in a space's table
_ALL_MAPPED = -1

_MAP, _SET_ACCESS, _UNMAP, _ZERO = int(Call.MAP), int(Call.SET_ACCESS), int(Call.UNMAP), int(Call.ZERO)


class SpaceArrays(NamedTuple):
    """Native state of an `AddressSpace`."""

    header: Int64
    table: Int32  # one a place: 0 nothing, n > 0 page group n - 1, -n the same, mapped ahead and not in service
    access: Int8  # one a place: WRITABLE (also where nothing is), READ_ONLY_ALIAS, or SHOWS_ZEROS
    base: int


SPACE_WORDS = 2 * len(SpaceArrays._fields) - 1


@compiled
def space_at(words: Int64) -> SpaceArrays:
    """A space from its arrays as `native.packed` them."""
    return SpaceArrays(
        int64_at(words[0], words[1]), int32_at(words[2], words[3]), int8_at(words[4], words[5]), words[6]
    )


# -- runs -------------------------------------------------------------------------------------------------------


@compiled
def _unmap_run(pool: PoolArrays, space: SpaceArrays, first: int, count: int) -> int:
    size = pool.constants[PAGE_GROUP_BYTES]
    pool.header[NUM_CALLS + _UNMAP] += 1
    return int(call(pool.entry_points[_UNMAP], (space.base + first * size, count * size)))


@compiled
def _open_run(pool: PoolArrays, space: SpaceArrays, first: int, count: int, kind: int) -> int:
    size = pool.constants[PAGE_GROUP_BYTES]
    access = pool.constants[READ_WRITE] if kind == WRITABLE else pool.constants[READ_ONLY]
    pool.header[NUM_CALLS + _SET_ACCESS] += 1
    arguments = space.base + first * size, count * size, access, pool.constants[NUM_ACCESS]
    return int(call(pool.entry_points[_SET_ACCESS], arguments))


@compiled
def _map_run(
    pool: PoolArrays, space: SpaceArrays, first: int, heads: Int32, kind: int, sign: int, outcome: Int64
) -> int:
    """Map handles at neighbouring places, open them, and enter them into the table.

    Returns `_ALL_MAPPED`. After a failure, which the outcome names, it returns how many of the first are stuck: those
    are mapped and in the table, out of service, but not open; normally there are none.
    """
    shift = pool.constants[CLASS_SHIFT]
    size = pool.constants[PAGE_GROUP_BYTES]
    address = space.base + first * size
    done, done_bytes = 0, 0
    failed, code = _MAP, SUCCESS
    for head in heads:
        handle_bytes = size << size_class_of(shift, head)
        pool.header[NUM_CALLS + _MAP] += 1
        code = call(pool.entry_points[_MAP], (address + done_bytes, handle_bytes, 0, pool.handles[head], 0))
        if code != SUCCESS:
            break
        done += 1
        done_bytes += handle_bytes
    if code == SUCCESS:
        failed = _SET_ACCESS
        code = _open_run(pool, space, first, done_bytes // size, kind)
        if code == SUCCESS:
            _record(pool, space, first, heads, kind, sign)
            return _ALL_MAPPED
    outcome[FAILED_CALL], outcome[CODE] = failed, code
    if done == 0 or _unmap_run(pool, space, first, done_bytes // size) == SUCCESS:
        return 0
    _record(pool, space, first, heads[:done], kind, -1)
    for head in heads[:done]:
        pool.content[head] = STUCK_CONTENT
    return done


@compiled
def _record(pool: PoolArrays, space: SpaceArrays, first: int, heads: Int32, kind: int, sign: int) -> None:
    """Enter mapped handles into the table."""
    shift = pool.constants[CLASS_SHIFT]
    place = first
    for head in heads:
        for offset in range(1 << size_class_of(shift, head)):
            space.table[place] = sign * (head + offset + 1)
            if kind != WRITABLE:
                space.access[place] = kind
            place += 1
    space.header[NUM_MAPPED] += place - first
    if sign < 0:
        space.header[NUM_AHEAD] += place - first
    if kind == SHOWS_ZEROS:
        space.header[NUM_SHOWN] += place - first
    space.header[FIRST_MAPPED] = min(space.header[FIRST_MAPPED], first)
    space.header[END_MAPPED] = max(space.header[END_MAPPED], place)


@compiled
def _take_from_table(pool: PoolArrays, space: SpaceArrays, first: int, count: int) -> Int32:
    """Clear places of the table, which hold whole handles, and return the handles that were there."""
    shift = pool.constants[CLASS_SHIFT]
    heads = np.empty(count, np.int32)
    number = 0
    for place in range(first, first + count):
        group = abs(space.table[place]) - 1
        if space.table[place] < 0:
            space.header[NUM_AHEAD] -= 1
        if head_of(shift, group) == group:
            heads[number] = group
            number += 1
        space.table[place] = _NOTHING
        if space.access[place] == SHOWS_ZEROS:
            space.header[NUM_SHOWN] -= 1
        if space.access[place] != WRITABLE:  # what was never written costs no memory, and must stay so
            space.access[place] = WRITABLE
    space.header[NUM_MAPPED] -= count
    return heads[:number]


@compiled
def _restore_run(pool: PoolArrays, space: SpaceArrays, first: int, count: int, outcome: Int64) -> int:
    """Map what was just unmapped and is still in the table, as it was; how many page groups that failed for."""
    failed, end = 0, first + count
    while first < end:
        kind = space.access[first]
        count = 1
        while first + count < end and space.access[first + count] == kind:
            count += 1
        is_ahead = space.table[first : first + count] < 0
        heads = _take_from_table(pool, space, first, count)
        num_stuck = _map_run(pool, space, first, heads, kind, 1, outcome)
        if num_stuck == _ALL_MAPPED:
            for index in range(count):
                if is_ahead[index]:
                    space.table[first + index] *= -1
                    space.header[NUM_AHEAD] += 1
        else:
            for head in heads[num_stuck:]:  # its owner may have wanted it forgotten
                pool.content[head] = UNKNOWN_CONTENT
            give_back(pool, heads[num_stuck:])
            failed += count
        first += count
    return failed


@compiled
def _whole_runs(pool: PoolArrays, space: SpaceArrays, ranges: Int64) -> Int64:
    """Maximal runs of places within each range that hold whole handles: rows of (first place, number of places)."""
    shift = pool.constants[CLASS_SHIFT]
    runs = np.empty((0, 2), np.int64)
    for writing in (False, True):  # count them, then note them
        found = 0
        for row in range(len(ranges)):
            place, end = ranges[row, FIRST], ranges[row, FIRST] + ranges[row, COUNT]
            first = place
            while place <= end:
                size = 0  # of the whole handle that starts here
                if place < end and space.table[place] != _NOTHING:
                    group = abs(space.table[place]) - 1
                    if head_of(shift, group) == group and place + (1 << size_class_of(shift, group)) <= end:
                        size = 1 << size_class_of(shift, group)
                if size == 0:
                    if place > first:
                        if writing:
                            runs[found, 0], runs[found, 1] = first, place - first
                        found += 1
                    first = place + 1
                    size = 1
                place += size
        if not writing:
            runs = np.empty((found, 2), np.int64)
    return runs


# -- plans ------------------------------------------------------------------------------------------------------


@compiled
def commit(pool: PoolArrays, space: SpaceArrays, ranges: Int64, is_ahead: bool, stream: int, outcome: Int64) -> Int64:
    """Put page groups below every empty place of the ranges, in the largest handles that fit. Takes a turn.

    Memory that may hold what somebody else left (the range's mark is not its own) is zeroed, in the order of `stream`.
    With `is_ahead` the places are not in service before another commit asks for them. In the outcome: the number of
    places that came into service, or were mapped ahead; and how many of them an earlier one had mapped ahead.

    Returns
    -------
    ndarray of int64, shape [n, 2]
        Runs of places that were mapped or came into service: first place, number of places. Empty after a failure,
        which `outcome` describes; but where zeroing failed, they are there all the same, for the caller to take away.
    """
    take_turn(pool)
    runs = _commit(pool, space, ranges, is_ahead, stream, outcome)
    end_turn(pool)
    return runs


@compiled
def commit_by_words(words: Int64, ranges: Int64, stream: int, outcome: Int64) -> Int64:
    """As `commit`, of a pool and a space `native.packed` one after the other: half as long on the way."""
    return commit(pool_at(words), space_at(words[POOL_WORDS:]), ranges, False, stream, outcome)


@compiled
def _commit(pool: PoolArrays, space: SpaceArrays, ranges: Int64, is_ahead: bool, stream: int, outcome: Int64) -> Int64:
    outcome[:] = 0
    nothing = np.empty((0, 2), np.int64)
    shift = pool.constants[CLASS_SHIFT]
    wanted, num_ready = 0, 0
    for row in range(len(ranges)):
        for place in range(ranges[row, FIRST], ranges[row, FIRST] + ranges[row, COUNT]):
            if space.table[place] == _NOTHING:
                wanted += 1
            elif space.access[place] == SHOWS_ZEROS:
                outcome[CODE] = SHARED
                return nothing
            elif space.table[place] < 0:
                num_ready += 1
                if space.access[place] != WRITABLE or pool.num_mappings[head_of(shift, -space.table[place] - 1)] > 1:
                    outcome[CODE] = SHARED
                    return nothing
    if wanted > num_available(pool):
        outcome[SHORTFALL] = wanted - num_available(pool)
        return nothing
    if wanted > 0 and not _map_missing(pool, space, ranges, wanted, outcome):
        return nothing
    if wanted == 0 and (is_ahead or num_ready == 0):
        return nothing
    runs = _runs_ahead(space, ranges)
    if _zero_dirty(pool, space, ranges, stream, outcome):
        outcome[NUM_CHANGED] = wanted
        if not is_ahead:
            _enter_service(space, runs)
            outcome[NUM_CHANGED], outcome[NUM_READY] = wanted + num_ready, num_ready
    outcome[ZERO_CALLS] = pool.header[NUM_CALLS + _ZERO]
    return runs


@compiled
def map_as_it_is(pool: PoolArrays, space: SpaceArrays, ranges: Int64, outcome: Int64) -> bool:
    """Put page groups below every empty place of the ranges, in service at once, with whatever they last held.

    For who promises nothing of what new memory holds. All of them, or False: then none are in service that were not
    before, and what is mapped all the same, since it is stuck, is for the caller to take away. Within the caller's
    turn.
    """
    outcome[:] = 0
    wanted = 0
    for row in range(len(ranges)):
        for place in range(ranges[row, FIRST], ranges[row, FIRST] + ranges[row, COUNT]):
            wanted += space.table[place] == _NOTHING
    if wanted > num_available(pool):
        outcome[SHORTFALL] = wanted - num_available(pool)
        return False
    if wanted > 0 and not _map_missing(pool, space, ranges, wanted, outcome):
        return False
    shift = pool.constants[CLASS_SHIFT]
    for row in range(len(ranges)):  # what was stuck is mapped, but not open
        for place in range(ranges[row, FIRST], ranges[row, FIRST] + ranges[row, COUNT]):
            group = abs(space.table[place]) - 1
            if head_of(shift, group) == group and pool.content[group] == STUCK_CONTENT:
                code = _open_run(pool, space, place, 1 << size_class_of(shift, group), WRITABLE)
                if code != SUCCESS:
                    outcome[FAILED_CALL], outcome[CODE] = _SET_ACCESS, code
                    return False
    for row in range(len(ranges)):
        for place in range(ranges[row, FIRST], ranges[row, FIRST] + ranges[row, COUNT]):
            if space.table[place] < 0:
                space.table[place] = -space.table[place]
                space.header[NUM_AHEAD] -= 1
                pool.content[head_of(shift, space.table[place] - 1)] = UNKNOWN_CONTENT
    outcome[NUM_CHANGED] = wanted
    return True


@compiled
def _map_missing(pool: PoolArrays, space: SpaceArrays, ranges: Int64, wanted: int, outcome: Int64) -> bool:
    """Map handles, ahead so far, at all empty places of the ranges; all of them, or none and False."""
    shift = pool.constants[CLASS_SHIFT]
    heads, places, is_new = np.empty(wanted, np.int32), np.empty(wanted, np.int64), np.zeros(wanted, np.bool_)
    number = _take_handles(pool, space, ranges, wanted, heads, places, is_new, outcome)
    if number == 0:
        return False
    heads, places, is_new = heads[:number], places[:number], is_new[:number]
    starts, num_runs = np.empty(number, np.int64), 0  # the first handle of each run
    for index in range(number):
        if index == 0 or places[index] != places[index - 1] + (1 << size_class_of(shift, heads[index - 1])):
            starts[num_runs] = index
            num_runs += 1
    for run in range(num_runs):
        first, end = starts[run], starts[run + 1] if run + 1 < num_runs else number
        num_stuck = _map_run(pool, space, places[first], heads[first:end], WRITABLE, -1, outcome)
        if num_stuck != _ALL_MAPPED:
            is_stuck = np.zeros(number, np.bool_)
            is_stuck[first : first + num_stuck] = True
            for undone in range(run - 1, -1, -1):
                start, stop = starts[undone], starts[undone + 1]
                count = places[stop - 1] + (1 << size_class_of(shift, heads[stop - 1])) - places[start]
                if _unmap_run(pool, space, places[start], count) == SUCCESS:
                    _take_from_table(pool, space, places[start], count)
                else:
                    is_stuck[start:stop] = True
            for index in range(number):
                if is_stuck[index]:
                    outcome[NUM_STUCK] += 1 << size_class_of(shift, heads[index])
            undo_take(pool, heads, is_new, is_stuck)
            return False
    return True


@compiled
def _take_handles(
    pool: PoolArrays,
    space: SpaceArrays,
    ranges: Int64,
    wanted: int,
    heads: Int32,
    places: Int64,
    is_new: Bool,
    outcome: Int64,
) -> int:
    """Take handles for all empty places of the ranges, and note which goes where; how many, 0 after a failure.

    Where the device has no memory for a large handle, smaller ones are tried: a shortage is exact.
    """
    number, taken = 0, 0
    ceiling = len(pool.classes) // CLASS_WORDS - 1
    for row in range(len(ranges)):
        place, end = ranges[row, FIRST], ranges[row, FIRST] + ranges[row, COUNT]
        while place < end:
            gap = place
            while gap < end and space.table[gap] == _NOTHING:
                gap += 1
            while place < gap:
                size_class = min(ceiling, ranges[row, LARGEST])
                while 1 << size_class > gap - place:
                    size_class -= 1
                top = top_of_free(pool, size_class)
                # Who reads a hole in this moment must go on to read zeros: no time to zero it once it is there.
                is_dirty = top >= 0 and space.header[HOLES_READABLE] != 0 and pool.content[top] != ZEROS
                is_new[number] = top < 0 or is_dirty
                head = exchange(pool, size_class, outcome) if is_dirty else take(pool, size_class, outcome)
                if head < 0 and head != CALLED and size_class > 0:
                    ceiling = size_class - 1
                elif head < 0:
                    if head != CALLED:
                        outcome[SHORTFALL] = wanted - taken
                    undo_take(pool, heads[:number], is_new[:number], np.zeros(number, np.bool_))
                    return 0
                else:
                    heads[number], places[number] = head, place
                    number += 1
                    place += 1 << size_class
                    taken += 1 << size_class
            place += 1
    return number


@compiled
def _runs_ahead(space: SpaceArrays, ranges: Int64) -> Int64:
    """Maximal runs of places within each range that are mapped ahead: rows of (first place, number of places)."""
    most = 0
    for row in range(len(ranges)):
        most += (ranges[row, COUNT] + 1) // 2
    runs, found = np.empty((most, 2), np.int64), 0
    for row in range(len(ranges)):
        place, end = ranges[row, FIRST], ranges[row, FIRST] + ranges[row, COUNT]
        while place < end:
            first = place
            while place < end and space.table[place] < 0:
                place += 1
            if place > first:
                runs[found, 0], runs[found, 1] = first, place - first
                found += 1
            else:
                place += 1
    return runs[:found]


@compiled
def _enter_service(space: SpaceArrays, runs: Int64) -> None:
    for row in range(len(runs)):
        first, count = runs[row, 0], runs[row, 1]
        for place in range(first, first + count):  # a slice would cost more than the few places of most runs
            space.table[place] = -space.table[place]
        space.header[NUM_AHEAD] -= count


@compiled
def _zero_dirty(pool: PoolArrays, space: SpaceArrays, ranges: Int64, stream: int, outcome: Int64) -> bool:
    """Zero the handles below places mapped ahead that may hold data of others; False after an error.

    Where part of a handle is in service already, with data of another mark, only the rest is zeroed.
    """
    shift = pool.constants[CLASS_SHIFT]
    size = pool.constants[PAGE_GROUP_BYTES]
    for row in range(len(ranges)):
        place, end, mark = ranges[row, FIRST], ranges[row, FIRST] + ranges[row, COUNT], ranges[row, CONTENT]
        first = last = place  # dirty handles side by side, zeroed with one call
        while True:
            is_dirty, head, start, stop = False, -1, place, place + 1
            call_made, code, new_mark = _ZERO, SUCCESS, mark
            if place < end and space.table[place] < 0:
                group = -space.table[place] - 1
                head = head_of(shift, group)
                start = place - (group - head)  # the handle may begin before the range, and end after it
                stop = start + (1 << size_class_of(shift, head))
                is_dirty = pool.content[head] not in (mark, ZEROS)
                if pool.content[head] == STUCK_CONTENT:
                    call_made, code = _SET_ACCESS, _open_run(pool, space, start, stop - start, WRITABLE)
                if is_dirty and (space.table[start:stop] > _NOTHING).any():
                    limit = min(stop, end)
                    start, stop, new_mark = place, place + 1, UNKNOWN_CONTENT
                    while stop < limit and space.table[stop] < 0:
                        stop += 1
            if code == SUCCESS and last > first and not (is_dirty and start == last):
                pool.header[NUM_CALLS + _ZERO] += 1
                outcome[NUM_ZEROED] += 1
                call_made = _ZERO
                code = call(pool.entry_points[_ZERO], (space.base + first * size, 0, (last - first) * size, stream))
                if code == SUCCESS:
                    first = last
            if code != SUCCESS:
                for bad in range(first, last):
                    pool.content[head_of(shift, abs(space.table[bad]) - 1)] = UNKNOWN_CONTENT
                outcome[FAILED_CALL], outcome[CODE] = call_made, code
                return False
            if head >= 0:
                pool.content[head] = new_mark
            if is_dirty:
                first = start if last == first else first
                last = stop
            if place >= end:
                break
            place = stop
            if last == first:
                first = last = place
    return True


@compiled
def commit_ready(pool: PoolArrays, space: SpaceArrays, ranges: Int64, zero_calls: int) -> int:
    """Commit ranges in which every place is mapped ahead and fit for use as it is; how many.

    0, with nothing changed, where there is more to do, which `commit` can; where that is plain to see, no turn is
    taken. The ranges lie within the space, and do not overlap. `zero_calls`: how many of the pool's calls that zero
    memory are known to have taken effect, -1 where they have when they return; more of them may be what these places
    wait for.
    """
    if zero_calls >= 0 and zero_calls != pool.header[NUM_CALLS + _ZERO]:
        return 0
    for row in range(len(ranges)):
        for place in range(ranges[row, FIRST], ranges[row, FIRST] + ranges[row, COUNT]):
            if space.table[place] >= _NOTHING:
                return 0
    take_turn(pool)
    number = 0
    if zero_calls < 0 or zero_calls == pool.header[NUM_CALLS + _ZERO]:  # it may have changed meanwhile
        number = _commit_ready(
            pool.num_mappings, pool.content, pool.constants[CLASS_SHIFT], space.table, space.access, ranges
        )
        space.header[NUM_AHEAD] -= number
    end_turn(pool)
    return number


@compiled
def _commit_ready(num_mappings: Int32, content: Int64, shift: int, table: Int32, access: Int8, ranges: Int64) -> int:
    number = 0
    for row in range(len(ranges)):
        first, count, mark = ranges[row, FIRST], ranges[row, COUNT], ranges[row, CONTENT]
        for place in range(first, first + count):
            if table[place] >= _NOTHING or access[place] != WRITABLE:
                return 0
            head = head_of(shift, -table[place] - 1)
            if num_mappings[head] > 1:
                return 0
            if content[head] != mark and content[head] != ZEROS:
                return 0
        number += count
    for row in range(len(ranges)):
        first, count, mark = ranges[row, FIRST], ranges[row, COUNT], ranges[row, CONTENT]
        for place in range(first, first + count):
            content[head_of(shift, -table[place] - 1)] = mark
            table[place] = -table[place]
    return number


@compiled
def withdraw(pool: PoolArrays, space: SpaceArrays, ranges: Int64) -> None:
    """Take places in ranges out of service: from now on they are mapped ahead. Takes a turn."""
    take_turn(pool)
    for row in range(len(ranges)):
        for place in range(ranges[row, FIRST], ranges[row, FIRST] + ranges[row, COUNT]):
            if space.table[place] > _NOTHING:
                space.table[place] *= -1
                space.header[NUM_AHEAD] += 1
    end_turn(pool)


@compiled
def decommit(pool: PoolArrays, space: SpaceArrays, ranges: Int64, forget_content: bool, outcome: Int64) -> None:
    """Take away every handle that lies in the ranges as a whole; all of them or none. Takes a turn.

    Zeros that are shown go as well, and are not counted in the outcome.

    `forget_content` has the page groups zeroed before anybody uses them again.
    """
    take_turn(pool)
    unmap(pool, space, ranges, forget_content, outcome)
    end_turn(pool)


@compiled
def unmap(pool: PoolArrays, space: SpaceArrays, ranges: Int64, forget_content: bool, outcome: Int64) -> None:
    """As `decommit`, within the caller's turn."""
    outcome[:] = 0
    num_shown = space.header[NUM_SHOWN]
    runs = _whole_runs(pool, space, ranges)
    for row in range(len(runs)):
        code = _unmap_run(pool, space, runs[row, 0], runs[row, 1])
        if code != SUCCESS:
            lost = 0
            for undone in range(row - 1, -1, -1):
                lost += _restore_run(pool, space, runs[undone, 0], runs[undone, 1], outcome)
            outcome[FAILED_CALL], outcome[CODE], outcome[NUM_STUCK] = _UNMAP, code, lost
            return
    for row in range(len(runs)):
        heads = _take_from_table(pool, space, runs[row, 0], runs[row, 1])
        if forget_content:
            for head in heads:
                pool.content[head] = UNKNOWN_CONTENT
        give_back(pool, heads)
        outcome[NUM_CHANGED] += runs[row, 1]
    outcome[NUM_CHANGED] -= num_shown - space.header[NUM_SHOWN]


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
    """Map the handles of one range of places at another as well. Takes a turn.

    Otherwise the code says that a target place is `TAKEN`, a source place is `EMPTY` or out of service, or the range
    cuts through a handle (`PARTIAL`).
    """
    take_turn(pool)
    _alias(pool, space, first, source, source_first, count, writable, outcome)
    end_turn(pool)


@compiled
def _alias(
    pool: PoolArrays,
    space: SpaceArrays,
    first: int,
    source: SpaceArrays,
    source_first: int,
    count: int,
    writable: bool,
    outcome: Int64,
) -> None:
    shift = pool.constants[CLASS_SHIFT]
    outcome[:] = 0
    if (space.table[first : first + count] != _NOTHING).any():
        outcome[CODE] = TAKEN
        return
    if (source.table[source_first : source_first + count] <= _NOTHING).any():
        outcome[CODE] = EMPTY
        return
    heads, number, place = np.empty(count, np.int32), 0, source_first
    while place < source_first + count:
        group = source.table[place] - 1
        if head_of(shift, group) != group:
            outcome[CODE] = PARTIAL
            return
        heads[number] = group
        number += 1
        place += 1 << size_class_of(shift, group)
    if place > source_first + count:
        outcome[CODE] = PARTIAL
        return
    heads = heads[:number]
    if number == 0:
        return
    for head in heads:
        pool.num_mappings[head] += 1
    num_stuck = _map_run(pool, space, first, heads, WRITABLE if writable else READ_ONLY_ALIAS, 1, outcome)
    if num_stuck == _ALL_MAPPED:
        outcome[NUM_CHANGED] = count
    else:
        give_back(pool, heads[num_stuck:])
        for head in heads[:num_stuck]:
            outcome[NUM_STUCK] += 1 << size_class_of(shift, head)


@compiled
def hold_zeros(pool: PoolArrays, space: SpaceArrays) -> None:
    """Have the pool hold the page group at a space's first place, which is all zeros. Takes a turn.

    One is enough: where it holds one, the capacity shrinks to what it was before `widen`.
    """
    take_turn(pool)
    if pool.header[ZEROS_GROUP] == 0:
        group = space.table[0] - 1
        pool.num_mappings[group] += 1
        pool.header[ZEROS_GROUP] = group + 1
    else:
        pool.header[CAPACITY] -= 1
    end_turn(pool)


@compiled
def widen(pool: PoolArrays, by: int) -> None:
    """Change the capacity, by a page group for zeros. Takes a turn."""
    take_turn(pool)
    pool.header[CAPACITY] += by
    end_turn(pool)


@compiled
def show_zeros(pool: PoolArrays, space: SpaceArrays, ranges: Int64, outcome: Int64) -> bool:
    """Map the page group of zeros that the pool holds at all empty places of the ranges. Takes a turn.

    What was done before a failure stays: it is what its places read as in any case. False where the pool holds none.
    """
    take_turn(pool)
    outcome[:] = 0
    zeros = int(pool.header[ZEROS_GROUP] - 1)
    if zeros >= 0:
        _show_zeros(pool, space, ranges, zeros, outcome)
    end_turn(pool)
    return zeros >= 0


@compiled
def _show_zeros(pool: PoolArrays, space: SpaceArrays, ranges: Int64, zeros: int, outcome: Int64) -> None:
    for row in range(len(ranges)):
        place, end = ranges[row, FIRST], ranges[row, FIRST] + ranges[row, COUNT]
        while place < end:
            first = place
            while place < end and space.table[place] == _NOTHING:
                place += 1
            count = place - first
            if count > 0:
                heads = np.full(count, zeros, np.int32)
                pool.num_mappings[zeros] += count
                num_stuck = _map_run(pool, space, first, heads, SHOWS_ZEROS, 1, outcome)
                if num_stuck != _ALL_MAPPED:
                    pool.num_mappings[zeros] -= count - num_stuck
                    outcome[NUM_STUCK] = num_stuck
                    return
                outcome[NUM_CHANGED] += count
            place += 1


@compiled
def are_within(num_places: int, ranges: Int64) -> bool:
    """Whether all ranges lie within so many places."""
    for row in range(len(ranges)):
        first, count = ranges[row, FIRST], ranges[row, COUNT]
        if first < 0 or count < 0 or first > num_places - count:
            return False
    return True


@compiled
def count_missing(space: SpaceArrays, ranges: Int64, with_shown: bool) -> int:
    """Number of places in the ranges that are not in service, or, `with_shown`, that only show zeros."""
    missing = 0
    with_shown &= space.header[NUM_SHOWN] > 0
    for row in range(len(ranges)):
        for place in range(ranges[row, FIRST], ranges[row, FIRST] + ranges[row, COUNT]):
            if space.table[place] <= _NOTHING or (with_shown and space.access[place] == SHOWS_ZEROS):
                missing += 1
    return missing


@compiled
def count_missing_by_words(words: Int64, ranges: Int64, with_shown: bool) -> int:
    """As `count_missing`, of a pool and a space as for `commit_by_words`."""
    return count_missing(space_at(words[POOL_WORDS:]), ranges, with_shown)


@compiled
def held_runs(space: SpaceArrays) -> Int64:
    """Maximal runs of places with memory of their own, in service: rows of (first place, number)."""
    number = _find_held(space, np.empty((0, 2), np.int64))
    runs = np.empty((number, 2), np.int64)
    _find_held(space, runs)
    return runs


@compiled
def _find_held(space: SpaceArrays, runs: Int64) -> int:
    """Write down the runs, as far as there are rows for them; how many there are."""
    number, place, end = 0, space.header[FIRST_MAPPED], space.header[END_MAPPED]
    while place < end:
        if space.table[place] <= _NOTHING or space.access[place] == SHOWS_ZEROS:
            place += 1
            continue
        first = place
        while place < end and space.table[place] > _NOTHING and space.access[place] != SHOWS_ZEROS:
            place += 1
        if number < len(runs):
            runs[number, FIRST], runs[number, COUNT] = first, place - first
        number += 1
    return number
