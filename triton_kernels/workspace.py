"""Workspace: counters that are zero whenever no kernel uses them, without a memset before each launch.

A kernel that counts leaves its counters at zero. So they are zeroed once, and shared by all launches that follow one
another: those of a stream, and those of one stream within one CUDA graph, which must share them with nobody else, as
it may be replayed beside anything.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["counters"]

_RESERVE = 1 << 18
"""Counters (int32) that are kept ready for graphs: in a capture, nothing could zero them once and for all."""

_lock = threading.Lock()
_of_streams: dict[tuple[int, int], torch.Tensor] = {}
_of_captures: dict[int, tuple[int, dict[int, torch.Tensor]]] = {}  # by device: the newest capture, and its streams
_reserves: dict[int, torch.Tensor] = {}


def counters(device: torch.device, number: int) -> torch.Tensor:
    """So many int32 counters, all 0, for a launch in the current stream that leaves them at 0.

    During a capture for which no counters are in reserve (they are made by the first call outside of one), the graph
    zeroes some of its own each time.
    """
    if device.type == "cpu":
        return torch.zeros(number, dtype=torch.int32)
    stream = int(torch._C._cuda_getCurrentRawStream(device.index))
    if torch.cuda.is_current_stream_capturing():
        return _for_capture(device, stream, number)
    found = _of_streams.get((device.index, stream))
    if found is None or len(found) < number:
        with _lock:
            found = torch.zeros(max(number, 1 << 12), dtype=torch.int32, device=device)
            _of_streams[device.index, stream] = found
            if len(_reserves.get(device.index, ())) < _RESERVE // 4:
                _reserves[device.index] = torch.zeros(_RESERVE, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # once: graphs will run in other streams
    return found


def _for_capture(device: torch.device, stream: int, number: int) -> torch.Tensor:
    capture = _capture_id(stream)
    with _lock:
        newest, of_streams = _of_captures.get(device.index, (0, {}))
        if newest != capture:
            newest, of_streams = capture, {}
            _of_captures[device.index] = newest, of_streams
        found = of_streams.get(stream)
        if found is None or len(found) < number:
            reserve = _reserves.get(device.index)
            if not capture or reserve is None or len(reserve) < number:
                return torch.zeros(number, dtype=torch.int32, device=device)
            found, _reserves[device.index] = reserve[:number], reserve[number:]
            of_streams[stream] = found
    return found


def _capture_id(stream: int) -> int:
    """The number of the capture that a stream is in, which a process has once; 0 where that is not to be had."""
    try:
        from cuda.bindings import driver

        error, _, number, *_ = driver.cuStreamGetCaptureInfo(stream)
    except (ImportError, AttributeError, ValueError):
        return 0
    return int(number) if int(error) == 0 else 0
