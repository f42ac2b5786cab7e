"""Exceptions of vtensor: one base class, the values in the message, and what to do next."""

from __future__ import annotations

import torch

__all__ = [
    "ClosedError",
    "DriverError",
    "ForkedError",
    "OutOfPagesError",
    "OutOfSlotsError",
    "RequestError",
    "ReservationError",
    "UnmappedAccessError",
    "VTensorError",
]


class VTensorError(Exception):
    """Base class of every exception that vtensor raises, apart from `ValueError` for a bad configuration."""


class DriverError(VTensorError):
    """A virtual-memory call failed for a reason that is not a shortage.

    Parameters
    ----------
    call : str
        The driver's name of the call, e.g. ``cuMemMap``.
    name : str
        The driver's name of the error, e.g. ``CUDA_ERROR_INVALID_VALUE``.
    detail : str
        What was asked of the driver, and what it means.
    """

    def __init__(self, call: str, name: str, detail: str) -> None:
        super().__init__(f"{call} failed with {name}: {detail}")
        self.call = call
        self.name = name
        self.detail = detail


class OutOfPagesError(VTensorError, torch.OutOfMemoryError):
    """No page group can be had: the pool's capacity is reached or the device has no memory left."""


class OutOfSlotsError(VTensorError):
    """All `max_batch_size` slots of a KV cache hold active requests."""


class RequestError(VTensorError, ValueError):
    """A request id, a length or a list of lengths that the KV cache cannot take; nothing was changed."""


class UnmappedAccessError(VTensorError, IndexError):
    """An operation would read or write bytes of a virtual tensor that have no memory behind them."""


class ReservationError(VTensorError, MemoryError):
    """A range of virtual addresses could not be reserved."""


class ClosedError(VTensorError):
    """The object was closed and can serve no further call."""


class ForkedError(VTensorError):
    """The object was made in the parent process; its memory is not shared with a forked child."""
