"""Several caches over one pool, several pools, several devices."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.faults import BROKEN, fail
from tests.vtensor.caches import (
    BUSY_CYCLES,
    DEFERRED,
    FREE,
    IN_THE_BACKGROUND,
    Busy,
    Pattern,
    close,
    lengths,
    make,
    page,
    spec,
    states,
    stats,
)
from vtensor.allocator.driver import Call, Driver


def pool_of(device: str, num_page_groups: int, size_classes: int = 1, **options: Any) -> vt.PagePool:
    size = page(device)
    capacity = {"capacity_bytes": num_page_groups * size, "max_size_class_bytes": size << size_classes - 1}
    return vt.PagePool(device, page_group_bytes=size, **capacity, **options)


def caches(device: str, pool: vt.PagePool, **options: Any) -> list[vt.KVCacheManager]:
    """Three caches over a pool, that have nothing in common but the page group."""
    return [
        make(device, spec(device, 1), pool=pool, **options),
        make(device, spec(device, 2, dtype=torch.float32), spec(device, 3), pool=pool, **options),
        make(device, spec(device, 1, window=5), spec(device, 4), pool=pool, layout="per_layer", **options),
    ]


# -- one pool ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, IN_THE_BACKGROUND, {**IN_THE_BACKGROUND, "scrub": True}], ids=len)
@pytest.mark.parametrize("size_classes", [1, 4])
def test_caches_of_one_pool_keep_apart(size_classes: int, options: dict[str, Any], device: str) -> None:
    # With so little memory that what one gives back is what another takes; none sees anything of the others.
    random_, pool = random.Random(size_classes), pool_of(device, 150, size_classes)
    all_caches = caches(device, pool, **options)
    patterns = [Pattern(cache) for cache in all_caches]
    counts: list[dict[int, int]] = [{} for _ in all_caches]
    num_short = 0
    for number in range(300):
        which = random_.randrange(3)
        cache, pattern, mine = all_caches[which], patterns[which], counts[which]
        if len(mine) < 4 and random_.random() < 0.3:
            mine[cache.alloc_reqid(random_.choice([None, 30]))] = 0
        grown = {slot: min(64, count + random_.choice([0, 1, 5])) for slot, count in mine.items()}
        result = cache.step(lengths(cache, grown))
        if result:
            for slot, count in grown.items():
                fresh = [pattern.rows(layer, 0, slot, mine[slot], count) for layer in range(cache.config.num_layers)]
                assert all(rows.float().isfinite().all() for rows in fresh)
                del fresh
                if count > mine[slot]:
                    pattern.write(slot, mine[slot], count, salt=which)
            counts[which] = grown
        else:
            num_short += 1
            assert result.shortfall_page_groups > 0
            for slot in list(mine):
                cache.free_reqid(slot)
                del mine[slot]
        if number % 5 == 0:
            for one, its, held in zip(all_caches, patterns, counts, strict=True):
                for slot, count in held.items():
                    if count:
                        its.check(slot, count, salt=all_caches.index(one))
        if number % 50 == 0:
            pool.check_integrity()
    assert num_short > 0
    total = sum(stats(cache).mapped_page_groups for cache in all_caches)
    assert total == pool.stats().mapped_page_groups <= 150
    for cache in all_caches:
        cache.check_integrity()
        cache.close()
    close(pool)


@pytest.mark.parametrize("size_classes", [1, 4])
def test_one_is_given_what_others_can_do_without(size_classes: int, device: str) -> None:
    # Deferred slots, what was shortened, mapped ahead, kept as a spare slot, or passed by a window: to the last page
    # group, and never one that a request holds.
    def attempt(capacity: int) -> int:
        pool = pool_of(device, capacity, size_classes)
        with (
            make(device, spec(device, 1), pool=pool, lookahead_tokens=3, eager_slot=True) as one,
            make(device, spec(device, 1), spec(device, 2, window=3), pool=pool, lookahead_tokens=1) as other,
            make(device, spec(device, 1), pool=pool) as needy,
        ):
            for cache in (one, other):
                cache.alloc_reqid(), cache.alloc_reqid()
            patterns = Pattern(one), Pattern(other)
            assert one.step([3, 5, 0, 0])
            patterns[0].write(0, 0, 3)
            for counts in ([3, 9, 0, 0], [0, 10, 0, 0], [0, 11, 0, 0]):
                assert other.step(counts)
            patterns[1].write(0, 0, 3)
            one.free_reqid(1)
            assert other.step([0, 10, 0, 0])
            needy.alloc_reqid()
            shortfall = needy.step([40, 0, 0, 0]).shortfall_page_groups
            patterns[0].check(0, 3)
            patterns[1].check(0, 3)
            for cache in (one, other, needy):
                cache.check_integrity()
            assert needy.residency()[0].seq_len == (0 if shortfall else 40)
        close(pool)
        return shortfall

    shortfall = attempt(45)
    assert shortfall > 1
    assert attempt(45 + shortfall) == 0
    assert attempt(45 + shortfall - 1) == 1
    if size_classes == 1:  # three tokens in `one`; three and ten in `other`, of which the window leaves two page groups
        assert 45 + shortfall == 40 + 3 + (3 + 2) + (10 + 2)


@pytest.mark.parametrize("by_thread", [False, True])
def test_one_that_is_busy_gives_nothing(by_thread: bool, device: str) -> None:
    # It may be in the middle of a step, in another thread: who asks does not wait for it.
    pool = pool_of(device, 10)
    with make(device, spec(device, 1), pool=pool) as one, make(device, spec(device, 1), pool=pool) as other:
        one.alloc_reqid(), other.alloc_reqid()
        assert one.step([8, 0, 0, 0])
        one.free_reqid(0)
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with one._lock:
                held.set()
                done.wait(60)

        thread = threading.Thread(target=hold)
        if by_thread:
            thread.start()
            assert held.wait(60)
        shortfall = other.step([9, 0, 0, 0]).shortfall_page_groups
        done.set()
        if by_thread:
            thread.join()
            assert shortfall == 7
            assert states(one)[0] == DEFERRED
        assert other.step([9, 0, 0, 0])
        assert states(one)[0] == FREE
    close(pool)


def test_one_that_gives_waits_for_its_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(device, 10)
    with make(device, spec(device, 1), pool=pool) as one, make(device, spec(device, 1), pool=pool) as other:
        busy = Busy(one, monkeypatch)
        one.alloc_reqid(), other.alloc_reqid()
        assert one.step([8, 0, 0, 0])
        one.free_reqid(0)
        assert other.step([2, 0, 0, 0])
        assert busy.num_stops == 0
        assert other.step([3, 0, 0, 0])
        assert busy.num_stops == 1
    close(pool)


@pytest.mark.parametrize("what", ["deferred", "surplus", "waiting"])
def test_a_driver_that_fails_in_one_that_gives_changes_nothing(what: str, device: str, driver: Driver) -> None:
    pool = pool_of(device, 10)
    options = {"pool": pool, "deferred_reclamation": what != "waiting"}
    with make(device, spec(device, 1), **options) as one, make(device, spec(device, 1), pool=pool) as other:
        one.alloc_reqid(), one.alloc_reqid(), other.alloc_reqid()
        pattern = Pattern(one)
        assert one.step([2, 6, 0, 0])
        pattern.write(0, 0, 2), pattern.write(1, 0, 6)
        assert other.step([2, 0, 0, 0])
        with fail(driver, Call.UNMAP, 1, BROKEN, times=100):
            if what == "surplus":
                assert one.step([2, 1, 0, 0])
            else:
                one.free_reqid(1)
            with pytest.raises(vt.DriverError, match="cuMemUnmap"):
                other.step([5, 0, 0, 0])
            assert other.residency()[0].seq_len == 2
            one.check_integrity()
        pattern.check(0, 2)
        if what == "surplus":
            pattern.check(1, 1)
        assert other.step([5, 0, 0, 0])
        pattern.check(0, 2)
        one.check_integrity()
        assert other.step([8 if what != "surplus" else 7, 0, 0, 0])
        assert not other.step([9, 0, 0, 0])
    close(pool)


@pytest.mark.parametrize("from_surplus", [False, True])
def test_an_interrupt_while_one_gives_comes_afterwards(from_surplus: bool, device: str) -> None:
    # Ctrl-C in the middle, for a tensor over the same pool: the books of the cache that gives must balance.
    pool = pool_of(device, 10)
    x = vt.empty(10 * page(device), dtype=torch.uint8, device=device, pool=pool)
    with make(device, spec(device, 1), pool=pool) as one:
        one.alloc_reqid()
        assert one.step([8, 0, 0, 0])
        if from_surplus:
            assert one.step([1, 0, 0, 0])
        else:
            one.free_reqid(0)
        decommit = one._region.decommit

        def decommit_and_interrupt(*args: Any, **kwargs: Any) -> int:
            number = decommit(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGINT)
            return number

        one._region.decommit = decommit_and_interrupt  # type: ignore[method-assign]
        handler = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # ignored, where a shell started us behind it
        try:
            with pytest.raises(KeyboardInterrupt):
                x.commit(slice(0, 5 * page(device)))
        finally:
            signal.signal(signal.SIGINT, handler)
        one.check_integrity()
        del one._region.decommit
        x.commit(slice(0, 9 * page(device)))
        one.check_integrity()
        del x
    close(pool)


@pytest.mark.parametrize("with_mapper_at_work", [False, True])
def test_one_is_closed_while_others_run(with_mapper_at_work: bool, device: str) -> None:
    pool = pool_of(device, 100)
    first, second, third = caches(device, pool, **IN_THE_BACKGROUND)
    patterns = [Pattern(cache) for cache in (first, second, third)]
    for cache, pattern in zip((first, second, third), patterns, strict=True):
        cache.alloc_reqid()
        assert cache.step([15, 0, 0, 0])
        pattern.write(0, 0, 15)
        if not with_mapper_at_work:
            stats(cache)
    held = [stats(cache).mapped_page_groups for cache in (first, third)] if not with_mapper_at_work else []
    second.close()
    first.check_integrity(), third.check_integrity()
    if held:
        assert pool.stats().mapped_page_groups == sum(held)
    for tokens in range(16, 40):
        for cache, pattern in ((first, patterns[0]), (third, patterns[2])):
            assert cache.step([tokens, 0, 0, 0])
            pattern.write(0, tokens - 1, tokens)
            pattern.check(0, tokens)
    first.close(), third.close()
    close(pool)


@pytest.mark.parametrize("num_pools", [1, 3])
def test_caches_work_in_threads_of_their_own(num_pools: int, device: str) -> None:
    pools = [pool_of(device, 240 // num_pools) for _ in range(num_pools)]
    all_caches = [make(device, spec(device, 1), pool=pools[i % num_pools], **IN_THE_BACKGROUND) for i in range(3)]
    failures: list[BaseException] = []

    def serve(number: int) -> None:
        cache, random_ = all_caches[number], random.Random(number)
        pattern = Pattern(cache)
        try:
            for salt in range(30):
                reqid = cache.alloc_reqid(random_.choice([None, 20]))
                for tokens in range(1, random_.randint(2, 40)):
                    if not cache.step(lengths(cache, {reqid: tokens})):
                        break
                    pattern.write(reqid, tokens - 1, tokens, salt)
                    pattern.check(reqid, tokens, salt=salt)
                cache.free_reqid(reqid)
                if salt % 10 == 0:
                    cache.stats(), cache.residency()
        except BaseException as error:  # shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for cache in all_caches:
        cache.check_integrity()
        cache.close()
    for pool in pools:
        close(pool)


# -- several pools ----------------------------------------------------------------------------------------------------


def test_pools_know_nothing_of_each_other(device: str) -> None:
    pools = [pool_of(device, 10), pool_of(device, 10), None]
    all_caches = [make(device, spec(device, 1), **({"pool": pool} if pool else {"capacity": 10})) for pool in pools]
    for tokens, cache in zip((10, 7, 3), all_caches, strict=True):
        cache.alloc_reqid()
        assert cache.step([tokens, 0, 0, 0])
        assert cache.step([11, 0, 0, 0]).shortfall_page_groups == 1
    assert [stats(cache).mapped_page_groups for cache in all_caches] == [10, 7, 3]
    assert [stats(cache).free_page_groups for cache in all_caches] == [0, 0, 0]
    for cache in all_caches:
        cache.close()
    for pool in pools:
        if pool:
            assert pool.stats().mapped_page_groups == 0
            close(pool)


# -- several devices --------------------------------------------------------------------------------------------------


PEERS = [["cpu"], ["cpu", "cpu"], [torch.device("cpu")], ["cuda:0"], ["cuda"], ["meta"], [0], "cpu", [None]]


@pytest.mark.parametrize("peers", PEERS, ids=str)
def test_the_host_has_no_peers(peers: Any) -> None:
    with pytest.raises(ValueError, match=r"peer_devices|sees no CUDA device|live on|no device that torch knows"):
        vt.PagePool("cpu", peer_devices=peers)
    vt.PagePool("cpu", peer_devices=[]).close()


@pytest.fixture
def two_gpus() -> tuple[str, str]:
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees fewer than two CUDA devices")
    return "cuda:0", "cuda:1"


@pytest.mark.gpu
def test_bad_peers_of_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    for peers in (["cpu"], ["cuda:0"], [f"cuda:{torch.cuda.device_count()}"]):
        with pytest.raises(ValueError, match=r"peer_devices|there are"):
            vt.PagePool("cuda:0", peer_devices=peers)


@pytest.mark.gpu
@pytest.mark.parametrize("current", [0, 1])
def test_a_cache_on_a_gpu_that_is_not_the_current_one(current: int, two_gpus: tuple[str, str]) -> None:
    with torch.cuda.device(current):
        options = {**IN_THE_BACKGROUND, "scrub": True}
        with make("cuda:1", spec("cuda:1", 1), capacity=40, **options) as cache:
            pattern = Pattern(cache)
            for salt in range(3):
                reqid = cache.alloc_reqid(prompt_tokens=5)
                for tokens in range(1, 30):
                    assert cache.step(lengths(cache, {reqid: tokens}))
                    pattern.write(reqid, tokens - 1, tokens, salt)
                    pattern.check(reqid, tokens, salt=salt)
                cache.free_reqid(reqid)
                cache.check_integrity()
            keys, _ = cache.layer(0)
            assert keys.device == torch.device("cuda:1")
            assert torch.cuda.current_device() == current
            del keys, _
        assert torch.cuda.current_device() == current


@pytest.mark.gpu
def test_caches_on_two_gpus(two_gpus: tuple[str, str]) -> None:
    one, other = (make(gpu, spec(gpu, 1), capacity=60, **IN_THE_BACKGROUND) for gpu in two_gpus)
    patterns = Pattern(one), Pattern(other)
    one.alloc_reqid(), other.alloc_reqid()
    for tokens in range(1, 40):
        for cache, pattern in zip((one, other), patterns, strict=True):
            assert cache.step([tokens, 0, 0, 0])
            pattern.write(0, tokens - 1, tokens)
    for cache, pattern in zip((one, other), patterns, strict=True):
        pattern.check(0, 39)
        assert cache.pool.driver.device == str(cache.device)
    one.close()
    assert other.step([40, 0, 0, 0])
    patterns[1].check(0, 39)
    other.close()


@pytest.mark.gpu
def test_a_peer_reads_and_writes_a_cache(two_gpus: tuple[str, str]) -> None:
    here, there = two_gpus
    if not torch.cuda.can_device_access_peer(1, 0):
        pytest.skip("cuda:1 cannot reach the memory of cuda:0")
    pool = vt.PagePool(here, capacity_bytes=40 * page(here), page_group_bytes=page(here), peer_devices=[there])
    with make(here, spec(here, 1), pool=pool, **IN_THE_BACKGROUND) as cache:
        pattern = Pattern(cache)
        cache.alloc_reqid()
        for tokens in (9, 20):  # what was mapped first, what was mapped ahead, and what came later
            assert cache.step([tokens, 0, 0, 0])
            pattern.write(0, 0, tokens)
            keys, _ = cache.layer(0, plain=True)
            torch.cuda.synchronize(here)
            # The same addresses as memory of the other GPU, whose kernels then work on them.
            storage = torch._C._construct_storage_from_data_pointer(
                keys.data_ptr(), torch.device(there), tokens * page(here)
            )
            shape, strides = (tokens, *keys.shape[2:]), keys.stride()[1:]
            seen = torch.empty(0, dtype=keys.dtype, device=there).set_(storage, 0, shape, strides)
            assert (seen == pattern.numbers(0, 0, 0, 0, tokens).to(there)).all()
            seen.add_(1)
            torch.cuda.synchronize(there)
            assert (keys[0, :tokens] == pattern.numbers(0, 0, 0, 0, tokens) + 1).all()
            del keys, _, seen, storage
    close(pool)


@pytest.mark.gpu
def test_a_stream_of_another_gpu_is_no_user(two_gpus: tuple[str, str]) -> None:
    here, there = two_gpus
    with make(here) as cache, pytest.raises(ValueError, match=r"is not a torch\.cuda\.Stream of cuda:0"):
        cache.record_stream(torch.cuda.Stream(there))


@pytest.mark.gpu
def test_closing_waits_for_its_own_gpu_only(two_gpus: tuple[str, str]) -> None:
    one, other = (make(gpu, spec(gpu, 1)) for gpu in two_gpus)
    one.alloc_reqid(), other.alloc_reqid()
    assert one.step([9, 0, 0, 0])
    assert other.step([9, 0, 0, 0])
    keys, _ = one.layer(0, plain=True)
    with torch.cuda.device(0):
        keys[0, :9] = 3
        torch.cuda._sleep(BUSY_CYCLES)
        read = keys[0, :9].float().mean()
    del keys, _
    other.close()
    one.close()
    assert read.item() == 3
