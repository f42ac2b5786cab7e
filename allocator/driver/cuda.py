"""The CUDA backend, over cuda-python. The only file that touches a `CUresult`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver as cu

from vtensor.allocator.driver.base import SUCCESS, Call, Driver
from vtensor.errors import DriverError

__all__ = ["CudaDriver", "DeviceFacts", "describe_device", "device_count", "driver_cuda_version", "read", "write"]

_READ_WRITE = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_READ_ONLY = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
_ACCESS_BYTES = 12  # a CUmemAccessDesc: type and number of the location, flags
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


@contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Within it, no call of this thread invalidates a graph capture of another one."""
    relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    call = "cuThreadExchangeStreamCaptureMode"
    previous = cu.CUstreamCaptureMode(int(_unwrap(call, cu.cuThreadExchangeStreamCaptureMode(relaxed))))
    try:
        yield
    finally:
        _unwrap(call, cu.cuThreadExchangeStreamCaptureMode(previous))


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
        self.device, self._index = f"cuda:{index}", index
        self._device = _unwrap("cuDeviceGet", cu.cuDeviceGet(index))
        attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not _unwrap("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(attribute, self._device)):
            raise DriverError("cuDeviceGetAttribute", "no virtual memory management", f"{self.device} cannot map pages")
        self._context = _unwrap("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(self._device))

        self._properties = allocation_properties(cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, index)
        self._access = [self.access_to((), writable=writable) for writable in (True, False)]
        self.creation_properties = int(self._properties.getPtr())
        self.read_write_access, self.read_only_access = (int(access.ctypes.data) for access in self._access)
        self.granularity_bytes = granularity_bytes(self._properties)
        self.default_page_group_bytes = self.granularity_bytes
        self.entry_points = np.array([_entry_point(call.symbol) for call in Call], np.int64)

    def access_to(self, peers: Sequence[int], *, writable: bool) -> npt.NDArray[np.int32]:
        """What `SET_ACCESS` takes to open memory to this device and to other GPUs: a CUmemAccessDesc a row."""
        rows = []
        for index in (self._index, *peers):
            if index != self._index:
                peer = _unwrap("cuDeviceGet", cu.cuDeviceGet(index))
                if not _unwrap("cuDeviceCanAccessPeer", cu.cuDeviceCanAccessPeer(peer, self._device)):
                    raise ValueError(f"peer cuda:{index} cannot reach the memory of {self.device}")
            access = cu.CUmemAccessDesc()
            access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = index
            access.flags = _READ_WRITE if writable else _READ_ONLY
            rows.append(np.frombuffer(ctypes.string_at(int(access.getPtr()), _ACCESS_BYTES), np.int32))
        return np.stack(rows)

    @contextmanager
    def current_context(self) -> Iterator[None]:
        """The device's primary context, current in this thread for a few calls."""
        _unwrap("cuCtxPushCurrent", cu.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            _unwrap("cuCtxPopCurrent", cu.cuCtxPopCurrent())

    @contextmanager
    def background_thread(self) -> Iterator[None]:
        """The device's context, and the promise that no graph capture need mind the thread."""
        with self.current_context(), relaxed_capture_mode():
            yield

    def new_stream(self) -> int:
        """A stream that other streams, the default one included, are in no order with."""
        with self.current_context():
            flags = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
            return int(_unwrap("cuStreamCreate", cu.cuStreamCreate(flags)))

    def finish(self, stream: int) -> None:
        """Wait until a stream has done what it was given."""
        with self.current_context(), relaxed_capture_mode():
            _unwrap("cuStreamSynchronize", cu.cuStreamSynchronize(stream))

    def finish_device(self) -> None:
        """Wait until the device has done all that it was given."""
        with self.current_context(), relaxed_capture_mode():
            _unwrap("cuCtxSynchronize", cu.cuCtxSynchronize())

    def copy_to_host(self, host_address: int, address: int, size_bytes: int, stream: int) -> None:
        """Copy memory of the device to memory that the host sees, in the order of `stream`."""
        with self.current_context():
            _unwrap("cuMemcpyDtoHAsync", cu.cuMemcpyDtoHAsync(host_address, address, size_bytes, stream))

    def copy_to_device(self, address: int, host_address: int, size_bytes: int, stream: int) -> None:
        """The way back."""
        with self.current_context():
            _unwrap("cuMemcpyHtoDAsync", cu.cuMemcpyHtoDAsync(address, host_address, size_bytes, stream))

    @property
    def waiting_calls(self) -> tuple[int, ...]:
        """With what compiled code waits for a stream: the context, and addresses of the calls of `words`."""
        return (
            int(self._context),
            _entry_point("cuCtxPushCurrent"),
            _entry_point("cuCtxPopCurrent"),
            _entry_point("cuThreadExchangeStreamCaptureMode"),
            _entry_point("cuStreamIsCapturing"),
            _entry_point("cuStreamSynchronize"),
        )

    def memory_info(self) -> tuple[int, int]:
        """Bytes of memory that are free now, and all there are."""
        self.check_process()
        with self.current_context():
            free, total = _unwrap("cuMemGetInfo", cu.cuMemGetInfo())
        return int(free), int(total)

    def explain(self, call: Call, code: int) -> tuple[str, str]:
        """Name of an error code, and what it means for this call."""
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


# -- what a diagnosis asks; none of it is needed to map memory --------------------------------------------------------


@dataclass(frozen=True)
class DeviceFacts:
    """What a GPU says about itself.

    Attributes
    ----------
    name : str
    compute_capability : tuple of int
        Major and minor.
    has_virtual_memory : bool
        Whether its memory can be mapped page group by page group.
    has_file_descriptors : bool
        Whether a handle can be given to another process as a POSIX file descriptor.
    granularity_bytes : dict of str to int
        By location, ``"device"`` and ``"host NUMA"``: the unit in which its memory is created and mapped. A location
        that cannot be mapped into the GPU's address space is left out.
    """

    name: str
    compute_capability: tuple[int, int]
    has_virtual_memory: bool
    has_file_descriptors: bool
    granularity_bytes: dict[str, int]


def driver_cuda_version() -> tuple[int, int]:
    """The newest CUDA that the installed driver serves: major and minor.

    Raises
    ------
    DriverError
        Where there is no NVIDIA driver, or it refuses to start.
    """
    initialize()
    version = int(_unwrap("cuDriverGetVersion", cu.cuDriverGetVersion()))
    return version // 1000, version % 1000 // 10


def device_count() -> int:
    """Number of GPUs that this process may use (see ``CUDA_VISIBLE_DEVICES``)."""
    initialize()
    return int(_unwrap("cuDeviceGetCount", cu.cuDeviceGetCount()))


def describe_device(index: int) -> DeviceFacts:
    """What a GPU says about itself. Makes no context on it."""
    initialize()
    device = _unwrap("cuDeviceGet", cu.cuDeviceGet(index))
    attributes, locations = cu.CUdevice_attribute, cu.CUmemLocationType

    def attribute(which: Any) -> int:
        return int(_unwrap("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(which, device)))

    name = _unwrap("cuDeviceGetName", cu.cuDeviceGetName(128, device))
    has_virtual_memory = bool(attribute(attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED))
    granularity = {}
    if has_virtual_memory:
        granularity["device"] = granularity_bytes(allocation_properties(locations.CU_MEM_LOCATION_TYPE_DEVICE, index))
        if attribute(attributes.CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED):
            node = max(0, attribute(attributes.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID))  # -1: the host has no such nodes
            granularity["host NUMA"] = granularity_bytes(
                allocation_properties(locations.CU_MEM_LOCATION_TYPE_HOST_NUMA, node)
            )
    return DeviceFacts(
        name=name.split(b"\0")[0].decode(),  # the buffer is longer, and not all of the rest is zero
        compute_capability=(
            attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        ),
        has_virtual_memory=has_virtual_memory,
        has_file_descriptors=bool(
            attribute(attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
        ),
        granularity_bytes=granularity,
    )


def write(driver: CudaDriver, address: int, data: bytes) -> None:
    """Copy bytes from the host to mapped, writable memory, and wait for it."""
    driver.check_process()
    with driver.current_context():
        _unwrap("cuMemcpyHtoD", cu.cuMemcpyHtoD(address, data, len(data)))


def read(driver: CudaDriver, address: int, size_bytes: int) -> bytes:
    """Copy bytes from mapped memory to the host, and wait for it."""
    driver.check_process()
    buffer = bytearray(size_bytes)
    view = np.frombuffer(buffer, np.uint8)
    with driver.current_context():
        _unwrap("cuMemcpyDtoH", cu.cuMemcpyDtoH(view.ctypes.data, address, size_bytes))
    return bytes(buffer)
