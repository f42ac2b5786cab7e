"""Much memory put below one range, with ever larger handles: the variants (see `vtensor.bench.map`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vtensor.allocator.address_space import AddressSpace
from vtensor.allocator.driver import get_driver
from vtensor.allocator.page_pool import PagePool
from vtensor.bench.batch import finish
from vtensor.bench.frame import Variant, timed_us
from vtensor.bench.raw_calls import RawHandles
from vtensor.bench.round_trip import check_memory
from vtensor.errors import VTensorError
from vtensor.units import format_bytes

__all__ = ["in_bulk", "pool_and_space"]

_SIZE_FACTORS = (1, 2, 4, 8, 16, 32)  # of the handles, in the driver's usual page groups
_US_A_HANDLE = {"fresh": 38.0, "recycled": 27.0}
_TARGET = 500.0  # GB/s


@dataclass(kw_only=True)
class _Bulk(Variant):
    """A large range with handles of at most one size. Its memory is taken and given back in every round."""

    device: str
    total_bytes: int
    handle_bytes: int

    def set_up(self, resources: ExitStack) -> None:
        pass

    def check(self) -> None:
        self.run(is_check=True)

    def measure(self) -> Mapping[str, Sequence[float]]:
        return {name: [self.total_bytes / (us * 1000)] for name, us in self.run(is_check=False).items()}

    @abstractmethod
    def run(self, is_check: bool) -> dict[str, float]:
        """Commit fresh memory, take it away, commit it again; us of both. With `is_check`, look at it."""


@dataclass(kw_only=True)
class _BulkCommit(_Bulk):
    """Ours."""

    def run(self, is_check: bool) -> dict[str, float]:
        driver = get_driver(self.device)
        size = driver.default_page_group_bytes
        number = self.total_bytes // size
        with ExitStack() as resources:
            pool, space = pool_and_space(resources, self.device, number, size, self.handle_bytes)
            whole, mark = np.array([[0, number]], np.int64), pool.new_content()
            spent = {}
            for name in ("fresh", "recycled"):
                _, spent[name] = timed_us(space.commit, whole, content=mark)
                finish(torch.device(self.device))
                if is_check:
                    check_memory(driver, range(space.base, space.base + self.total_bytes, self.handle_bytes))
                    _check_handles(pool, self.total_bytes // self.handle_bytes)
                space.decommit(whole, forget_content=False)
            return spent


@dataclass(kw_only=True)
class _BulkRaw(_Bulk):
    """The driver's calls alone."""

    def run(self, is_check: bool) -> dict[str, float]:
        driver = get_driver(self.device)
        number = self.total_bytes // self.handle_bytes
        handles = RawHandles(driver, self.handle_bytes, number, is_scattered=False)
        try:
            spent = {}
            for name in ("fresh", "recycled"):
                _, spent[name] = timed_us(handles.map)
                if is_check:
                    check_memory(driver, handles.addresses.tolist())
                handles.unmap()
            return spent
        finally:
            handles.close()


def in_bulk(device: str, total_bytes: int) -> Iterator[Variant]:
    """Commits of so much memory with handles of at most so many bytes, and their ceilings."""
    sizes = [get_driver(device).default_page_group_bytes * factor for factor in _SIZE_FACTORS]
    sizes = [size for size in sizes if size <= total_bytes]
    for size in sizes:
        driver = f"driver alone, {format_bytes(size)}"
        common: dict[str, Any] = {"device": device, "total_bytes": total_bytes, "handle_bytes": size}
        common["parameters"] = {"max_size_class_bytes": size}
        common["predicted"] = {memory: round(size / us / 1000, 1) for memory, us in _US_A_HANDLE.items()}
        targets = {"fresh": _TARGET} if size == sizes[-1] else {}
        yield _BulkRaw(name=driver, **common)
        yield _BulkCommit(name=f"bulk, {format_bytes(size)}", ceiling=driver, targets=targets, **common)


def pool_and_space(
    resources: ExitStack, device: str, num_places: int, page_group_bytes: int, max_size_class_bytes: int
) -> tuple[PagePool, AddressSpace]:
    """A pool that keeps what is free, and an address space for all of it."""
    pool = PagePool(
        device,
        capacity_bytes=num_places * page_group_bytes,
        page_group_bytes=page_group_bytes,
        max_size_class_bytes=max_size_class_bytes,
    )
    resources.callback(pool.close)
    space = AddressSpace(pool, num_places * page_group_bytes)
    resources.callback(space.close)
    return pool, space


def _check_handles(pool: PagePool, expected: int) -> None:
    created = pool.stats().num_driver_calls["cuMemCreate"]
    if created != expected:
        raise VTensorError(f"{created} handles were created, where {expected} are enough")
