"""The same calls on both drivers with the same answers: what the host backend accepts, CUDA accepts.

The answers were measured on an H200 (driver 580); the host backend copies them. A handle that never was crashes the
CUDA driver, so only the host meets one here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.child import in_child
from tests.helpers.faults import record
from tests.helpers.memory import access_at, fill, tensor_at, value
from vtensor.allocator.driver import Call, Driver, get_driver
from vtensor.allocator.driver.base import INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS
from vtensor.units import TIB

NONE, READ, READ_WRITE = 0, 1, 3  # CUmemAccess_flags
NUM_PLACES = 16


class Rig:
    """A reservation of sixteen places of the smallest size, and the raw calls over it, which return their codes."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.device = driver.device
        self.size = driver.granularity_bytes
        self.base = driver.reserve(NUM_PLACES * self.size)
        former = driver.reserve(NUM_PLACES * self.size)
        driver.free(former, NUM_PLACES * self.size)
        self.nowhere = (former - self.base) // self.size  # a place in no reservation
        self._handles: list[int] = []
        self._reservations = [(self.base, NUM_PLACES * self.size)]
        self._access = (ctypes.c_int32 * 3).from_buffer_copy(ctypes.string_at(driver.read_write_access, 12))

    def close(self) -> None:
        self.driver.unmap(self.base, NUM_PLACES * self.size)
        for handle in self._handles:
            self.driver.release(handle)
        for address, size in self._reservations:
            self.driver.free(address, size)

    def at(self, place: int) -> int:
        return self.base + place * self.size

    def reserve(self, size: int) -> int:
        address = ctypes.c_int64()
        code = self.driver.invoke(Call.RESERVE, ctypes.addressof(address), size, 0, 0, 0)
        if code == SUCCESS:
            self._reservations.append((address.value, size))
        return code

    def create(self, size: int, flags: int = 0) -> int:
        handle = ctypes.c_int64()
        properties = self.driver.creation_properties
        code = self.driver.invoke(Call.CREATE, ctypes.addressof(handle), size, properties, flags)
        if code == SUCCESS:
            self._handles.append(handle.value)
        return code

    def handle(self, count: int = 1) -> int:
        """A new handle of `count` places."""
        assert self.create(count * self.size) == SUCCESS
        return self._handles[-1]

    def map(self, place: int, handle: int, count: float = 1, *, shift: int = 0, offset: int = 0, flags: int = 0) -> int:
        size = int(count * self.size)
        return self.driver.invoke(Call.MAP, self.at(place) + shift, size, offset * self.size, handle, flags)

    def access(
        self, place: int, count: float = 1, *, shift: int = 0, kind: int = READ_WRITE, num_descriptions: int = 1
    ) -> int:
        self._access[2] = kind
        size, where = int(count * self.size), ctypes.addressof(self._access)
        return self.driver.invoke(Call.SET_ACCESS, self.at(place) + shift, size, where, num_descriptions)

    def mapped(self, place: int, count: int = 1) -> int:
        """A new handle of `count` places, mapped and writable."""
        handle = self.handle(count)
        assert self.map(place, handle, count) == SUCCESS
        assert self.access(place, count) == SUCCESS
        return handle

    def unmap(self, place: int, count: float = 1, *, shift: int = 0) -> int:
        return self.driver.invoke(Call.UNMAP, self.at(place) + shift, int(count * self.size))

    def free(self, address: int, count: float = NUM_PLACES) -> int:
        return self.driver.invoke(Call.FREE, address, int(count * self.size))

    def release(self, handle: int) -> int:
        code = self.driver.invoke(Call.RELEASE, handle)
        if code == SUCCESS:
            self._handles.remove(handle)
        return code

    def fill(self, place: int, number: int) -> None:
        fill(self.device, self.at(place), self.size, number)

    def value(self, place: int) -> int:
        return value(self.device, self.at(place), self.size)

    def is_empty(self, place: int, count: int = 1) -> bool:
        """Whether nothing is mapped there: a new handle can be."""
        free = self.map(place, self.handle(count), count) == SUCCESS
        if free:
            assert self.unmap(place, count) == SUCCESS
        return free


@pytest.fixture
def rig(driver: Driver) -> Iterator[Rig]:
    made = Rig(driver)
    yield made
    made.close()


