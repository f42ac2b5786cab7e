"""AddressSpace: one reservation and the table of what is mapped in it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vtensor.allocator.driver import Call
from vtensor.allocator.mapper import Job, JobWords, StandingJob, finish_mapper, get_mapper
from vtensor.allocator.page_pool import PagePool
from vtensor.allocator.reservation import Reservation
from vtensor.allocator.words import (
    CLASS_SHIFT,
    CODE,
    EMPTY,
    END_MAPPED,
    FAILED_CALL,
    FIRST_MAPPED,
    HOLES_READABLE,
    IS_ASLEEP,
    LARGEST_SIZE_CLASS,
    NUM_AHEAD,
    NUM_CHANGED,
    NUM_MAPPED,
    NUM_SHOWN,
    NUM_STUCK,
    OUTCOME_WORDS,
    PARTIAL,
    RANGE_WORDS,
    SEGMENT_PLACES,
    SHARED,
    SHORTFALL,
    SHOWS_ZEROS,
    SPACE_HEADER_WORDS,
    TAKEN,
    ZEROS,
)
from vtensor.errors import ClosedError, OutOfPagesError, ReservationError, VTensorError
from vtensor.interrupts import interrupts_held
from vtensor.units import format_bytes, round_up
from vtensor.unpicklable import Unpicklable

if TYPE_CHECKING:
    from vtensor.allocator.plan import SpaceArrays

__all__ = ["AddressSpace", "Shortage", "check_outcome", "out_of_pages"]

Ranges = npt.NDArray[np.int64]
Outcome = npt.NDArray[np.int64]


class Shortage(Exception):
    """A commit needed more page groups than can be had; nothing was changed. Callers turn it into their own answer."""

    def __init__(self, page_groups: int) -> None:
        super().__init__(page_groups)
        self.page_groups = page_groups


class AddressSpace(Unpicklable):
    """A reservation cut into places of one page group each, and which page group lies where.

    ::

        reservation   | place 0 | place 1 | place 2 | place 3 | ...
        table         |    8    |    0    |    9    |   -10   | ...    0: nothing  n: page group n - 1  -n: mapped ahead

    It owns its mappings: whatever it maps, it unmaps. Calls that change it may come from any thread; what can wait, or
    may be of use later, is done by the device's `Mapper`.

    Parameters
    ----------
    pool : PagePool
        Where its page groups come from and go to.
    size_bytes : int
        Rounded up to the pool's page group.
    readable_holes : bool
        Have places without memory read as zeros, where the driver can do that.

    Raises
    ------
    ReservationError
        No such range of addresses is free.
    """

    def __init__(self, pool: PagePool, size_bytes: int, *, readable_holes: bool = False) -> None:
        pool.check_open()
        from vtensor.allocator import plan
        from vtensor.allocator.native import sparse_array

        self.pool = pool
        self.page_group_bytes = pool.page_group_bytes
        size_bytes = round_up(size_bytes, pool.page_group_bytes)
        self.has_readable_holes = readable_holes and pool.driver.has_readable_holes
        self.reservation = Reservation(pool.driver, size_bytes, readable_holes=self.has_readable_holes)
        self.num_places = self.reservation.size_bytes // pool.page_group_bytes
        self.sleeper: npt.NDArray[np.int64] | None = None  # header of the arena that takes memory away for a while
        self._plan: Any = plan
        self._lock = threading.RLock()
        try:
            self.arrays = plan.SpaceArrays(
                header=np.zeros(SPACE_HEADER_WORDS, np.int64),
                table=sparse_array(self.num_places, np.int32),
                access=sparse_array(self.num_places, np.int8),
                base=self.reservation.base,
            )
            self.arrays.header[FIRST_MAPPED] = self.num_places
            self.arrays.header[HOLES_READABLE] = self.has_readable_holes
            if not _has_loaded:
                _load_code(plan, pool, self.arrays, self.words)
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
        self._jobs: list[Job] = []  # that the mapper may still be at
        self._num_asked_ahead = 0
        self._finalizer = weakref.finalize(self, _give_up, pool, self.arrays, self.reservation, self._jobs, os.getpid())
        self._finalizer.atexit = False

    @cached_property
    def words(self) -> npt.NDArray[np.int64]:
        """Its pool's arrays and its own, `native.packed` one after the other, for compiled code."""
        from vtensor.allocator.native import packed

        return np.concatenate([packed(self.pool.arrays), packed(self.arrays)])

    @cached_property
    def _job_words(self) -> JobWords:
        return JobWords(self.pool, self.arrays, self.words)

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
        return int(self.arrays.header[NUM_MAPPED])

    @property
    def num_asleep(self) -> int:
        """Page groups that were taken away for a while, and will be wanted back."""
        return 0 if self.sleeper is None or not self.sleeper[IS_ASLEEP] else int(self.sleeper[SEGMENT_PLACES])

    @property
    def num_ahead(self) -> int:
        """Of those, the ones that are not in service yet."""
        return int(self.arrays.header[NUM_AHEAD])

    @property
    def committed_bytes(self) -> int:
        """Bytes with memory behind them; an alias counts at each of its places, but not one of zeros."""
        return (self.num_mapped - self.num_shown) * self.page_group_bytes

    @property
    def num_shown(self) -> int:
        """Places that show zeros, and have no memory of their own."""
        return int(self.arrays.header[NUM_SHOWN])

    def check_open(self) -> None:
        """Raise `ClosedError` or `ForkedError` where the space can no longer serve."""
        if self.closed:
            raise ClosedError(f"these addresses of {self.pool.driver.device} were given back")
        self.pool.check_open()

    def mapped_page_groups(self) -> npt.NDArray[np.int32]:
        """Page groups in the order of their places, also of those mapped ahead; one that is mapped twice comes twice.

        Reads the whole table.
        """
        if self.num_mapped == 0:
            return np.empty(0, np.int32)
        header = self.arrays.header
        table = self.arrays.table[int(header[FIRST_MAPPED]) : int(header[END_MAPPED])]
        return np.asarray(np.abs(table[table != 0]) - 1, np.int32)

    def mapped_runs(self, ranges: Ranges) -> list[tuple[int, int]]:
        """Maximal runs of mapped places within each range: (first place, number)."""
        table = self.arrays.table
        return _runs(ranges, lambda first, end: table[first:end] != 0)

    def held_runs(self) -> Ranges:
        """Maximal runs of places that have memory of their own, in service: rows of (first place, number), ascending.

        Waits for a commit that another thread is at, as `count_missing`.
        """
        with self._reading():
            runs: Ranges = self._plan.held_runs(self.arrays)
        return runs

    def have_memory(self, first: int, end: int) -> npt.NDArray[np.bool_]:
        """For each place from `first` to `end`, whether it has memory of its own, in service."""
        return np.asarray((self.arrays.table[first:end] > 0) & (self.arrays.access[first:end] != SHOWS_ZEROS))

    def _reading(self) -> AbstractContextManager[object]:
        """The time to read the table, while no other thread commits.

        A forked child reads its copy, and not behind a lock that a thread of the parent may have held.
        """
        return self._lock if self.pool.driver.is_own_process else nullcontext()

    @property
    def is_full(self) -> bool:
        """Whether `count_missing` of all places would be 0."""
        if self.num_mapped != self.num_places:
            return False
        with self._reading():
            return self.num_mapped == self.num_places and self.num_ahead == self.num_shown == 0

    def count_missing(self, ranges: Ranges, *, with_shown: bool = True) -> int:
        """Places that are not in service in ranges of places, rows of (first, count); or that show zeros.

        Waits for a commit that another thread is at: a place counts as mapped once it is also zeroed, in the order of
        that commit's stream.
        """
        with self._reading():
            return int(self._plan.count_missing_by_words(self.words, ranges, with_shown))

    def commit(
        self,
        ranges: Ranges,
        *,
        content: int = 0,
        stream: int = 0,
        on_mapped: Callable[[Outcome], None] | None = None,
    ) -> int:
        """Put a page group below every empty place of the ranges: all of them, or none.

        Parameters
        ----------
        ranges : ndarray of int64, shape [n, 2] or [n, 4]
            Rows of (first place, number of places), not overlapping; with four columns also the mark of the content and
            the largest size class of the handles (0: one page group), for each range its own.
        content : int
            The caller's mark (`PagePool.new_content`); page groups that last held something else are zeroed.
        stream : int
            Raw handle of the stream in whose order they are zeroed.
        on_mapped : callable, optional
            Called if anything was mapped, before any other thread sees it, with the outcome (see `words`). Places that
            had been mapped ahead were zeroed in the order of the mapper's stream.

        Returns
        -------
        int
            Number of page groups that came into service: mapped now, or ahead.

        Raises
        ------
        Shortage
            Not enough page groups; nothing was changed.
        ValueError
            A place that was withdrawn is an alias, or a place shows zeros. Or there is no mark: data of nobody could be
            shown to everybody.
        DriverError
            Another failure of the driver; nothing was changed, unless the message says so. What had been mapped ahead
            may have to be mapped again.
        """
        self.pool.driver.check_process()
        with self._lock, interrupts_held():
            self.check_open()
            self._check_ranges(ranges)
            if content <= ZEROS and ranges.shape[1] != RANGE_WORDS:
                raise ValueError(f"content={content} must be a mark of the pool's (see PagePool.new_content)")
            outcome = np.zeros(OUTCOME_WORDS, np.int64)
            rows = _as_rows(ranges, content)
            driver = self.pool.driver
            with driver.current_context():
                runs = self._plan.commit_by_words(self.words, rows, stream, outcome)
            if outcome[SHORTFALL]:
                self.check_open()  # a pool that was closed meanwhile has nothing any more
                raise Shortage(int(outcome[SHORTFALL]))
            if outcome[CODE] == SHARED:
                raise ValueError(
                    f"a place of {self!r} holds an alias that was withdrawn, or shows zeros, and cannot come into "
                    "service; decommit it first"
                )
            try:
                check_outcome(self.pool, outcome)
                if on_mapped is not None and len(runs):
                    on_mapped(outcome)
            except BaseException:  # what may hold somebody else's data must not stay, not even a part of a handle
                if len(runs):
                    self._plan.withdraw(self.pool.arrays, self.arrays, runs)
                    driver.finish(stream)
                    finish_mapper(driver)
                    self.decommit(runs, forget_content=True)
                raise
            return int(outcome[NUM_CHANGED])

    def commit_ahead(self, ranges: Ranges) -> Job:
        """Have the mapper put page groups below the empty places of the ranges, out of service until a `commit`.

        Range by range, as long as there is memory. They are zeroed in the order of the mapper's stream, for which who
        decommits them has to wait.

        Parameters
        ----------
        ranges : ndarray of int64, shape [n, 4]
            As for `commit`.
        """
        self.pool.driver.check_process()
        with self._lock, interrupts_held():  # a job that is not noted would not be waited for
            self.check_open()
            self._check_ranges(ranges)
            self._num_asked_ahead += 1
            return self._note(get_mapper(self.pool.driver).map_ahead(self._job_words, _as_rows(ranges)))

    @property
    def num_asked_ahead(self) -> int:
        """How often something was asked for ahead, also by standing jobs."""
        return self._num_asked_ahead + sum(job.num_times for job in list(self._jobs) if isinstance(job, StandingJob))

    def standing_job(self, num_ranges: int) -> StandingJob:
        """A job with which compiled code has mapped ahead, as `commit_ahead` does, up to so many ranges at a time."""
        self.pool.driver.check_process()
        with self._lock, interrupts_held():
            self.check_open()
            job = get_mapper(self.pool.driver).standing_job(self._job_words, num_ranges)
            self._jobs.append(job)  # for as long as the addresses live
            return job

    def show_zeros(self, ranges: Ranges, *, stream: int = 0) -> int:
        """Have empty places in the ranges read as zeros, by read-only aliases of one page group that the pool holds.

        They are in service for who reads only. Before a commit puts memory there, decommit them (`shown_ranges`), once
        the device has finished with them.

        Parameters
        ----------
        ranges : ndarray of int64, shape [n, 2]
            As for `commit`.
        stream : int
            Raw handle of a stream that may be used to zero that page group, and waited for.

        Returns
        -------
        int
            Number of places that were mapped.

        Raises
        ------
        Shortage
            The device has no memory left for the zeros.
        DriverError
            The driver refused. Some of the places may show zeros.
        """
        self.pool.driver.check_process()
        with self._lock, interrupts_held():
            self.check_open()
            self._check_ranges(ranges)
            outcome = np.zeros(OUTCOME_WORDS, np.int64)
            while not self._plan.show_zeros(self.pool.arrays, self.arrays, _as_rows(ranges), outcome):
                self._make_zeros(stream)
            check_outcome(self.pool, outcome)
            return int(outcome[NUM_CHANGED])

    def _make_zeros(self, stream: int) -> None:
        """Have the pool hold a page group of zeros, on top of its capacity."""
        pool, space = self.pool, AddressSpace(self.pool, self.page_group_bytes)
        try:
            self._plan.widen(pool.arrays, 1)
            try:
                space.commit(np.array([[0, 1]], np.int64), content=pool.new_content(), stream=stream)
                pool.driver.finish(stream)  # so that every other stream finds it zeroed
            except BaseException:
                self._plan.widen(pool.arrays, -1)
                raise
            self._plan.hold_zeros(pool.arrays, space.arrays)
        finally:
            space.close()

    def shown_ranges(self, ranges: Ranges) -> Ranges:
        """Maximal runs of places that show zeros within each of the ranges, as ranges."""
        access = self.arrays.access
        runs = _runs(ranges, lambda first, end: access[first:end] == SHOWS_ZEROS)
        return np.array(runs, np.int64).reshape(-1, 2)

    def withdraw(self, ranges: Ranges) -> None:
        """Take places in ranges out of service, as if they were mapped ahead only."""
        self.pool.driver.check_process()
        with self._lock:
            self.check_open()
            self._check_ranges(ranges)
            self._plan.withdraw(self.pool.arrays, self.arrays, ranges)

    def decommit_later(self, ranges: Ranges, *, forget_content: bool) -> Job:
        """Have the mapper decommit ranges, each by itself, with which the device has finished."""
        self.pool.driver.check_process()
        with self._lock, interrupts_held():
            self.check_open()
            self._check_ranges(ranges)
            rows = _as_rows(ranges)
            return self._note(get_mapper(self.pool.driver).unmap(self._job_words, rows, forget_content=forget_content))

    def _note(self, job: Job) -> Job:
        self._jobs.append(job)
        _forget_ended(self._jobs)
        return job

    @property
    def is_settled(self) -> bool:
        """Whether the mapper is at nothing of this space."""
        return all(job.is_done for job in list(self._jobs))

    def settle(self, *, cancel: bool = False) -> None:
        """Wait until the mapper is at nothing of this space; `cancel` has it leave undone what it has not begun.

        Raises
        ------
        ForkedError
            In a forked child, where no mapper ever comes to what the parent asked for.
        """
        self.pool.driver.check_process()
        _end_jobs(self._jobs, cancel=cancel)

    def decommit(self, ranges: Ranges, *, forget_content: bool) -> int:
        """Take away every page group in the ranges. The device must have finished with them.

        Parameters
        ----------
        ranges : ndarray of int64, shape [n, 2]
            As for `commit`. Handles that lie in a range in part only are left alone.
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
        self.pool.driver.check_process()
        with self._lock, interrupts_held():
            self.check_open()
            self._check_ranges(ranges)
            outcome = np.zeros(OUTCOME_WORDS, np.int64)
            self._plan.decommit(self.pool.arrays, self.arrays, _as_rows(ranges), forget_content, outcome)
            check_outcome(self.pool, outcome)
            return int(outcome[NUM_CHANGED])

    def alias(self, first: int, source: AddressSpace, source_first: int, count: int, *, writable: bool = True) -> None:
        """Map page groups that lie at `source_first` of `source` at `first` of this space as well.

        Raises
        ------
        ValueError
            A target place is taken, a source place is empty, the spaces have different pools, or the source range cuts
            through a handle.
        DriverError
            The driver refused; nothing was changed.
        """
        self.pool.driver.check_process()
        one, other = sorted((self, source), key=id)  # in one order, whoever aliases what
        with one._lock, other._lock, interrupts_held():
            self.check_open()
            source.check_open()
            if source.pool is not self.pool:
                raise ValueError("page groups can be aliased only between address spaces of one pool")
            target_range, source_range = (np.array([[start, count]], np.int64) for start in (first, source_first))
            self._check_ranges(target_range)
            source._check_ranges(source_range)
            outcome = np.zeros(OUTCOME_WORDS, np.int64)
            self._plan.alias(
                self.pool.arrays, self.arrays, first, source.arrays, source_first, count, writable, outcome
            )
            if outcome[CODE] == TAKEN:
                raise ValueError(f"places {first}..{first + count} already hold page groups; decommit them first")
            if outcome[CODE] == EMPTY:
                raise ValueError(f"places {source_first}..{source_first + count} of the source are not all committed")
            if outcome[CODE] == PARTIAL:
                raise ValueError(
                    f"places {source_first}..{source_first + count} of the source hold a handle of several page groups "
                    "in part; alias the whole of it, or give the pool a smaller max_size_class_bytes"
                )
            check_outcome(self.pool, outcome)

    def close(self) -> None:
        """Unmap everything and give the addresses back. The device must have finished. A second call does nothing."""
        if not self.closed:
            self.pool.driver.check_process()
        with self._lock, interrupts_held():
            if not self.closed:
                _take_down(self.pool, self.arrays, self.reservation, self._jobs)
                self.pool.disown(self)
                self._finalizer.detach()

    def check_integrity(self) -> None:
        """Compare the table with its count, then the pool's books, while no other thread changes them."""
        self.settle()
        if not self.closed:
            held, ahead = int(np.count_nonzero(self.arrays.table)), int(np.count_nonzero(self.arrays.table < 0))
            if held != self.num_mapped or ahead != self.num_ahead:
                raise VTensorError(f"{self!r}: the table holds {held} page groups, {ahead} of them ahead")
            if self._has_torn_handle():
                raise VTensorError(f"{self!r}: the table holds a handle that is not in one piece")
        self.pool.check_integrity()

    def _has_torn_handle(self) -> bool:
        header, shift = self.arrays.header, self.pool.arrays.constants[CLASS_SHIFT]
        groups = np.abs(self.arrays.table[int(header[FIRST_MAPPED]) : int(header[END_MAPPED])]) - 1
        offsets = np.where(groups >= 0, groups & ((1 << np.maximum(groups >> shift, 0)) - 1), 0)
        follows = np.append(False, groups[1:] == groups[:-1] + 1)[: len(groups)]
        return bool((~follows & (offsets > 0)).any())

    def _check_ranges(self, ranges: Ranges) -> None:
        if not self._plan.are_within(self.num_places, ranges):
            raise ValueError(f"a range lies outside the {self.num_places:,} places of {self!r}")


