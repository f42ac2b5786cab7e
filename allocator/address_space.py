"""AddressSpace: one reservation and the table of what is mapped in it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vtensor.allocator.driver import Call
from vtensor.allocator.page_pool import PagePool
from vtensor.allocator.reservation import Reservation
from vtensor.errors import ClosedError, OutOfPagesError, ReservationError, VTensorError
from vtensor.interrupts import interrupts_held
from vtensor.units import format_bytes, round_up
from vtensor.unpicklable import Unpicklable

if TYPE_CHECKING:
    from vtensor.allocator.plan import SpaceArrays

__all__ = ["AddressSpace", "Shortage"]

Ranges = npt.NDArray[np.int64]


class Shortage(Exception):
    """A commit needed more page groups than can be had; nothing was changed. Callers turn it into their own answer."""

    def __init__(self, page_groups: int) -> None:
        super().__init__(page_groups)
        self.page_groups = page_groups


class AddressSpace(Unpicklable):
    """A reservation cut into places of one page group each, and which page group lies where.

    ::

        reservation   | place 0 | place 1 | place 2 | place 3 | ...
        table         |    8    |    0    |    9    |    0    | ...    0: nothing   n: page group n - 1

    It owns its mappings: whatever it maps, it unmaps. Calls that change it may come from any thread.

    Parameters
    ----------
    pool : PagePool
        Where its page groups come from and go to.
    size_bytes : int
        Rounded up to the pool's page group.

    Raises
    ------
    ReservationError
        No such range of addresses is free.
    """

    def __init__(self, pool: PagePool, size_bytes: int) -> None:
        pool.check_open()
        from vtensor.allocator import plan
        from vtensor.allocator.native import sparse_array

        self.pool = pool
        self.page_group_bytes = pool.page_group_bytes
        self.reservation = Reservation(pool.driver, round_up(size_bytes, pool.page_group_bytes))
        self.num_places = self.reservation.size_bytes // pool.page_group_bytes
        self._plan: Any = plan
        self._lock = threading.RLock()
        try:
            self.arrays = plan.SpaceArrays(
                header=np.zeros(plan.SPACE_HEADER_WORDS, np.int64),
                table=sparse_array(self.num_places, np.int32),
                read_only=sparse_array(self.num_places, np.int8),
                base=self.reservation.base,
            )
            self.arrays.header[plan.FIRST_MAPPED] = self.num_places
            # Load now what closing needs: where no mapping can be made any more, LLVM could not, and would abort.
            nothing, outcome = np.zeros((0, 2), np.int64), np.zeros(plan.OUTCOME_WORDS, np.int64)
            with interrupts_held():
                plan.decommit(pool.arrays, self.arrays, nothing, False, outcome)
            pool.adopt(self)
        except BaseException as error:
            self.reservation.close()
            if isinstance(error, OSError):
                raise ReservationError(
                    f"no memory for the table of {self.num_places:,} places in {format_bytes(size_bytes)} of "
                    f"addresses: {error}; see vm.overcommit_memory, or ask for less"
                ) from error
            raise
        pool.count_call(Call.RESERVE)
        # A space that nobody closes gives everything back when it dies; at exit the process does that.
        self._finalizer = weakref.finalize(self, _give_up, pool, self.arrays, self.reservation, os.getpid())
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<AddressSpace {self.reservation!r}, {format_bytes(self.committed_bytes)} committed>"

    @property
    def base(self) -> int:
        """The first address."""
        return self.reservation.base

    @property
    def size_bytes(self) -> int:
        """Bytes of addresses."""
        return self.reservation.size_bytes

    @property
    def closed(self) -> bool:
        """Whether the addresses were given back."""
        return self.reservation.closed

    @property
    def num_mapped(self) -> int:
        """Places with a page group."""
        return int(self.arrays.header[self._plan.NUM_MAPPED])

    @property
    def committed_bytes(self) -> int:
        """Bytes with memory behind them; an alias counts at each of its places."""
        return self.num_mapped * self.page_group_bytes

    def check_open(self) -> None:
        """Raise `ClosedError` or `ForkedError` where the space can no longer serve."""
        if self.closed:
            raise ClosedError(f"these addresses of {self.pool.driver.device} were given back")
        self.pool.check_open()

    def mapped_page_groups(self) -> npt.NDArray[np.int32]:
        """Page groups in the order of their places; a page group mapped twice comes twice. Reads the whole table."""
        if self.num_mapped == 0:
            return np.empty(0, np.int32)
        table = self.arrays.table
        return table[table > 0] - 1

    def count_missing(self, ranges: Ranges) -> int:
        """Places without a page group in ranges of places, rows of (first, count).

        Waits for a commit that another thread is at: a place counts as mapped once it is also zeroed, in the order of
        that commit's stream.
        """
        with self._lock:
            return int(self._plan.count_missing(self.arrays, ranges))

    def commit(
        self, ranges: Ranges, *, content: int, stream: int = 0, on_mapped: Callable[[], None] | None = None
    ) -> int:
        """Put a page group below every empty place of the ranges: all of them, or none.

        Parameters
        ----------
        ranges : ndarray of int64, shape [n, 2]
            Rows of (first place, number of places), not overlapping.
        content : int
            The caller's mark (`PagePool.new_content`); page groups that last held something else are zeroed.
        stream : int
            Raw handle of the stream in whose order they are zeroed.
        on_mapped : callable, optional
            Called if anything was mapped, before any other thread sees it.

        Returns
        -------
        int
            Number of page groups that were mapped.

        Raises
        ------
        Shortage
            Not enough page groups; nothing was changed.
        DriverError
            Another failure of the driver; nothing was changed, unless the message says so.
        """
        with self._lock, interrupts_held():
            self.check_open()
            self._check_ranges(ranges)
            outcome = np.zeros(self._plan.OUTCOME_WORDS, np.int64)
            runs = self._plan.commit(self.pool.arrays, self.arrays, ranges, content, outcome)
            if outcome[self._plan.SHORTFALL]:
                raise Shortage(int(outcome[self._plan.SHORTFALL]))
            _check_outcome(self.pool, outcome)
            driver, size = self.pool.driver, self.page_group_bytes
            try:
                for first, count, is_dirty in runs.tolist():
                    if is_dirty:
                        driver.zero(self.base + first * size, count * size, stream)
                if on_mapped is not None and len(runs):
                    on_mapped()
            except BaseException:  # an interrupt, too: what holds somebody else's data must not stay
                driver.finish(stream)
                self.decommit(np.ascontiguousarray(runs[:, :2]), forget_content=True)
                raise
            return int(outcome[self._plan.NUM_CHANGED])

    def decommit(self, ranges: Ranges, *, forget_content: bool) -> int:
        """Take away every page group in the ranges. The device must have finished with them.

        Parameters
        ----------
        ranges : ndarray of int64, shape [n, 2]
            As for `commit`.
        forget_content : bool
            Have the page groups zeroed before anybody uses them again, this caller included.

        Returns
        -------
        int
            Number of page groups that were unmapped.

        Raises
        ------
        DriverError
            The driver refused; nothing was changed, unless the message says so.
        """
        with self._lock, interrupts_held():
            self.check_open()
            self._check_ranges(ranges)
            outcome = np.zeros(self._plan.OUTCOME_WORDS, np.int64)
            self._plan.decommit(self.pool.arrays, self.arrays, ranges, forget_content, outcome)
            _check_outcome(self.pool, outcome)
            return int(outcome[self._plan.NUM_CHANGED])

    def alias(self, first: int, source: AddressSpace, source_first: int, count: int, *, writable: bool = True) -> None:
        """Map page groups that lie at `source_first` of `source` at `first` of this space as well.

        Raises
        ------
        ValueError
            A target place is taken, a source place is empty, or the spaces have different pools.
        DriverError
            The driver refused; nothing was changed.
        """
        one, other = sorted((self, source), key=id)  # in one order, whoever aliases what
        with one._lock, other._lock, interrupts_held():
            self.check_open()
            source.check_open()
            if source.pool is not self.pool:
                raise ValueError("page groups can be aliased only between address spaces of one pool")
            target_range, source_range = (np.array([[start, count]], np.int64) for start in (first, source_first))
            self._check_ranges(target_range)
            source._check_ranges(source_range)
            if self.count_missing(target_range) != count:
                raise ValueError(f"places {first}..{first + count} already hold page groups; decommit them first")
            if source.count_missing(source_range):
                raise ValueError(f"places {source_first}..{source_first + count} of the source are not all committed")
            outcome = np.zeros(self._plan.OUTCOME_WORDS, np.int64)
            self._plan.alias(
                self.pool.arrays, self.arrays, first, source.arrays, source_first, count, writable, outcome
            )
            _check_outcome(self.pool, outcome)

    def close(self) -> None:
        """Unmap everything and give the addresses back. The device must have finished. A second call does nothing."""
        with self._lock, interrupts_held():
            if not self.closed:
                self.pool.driver.check_process()
                _take_down(self.pool, self.arrays, self.reservation)
                self.pool.disown(self)
                self._finalizer.detach()

    def check_integrity(self) -> None:
        """Compare the table with its count, then the pool's books, while no other thread changes them."""
        if not self.closed and len(self.mapped_page_groups()) != self.num_mapped:
            raise VTensorError(f"{self!r}: the table holds {len(self.mapped_page_groups())} page groups")
        self.pool.check_integrity()

    def _check_ranges(self, ranges: Ranges) -> None:
        if len(ranges) and (ranges.min() < 0 or bool((ranges[:, 0] > self.num_places - ranges[:, 1]).any())):
            raise ValueError(f"a range lies outside the {self.num_places:,} places of {self!r}")


