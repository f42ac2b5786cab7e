"""What every test gets: both devices, owners of memory closed and audited, a watch for what is left behind.

Every `PagePool`, `AddressSpace` and `KVCacheManager` that a test makes, by whatever way, has its books checked at the
end of the test. Below tests/allocator, and wherever `nothing_left_behind` is asked for, the host's memory, open files,
threads and reservations must be back where they were.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vtensor.allocator import graveyard
from vtensor.allocator.address_space import AddressSpace
from vtensor.allocator.driver import Driver, get_driver
from vtensor.allocator.mapper import get_mapper
from vtensor.allocator.page_pool import PagePool

STRICT = Path(__file__).resolve().parent / "allocator"
OWNERS = {
    "vtensor.allocator.page_pool": "PagePool",
    "vtensor.allocator.address_space": "AddressSpace",
    "vtensor.kvcache.manager": "KVCacheManager",
}
_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _owners.add(self)

    return noting


@pytest.fixture(scope="session", autouse=True)
def _note_owners() -> Iterator[None]:
    """Know every owner of memory that is made from now on; what was there before is no concern of the collector's."""
    torch.ones(1 << 20).sum().item()  # torch starts its threads now, and not in the middle of a test
    with pytest.MonkeyPatch.context() as patch:
        for module, name in OWNERS.items():
            owner = getattr(importlib.import_module(module), name)
            patch.setattr(owner, "__init__", _noting(owner.__init__))
        gc.collect()
        gc.freeze()  # 100 ms a collection otherwise, and one follows every test
        yield
        gc.unfreeze()


def audit() -> None:
    """Check the books of every owner that is alive."""
    gc.collect()
    graveyard.drain()
    for owner in list(_owners):
        try:
            owner.check_integrity()
        except Exception:
            _owners.discard(owner)  # once is enough: later tests are not to blame
            raise


@pytest.fixture(autouse=True)
def _audited() -> Iterator[None]:
    yield
    audit()


# -- what a test leaves behind ------------------------------------------------------------------------------------


def _left() -> dict[str, int]:
    """What a test must give back, as far as the host is concerned."""
    from vtensor.allocator.driver import host_native as native

    return {
        "live_bytes": int(native.STATE[native.LIVE_BYTES]),
        "reservations": int(native.STATE[native.NUM_RESERVATIONS]),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Fail where memory, reservations, open files or threads of the host are not what they were before the test."""
    get_mapper(get_driver("cpu"))  # a file and a thread for as long as the process lives
    np.ones((256, 256)) @ np.ones((256, 256))  # a fork ends the threads of BLAS, and this starts them again
    audit()
    before = _left()
    yield
    audit()
    deadline = time.monotonic() + 2  # a joined thread takes a moment to leave the system's list
    while (after := _left())["threads"] > before["threads"] and time.monotonic() < deadline:
        time.sleep(0.01)
    after["threads"] = max(after["threads"], before["threads"])  # fewer is fine: a fork ends those of BLAS
    assert after == before


@pytest.fixture(autouse=True)
def _strict_for_the_allocator(request: pytest.FixtureRequest) -> None:
    if STRICT in request.path.parents and "cuda:0" not in request.node.name:  # CUDA opens files when it likes
        request.getfixturevalue("nothing_left_behind")


# -- devices and owners -------------------------------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, however it is parametrised."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each device of the driver table, by its name there; also good for torch."""
    with pytest.MonkeyPatch.context() as patch:  # of its own, as a test may undo what the shared one did
        if request.param != "cpu" and STRICT in request.path.parents:
            _wait_for_the_device(patch)
        yield str(request.param)


def _wait_for_the_device(patch: pytest.MonkeyPatch) -> None:
    """Have the device finish after whatever gives it work, and before memory is taken away, which owners see to."""

    def waiting(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wait_and_call(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            try:
                return call(*args, **kwargs)
            finally:
                torch.cuda.synchronize()

        return wait_and_call

    for name in ("commit", "decommit", "decommit_later", "close"):
        patch.setattr(AddressSpace, name, waiting(getattr(AddressSpace, name)))


@pytest.fixture
def gpu() -> str:
    """The GPU, for tests that are marked with its name."""
    return "cuda:0"


@pytest.fixture
def driver(device: str) -> Driver:
    """The driver of the device."""
    return get_driver(device)


@pytest.fixture
def make_pool(device: str) -> Iterator[Callable[..., PagePool]]:
    """Make pools of the device's smallest page groups; at the end they are audited and closed, spaces first.

    `num_page_groups` is the capacity, None for a pool without one. All handles are of one size unless told otherwise.
    """
    made: list[PagePool] = []

    def make(
        num_page_groups: int | None = None, page_group_bytes: int | None = None, size_classes: int = 1
    ) -> PagePool:
        size = page_group_bytes or get_driver(device).granularity_bytes
        capacity = None if num_page_groups is None else num_page_groups * size
        made.append(
            PagePool(
                device, capacity_bytes=capacity, page_group_bytes=size, max_size_class_bytes=size << size_classes - 1
            )
        )
        return made[-1]

    yield make
    audit()
    for pool in made:
        for space in list(pool._spaces):
            space.close()
        pool.close()


@pytest.fixture
def pool(make_pool: Callable[..., PagePool]) -> PagePool:
    """A pool of at most 16 page groups of the smallest size."""
    return make_pool(16)


@pytest.fixture
def make_space(pool: PagePool) -> Callable[..., AddressSpace]:
    """Make address spaces of a number of places, in `pool` unless told otherwise; closed with their pool."""

    def make(num_places: int = 16, pool: PagePool = pool) -> AddressSpace:
        return AddressSpace(pool, num_places * pool.page_group_bytes)

    return make
