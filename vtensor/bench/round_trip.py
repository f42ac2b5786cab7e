"""The smallest proof that a driver works: reserve, commit, write, read, give back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import cast

from vtensor.allocator.driver import Driver
from vtensor.errors import VTensorError

__all__ = ["check_memory", "round_trip"]

_PATTERN_BYTES = 4096


def round_trip(driver: Driver, reserve_bytes: int, handle_bytes: int) -> None:
    """Reserve, commit, write, read, give back.

    Parameters
    ----------
    driver : Driver
    reserve_bytes, handle_bytes : int
        Addresses to reserve, and memory to put at their beginning.

    Raises
    ------
    VTensorError
        A call failed, or what was read is not what was written.
    """
    with ExitStack() as undo:
        address = driver.reserve(reserve_bytes)
        undo.callback(driver.free, address, reserve_bytes)
        handle = driver.create(handle_bytes)
        undo.callback(driver.release, handle)
        driver.map(address, handle_bytes, handle)
        undo.callback(driver.unmap, address, handle_bytes)
        driver.set_access(address, handle_bytes)
        check_memory(driver, (address, address + handle_bytes - _PATTERN_BYTES))


def check_memory(driver: Driver, addresses: Iterable[int]) -> None:
    """Write something else at each address, 4 KiB of it, and read all of it back afterwards.

    Raises
    ------
    VTensorError
        What was read is not what was written: two addresses share memory, say.
    """
    patterns = {address: os.urandom(_PATTERN_BYTES) for address in addresses}
    for address, pattern in patterns.items():
        _write(driver, address, pattern)
    for address, pattern in patterns.items():
        if _read(driver, address, _PATTERN_BYTES) != pattern:
            raise VTensorError(f"{_PATTERN_BYTES} bytes written at {address:#x} on {driver.device} read differently")


def _write(driver: Driver, address: int, data: bytes) -> None:
    if driver.kind == "host":
        ctypes.memmove(address, data, len(data))
    else:
        from vtensor.allocator.driver import cuda

        cuda.write(cast(cuda.CudaDriver, driver), address, data)


def _read(driver: Driver, address: int, size_bytes: int) -> bytes:
    if driver.kind == "host":
        return ctypes.string_at(address, size_bytes)
    from vtensor.allocator.driver import cuda

    return cuda.read(cast(cuda.CudaDriver, driver), address, size_bytes)
