"""Streams: which one is current, which ones use a piece of memory, whether one is being captured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from vtensor.errors import VTensorError

__all__ = ["DeviceEvent", "StreamUse", "check_not_capturing", "is_capturing", "relaxed_capture"]


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured into a CUDA graph."""
    if device.type == "cpu":
        return False
    if torch._C._cuda_getDevice() == device.index:  # the usual case, without a change of the device
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def check_not_capturing(device: torch.device, what: str) -> None:
    """Raise `VTensorError` while the current stream of a CUDA device is being captured into a graph."""
    if is_capturing(device):
        raise VTensorError(
            f"{what} was called during a CUDA graph capture, where its events and waits would become part of the "
            "graph; call it before the capture"
        )


class DeviceEvent:
    """A point in a stream, which may be asked for and waited for while another thread captures a graph.

    Otherwise CUDA counts both as unsafe during a capture in its default mode, whoever captures, and breaks it off.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = stream.record_event()

    def query(self) -> bool:
        """Whether the stream has passed it."""
        with relaxed_capture():
            return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait until it has."""
        with relaxed_capture():
            self.event.synchronize()


def relaxed_capture() -> AbstractContextManager[None]:
    """Calls of this thread that no other thread's graph capture need mind."""
    from vtensor.allocator.driver.cuda import relaxed_capture_mode

    return relaxed_capture_mode()


class StreamUse:
    """The streams on which a piece of memory is used, so that one knows when the device has finished with it.

    torch's own `record_stream` silently ignores memory that torch did not allocate. On the host there are no streams:
    nothing is noted, and there is nothing to wait for.
    """

    def __init__(self, device: torch.device, peer_devices: Sequence[torch.device] = ()) -> None:
        self.device = device
        self._devices = {device, *peer_devices}
        self._streams: dict[Any, torch.cuda.Stream] = {}  # by raw handle; those of peers by device and handle

    def current(self) -> int:
        """Note the current stream as a user, and return its raw handle (0 on the host)."""
        if self.device.type == "cpu":
            return 0
        handle = int(torch._C._cuda_getCurrentRawStream(self.device.index))
        if handle not in self._streams:
            self._streams[handle] = torch.cuda.current_stream(self.device)
        return handle

    def add(self, stream: Any) -> None:
        """Note another stream as a user. It must outlive the memory.

        Raises
        ------
        ValueError
            Not a stream of this device, or of a peer that may use the memory.
        """
        if self.device.type == "cpu":
            return
        if not isinstance(stream, torch.cuda.Stream) or stream.device not in self._devices:
            names = " or ".join(sorted(str(device) for device in self._devices))
            raise ValueError(f"stream={stream!r} is not a torch.cuda.Stream of {names}")
        handle = int(stream.cuda_stream)
        self._streams[handle if stream.device == self.device else (stream.device, handle)] = stream

    @property
    def are_several(self) -> bool:
        """Whether more than one stream was noted."""
        return len(self._streams) > 1

    def event(self, handle: int) -> DeviceEvent | None:
        """An event after what a noted stream was given so far; None during a capture, which began when it was idle."""
        stream = self._streams[handle]
        with torch.cuda.stream(stream):
            return None if torch.cuda.is_current_stream_capturing() else DeviceEvent(stream)

    def is_any_capturing(self) -> bool:
        """Whether one of the streams is being captured into a graph, which an event in it would become part of."""
        for stream in list(self._streams.values()):
            with torch.cuda.stream(stream):
                if torch.cuda.is_current_stream_capturing():
                    return True
        return False

    def record(self) -> list[DeviceEvent]:
        """Events that pass once the current stream and all noted ones have done what they were given so far."""
        if self.device.type == "cpu":
            return []
        self.current()
        return [DeviceEvent(stream) for stream in list(self._streams.values())]

    def finish(self) -> None:
        """Wait oneself until the current stream and all noted ones have done what they were given so far."""
        for event in self.record():
            event.synchronize()

    def wait(self, events: Sequence[DeviceEvent]) -> None:
        """Make the current stream wait for events; the caller does not wait."""
        if events:
            stream = torch.cuda.current_stream(self.device)
            for event in events:
                stream.wait_event(event.event)