def _check_outcome(pool: PagePool, outcome: npt.NDArray[np.int64]) -> None:
    """Raise the driver's error that a plan's outcome tells of."""
    from vtensor.allocator import plan

    if outcome[plan.CODE]:
        detail, stuck = "nothing was changed", int(outcome[plan.NUM_STUCK])
        if stuck:
            detail = f"undoing failed as well: {stuck} page groups are not where they were"
        pool.driver.check(Call(int(outcome[plan.FAILED_CALL])), int(outcome[plan.CODE]), detail)


def _take_down(pool: PagePool, arrays: SpaceArrays, reservation: Reservation) -> None:
    """Unmap everything and give the addresses back."""
    from vtensor.allocator import plan

    if arrays.header[plan.NUM_MAPPED]:
        outcome = np.zeros(plan.OUTCOME_WORDS, np.int64)
        first, end = int(arrays.header[plan.FIRST_MAPPED]), int(arrays.header[plan.END_MAPPED])
        plan.decommit(pool.arrays, arrays, np.array([[first, end - first]], np.int64), False, outcome)
        _check_outcome(pool, outcome)
    reservation.close()
    pool.count_call(Call.FREE)
    if not pool.closed and not pool.keeps_free_page_groups:
        pool.trim()


def _give_up(pool: PagePool, arrays: SpaceArrays, reservation: Reservation, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked child must not touch the parent's memory
        with interrupts_held():
            _take_down(pool, arrays, reservation)


def out_of_pages(space: AddressSpace, what: str, shortage: Shortage) -> OutOfPagesError:
    """The public error for a shortage that no caller can answer."""
    pool = space.pool
    stats = pool.stats()
    limit = "as much as the device has" if pool.capacity_bytes is None else format_bytes(pool.capacity_bytes)
    return OutOfPagesError(
        f"{what} needs {shortage.page_groups} more page groups of {format_bytes(pool.page_group_bytes)} on "
        f"{pool.driver.device} than can be had: {stats.mapped_page_groups} are mapped, {stats.free_page_groups} free, "
        f"the pool may hold {limit}. Nothing was changed; free something, or give the pool more capacity_bytes"
    )
