"""Devices: from what a user says to the name that the driver table knows."""

from __future__ import annotations

import torch

__all__ = ["device_name", "fastest_device", "resolve_device"]


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
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no device that torch knows: use 'cpu' or 'cuda'") from error
    if resolved.type == "cpu" and resolved.index in (None, 0):
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise ValueError(f"device={str(device)!r}: virtual tensors live on 'cpu' or 'cuda'")
    if not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch {torch.__version__} sees no CUDA device; use device='cpu'")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={device!r}: there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def fastest_device() -> str:
    """What a command uses unless it is told otherwise: the first GPU, or else the CPU."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def device_name(device: torch.device) -> str:
    """The driver table's name of a resolved device: ``"cpu"`` or ``"cuda:0"``."""
    return "cpu" if device.type == "cpu" else f"cuda:{device.index}"
