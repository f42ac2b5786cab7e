"""LookAhead: what a cache has mapped before anybody asks for it, by the device's mapper."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from vtensor.allocator.mapper import Job, StandingJob
from vtensor.kvcache.slots import SlotState, SlotTable
from vtensor.region import Region

__all__ = ["LookAhead"]

Int64 = npt.NDArray[np.int64]


class LookAhead:
    """Places mapped ahead for running requests, and one spare slot for the next one. Holds the manager's lock.

    Never more than a wish: without memory, or after an error, it is dropped, and counted.

    Parameters
    ----------
    region : Region
        The cache's addresses.
    slots : SlotTable
        Says what may be needed; what was asked for is noted there.
    eager_slot : bool
        Whether to keep a spare slot.
    high_watermark : float
        The part of the memory that a spare slot must leave.

    Attributes
    ----------
    is_spare_due : bool
        Whether `keep_spare` has something to do.
    num_dropped : int
        Ranges that were asked for and not mapped, so far.
    """

    def __init__(self, region: Region, slots: SlotTable, *, eager_slot: bool, high_watermark: float) -> None:
        self._region = region
        self._slots = slots
        self._eager_slot = eager_slot
        self._high_watermark = high_watermark
        self._jobs: deque[Job] = deque()
        self._standing: StandingJob | None = None
        # What `plan.step` takes, so that it can ask for itself.
        self.job_words = self.queue = np.zeros(0, np.int64)
        self.is_spare_due = False
        self._has_dropped = False
        self._num_mapped = 0
        self.num_dropped = 0

    def ask(self, seq_lens: Int64) -> None:
        """Have mapped what the slots of a step may need in the next one. From then on, `plan.step` can."""
        self.collect()
        if self._standing is None:
            standing = self._region.space.standing_job(len(seq_lens) * self._slots.rows_a_slot)
            self._standing, self.job_words, self.queue = standing, standing.words, standing.queue
        self._submit(self._slots.plan.ahead_ranges(self._slots.arrays, seq_lens))

    def look_for_spare(self) -> None:
        """Note that a request took a slot, or left one: there may be no spare one any more, or room for one."""
        self.is_spare_due = self._eager_slot

    def keep_spare(self) -> None:
        """If it is due: see to it that some slot is ready for a prompt as the last ones were."""
        if not self.is_spare_due:
            return
        slots = self._slots
        tokens = slots.median_prompt()
        if tokens == 0:
            return
        self.is_spare_due = False
        self.collect()
        slot = slots.for_spare()
        if slot is None or slots.covers(slots.in_state(SlotState.DEFERRED), tokens).any():
            return
        wanted = int(slots.plan.spare_ranges(slots.arrays, slot, tokens, False)[:, 1].sum())
        wanted += sum(job.num_wanted for job in self._all_jobs())
        available, total = self._region.space.pool.headroom()
        if available - wanted >= self._high_watermark * total:
            self._submit(slots.spare(slot, tokens))

    @property
    def num_mapped(self) -> int:
        """Page groups that were mapped ahead so far, needed or not."""
        self.collect()
        return self._num_mapped + (self._standing.num_page_groups if self._standing is not None else 0)

    def _all_jobs(self) -> list[Job]:
        return [*self._jobs, self._standing] if self._standing is not None else list(self._jobs)

    def collect(self) -> None:
        """Take note of what has been done, and of a spare slot that could not be had."""
        if self._standing is not None:
            self.num_dropped += self._standing.forgive()
        while self._jobs and self._jobs[0].is_done:
            job = self._jobs.popleft()
            self._num_mapped += job.num_page_groups
            self.num_dropped += len(job.ranges) - job.num_done
            self._has_dropped |= job.num_done < len(job.ranges)
        if self._has_dropped and not self._jobs:
            self._slots.check_spare(self._region.space.arrays)
            self._has_dropped = False

    def _submit(self, ranges: Int64) -> None:
        if len(ranges):
            self._jobs.append(self._region.space.commit_ahead(ranges))
