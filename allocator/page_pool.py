"""PagePool: the physical page groups of one device."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from vtensor.allocator import graveyard, words
from vtensor.allocator.driver import Call, Driver, get_driver
from vtensor.devices import device_name, resolve_device
from vtensor.errors import ClosedError, VTensorError
from vtensor.interrupts import interrupts_held
from vtensor.units import format_bytes
from vtensor.unpicklable import Unpicklable

if TYPE_CHECKING:
    from vtensor.allocator.handles import PoolArrays

__all__ = ["PagePool", "PagePoolStats"]

_MOST_PAGE_GROUP_BYTES = 1 << 40
_DEFAULT_SIZE_CLASSES = 6
_MOST_SIZE_CLASSES = 16
_MOST_PAGE_GROUPS = 1 << 30  # their numbers have 31 bits


class MappingOwner(Protocol):
    """Whoever maps a pool's page groups: an `AddressSpace`."""

    @property
    def num_asleep(self) -> int:
        """Page groups that were taken away for a while, and will be wanted back."""

    def mapped_page_groups(self) -> npt.NDArray[np.int32]:
        """Page groups in the order of their places; a page group mapped twice comes twice."""

    def settle(self) -> None:
        """Wait until nobody else works on it."""


class MemoryHolder(Protocol):
    """Whoever keeps page groups that it could do without: a KV cache with the memory of ended requests."""

    def give_up(self, missing: int) -> int:
        """Give up to so many page groups back to the pool; how many it gave. 0 also where it is busy."""


@dataclass(frozen=True)
class PagePoolStats:
    """A pool at one moment; counts are in page groups, that is in units of the smallest size class.

    Attributes
    ----------
    capacity_page_groups : int or None
        The most there may be; None where the device's memory is the only limit.
    total_page_groups, free_page_groups, mapped_page_groups : int
        All that exist now; of those, the ones without a mapping and the ones with at least one. The page group of zeros
        that all reads of unwritten GPU memory share comes on top, also of the capacity, and is counted in `num_handles`
        only.
    num_handles : dict of int to int
        Physical allocations that exist now, by their size in bytes; sizes without any are left out.
    num_driver_calls : dict of str to int
        Calls made so far, by the driver's name of the call.
    """

    page_group_bytes: int
    capacity_page_groups: int | None
    total_page_groups: int
    free_page_groups: int
    mapped_page_groups: int
    num_handles: dict[int, int]
    num_driver_calls: dict[str, int]


