"""PagePool: sizes, capacity, reuse, giving back, ends of life, forks, threads."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.helpers.child import in_child
from tests.helpers.faults import fail, record
from tests.helpers.memory import access_at, fill_place, place_value, ranges, tensor_at
from vtensor.allocator import words
from vtensor.allocator.address_space import AddressSpace, Shortage, out_of_pages
from vtensor.allocator.driver import Call, get_driver
from vtensor.allocator.page_pool import PagePool
from vtensor.errors import ClosedError, DriverError, ForkedError, OutOfPagesError, VTensorError

MIB = 1 << 20
MakePool = Callable[..., PagePool]
MakeSpace = Callable[..., AddressSpace]
HOST_ONLY = pytest.mark.parametrize("device", ["cpu"], indirect=True)


# -- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, -4096, True, False, 4096.0, 2 * MIB + 1, "2MiB", 1000])
def test_bad_page_group_bytes(device: str, value: object) -> None:
    with pytest.raises(ValueError, match="positive multiple of") as caught:
        PagePool(device, page_group_bytes=value)  # type: ignore[arg-type]
    assert f"page_group_bytes={value!r}" in str(caught.value)
    assert f"{get_driver(device).granularity_bytes:,}" in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, -(64 * MIB), True, False, 1e12, 4095, "1GiB", float("inf")])
def test_bad_capacity_bytes(device: str, value: object) -> None:
    with pytest.raises(ValueError, match="at least one page group") as caught:
        PagePool(device, capacity_bytes=value)  # type: ignore[arg-type]
    assert f"capacity_bytes={value!r}" in str(caught.value)
    assert f"{get_driver(device).default_page_group_bytes:,}" in str(caught.value)


def test_default_sizes(device: str) -> None:
    pool = PagePool(device)
    assert pool.page_group_bytes == {"cpu": 64 << 10, "cuda:0": 2 * MIB}[device]
    assert pool.stats().capacity_page_groups is None
    assert pool.stats().capacity_page_groups is None
    pool.close()


def test_capacity_is_rounded_down_to_page_groups(device: str) -> None:
    size = get_driver(device).granularity_bytes
    pool = PagePool(device, capacity_bytes=4 * size - 1, page_group_bytes=size)
    assert pool.stats().capacity_page_groups == 3
    pool.close()


@pytest.mark.parametrize("device", ["cuda", "tpu", "cpu:1"])
def test_bad_device(device: str) -> None:
    with pytest.raises(ValueError, match=f"'{device}'"):
        PagePool(device)


@pytest.mark.parametrize("factor", [1, 3, 16])
def test_page_groups_of_any_multiple(make_pool: MakePool, device: str, factor: int) -> None:
    size = factor * get_driver(device).granularity_bytes
    pool = make_pool(4, page_group_bytes=size)
    space = AddressSpace(pool, 3 * size + 1)
    assert space.num_places == 4
    space.commit(ranges((1, 3)), content=pool.new_content())
    for place in (1, 2, 3):
        fill_place(space, place, place)
    assert [place_value(space, place) for place in (1, 2, 3)] == [1, 2, 3]


# -- capacity and reuse -------------------------------------------------------------------------------------------


def test_nothing_is_taken_before_it_is_needed(make_pool: MakePool) -> None:
    pool = make_pool(16)
    with record(pool.driver) as calls:
        AddressSpace(pool, 16 * pool.page_group_bytes).close()
        pool.trim()
    assert [made.call for made in calls] == [Call.RESERVE, Call.FREE]
    assert pool.stats().total_page_groups == 0


def test_counts(pool: PagePool, make_space: MakeSpace) -> None:
    space = make_space()
    space.commit(ranges((0, 5)), content=2)
    stats = pool.stats()
    assert (stats.total_page_groups, stats.free_page_groups, stats.mapped_page_groups) == (5, 0, 5)
    assert pool.num_available == 11
    space.decommit(ranges((1, 2)), forget_content=False)
    stats = pool.stats()
    assert (stats.total_page_groups, stats.free_page_groups, stats.mapped_page_groups) == (5, 2, 3)
    assert pool.num_available == 13
    assert "3 mapped + 2 free" in repr(pool)


def test_driver_calls_are_counted(pool: PagePool, make_space: MakeSpace) -> None:
    with record(pool.driver) as calls:
        space, other = make_space(), make_space()
        space.commit(ranges((0, 2), (4, 3)), content=2)
        other.alias(0, space, 4, 2)
        space.decommit(ranges((0, 16)), forget_content=False)
        with fail(pool.driver, Call.MAP, 2), pytest.raises(DriverError):
            space.commit(ranges((0, 4)), content=2)
        with fail(pool.driver, Call.CREATE, 2), pytest.raises(DriverError):
            other.commit(ranges((2, 10)), content=2)
        other.close()
        pool.trim()
        space.close()
    assert pool.stats().num_driver_calls == {call.symbol: calls.count(call) for call in Call}


def test_a_page_group_is_made_once(pool: PagePool, make_space: MakeSpace) -> None:
    space = make_space()
    with record(pool.driver) as calls:
        for _ in range(5):
            space.commit(ranges((0, 8)), content=2)
            space.decommit(ranges((0, 8)), forget_content=False)
    assert calls.count(Call.CREATE) == 8
    assert calls.count(Call.RELEASE) == 0


def test_reuse_keeps_the_order(pool: PagePool, make_space: MakeSpace) -> None:
    # Neighbours stay neighbours: on the host they merge to one mapping of the system's.
    space = make_space()
    space.commit(ranges((0, 6)), content=2)
    before = space.mapped_page_groups().tolist()
    space.decommit(ranges((0, 6)), forget_content=False)
    space.commit(ranges((8, 6)), content=2)
    assert space.mapped_page_groups().tolist() == before
    space.decommit(ranges((10, 2)), forget_content=False)  # the last to be freed is the first to be taken
    space.commit(ranges((0, 2)), content=2)
    assert space.mapped_page_groups().tolist() == [*before[2:4], *before[:2], *before[4:]]


@pytest.mark.parametrize("num_free", [0, 2])
def test_shortage_changes_nothing(pool: PagePool, make_space: MakeSpace, num_free: int) -> None:
    space = make_space(64)
    space.commit(ranges((0, 10 + num_free)), content=2)
    space.decommit(ranges((10, num_free)), forget_content=False)
    fill_place(space, 3, 77)
    before = pool.stats(), space.arrays.table[:64].tolist()
    for wanted, missing in ((7, 1), (6 + 48, 48)):
        with pytest.raises(Shortage) as caught, record(pool.driver) as calls:
            space.commit(ranges((10, wanted)), content=2)
        assert caught.value.page_groups == missing
        assert len(calls) == 0
        assert (pool.stats(), space.arrays.table[:64].tolist()) == before
    assert place_value(space, 3) == 77
    space.commit(ranges((10, 6)), content=2)
    assert pool.num_available == 0


def test_shortage_of_the_device(make_pool: MakePool) -> None:
    pool = make_pool(None)
    space = AddressSpace(pool, 16 * pool.page_group_bytes)
    with fail(pool.driver, Call.CREATE, 4, code=2), pytest.raises(Shortage) as caught:
        space.commit(ranges((0, 10)), content=2)
    assert caught.value.page_groups == 7
    assert pool.stats().total_page_groups == 0
    error = out_of_pages(space, "a test", caught.value)
    assert isinstance(error, OutOfPagesError)
    assert "a test needs 7 more page groups" in str(error)
    assert pool.driver.device in str(error)
    assert "0 are mapped, 0 free" in str(error)
    space.commit(ranges((0, 10)), content=2)


def test_capacity_beyond_the_device(device: str) -> None:
    # The books have room for as many page groups as the device has memory for, and for no more.
    size = get_driver(device).granularity_bytes
    pool = PagePool(device, capacity_bytes=1 << 50, page_group_bytes=size)
    num_places = 3 * get_driver(device).memory_info()[1] // size
    space = AddressSpace(pool, num_places * size)
    with fail(pool.driver, Call.CREATE, 1, code=2, times=1 << 60) as calls, pytest.raises(Shortage):
        space.commit(ranges((0, num_places)), content=2)
    assert len(calls) == 0
    space.commit(ranges((0, 3)), content=2)
    pool.check_integrity()
    space.close()
    pool.close()


@pytest.mark.parametrize("num_page_groups", [None, 8])
def test_headroom(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, num_page_groups: int | None) -> None:
    pool = make_pool(num_page_groups)
    space = AddressSpace(pool, 8 * pool.page_group_bytes)
    space.commit(ranges((0, 8)), content=2)
    space.decommit(ranges((5, 3)), forget_content=False)
    for free_bytes in (0, 1, 3 * pool.page_group_bytes):
        monkeypatch.setattr(type(pool.driver), "memory_info", lambda self, free=free_bytes: (free, 1 << 30))
        others = free_bytes // pool.page_group_bytes
        assert pool.headroom() == ((3, 8) if num_page_groups else (3 + others, 8 + others))
    space.commit(ranges((5, 3)), content=2)
    monkeypatch.setattr(type(pool.driver), "memory_info", lambda self: (0, 1 << 30))
    assert (pool.headroom(), pool.num_available >= 0) == ((0, 8), True)


@pytest.mark.parametrize("size_classes", [1, 6])
def test_6912_bytes_are_one_page_group(make_pool: MakePool, device: str, size_classes: int) -> None:
    pool = make_pool(8, page_group_bytes=get_driver(device).default_page_group_bytes, size_classes=size_classes)
    space = AddressSpace(pool, 6912)
    assert (space.num_places, space.size_bytes) == (1, pool.page_group_bytes)
    assert space.commit(ranges((0, 1)), content=2) == 1
    whole = tensor_at(device, space.base, 6912)
    whole.copy_(torch.arange(6912) % 251)
    assert whole.cpu().equal((torch.arange(6912) % 251).to(torch.uint8))
    assert pool.stats().mapped_page_groups == 1


def test_no_bytes_are_no_driver_call(pool: PagePool, make_space: MakeSpace) -> None:
    space = make_space()
    with record(pool.driver) as calls:
        with pytest.raises(ValueError, match="positive multiple"):
            AddressSpace(pool, 0)
        assert space.commit(ranges((0, 0)), content=2) == 0
        assert space.decommit(ranges((16, 0)), forget_content=True) == 0
    assert len(calls) == 0


# -- giving back --------------------------------------------------------------------------------------------------


def test_trim(pool: PagePool, make_space: MakeSpace) -> None:
    space = make_space()
    space.commit(ranges((0, 8)), content=2)
    fill_place(space, 7, 7)
    space.decommit(ranges((0, 5)), forget_content=False)
    with record(pool.driver) as calls:
        assert pool.trim() == 5 * pool.page_group_bytes
        assert pool.trim() == 0
    assert [made.call for made in calls] == [Call.RELEASE] * 5
    assert pool.stats().total_page_groups == 3
    assert place_value(space, 7) == 7
    space.commit(ranges((0, 13)), content=2)
    assert sorted(space.mapped_page_groups()) == list(range(13))  # indices are taken again too


def test_trim_whose_release_fails_says_so(pool: PagePool, make_space: MakeSpace) -> None:
    space = make_space()
    space.commit(ranges((0, 4)), content=2)
    space.close()
    with fail(pool.driver, Call.RELEASE, 2) as calls, pytest.raises(DriverError, match="cuMemRelease"):
        pool.trim()
    assert calls.count(Call.RELEASE) == 4  # the others are given back all the same
    pool.check_integrity()
    stats = pool.stats()
    assert (stats.total_page_groups, stats.free_page_groups) == (1, 1)
    with fail(pool.driver, Call.RELEASE, 1), pytest.raises(DriverError, match="cuMemRelease"):
        pool.close()
    assert not pool.closed
    assert pool.trim() == pool.page_group_bytes


@pytest.mark.parametrize(
    ("num_page_groups", "retired", "keeps"), [(16, False, True), (16, True, False), (None, False, False)]
)
def test_who_keeps_free_page_groups(
    make_pool: MakePool, num_page_groups: int | None, retired: bool, keeps: bool
) -> None:
    pool = make_pool(num_page_groups)
    space, other = AddressSpace(pool, pool.page_group_bytes), AddressSpace(pool, 4 * pool.page_group_bytes)
    space.commit(ranges((0, 1)), content=2)
    other.commit(ranges((0, 4)), content=2)
    if retired:
        pool.retire()
    other.close()
    assert pool.keeps_free_page_groups == keeps
    assert pool.stats().free_page_groups == (4 if keeps else 0)
    space.close()
    assert pool.stats().total_page_groups == (5 if keeps else 0)


def test_allocate_and_close_64_times(device: str) -> None:
    driver = get_driver(device)
    free = []
    for _ in range(65):
        pool = PagePool(device)
        space = AddressSpace(pool, 64 * MIB)
        space.commit(ranges((0, space.num_places)), content=2)
        assert pool.stats().mapped_page_groups * pool.page_group_bytes == 64 * MIB
        space.close()
        pool.close()
        if device == "cpu":
            assert driver.live_bytes == 0  # type: ignore[attr-defined]
        free.append(driver.memory_info()[0])
    assert free[-1] > free[0] - 512 * MIB  # and not 4 GiB less; others use the machine too


def test_create_and_close_100_times(device: str) -> None:
    for _ in range(100):
        pool = PagePool(device, page_group_bytes=get_driver(device).granularity_bytes)
        space = AddressSpace(pool, 1 << 33)
        space.commit(ranges((space.num_places - 2, 2)), content=2)
        space.close()
        pool.close()


# -- ends of life -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations("ABP")), ids="".join)
@pytest.mark.parametrize("num_page_groups", [None, 16])
def test_close_in_any_order(device: str, order: tuple[str, ...], num_page_groups: int | None) -> None:
    size = get_driver(device).granularity_bytes
    pool = PagePool(
        device, capacity_bytes=None if num_page_groups is None else num_page_groups * size, page_group_bytes=size
    )
    space, empty = AddressSpace(pool, 4 * size), AddressSpace(pool, 4 * size)
    space.commit(ranges((0, 3)), content=2)
    owners = {"A": space, "B": empty, "P": pool}
    for name in order:
        if name == "P" and not space.closed:
            with pytest.raises(VTensorError, match="still has 3 mapped page groups"):
                pool.close()
            assert not pool.closed
        else:
            owners[name].close()
            assert owners[name].closed
    for owner in owners.values():
        owner.close()
        owner.close()
        assert owner.closed
        assert "closed" in repr(owner)
        owner.check_integrity()


def test_as_a_context(device: str) -> None:
    size = get_driver(device).granularity_bytes
    with PagePool(device) as pool:
        space = AddressSpace(pool, size)
        space.commit(ranges((0, 1)), content=2)
        space.close()
    assert pool.closed
    with pytest.raises(ZeroDivisionError), PagePool(device) as pool:
        divmod(1, 0)
    assert pool.closed
    pool = PagePool(device)
    space = AddressSpace(pool, size)
    space.commit(ranges((0, 1)), content=2)
    with pytest.raises(VTensorError, match="still has 1 mapped"), pool:
        pass
    with pytest.raises(ZeroDivisionError), pool:
        divmod(1, 0)
    assert not pool.closed
    space.close()
    pool.close()


def test_use_after_close(device: str) -> None:
    pool = PagePool(device)
    idle = AddressSpace(pool, 1)
    pool.close()
    with record(pool.driver) as calls:
        for use in (
            pool.trim,
            pool.retire,
            lambda: AddressSpace(pool, 1),
            lambda: pool.adopt(idle),
            lambda: idle.commit(ranges((0, 1)), content=2),
            lambda: idle.decommit(ranges((0, 1)), forget_content=False),
            lambda: idle.alias(0, idle, 0, 1),
        ):
            with pytest.raises(ClosedError, match=f"page pool of {device} was closed"):
                use()
    assert len(calls) == 0
    idle.close()


def test_forgotten_pool_gives_its_memory_back(device: str) -> None:
    pool = PagePool(device)
    space = AddressSpace(pool, 4 * pool.page_group_bytes)
    space.commit(ranges((0, 4)), content=2)
    space.close()
    pool.retire()
    size = pool.page_group_bytes
    other = PagePool(device, capacity_bytes=4 * size, max_size_class_bytes=size)
    space = AddressSpace(other, 4 * pool.page_group_bytes)
    space.commit(ranges((0, 4)), content=2)
    space.close()
    assert other.stats().free_page_groups == 4
    driver, watched = pool.driver, [weakref.ref(pool), weakref.ref(other)]
    with record(driver) as calls:
        del pool, other, space
        gc.collect()
    assert [ref() for ref in watched] == [None, None]
    assert calls.count(Call.RELEASE) == 4


@pytest.mark.parametrize("in_cycle", [False, True])
@pytest.mark.parametrize("num_page_groups", [None, 16])
def test_forgotten_space_gives_its_memory_back(device: str, in_cycle: bool, num_page_groups: int | None) -> None:
    size = get_driver(device).granularity_bytes
    capacity = None if num_page_groups is None else num_page_groups * size
    pool = PagePool(device, capacity_bytes=capacity, page_group_bytes=size, max_size_class_bytes=size)
    driver, space = pool.driver, AddressSpace(pool, 8 * size)
    space.commit(ranges((0, 3), (5, 2)), content=2)
    if in_cycle:
        space.itself = space  # type: ignore[attr-defined]
    with record(driver) as calls:
        del space, pool
        gc.collect()
    counts = {call: calls.count(call) for call in (Call.UNMAP, Call.RELEASE, Call.FREE)}
    assert counts == {Call.UNMAP: 2, Call.RELEASE: 5, Call.FREE: 1}
    assert all(made.code == 0 for made in calls)


def test_forgotten_space_leaves_its_pool_in_order(pool: PagePool, make_space: MakeSpace) -> None:
    kept = make_space()
    kept.commit(ranges((0, 3)), content=2)
    fill_place(kept, 1, 5)
    make_space().commit(ranges((0, 5)), content=2)
    gc.collect()
    pool.check_integrity()
    assert pool.stats().mapped_page_groups == 3
    assert place_value(kept, 1) == 5


# -- several pools, contents --------------------------------------------------------------------------------------


def test_pools_share_nothing(make_pool: MakePool) -> None:
    pools = [make_pool(4), make_pool(8), make_pool(None)]
    spaces = [AddressSpace(pool, 4 * pool.page_group_bytes) for pool in pools]
    for number, space in enumerate(spaces):
        space.commit(ranges((0, 4)), content=2)
        fill_place(space, number, number + 1)
    assert [pool.num_available for pool in pools[:2]] == [0, 4]
    assert pools[2].stats().capacity_page_groups is None
    with pytest.raises(ValueError, match="one pool"):
        spaces[1].alias(0, spaces[0], 0, 1)
    spaces[0].close()
    pools[0].close()
    assert place_value(spaces[1], 1) == 2
    assert place_value(spaces[2], 2) == 3


def test_marks_are_new(pool: PagePool) -> None:
    marks: list[int] = []
    threads = [threading.Thread(target=lambda: marks.extend(pool.new_content() for _ in range(500))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(marks)) == 2000
    assert min(marks) > 0


# -- integrity finds what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["twice free", "free and mapped", "lost", "total", "mappings", "table", "count"])
def test_integrity_finds_damage(pool: PagePool, make_space: MakeSpace, damage: str) -> None:
    space = make_space()
    space.commit(ranges((0, 6)), content=2)
    space.decommit(ranges((0, 3)), forget_content=False)
    space.check_integrity()
    arrays, header = pool.arrays, pool.arrays.header
    saved = [array[:32].copy() for array in (*arrays[:7], space.arrays.table, space.arrays.header)]
    if damage == "twice free":
        arrays.free[0] = arrays.free[1]
    elif damage == "free and mapped":
        arrays.free[0] = space.mapped_page_groups()[0]
    elif damage == "lost":
        header[words.NUM_FREE] -= 1
    elif damage == "total":
        header[words.NUM_TOTAL] += 1
    elif damage == "mappings":
        arrays.num_mappings[space.mapped_page_groups()[0]] += 1
    elif damage == "table":
        space.arrays.table[7] = space.arrays.table[4]
    else:
        space.arrays.header[words.NUM_MAPPED] += 1
    with pytest.raises(VTensorError):
        space.check_integrity()
    for array, before in zip((*arrays[:7], space.arrays.table, space.arrays.header), saved, strict=True):
        array[:32] = before
    space.check_integrity()


# -- forks --------------------------------------------------------------------------------------------------------


@HOST_ONLY
def test_forked_child_is_told_and_harms_nothing(pool: PagePool, make_space: MakeSpace) -> None:
    space, empty = make_space(), make_space()
    space.commit(ranges((0, 8)), content=2)
    space.decommit(ranges((4, 4)), forget_content=False)
    for place in range(4):
        fill_place(space, place, place + 1)
    before = pool.stats(), space.arrays.table[:16].tolist(), pool.driver.live_bytes  # type: ignore[attr-defined]

    def use() -> list[str]:
        raised = []
        for do in (
            lambda: space.commit(ranges((4, 1)), content=2),
            lambda: space.commit(ranges((0, 1)), content=2),
            lambda: space.decommit(ranges((0, 1)), forget_content=False),
            lambda: empty.alias(0, space, 0, 1),
            lambda: AddressSpace(pool, 1),
            space.close,
            empty.close,
            pool.trim,
            pool.retire,
            pool.close,
        ):
            try:
                do()
                raised.append("nothing")
            except ForkedError:
                raised.append("ForkedError")
        # A pool of its own, and a lot of it.
        own = PagePool("cpu", page_group_bytes=4096)
        for _ in range(3):
            child_space = AddressSpace(own, 64 * 4096)
            child_space.commit(ranges((0, 64)), content=2)
            fill_place_without_torch(child_space, 64)
            child_space.close()
        own.close()
        return raised

    code, text = in_child(use)
    assert code == 0, text
    assert text == str(["ForkedError"] * 10)
    assert (pool.stats(), space.arrays.table[:16].tolist(), pool.driver.live_bytes) == before  # type: ignore[attr-defined]
    assert [place_value(space, place) for place in range(4)] == [1, 2, 3, 4]
    space.commit(ranges((0, 16)), content=2)
    assert [place_value(space, place) for place in range(4)] == [1, 2, 3, 4]


def fill_place_without_torch(space: AddressSpace, num_places: int) -> None:
    """A child must not rely on torch's threads, which stayed with the parent."""
    ctypes.memset(space.base, 255, num_places * space.page_group_bytes)


