"""Calls that come in the middle of another call to the same cache: from finalizers, and from other caches."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.faults import BROKEN, fail
from tests.vtensor.caches import ACTIVE, FREE, lengths, make, page, spec, states
from vtensor.allocator.driver import Call, Driver


def in_the_middle(cache: vt.KVCacheManager, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have something done once in the middle of the next step, after its memory was committed."""
    commit = cache._memory.commit

    def commit_and_act(*args: Any) -> Any:
        result = commit(*args)
        monkeypatch.setattr(cache._memory, "commit", commit)
        act()
        return result

    monkeypatch.setattr(cache._memory, "commit", commit_and_act)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_request_that_ends_in_the_middle_of_a_step_ends_after_it(
    deferred: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(device, spec(device, 1), deferred_reclamation=deferred) as cache:
        cache.alloc_reqid(), cache.alloc_reqid()
        in_the_middle(cache, lambda: (cache.free_reqid(0), cache.free_reqid(0)), monkeypatch)
        assert cache.step([5, 3, 0, 0])
        assert states(cache)[0] != ACTIVE
        assert cache.residency()[1].seq_len == 3
        cache.check_integrity()
        with pytest.raises(vt.RequestError, match="not active"):
            cache.free_reqid(0)
        assert cache.alloc_reqid() == 0
        assert cache.step([7, 0, 0, 0])


def test_it_ends_as_well_where_the_step_fails(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(device, spec(device, 1)) as cache:
        cache.alloc_reqid()

        def end_and_fail() -> None:
            cache.free_reqid(0)
            raise MemoryError

        in_the_middle(cache, end_and_fail, monkeypatch)
        with pytest.raises(MemoryError):
            cache.step([0 + 5, 0, 0, 0])
        assert states(cache)[0] != ACTIVE


def test_a_cache_that_is_closed_in_the_middle_of_a_step_closes_after_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(device, spec(device, 1))
    cache.alloc_reqid()
    in_the_middle(cache, lambda: (cache.free_reqid(0), cache.close(), cache.close()), monkeypatch)
    assert cache.step([5, 0, 0, 0])
    assert cache.closed
    with pytest.raises(vt.ClosedError):
        cache.step([6, 0, 0, 0])


@pytest.mark.parametrize("what", ["step", "alloc_reqid", "stats", "residency", "check_integrity"])
def test_other_calls_in_the_middle_are_refused(what: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(device, spec(device, 1)) as cache:
        cache.alloc_reqid()
        refused = []

        def call() -> None:
            arguments = ([9, 0, 0, 0],) if what == "step" else ()
            with pytest.raises(vt.VTensorError, match=f"{what} was called in the middle of another call"):
                getattr(cache, what)(*arguments)
            refused.append(what)

        in_the_middle(cache, call, monkeypatch)
        assert cache.step([5, 0, 0, 0])
        assert refused == [what]
        assert cache.residency()[0].seq_len == 5
        getattr(cache, what)(*(([9, 0, 0, 0],) if what == "step" else ()))


def test_a_cache_in_the_middle_of_a_step_gives_nothing_up(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A finalizer steps another cache of the same pool, which then asks this one for memory: same thread, same lock.
    pool = vt.PagePool(device, capacity_bytes=6 * page(device), page_group_bytes=page(device))
    with make(device, spec(device, 1), pool=pool) as one, make(device, spec(device, 1), pool=pool) as other:
        one.alloc_reqid(), one.alloc_reqid(), other.alloc_reqid()
        assert one.step([0, 3, 0, 0])
        one.free_reqid(1)
        asked = []
        in_the_middle(one, lambda: asked.append(other.step([3, 0, 0, 0])), monkeypatch)
        assert one.step([2, 0, 0, 0])
        assert [bool(result) for result in asked] == [False]
        assert other.step([3, 0, 0, 0])
        one.check_integrity()
    pool.close()


@pytest.mark.parametrize("threshold", [3, 7])
@pytest.mark.parametrize("deferred", [False, True])
def test_finalizers_of_requests_come_at_any_time(deferred: bool, threshold: int, device: str) -> None:
    class Request:
        def __init__(self, cache: vt.KVCacheManager) -> None:
            self.slot = cache.alloc_reqid()
            self.cycle = self  # so that only the collector ends it
            weakref.finalize(self, cache.free_reqid, self.slot).atexit = False

    before = gc.get_threshold()
    with make(device, spec(device, 1.5), scrub=True, lookahead_tokens=1, deferred_reclamation=deferred) as cache:
        try:
            gc.set_threshold(threshold)
            for number in range(60):
                request = Request(cache) if FREE in states(cache) or ACTIVE not in states(cache) else None
                del request
                active = [slot for slot, state in enumerate(states(cache)) if state == ACTIVE]
                with suppress(vt.RequestError):  # one has ended meanwhile
                    cache.step(lengths(cache, {slot: number % 64 + 1 for slot in active}))
                for slot in cache.residency():
                    assert slot.state == ACTIVE or slot.seq_len == 0
                cache.check_integrity()
        finally:
            gc.set_threshold(*before)
            gc.collect()


def test_a_pool_that_is_closed_while_a_thread_commits(device: str) -> None:
    # Either the pool still has mapped page groups, or the commit meets a closed pool: never both.
    pool = vt.PagePool(device, capacity_bytes=64 * page(device), page_group_bytes=page(device))
    x, outcomes, native = vt.empty(page(device), dtype=torch.uint8, device=device, pool=pool), [], pool._native

    def commit() -> None:
        try:
            x.commit()
            outcomes.append("committed")
        except vt.ClosedError:
            outcomes.append("closed")

    class Late:
        """The pool's compiled code, but a commit comes just before the last page groups are released."""

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def release_free(self, *args: Any) -> None:
            thread = threading.Thread(target=commit)
            thread.start()
            thread.join()
            native.release_free(*args)

    pool._native = Late()
    pool.close()
    assert outcomes == ["closed"]
    assert pool.closed
    assert pool.stats().mapped_page_groups == 0


def test_a_pool_that_cannot_be_closed_serves_on(device: str, driver: Driver) -> None:
    pool = vt.PagePool(device, capacity_bytes=4 * page(device), page_group_bytes=page(device))
    x = vt.empty(4 * page(device), dtype=torch.uint8, device=device, pool=pool)
    x.commit()
    with pytest.raises(vt.VTensorError, match="still has 4 mapped page groups"):
        pool.close()
    x.decommit()
    with fail(driver, Call.RELEASE, 1, BROKEN), pytest.raises(vt.DriverError):
        pool.close()
    assert not pool.closed
    x.commit()
    assert x.resident_bytes == 4 * page(device)
    x.decommit()
    pool.close()
    with pytest.raises(vt.ClosedError):
        x.commit()