# One call each: what is done (the last call's code counts), and the answer.
CASES: list[tuple[str, Callable[[Rig], int], int]] = [
    ("reserve 0", lambda r: r.reserve(0), INVALID_VALUE),
    ("reserve half a page", lambda r: r.reserve(r.size // 2), INVALID_VALUE),
    ("reserve a byte too many", lambda r: r.reserve(r.size + 1), INVALID_VALUE),
    ("reserve 2^47", lambda r: r.reserve(1 << 47), OUT_OF_MEMORY),
    ("reserve 2^62", lambda r: r.reserve(1 << 62), OUT_OF_MEMORY),
    ("reserve 12 TiB", lambda r: r.reserve(12 * TIB), SUCCESS),
    ("create 0", lambda r: r.create(0), INVALID_VALUE),
    ("create a byte too many", lambda r: r.create(r.size + 1), INVALID_VALUE),
    ("create 2^50", lambda r: r.create(1 << 50), OUT_OF_MEMORY),
    ("create with flags", lambda r: r.create(r.size, flags=1), INVALID_VALUE),
    ("map", lambda r: r.map(0, r.handle()), SUCCESS),
    ("map in the last place", lambda r: r.map(NUM_PLACES - 1, r.handle()), SUCCESS),
    ("map unaligned", lambda r: r.map(0, r.handle(), shift=r.size // 2), INVALID_VALUE),
    ("map nothing", lambda r: r.map(0, r.handle(), 0), INVALID_VALUE),
    ("map outside", lambda r: r.map(r.nowhere, r.handle()), INVALID_VALUE),
    ("map at address 0", lambda r: r.map(0, r.handle(), shift=-r.base), INVALID_VALUE),
    ("map over a mapping", lambda r: r.mapped(0) and r.map(0, r.handle()), INVALID_VALUE),
    ("map over a mapping's end", lambda r: r.mapped(0, 2) and r.map(1, r.handle(2), 2), INVALID_VALUE),
    ("map over a mapping's start", lambda r: r.mapped(1, 2) and r.map(0, r.handle(2), 2), INVALID_VALUE),
    ("map over a mapping and more", lambda r: r.mapped(1) and r.map(0, r.handle(4), 4), INVALID_VALUE),
    ("map with flags", lambda r: r.map(0, r.handle(), flags=1), INVALID_VALUE),
    ("map handle 0", lambda r: r.map(0, 0), INVALID_VALUE),
    ("map half a handle", lambda r: r.map(0, r.handle(2), 1), NOT_SUPPORTED),
    ("map from an offset", lambda r: r.map(0, r.handle(2), 1, offset=1), NOT_SUPPORTED),
    ("map more than the handle", lambda r: r.map(0, r.handle(), 2), NOT_SUPPORTED),
    ("map a handle twice", lambda r: r.map(1, r.mapped(0)), SUCCESS),
    ("open nothing", lambda r: r.access(0), INVALID_VALUE),
    ("open a range that ends in a hole", lambda r: r.mapped(0) and r.access(0, 2), INVALID_VALUE),
    ("open no bytes", lambda r: r.mapped(0) and r.access(0, 0), INVALID_VALUE),
    ("open a mapping's start", lambda r: r.mapped(0, 2) and r.access(0), INVALID_VALUE),
    ("open a mapping's end", lambda r: r.mapped(0, 2) and r.access(1), INVALID_VALUE),
    ("open without a description", lambda r: r.mapped(0) and r.access(0, num_descriptions=0), INVALID_VALUE),
    ("open unaligned", lambda r: r.mapped(0, 2) and r.access(0, shift=r.size // 2), INVALID_VALUE),
    ("open outside", lambda r: r.mapped(0) and r.access(r.nowhere), INVALID_VALUE),
    ("open two neighbours", lambda r: r.mapped(0) and r.mapped(1) and r.access(0, 2), SUCCESS),
    ("close access", lambda r: r.mapped(0) and r.access(0, kind=NONE), SUCCESS),
    ("open for reading", lambda r: r.mapped(0) and r.access(0, kind=READ), SUCCESS),
    ("unmap", lambda r: r.mapped(0) and r.unmap(0), SUCCESS),
    ("unmap a hole", lambda r: r.unmap(0), SUCCESS),
    ("unmap a mapping's start", lambda r: r.mapped(0, 2) and r.unmap(0), INVALID_VALUE),
    ("unmap a mapping's end", lambda r: r.mapped(0, 2) and r.unmap(1), INVALID_VALUE),
    ("unmap a mapping's start and a hole", lambda r: r.mapped(1, 2) and r.unmap(0, 2), INVALID_VALUE),
    ("unmap no bytes", lambda r: r.mapped(0) and r.unmap(0, 0), INVALID_VALUE),
    ("unmap unaligned", lambda r: r.mapped(0, 2) and r.unmap(0, shift=r.size // 2), INVALID_VALUE),
    ("unmap outside", lambda r: r.unmap(r.nowhere), INVALID_VALUE),
    ("free with a live mapping", lambda r: r.mapped(3) and r.free(r.base), INVALID_VALUE),
    ("free a half", lambda r: r.free(r.base, NUM_PLACES // 2), INVALID_VALUE),
    ("free an inner range", lambda r: r.free(r.at(1), 1), INVALID_VALUE),
    ("free the upper half", lambda r: r.free(r.at(8), 8), INVALID_VALUE),
    ("free too much", lambda r: r.free(r.base, 2 * NUM_PLACES), INVALID_VALUE),
    ("free a bogus address", lambda r: r.free(0x1000, 1), INVALID_VALUE),
    ("free nothing", lambda r: r.free(0, 0), INVALID_VALUE),
    ("release while mapped", lambda r: r.release(r.mapped(0)), SUCCESS),
    ("release 0", lambda r: r.release(0), INVALID_VALUE),
]
# Where the host is stricter. CUDA (driver 580) looks at the ends of a range only, and not at the reservation's, so that
# these succeed where the addresses behind it happen to be reserved too. What passes on the host passes on CUDA.
HOST_CASES: list[tuple[str, Callable[[Rig], int], int]] = [
    ("map across its end", lambda r: r.map(NUM_PLACES - 1, r.handle(2), 2), INVALID_VALUE),
    ("open a range with a hole", lambda r: r.mapped(0) and r.mapped(2) and r.access(0, 3), INVALID_VALUE),
    ("unmap across the end", lambda r: r.unmap(NUM_PLACES - 1, 2), INVALID_VALUE),
]


@pytest.mark.parametrize(("do", "expected"), [pytest.param(do, code, id=name) for name, do, code in CASES])
def test_one_call(rig: Rig, do: Callable[[Rig], int], expected: int) -> None:
    assert do(rig) == expected


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(("do", "expected"), [pytest.param(do, code, id=name) for name, do, code in HOST_CASES])
def test_one_call_where_the_host_is_stricter(rig: Rig, do: Callable[[Rig], int], expected: int) -> None:
    assert do(rig) == expected


def test_refused_call_changes_nothing(rig: Rig) -> None:
    handle = rig.mapped(0, 2)
    fill(rig.device, rig.base, 2 * rig.size, 7)
    other = rig.handle()
    assert rig.map(1, other) == INVALID_VALUE
    assert rig.unmap(1) == INVALID_VALUE
    assert rig.free(rig.base) == INVALID_VALUE
    assert rig.access(1, kind=NONE) == INVALID_VALUE
    assert rig.map(2, handle) == NOT_SUPPORTED
    assert (rig.value(0), rig.value(1)) == (7, 7)
    assert rig.map(2, other) == SUCCESS
    assert rig.unmap(0, 3) == SUCCESS


def test_reserving_terabytes_touches_nothing_that_grows_with_them(driver: Driver) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size = 12_000_000_000_000 // driver.granularity_bytes * driver.granularity_bytes
    before, free_before = resident_bytes(), driver.memory_info()[0]
    with record(driver) as calls:
        address = driver.reserve(size)
        while_reserved = resident_bytes()
        driver.free(address, size)
    assert [(made.call, made.code) for made in calls] == [(Call.RESERVE, SUCCESS), (Call.FREE, SUCCESS)]
    assert max(while_reserved, resident_bytes()) - before < 64 << 20  # tables of it, on the host: 12 GB
    if driver.device != "cpu":
        assert abs(driver.memory_info()[0] - free_before) < 256 << 20


def test_alias_shows_the_same_bytes(rig: Rig) -> None:
    handle = rig.mapped(0)
    assert rig.map(5, handle) == SUCCESS
    assert rig.access(5) == SUCCESS
    rig.fill(0, 3)
    assert rig.value(5) == 3
    rig.fill(5, 4)
    assert rig.value(0) == 4


def test_unmap_of_two_neighbours_and_of_a_range_with_holes(rig: Rig) -> None:
    for place in (0, 1, 3):
        rig.mapped(place)
    assert rig.unmap(0, 2) == SUCCESS
    assert rig.is_empty(0, 2)
    rig.mapped(0)
    assert rig.unmap(0, NUM_PLACES) == SUCCESS
    assert rig.is_empty(0, NUM_PLACES)
    assert rig.free(rig.base, 1) == INVALID_VALUE


def test_bytes_survive_unmap_and_a_move(rig: Rig) -> None:
    handle = rig.mapped(0)
    rig.fill(0, 9)
    assert rig.unmap(0) == SUCCESS
    assert rig.map(7, handle) == SUCCESS
    assert rig.access(7) == SUCCESS
    assert rig.value(7) == 9


def test_bytes_survive_a_change_of_access(rig: Rig) -> None:
    rig.mapped(0)
    rig.fill(0, 9)
    assert rig.access(0, kind=NONE) == SUCCESS
    assert rig.access(0, kind=READ) == SUCCESS
    assert rig.value(0) == 9


def test_released_memory_lives_while_it_is_mapped(rig: Rig) -> None:
    handle = rig.mapped(0)
    rig.fill(0, 6)
    assert rig.release(handle) == SUCCESS
    assert rig.access(0) == SUCCESS
    assert rig.value(0) == 6
    assert rig.map(1, handle) == SUCCESS
    assert rig.access(1) == SUCCESS
    assert rig.unmap(0) == SUCCESS
    assert rig.value(1) == 6


def test_handle_is_released_once(rig: Rig) -> None:
    handle = rig.mapped(0)
    assert rig.release(handle) == SUCCESS
    assert rig.release(handle) == INVALID_VALUE
    assert rig.unmap(0) == SUCCESS
    idle = rig.handle()
    assert rig.release(idle) == SUCCESS
    assert rig.release(idle) == INVALID_VALUE


def test_reservation_is_freed_once(driver: Driver) -> None:
    size = 4 * driver.granularity_bytes
    address = driver.reserve(size)
    assert driver.invoke(Call.FREE, address, size) == SUCCESS
    assert driver.invoke(Call.FREE, address, size) == INVALID_VALUE


@pytest.mark.parametrize("shift", [1, 4])
def test_reserve_aligns(driver: Driver, shift: int) -> None:
    size, alignment = driver.granularity_bytes, driver.granularity_bytes << shift
    addresses = [driver.reserve(size, alignment) for _ in range(5)]
    assert [address % alignment for address in addresses] == [0] * 5
    for address in addresses:
        driver.free(address, size)


def test_a_size_beyond_64_bits_is_refused_and_not_cut_off(driver: Driver) -> None:
    assert driver.invoke(Call.FREE, 1 << 64, 1 << 64) == INVALID_VALUE
    out = ctypes.c_int64()
    code = driver.invoke(Call.RESERVE, ctypes.addressof(out), (1 << 64) + driver.granularity_bytes, 0, 0, 0)
    assert (code, out.value) == (INVALID_VALUE, 0)


def test_wrong_number_of_arguments(driver: Driver) -> None:
    with pytest.raises(TypeError, match=r"cuMemUnmap takes 2 arguments, 1 were given"):
        driver.invoke(Call.UNMAP, 0)


# -- what only the host promises, or can show ---------------------------------------------------------------------


HOST_ONLY = pytest.mark.parametrize("device", ["cpu"], indirect=True)


@HOST_ONLY
@pytest.mark.parametrize("bogus", [1, 12345, (1 << 32) | 12345, (7 << 32) | 1, -1, 1 << 62])
def test_bogus_handle(rig: Rig, bogus: int) -> None:
    assert rig.map(0, bogus) == INVALID_VALUE
    assert rig.release(bogus) == INVALID_VALUE


@HOST_ONLY
def test_handle_of_a_former_owner_is_bogus(rig: Rig) -> None:
    stale = rig.handle()
    assert rig.release(stale) == SUCCESS
    heir = rig.handle()  # takes over its record
    assert heir != stale
    assert rig.map(0, stale) == INVALID_VALUE
    assert rig.release(stale) == INVALID_VALUE
    assert rig.map(0, heir) == SUCCESS


@HOST_ONLY
def test_fresh_and_recycled_memory_is_zero(rig: Rig) -> None:
    handle = rig.mapped(0, 4)
    assert value("cpu", rig.base, 4 * rig.size) == 0
    fill("cpu", rig.base, 4 * rig.size, 255)
    assert rig.unmap(0, 4) == SUCCESS
    assert rig.release(handle) == SUCCESS
    for place in range(4):
        rig.mapped(place)
    assert value("cpu", rig.base, 4 * rig.size) == 0


@HOST_ONLY
def test_memory_is_given_back(rig: Rig) -> None:
    file = next(f for f in map(int, os.listdir("/proc/self/fd")) if _is_memory_file(f))

    def held() -> tuple[int, int]:
        return rig.driver.live_bytes, os.fstat(file).st_blocks * 512  # type: ignore[attr-defined]

    before = held()
    handle = rig.mapped(0, 8)
    size = 8 * rig.size
    assert held() == (before[0] + size, before[1] + size)
    fill("cpu", rig.base, size, 1)
    assert rig.unmap(0, 8) == SUCCESS
    assert held() == (before[0] + size, before[1] + size)  # the handle still owns it
    assert rig.release(handle) == SUCCESS
    assert held() == before
    rig.release(rig.mapped(0, 8))
    assert held() == (before[0] + size, before[1] + size)  # the mapping still does
    assert rig.unmap(0, 8) == SUCCESS
    assert held() == before


def _is_memory_file(file: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{file}").startswith("/memfd:vtensor")
    except OSError:
        return False


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@HOST_ONLY
def test_resident_memory_goes_down(rig: Rig) -> None:
    count = (64 << 20) // rig.size
    address = rig.driver.reserve(count * rig.size)
    before = _resident_bytes()
    handle = rig.driver.create(count * rig.size)
    rig.driver.map(address, count * rig.size, handle)
    rig.driver.set_access(address, count * rig.size)
    tensor_at("cpu", address, count * rig.size).fill_(1)
    full = _resident_bytes()
    rig.driver.unmap(address, count * rig.size)
    rig.driver.release(handle)
    after = _resident_bytes()
    rig.driver.free(address, count * rig.size)
    assert full - before > 60 << 20
    assert after - before < 4 << 20


@HOST_ONLY
def test_unmapping_a_wide_hole_costs_no_memory(driver: Driver) -> None:
    size = 64 << 30
    address = driver.reserve(size)
    before = _resident_bytes()
    driver.unmap(address, size)
    after = _resident_bytes()
    driver.free(address, size)
    assert after - before < 16 << 20


@HOST_ONLY
def test_access_is_what_was_asked_for(rig: Rig) -> None:
    handle = rig.handle()
    assert access_at(rig.at(0)) == "---p"
    assert rig.map(0, handle) == SUCCESS
    assert access_at(rig.at(0)) == "---s"
    for kind, permissions in ((READ, "r--s"), (READ_WRITE, "rw-s"), (NONE, "---s")):
        assert rig.access(0, kind=kind) == SUCCESS
        assert access_at(rig.at(0)) == permissions
    assert rig.unmap(0) == SUCCESS
    assert access_at(rig.at(0)) == "---p"


@HOST_ONLY
@pytest.mark.parametrize("which", ["write to read-only", "read unopened", "read unmapped"])
def test_wrong_access_faults(device: str, which: str) -> None:
    def use() -> None:
        driver = get_driver(device)  # the child's own
        size = driver.granularity_bytes
        address, handle = driver.reserve(size), driver.create(size)
        driver.map(address, size, handle)
        if which != "read unopened":
            driver.set_access(address, size, writable=which != "write to read-only")
            ctypes.string_at(address, size)
        if which == "read unmapped":
            driver.unmap(address, size)
        if which == "write to read-only":
            ctypes.memset(address, 1, 1)
        else:
            ctypes.string_at(address, 1)

    assert in_child(use) == (-signal.SIGSEGV, "")
