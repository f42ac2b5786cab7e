"""Iterations of a decode loop whose memory grows: `vtensor bench overlap` (the paper's figure 12).

256 requests decode; an iteration is `step` with one token more for each, then the model's work of about 10 ms (on a GPU
matrix products, as many as a calibration says; on the host a sleep), then the wait for its end, as for the sampled
tokens. The requests' lengths are staggered, so that in every iteration some cross into a new page group. Every 40th
iteration fills everybody's last page group to the brim, and the one after it has all of them cross at once: the worst
that there is, and still known one iteration ahead.

::

    iteration                     0 ... 37     38        39       40        41 ...
    tokens more, each request     1            1 to 16   1        0 to 15   1
    requests that need memory     16           none      all      none      16

Three variants over the same lengths: *look-ahead* on and off, and *no growth*, which makes the same calls with lengths
that stay. A round is a whole run of iterations; the series go to the record.

Predicted for an H200 (Llama-3-8B, 32 layers a slice: 16 tokens a page group, 27 us each): without
look-ahead 16 page groups in an ordinary iteration, 0.43 ms more than no growth, and 256 in the worst, 6.9 ms more: one
iteration in 40 is slow. With look-ahead nothing but the step itself, 0.05 ms, since 6.9 ms of mapping fit below 10 ms
of work: none is slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch

from vtensor.allocator.driver import get_driver
from vtensor.bench.batch import FullBatch, Int64, check_tokens, stepped
from vtensor.bench.frame import Benchmark, Metric, Variant, timed_us
from vtensor.devices import device_name, resolve_device
from vtensor.kvcache import KVCacheConfig

__all__ = ["benchmark", "decode_lengths"]

_BATCH_SIZE = 256
_PERIOD = 40  # iterations from one crossing of all to the next
_SLOW = 1.2  # times the median
_MATRIX_SIZE = 4096
_METRICS = {
    "iteration": Metric("us"),
    "step": Metric("us"),
    "slowest of a round": Metric("us"),
    "slow in a round": Metric("iterations"),
    "mapped ahead": Metric("%", higher_is_better=True),
}


def decode_lengths(num_iterations: int, batch_size: int, tokens_per_page_group: int) -> Int64:
    """Lengths of all requests in every iteration, of which each may be stepped to from the one before.

    Returns
    -------
    ndarray of int64, shape [num_iterations, batch_size]
        Staggered at first. In the last but one iteration of every `_PERIOD` all requests fill their page group, and in
        the last they all cross into the next one; then they spread again, within it.
    """
    offsets = np.arange(batch_size) % tokens_per_page_group
    lengths = tokens_per_page_group + 1 + offsets
    series = np.empty((num_iterations, batch_size), np.int64)
    for iteration in range(num_iterations):
        position = iteration % _PERIOD
        if position == _PERIOD - 2:
            lengths = -(-lengths // tokens_per_page_group) * tokens_per_page_group
        elif position == 0 and iteration:
            lengths = lengths + offsets
        else:
            lengths = lengths + 1
        series[iteration] = lengths
    return series


@dataclass(kw_only=True)
class _Loop(Variant):
    """A decode loop over a full cache."""

    device: str
    config: KVCacheConfig
    lengths: Int64
    work: Callable[[], None]
    lookahead_tokens: int
    batch: FullBatch = field(init=False)

    def set_up(self, resources: ExitStack) -> None:
        self.batch = FullBatch(
            self.config,
            self.device,
            most_tokens=int(self.lengths.max()) + 1,
            lookahead_tokens=self.lookahead_tokens,
        )
        resources.callback(self.batch.cache.close)

    def check(self) -> None:
        self.batch.restart(self.lengths[0])
        for lengths in self.lengths[1:]:
            stepped(self.batch.cache, lengths)
        check_tokens(self.batch.cache, self.lengths[-1])

    def measure(self) -> Mapping[str, Sequence[float]]:
        cache = self.batch.cache
        self.batch.restart(self.lengths[0])
        self.work()  # as long as an iteration, for the mapper
        iterations, steps, num_mapped, num_ahead = [], [], 0, 0
        for lengths in self.lengths[1:]:
            start = time.perf_counter_ns()
            result, step_us = timed_us(stepped, cache, lengths)
            self.work()
            iterations.append((time.perf_counter_ns() - start) / 1000)
            steps.append(step_us)
            num_mapped += result.num_mapped
            num_ahead += result.num_mapped_by_mapper
        self.details.setdefault("iteration_us", []).append([round(spent) for spent in iterations])
        self.details.setdefault("step_us", []).append([round(spent, 1) for spent in steps])
        threshold = _SLOW * median(iterations)
        return {
            "iteration": iterations,
            "step": steps,
            "slowest of a round": [max(iterations)],
            "slow in a round": [sum(spent > threshold for spent in iterations)],
            **({"mapped ahead": [100 * num_ahead / num_mapped]} if num_mapped else {}),
        }


def _host_work(work_us: float) -> Callable[[], None]:
    """A wait, without the GIL."""
    return lambda: time.sleep(work_us / 1e6)


def _gpu_work(device: torch.device, work_us: float) -> tuple[Callable[[], None], int]:
    """Matrix products that keep a GPU busy for about so long, and the wait for their end; and how many there are."""
    left, right = (torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)

    def multiply(number: int) -> None:
        for _ in range(number):
            torch.mm(left, right, out=out)
        torch.cuda.synchronize(device)

    multiply(50)  # clocks up, kernel chosen
    one_us = median(timed_us(multiply, 50)[1] / 50 for _ in range(5))
    number = max(1, round(work_us / one_us))
    return lambda: multiply(number), number


def benchmark(device: str, *, small: bool = False, rounds: int | None = None) -> Benchmark:
    """The benchmark for a device. `small`: a first look, in a few seconds."""
    resolved = resolve_device(device)
    device = device_name(resolved)
    on_gpu = device != "cpu"
    config = _config(on_gpu, get_driver(device).granularity_bytes)
    work_us = 2_000.0 if small else 10_000.0
    num_iterations = _PERIOD + 2 if small else 3 * _PERIOD + 1
    work, parameters = _host_work(work_us), {"small": small, "work_us": work_us, "num_iterations": num_iterations - 1}
    if on_gpu:
        work, parameters["num_matrix_products"] = _gpu_work(resolved, work_us)
    growing = decode_lengths(num_iterations, _BATCH_SIZE, config.tokens_per_page_group)
    common: dict[str, Any] = {"device": device, "config": config, "work": work}
    variants = []
    for name, lookahead_tokens, lengths in (
        ("look-ahead", 1, growing),
        ("no look-ahead", 0, growing),
        ("no growth", 1, np.repeat(growing[:1], num_iterations, axis=0)),
    ):
        variants.append(
            _Loop(
                name=name,
                parameters={"lookahead_tokens": lookahead_tokens, "is_growing": lengths is growing},
                predicted=_predicted(name, work_us, config.tokens_per_page_group, num_iterations),
                lookahead_tokens=lookahead_tokens,
                lengths=lengths,
                **common,
            )
        )
    return Benchmark(
        name="overlap",
        title=f"Iterations of {_BATCH_SIZE} requests that decode",
        device=device,
        metrics=_METRICS,
        variants=variants,
        rounds=(1 if small else 5) if rounds is None else rounds,
        parameters={
            **parameters,
            "batch_size": _BATCH_SIZE,
            "period": _PERIOD,
            "slow": _SLOW,
            "tokens_per_page_group": config.tokens_per_page_group,
        },
        notes=f"slow: longer than {_SLOW} x the round's median; once in {_PERIOD} iterations all requests need another "
        "page group",
        is_predicted=on_gpu,
    )


def _config(on_gpu: bool, page_group_bytes: int) -> KVCacheConfig:
    """Llama-3-8B on a GPU; on the host a 64th of it, so that 4 KiB hold as many tokens as 2 MiB there, or nearly."""
    return KVCacheConfig(
        num_layers=32 if on_gpu else 2,
        num_kv_heads=8 if on_gpu else 1,
        head_dim=128 if on_gpu else 32,
        max_batch_size=_BATCH_SIZE,
        max_context_tokens=1_024,
        dtype=torch.bfloat16,
        layers_per_slice=32 if on_gpu else 2,
        page_group_bytes=page_group_bytes,
    )


def _predicted(name: str, work_us: float, tokens_per_page_group: int, num_iterations: int) -> dict[str, float]:
    ordinary, worst = 27.0 * _BATCH_SIZE / tokens_per_page_group, 27.0 * _BATCH_SIZE
    if name == "no look-ahead":
        slow = float(num_iterations // _PERIOD)
        return {"iteration": work_us + ordinary, "slowest of a round": work_us + worst, "slow in a round": slow}
    step_us = 50.0 if name == "look-ahead" else 15.0
    return {"iteration": work_us + step_us, "slowest of a round": 1.1 * work_us, "slow in a round": 0.0}
