"""The driver table: seven virtual-memory calls and one that zeroes, one interface, two backends.

Each backend gives the addresses of C functions with the signatures of CUDA's virtual-memory calls. Compiled code calls
those addresses without the GIL; the methods here call the same addresses from Python, for cold paths and for tests.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vtensor.errors import DriverError, ForkedError
from vtensor.unpicklable import Unpicklable

__all__ = ["INVALID_VALUE", "NOT_SUPPORTED", "OUT_OF_MEMORY", "READABLE_HOLES", "SUCCESS", "Call", "Driver"]

# Results, numbered as CUDA numbers them (CUresult).
SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_SUPPORTED = 801
# A flag of `RESERVE`, on the host only: what has no memory reads as zeros, and what is mapped can be read at once.
READABLE_HOLES = 1


class Call(IntEnum):
    """Index of each call in `Driver.entry_points`."""

    RESERVE = 0
    FREE = 1
    CREATE = 2
    MAP = 3
    SET_ACCESS = 4
    UNMAP = 5
    RELEASE = 6
    ZERO = 7

    @property
    def symbol(self) -> str:
        """The driver's own name, for messages."""
        return _SYMBOLS[self]

    @property
    def num_arguments(self) -> int:
        """How many 64-bit arguments the call takes."""
        return _NUM_ARGUMENTS[self]


_SYMBOLS = {
    Call.RESERVE: "cuMemAddressReserve",
    Call.FREE: "cuMemAddressFree",
    Call.CREATE: "cuMemCreate",
    Call.MAP: "cuMemMap",
    Call.SET_ACCESS: "cuMemSetAccess",
    Call.UNMAP: "cuMemUnmap",
    Call.RELEASE: "cuMemRelease",
    Call.ZERO: "cuMemsetD8Async",
}
_NUM_ARGUMENTS = {
    Call.RESERVE: 5,
    Call.FREE: 2,
    Call.CREATE: 4,
    Call.MAP: 5,
    Call.SET_ACCESS: 4,
    Call.UNMAP: 2,
    Call.RELEASE: 1,
    Call.ZERO: 4,
}
_PROTOTYPES = {n: ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * n) for n in set(_NUM_ARGUMENTS.values())}


