"""CUDA's virtual-memory calls over memfd and mmap: C functions that need no GIL, made by numba.

One memory file holds all memory. A handle is a range of that file, given out in ascending order and never twice, so
that neighbours in the file can be neighbours in memory; releasing it punches a hole. A reservation is an inaccessible
mapping, or one that reads as zeros (`READABLE_HOLES`), with a table beside it that has one int32 a page::

    table[page]   0: nothing   n > 0: the first page of a mapping of handle n - 1   -1: a further page of that mapping

The rules are CUDA's, as measured on an H200, so that what passes here passes there: sizes and addresses are multiples
of the granularity, a handle is mapped whole or not at all, nothing is mapped twice in one place, unmapping takes whole
mappings and does not mind holes, memory lives until both its handle and its last mapping are gone.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from numba import types

from vtensor.allocator.driver.base import INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, READABLE_HOLES, SUCCESS
from vtensor.allocator.native import callback, compiled, int32_at, int64_at, lock, symbol_address, unlock

STATE_WORDS = 32
STATE = np.zeros(STATE_WORDS, np.int64)
# The symbol must exist before numba loads the functions below, which refer to it.
llvmlite.binding.add_symbol("vtensor_host_state", STATE.ctypes.data)

HANDLE_WORDS = 8
RESERVATION_WORDS = 8
# Words of the state block, whose first eight are its mutex.
FILE, PAGE_BYTES, NEXT_OFFSET, NUM_HANDLES = 8, 9, 10, 11
FREE_HANDLE = 12  # head of the list of dead handle records: index + 1
NUM_RESERVATIONS, HANDLES, RESERVATIONS = 13, 14, 15  # HANDLES, RESERVATIONS: addresses of the records
MAX_HANDLES, MAX_RESERVATIONS, LIVE_BYTES, LIMIT_BYTES = 16, 17, 18, 19
PROCESS = 21  # whose memory the state describes
# Addresses of mappings that are there to be given up, 0 while there are none: for ourselves, and for all others.
SPARE, ROOM = 20, 22
# Words of a handle's record, and of a reservation's.
_OFFSET, _SIZE, _OWNED, _NUM_MAPPINGS, _GENERATION, _NEXT_FREE = 0, 1, 2, 3, 4, 5
_BASE, _LENGTH, _TABLE, _NUM_MAPPED, _HOLES = 0, 1, 2, 3, 4  # _HOLES: protection of pages without memory

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x1, 0x2, 0x10, 0x20, 0x4000
_MADV_DONTFORK, _MADV_DONTDUMP = 10, 16
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_ADDRESS_SPACE_BYTES = 1 << 47
_SPARE_PAGES, _ROOM_PAGES, _SPARE_OFFSET = 8, 256, 1 << 62  # far behind all memory: these pages are never touched

_i32, _i64 = types.int32, types.int64
_mmap = types.ExternalFunction("mmap", _i64(_i64, _i64, _i32, _i32, _i32, _i64))
_munmap = types.ExternalFunction("munmap", _i32(_i64, _i64))
_mprotect = types.ExternalFunction("mprotect", _i32(_i64, _i64, _i32))
_madvise = types.ExternalFunction("madvise", _i32(_i64, _i64, _i32))
_fallocate = types.ExternalFunction("fallocate", _i32(_i32, _i32, _i64, _i64))
_memset = types.ExternalFunction("memset", _i64(_i64, _i32, _i64))
_errno_address = types.ExternalFunction("__errno_location", _i64())
_EINTR = 4


@compiled
def _change_file(state: np.ndarray, mode: int, offset: int, size: int) -> bool:
    """`fallocate`, again as long as a signal interrupts it."""
    while _fallocate(state[FILE], mode, offset, size) != 0:
        if int32_at(_errno_address(), 1)[0] != _EINTR:
            return False
    return True


@compiled
def _reserve_range(size: int, protection: int) -> Any:
    """Addresses without memory that a forked child does not get and a core dump leaves out; -1 where there are none."""
    base = _mmap(0, size, protection, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if base != -1:
        _madvise(base, size, _MADV_DONTFORK)
        _madvise(base, size, _MADV_DONTDUMP)
    return base


@compiled
def _keep(state: np.ndarray, which: int, num_pages: int) -> bool:
    """Hold mappings in reserve, pages that differ in access so that the system cannot merge them; False if it cannot.

    A process that reaches vm.max_map_count can make no mapping, and so not even take one away: putting the inaccessible
    one back in its place counts as making it. That is what SPARE is for. Nor does malloc get any, and compiled code
    would end in the middle of what it does, with its locks held. So nothing is mapped without ROOM for others, which is
    given up where anything fails, for all that must follow.
    """
    page = state[PAGE_BYTES]
    if state[which] == 0:
        spare = _mmap(0, num_pages * page, _PROT_NONE, _MAP_SHARED, state[FILE], _SPARE_OFFSET)
        if spare == -1:
            return False
        for index in range(1, num_pages, 2):
            if _mprotect(spare + index * page, page, _PROT_READ) != 0:
                _munmap(spare, num_pages * page)
                return False
        state[which] = spare
    return True


@compiled
def _give_up(state: np.ndarray, which: int, num_pages: int) -> bool:
    """Make room for so many mappings; False where that was done before."""
    if state[which] == 0:
        return False
    _munmap(state[which], num_pages * state[PAGE_BYTES])
    state[which] = 0
    return True


@compiled
def _give_up_some(state: np.ndarray) -> bool:
    """Make room for who takes mappings away: what is there for that first; False where nothing is left."""
    return _give_up(state, SPARE, _SPARE_PAGES) or _give_up(state, ROOM, _ROOM_PAGES)


@compiled
def _has_room(state: np.ndarray) -> bool:
    """Whether mappings may be made."""
    return _keep(state, SPARE, _SPARE_PAGES) and _keep(state, ROOM, _ROOM_PAGES)


@compiled
def _clear_range(state: np.ndarray, address: int, size: int, protection: int) -> Any:
    """Put addresses without memory in place of mappings, at one stroke."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    done = _mmap(address, size, protection, flags, -1, 0) == address
    while not done and _give_up_some(state):
        done = _mmap(address, size, protection, flags, -1, 0) == address
    if done:
        _madvise(address, size, _MADV_DONTFORK)
        _madvise(address, size, _MADV_DONTDUMP)
    _keep(state, SPARE, _SPARE_PAGES)
    return done


