"""The host backend: real on-demand pages without a GPU, over one memory file (see `host_native`)."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vtensor.allocator.driver import host_native as native
from vtensor.allocator.driver.base import Call, Driver
from vtensor.allocator.native import sparse_array
from vtensor.errors import DriverError, VTensorError
from vtensor.units import KIB

__all__ = ["HostDriver"]

_MAX_HANDLES = 1 << 26
_MAX_RESERVATIONS = 1 << 16
_NAMES = {
    1: ("CUDA_ERROR_INVALID_VALUE", "an argument breaks a rule of the call"),
    801: ("CUDA_ERROR_NOT_SUPPORTED", "a handle can only be mapped whole, from offset 0"),
}
_SHORTAGES = {
    Call.RESERVE: "the process has no free range of addresses of this size, or too many mappings (see ulimit -v, "
    "vm.overcommit_memory and vm.max_map_count)",
    Call.CREATE: "this machine has no such amount of memory available",
}
_TOO_MANY_MAPPINGS = (
    "the process holds as many mappings as vm.max_map_count allows, {limit}; raise it (sysctl), or use larger "
    "page groups"
)


def _read_int(path: str) -> int | None:
    """The number in a file of the kernel's, None where there is none."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _inactive_file_bytes() -> int:
    """Of a control group's memory, cached files that the system drops when somebody needs the room."""
    try:
        fields = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("inactive_file", 0))


def _memory_info() -> tuple[int, int]:
    """Available and total bytes: the machine's, or the control group's where that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(fields["MemTotal"].split()[0]) * KIB
    available = int(fields["MemAvailable"].split()[0]) * KIB
    limit, used = _read_int("/sys/fs/cgroup/memory.max"), _read_int("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        used = max(0, used - _inactive_file_bytes())
        total, available = min(total, limit), min(available, max(0, limit - used))
    return available, total


class HostDriver(Driver):
    """Virtual-memory calls of the CPU. One a process: use `get_driver("cpu")`.

    Page groups are multiples of the system's page. Creating one takes real memory, at most what was available when the
    driver was made, so that a shortage is an error code and not the system's out-of-memory killer.
    """

    kind = "host"
    fresh_memory_is_zero = True
    has_readable_holes = True

    def __init__(self) -> None:
        super().__init__()
        self.device = "cpu"
        self.granularity_bytes = mmap.PAGESIZE
        # 64 KiB: the paper's small page group; 16 times fewer mappings than 4 KiB, of which Linux allows 65,530.
        self.default_page_group_bytes = max(64 * KIB, mmap.PAGESIZE)
        if native.STATE[native.PROCESS] == os.getpid():
            raise VTensorError("there is one HostDriver a process: use get_driver('cpu')")
        try:
            self._handles = sparse_array(_MAX_HANDLES * native.HANDLE_WORDS, np.int64)
            self._reservations = sparse_array(_MAX_RESERVATIONS * native.RESERVATION_WORDS, np.int64)
            self._file = os.memfd_create("vtensor", os.MFD_CLOEXEC)
        except OSError as error:
            raise DriverError("memfd_create", "no memory", f"no room for the tables of the host: {error}") from error
        state = native.STATE
        state[:] = 0  # in a forked child it describes the parent's memory
        state[native.PROCESS] = os.getpid()
        state[native.FILE] = self._file
        state[native.PAGE_BYTES] = mmap.PAGESIZE
        state[native.HANDLES] = self._handles.ctypes.data
        state[native.RESERVATIONS] = self._reservations.ctypes.data
        state[native.MAX_HANDLES] = _MAX_HANDLES
        state[native.MAX_RESERVATIONS] = _MAX_RESERVATIONS
        state[native.LIMIT_BYTES] = _memory_info()[0]
        self._live_bytes = state[native.LIVE_BYTES : native.LIVE_BYTES + 1]
        self._functions = native.FUNCTIONS  # the addresses below live as long as these objects
        self.entry_points = np.array([function.address for function in native.FUNCTIONS], np.int64)
        # Two CUmemAccessDesc: location type, location id, flags (1 read, 3 read and write).
        self._access = np.array([[0, 0, 3], [0, 0, 1]], np.int32)
        self.read_write_access = self._access[0].ctypes.data
        self.read_only_access = self._access[1].ctypes.data
        self.creation_properties = 0

    @property
    def live_bytes(self) -> int:
        """Memory behind all handles that are owned or mapped."""
        return int(self._live_bytes[0])

    def access_to(self, peers: Sequence[int], *, writable: bool) -> npt.NDArray[np.int32]:
        """What `SET_ACCESS` takes to open memory; the host has no peers."""
        if peers:
            raise ValueError(f"peers {list(peers)} cannot reach the memory of cpu: peer devices are for CUDA")
        return np.array(self._access[0 if writable else 1][None])

    def memory_info(self) -> tuple[int, int]:
        """Bytes of memory that are free now, and all there are."""
        return _memory_info()

    def explain(self, call: Call, code: int) -> tuple[str, str]:
        """Name of an error code, and what it means for this call."""
        if code == 2:
            limit = _read_int("/proc/sys/vm/max_map_count")
            return "CUDA_ERROR_OUT_OF_MEMORY", _SHORTAGES.get(call, _TOO_MANY_MAPPINGS.format(limit=limit))
        return _NAMES.get(code, (f"error {code}", "unknown"))
