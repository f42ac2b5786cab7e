"""A cache that serves for a long time: nothing is left behind, and tables stay as small as they should be."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vtensor as vt
from tests.vtensor.caches import Pattern, close, lengths, make, page, spec, stats
from vtensor.allocator import graveyard

MIB = 1 << 20


# -- decode steps without end -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What the process holds."""

    anonymous_bytes: int  # resident memory that is no cache's
    mappings: int
    open_files: int
    threads: int


def held() -> Held:
    gc.collect()
    graveyard.drain()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Held(
        anonymous_bytes=int(status["RssAnon"].split()[0]) << 10,
        mappings=len(Path("/proc/self/maps").read_bytes().splitlines()),
        open_files=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
    )


class Service:
    """Requests that come, decode a token a step, and go, in a cache that has too little memory for all of them."""

    BATCH, LONGEST = 8, 256

    def __init__(self, cache: vt.KVCacheManager) -> None:
        self.cache = cache
        self.pattern = Pattern(cache)
        self.random = random.Random(0)
        self.counts = np.zeros(self.BATCH, np.int64)
        self.ends: dict[int, int] = {}  # of each request: the length at which it ends
        self.longest: dict[int, int] = {}
        self.salts: dict[int, int] = {}
        self.num_steps = self.num_short = self.num_requests = 0

    def step(self) -> None:
        random_, counts = self.random, self.counts
        if len(self.ends) < self.BATCH and random_.random() < 0.05:
            prompt = random_.randint(1, 100)
            reqid = self.cache.alloc_reqid(random_.choice([None, prompt]))
            self.num_requests += 1
            self.ends[reqid], self.salts[reqid] = random_.randint(prompt, self.LONGEST), self.num_requests
            counts[reqid] = self.longest[reqid] = prompt
        before = counts.copy()
        for reqid in self.ends:
            grown = 1 if random_.random() < 0.95 else random_.randint(-4, 4)  # drafts, and what is taken back of them
            counts[reqid] = min(max(counts[reqid] + grown, 1, self.longest[reqid] - 4), self.ends[reqid])
            self.longest[reqid] = max(self.longest[reqid], int(counts[reqid]))
        self.num_steps += 1
        if not self.cache.step(counts):
            self.num_short += 1
            counts[:] = before
            self.free(max(self.ends, key=lambda reqid: counts[reqid]))
            return
        if self.num_steps % 97 == 0 and self.ends:
            self.look(random_.choice(list(self.ends)))
        for reqid in [reqid for reqid, end in self.ends.items() if counts[reqid] == end]:
            self.free(reqid)

    def look(self, reqid: int) -> None:
        """The last token is there to be written, and stays so."""
        count = int(self.counts[reqid])
        self.pattern.write(reqid, count - 1, count, self.salts[reqid])
        rows = self.pattern.rows(0, 0, reqid, count - 1, count)
        assert (rows == self.pattern.numbers(0, 0, reqid, count - 1, count, self.salts[reqid])).all()

    def free(self, reqid: int) -> None:
        self.cache.free_reqid(reqid)
        self.counts[reqid] = 0
        del self.ends[reqid]

    def pause(self) -> Held:
        """End every request and give all of their memory back; what is still held."""
        for reqid in list(self.ends):
            self.free(reqid)
        stats(self.cache)
        self.cache.pool.ask_holders(1 << 40)
        assert stats(self.cache).mapped_page_groups == 0
        self.cache.check_integrity()
        return held()


def serve(num_steps: int, num_pauses: int, allowance_bytes: int) -> None:
    layers = spec("cpu", 8), spec("cpu", 8, window=40), spec("cpu", 12)
    options: dict[str, Any] = {
        "max_batch_size": Service.BATCH,
        "max_context_tokens": Service.LONGEST,
        "capacity": 250,
        "size_classes": 5,
        "lookahead_tokens": 4,
        "eager_slot": True,
        "low_watermark": 0.1,
        "high_watermark": 0.15,
    }
    with make("cpu", *layers, **options) as cache:
        service, pauses = Service(cache), []
        for number in range(1, num_steps + 1):
            service.step()
            if number % (num_steps // num_pauses) == 0:
                pauses.append(service.pause())
        found = cache.stats()
        for what in ("num_mapped_ahead", "num_reclaimed", "num_passed"):
            assert getattr(found, what) > 0, what  # all of it has been at work
        assert service.num_short > num_steps // 5000
        assert service.num_requests > num_steps // 200
        assert found.num_failed_releases == 0
    first, last = pauses[1], pauses[-1]  # until the first one, things warm up
    assert max(one.anonymous_bytes for one in pauses) <= first.anonymous_bytes + allowance_bytes, pauses
    assert last.mappings <= first.mappings + 4, pauses
    assert (last.open_files, last.threads) == (first.open_files, first.threads), pauses


def test_fifty_thousand_steps_leave_nothing_behind() -> None:
    serve(50_000, num_pauses=10, allowance_bytes=MIB)


@pytest.mark.slow
def test_a_million_steps_leave_nothing_behind() -> None:
    serve(1_000_000, num_pauses=20, allowance_bytes=MIB)


# -- the size of tables -----------------------------------------------------------------------------------------------


def resident_bytes(array: np.ndarray[Any, Any]) -> int:
    """Memory behind an array, counted in the system's pages."""
    libc, size = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    start = array.ctypes.data // size * size
    number = -(-(array.ctypes.data + array.nbytes - start) // size)
    found = np.zeros(number, np.uint8)
    code = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(number * size), ctypes.c_void_p(found.ctypes.data))
    assert code == 0, os.strerror(ctypes.get_errno())
    return int((found & 1).sum()) * size


def tables_of(cache: vt.KVCacheManager) -> int:
    """Memory of all that grows with page groups: the pool's tables and the cache's."""
    pool, space = cache.pool.arrays, cache._region.space.arrays
    arrays = [pool.handles, pool.num_mappings, pool.content, pool.free, pool.vacant, space.table, space.access]
    return sum(resident_bytes(array) for array in arrays)


@pytest.mark.parametrize("size_classes", [1, 6])
def test_tables_take_at_most_64_bytes_a_page_group(size_classes: int) -> None:
    # 128 MiB of 4 KiB: mapped in the largest handles and in the smallest, given back to the pool and to the system.
    num_page_groups = 128 * MIB // page("cpu")
    size = page("cpu")
    pool = vt.PagePool(
        "cpu",
        capacity_bytes=num_page_groups * size,
        page_group_bytes=size,
        max_size_class_bytes=size << size_classes - 1,
    )
    shape: dict[str, Any] = {"pool": pool, "max_batch_size": 1, "max_context_tokens": num_page_groups}
    for window in (None, num_page_groups, None):  # what a window may pass is mapped in the smallest handles
        with make("cpu", spec("cpu", 1, window=window), **shape) as cache:
            cache.alloc_reqid()
            for tokens in (1000, num_page_groups):
                assert cache.step(lengths(cache, {0: tokens}))
            assert stats(cache).mapped_page_groups == num_page_groups
            assert tables_of(cache) <= 64 * num_page_groups + MIB // 2
        gc.collect()
        graveyard.drain()
        pool.trim()
    close(pool)
