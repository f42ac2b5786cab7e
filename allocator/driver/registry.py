"""One driver a device, made at its first use."""

from __future__ import annotations

import os
import threading

from vtensor.allocator.driver.base import Driver

__all__ = ["get_driver"]

_drivers: dict[str, Driver] = {}
_lock = threading.Lock()


def _forget() -> None:
    """In a forked child: drivers are the parent's, and so is a lock that another of its threads held."""
    global _drivers, _lock, _inherited
    _inherited, _drivers, _lock = _drivers, {}, threading.Lock()


_inherited: dict[str, Driver] = {}  # kept alive in a child, whose memory they do not describe
os.register_at_fork(after_in_child=_forget)


def get_driver(device: str) -> Driver:
    """The driver of a device.

    Parameters
    ----------
    device : str
        ``"cpu"``, or ``"cuda:0"`` with an explicit index.

    Raises
    ------
    ValueError
        `device` is of another kind.
    DriverError
        The device is not there, or has no virtual memory management.
    """
    with _lock:
        if device not in _drivers:
            _drivers[device] = _make(device)
        return _drivers[device]


def _make(device: str) -> Driver:
    kind, _, index = device.partition(":")
    if device == "cpu":
        from vtensor.allocator.driver.host import HostDriver

        return HostDriver()
    if kind == "cuda" and index.isascii() and index.isdecimal():
        from vtensor.allocator.driver.cuda import CudaDriver

        return CudaDriver(int(index))
    raise ValueError(f"device {device!r} has no virtual memory here: use 'cpu' or 'cuda:<index>'")