@compiled
def _handle_record(state: np.ndarray, handle: int) -> int:
    """Index of a live handle's record, or -1."""
    index = (handle & 0xFFFFFFFF) - 1
    if index < 0 or index >= state[NUM_HANDLES]:
        return -1
    record = int64_at(state[HANDLES] + index * HANDLE_WORDS * 8, HANDLE_WORDS)
    if record[_GENERATION] != handle >> 32 or (record[_OWNED] == 0 and record[_NUM_MAPPINGS] == 0):
        return -1
    return index


@compiled
def _free_if_unused(state: np.ndarray, index: int) -> None:
    """Give the memory of a handle back to the system, once it is neither owned nor mapped."""
    record = int64_at(state[HANDLES] + index * HANDLE_WORDS * 8, HANDLE_WORDS)
    if record[_OWNED] == 0 and record[_NUM_MAPPINGS] == 0:
        _change_file(state, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, record[_OFFSET], record[_SIZE])
        state[LIVE_BYTES] -= record[_SIZE]
        record[_GENERATION] += 1
        record[_NEXT_FREE] = state[FREE_HANDLE]
        state[FREE_HANDLE] = index + 1


@compiled
def _find_reservation(state: np.ndarray, address: int, size: int) -> int:
    """Index of the reservation that holds the whole range, or -1. The records are sorted by address."""
    records = int64_at(state[RESERVATIONS], state[NUM_RESERVATIONS] * RESERVATION_WORDS)
    low, high = 0, state[NUM_RESERVATIONS]
    while low < high:
        middle = (low + high) // 2
        if records[middle * RESERVATION_WORDS + _BASE] <= address:
            low = middle + 1
        else:
            high = middle
    index = low - 1
    if index < 0:
        return -1
    end = records[index * RESERVATION_WORDS + _BASE] + records[index * RESERVATION_WORDS + _LENGTH]
    return index if size <= end - address else -1


