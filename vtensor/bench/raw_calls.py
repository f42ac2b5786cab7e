"""The ceiling of everything that maps: the driver's calls made from compiled code, with no books kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vtensor.allocator.driver.base import SUCCESS, Call, Driver
from vtensor.allocator.native import call, compiled

__all__ = ["RawHandles"]

Int64 = npt.NDArray[np.int64]

_CREATE, _MAP, _SET_ACCESS, _UNMAP, _RELEASE = (
    int(Call.CREATE),
    int(Call.MAP),
    int(Call.SET_ACCESS),
    int(Call.UNMAP),
    int(Call.RELEASE),
)


class RawHandles:
    """Handles of one size in a reservation of their own. Must be closed.

    Parameters
    ----------
    driver : Driver
    handle_bytes : int
    num_handles : int
    is_scattered : bool
        Whether a gap follows each handle, so that each is opened by itself; else one call opens all of them.

    Attributes
    ----------
    addresses : ndarray of int64, shape [num_handles]
        Where each handle is mapped.
    """

    def __init__(self, driver: Driver, handle_bytes: int, num_handles: int, *, is_scattered: bool) -> None:
        self._driver = driver
        self._handle_bytes = handle_bytes
        self._is_scattered = is_scattered
        spacing_bytes = handle_bytes * (1 + is_scattered)
        self._reserved_bytes = num_handles * spacing_bytes
        self._base = driver.reserve(self._reserved_bytes)
        self._handles = np.zeros(num_handles, np.int64)
        self._num_created = self._num_mapped = 0
        self.addresses = self._base + np.arange(num_handles, dtype=np.int64) * spacing_bytes

    def map(self) -> None:
        """Map and open every handle; those that are not there are created."""
        driver, handles = self._driver, self._handles
        constants = driver.creation_properties, driver.read_write_access, self._handle_bytes
        is_new = self._num_created == 0
        which, code, created, mapped = _map(
            driver.entry_points, constants, self.addresses, handles, is_new, self._is_scattered
        )
        self._num_created, self._num_mapped = created if is_new else len(handles), mapped
        self._check(which, code)

    def map_from_python(self, number: int) -> None:
        """Map and open the first handles with one call of Python's each: what a library without native code does."""
        for address, handle in zip(self.addresses[:number].tolist(), self._handles[:number].tolist(), strict=True):
            self._driver.map(address, self._handle_bytes, handle)
            self._driver.set_access(address, self._handle_bytes)
            self._num_mapped += 1

    def unmap(self) -> None:
        """Take away what is mapped; the handles stay. The device must have finished with them."""
        addresses = self.addresses[: self._num_mapped]
        self._check(_UNMAP, _unmap(self._driver.entry_points, addresses, self._handle_bytes))
        self._num_mapped = 0

    def release(self) -> None:
        """Take away what is mapped, and the handles too."""
        self.unmap()
        self._check(_RELEASE, _release(self._driver.entry_points, self._handles[: self._num_created]))
        self._num_created = 0

    def close(self) -> None:
        """Give back everything."""
        self.release()
        self._driver.free(self._base, self._reserved_bytes)

    def _check(self, which: int, code: int) -> None:
        self._driver.check(Call(which), int(code), f"{len(self._handles)} handles of {self._handle_bytes:,} bytes")


@compiled
def _map(
    entry_points: Int64,
    constants: tuple[int, int, int],
    addresses: Int64,
    handles: Int64,
    is_new: bool,
    is_scattered: bool,
) -> tuple[int, int, int, int]:
    """Create if asked to, map and open: the last call, its error code, how many handles it created and mapped."""
    properties, access, size = constants
    num_handles = len(handles)
    for index in range(num_handles):
        if is_new:
            code = call(entry_points[_CREATE], (handles.ctypes.data + 8 * index, size, properties, 0))
            if code != SUCCESS:
                return _CREATE, code, index, index
        code = call(entry_points[_MAP], (addresses[index], size, 0, handles[index], 0))
        if code != SUCCESS:
            return _MAP, code, index + 1, index
        if is_scattered:
            code = call(entry_points[_SET_ACCESS], (addresses[index], size, access, 1))
            if code != SUCCESS:
                return _SET_ACCESS, code, index + 1, index + 1
    if is_scattered:
        return _SET_ACCESS, SUCCESS, num_handles, num_handles
    code = call(entry_points[_SET_ACCESS], (addresses[0], num_handles * size, access, 1))
    return _SET_ACCESS, code, num_handles, num_handles


@compiled
def _unmap(entry_points: Int64, addresses: Int64, size: int) -> int:
    """Take mappings away; the first error code."""
    for address in addresses:
        code = call(entry_points[_UNMAP], (address, size))
        if code != SUCCESS:
            return code  # type: ignore[no-any-return]
    return SUCCESS


@compiled
def _release(entry_points: Int64, handles: Int64) -> int:
    """Give handles up; the first error code."""
    for handle in handles:
        code = call(entry_points[_RELEASE], (handle,))
        if code != SUCCESS:
            return code  # type: ignore[no-any-return]
    return SUCCESS
