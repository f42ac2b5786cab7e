"""Mapper: one thread a device that makes driver calls ahead of need, and never takes the GIL.

Who needs memory at once maps it in its own thread. What can wait is handed to the mapper as a **job**: places to map
ahead (`Mapper.map_ahead`), or handles to take away with which the device has finished (`Mapper.unmap`). Nobody waits
for a job but those who take away what it works on. A job that fails has no consequences but its own: what it was to do
is done by whoever comes to need it, and an error that lasts is met there.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vtensor.allocator.driver import Driver
from vtensor.allocator.words import CODE, RANGE_WORDS, SHORTFALL
from vtensor.errors import DriverError

if TYPE_CHECKING:
    from vtensor.allocator.page_pool import PagePool
    from vtensor.allocator.plan import SpaceArrays

__all__ = ["Job", "JobWords", "Mapper", "StandingJob", "finish_mapper", "get_mapper"]

Int64 = npt.NDArray[np.int64]


class JobWords:
    """What all jobs over one address space tell the mapper of it: where its arrays and those of its pool lie."""

    def __init__(self, pool: PagePool, space: SpaceArrays, words: Int64) -> None:
        from vtensor.allocator import mapper_native as native

        self.keeps_alive = pool, space
        self.words = np.zeros(native.JOB_WORDS, np.int64)
        self.words[native.POOL :] = words  # of the pool and the space, `native.packed` one after the other


class Job:
    """Work handed to a mapper.

    Attributes
    ----------
    ranges : ndarray of int64, shape [n, 4]
        What it works on, as rows of `plan.commit`; of a standing job the first ones.
    """

    def __init__(self, mapper: Mapper, kind: int, template: JobWords, ranges: Int64) -> None:
        native = mapper.native
        self._mapper = mapper
        self._template: JobWords | None = template  # let go at the end: it keeps the pool alive
        self._is_done = False
        self.ranges = np.array(ranges, order="C")  # a copy, which nobody changes meanwhile
        self.words = template.words.copy()
        self.words[native.KIND] = kind
        self.words[native.RANGES], self.words[native.NUM_RANGES] = self.ranges.ctypes.data, len(self.ranges)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, by whatever way."""
        # A flag that is up is looked at again under the mutex, so that the rest can be read, too.
        if self._is_done:
            return True
        native = self._mapper.native
        if not self.words[native.IS_DONE] or not native.is_done(self._mapper.queue, self.words):
            return False
        self._note_end()
        return True

    def _note_end(self) -> None:
        self._is_done, self._template = True, None

    @property
    def num_done(self) -> int:
        """Of its ranges, those that are done; all of them only if nothing failed."""
        return int(self.words[self._mapper.native.NUM_DONE])

    @property
    def num_page_groups(self) -> int:
        """Page groups that it mapped or unmapped."""
        return int(self.words[self._mapper.native.NUM_PAGE_GROUPS])

    @property
    def num_wanted(self) -> int:
        """Page groups in the ranges that it has not done, 0 once it has ended."""
        native = self._mapper.native
        num_ranges = int(self.words[native.NUM_RANGES])
        return 0 if self.is_done else int(self.ranges[self.num_done : num_ranges, 1].sum())

    @property
    def has_failed(self) -> bool:
        """Whether memory was short, or a call failed."""
        native = self._mapper.native
        return bool(self.words[native.OUTCOME + SHORTFALL] or self.words[native.OUTCOME + CODE])

    def cancel(self) -> None:
        """Have it end with the range that is under way. Does not wait."""
        self._mapper.native.cancel(self._mapper.queue, self.words)

    def wait(self) -> None:
        """Wait until it has ended."""
        self._mapper.native.wait(self._mapper.queue, self.words)
        self._note_end()


