"""The compiled half of the mapper: jobs in a ring under a native mutex, and the loop that serves them. No GIL.

::

    submit                        serve (the mapper's thread)              wait (any thread)
      lock                          lock                                     lock
      ring[tail] = job              wait for `submitted` while empty         wait for `served` while job is not done
      unlock                        job = ring[head]; unlock                 unlock
      signal `submitted`            range after range: driver calls
                                    lock; job is done; broadcast `served`
                                    unlock

Each range of a job is a plan of its own (all or nothing, in a turn of its own), so that others get their turn in
between; it ends early after a range that failed, or once it is cancelled.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from vtensor.allocator.handles import POOL_WORDS, pool_at
from vtensor.allocator.native import compiled, int64_at, lock, unlock
from vtensor.allocator.plan import SPACE_WORDS, commit, decommit, space_at
from vtensor.allocator.words import CODE, NUM_CHANGED, OUTCOME_WORDS, RANGE_WORDS, SHORTFALL

__all__ = [
    "FORGET",
    "IS_DONE",
    "JOB_WORDS",
    "KIND",
    "MAP_AHEAD",
    "NUM_BEFORE",
    "NUM_DONE",
    "NUM_PAGE_GROUPS",
    "NUM_RANGES",
    "NUM_TIMES",
    "OUTCOME",
    "POOL",
    "QUEUE_WORDS",
    "RANGES",
    "SPACE",
    "STREAM",
    "UNMAP",
    "cancel",
    "is_done",
    "is_free",
    "serve",
    "stop",
    "submit",
    "submit_again",
    "wait",
]

Int64 = npt.NDArray[np.int64]

# A zeroed pthread_cond_t (48 bytes on Linux) is a condition that nobody waits for.
_wait_for = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))
_signal = types.ExternalFunction("pthread_cond_signal", types.int32(types.int64))
_broadcast = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.int64))

# Words of the queue: its mutex (8), two conditions, counters, and a ring of addresses of jobs.
_SUBMITTED, _SERVED, _HEAD, _TAIL, _STOPPED, _RING = 8, 16, 24, 25, 26, 32
_RING_LENGTH = 1024
QUEUE_WORDS = _RING + _RING_LENGTH
# Words of a job. RANGES: their address. NUM_BEFORE: page groups of all the times that a standing job was handed over,
# but the last; NUM_TIMES: how often that was. POOL, SPACE: their arrays, packed.
IS_DONE, _IS_CANCELLED, KIND, RANGES, NUM_RANGES, STREAM, FORGET = 0, 1, 2, 3, 4, 5, 6
NUM_DONE, NUM_PAGE_GROUPS, NUM_BEFORE, NUM_TIMES, OUTCOME, POOL = 8, 9, 10, 11, 16, 24
SPACE = POOL + POOL_WORDS
JOB_WORDS = SPACE + SPACE_WORDS
MAP_AHEAD, UNMAP = 0, 1  # kinds of jobs


@compiled
def submit(queue: Int64, job: Int64) -> None:
    """Hand a job over. Waits while the ring is full. One that comes after `stop` ends at once."""
    lock(queue.ctypes.data)
    _enqueue(queue, job)


@compiled
def _enqueue(queue: Int64, job: Int64) -> None:
    """Hand a job over, under the queue's mutex, which it gives up."""
    address = queue.ctypes.data
    while queue[_TAIL] - queue[_HEAD] == _RING_LENGTH and queue[_STOPPED] == 0:
        _wait_for(address + _SERVED * 8, address)
    if queue[_STOPPED] != 0:
        job[IS_DONE] = 1
        _broadcast(address + _SERVED * 8)
        unlock(address)
        return
    queue[_RING + queue[_TAIL] % _RING_LENGTH] = job.ctypes.data
    queue[_TAIL] += 1
    unlock(address)
    _signal(address + _SUBMITTED * 8)  # not before: the woken thread would find the mutex taken