@HOST_ONLY
def test_inherited_objects_die_without_harm(device: str) -> None:
    size = get_driver(device).granularity_bytes
    pool, loose = PagePool(device, capacity_bytes=8 * size, page_group_bytes=size), PagePool(device)
    space, loose_space = AddressSpace(pool, 8 * size), AddressSpace(loose, 4 * loose.page_group_bytes)
    space.commit(ranges((0, 4)), content=2)
    loose_space.commit(ranges((0, 4)), content=2)
    for place in range(4):
        fill_place(space, place, place + 1)
        fill_place(loose_space, place, place + 5)
    space.decommit(ranges((0, 2)), forget_content=False)

    def die() -> list[object]:
        nonlocal pool, loose, space, loose_space
        watched = [weakref.ref(owner) for owner in (pool, loose, space, loose_space)]
        del pool, loose, space, loose_space
        gc.collect()
        return [ref() for ref in watched]

    assert in_child(die) == (0, "[None, None, None, None]")
    space.commit(ranges((0, 2)), content=2)
    assert [place_value(space, place) for place in range(4)] == [1, 2, 3, 4]
    assert [place_value(loose_space, place) for place in range(4)] == [5, 6, 7, 8]


@HOST_ONLY
def test_child_does_not_see_the_parents_memory(pool: PagePool, make_space: MakeSpace) -> None:
    space = make_space()
    space.commit(ranges((0, 1), (4, 1)), content=2)
    fill_place(space, 0, 9)
    space.decommit(ranges((4, 1)), forget_content=False)
    assert in_child(lambda: ctypes.memset(space.base, 1, 1)) == (-signal.SIGSEGV, "")
    places = [space.base + place * space.page_group_bytes for place in (0, 2, 4)]  # mapped, never mapped, unmapped
    assert in_child(lambda: [access_at(place) for place in places]) == (0, "['', '', '']")
    assert place_value(space, 0) == 9


