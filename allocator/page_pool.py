"""PagePool: the physical page groups of one device."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vtensor.allocator.driver import Call, get_driver
from vtensor.devices import device_name, resolve_device
from vtensor.errors import ClosedError, VTensorError
from vtensor.interrupts import interrupts_held
from vtensor.units import format_bytes
from vtensor.unpicklable import Unpicklable

if TYPE_CHECKING:
    from vtensor.allocator.plan import PoolArrays

__all__ = ["PagePool", "PagePoolStats"]


class MappingOwner(Protocol):
    """Whoever maps a pool's page groups: an `AddressSpace`."""

    def mapped_page_groups(self) -> npt.NDArray[np.int32]:
        """Page groups in the order of their places; a page group mapped twice comes twice."""


@dataclass(frozen=True)
class PagePoolStats:
    """A pool at one moment; counts are in page groups.

    Attributes
    ----------
    capacity_page_groups : int or None
        The most there may be; None where the device's memory is the only limit.
    total_page_groups, free_page_groups, mapped_page_groups : int
        All that exist now; of those, the ones without a mapping and the ones with at least one.
    num_driver_calls : dict of str to int
        Calls made so far, by the driver's name of the call.
    """

    page_group_bytes: int
    capacity_page_groups: int | None
    total_page_groups: int
    free_page_groups: int
    mapped_page_groups: int
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
    ) -> None:
        self.driver = get_driver(device_name(resolve_device(device)))
        self.page_group_bytes = _checked_page_group_bytes(page_group_bytes, self.driver)
        self.capacity_bytes = capacity_bytes
        self.closed = False
        from vtensor.allocator import plan

        self._plan: Any = plan
        self._lock = threading.RLock()
        self._spaces: weakref.WeakSet[MappingOwner] = weakref.WeakSet()
        self._next_content = 1
        capacity = plan.UNLIMITED
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
            capacity = capacity_bytes // self.page_group_bytes
        self.arrays = _new_arrays(self.driver, self.page_group_bytes, capacity)
        self.is_retired = False
        with interrupts_held():  # an interrupt while LLVM loads code may crash the process
            plan.release_free(self.arrays)  # nothing yet, but loaded: a finalizer is no place to compile in
        # A pool that nobody closes gives its memory back when it dies; at exit the process does that.
        self._finalizer = weakref.finalize(self, _release_all, plan, self.arrays, os.getpid())
        self._finalizer.atexit = False

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

    def count_call(self, call: Call) -> None:
        """Count a driver call that was made for an address space."""
        with self._lock:
            self.arrays.header[self._plan.NUM_CALLS + call] += 1

    def new_content(self) -> int:
        """A mark, never given before, for data whose owner does not want to meet somebody else's."""
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
        with self._lock:
            self.check_open()
            before = int(self.arrays.header[self._plan.NUM_TOTAL])
            code = self._plan.release_free(self.arrays)
            self.driver.check(Call.RELEASE, int(code), "free page groups")
            return (before - int(self.arrays.header[self._plan.NUM_TOTAL])) * self.page_group_bytes

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
        header, plan = self.arrays.header, self._plan
        capacity, total, free = (int(header[word]) for word in (plan.CAPACITY, plan.NUM_TOTAL, plan.NUM_FREE))
        return PagePoolStats(
            page_group_bytes=self.page_group_bytes,
            capacity_page_groups=None if capacity == plan.UNLIMITED else capacity,
            total_page_groups=total,
            free_page_groups=free,
            mapped_page_groups=total - free,
            num_driver_calls={call.symbol: int(header[plan.NUM_CALLS + call]) for call in Call},
        )

    def available_page_groups(self) -> int | None:
        """Page groups that can still be had under the capacity; None where only the device knows."""
        stats = self.stats()
        if stats.capacity_page_groups is None:
            return None
        return max(0, stats.capacity_page_groups - stats.mapped_page_groups)

    def check_integrity(self) -> None:
        """Compare the books: every page group is free once, or mapped as often as the address spaces say.

        Raises
        ------
        VTensorError
            The books do not agree; the message says where.
        """
        if self.closed:
            return
        with self._lock:
            header, plan = self.arrays.header, self._plan
            free = self.arrays.free[: int(header[plan.NUM_FREE])]
            used = int(header[plan.NEXT_INDEX])
            vacant = self.arrays.vacant[: int(header[plan.NUM_VACANT])]
            mappings = np.zeros(used, np.int64)
            for space in list(self._spaces):
                mappings += np.bincount(space.mapped_page_groups(), minlength=used)
            known = self.arrays.num_mappings[:used]
            problems = [
                text
                for wrong, text in (
                    (len(np.unique(free)) != len(free), "a page group is free twice"),
                    (bool(known[free].any()), "a free page group is mapped"),
                    (len(free) + len(vacant) + int((known > 0).sum()) != used, "free + mapped + vacant != all"),
                    (int(header[plan.NUM_TOTAL]) != used - len(vacant), "the total is wrong"),
                    (not np.array_equal(mappings, known), "mappings counted by the pool and by its spaces differ"),
                )
                if wrong
            ]
            if problems:
                raise VTensorError(f"page pool of {self.driver.device}: " + "; ".join(problems))

    def close(self) -> None:
        """Give every page group back. A second call does nothing.

        Raises
        ------
        VTensorError
            Page groups are still mapped; close the caches and tensors that use the pool first.
        """
        with self._lock:
            if self.closed:
                return
            self.check_open()
            mapped = self.stats().mapped_page_groups
            if mapped:
                raise VTensorError(
                    f"page pool of {self.driver.device} still has {mapped} mapped page groups; "
                    "close the caches and drop the tensors that use it first"
                )
            self.trim()
            self.closed = True


def _release_all(plan: Any, arrays: PoolArrays, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked child must not touch the parent's memory
        with interrupts_held():
            plan.release_free(arrays)


def _checked_page_group_bytes(value: int | None, driver: Any) -> int:
    if value is None:
        return int(driver.default_page_group_bytes)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value % driver.granularity_bytes:
        raise ValueError(
            f"page_group_bytes={value!r} must be a positive multiple of {driver.granularity_bytes:,}, "
            f"the granularity of {driver.device}"
        )
    return value


def _new_arrays(driver: Any, page_group_bytes: int, capacity: int) -> PoolArrays:
    """Zeroed native state, long enough for every page group that the device, or the capacity, has room for."""
    from vtensor.allocator import plan
    from vtensor.allocator.native import sparse_array

    length = driver.memory_info()[1] // page_group_bytes + 1
    if capacity != plan.UNLIMITED:
        length = min(length, capacity)
    header = np.zeros(plan.HEADER_WORDS, np.int64)
    header[plan.CAPACITY] = capacity
    return plan.PoolArrays(
        header=header,
        handles=sparse_array(length, np.int64),
        num_mappings=sparse_array(length, np.int32),
        content=sparse_array(length, np.int64),
        free=sparse_array(length, np.int32),
        vacant=sparse_array(length, np.int32),
        entry_points=driver.entry_points,
        constants=np.array(
            [
                driver.creation_properties,
                driver.read_write_access,
                driver.read_only_access,
                page_group_bytes,
                driver.fresh_memory_is_zero,
            ],
            np.int64,
        ),
    )