@compiled
def is_free(queue: Int64, job: Int64) -> bool:
    """Whether a standing job can be handed over again: it has done all its ranges."""
    lock(queue.ctypes.data)
    free = bool(job[IS_DONE] != 0 and job[NUM_DONE] == job[NUM_RANGES])
    unlock(queue.ctypes.data)
    return free


@compiled
def submit_again(queue: Int64, job: Int64, num_ranges: int) -> None:
    """Hand over a standing job that `is_free`, for other ranges."""
    lock(queue.ctypes.data)
    job[NUM_BEFORE] += job[NUM_PAGE_GROUPS]
    job[NUM_TIMES] += 1
    job[NUM_PAGE_GROUPS] = job[NUM_DONE] = job[IS_DONE] = job[_IS_CANCELLED] = 0
    job[NUM_RANGES] = num_ranges
    _enqueue(queue, job)


@compiled
def is_done(queue: Int64, job: Int64) -> bool:
    """Whether a job has been carried out."""
    lock(queue.ctypes.data)
    done = bool(job[IS_DONE] != 0)
    unlock(queue.ctypes.data)
    return done


@compiled
def cancel(queue: Int64, job: Int64) -> None:
    """Have a job end after the range that is under way. Does not wait for that."""
    lock(queue.ctypes.data)
    job[_IS_CANCELLED] = 1
    unlock(queue.ctypes.data)


@compiled
def wait(queue: Int64, job: Int64) -> None:
    """Wait until a job has ended."""
    address = queue.ctypes.data
    lock(address)
    while job[IS_DONE] == 0:
        _wait_for(address + _SERVED * 8, address)
    unlock(address)


@compiled
def stop(queue: Int64) -> None:
    """Have `serve` end all jobs, as if they were cancelled, and return."""
    address = queue.ctypes.data
    lock(address)
    queue[_STOPPED] = 1
    _signal(address + _SUBMITTED * 8)
    unlock(address)


@compiled
def serve(queue: Int64) -> None:
    """Carry out jobs in their order until told to stop."""
    address = queue.ctypes.data
    while True:
        lock(address)
        while queue[_HEAD] == queue[_TAIL] and queue[_STOPPED] == 0:
            _wait_for(address + _SUBMITTED * 8, address)
        if queue[_HEAD] == queue[_TAIL]:
            unlock(address)
            return
        job = int64_at(queue[_RING + queue[_HEAD] % _RING_LENGTH], JOB_WORDS)
        unlock(address)
        _carry_out(address, job)
        lock(address)
        queue[_HEAD] += 1
        job[IS_DONE] = 1
        _broadcast(address + _SERVED * 8)
        unlock(address)


@compiled
def _carry_out(queue_address: int, job: Int64) -> None:
    pool, space = pool_at(job[POOL:]), space_at(job[SPACE:])
    ranges = int64_at(job[RANGES], job[NUM_RANGES] * RANGE_WORDS).reshape((job[NUM_RANGES], RANGE_WORDS))
    outcome = job[OUTCOME : OUTCOME + OUTCOME_WORDS]
    while job[NUM_DONE] < job[NUM_RANGES]:
        lock(queue_address)
        is_cancelled = job[_IS_CANCELLED] != 0 or int64_at(queue_address, QUEUE_WORDS)[_STOPPED] != 0
        unlock(queue_address)
        if is_cancelled:
            break
        part = ranges[job[NUM_DONE] : job[NUM_DONE] + 1]
        if job[KIND] == MAP_AHEAD:
            commit(pool, space, part, True, job[STREAM], outcome)
        else:
            decommit(pool, space, part, job[FORGET] != 0, outcome)
        if outcome[CODE] != 0 or outcome[SHORTFALL] != 0:
            break
        job[NUM_PAGE_GROUPS] += outcome[NUM_CHANGED]
        job[NUM_DONE] += 1
