"""torch's allocations on our pages beside torch's own allocators: `vtensor bench alloc`.

**One by one.** *miss*: `torch.empty` of 64 MiB with nothing cached, so that a segment is made: cudaMalloc, or page
groups stitched together. *hit*: the same once more, after the tensor was dropped. Microseconds of the caller's time.

**Training.** Steps of a small transformer with AdamW, whose batches have another length each, and every other layer of
which recomputes its activations in the backward: the sizes that fragment memory. Each round starts with nothing cached.
*step* is the median of a round's steps but for the first; *reserved* and *allocated* are torch's peaks; *largest batch*
is the largest with which all steps run within so much memory (`set_per_process_memory_fraction`), found once.

*torch* is the caching allocator as it comes, *expandable* with expandable_segments. *stitched* runs each step within
`vtensor.use_allocator`; *stitched, trimmed* also gives back what is cached after each step. torch gives back nothing of
a pool that lives, not even when memory is short: without the trim, a length that fits no cached block takes new memory.

Targets for an H200: a miss at most twice torch's, a hit and a step as torch's (taken as 1.2 and 1.01 times), and at the
peak 1.03 times as much reserved as allocated.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vtensor.allocator.pluggable import trim, use_allocator
from vtensor.bench.frame import Benchmark, Metric, Variant
from vtensor.devices import device_name, resolve_device
from vtensor.errors import VTensorError
from vtensor.units import GIB, MIB, format_bytes

__all__ = ["benchmark"]

_TAG = "vtensor bench alloc"
_MISS_BYTES = 64 * MIB
_SEED = 7


@dataclass(frozen=True)
class _Shape:
    """A model and its batches."""

    num_layers: int
    width: int
    batch_size: int
    shortest: int
    longest: int
    num_steps: int


class _Model(nn.Module):
    def __init__(self, shape: _Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(shape.width, shape.width // 64, 4 * shape.width, 0.0, batch_first=True)
            for _ in range(shape.num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number % 2 else layer(x)
        return x


@dataclass(kw_only=True)
class _Training(Variant):
    """torch's allocator as it comes."""

    device: str
    shape: _Shape
    limit_bytes: int
    losses: dict[int, list[float]] = field(init=False, default_factory=dict)
    largest: int | None = field(init=False, default=None)

    # -- what tells the variants apart --------------------------------------------------------------------------------

    def within(self) -> AbstractContextManager[Any]:
        """Where a step allocates."""
        return nullcontext()

    def after_step(self) -> None:
        """What follows each step."""

    def begin(self) -> None:
        """Before a round: nothing is cached."""
        self.empty()

    def end(self) -> None:
        """After a round."""
        self.empty()

    # -----------------------------------------------------------------------------------------------------------------

    @property
    def on_gpu(self) -> bool:
        """Whether there is an allocator to compare."""
        return self.device != "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def empty(self) -> None:
        """Give back what is cached."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    def finish(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def set_up(self, resources: ExitStack) -> None:
        pass

    def check(self) -> None:
        self.begin()
        try:
            losses, _ = self.train(self.shape.batch_size)
            if self.on_gpu:
                self.largest = self.largest_batch()
        finally:
            self.end()
        expected = _expected_losses(self.device, self.shape)
        if not torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=2e-2 if self.on_gpu else 1e-5):
            raise VTensorError(f"the losses are {losses}, not {expected}")

    def train(self, batch_size: int) -> tuple[list[float], list[float]]:
        """A new model, trained; losses and milliseconds of the steps."""
        torch.manual_seed(_SEED)
        lengths = random.Random(_SEED)
        with self.within():
            model = _Model(self.shape).to(self.device, self.dtype)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        losses, spent_ms = [], []
        for _ in range(self.shape.num_steps):
            length = lengths.randint(self.shape.shortest, self.shape.longest)
            self.finish()
            start = time.perf_counter()
            with self.within():
                x = torch.randn(batch_size, length, self.shape.width, device=self.device, dtype=self.dtype)
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.detach())
                del x, loss
            self.after_step()
            self.finish()
            spent_ms.append((time.perf_counter() - start) * 1e3)
        return [loss.item() for loss in losses], spent_ms

    def largest_batch(self) -> int:
        """The largest that can be trained within the limit."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        least, too_large = 0, None
        torch.cuda.set_per_process_memory_fraction(self.limit_bytes / total, self.device)
        try:
            while too_large is None or too_large - least > 1:
                batch_size = max(2 * least, self.shape.batch_size) if too_large is None else (least + too_large) // 2
                try:
                    self.train(batch_size)
                    least = batch_size
                except torch.OutOfMemoryError:
                    too_large = batch_size
                gc.collect()
                self.end()
                self.begin()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        return least

    def measure(self) -> Mapping[str, Sequence[float]]:
        self.begin()
        try:
            return self.measured()
        finally:
            self.end()

    def measured(self) -> dict[str, list[float]]:
        """The figures of a round."""
        samples: dict[str, list[float]] = {}
        if self.on_gpu:
            samples["miss"], samples["hit"] = ([us] for us in self.one_by_one())
            torch.cuda.reset_peak_memory_stats(self.device)
        _, spent_ms = self.train(self.shape.batch_size)
        samples["step"] = [statistics.median(spent_ms[1:])]
        if self.on_gpu:
            reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
            samples["reserved"], samples["allocated"] = [reserved / GIB], [allocated / GIB]
            samples["reserved / allocated"] = [reserved / allocated]
            if self.largest is not None:
                samples["largest batch"], self.largest = [self.largest], None
        return samples

    def warm_up(self) -> None:
        """The check was one."""

    def one_by_one(self) -> tuple[float, float]:
        """Microseconds of an allocation that makes a segment, and of the same once more."""
        with self.within():
            spent_us = []
            for _ in range(2):
                start = time.perf_counter()
                x = torch.empty(_MISS_BYTES, dtype=torch.uint8, device=self.device)
                spent_us.append((time.perf_counter() - start) * 1e6)
                del x
        self.begin()
        return spent_us[0], spent_us[1]