class Driver(Unpicklable, ABC):
    """Virtual-memory calls of one device.

    Attributes
    ----------
    entry_points : ndarray of int64, shape [8]
        Address of each `Call`'s C function; all arguments are 64 bits wide, the result is a CUresult.
    creation_properties, read_write_access, read_only_access : int
        Addresses of the structures that `create` and `set_access` take.
    granularity_bytes : int
        Every size, and every address that is mapped, is a multiple of it.
    default_page_group_bytes : int
        The page group size that a pool takes when none is asked for.
    fresh_memory_is_zero : bool
        Whether a page group reads as zero when it is first mapped, by promise and not by luck.
    has_readable_holes : bool
        Whether addresses can be reserved that read as zeros where no memory is.
    """

    kind: ClassVar[str]
    fresh_memory_is_zero: ClassVar[bool]
    has_readable_holes: ClassVar[bool] = False
    device: str
    granularity_bytes: int
    default_page_group_bytes: int
    entry_points: npt.NDArray[np.int64]
    creation_properties: int
    read_write_access: int
    read_only_access: int

    def __init__(self) -> None:
        self._process_id = os.getpid()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.device}>"

    # -- what only the backend knows ----------------------------------------------------------------------------

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """Bytes of the device's memory that are free now, and all there are."""

    @abstractmethod
    def access_to(self, peers: Sequence[int], *, writable: bool) -> npt.NDArray[np.int32]:
        """What `SET_ACCESS` takes to open memory to this device and to other GPUs: a CUmemAccessDesc a row.

        Raises
        ------
        ValueError
            A peer that cannot reach this device's memory.
        """

    @abstractmethod
    def explain(self, call: Call, code: int) -> tuple[str, str]:
        """Name of an error code, and what it means for this call."""

    def current_context(self) -> AbstractContextManager[None]:
        """What has to surround `ZERO`, the one call that works on the device: its context, current in this thread."""
        return nullcontext()

    def background_thread(self) -> AbstractContextManager[None]:
        """What has to surround the work of a thread that only makes driver calls."""
        return nullcontext()

    def new_stream(self) -> int:
        """A stream for such a thread, in no order with others (a raw handle, 0 on the host). It lives on."""
        return 0

    def finish(self, stream: int) -> None:
        """Wait until a stream has done what it was given; on the host everything has."""

    def finish_device(self) -> None:
        """Wait until the device has done all that it was given; a host has."""

    def copy_to_host(self, host_address: int, address: int, size_bytes: int, stream: int) -> None:
        """Copy memory of the device to memory that the host sees, in the order of `stream`."""
        ctypes.memmove(host_address, address, size_bytes)

    def copy_to_device(self, address: int, host_address: int, size_bytes: int, stream: int) -> None:
        """The way back."""
        ctypes.memmove(address, host_address, size_bytes)

    @property
    def waiting_calls(self) -> tuple[int, ...]:
        """With what compiled code waits for a stream: a context, and addresses of the calls of `words`; 0 on a host."""
        return 0, 0, 0, 0, 0, 0

    # -- the calls ----------------------------------------------------------------------------------------------

    @property
    def is_own_process(self) -> bool:
        """Whether this is the process that made this driver, and no forked child of it."""
        return os.getpid() == self._process_id

    def check_process(self) -> None:
        """Raise `ForkedError` in a child of the process that made this driver."""
        if not self.is_own_process:
            raise ForkedError(
                f"vtensor memory of process {self._process_id} was used in its forked child {os.getpid()}; "
                "start workers with the 'spawn' method, or make new pools and tensors in the child"
            )

    def check(self, call: Call, code: int, detail: str) -> None:
        """Raise `DriverError` unless `code` is success.

        Raises
        ------
        DriverError
            With the call, the error's name, `detail` and the driver's explanation.
        """
        if code != SUCCESS:
            name, explanation = self.explain(call, code)
            raise DriverError(call.symbol, name, f"{detail} ({explanation})")

    def invoke(self, call: Call, *arguments: int) -> int:
        """Make one call and return its raw result code."""
        self.check_process()
        count = call.num_arguments
        if len(arguments) != count:
            raise TypeError(f"{call.symbol} takes {count} arguments, {len(arguments)} were given")
        if any(not -(1 << 63) <= argument < 1 << 63 for argument in arguments):
            return INVALID_VALUE  # ctypes would cut it off: 2**64 + 4096 bytes would pass as 4096
        return int(_PROTOTYPES[count](int(self.entry_points[call]))(*arguments))

    def reserve(self, size_bytes: int, alignment_bytes: int = 0, *, readable_holes: bool = False) -> int:
        """Reserve a range of addresses with nothing behind it, and return its first address."""
        address, flags = ctypes.c_int64(), READABLE_HOLES if readable_holes else 0
        code = self.invoke(Call.RESERVE, ctypes.addressof(address), size_bytes, alignment_bytes, 0, flags)
        self.check(Call.RESERVE, code, f"{size_bytes:,} bytes of addresses on {self.device}")
        return address.value

    def free(self, address: int, size_bytes: int) -> None:
        """Give back a whole reservation, in which nothing is mapped any more."""
        self.check(Call.FREE, self.invoke(Call.FREE, address, size_bytes), f"{size_bytes:,} bytes at {address:#x}")

    def create(self, size_bytes: int) -> int:
        """Allocate physical memory and return its handle."""
        handle = ctypes.c_int64()
        code = self.invoke(Call.CREATE, ctypes.addressof(handle), size_bytes, self.creation_properties, 0)
        self.check(Call.CREATE, code, f"{size_bytes:,} bytes of memory on {self.device}")
        return handle.value

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """Put the whole memory of `handle` at `address`; it is accessible only after `set_access`."""
        code = self.invoke(Call.MAP, address, size_bytes, 0, handle, 0)
        self.check(Call.MAP, code, f"handle {handle:#x}, {size_bytes:,} bytes at {address:#x}")

    def set_access(self, address: int, size_bytes: int, writable: bool = True) -> None:
        """Make whole mappings readable, and writable unless told otherwise."""
        access = self.read_write_access if writable else self.read_only_access
        code = self.invoke(Call.SET_ACCESS, address, size_bytes, access, 1)
        self.check(Call.SET_ACCESS, code, f"{size_bytes:,} bytes at {address:#x}")

    def unmap(self, address: int, size_bytes: int) -> None:
        """Take whole mappings away from a range; holes in the range are no error."""
        self.check(Call.UNMAP, self.invoke(Call.UNMAP, address, size_bytes), f"{size_bytes:,} bytes at {address:#x}")

    def release(self, handle: int) -> None:
        """Give up a handle; its memory is freed once its last mapping is gone too."""
        self.check(Call.RELEASE, self.invoke(Call.RELEASE, handle), f"handle {handle:#x}")

    def zero(self, address: int, size_bytes: int, stream: int) -> None:
        """Fill mapped, writable memory with zeros, in the order of `stream` (a raw handle, 0 on the host)."""
        with self.current_context():
            code = self.invoke(Call.ZERO, address, 0, size_bytes, stream)
        self.check(Call.ZERO, code, f"{size_bytes:,} bytes at {address:#x}")
