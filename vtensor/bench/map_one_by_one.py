"""Page groups put below addresses one by one: the variants, and their predictions (see `vtensor.bench.map`)."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vtensor.allocator.address_space import AddressSpace
from vtensor.allocator.driver import Driver, get_driver
from vtensor.allocator.page_pool import PagePool
from vtensor.bench.batch import Int64, finish
from vtensor.bench.frame import Variant, timed_us
from vtensor.bench.map_bulk import pool_and_space
from vtensor.bench.raw_calls import RawHandles
from vtensor.bench.round_trip import check_memory
from vtensor.errors import VTensorError

__all__ = ["NUM_FROM_PYTHON", "one_by_one"]

NUM_FROM_PYTHON = 16  # page groups: 10 ms each where the GIL is contended
_DRIVER_US = {"fresh": 38.0, "recycled": 27.0}
_ZERO_US = 5.0  # a call of its own for each fresh page group that lies alone
_GIL_US = 5_000.0  # to get the GIL back
_TARGET_US = 30.0


@dataclass(kw_only=True)
class _OneByOne(Variant):
    """Many of the smallest page groups. `measure` leaves nothing mapped."""

    device: str
    number: int
    is_contended: bool = False
    driver: Driver = field(init=False)

    def set_up(self, resources: ExitStack) -> None:
        self.driver = get_driver(self.device)

    def check(self) -> None:
        self.prepare()
        self.put()
        check_memory(self.driver, self.addresses())
        self.clear()

    def measure(self) -> Mapping[str, Sequence[float]]:
        self.prepare()
        with _contended() if self.is_contended else nullcontext():
            _, spent_us = timed_us(self.put)
        self.clear()
        return {"page group": [spent_us / self.number]}

    def prepare(self) -> None:
        """What comes before `put`, and is not timed."""

    @abstractmethod
    def put(self) -> None:
        """Put the page groups below their addresses."""

    @abstractmethod
    def clear(self) -> None:
        """Take them away again."""

    @abstractmethod
    def addresses(self) -> Sequence[int]:
        """Where they were put."""


@dataclass(kw_only=True)
class _Commit(_OneByOne):
    """Ours."""

    is_scattered: bool
    is_fresh: bool
    by_mapper: bool = False
    pool: PagePool = field(init=False)
    space: AddressSpace = field(init=False)
    rows: Int64 = field(init=False)  # first place, number of places, mark of the content, largest size class

    def set_up(self, resources: ExitStack) -> None:
        super().set_up(resources)
        size = self.driver.granularity_bytes
        self.pool, self.space = pool_and_space(resources, self.device, 2 * self.number, size, size)
        mark = self.pool.new_content()
        scattered = [[2 * index, 1, mark, 0] for index in range(self.number)]
        self.rows = np.array(scattered if self.is_scattered else [[0, self.number, mark, 0]], np.int64)

    def prepare(self) -> None:
        if self.is_fresh:
            self.pool.trim()
        elif self.pool.stats().free_page_groups < self.number:
            self.space.commit(self.rows)
            self.clear()

    def put(self) -> None:
        if self.by_mapper:
            self.space.commit_ahead(self.rows).wait()
        else:
            self.space.commit(self.rows)

    def clear(self) -> None:
        finish(torch.device(self.device))
        removed = self.space.decommit(np.ascontiguousarray(self.rows[:, :2]), forget_content=False)
        if removed != self.number:
            raise VTensorError(f"{removed} page groups were mapped, not {self.number}")

    def addresses(self) -> Sequence[int]:
        size = self.pool.page_group_bytes
        return [self.space.base + (row[0] + index) * size for row in self.rows.tolist() for index in range(row[1])]


@dataclass(kw_only=True)
class _Raw(_OneByOne):
    """The driver's calls alone, from compiled code (the ceiling) or from Python (a rival)."""

    is_scattered: bool
    is_fresh: bool
    from_python: bool = False
    handles: RawHandles = field(init=False)

    def set_up(self, resources: ExitStack) -> None:
        super().set_up(resources)
        size = self.driver.granularity_bytes
        self.handles = RawHandles(self.driver, size, self.number, is_scattered=self.is_scattered)
        resources.callback(self.handles.close)
        if not self.is_fresh:
            self.handles.map()
            self.handles.unmap()

    def put(self) -> None:
        if self.from_python:
            self.handles.map_from_python(self.number)
        else:
            self.handles.map()

    def clear(self) -> None:
        self.handles.unmap()
        if self.is_fresh:
            self.handles.release()

    def addresses(self) -> Sequence[int]:
        return self.handles.addresses.tolist()


@contextmanager
def _contended() -> Iterator[None]:
    """Have another thread compute in Python, which lets go of the GIL only when it is asked to, after 5 ms."""
    started, stopped = threading.Event(), threading.Event()

    def spin() -> None:
        started.set()
        while not stopped.is_set():
            pass

    thread = threading.Thread(target=spin, name="vtensor bench: spin")
    thread.start()
    started.wait()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def one_by_one(device: str, number: int) -> Iterator[Variant]:
    """Commits, scattered and in one run, fresh and recycled, alone and contended; their ceilings and rivals."""
    common: dict[str, Any] = {"device": device, "number": number}
    for memory, driver_us in _DRIVER_US.items():
        for places in ("scattered", "one run"):
            what: dict[str, Any] = {"is_scattered": places == "scattered", "is_fresh": memory == "fresh"}
            driver = f"driver alone, {places}, {memory}"
            zero_us = _ZERO_US * (what["is_scattered"] and what["is_fresh"])
            yield _Raw(name=driver, parameters=what, **common, **what, predicted={"page group": driver_us})
            for is_contended in (False, True):
                expected_us = driver_us + zero_us + is_contended * 3 * _GIL_US / number
                yield _Commit(
                    name=f"commit, {places}, {memory}{_beside(is_contended)}",
                    parameters={**what, "is_contended": is_contended},
                    ceiling=driver,
                    is_contended=is_contended,
                    **common,
                    **what,
                    predicted={"page group": round(expected_us, 1)},
                    targets={} if what["is_fresh"] else {"page group": _TARGET_US},
                )
    what, driver = {"is_scattered": True, "is_fresh": False}, "driver alone, scattered, recycled"
    for is_contended in (False, True):
        expected_us = _DRIVER_US["recycled"] + is_contended * 2 * _GIL_US / number
        yield _Commit(
            name=f"mapper, scattered, recycled{_beside(is_contended)}",
            parameters={**what, "is_contended": is_contended},
            ceiling=driver,
            is_contended=is_contended,
            by_mapper=True,
            **common,
            **what,
            predicted={"page group": round(expected_us, 1)},
            targets={"page group": _TARGET_US},
        )
    common["number"] = NUM_FROM_PYTHON
    for is_contended, python_us in ((False, 33.0), (True, 10_293.0)):
        yield _Raw(
            name=f"calls from Python, scattered, recycled{_beside(is_contended)}",
            parameters={**what, "is_contended": is_contended},
            ceiling=driver,
            is_contended=is_contended,
            from_python=True,
            **common,
            **what,
            predicted={"page group": python_us},
        )


def _beside(is_contended: bool) -> str:
    return ", GIL contended" if is_contended else ""