class _Expandable(_Training):
    """With expandable segments."""

    def begin(self) -> None:
        self.empty()
        if self.on_gpu:
            _set("expandable_segments:True")

    def end(self) -> None:
        self.empty()
        if self.on_gpu:
            _set("expandable_segments:False")


def _set(settings: str) -> None:
    """Change torch's allocator, by the function that does it in this version."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch.cuda.memory._set_allocator_settings)(settings)


class _Stitched(_Training):
    """On our pages."""

    def within(self) -> AbstractContextManager[Any]:
        return use_allocator(_TAG, on_unsupported="torch" if self.device == "cpu" else "raise")

    def empty(self) -> None:
        if self.on_gpu:
            with self.within():
                pass  # so that the tag is known
            trim(_TAG)


class _Trimmed(_Stitched):
    """On our pages, given back after each step."""

    def after_step(self) -> None:
        self.empty()


def _expected_losses(device: str, shape: _Shape) -> list[float]:
    key = (device, shape)
    if key not in _losses:
        plain = _Training(name="expected", device=device, shape=shape, limit_bytes=0)
        _losses[key] = plain.train(shape.batch_size)[0]
        plain.empty()
    return _losses[key]


_losses: dict[tuple[str, _Shape], list[float]] = {}


def benchmark(device: str, *, small: bool = False, rounds: int | None = None) -> Benchmark:
    """The benchmark for a device. `small`: a first look, in a few seconds."""
    device = device_name(resolve_device(device))
    on_gpu = device != "cpu"
    shape = _Shape(8, 1024, 8, 128, 2048, 12) if on_gpu and not small else _Shape(2, 128, 2, 16, 64, 4)
    limit_bytes = 8 * GIB if not small else GIB
    common: dict[str, Any] = {"device": device, "shape": shape, "limit_bytes": limit_bytes}
    target = {"reserved / allocated": 1.03}
    variants = [
        _Training(name="torch", **common),
        _Expandable(name="expandable", **common),
        _Stitched(name="stitched", targets=target, **common),
        _Trimmed(name="stitched, trimmed", targets=target, **common),
    ]
    return Benchmark(
        name="alloc",
        title="torch's allocations, on our pages and on its own",
        device=device,
        metrics={
            **{name: Metric("us") for name in ("miss", "hit")},
            "step": Metric("ms"),
            **{name: Metric("GiB") for name in ("reserved", "allocated")},
            "reserved / allocated": Metric("x"),
            "largest batch": Metric("sequences", higher_is_better=True),
        },
        variants=variants,
        rounds=(2 if small else 5) if rounds is None else rounds,
        parameters={"small": small, "shape": vars(shape), "limit_bytes": limit_bytes, "miss_bytes": _MISS_BYTES},
        notes=f"{shape.num_layers} layers of {shape.width}, {shape.batch_size} sequences of {shape.shortest} to "
        f"{shape.longest}, {shape.num_steps} steps"
        + (f"; largest batch within {format_bytes(limit_bytes)}" if on_gpu else "; a CPU has one allocator only"),
        is_predicted=on_gpu,
    )
