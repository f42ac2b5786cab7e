"""Words of the int64 blocks through which Python and compiled code talk to each other. Imports nothing."""

from __future__ import annotations

# What became of a plan: page groups that were changed, that are missing, the call that failed and its code, page groups
# that are not where they were because undoing failed too, places of a commit that had been mapped ahead, calls that
# zeroed memory in it, and all such calls of the pool so far.
NUM_CHANGED, SHORTFALL, FAILED_CALL, CODE, NUM_STUCK, NUM_READY, NUM_ZEROED, ZERO_CALLS = 0, 1, 2, 3, 4, 5, 6, 7
OUTCOME_WORDS = 8
# Codes that are no driver's: a range cuts through a handle, a place that is to be empty is not, one that is to be in
# service is not, a place that was withdrawn is an alias.
PARTIAL, TAKEN, EMPTY, SHARED = -1, -2, -3, -4

# A row of ranges: first place, number of places, and for commits the mark of the data that goes there and the largest
# size class to use.
FIRST, COUNT, CONTENT, LARGEST, RANGE_WORDS = 0, 1, 2, 3, 4
LARGEST_SIZE_CLASS = 15

# A space's header: places that are mapped, the ones among which all of them lie, those that are mapped ahead, those
# that show zeros, and whether empty places can be read, so that what comes there must be zero before.
NUM_MAPPED, FIRST_MAPPED, END_MAPPED, NUM_AHEAD, NUM_SHOWN, HOLES_READABLE, SPACE_HEADER_WORDS = 0, 1, 2, 3, 4, 5, 8
# How a place is mapped: to be written and read, to be read, or as an alias of the pool's page group of zeros.
WRITABLE, READ_ONLY_ALIAS, SHOWS_ZEROS = 0, 1, 2

# A pool's header. Its first sixteen words are two mutexes, `handles.take_turn`. Counts are in page groups.
# ZEROS_GROUP: 1 + the page group of zeros that the pool itself holds, 0 for none.
DOOR, TURN, CAPACITY, NUM_TOTAL, NUM_FREE, ZEROS_GROUP = 0, 8, 16, 17, 18, 19
NUM_CALLS, HEADER_WORDS = 24, 40  # from NUM_CALLS on a counter for each `Call`
# Of each size class: handles that are free, numbers without a handle, the first number that was never given out.
NUM_FREE_HANDLES, NUM_VACANT_HANDLES, NEXT_GROUP, CLASS_WORDS = 0, 1, 2, 4
# A pool's constants: what CREATE and SET_ACCESS take, devices with access, whether fresh memory is zero, and how many
# page groups each size class has numbers for: two to the power of CLASS_SHIFT, since divisions would be slow.
PROPERTIES, READ_WRITE, READ_ONLY, NUM_ACCESS, PAGE_GROUP_BYTES, FRESH_IS_ZERO, CLASS_SHIFT = 0, 1, 2, 3, 4, 5, 6
NUM_CONSTANTS = 8

# What a handle holds: zeros, something unknown, the same below places that have to be opened first, or (positive) data
# of the user who gave that mark.
ZEROS, UNKNOWN_CONTENT, STUCK_CONTENT = 0, -1, -2

# An arena's header: whether its memory is away; the first place that may be free; segments that are there, their
# places, and the most that there ever were; allocations that failed, and the bytes that the last of them asked for;
# whether free memory stays in the pool; segments that torch gave back but that could not be unmapped; the process that
# it serves; and where the device's context and the calls lie with which to wait for a stream (`Driver.waiting_calls`).
(
    IS_ASLEEP,
    FIRST_FREE,
    NUM_SEGMENTS,
    SEGMENT_PLACES,
    MOST_PLACES,
    NUM_FAILED,
    FAILED_BYTES,
    KEEPS_FREE,
    NUM_LEFT_OVER,
    PROCESS_ID,
    WAITING_CALLS,
) = range(11)
ARENA_HEADER_WORDS = 24
# From WAITING_CALLS on; all 0 on a host.
CONTEXT, PUSH_CONTEXT, POP_CONTEXT, CAPTURE_MODE, IS_CAPTURING, FINISH_STREAM, NUM_WAITING_CALLS = 0, 1, 2, 3, 4, 5, 6
