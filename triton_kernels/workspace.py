"""Workspace: memory that kernels use while they run, kept from launch to launch.

It is of torch's own pool, whatever pool the caller's thread allocates in, which may give its memory back or sleep. (A
pool for all threads, `use_allocator(threads="all")`, gets it: call the kernels once before.)

Counters are zero whenever no kernel uses them, without a memset before each launch.

A kernel that counts leaves its counters at zero. So they are zeroed once, and shared by all launches that follow one
another: those of a stream, and those of one stream within one CUDA graph, which must share them with nobody else, as
it may be replayed beside anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["counters", "scratch"]

_RESERVE = 1 << 18
"""Counters (int32) that are kept ready for graphs: in a capture, nothing could zero them once and for all."""

_STEP = 32  # a cache line: neighbours do not slow each other, and all begin at multiples of 16 bytes

_lock = threading.Lock()
_of_streams: dict[tuple[int, int], torch.Tensor] = {}
_of_captures: dict[int, tuple[int, dict[int, torch.Tensor]]] = {}  # by device: the newest capture, and its streams
_reserves: dict[int, torch.Tensor] = {}  # by device: what is left of the newest
_scratches: dict[tuple[int, int, str], torch.Tensor] = {}
_kept: list[torch.Tensor] = []  # all that there ever were: kernels, and graphs, may use those that were outgrown


def counters(device: torch.device, number: int) -> torch.Tensor:
    """So many int32 counters or more, all 0, for a launch in the current stream that leaves them at 0.

    The first call in a stream, and one that needs more than any before, waits until they are, and for torch's default
    stream. During a capture for which no counters are in reserve (they are made by calls outside of one), the graph
    zeroes some of its own each time.
    """
    number = max(_STEP, -(-number // _STEP) * _STEP)
    if device.type == "cpu":
        return torch.zeros(number, dtype=torch.int32)
    stream = int(torch._C._cuda_getCurrentRawStream(device.index))
    if torch.cuda.is_current_stream_capturing():
        return _for_capture(device, stream, number)
    found = _of_streams.get((device.index, stream))
    if found is None or found.numel() < number:
        with _lock:
            number = max(1 << 12, 1 << (number - 1).bit_length())
            found = _aside(lambda: torch.zeros(number, dtype=torch.int32, device=device))
            _of_streams[device.index, stream] = found
            _kept.append(found)
            _refill(device)
    return found


def scratch(device: torch.device, number: int, purpose: str) -> torch.Tensor:
    """So many float32 or more, of any values, for one launch in the current stream: the next one there has the same.

    They must not have to outlast that launch, as another thread may launch in the same stream. During a capture they
    are the graph's own.
    """
    if device.type == "cpu" or torch.cuda.is_current_stream_capturing():
        return torch.empty(number, dtype=torch.float32, device=device)
    key = device.index, int(torch._C._cuda_getCurrentRawStream(device.index)), purpose
    found = _scratches.get(key)
    if found is None or found.numel() < number:
        with _lock:
            size = max(1 << 18, 1 << (number - 1).bit_length())
            found = _aside(lambda: torch.empty(size, dtype=torch.float32, device=device))
            _scratches[key] = found
            _kept.append(found)
    return found


def _aside(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Make a tensor in a thread of its own, where no pool of the caller's is in force, and wait for it."""
    made: list[torch.Tensor] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
            if made[0].is_cuda:
                torch.cuda.current_stream(made[0].device).synchronize()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _refill(device: torch.device) -> None:
    """Have a reserve for graphs that come, of which enough is left."""
    left = _reserves.get(device.index)
    if left is None or left.numel() < _RESERVE // 4:
        _reserves[device.index] = _aside(lambda: torch.zeros(_RESERVE, dtype=torch.int32, device=device))
        _kept.append(_reserves[device.index])


def _for_capture(device: torch.device, stream: int, number: int) -> torch.Tensor:
    with _lock:
        found = _cut(device, _capture_id(stream), stream, number)
    return torch.zeros(number, dtype=torch.int32, device=device) if found is None else found


def _cut(device: torch.device, capture: int, stream: int, number: int) -> torch.Tensor | None:
    """The counters of a stream of a capture, cut from the reserve if they are the first; None if that is too little."""
    newest, of_streams = _of_captures.get(device.index, (0, {}))
    if newest != capture:
        of_streams = {}
        _of_captures[device.index] = capture, of_streams
    found = of_streams.get(stream)
    if found is not None and found.numel() >= number:
        return found
    reserve = _reserves.get(device.index)
    if not capture or reserve is None or reserve.numel() < number:
        return None
    of_streams[stream], _reserves[device.index] = reserve[:number], reserve[number:]
    return of_streams[stream]


def _capture_id(stream: int) -> int:
    """The number of the capture that a stream is in, which a process has once; 0 where that is not to be had."""
    try:
        from cuda.bindings import driver

        error, _, number, *_ = driver.cuStreamGetCaptureInfo(stream)
    except (ImportError, AttributeError, ValueError):
        return 0
    return int(number) if int(error) == 0 else 0
