"""One driver a device, made at its first use."""

from __future__ import annotations

import os
import threading

from vtensor.allocator.driver.base import Driver

__all__ = ["get_driver"]

_drivers: dict[tuple[int, str], Driver] = {}
_lock = threading.Lock()


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
    key = (os.getpid(), device)  # a forked child makes its own
    with _lock:
        driver = _drivers.get(key)
        if driver is None:
            driver = _drivers[key] = _make(device)
        return driver


def _make(device: str) -> Driver:
    kind, _, index = device.partition(":")
    if device == "cpu":
        from vtensor.allocator.driver.host import HostDriver

        return HostDriver()
    if kind == "cuda" and index.isdigit():
        from vtensor.allocator.driver.cuda import CudaDriver

        return CudaDriver(int(index))
    raise ValueError(f"device {device!r} has no virtual memory here: use 'cpu' or 'cuda:<index>'")
