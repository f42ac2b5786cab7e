"""What it takes to put memory to sleep and to wake it: `vtensor bench sleep`.

Segments of torch's allocator, as large as a model's weights in all, go to sleep and wake again: with their content kept
in host memory (*offload*), and without (*discard*). Bandwidths are bytes of the segments by the caller's time, until
the device has done it. The ceiling of *offload* is the link: one copy of as many bytes between device memory and host
memory that is there, pinned, and was used before. torch keeps pinned memory that it was given back, and so the first
sleep of a process, which has it pinned, takes many times longer: *first sleep* is that, once.

Targets for an H200: 80 % of the link's bandwidth to go to sleep, and 50 ms to discard 15 GiB and to have them again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from vtensor.allocator.arena import Arena, Offload
from vtensor.allocator.driver import get_driver
from vtensor.allocator.page_pool import PagePool
from vtensor.bench.frame import Benchmark, Metric, Variant, timed_us
from vtensor.devices import device_name, resolve_device
from vtensor.errors import VTensorError
from vtensor.units import GIB, MIB, format_bytes

__all__ = ["benchmark"]

_GB = 1e9
_SAMPLE_BYTES, _SAMPLE_EVERY_BYTES = 4096, 4 * MIB


def _gb_per_s(size_bytes: int, spent_us: float) -> float:
    return size_bytes / _GB / (spent_us * 1e-6)


@dataclass(kw_only=True)
class _Sleep(Variant):
    """Segments that go to sleep and wake."""

    device: str
    num_segments: int
    segment_bytes: int
    offload: Offload
    arena: Arena = field(init=False)
    addresses: list[int] = field(init=False)
    first_us: float | None = field(init=False, default=None)

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments."""
        return self.num_segments * self.segment_bytes

    def set_up(self, resources: ExitStack) -> None:
        pool = PagePool(self.device)
        resources.callback(pool.close)
        self.arena = Arena(pool, 4 * self.total_bytes)
        resources.callback(self.arena.close)
        self.arena.sleep("discard")  # compiled now, so that no first time is that of the compiler
        self.arena.wake()
        allocate = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)
        free = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)
        make, drop = allocate(self.arena.allocate_callback), free(self.arena.free_callback)
        self.addresses = []
        for _ in range(self.num_segments):
            address = int(make(self.segment_bytes, 0, 0))
            if not address:
                raise VTensorError(f"there is no memory for {format_bytes(self.total_bytes)} of segments")
            self.addresses.append(address)
            resources.callback(drop, address, self.segment_bytes, 0, 0)

    def check(self) -> None:
        driver = get_driver(self.device)
        written = torch.arange(_SAMPLE_BYTES, device="cpu").remainder_(251).to(torch.uint8)
        read = torch.empty_like(written)
        samples = [*self.sampled_addresses()]
        for address in samples:
            driver.copy_to_device(address, written.data_ptr(), _SAMPLE_BYTES, 0)
        driver.finish(0)
        _, self.first_us = timed_us(self.arena.sleep, self.offload)
        if self.arena.space.pool.stats().total_page_groups:
            raise VTensorError("memory is still there, asleep")
        self.arena.wake()
        expected = written if self.offload == "cpu" else torch.zeros_like(written)
        for address in samples:
            driver.copy_to_host(read.data_ptr(), address, _SAMPLE_BYTES, 0)
            driver.finish(0)
            if not torch.equal(read, expected):
                raise VTensorError("what is awake again does not hold what it should")

    def sampled_addresses(self) -> Iterator[int]:
        """Places in all segments, their ends among them."""
        for address in self.addresses:
            yield from range(address, address + self.segment_bytes, _SAMPLE_EVERY_BYTES)
            yield address + self.segment_bytes - _SAMPLE_BYTES

    def measure(self) -> Mapping[str, Sequence[float]]:
        asleep, sleep_us = timed_us(self.arena.sleep, self.offload)
        awake, wake_us = timed_us(self.arena.wake)
        if asleep != self.total_bytes or awake != self.total_bytes:
            raise VTensorError(f"{asleep:,} bytes went to sleep and {awake:,} woke, not {self.total_bytes:,}")
        samples = {"sleep": [sleep_us / 1000], "wake": [wake_us / 1000]}
        if self.offload == "discard":
            return {**samples, "both": [(sleep_us + wake_us) / 1000]}
        rates = {"out": [_gb_per_s(asleep, sleep_us)], "back": [_gb_per_s(awake, wake_us)]}
        if self.first_us is not None:
            samples["first sleep"], self.first_us = [self.first_us / 1000], None
        return {**samples, **rates}

    def warm_up(self) -> None:
        """The check has done it; the first sleep is to be reported."""


@dataclass(kw_only=True)
class _Link(Variant):
    """A copy of as many bytes."""

    device: str
    total_bytes: int
    chunk_bytes: int

    def set_up(self, resources: ExitStack) -> None:
        is_gpu = self.device != "cpu"
        self.there = torch.ones(self.chunk_bytes, dtype=torch.uint8, device=self.device)
        self.here = torch.zeros(self.chunk_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_gpu)
        resources.callback(lambda: (self.__dict__.pop("there"), self.__dict__.pop("here")))

    def check(self) -> None:
        self.copy(self.here, self.there)
        if (self.here != 1).any():
            raise VTensorError("the copy is none")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a chunk again and again."""
        for _ in range(self.total_bytes // self.chunk_bytes):
            target.copy_(source, non_blocking=True)
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def measure(self) -> Mapping[str, Sequence[float]]:
        _, out_us = timed_us(self.copy, self.here, self.there)
        _, back_us = timed_us(self.copy, self.there, self.here)
        return {"out": [_gb_per_s(self.total_bytes, out_us)], "back": [_gb_per_s(self.total_bytes, back_us)]}


def benchmark(device: str, *, small: bool = False, rounds: int | None = None) -> Benchmark:
    """The benchmark for a device. `small`: a first look, in a few seconds."""
    device = device_name(resolve_device(device))
    on_gpu = device != "cpu"
    segment_bytes = 512 * MIB if on_gpu and not small else 8 * MIB
    num_segments = 30 if on_gpu and not small else 4
    total_bytes = num_segments * segment_bytes
    common = {"device": device, "num_segments": num_segments, "segment_bytes": segment_bytes}
    variants: list[Variant] = [
        _Sleep(name="offload", ceiling="link", offload="cpu", **common),  # type: ignore[arg-type]
        _Sleep(name="discard", offload="discard", targets={"both": 50.0}, **common),  # type: ignore[arg-type]
        _Link(name="link", device=device, total_bytes=total_bytes, chunk_bytes=min(total_bytes, GIB)),
    ]
    return Benchmark(
        name="sleep",
        title="Memory that goes to sleep and wakes",
        device=device,
        metrics={
            **{name: Metric("ms") for name in ("sleep", "wake", "both", "first sleep")},
            **{name: Metric("GB/s", higher_is_better=True) for name in ("out", "back")},
        },
        variants=variants,
        rounds=(2 if small else 5) if rounds is None else rounds,
        parameters={"small": small, "num_segments": num_segments, "segment_bytes": segment_bytes},
        notes=f"{num_segments} segments of {format_bytes(segment_bytes)}",
        is_predicted=on_gpu,
    )
