"""Arena: segments as torch asks for them, on both backends; asleep, awake, and under failures."""

from __future__ import annotations

import ctypes
import gc
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.child import in_child
from tests.helpers.faults import BROKEN, fail, record
from tests.helpers.threads import Background, in_threads, wait_until
from vtensor.allocator import arena as arena_module
from vtensor.allocator.arena import Arena, MemoryStats
from vtensor.allocator.driver import Call, Driver, get_driver
from vtensor.allocator.page_pool import PagePool
from vtensor.errors import ClosedError, DriverError, ForkedError, OutOfPagesError, VTensorError
from vtensor.mode import virtual
from vtensor.units import round_up

OUT_OF_MEMORY = 2


class Torch:
    """What torch does with an arena: it calls back."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.size = arena.space.page_group_bytes
        self.driver = arena.space.pool.driver
        allocate = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)
        free = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)
        self._allocate, self._free = allocate(arena.allocate_callback), free(arena.free_callback)

    def allocate(self, size_bytes: int) -> int:
        return int(self._allocate(size_bytes, 0, 0))

    def free(self, address: int, size_bytes: int = 0) -> None:
        self._free(address, size_bytes, 0, 0)

    def write(self, address: int, size_bytes: int, value: int) -> None:
        values = np.full(size_bytes, value, np.uint8)
        self.driver.copy_to_device(address, values.ctypes.data, size_bytes, 0)
        self.driver.finish(0)

    def read(self, address: int, size_bytes: int) -> set[int]:
        values = np.empty(size_bytes, np.uint8)
        self.driver.copy_to_host(values.ctypes.data, address, size_bytes, 0)
        self.driver.finish(0)
        return set(np.unique(values).tolist())


MakeTorch = Callable[..., Torch]


@pytest.fixture
def make_torch(device: str) -> Any:
    made: list[Torch] = []

    def make(capacity: int | None = 64, places: int = 256, **options: Any) -> Torch:
        size = get_driver(device).default_page_group_bytes
        pool = PagePool(device, capacity_bytes=None if capacity is None else capacity * size, **options)
        made.append(Torch(Arena(pool, places * size)))
        return made[-1]

    yield make
    for one in made:
        if not one.arena.space.closed:
            one.arena.check_integrity()
            for first in np.flatnonzero(one.arena._arrays.lengths > 0).tolist():
                one.free(one.arena.space.base + first * one.size)
            one.arena.check_integrity()
            one.arena.close()
        one.arena.space.pool.close()


# -- segments ---------------------------------------------------------------------------------------------------------


def test_segments_have_memory_and_addresses_of_their_own(make_torch: MakeTorch) -> None:
    one = make_torch()
    sizes = [1, one.size, one.size + 1, 5 * one.size, 20 * one.size]
    addresses = [one.allocate(size_bytes) for size_bytes in sizes]
    for number, (address, size_bytes) in enumerate(zip(addresses, sizes, strict=True)):
        assert address % one.driver.granularity_bytes == 0
        one.write(address, size_bytes, number + 1)
    for number, (address, size_bytes) in enumerate(zip(addresses, sizes, strict=True)):
        assert one.read(address, size_bytes) == {number + 1}
    stats = one.arena.stats()
    assert stats.num_segments == 5
    assert stats.reserved_bytes == stats.committed_bytes == stats.peak_reserved_bytes == 29 * one.size
    one.arena.check_integrity()
    for address in addresses:
        one.free(address)
    assert one.arena.stats() == MemoryStats(peak_reserved_bytes=29 * one.size)


def test_nothing_is_a_page_group(make_torch: MakeTorch) -> None:
    one = make_torch()
    assert one.allocate(0) != one.allocate(0)
    assert one.arena.stats().committed_bytes == 2 * one.size


def test_addresses_are_used_again(make_torch: MakeTorch) -> None:
    one = make_torch(places=12)
    a, b, c = (one.allocate(4 * one.size) for _ in range(3))
    assert one.allocate(one.size) == 0  # there is memory, but no address
    one.free(b)
    d, e = one.allocate(3 * one.size), one.allocate(one.size)
    assert (d, e) == (b, b + 3 * one.size)
    for address in (a, d, c):
        one.free(address)
    assert one.allocate(8 * one.size) == 0
    one.free(e)
    assert one.allocate(12 * one.size) == a


@pytest.mark.parametrize("size_bytes", [-1, -(1 << 63), (1 << 63) - 1])
def test_absurd_sizes_are_null(size_bytes: int, make_torch: MakeTorch) -> None:
    one = make_torch()
    assert one.allocate(size_bytes) == 0
    assert one.arena.stats().num_failed == 1
    assert one.arena.stats().committed_bytes == 0


@pytest.mark.parametrize("size_bytes", [65, 257, 1 << 40])
def test_what_cannot_be_had_is_null(size_bytes: int, make_torch: MakeTorch) -> None:
    one = make_torch()
    address = one.allocate(60 * one.size)
    before = one.arena.stats()
    wanted = size_bytes * one.size if size_bytes < 1 << 20 else size_bytes
    assert one.allocate(wanted) == 0
    after = one.arena.stats()
    assert (after.num_failed, after.num_segments, after.committed_bytes) == (1, 1, before.committed_bytes)
    assert one.arena.last_failed_bytes == wanted
    one.arena.check_integrity()
    one.free(address)
    assert one.allocate(64 * one.size)


def test_a_device_without_memory_is_null(make_torch: MakeTorch) -> None:
    one = make_torch(capacity=None)
    with fail(one.driver, Call.CREATE, 1, code=OUT_OF_MEMORY, times=1 << 60):
        assert one.allocate(4 * one.size) == 0
    one.arena.check_integrity()
    assert one.allocate(4 * one.size)


@pytest.mark.parametrize("call", [Call.CREATE, Call.MAP, Call.SET_ACCESS])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_driver_that_fails_is_null(call: Call, nth: int, make_torch: MakeTorch, driver: Driver) -> None:
    one = make_torch(max_size_class_bytes=driver.default_page_group_bytes)
    with fail(one.driver, call, nth, BROKEN) as calls:
        address = one.allocate(3 * one.size)
    assert (address == 0) == (calls.count(call) >= nth)
    one.arena.check_integrity()
    assert one.allocate(3 * one.size)


def test_what_is_stuck_is_never_handed_out_closed(make_torch: MakeTorch) -> None:
    one = make_torch()
    with fail(one.driver, Call.SET_ACCESS, 1, BROKEN), fail(one.driver, Call.UNMAP, 1, BROKEN):
        assert one.allocate(3 * one.size) == 0
    one.arena.check_integrity()
    assert one.arena.stats().committed_bytes == 3 * one.size
    a = one.allocate(3 * one.size)
    one.write(a, 3 * one.size, 7)
    assert one.read(a, 3 * one.size) == {7}
    one.arena.sweep()
    one.arena.check_integrity()
    assert one.arena.stats().committed_bytes == 3 * one.size
    one.arena.sleep()
    broken = fail(one.driver, Call.SET_ACCESS, 1, BROKEN), fail(one.driver, Call.UNMAP, 1, BROKEN, times=2)
    with broken[0], broken[1], pytest.raises(DriverError):
        one.arena.wake()
    assert one.arena.is_asleep
    one.arena.check_integrity()
    assert one.arena.wake() == 3 * one.size
    assert one.read(a, 3 * one.size) == {7}


def test_large_segments_take_large_handles(make_torch: MakeTorch) -> None:
    one = make_torch()
    with record(one.driver) as calls:
        one.allocate(32 * one.size)
    assert (calls.count(Call.CREATE), calls.count(Call.SET_ACCESS), calls.count(Call.ZERO)) == (1, 1, 0)


def test_what_is_freed_goes_back_to_the_device(make_torch: MakeTorch) -> None:
    one = make_torch(capacity=None)
    address = one.allocate(8 * one.size)
    assert one.arena.space.pool.stats().total_page_groups == 8
    one.free(address)
    assert one.arena.space.pool.stats().total_page_groups == 0


def test_a_pool_with_a_capacity_keeps_what_is_freed(make_torch: MakeTorch) -> None:
    one = make_torch()
    one.free(one.allocate(8 * one.size))
    with record(one.driver) as calls:
        one.allocate(8 * one.size)
    assert calls.count(Call.CREATE) == 0


def test_others_never_see_what_a_segment_held(make_torch: MakeTorch) -> None:
    from vtensor.allocator.address_space import AddressSpace

    one = make_torch(capacity=4)
    address = one.allocate(4 * one.size)
    one.write(address, 4 * one.size, 9)
    one.free(address)
    pool = one.arena.space.pool
    space = AddressSpace(pool, 4 * one.size)
    space.commit(np.array([[0, 4]], np.int64), content=pool.new_content())
    one.driver.finish_device()
    assert one.read(space.base, 4 * one.size) == {0}
    space.close()


@pytest.mark.parametrize("stray", [-1, 0, 0.5, 1, 1 << 40])
def test_what_was_never_a_segment_is_not_freed(stray: float, make_torch: MakeTorch) -> None:
    one = make_torch()
    address = one.allocate(2 * one.size)
    one.free(address + int(stray * one.size) if stray else 0)
    one.arena.check_integrity()
    assert one.arena.stats().num_segments == 1


# -- asleep -----------------------------------------------------------------------------------------------------------


def test_asleep_and_awake_again(make_torch: MakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_torch()
    monkeypatch.setattr(arena_module, "_BUFFER_BYTES", 3 * one.size + 512)  # segments lie across buffers
    sizes = [1, 7, 2, 12]
    addresses = [one.allocate(number * one.size) for number in sizes]
    for number, address in zip(sizes, addresses, strict=True):
        one.write(address, number * one.size, number)
    assert one.arena.sleep() == 22 * one.size
    assert one.arena.is_asleep
    stats = one.arena.stats()
    assert stats.reserved_bytes == stats.asleep_bytes == stats.offloaded_bytes == 22 * one.size
    assert stats.committed_bytes == one.arena.space.pool.stats().mapped_page_groups == 0
    one.arena.check_integrity()
    assert one.arena.sleep() == one.arena.sleep("discard") == 0
    assert one.arena.wake() == 22 * one.size
    assert one.arena.wake() == 0
    for number, address in zip(sizes, addresses, strict=True):
        assert one.read(address, number * one.size) == {number}
    stats = one.arena.stats()
    assert (stats.asleep_bytes, stats.offloaded_bytes, stats.committed_bytes) == (0, 0, 22 * one.size)


def test_modes_have_nothing_to_do_with_it(make_torch: MakeTorch) -> None:
    one = make_torch(capacity=None, places=1024)
    size_bytes = round_up(20 << 20, one.size)  # a virtual tensor, to `vt.virtual`
    address = one.allocate(size_bytes)
    one.write(address, size_bytes, 9)
    for mode in (virtual(), FakeTensorMode(), torch.device("meta")):
        with mode:
            one.arena.sleep()
            one.arena.wake()
        assert one.read(address, size_bytes) == {9}


def test_what_is_discarded_is_zeros(make_torch: MakeTorch) -> None:
    one = make_torch()
    address = one.allocate(3 * one.size)
    one.write(address, 3 * one.size, 5)
    assert one.arena.sleep("discard") == 3 * one.size
    assert one.arena.stats().offloaded_bytes == 0
    other = make_torch()
    assert one.arena.wake() == 3 * one.size
    assert one.read(address, 3 * one.size) == {0}
    assert other.arena.sleep("discard") == other.arena.wake() == 0


def test_memory_of_sleepers_is_for_others(make_torch: MakeTorch) -> None:
    one = make_torch(capacity=10)
    two = Torch(Arena(one.arena.space.pool, 64 * one.size))
    address = one.allocate(8 * one.size)
    one.write(address, 8 * one.size, 3)
    assert two.allocate(3 * one.size) == 0
    one.arena.sleep()
    borrowed = two.allocate(9 * one.size)
    two.write(borrowed, 9 * one.size, 4)
    with pytest.raises(OutOfPagesError, match=r"waking up needs .* more page groups"):
        one.arena.wake()
    assert one.arena.is_asleep
    one.arena.check_integrity()
    two.free(borrowed)
    assert one.arena.wake() == 8 * one.size
    assert one.read(address, 8 * one.size) == {3}
    two.arena.close()


def test_while_asleep_segments_go_and_none_come(make_torch: MakeTorch) -> None:
    one = make_torch()
    a, b, c = (one.allocate(number * one.size) for number in (2, 3, 4))
    for value, (address, number) in enumerate([(a, 2), (b, 3), (c, 4)]):
        one.write(address, number * one.size, value + 1)
    one.arena.sleep()
    assert one.allocate(1) == 0
    one.free(b)
    one.free(b)
    one.arena.check_integrity()
    assert one.arena.stats().reserved_bytes == 6 * one.size
    assert one.arena.wake() == 6 * one.size
    one.arena.check_integrity()
    assert (one.read(a, 2 * one.size), one.read(c, 4 * one.size)) == ({1}, {3})
    assert one.allocate(3 * one.size) == b


def test_all_freed_while_asleep(make_torch: MakeTorch) -> None:
    one = make_torch()
    address = one.allocate(5 * one.size)
    one.arena.sleep()
    one.free(address)
    assert one.arena.space.num_asleep == 0
    assert one.arena.wake() == 0
    assert one.allocate(one.size) == address


def test_a_sleeper_may_be_closed_once_it_is_empty(make_torch: MakeTorch) -> None:
    one = make_torch()
    address = one.allocate(1)
    one.arena.sleep()
    with pytest.raises(VTensorError, match="cannot be closed: torch still has segments"):
        one.arena.close()
    with pytest.raises(VTensorError, match="1 page groups asleep"):
        one.arena.space.pool.close()
    one.free(address)
    one.arena.close()
    one.arena.close()
    assert one.arena.space.closed
    for use in (one.arena.sleep, one.arena.wake, one.arena.sweep):
        with pytest.raises(ClosedError):
            use()
    assert one.allocate(1) == 0  # torch may call at any time


def test_bad_arguments(make_torch: MakeTorch) -> None:
    one = make_torch()
    one.allocate(1)
    with pytest.raises(ValueError, match=r"offload='disk' must be 'cpu' or 'discard'"):
        one.arena.sleep("disk")  # type: ignore[arg-type]
    assert not one.arena.is_asleep


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", ["cpu", "discard"])
def test_a_driver_that_fails_keeps_it_awake(offload: Any, make_torch: MakeTorch) -> None:
    one = make_torch()
    addresses = [one.allocate(2 * one.size) for _ in range(3)]
    for address in addresses:
        one.write(address, 2 * one.size, 8)
    one.free(addresses.pop(1))  # so that there are two runs
    for nth in (1, 2):
        with fail(one.driver, Call.UNMAP, nth, BROKEN), pytest.raises(DriverError, match="nothing was changed"):
            one.arena.sleep(offload)
        assert not one.arena.is_asleep
        assert one.arena.stats().offloaded_bytes == 0
        one.arena.check_integrity()
        assert [one.read(address, 2 * one.size) for address in addresses] == [{8}, {8}]
    assert one.arena.sleep(offload) == 4 * one.size


@pytest.mark.parametrize("offload", ["cpu", "discard"])
@pytest.mark.parametrize("call", [Call.CREATE, Call.MAP, Call.SET_ACCESS, Call.ZERO])
def test_a_driver_that_fails_keeps_it_asleep(call: Call, offload: Any, make_torch: MakeTorch) -> None:
    one = make_torch(capacity=None)
    addresses = [one.allocate(2 * one.size) for _ in range(3)]
    for address in addresses:
        one.write(address, 2 * one.size, 8)
    one.free(addresses.pop(1))
    one.arena.sleep(offload)
    is_reached = call is not Call.ZERO or offload == "discard"
    with fail(one.driver, call, 2, BROKEN):
        if is_reached:
            with pytest.raises(DriverError):
                one.arena.wake()
            assert one.arena.is_asleep
            one.arena.check_integrity()
            assert one.arena.space.pool.stats().total_page_groups == 0
    assert one.arena.wake() == 4 * one.size
    expected = {8} if offload == "cpu" else {0}
    assert [one.read(address, 2 * one.size) for address in addresses] == [expected, expected]


def test_a_segment_that_cannot_be_unmapped_goes_later(make_torch: MakeTorch) -> None:
    one = make_torch()
    a, b = one.allocate(2 * one.size), one.allocate(2 * one.size)
    with fail(one.driver, Call.UNMAP, 1, BROKEN):
        one.free(a)
    stats = one.arena.stats()
    assert (stats.num_segments, stats.reserved_bytes, stats.committed_bytes) == (1, 2 * one.size, 4 * one.size)
    one.arena.check_integrity()
    assert one.allocate(2 * one.size) not in (0, a, b)  # its addresses are taken
    with fail(one.driver, Call.UNMAP, 1, BROKEN), pytest.raises(DriverError):
        one.arena.sleep()
    one.arena.check_integrity()
    one.arena.sleep()
    one.arena.check_integrity()
    one.arena.wake()
    assert one.allocate(2 * one.size) == a


def test_what_is_left_over_can_be_swept(make_torch: MakeTorch) -> None:
    one = make_torch(capacity=None)
    address = one.allocate(2 * one.size)
    with fail(one.driver, Call.UNMAP, 1, BROKEN):
        one.free(address)
    with fail(one.driver, Call.UNMAP, 1, BROKEN), pytest.raises(DriverError):
        one.arena.sweep()
    one.arena.check_integrity()
    one.arena.sweep()
    one.arena.sweep()
    assert one.arena.space.pool.stats().total_page_groups == one.arena.stats().committed_bytes == 0
    assert one.allocate(1) == address


def test_where_undoing_fails_too_nothing_is_lost(make_torch: MakeTorch) -> None:
    one = make_torch()
    addresses = [one.allocate(2 * one.size) for _ in range(3)]
    for value, address in enumerate(addresses):
        one.write(address, 2 * one.size, value + 1)
    one.free(addresses.pop(1))
    broken = fail(one.driver, Call.UNMAP, 2, BROKEN), fail(one.driver, Call.MAP, 1, BROKEN)
    with broken[0], broken[1], pytest.raises(DriverError, match="undoing failed as well"):
        one.arena.sleep()
    assert one.arena.is_asleep
    one.arena.check_integrity()
    assert one.arena.wake() == 4 * one.size
    assert [one.read(address, 2 * one.size) for address in addresses] == [{1}, {3}]


@pytest.mark.parametrize("offload", ["cpu", "discard"])
def test_interrupts_lose_nothing(offload: Any, make_torch: MakeTorch) -> None:
    """A signal at some moment of sleep or wake, whose handler raises; then the other way round."""
    one = make_torch()
    addresses = [one.allocate(2 * one.size) for _ in range(6)]
    num_interrupted, value = 0, 0
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    chance = random.Random(11)
    try:
        for _ in range(400):
            if not one.arena.is_asleep:
                value = value % 200 + 1
                for address in addresses:
                    one.write(address, one.size, value)
            was_asleep = one.arena.is_asleep
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 2e-3))
                (one.arena.wake if was_asleep else lambda: one.arena.sleep(offload))()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                num_interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            one.arena.check_integrity()
            if not one.arena.is_asleep:
                expected = {value, 0} if offload == "discard" else {value}
                assert all(one.read(address, one.size) <= expected for address in addresses)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert num_interrupted > 10


def test_who_comes_back_in_the_middle_is_refused(make_torch: MakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_torch()
    address = one.allocate(2 * one.size)
    one.write(address, 2 * one.size, 9)
    copy, refused = one.driver.copy_to_host, []

    def copy_and_come_back(*args: Any) -> None:
        for use in (one.arena.wake, one.arena.sleep, one.arena.sweep):
            with pytest.raises(VTensorError, match="just falling asleep or waking up"):
                use()
            refused.append(use)
        copy(*args)

    monkeypatch.setattr(one.driver, "copy_to_host", copy_and_come_back)
    one.arena.sleep()
    monkeypatch.undo()
    assert len(refused) == 3
    one.arena.wake()
    assert one.read(address, 2 * one.size) == {9}


def test_without_host_memory_it_stays_awake(make_torch: MakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_torch()
    address = one.allocate(6 * one.size)
    one.write(address, 6 * one.size, 1)
    real, number = torch.empty, 0

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal number
        number += 1
        if number == 3:
            raise RuntimeError("no more pinned memory")
        return real(*args, **options)

    monkeypatch.setattr(arena_module, "_BUFFER_BYTES", 2 * one.size)
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(VTensorError, match=r"no more pinned memory.*offload='discard'"):
        one.arena.sleep()
    monkeypatch.undo()
    assert not one.arena.is_asleep
    assert one.read(address, 6 * one.size) == {1}
    assert one.arena.sleep() == 6 * one.size


def test_freed_while_it_is_copied(make_torch: MakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_torch()
    a, b = one.allocate(2 * one.size), one.allocate(2 * one.size)
    one.write(b, 2 * one.size, 6)
    copy = one.driver.copy_to_host

    def copy_and_free(*args: Any) -> None:
        copy(*args)
        one.free(a)

    monkeypatch.setattr(one.driver, "copy_to_host", copy_and_free)
    assert one.arena.sleep() == 4 * one.size
    monkeypatch.undo()
    one.arena.check_integrity()
    fill = one.driver.copy_to_device

    def fill_and_free(*args: Any) -> None:
        fill(*args)
        assert one.read(b, 2 * one.size) == {6}
        one.free(b)

    monkeypatch.setattr(one.driver, "copy_to_device", fill_and_free)
    one.arena.wake()
    monkeypatch.undo()
    one.arena.check_integrity()
    assert one.arena.stats() == MemoryStats(peak_reserved_bytes=4 * one.size)


# -- threads and processes ------------------------------------------------------------------------------------------


def test_threads_allocate_and_free_and_another_sleeps(make_torch: MakeTorch, device: str) -> None:
    one = make_torch(capacity=48, places=128)
    has_ended = False

    def work(seed: int) -> None:
        chance = random.Random(seed)
        mine: dict[int, int] = {}
        for _ in range(300):
            if mine and chance.random() < 0.5:
                one.free(mine.popitem()[0])
            elif address := one.allocate(number := chance.randrange(1, 5 * one.size)):
                assert all(address + number <= other or other + size <= address for other, size in mine.items())
                mine[address] = number
        for address in mine:
            one.free(address)

    def nap() -> None:
        while not has_ended:
            one.arena.sleep("discard" if device == "cpu" else "cpu")
            one.arena.wake()

    napping = Background(nap)
    in_threads(*(lambda seed=seed: work(seed) for seed in range(4)))  # type: ignore[misc]
    has_ended = True
    wait_until(lambda: not napping.is_running)
    assert one.arena.stats().num_segments == one.arena.stats().committed_bytes == 0
    one.arena.check_integrity()


def test_a_forked_child_is_told(make_torch: MakeTorch) -> None:
    one = make_torch()
    if one.driver.kind == "cuda":
        pytest.skip("CUDA does not survive a fork")
    one.allocate(1)

    address = one.allocate(2 * one.size)
    one.write(address, 2 * one.size, 5)

    def use() -> None:
        for action in (one.arena.sleep, one.arena.wake):
            with pytest.raises(ForkedError):
                action()
        one.free(address)  # as the collector of the child may do
        assert one.allocate(2 * one.size) == 0

    code, text = in_child(use)
    assert code == 0, text
    assert not one.arena.is_asleep
    assert one.read(address, 2 * one.size) == {5}
    assert one.arena.stats().num_segments == 2


def test_one_that_dies_gives_everything_back(device: str, driver: Driver) -> None:
    pool = PagePool(device)
    one = Torch(Arena(pool, 1 << 30))
    one.allocate(3 * one.size)
    del one
    gc.collect()
    assert pool.stats().mapped_page_groups == 0
    pool.close()


# -- every order of calls -------------------------------------------------------------------------------------------


class ArenaMachine(RuleBasedStateMachine):
    """Segments that hold what was written, whatever happens in between."""

    device = "cpu"

    @initialize(capacity=st.sampled_from([None, 24]))
    def make(self, capacity: int | None) -> None:
        size = get_driver(self.device).default_page_group_bytes
        pool = PagePool(self.device, capacity_bytes=None if capacity is None else capacity * size)
        self.capacity = capacity or 1 << 30
        self.one = Torch(Arena(pool, 40 * size))
        self.model: dict[int, tuple[int, int]] = {}  # address: bytes, value
        self.is_discarded = False
        self.value = 0

    @rule(number=st.integers(1, 9), odd=st.booleans())
    def allocate(self, number: int, odd: bool) -> None:
        size_bytes = number * self.one.size - odd
        address = self.one.allocate(size_bytes)
        places = sum(-(-bytes_ // self.one.size) for bytes_, _ in self.model.values())
        if self.one.arena.is_asleep or places + number > self.capacity:
            assert address == 0
        elif address:
            self.value = self.value % 250 + 1
            self.one.write(address, size_bytes, self.value)
            self.model[address] = (size_bytes, self.value)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        address = data.draw(st.sampled_from(sorted(self.model)))
        del self.model[address]
        self.one.free(address)

    @rule(offload=st.sampled_from(["cpu", "discard"]))
    def sleep(self, offload: Any) -> None:
        self.is_discarded = self.is_discarded if self.one.arena.is_asleep else offload == "discard"
        self.one.arena.sleep(offload)

    @rule()
    def wake(self) -> None:
        if self.one.arena.is_asleep and self.is_discarded:
            self.model = {address: (bytes_, 0) for address, (bytes_, _) in self.model.items()}
        self.one.arena.wake()

    @rule(nth=st.integers(1, 3), call=st.sampled_from([Call.MAP, Call.SET_ACCESS, Call.UNMAP, Call.CREATE]))
    def fail_to_turn(self, nth: int, call: Call) -> None:
        arena = self.one.arena
        was_asleep = arena.is_asleep
        with fail(self.one.driver, call, nth, BROKEN):
            try:
                (arena.wake if was_asleep else arena.sleep)()
            except DriverError:
                assert arena.is_asleep == was_asleep
                return
        if was_asleep and self.is_discarded:
            self.model = {address: (bytes_, 0) for address, (bytes_, _) in self.model.items()}
        self.is_discarded = False

    @invariant()
    def holds(self) -> None:
        arena = self.one.arena
        arena.check_integrity()
        stats = arena.stats()
        places = sum(-(-bytes_ // self.one.size) for bytes_, _ in self.model.values())
        assert (stats.num_segments, stats.reserved_bytes) == (len(self.model), places * self.one.size)
        if not arena.is_asleep:
            for address, (bytes_, value) in self.model.items():
                assert self.one.read(address, bytes_) == {value}

    def teardown(self) -> None:
        if hasattr(self, "one"):
            for address in self.model:
                self.one.free(address)
            self.one.arena.close()
            self.one.arena.space.pool.close()


ArenaMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestArenaMachine = ArenaMachine.TestCase