class PagePool(Unpicklable):
    """The physical page groups of one device: created on demand, kept for reuse, given back on request.

    Parameters
    ----------
    device : torch.device or str, optional
        A CPU or a CUDA device; None is torch's default device.
    capacity_bytes : int, optional
        The most memory that the pool may hold. None: as much as the device gives.
    page_group_bytes : int, optional
        Size of a page group, a multiple of the driver's granularity. Default: the driver's (CUDA: 2 MiB, host: 64 KiB).
    max_size_class_bytes : int, optional
        Size of the largest physical allocation (a **handle**), a page group times a power of two. Much memory at once
        is mapped in handles as large as will fit, which takes fewer calls; it is taken away by whole handles only.
        Default: 32 page groups (CUDA: 64 MiB, host: 2 MiB). ``page_group_bytes`` has every handle be one page group.
    peer_devices : sequence of torch.device or str
        Other GPUs that may read and write the memory as well.

    Raises
    ------
    ValueError
        A size that is zero, negative or no multiple; the message names the value and the rule.
    DriverError
        The device is not there.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        capacity_bytes: int | None = None,
        page_group_bytes: int | None = None,
        max_size_class_bytes: int | None = None,
        peer_devices: Sequence[torch.device | str] = (),
    ) -> None:
        self.driver = get_driver(device_name(resolve_device(device)))
        self.page_group_bytes = _checked_page_group_bytes(page_group_bytes, self.driver)
        self.max_size_class_bytes = _checked_size_class(max_size_class_bytes, self.page_group_bytes)
        self.capacity_bytes = capacity_bytes
        self.closed = False
        with interrupts_held():  # an import that was cut off could not be repeated
            from vtensor.allocator import handles

        self._native: Any = handles
        self._lock = threading.RLock()
        self._spaces: weakref.WeakSet[MappingOwner] = weakref.WeakSet()
        self._holders: weakref.WeakSet[MemoryHolder] = weakref.WeakSet()
        self._next_content = 1
        limit = min(max(1, self.driver.memory_info()[1] // self.page_group_bytes), _MOST_PAGE_GROUPS - 1)
        if capacity_bytes is not None:
            if (
                isinstance(capacity_bytes, bool)
                or not isinstance(capacity_bytes, int)
                or capacity_bytes < self.page_group_bytes
            ):
                raise ValueError(
                    f"capacity_bytes={capacity_bytes!r} must be an integer, room for at least one page group of "
                    f"{self.page_group_bytes:,} bytes"
                )
            limit = min(limit, capacity_bytes // self.page_group_bytes)
        peers = _checked_peers(peer_devices, self.driver.device)
        self.peer_devices = tuple(torch.device("cuda", index) for index in peers)
        # What the pool's constants hold the addresses of.
        self._access = [self.driver.access_to(peers, writable=writable) for writable in (True, False)]
        self.arrays = _new_arrays(self, limit)
        self.is_retired = False
        with interrupts_held():  # an interrupt while LLVM loads code may crash the process
            _release_free(handles, self.arrays)  # nothing yet, but loaded: a finalizer is no place to compile in
        # A pool that nobody closes gives its memory back when it dies; at exit the process does that.
        self._finalizer = weakref.finalize(self, _release_all, handles, self.arrays, os.getpid())
        self._finalizer.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; where an error ends the block, only if nothing is mapped."""
        with nullcontext() if error is None else suppress(VTensorError):
            self.close()

    def __repr__(self) -> str:
        if self.closed:
            return f"<PagePool {self.driver.device} closed>"
        stats = self.stats()
        return (
            f"<PagePool {self.driver.device}: {stats.mapped_page_groups} mapped + {stats.free_page_groups} free "
            f"page groups of {format_bytes(self.page_group_bytes)}>"
        )

    def check_open(self) -> None:
        """Raise `ClosedError` or `ForkedError` where the pool can no longer serve."""
        if self.closed:
            raise ClosedError(f"this page pool of {self.driver.device} was closed; make a new PagePool")
        self.driver.check_process()

    def adopt(self, space: MappingOwner) -> None:
        """Remember an address space whose mappings count towards this pool, as long as it lives."""
        with self._lock:
            self.check_open()
            self._spaces.add(space)

    def disown(self, space: MappingOwner) -> None:
        """Forget an address space in which nothing is mapped any more."""
        with self._lock:
            self._spaces.discard(space)

    def add_holder(self, holder: MemoryHolder) -> None:
        """Remember somebody to ask when others are short of memory, as long as it lives."""
        with self._lock:
            self._holders.add(holder)

    def remove_holder(self, holder: MemoryHolder) -> None:
        """Ask it no more."""
        with self._lock:
            self._holders.discard(holder)

    def ask_holders(self, missing: int, *, but: MemoryHolder | None = None) -> int:
        """Have others that use the pool give up what they can do without; the page groups that they gave."""
        given = 0
        with self._lock:
            holders = [holder for holder in self._holders if holder is not but]
        for holder in holders:  # not under the lock: they take their own
            if given < missing:
                given += holder.give_up(missing - given)
        return given

    def count_call(self, call: Call) -> None:
        """Count a driver call that was made for an address space."""
        self._native.count_calls(self.arrays, int(call), 1)

    def new_content(self) -> int:
        """A mark, never given before, for data whose owner does not want to meet somebody else's."""
        self.driver.check_process()
        with self._lock:
            self._next_content += 1
            return self._next_content

    def trim(self) -> int:
        """Give all free page groups back to the device.

        Returns
        -------
        int
            Bytes given back.
        """
        return self._trim(with_zeros=True)

    def trim_unless_kept(self) -> None:
        """After something was unmapped: `trim`, unless free memory stays in the pool. The page group of zeros stays."""
        if not self.closed and not self.keeps_free_page_groups:
            self._trim(with_zeros=False)

    def _trim(self, *, with_zeros: bool) -> int:
        self.driver.check_process()  # before the lock, which a thread of the parent may have held
        with self._lock:
            self.check_open()
            outcome = _release_free(self._native, self.arrays, with_zeros=with_zeros)
            self.driver.check(Call.RELEASE, int(outcome[words.CODE]), "free page groups")
            return int(outcome[words.NUM_CHANGED]) * self.page_group_bytes

    def retire(self) -> None:
        """Give free page groups back to the device, now and whenever more become free."""
        self.is_retired = True
        self.trim()

    @property
    def keeps_free_page_groups(self) -> bool:
        """Whether memory that nobody uses stays in the pool: only what was set aside for it by a capacity."""
        return self.capacity_bytes is not None and not self.is_retired

    def stats(self) -> PagePoolStats:
        """The pool's page groups and calls, now."""
        header, classes = self.arrays.header.copy(), self.arrays.classes.reshape(-1, words.CLASS_WORDS).copy()
        capacity, total, free = (int(header[word]) for word in (words.CAPACITY, words.NUM_TOTAL, words.NUM_FREE))
        if header[words.ZEROS_GROUP]:
            capacity, total = capacity - 1, total - 1
        num_handles = {}
        for size_class, block in enumerate(classes.tolist()):
            number = (block[words.NEXT_GROUP] >> size_class) - block[words.NUM_VACANT_HANDLES]
            if number:
                num_handles[self.page_group_bytes << size_class] = number
        return PagePoolStats(
            page_group_bytes=self.page_group_bytes,
            capacity_page_groups=None if self.capacity_bytes is None else capacity,
            total_page_groups=total,
            free_page_groups=free,
            mapped_page_groups=total - free,
            num_handles=num_handles,
            num_driver_calls={call.symbol: int(header[words.NUM_CALLS + call]) for call in Call},
        )

    @property
    def num_available(self) -> int:
        """Page groups that are free or may still be created, as far as the capacity is concerned."""
        header = self.arrays.header
        return int(header[words.CAPACITY] - header[words.NUM_TOTAL] + header[words.NUM_FREE])

    def headroom(self) -> tuple[int, int]:
        """Page groups that can still be had, and all that there can be, free and mapped: what watermarks count against.

        Without a capacity the device is asked what it has free, which may take some microseconds.
        """
        header = self.arrays.header
        if self.capacity_bytes is not None:
            return self.num_available, int(header[words.CAPACITY])
        available = self.driver.memory_info()[0] // self.page_group_bytes + int(header[words.NUM_FREE])
        return available, available + int(header[words.NUM_TOTAL] - header[words.NUM_FREE])

    def check_integrity(self) -> None:
        """Compare the books: every handle is free once, or mapped as often as the address spaces say.

        While no other thread changes them: otherwise it may find fault with what is under way.

        Raises
        ------
        VTensorError
            The books do not agree; the message says where.
        """
        if self.closed:
            return
        self.driver.check_process()
        with self._lock:
            spaces = list(self._spaces)
            for space in spaces:
                space.settle()
            mapped = [space.mapped_page_groups() for space in spaces]
            if self.arrays.header[words.ZEROS_GROUP]:
                mapped.append(np.array([self.arrays.header[words.ZEROS_GROUP] - 1], np.int32))
            problems = _find_problems(self.arrays, np.concatenate(mapped) if mapped else np.empty(0, np.int32))
            if problems:
                raise VTensorError(f"page pool of {self.driver.device}: " + "; ".join(problems))

    def close(self) -> None:
        """Give every page group back, once the device has finished with what died. A second call does nothing.

        Raises
        ------
        VTensorError
            Page groups are still mapped, or asleep; close the caches and tensors that use the pool first.
        """
        if not self.closed:
            self.driver.check_process()
        mapped = self._shut()
        if mapped:
            graveyard.drain()  # not under the lock, which those that it releases take
            mapped = self._shut()
        if mapped:
            raise VTensorError(
                f"page pool of {self.driver.device} still has {mapped} mapped page groups; "
                "close the caches and drop the tensors that use it first"
            )

    def _shut(self) -> int:
        """Close, unless page groups are mapped: how many."""
        with self._lock:
            if self.closed:
                return 0
            self.check_open()
            for space in list(self._spaces):
                space.settle()
            if asleep := sum(space.num_asleep for space in list(self._spaces)):
                raise VTensorError(
                    f"page pool of {self.driver.device} has {asleep} page groups asleep, which somebody will want "
                    "back; wake them, or close their owner, first"
                )
            header = self.arrays.header
            capacity = int(header[words.CAPACITY]) - bool(header[words.ZEROS_GROUP])
            with interrupts_held():
                mapped = int(self._native.shut(self.arrays))  # a commit of another thread comes before it, or fails
                if mapped:
                    return mapped
                self.closed = True
                outcome = _release_free(self._native, self.arrays)
                if outcome[words.CODE]:
                    self.closed, header[words.CAPACITY] = False, capacity
            self.driver.check(Call.RELEASE, int(outcome[words.CODE]), "free page groups")
            return 0


