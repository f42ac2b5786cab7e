"""Latency of the virtual-memory calls, by handle size: `vtensor bench api`.

Each round makes the whole life of one handle, reserve to free, through `Driver`'s methods; the rounds of all sizes are
shuffled together, so that whatever drifts (clock, neighbours) drifts for all of them. The same methods over C functions
that do nothing give the share of Python in every figure.

What it gave on an H200, against what was expected there: notebooks/results/README.md.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

from vtensor.allocator.driver import Call, Driver, get_driver
from vtensor.allocator.driver.host import HostDriver
from vtensor.bench.round_trip import round_trip
from vtensor.bench.stats import Summary, summarize
from vtensor.errors import VTensorError
from vtensor.units import KIB, MIB, format_bytes

__all__ = ["ApiResult", "handle_sizes", "measure", "render"]

Result = TypeVar("Result")

HOST_SIZES = (4 * KIB, 64 * KIB, 2 * MIB, 32 * MIB)
CUDA_SIZES = (2 * MIB, 4 * MIB, 32 * MIB, 128 * MIB, 512 * MIB)
# In the order of a handle's life.
ORDER = (Call.RESERVE, Call.CREATE, Call.MAP, Call.SET_ACCESS, Call.UNMAP, Call.RELEASE, Call.FREE)
_WARMUP_ROUNDS = 3
_BASELINE_ROUNDS = 200
_SEED = 20_25


@dataclass(frozen=True)
class ApiResult:
    """Latencies of one handle size, us.

    Attributes
    ----------
    handle_bytes : int
    calls : dict of Call to Summary
        As measured: the driver's time and Python's.
    python_us : dict of Call to float
        Python's share: the median of the same method over a C function that does nothing.
    """

    handle_bytes: int
    calls: dict[Call, Summary]
    python_us: dict[Call, float]

    def as_record(self) -> dict[str, Any]:
        """For a line of JSON: keys ``handle_bytes``, ``unit`` and ``calls``, by call a summary and ``python``."""
        calls = {
            call.name.lower(): {**asdict(summary), "python": self.python_us[call]}
            for call, summary in self.calls.items()
        }
        return {"handle_bytes": self.handle_bytes, "unit": "us", "calls": calls}


class _IdleDriver(Driver):
    """A driver whose C functions return at once: what remains is the cost of calling them."""

    kind = "idle"
    fresh_memory_is_zero = True
    device = "idle"
    granularity_bytes = 1
    default_page_group_bytes = 1
    creation_properties = read_write_access = read_only_access = 0

    def __init__(self) -> None:
        super().__init__()
        self.entry_points = np.full(len(Call), _no_operation().address, np.int64)

    def memory_info(self) -> tuple[int, int]:
        return 0, 0

    def access_to(self, peers: Sequence[int], *, writable: bool) -> npt.NDArray[np.int32]:
        return np.zeros((1 + len(peers), 3), np.int32)

    def explain(self, call: Call, code: int) -> tuple[str, str]:
        return f"error {code}", "unknown"


@cache
def _no_operation() -> Any:
    from numba import cfunc

    # Fewer arguments than some callers pass: in the C calling conventions of 64-bit machines the rest is ignored.
    return cfunc("int32(int64)")(lambda first: 0)


def handle_sizes(driver: Driver) -> tuple[int, ...]:
    """The sizes that are measured on a driver: those that its granularity divides."""
    sizes = HOST_SIZES if driver.kind == "host" else CUDA_SIZES
    return tuple(size for size in sizes if size % driver.granularity_bytes == 0)


def measure(
    device: str, rounds: int, on_round: Callable[[int, int], None] = lambda done, total: None
) -> list[ApiResult]:
    """Measure every call at every handle size. All that was taken is given back at the end, also after an error.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda:<index>"``.
    rounds : int
        Of each size; three more before them are not counted.
    on_round : callable
        Told (rounds done, rounds in all), outside of what is timed.

    Raises
    ------
    ValueError
        `rounds` is not positive, or the device is of another kind.
    VTensorError
        A byte that was written reads differently, or memory is left over at the end.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds!r} must be at least 1")
    driver = get_driver(device)
    sizes = handle_sizes(driver)
    live_before = driver.live_bytes if isinstance(driver, HostDriver) else 0
    for size in sizes:
        round_trip(driver, reserve_bytes=size, handle_bytes=size)

    python_us = {
        call: summary.median for call, summary in _summaries(_run(_IdleDriver(), [1] * _BASELINE_ROUNDS)).items()
    }
    warmup, order = list(sizes) * _WARMUP_ROUNDS, list(sizes) * rounds
    random.Random(_SEED).shuffle(order)
    timings: dict[int, list[dict[Call, float]]] = {size: [] for size in sizes}
    for number, (size, life) in enumerate(_run(driver, warmup + order)):
        if number >= len(warmup):
            timings[size].append(life)
        on_round(number + 1, len(warmup) + len(order))

    if isinstance(driver, HostDriver) and driver.live_bytes != live_before:
        raise VTensorError(f"{driver.live_bytes - live_before:,} bytes were not given back")
    return [ApiResult(size, _summaries((size, life) for life in lives), python_us) for size, lives in timings.items()]


def _run(driver: Driver, sizes: list[int]) -> Iterator[tuple[int, dict[Call, float]]]:
    for size in sizes:
        yield size, _time_life(driver, size)


def _time_life(driver: Driver, size: int) -> dict[Call, float]:
    """Make, use up and give back one handle; us of each call."""
    spent: dict[Call, float] = {}

    def timed(call: Call, method: Callable[..., Result], *arguments: int) -> Result:
        start = time.perf_counter_ns()
        result = method(*arguments)
        spent[call] = (time.perf_counter_ns() - start) / 1000
        return result

    with ExitStack() as undo:  # runs in the order unmap, release, free: as one would by hand
        address = timed(Call.RESERVE, driver.reserve, size)
        undo.callback(timed, Call.FREE, driver.free, address, size)
        handle = timed(Call.CREATE, driver.create, size)
        undo.callback(timed, Call.RELEASE, driver.release, handle)
        timed(Call.MAP, driver.map, address, size, handle)
        undo.callback(timed, Call.UNMAP, driver.unmap, address, size)
        timed(Call.SET_ACCESS, driver.set_access, address, size)
    return spent


def _summaries(lives: Any) -> dict[Call, Summary]:
    samples = [life for _, life in lives]
    return {call: summarize([life[call] for life in samples]) for call in ORDER}


def render(results: list[ApiResult], title: str) -> Table:
    """Medians by call and handle size, with p10 and p90 below each, and Python's share beside them."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = (
        "us: median, and below it p10 to p90. Calling from Python is part of every figure; the last column is its "
        "share, measured with the same methods over C functions that do nothing. Compiled code does not pay it."
    )
    table.add_column("call", no_wrap=True)
    for result in results:
        table.add_column(format_bytes(result.handle_bytes), justify="right", no_wrap=True)
    table.add_column("Python", justify="right", no_wrap=True, style="dim")
    for call in ORDER:
        summaries = [result.calls[call] for result in results]
        table.add_row(
            call.name.lower(),
            *(f"{_us(s.median)}\n[dim]{_us(s.p10)}-{_us(s.p90)}[/dim]" for s in summaries),
            _us(results[0].python_us[call]),
        )
    return table


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
