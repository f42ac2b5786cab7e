"""The CUDA backend, over cuda-python. The only file that touches a `CUresult`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from vtensor.allocator.driver.base import SUCCESS, Call, Driver
from vtensor.errors import DriverError

__all__ = ["CudaDriver"]

_CUDA_VERSION = 12000  # of the signatures below; a newer driver keeps serving them


def _unwrap(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a cuda-python result, or the `DriverError` it holds."""
    code, *values = result
    if int(code) != SUCCESS:
        name, detail = _describe(int(code))
        raise DriverError(call, name, detail)
    return values[0] if len(values) == 1 else values


def _describe(code: int) -> tuple[str, str]:
    try:
        result = cu.CUresult(code)
    except ValueError:
        return f"error {code}", "unknown to this version of cuda-python"
    texts = [cu.cuGetErrorName(result), cu.cuGetErrorString(result)]
    name, detail = (str(text[1].decode()) if int(text[0]) == SUCCESS else str(result) for text in texts)
    return name, detail


def initialize() -> None:
    """Start the driver interface.

    Raises
    ------
    DriverError
        Where there is no NVIDIA driver, or it refuses to start.
    """
    try:
        result = cu.cuInit(0)
    except Exception as error:  # cuda-python raises its own kind when it finds no libcuda
        raise DriverError("cuInit", "no driver", f"no NVIDIA driver could be loaded ({error})") from error
    _unwrap("cuInit", result)


class CudaDriver(Driver):
    """Virtual-memory calls of one GPU. One a device: use `get_driver("cuda:0")`.

    Parameters
    ----------
    index : int
        The device's number, as in ``torch.device("cuda", index)``. The current device is neither used nor changed.

    Raises
    ------
    DriverError
        No driver, no such device, or a device without virtual memory management (some vGPU and WSL set-ups).
    """

    kind = "cuda"
    fresh_memory_is_zero = False  # seen on an H200, promised nowhere

    def __init__(self, index: int) -> None:
        super().__init__()
        initialize()
        count = int(_unwrap("cuDeviceGetCount", cu.cuDeviceGetCount()))
        if not 0 <= index < count:
            raise DriverError("cuDeviceGet", "no such device", f"cuda:{index} was asked for, there are {count} devices")
        self.device = f"cuda:{index}"
        self._device = _unwrap("cuDeviceGet", cu.cuDeviceGet(index))
        attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not _unwrap("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(attribute, self._device)):
            raise DriverError("cuDeviceGetAttribute", "no virtual memory management", f"{self.device} cannot map pages")
        self._context = _unwrap("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(self._device))

        self._properties = allocation_properties(cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, index)
        self._access = []
        for flags in (
            cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ,
        ):
            access = cu.CUmemAccessDesc()
            access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = index
            access.flags = flags
            self._access.append(access)
        self.creation_properties = int(self._properties.getPtr())
        self.read_write_access, self.read_only_access = (int(access.getPtr()) for access in self._access)
        self.granularity_bytes = granularity_bytes(self._properties)
        self.default_page_group_bytes = self.granularity_bytes
        self.entry_points = np.array([_entry_point(call.symbol) for call in Call], np.int64)

    @contextmanager
    def _current_context(self) -> Iterator[None]:
        """The device's primary context, current in this thread for a few calls."""
        _unwrap("cuCtxPushCurrent", cu.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            _unwrap("cuCtxPopCurrent", cu.cuCtxPopCurrent())

    def zero(self, address: int, size_bytes: int, stream: int) -> None:
        self.check_process()
        with self._current_context():
            _unwrap("cuMemsetD8Async", cu.cuMemsetD8Async(address, 0, size_bytes, stream))

    def memory_info(self) -> tuple[int, int]:
        self.check_process()
        with self._current_context():
            free, total = _unwrap("cuMemGetInfo", cu.cuMemGetInfo())
        return int(free), int(total)

    def explain(self, call: Call, code: int) -> tuple[str, str]:
        return _describe(code)


def allocation_properties(location: Any, index: int) -> Any:
    """Properties of plain physical memory at a location: a device, or a NUMA node of the host."""
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = location
    properties.location.id = index
    return properties


def granularity_bytes(properties: Any) -> int:
    """The unit in which memory with these properties is created and mapped."""
    minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_unwrap("cuMemGetAllocationGranularity", cu.cuMemGetAllocationGranularity(properties, minimum)))


def _entry_point(symbol: str) -> int:
    result = cu.cuGetProcAddress(symbol.encode(), _CUDA_VERSION, 0)
    address = int(_unwrap(f"cuGetProcAddress({symbol})", result[:2]))
    if address == 0:
        raise DriverError("cuGetProcAddress", "no such function", f"this driver has no {symbol}")
    return address