def _release_free(native: Any, arrays: PoolArrays, *, with_zeros: bool = True) -> npt.NDArray[np.int64]:
    """Give all free page groups back to the device; what became of that."""
    outcome = np.zeros(words.OUTCOME_WORDS, np.int64)
    native.release_free(arrays, with_zeros, outcome)
    return outcome


def _release_all(native: Any, arrays: PoolArrays, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked child must not touch the parent's memory
        with interrupts_held():
            _release_free(native, arrays)


def _find_problems(arrays: PoolArrays, mapped: npt.NDArray[np.int32]) -> list[str]:
    """What does not agree in a pool's books; `mapped` are the page groups of all places of all spaces."""
    header, class_range = arrays.header, 1 << int(arrays.constants[words.CLASS_SHIFT])
    num_free = num_total = 0
    problems = set()

    def check(is_wrong: object, problem: str) -> None:
        if is_wrong:
            problems.add(problem)

    size_classes = mapped // class_range
    offsets = mapped & ((1 << size_classes) - 1)
    torn = (offsets[1:] > 0) & (mapped[1:] != mapped[:-1] + 1)
    check(torn.any() or bool(offsets[:1].any()), "a handle is mapped in part")
    heads = mapped[offsets == 0]
    for size_class, block in enumerate(arrays.classes.reshape(-1, words.CLASS_WORDS).tolist()):
        start, size = size_class * class_range, 1 << size_class
        number = block[words.NEXT_GROUP] // size
        free = arrays.free[start : start + block[words.NUM_FREE_HANDLES]]
        vacant = arrays.vacant[start : start + block[words.NUM_VACANT_HANDLES]]
        known = arrays.num_mappings[start : start + block[words.NEXT_GROUP] : size]
        of_class = heads[heads // class_range == size_class]
        counted = np.bincount((of_class - start) // size, minlength=number)
        everywhere = np.sort(np.concatenate([free, vacant, start + size * np.flatnonzero(known > 0)]))
        check((size_classes == size_class).sum() != len(of_class) * size, "a handle is mapped in part")
        check(len(np.unique(free)) != len(free), "a page group is free twice")
        check(arrays.num_mappings[free].any(), "a free page group is mapped")
        check(not np.array_equal(everywhere, start + size * np.arange(number)), "free + mapped + vacant != all")
        check(not np.array_equal(counted, known), "mappings counted by the pool and by its spaces differ")
        num_free += len(free) * size
        num_total += (number - len(vacant)) * size
    check(num_total != int(header[words.NUM_TOTAL]), "the total is wrong")
    check(num_free != int(header[words.NUM_FREE]), "the number of free page groups is wrong")
    return sorted(problems)


def _checked_page_group_bytes(value: int | None, driver: Driver) -> int:
    if value is None:
        return int(driver.default_page_group_bytes)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value % driver.granularity_bytes:
        raise ValueError(
            f"page_group_bytes={value!r} must be a positive multiple of {driver.granularity_bytes:,}, "
            f"the granularity of {driver.device}"
        )
    if value > _MOST_PAGE_GROUP_BYTES:
        raise ValueError(f"page_group_bytes={value:,} must be at most {_MOST_PAGE_GROUP_BYTES:,}")
    return value


def _checked_size_class(value: int | None, page_group_bytes: int) -> int:
    if value is None:
        return page_group_bytes << (_DEFAULT_SIZE_CLASSES - 1)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value not in [page_group_bytes << size_class for size_class in range(_MOST_SIZE_CLASSES)]
    ):
        raise ValueError(
            f"max_size_class_bytes={value!r} must be page_group_bytes={page_group_bytes:,} times a power of two, "
            f"at most {1 << (_MOST_SIZE_CLASSES - 1):,}"
        )
    return value


def _checked_peers(devices: Sequence[torch.device | str], own: str) -> list[int]:
    """Indices of peer devices."""
    peers = []
    for device in devices:
        peer = resolve_device(device)
        if not own.startswith("cuda") or peer.type != "cuda" or device_name(peer) == own or peer.index in peers:
            raise ValueError(f"peer_devices={devices!r} must be CUDA devices other than {own}, each once")
        peers.append(peer.index)
    return peers


def _new_arrays(pool: PagePool, limit: int) -> PoolArrays:
    """Zeroed native state for a pool of at most `limit` page groups."""
    from vtensor.allocator import handles as native
    from vtensor.allocator.native import sparse_array

    driver = pool.driver
    num_classes = (pool.max_size_class_bytes // pool.page_group_bytes).bit_length()
    class_shift = max(limit.bit_length(), num_classes - 1)  # numbers for one more, the page group of zeros
    while num_classes > 1 and num_classes << class_shift >= 2 * _MOST_PAGE_GROUPS:
        num_classes -= 1
    pool.max_size_class_bytes = pool.page_group_bytes << (num_classes - 1)
    length = num_classes << class_shift
    header = np.zeros(words.HEADER_WORDS, np.int64)
    header[words.CAPACITY] = limit
    constants = np.zeros(words.NUM_CONSTANTS, np.int64)
    constants[words.PROPERTIES] = driver.creation_properties
    constants[words.READ_WRITE], constants[words.READ_ONLY] = (access.ctypes.data for access in pool._access)
    constants[words.NUM_ACCESS] = len(pool._access[0])
    constants[words.PAGE_GROUP_BYTES] = pool.page_group_bytes
    constants[words.FRESH_IS_ZERO] = driver.fresh_memory_is_zero
    constants[words.CLASS_SHIFT] = class_shift
    return native.PoolArrays(
        header=header,
        classes=np.zeros(num_classes * words.CLASS_WORDS, np.int64),
        handles=sparse_array(length, np.int64),
        num_mappings=sparse_array(length, np.int32),
        content=sparse_array(length, np.int64),
        free=sparse_array(length, np.int32),
        vacant=sparse_array(length, np.int32),
        entry_points=driver.entry_points,
        constants=constants,
    )
