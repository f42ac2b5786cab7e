"""What `step` costs before an iteration: `vtensor bench step`.

256 slots, lengths in a NumPy array. Three variants:

- *nothing to map*: the same lengths again and again, one call after the other.
- *growing, looked ahead*: a token's row is as long as the smallest page group, so that every slot needs exactly one
  page group more in every step, the worst that decoding can ask for. Between the steps the caller waits as it would for
  the model (for a kernel, with ``synchronize``; on the host, for matrix products), long enough for the mapper to be
  ahead. *beyond no-op* is what such a step takes beyond one with nothing to map, made after the same wait.
- *growing, not looked ahead*: the same with ``lookahead_tokens=0``: the step maps all of it itself.

After the first start all page groups are recycled ones, as in a server that has been running for a while.

Predicted for an H200, from earlier measurements of the calls: a step with nothing to map 15 us, since ten NumPy calls
take 16 and there are fewer of them left; one that was looked ahead 30 us more (256 records written into the mapper's
ring, one eventfd); one that was not 256 x 27 us = 6,900 us (map 1.4, set_access 25). Targets: 15 us, and 50 us beyond.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch

from vtensor.allocator.driver import get_driver
from vtensor.bench.batch import FullBatch, Int64, check_tokens, finish, stepped
from vtensor.bench.frame import Benchmark, Metric, Variant, timed_us
from vtensor.devices import device_name, resolve_device
from vtensor.errors import VTensorError
from vtensor.kvcache import KVCacheConfig

__all__ = ["benchmark"]

_BATCH_SIZE = 256
_CYCLES_A_SECOND = 1.8e9  # of a GPU's clock, roughly
_METRICS = {
    "step": Metric("us"),
    "beyond no-op": Metric("us"),
    "waited": Metric("us"),
    "mapped ahead": Metric("%", higher_is_better=True),
}


@dataclass(kw_only=True)
class _Steps(Variant):
    """A full cache, in which a token takes one page group."""

    device: str
    num_steps: int
    lookahead_tokens: int
    batch: FullBatch = field(init=False)

    def set_up(self, resources: ExitStack) -> None:
        page_group_bytes = get_driver(self.device).granularity_bytes
        config = _one_page_group_a_token(page_group_bytes, 2 * self.num_steps + 2)
        options = {"lookahead_tokens": self.lookahead_tokens}
        self.batch = FullBatch(config, self.device, most_tokens=self.num_steps + 1, **options)
        resources.callback(self.batch.cache.close)

    def check(self) -> None:
        lengths = self._start()
        for _ in range(3):
            lengths += 1
            result = stepped(self.batch.cache, lengths)
            if result.num_mapped != _BATCH_SIZE:
                raise VTensorError(f"{result.num_mapped} page groups were mapped, where every slot needs one more")
        check_tokens(self.batch.cache, lengths)

    def _start(self) -> Int64:
        lengths = np.ones(_BATCH_SIZE, np.int64)
        self.batch.restart(lengths)
        return lengths


@dataclass(kw_only=True)
class _Idle(_Steps):
    """Steps with nothing to map."""

    num_calls: int

    def measure(self) -> Mapping[str, Sequence[float]]:
        lengths = self._start()
        return {"step": [timed_us(stepped, self.batch.cache, lengths)[1] for _ in range(self.num_calls)]}


@dataclass(kw_only=True)
class _Growing(_Steps):
    """Steps in which every slot needs one page group more."""

    pause_s: float

    def measure(self) -> Mapping[str, Sequence[float]]:
        cache, lengths = self.batch.cache, self._start()
        growing, waited, ahead, idle = [], [], [], []
        for _ in range(self.num_steps):
            lengths += 1
            self.pause()
            result, spent_us = timed_us(stepped, cache, lengths)
            growing.append(spent_us)
            waited.append(result.waited_us)
            ahead.append(100 * result.num_mapped_by_mapper / result.num_mapped)
        for _ in range(self.num_steps):
            self.pause()
            idle.append(timed_us(stepped, cache, lengths)[1])
        floor = median(idle)
        beyond = [spent_us - floor for spent_us in growing]
        return {"step": growing, "beyond no-op": beyond, "waited": waited, "mapped ahead": ahead}

    def pause(self) -> None:
        """An iteration of the model, without the GIL. A processor that slept would be several times slower."""
        if self.device == "cpu":
            end, matrix = time.perf_counter() + self.pause_s, np.ones((256, 256), np.float32)
            while time.perf_counter() < end:
                matrix @ matrix
        else:
            torch.cuda._sleep(int(self.pause_s * _CYCLES_A_SECOND))  # type: ignore[no-untyped-call]
            finish(self.batch.cache.device)


def _one_page_group_a_token(page_group_bytes: int, max_context_tokens: int) -> KVCacheConfig:
    """K and V of one layer, 8 heads, bf16: 32 bytes for every element of a head."""
    return KVCacheConfig(
        num_layers=1,
        num_kv_heads=8,
        head_dim=page_group_bytes // 32,
        max_batch_size=_BATCH_SIZE,
        max_context_tokens=max_context_tokens,
        dtype=torch.bfloat16,
        page_group_bytes=page_group_bytes,
        max_size_class_bytes=page_group_bytes,
    )


def benchmark(device: str, *, small: bool = False, rounds: int | None = None) -> Benchmark:
    """The benchmark for a device. `small`: a first look, in about a second."""
    device = device_name(resolve_device(device))
    num_steps, num_calls = (3, 20) if small else (20, 500)
    # Time for 256 page groups of about 30 us each, and of about 5 us on the host, twice over.
    pause_s = 0.005 if device == "cpu" else 0.02
    idle = _Idle(
        name="nothing to map",
        predicted={"step": 15.0},
        targets={"step": 15.0},
        device=device,
        num_steps=num_steps,
        lookahead_tokens=1,
        num_calls=num_calls,
    )
    ahead, behind = (
        _Growing(
            name=name,
            parameters={"lookahead_tokens": lookahead_tokens},
            predicted={"beyond no-op": beyond_us},
            targets={"beyond no-op": 50.0} if lookahead_tokens else {},
            device=device,
            num_steps=num_steps,
            lookahead_tokens=lookahead_tokens,
            pause_s=pause_s,
        )
        for name, lookahead_tokens, beyond_us in (
            ("growing, looked ahead", 1, 30.0),
            ("growing, not looked ahead", 0, 6_900.0),
        )
    )
    return Benchmark(
        name="step",
        title=f"KVCacheManager.step of {_BATCH_SIZE} slots",
        device=device,
        metrics=_METRICS,
        variants=[idle, ahead, behind],
        rounds=(2 if small else 10) if rounds is None else rounds,
        parameters={
            "small": small,
            "batch_size": _BATCH_SIZE,
            "num_steps": num_steps,
            "num_calls": num_calls,
            "pause_s": pause_s,
            "page_group_bytes": get_driver(device).granularity_bytes,
        },
        notes="growing: every slot needs one page group more in every step",
        is_predicted=device != "cpu",
    )