_has_loaded = False


def _load_code(plan: Any, pool: PagePool, space: Any, words: npt.NDArray[np.int64]) -> None:
    """Load compiled code now, so that nobody waits for it later.

    Where no mapping can be made any more, LLVM could not load what closing needs, and would abort.
    """
    global _has_loaded
    nothing, outcome = _as_rows(np.zeros((0, 2), np.int64)), np.zeros(OUTCOME_WORDS, np.int64)
    with interrupts_held():
        plan.are_within(0, nothing)
        plan.count_missing_by_words(words, nothing, False)
        plan.commit_by_words(words, nothing, 0, outcome)
        plan.withdraw(pool.arrays, space, nothing)
        plan.decommit(pool.arrays, space, nothing, False, outcome)
    _has_loaded = True


def check_outcome(pool: PagePool, outcome: npt.NDArray[np.int64]) -> None:
    """Raise the driver's error that a plan's outcome tells of."""
    if outcome[CODE]:
        detail, stuck = "nothing was changed", int(outcome[NUM_STUCK])
        if stuck:
            detail = f"undoing failed as well: {stuck} page groups are not where they were"
        pool.driver.check(Call(int(outcome[FAILED_CALL])), int(outcome[CODE]), detail)


def _runs(ranges: Ranges, are_meant: Callable[[int, int], npt.NDArray[np.bool_]]) -> list[tuple[int, int]]:
    """Maximal runs within each range of the places that are meant: (first place, number)."""
    runs = []
    for first, count in ranges[:, :2].tolist():
        places = np.flatnonzero(are_meant(first, first + count)) + first
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            if len(run):
                runs.append((int(run[0]), len(run)))
    return runs


