"""Timing of kernels: calls that follow one another, in a CUDA graph where that can be."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Repeated"]

_LEAST_US = 2000.0
_MOST_CALLS = 256
_MOST_CALLS_NO_GRAPH = 16


class Repeated:
    """Calls over several layers' caches, again and again, so that the L2 cache holds none of them when its turn comes.

    Parameters
    ----------
    calls : sequence of callable
        One a layer. What they return is dropped.
    device : str
    about_us : float
        About how long one takes: there are as many as take 2 ms together.
    least : int
        How many there are at least.
    in_graph : bool
        Whether they are captured into a CUDA graph. If not, the host's gaps between them count.
    """

    def __init__(
        self,
        calls: Sequence[Callable[[], Any]],
        device: str,
        *,
        about_us: float,
        least: int = 1,
        in_graph: bool = True,
    ) -> None:
        self._on_gpu = device != "cpu"
        self._device = device
        self._in_graph = in_graph and self._on_gpu
        number = len(calls)
        if self._on_gpu:
            most = max(_MOST_CALLS, least) if self._in_graph else _MOST_CALLS_NO_GRAPH
            number = min(max(math.ceil(_LEAST_US / about_us), least), most)
        self.num_calls = number
        self._calls = [calls[i % len(calls)] for i in range(number)]
        self._warms = about_us * number < 3 * _LEAST_US
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def is_graph(self) -> bool:
        """Whether they are in a CUDA graph."""
        return self._graph is not None

    def prepare(self) -> None:
        """Pay what is paid once: the capture, and a run."""
        if self._in_graph:
            with torch.cuda.device(self._device):
                self._calls[0]()
                self._graph = _captured(self._calls, self._device)
            self._calls = []
        self.us()

    def us(self) -> float:
        """Microseconds of a call, now."""
        if not self._on_gpu:
            start = time.perf_counter_ns()
            self._run()
            return (time.perf_counter_ns() - start) / 1000 / self.num_calls
        with torch.cuda.device(self._device):
            return self._us_of_gpu()

    def _us_of_gpu(self) -> float:
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        if self._warms:  # what follows is on the device before it begins
            self._run()
        start.record()
        self._run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / self.num_calls

    def _run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for call in self._calls:
            call()


_shared: dict[str, tuple[torch.cuda.Stream, Any]] = {}
"""By device: a stream to capture in, and a memory pool. Graphs run one at a time, so one pool serves all."""


def _captured(calls: Sequence[Callable[[], Any]], device: str) -> torch.cuda.CUDAGraph:
    try:
        return _capture(calls, device)
    except BaseException:
        # torch takes the pool, and its random numbers, to be in a capture still: another pool, and one that ends well.
        del _shared[device]
        number = torch.zeros(1, device=device)
        with contextlib.suppress(RuntimeError):
            _capture([number.zero_], device)
        raise


def _capture(calls: Sequence[Callable[[], Any]], device: str) -> torch.cuda.CUDAGraph:
    # Not torch.cuda.graph, which collects garbage and empties torch's cache each time.
    if device not in _shared:
        new_stream: Any = torch.cuda.Stream
        _shared[device] = new_stream(device), torch.cuda.graph_pool_handle()
    stream, pool = _shared[device]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is broken; why is what the caller raises
                graph.capture_end()
            raise
        graph.capture_end()
    return graph
