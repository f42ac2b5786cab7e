"""Devices and streams: which stream is current, which ones use a piece of memory, whether one is being captured."""

from __future__ import annotations

from typing import Any

import torch

from vtensor.errors import VTensorError

__all__ = ["StreamUse", "check_not_capturing", "device_name", "resolve_device"]


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """A device with an explicit index: None is torch's default device, ``"cuda"`` the current one.

    Raises
    ------
    ValueError
        Neither a CPU nor a CUDA device, or CUDA where torch has none.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if device is None:
        device = torch.get_default_device()
    resolved = torch.device(device)
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise ValueError(f"device={device!r}: virtual tensors live on 'cpu' or 'cuda'")
    if not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch {torch.__version__} sees no CUDA device; use device='cpu'")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={device!r}: there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """The driver table's name of a resolved device: ``"cpu"`` or ``"cuda:0"``."""
    return "cpu" if device.type == "cpu" else f"cuda:{device.index}"


def check_not_capturing(device: torch.device, what: str) -> None:
    """Raise `VTensorError` while the current stream of a CUDA device is being captured into a graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise VTensorError(
            f"{what} was called during a CUDA graph capture, where its events and waits would become part of the "
            "graph; call it before the capture"
        )


class StreamUse:
    """The streams on which a piece of memory is used, so that one knows when the device has finished with it.

    torch's own `record_stream` silently ignores memory that torch did not allocate. On the host there are no streams:
    nothing is noted, and there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[int, torch.cuda.Stream] = {}

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
            Not a stream of this device.
        """
        if self.device.type == "cpu":
            return
        if not isinstance(stream, torch.cuda.Stream) or stream.device != self.device:
            raise ValueError(f"stream={stream!r} is not a torch.cuda.Stream of {self.device}")
        self._streams[int(stream.cuda_stream)] = stream

    def record(self) -> list[torch.cuda.Event]:
        """Events that pass once the current stream and all noted ones have done what they were given so far."""
        if self.device.type == "cpu":
            return []
        self.current()
        events = []
        for stream in self._streams.values():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            events.append(event)
        return events

    def wait(self, events: list[torch.cuda.Event]) -> None:
        """Make the current stream wait for events; the caller does not wait."""
        if events:
            stream = torch.cuda.current_stream(self.device)
            for event in events:
                stream.wait_event(event)