def _as_rows(ranges: Ranges, content: int = 0) -> Ranges:
    """Ranges as compiled plans take them: with a mark and a size class each."""
    if ranges.shape[1] == RANGE_WORDS:
        return ranges
    if len(ranges) == 1:  # the usual case, in half the time
        return np.array([[*ranges[0].tolist(), content, LARGEST_SIZE_CLASS]], np.int64)
    rows = np.empty((len(ranges), RANGE_WORDS), np.int64)
    rows[:, :2], rows[:, 2], rows[:, 3] = ranges, content, LARGEST_SIZE_CLASS
    return rows


def _end_jobs(jobs: list[Job], *, cancel: bool) -> None:
    """Wait for jobs of the mapper, and forget them."""
    for job in list(jobs) if cancel else ():
        job.cancel()  # all, before the first has ended and the next one begins
    for job in list(jobs):
        job.wait()
    _forget_ended(jobs)


def _forget_ended(jobs: list[Job]) -> None:
    """Take jobs that have ended out of a list, one by one: other threads may add to it, or do the same, meanwhile."""
    for job in list(jobs):
        if job.is_done and not isinstance(job, StandingJob):
            with suppress(ValueError):
                jobs.remove(job)


def _take_down(pool: PagePool, arrays: SpaceArrays, reservation: Reservation, jobs: list[Job]) -> None:
    """Unmap everything and give the addresses back."""
    from vtensor.allocator import plan

    _end_jobs(jobs, cancel=True)
    for job in jobs:
        if isinstance(job, StandingJob):
            job.retire()
    if arrays.header[NUM_AHEAD]:
        finish_mapper(pool.driver)  # it may still be zeroing
    if arrays.header[NUM_MAPPED]:
        outcome = np.zeros(OUTCOME_WORDS, np.int64)
        first, end = int(arrays.header[FIRST_MAPPED]), int(arrays.header[END_MAPPED])
        plan.decommit(pool.arrays, arrays, _as_rows(np.array([[first, end - first]], np.int64)), False, outcome)
        check_outcome(pool, outcome)
    reservation.close()
    pool.count_call(Call.FREE)
    pool.trim_unless_kept()


def _give_up(pool: PagePool, arrays: SpaceArrays, reservation: Reservation, jobs: list[Job], process_id: int) -> None:
    if os.getpid() == process_id:  # a forked child must not touch the parent's memory
        with interrupts_held():
            _take_down(pool, arrays, reservation, jobs)


def out_of_pages(space: AddressSpace, what: object, shortage: Shortage) -> OutOfPagesError:
    """The public error for a shortage that no caller can answer."""
    pool = space.pool
    stats = pool.stats()
    missing = format_bytes(shortage.page_groups * pool.page_group_bytes)
    limit, way_out = "as much as the device has", "free something"
    if pool.capacity_bytes is not None:
        limit, way_out = format_bytes(pool.capacity_bytes), "free something, or give the pool more capacity_bytes"
    return OutOfPagesError(
        f"{what} needs {shortage.page_groups} more page groups of {format_bytes(pool.page_group_bytes)} ({missing}) on "
        f"{pool.driver.device} than can be had: {stats.mapped_page_groups} are mapped, {stats.free_page_groups} free, "
        f"the pool may hold {limit}. Nothing was changed; {way_out}"
    )