class StandingJob(Job):
    """A job that compiled code hands over again and again, without anything to be made or noted by Python's.

    It maps ahead what stands in the first rows of `ranges`. See `mapper_native.submit_again`.
    """

    def __init__(self, mapper: Mapper, template: JobWords, num_ranges: int) -> None:
        native = mapper.native
        super().__init__(mapper, native.MAP_AHEAD, template, np.zeros((num_ranges, RANGE_WORDS), np.int64))
        self.words[native.IS_DONE], self.words[native.NUM_RANGES] = 1, 0

    def _note_end(self) -> None:
        """It will be handed over again."""

    @property
    def queue(self) -> Int64:
        """Where compiled code hands it over."""
        return self._mapper.queue

    @property
    def num_page_groups(self) -> int:
        """Page groups that it mapped, all times together."""
        return super().num_page_groups + int(self.words[self._mapper.native.NUM_BEFORE])

    @property
    def num_times(self) -> int:
        """How often it was handed over."""
        return int(self.words[self._mapper.native.NUM_TIMES])

    def retire(self) -> None:
        """Let it never be handed over again: its addresses go."""
        self.words[self._mapper.native.NUM_RANGES] = -1

    def forgive(self) -> int:
        """If it ended early, let it be handed over again all the same; how many of its ranges it did not do."""
        native = self._mapper.native
        if not self.is_done:
            return 0
        dropped = int(self.words[native.NUM_RANGES]) - self.num_done
        self.words[native.NUM_RANGES] = self.num_done
        return dropped


class Mapper:
    """The thread and its ring of jobs. One a device: use `get_mapper`.

    It lives as long as the process, works in the device's context, and no graph capture minds what it does.
    """

    def __init__(self, driver: Driver) -> None:
        from vtensor.allocator import mapper_native

        self.native: Any = mapper_native
        self.queue = np.zeros(mapper_native.QUEUE_WORDS, np.int64)
        self.stream = driver.new_stream()
        self._jobs: list[Job] = []  # not yet known to have ended: the thread has their addresses only
        self._lock = threading.RLock()
        self._driver = driver
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"vtensor mapper {driver.device}", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise DriverError("a mapper's thread", "did not start", repr(self._error)) from self._error
        # The code that it runs must not be unloaded under it.
        atexit.register(self._stop, os.getpid())
        job = np.zeros(mapper_native.JOB_WORDS, np.int64)  # nothing, but it loads all that is compiled
        mapper_native.submit(self.queue, job)
        mapper_native.cancel(self.queue, job)
        mapper_native.wait(self.queue, job)
        mapper_native.is_done(self.queue, job)

    def _run(self) -> None:
        try:
            with self._driver.background_thread():
                self._started.set()
                self.native.serve(self.queue)
        except BaseException as error:  # nobody must wait for a thread that is no more
            self._error = error
            self.native.stop(self.queue)
            self._started.set()
            with suppress(BaseException):
                self.native.serve(self.queue)  # ends what is queued

    def _stop(self, process_id: int) -> None:
        if os.getpid() == process_id:
            self.native.stop(self.queue)
            self._thread.join()

    def map_ahead(self, template: JobWords, ranges: Int64) -> Job:
        """Map the empty places of some ranges, each range by itself, and zero them in the order of `stream`."""
        job = Job(self, self.native.MAP_AHEAD, template, ranges)
        job.words[self.native.STREAM] = self.stream
        return self._submit(job)

    def standing_job(self, template: JobWords, num_ranges: int) -> StandingJob:
        """A job to `map_ahead` up to so many ranges, for compiled code to hand over. Who asks for it keeps it alive."""
        job = StandingJob(self, template, num_ranges)
        job.words[self.native.STREAM] = self.stream
        return job

    def unmap(self, template: JobWords, ranges: Int64, *, forget_content: bool) -> Job:
        """Take away the handles in some ranges, each range by itself, with which the device has finished."""
        job = Job(self, self.native.UNMAP, template, ranges)
        job.words[self.native.FORGET] = forget_content
        return self._submit(job)

    def _submit(self, job: Job) -> Job:
        with self._lock:
            self._jobs = [known for known in self._jobs if not known.is_done]
            self._jobs.append(job)
        self.native.submit(self.queue, job.words)
        return job


_mappers: dict[str, Mapper] = {}
_lock = threading.Lock()


def get_mapper(driver: Driver) -> Mapper:
    """The mapper of a device, started at its first use."""
    mapper = _mappers.get(driver.device)
    if mapper is None:
        with _lock:
            mapper = _mappers.get(driver.device) or _mappers.setdefault(driver.device, Mapper(driver))
    return mapper


def finish_mapper(driver: Driver) -> None:
    """Wait until the mapper of a device, if it has one, has zeroed what it mapped."""
    mapper = _mappers.get(driver.device)
    if mapper is not None:
        driver.finish(mapper.stream)


def _forget() -> None:
    """In a forked child: the threads stayed with the parent."""
    global _mappers, _lock, _inherited
    _inherited, _mappers, _lock = _mappers, {}, threading.Lock()


_inherited: dict[str, Mapper] = {}
os.register_at_fork(after_in_child=_forget)