# -- threads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_page_groups", [24, None])
def test_threads_share_a_pool(make_pool: MakePool, num_page_groups: int | None) -> None:
    pool = make_pool(num_page_groups)
    num_rounds, num_places = 1000, 16
    spaces = [AddressSpace(pool, num_places * pool.page_group_bytes) for _ in range(2)]
    rounds, errors, barrier = [0, 0], [], threading.Barrier(2)

    def work(number: int) -> None:
        random, space, mark = np.random.default_rng(number), spaces[number], pool.new_content()
        held: set[int] = set()
        try:
            barrier.wait()
            for _ in range(num_rounds):
                first = int(random.integers(num_places))
                span = ranges((first, int(random.integers(1, num_places - first + 1))))
                places = set(range(first, first + int(span[0, 1])))
                if random.random() < 0.5:
                    try:
                        assert space.commit(span, content=mark) == len(places - held)
                        held |= places
                    except Shortage:
                        assert num_page_groups
                else:
                    assert space.decommit(span, forget_content=False) == len(places & held)
                    held -= places
                if random.random() < 0.05:
                    pool.trim()
                assert set(np.flatnonzero(space.arrays.table[:num_places])) == held
                rounds[number] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert rounds == [num_rounds] * 2
    pool.check_integrity()


def test_process_that_exits_with_open_pools() -> None:
    code = (
        "from tests.helpers.memory import ranges\n"
        "from vtensor.allocator.address_space import AddressSpace\n"
        "from vtensor.allocator.page_pool import PagePool\n"
        "pools = [PagePool('cpu', capacity_bytes=1 << 20), PagePool('cpu')]\n"
        "spaces = [AddressSpace(pool, 1 << 40) for pool in pools]\n"
        "for space in spaces: space.commit(ranges((0, 3), (9, 2)), content=2)\n"
        "spaces[0].itself = spaces\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize("value", [(1 << 40) + 4096 * 16, 1 << 63, 1 << 70])
def test_page_groups_beyond_all_memory_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match=r"page_group_bytes=[\d,]+ must be at most 1,099,511,627,776"):
        PagePool("cpu", page_group_bytes=value)
