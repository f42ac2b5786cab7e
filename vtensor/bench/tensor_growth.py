"""A tensor that gets more rows, chunk by chunk: the variants (see `vtensor.bench.tensor`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from vtensor.allocator import graveyard
from vtensor.allocator.page_pool import PagePool
from vtensor.bench.batch import finish
from vtensor.bench.frame import Variant, timed_us
from vtensor.bench.tensor_touches import open_pool
from vtensor.errors import VTensorError
from vtensor.factory import empty
from vtensor.units import MIB, format_bytes, round_up

__all__ = ["growth"]

_WIDTH = 1024
_ROW_BYTES = 4 * _WIDTH  # float32


@dataclass(kw_only=True)
class _Growth(Variant):
    """One way to put chunks of rows into one tensor."""

    device: str
    num_chunks: int
    chunk_rows: int
    source: torch.Tensor = field(init=False)
    chunks: Sequence[torch.Tensor] = field(init=False)

    @property
    def num_rows(self) -> int:
        """All of them."""
        return self.num_chunks * self.chunk_rows

    @property
    def chunk_bytes(self) -> int:
        """Bytes that come at a time."""
        return self.chunk_rows * _ROW_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of the rows at the end."""
        return self.num_rows * _ROW_BYTES

    def set_up(self, resources: ExitStack) -> None:
        values = torch.arange(self.num_rows * _WIDTH, dtype=torch.int32, device=self.device)
        self.source = values.remainder_(1 << 20).to(torch.float32).view(self.num_rows, _WIDTH)
        self.chunks = self.source.split(self.chunk_rows)  # type: ignore[no-untyped-call]
        resources.callback(lambda: (self.__dict__.pop("source"), self.__dict__.pop("chunks")))

    def check(self) -> None:
        self.prepare()
        grown = self.grow_and_finish()
        if not torch.equal(grown, self.source):
            raise VTensorError("the rows do not read as they came")
        self.check_memory(grown)

    def check_memory(self, grown: torch.Tensor) -> None:
        """Raise where the memory at the end is not what `peak_bytes` reckons with."""

    def measure(self) -> Mapping[str, Sequence[float]]:
        self.prepare()
        spent_us = timed_us(self.grow_and_finish)[1]
        return {"grown": [spent_us / 1000], "peak, computed": [self.peak_bytes() / MIB]}

    def prepare(self) -> None:
        """What comes before, and is not timed."""

    def grow_and_finish(self) -> torch.Tensor:
        """Put all rows into one tensor, and wait for the device."""
        grown = self.grow()
        finish(torch.device(self.device))
        return grown

    @abstractmethod
    def grow(self) -> torch.Tensor:
        """Put all rows into one tensor."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Bytes of all tensors when they are most, without the chunk at hand."""


@dataclass(kw_only=True)
class _Append(_Growth):
    """Ours."""

    is_fresh: bool
    pool: PagePool = field(init=False)

    def set_up(self, resources: ExitStack) -> None:
        super().set_up(resources)
        self.pool = open_pool(resources, self.device, self.total_bytes + MIB)

    def prepare(self) -> None:
        graveyard.drain()
        if self.is_fresh:
            self.pool.trim()
        elif self.pool.stats().free_page_groups == 0:
            self.grow_and_finish()
            graveyard.drain()

    def grow(self) -> torch.Tensor:
        grown = empty(0, _WIDTH, dtype=torch.float32, device=self.device, pool=self.pool, max_rows=self.num_rows)
        for rows in self.chunks:
            grown.append_(rows)
        return grown

    def peak_bytes(self) -> int:
        return round_up(self.total_bytes, self.pool.page_group_bytes)

    def check_memory(self, grown: torch.Tensor) -> None:
        mapped_bytes = self.pool.stats().mapped_page_groups * self.pool.page_group_bytes
        if mapped_bytes != self.peak_bytes():
            raise VTensorError(f"{mapped_bytes:,} bytes are mapped, where {self.peak_bytes():,} are enough")


class _CatEach(_Growth):
    """A new tensor for each chunk."""

    def grow(self) -> torch.Tensor:
        grown = torch.empty(0, _WIDTH, device=self.device)
        for rows in self.chunks:
            grown = torch.cat([grown, rows])
        return grown

    def peak_bytes(self) -> int:
        return 2 * self.total_bytes - self.chunk_bytes  # the last tensor and the one before


class _CatOnce(_Growth):
    """A list of chunks, which become one tensor at the end."""

    def grow(self) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for rows in self.chunks:
            kept.append(rows)
        return torch.cat(kept)

    def peak_bytes(self) -> int:
        return 2 * self.total_bytes  # the chunks, of which none can go before, and the tensor


class _Preallocated(_Growth):
    """A tensor for all rows, whose number is known before."""

    def grow(self) -> torch.Tensor:
        grown = torch.empty(self.num_rows, _WIDTH, device=self.device)
        first = 0
        for rows in self.chunks:
            grown[first : first + len(rows)] = rows
            first += len(rows)
        return grown

    def peak_bytes(self) -> int:
        return self.total_bytes


def growth(device: str, num_chunks: int, chunk_bytes: int) -> Iterator[Variant]:
    """So many chunks of so many bytes, put into one tensor in every way."""
    size = f", {format_bytes(chunk_bytes)}"
    ceiling = f"preallocated{size}"
    common: dict[str, Any] = {"device": device, "num_chunks": num_chunks, "chunk_rows": chunk_bytes // _ROW_BYTES}
    for memory in ("fresh", "recycled"):
        is_fresh = memory == "fresh"
        yield _Append(name=f"append_, {memory}{size}", ceiling=ceiling, is_fresh=is_fresh, **common)
    yield _CatEach(name=f"torch.cat each{size}", ceiling=ceiling, **common)
    yield _CatOnce(name=f"list, one torch.cat{size}", ceiling=ceiling, **common)
    yield _Preallocated(name=ceiling, **common)