@compiled
def _bad_range(state: np.ndarray, address: int, size: int) -> bool:
    page = state[PAGE_BYTES]
    return size <= 0 or size % page != 0 or address <= 0 or address % page != 0


@callback("int32(int64, int64, int64, int64, int64)")
def _address_reserve(out: int, size: int, alignment: int, hint: int, flags: int) -> int:
    state = int64_at(symbol_address("vtensor_host_state"), STATE_WORDS)
    page = state[PAGE_BYTES]
    if size <= 0 or size % page != 0 or flags & ~READABLE_HOLES != 0:
        return INVALID_VALUE
    if alignment < 0 or alignment & (alignment - 1) != 0:
        return INVALID_VALUE
    slack = alignment if alignment > page else 0
    if size > _ADDRESS_SPACE_BYTES - slack:
        return OUT_OF_MEMORY
    lock(state.ctypes.data)
    has_room = _has_room(state)
    unlock(state.ctypes.data)
    if not has_room:
        return OUT_OF_MEMORY
    holes = _PROT_READ if flags & READABLE_HOLES else _PROT_NONE
    whole = _reserve_range(size + slack, holes)
    if whole == -1:
        return OUT_OF_MEMORY
    base = whole
    if slack:  # keep the aligned part of a larger range
        base = (whole + slack - 1) & ~(slack - 1)
        if base > whole:
            _munmap(whole, base - whole)
        if base < whole + slack:
            _munmap(base + size, whole + slack - base)
    table = _mmap(0, size // page * 4, _PROT_READ | _PROT_WRITE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if table == -1:
        _munmap(base, size)
        return OUT_OF_MEMORY
    lock(state.ctypes.data)
    count = state[NUM_RESERVATIONS]
    if count == state[MAX_RESERVATIONS]:
        unlock(state.ctypes.data)
        _munmap(base, size)
        _munmap(table, size // page * 4)
        return OUT_OF_MEMORY
    records = int64_at(state[RESERVATIONS], (count + 1) * RESERVATION_WORDS)
    place = count
    while place > 0 and records[(place - 1) * RESERVATION_WORDS + _BASE] > base:
        for word in range(RESERVATION_WORDS):
            records[place * RESERVATION_WORDS + word] = records[(place - 1) * RESERVATION_WORDS + word]
        place -= 1
    record = records[place * RESERVATION_WORDS : (place + 1) * RESERVATION_WORDS]
    record[_BASE], record[_LENGTH], record[_TABLE], record[_NUM_MAPPED], record[_HOLES] = base, size, table, 0, holes
    state[NUM_RESERVATIONS] = count + 1
    unlock(state.ctypes.data)
    int64_at(out, 1)[0] = base
    return SUCCESS


@callback("int32(int64, int64)")
def _address_free(address: int, size: int) -> int:
    state = int64_at(symbol_address("vtensor_host_state"), STATE_WORDS)
    if _bad_range(state, address, size):
        return INVALID_VALUE
    lock(state.ctypes.data)
    index = _find_reservation(state, address, size)
    count = state[NUM_RESERVATIONS]
    records = int64_at(state[RESERVATIONS], count * RESERVATION_WORDS)
    code = INVALID_VALUE
    if index >= 0:
        record = records[index * RESERVATION_WORDS : (index + 1) * RESERVATION_WORDS]
        if record[_BASE] == address and record[_LENGTH] == size and record[_NUM_MAPPED] == 0:
            # The system merges neighbouring reservations: to take one out may cut the rest in two, one mapping more.
            done = _munmap(address, size) == 0
            while not done and _give_up_some(state):
                done = _munmap(address, size) == 0
            if done:
                _munmap(record[_TABLE], size // state[PAGE_BYTES] * 4)
                for word in range(index * RESERVATION_WORDS, (count - 1) * RESERVATION_WORDS):
                    records[word] = records[word + RESERVATION_WORDS]
                state[NUM_RESERVATIONS] = count - 1
                code = SUCCESS
            else:
                code = OUT_OF_MEMORY
            _keep(state, SPARE, _SPARE_PAGES)
    unlock(state.ctypes.data)
    return code


@callback("int32(int64, int64, int64, int64)")
def _create(out: int, size: int, properties: int, flags: int) -> int:
    state = int64_at(symbol_address("vtensor_host_state"), STATE_WORDS)
    if size <= 0 or size % state[PAGE_BYTES] != 0 or flags != 0:
        return INVALID_VALUE
    lock(state.ctypes.data)
    if size > state[LIMIT_BYTES] - state[LIVE_BYTES]:
        unlock(state.ctypes.data)
        return OUT_OF_MEMORY
    index = state[FREE_HANDLE] - 1
    if index < 0:
        index = state[NUM_HANDLES]
        if index == state[MAX_HANDLES]:
            unlock(state.ctypes.data)
            return OUT_OF_MEMORY
    offset = state[NEXT_OFFSET]
    if not _change_file(state, 0, offset, size):  # all of it, or an error: no page is missing at the first touch
        unlock(state.ctypes.data)
        return OUT_OF_MEMORY
    record = int64_at(state[HANDLES] + index * HANDLE_WORDS * 8, HANDLE_WORDS)
    if index == state[NUM_HANDLES]:
        state[NUM_HANDLES] += 1
        record[_GENERATION] = 1
    else:
        state[FREE_HANDLE] = record[_NEXT_FREE]
    record[_OFFSET], record[_SIZE], record[_OWNED], record[_NUM_MAPPINGS] = offset, size, 1, 0
    state[NEXT_OFFSET] = offset + size
    state[LIVE_BYTES] += size
    handle = record[_GENERATION] << 32 | (index + 1)
    unlock(state.ctypes.data)
    int64_at(out, 1)[0] = handle
    return SUCCESS


@callback("int32(int64, int64, int64, int64, int64)")
def _map(address: int, size: int, offset: int, handle: int, flags: int) -> int:
    state = int64_at(symbol_address("vtensor_host_state"), STATE_WORDS)
    if _bad_range(state, address, size) or flags != 0:
        return INVALID_VALUE
    lock(state.ctypes.data)
    code = INVALID_VALUE
    index = _handle_record(state, handle)
    place = _find_reservation(state, address, size)
    if index >= 0 and place >= 0:
        page = state[PAGE_BYTES]
        record = int64_at(state[HANDLES] + index * HANDLE_WORDS * 8, HANDLE_WORDS)
        owner = int64_at(state[RESERVATIONS] + place * RESERVATION_WORDS * 8, RESERVATION_WORDS)
        table = int32_at(owner[_TABLE] + (address - owner[_BASE]) // page * 4, size // page)
        if offset != 0 or size != record[_SIZE]:
            code = NOT_SUPPORTED
        elif not table.any() and not _has_room(state):
            code = OUT_OF_MEMORY
        elif not table.any():
            # Where a hole can be read, somebody may be reading it now.
            where = _mmap(address, size, owner[_HOLES], _MAP_SHARED | _MAP_FIXED, state[FILE], record[_OFFSET])
            if where == address:
                _madvise(address, size, _MADV_DONTFORK)
                _madvise(address, size, _MADV_DONTDUMP)
                table[:] = -1
                table[0] = index + 1
                record[_NUM_MAPPINGS] += 1
                owner[_NUM_MAPPED] += 1
                code = SUCCESS
            else:
                code = OUT_OF_MEMORY
                _give_up(state, ROOM, _ROOM_PAGES)
    unlock(state.ctypes.data)
    return code


@compiled
def _covers_whole_mappings(table: np.ndarray, first: int, count: int) -> bool:
    """Whether a range of pages starts and ends where mappings do."""
    end = first + count
    return table[first] != -1 and (end == len(table) or table[end] != -1)


@callback("int32(int64, int64, int64, int64)")
def _set_access(address: int, size: int, access: int, count: int) -> int:
    state = int64_at(symbol_address("vtensor_host_state"), STATE_WORDS)
    if _bad_range(state, address, size) or count != 1:
        return INVALID_VALUE
    kind = int32_at(access, 3)[2]  # CUmemAccessDesc: location type, location id, flags
    if kind not in (0, 1, 3):
        return INVALID_VALUE
    protection = _PROT_NONE if kind == 0 else (_PROT_READ if kind == 1 else _PROT_READ | _PROT_WRITE)
    lock(state.ctypes.data)
    code = INVALID_VALUE
    place = _find_reservation(state, address, size)
    if place >= 0:
        page = state[PAGE_BYTES]
        owner = int64_at(state[RESERVATIONS] + place * RESERVATION_WORDS * 8, RESERVATION_WORDS)
        table = int32_at(owner[_TABLE], owner[_LENGTH] // page)
        first = (address - owner[_BASE]) // page
        if _covers_whole_mappings(table, first, size // page) and table[first : first + size // page].all():
            code = SUCCESS if _mprotect(address, size, protection) == 0 else OUT_OF_MEMORY
            if code == OUT_OF_MEMORY:
                _give_up(state, ROOM, _ROOM_PAGES)
    unlock(state.ctypes.data)
    return code


@callback("int32(int64, int64)")
def _unmap(address: int, size: int) -> int:
    state = int64_at(symbol_address("vtensor_host_state"), STATE_WORDS)
    if _bad_range(state, address, size):
        return INVALID_VALUE
    lock(state.ctypes.data)
    code = INVALID_VALUE
    place = _find_reservation(state, address, size)
    if place >= 0:
        page = state[PAGE_BYTES]
        owner = int64_at(state[RESERVATIONS] + place * RESERVATION_WORDS * 8, RESERVATION_WORDS)
        table = int32_at(owner[_TABLE], owner[_LENGTH] // page)
        first = (address - owner[_BASE]) // page
        if _covers_whole_mappings(table, first, size // page):
            if _clear_range(state, address, size, owner[_HOLES]):
                for entry in range(first, first + size // page):
                    if table[entry] > 0:
                        index = table[entry] - 1
                        int64_at(state[HANDLES] + index * HANDLE_WORDS * 8, HANDLE_WORDS)[_NUM_MAPPINGS] -= 1
                        owner[_NUM_MAPPED] -= 1
                        _free_if_unused(state, index)
                    if table[entry] != 0:  # what was never written costs no memory, and must stay so
                        table[entry] = 0
                code = SUCCESS
            else:
                code = OUT_OF_MEMORY
    unlock(state.ctypes.data)
    return code


@callback("int32(int64)")
def _release(handle: int) -> int:
    state = int64_at(symbol_address("vtensor_host_state"), STATE_WORDS)
    lock(state.ctypes.data)
    code = INVALID_VALUE
    index = _handle_record(state, handle)
    if index >= 0:
        record = int64_at(state[HANDLES] + index * HANDLE_WORDS * 8, HANDLE_WORDS)
        if record[_OWNED]:
            record[_OWNED] = 0
            _free_if_unused(state, index)
            code = SUCCESS
    unlock(state.ctypes.data)
    return code


@callback("int32(int64, int64, int64, int64)")
def _zero(address: int, value: int, size: int, stream: int) -> int:
    if address <= 0 or size < 0 or value != 0 or stream != 0:
        return INVALID_VALUE
    _memset(address, 0, size)
    return SUCCESS


# In the order of `Call`.
FUNCTIONS = (_address_reserve, _address_free, _create, _map, _set_access, _unmap, _release, _zero)
