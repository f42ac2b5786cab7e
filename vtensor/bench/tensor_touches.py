"""The first time that page groups are written to or read: the variants (see `vtensor.bench.tensor`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from vtensor.allocator import graveyard
from vtensor.allocator.driver import get_driver
from vtensor.allocator.page_pool import PagePool
from vtensor.bench.batch import finish
from vtensor.bench.frame import Variant, timed_us
from vtensor.bench.raw_calls import RawHandles
from vtensor.bench.round_trip import check_memory
from vtensor.errors import VTensorError
from vtensor.factory import empty
from vtensor.tensor import VirtualTensor

__all__ = ["first_touches", "mapping_us", "open_pool", "zero_reads"]

_MEMORY = "fresh", "recycled"
_TARGET_US = 35.0
_ITEM_BYTES = 4  # float32


def open_pool(resources: ExitStack, device: str, capacity_bytes: int) -> PagePool:
    """A pool that keeps what is free, as long as `resources` do. Not closed: after an error tensors may live on."""
    pool = PagePool(device, capacity_bytes=capacity_bytes)
    resources.callback(pool.retire)
    resources.callback(graveyard.drain)
    return pool


def mapping_us(first_us: float, again_us: float, number: int) -> float:
    """What it took to map each of `number` page groups, from the time of first touches and that of the same once more.

    >>> mapping_us(first_us=1_000.0, again_us=200.0, number=100)
    8.0
    """
    return (first_us - again_us) / number


@dataclass(kw_only=True)
class _Filling(Variant):
    """A range that gets memory, page group by page group, twice. It is taken and given back in every round."""

    device: str
    total_bytes: int

    def set_up(self, resources: ExitStack) -> None:
        self.page_group_bytes = get_driver(self.device).default_page_group_bytes
        self.number = self.total_bytes // self.page_group_bytes

    def check(self) -> None:
        self.run(is_check=True)

    def measure(self) -> Mapping[str, Sequence[float]]:
        return self.run(is_check=False)

    @abstractmethod
    def run(self, is_check: bool) -> dict[str, list[float]]:
        """Fill with fresh memory, take it away, fill with what was left; the samples. With `is_check`, look at it."""


@dataclass(kw_only=True)
class _Touches(_Filling):
    """Ours."""

    def run(self, is_check: bool) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {}
        touched_again = []
        with ExitStack() as resources:
            pool = open_pool(resources, self.device, self.total_bytes)
            x = _empty_page_groups(pool, self.number)
            for memory in _MEMORY:
                _, first_us = timed_us(self.touch, x)
                _, again_us = timed_us(self.touch, x)
                samples[f"mapped {memory}"] = [mapping_us(first_us, again_us, self.number)]
                touched_again.append(again_us / self.number)
                if is_check:
                    self.check_touched(x)
                if (released := x.decommit()) != self.total_bytes:
                    raise VTensorError(f"{released:,} bytes had memory, not {self.total_bytes:,}")
            expected = self.number * (2 if pool.driver.has_readable_holes else 1)  # dirty ones are exchanged there
            if (created := pool.stats().num_driver_calls["cuMemCreate"]) != expected:
                raise VTensorError(f"{created} handles were created for {self.number} page groups, not {expected}")
            del x
        return {**samples, "touched again": touched_again}

    def touch(self, x: VirtualTensor) -> None:
        """Write to every page group by itself."""
        for index in range(self.number):
            x[index, 0] = 1
        finish(x.device)

    def check_touched(self, x: VirtualTensor) -> None:
        """Raise unless each page group has memory of its own that holds what was written, and zeros behind it."""
        if x.resident_bytes != self.total_bytes or x[:, 0].min() != 1 or x[:, 1:].any():
            raise VTensorError("what was touched does not read as it was written")
        x[:, 0] = torch.arange(self.number, device=x.device)
        if not torch.equal(x[:, 0], torch.arange(self.number, device=x.device, dtype=x.dtype)):
            raise VTensorError("two page groups share memory")


@dataclass(kw_only=True)
class _Raw(_Filling):
    """The driver's calls alone."""

    def run(self, is_check: bool) -> dict[str, list[float]]:
        driver = get_driver(self.device)
        handles = RawHandles(driver, self.page_group_bytes, self.number, is_scattered=True)
        samples = {}
        try:
            for memory in _MEMORY:
                _, spent_us = timed_us(handles.map)
                samples[f"mapped {memory}"] = [spent_us / self.number]
                if is_check:
                    check_memory(driver, handles.addresses.tolist())
                handles.unmap()
        finally:
            handles.close()
        return samples


def first_touches(device: str, total_bytes: int) -> Iterator[Variant]:
    """Touches of so much memory, and their ceiling."""
    ceiling = "driver alone"
    targets = {f"mapped {memory}": _TARGET_US for memory in _MEMORY}
    yield _Touches(name="first touches", ceiling=ceiling, targets=targets, device=device, total_bytes=total_bytes)
    yield _Raw(name=ceiling, device=device, total_bytes=total_bytes)


@dataclass(kw_only=True)
class _Reads(Variant):
    """The sum of a torch tensor of zeros."""

    device: str
    total_bytes: int
    x: torch.Tensor = field(init=False)

    def set_up(self, resources: ExitStack) -> None:
        self.number = self.total_bytes // get_driver(self.device).default_page_group_bytes
        self.x = torch.zeros(self.total_bytes // _ITEM_BYTES, device=self.device)
        resources.callback(lambda: self.__dict__.pop("x"))

    def check(self) -> None:
        if (total := self.read(self.x).item()) != 0:
            raise VTensorError(f"zeros add up to {total}")

    def measure(self) -> Mapping[str, Sequence[float]]:
        return {"second read": [timed_us(self.read, self.x)[1] / self.number]}

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Read all of it."""
        total = x.sum()
        finish(x.device)
        return total


@dataclass(kw_only=True)
class _ZeroReads(_Reads):
    """Ours: of a tensor that is made for each round, so that nothing was ever read of it."""

    pool: PagePool = field(init=False)

    def set_up(self, resources: ExitStack) -> None:
        self.pool = open_pool(resources, self.device, self.total_bytes)
        self.number = self.total_bytes // self.pool.page_group_bytes

    def check(self) -> None:
        x = _empty_page_groups(self.pool, self.number)
        totals, calls = [], []
        for _ in range(2):
            totals.append(self.read(x).item())
            calls.append(self.pool.stats().num_driver_calls)
        if totals != [0, 0] or x.resident_bytes:
            raise VTensorError(f"what was never written adds up to {totals}, and takes {x.resident_bytes:,} bytes")
        if calls[0] != calls[1]:
            raise VTensorError("the second read of the same zeros made driver calls")

    def measure(self) -> Mapping[str, Sequence[float]]:
        graveyard.drain()
        x = _empty_page_groups(self.pool, self.number)
        first_us, second_us = (timed_us(self.read, x)[1] / self.number for _ in range(2))
        return {"first read": [first_us], "second read": [second_us]}


def zero_reads(device: str, total_bytes: int) -> Iterator[Variant]:
    """Sums of so many bytes that were never written, and of as many of torch's."""
    ceiling = "sum of torch.zeros"
    yield _ZeroReads(name="sum of vt.empty", ceiling=ceiling, device=device, total_bytes=total_bytes)
    yield _Reads(name=ceiling, device=device, total_bytes=total_bytes)


def _empty_page_groups(pool: PagePool, number: int) -> VirtualTensor:
    """A tensor whose rows are page groups."""
    row = pool.page_group_bytes // _ITEM_BYTES
    return empty(number, row, dtype=torch.float32, device=pool.driver.device, pool=pool)
