"""Prepared: a compiled kernel with its arguments laid out as the driver reads them, all but a few once and for all.

Triton's own launcher looks at each of some 60 arguments each time, which takes the caller longer than many a kernel
takes the GPU.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch

from vtensor.triton_kernels.workspace import scratch

__all__ = ["Prepared", "prepare", "tensor_map"]

_FORMATS = {
    "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f",
    "fp64": "d",
}  # fmt: skip
_INVALID_CONTEXT = 201
_MAP_BYTES = 128  # of a CUtensorMap
_WORK, _PROFILE = -1, -2  # in place of an argument's number: what Triton adds to the arguments


def prepare(compiled: Any, num_tensors: int, num_changing: int, arguments: Sequence[Any]) -> Prepared | None:
    """What Triton compiled for these arguments, loaded to the current device; None where it asks for more than we know.

    `arguments` are addresses (None: no tensor), numbers that change, and numbers that do not.
    """
    try:
        compiled.run  # noqa: B018 - loads it
        kinds = list(compiled.src.signature.values())
        metadata = compiled.metadata
        has_more = metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.profile_scratch_size
        if has_more or len(kinds) != len(arguments):
            return None
        return Prepared(compiled, kinds, num_tensors, num_changing, arguments)
    except (ImportError, AttributeError, LookupError):  # another Triton, or another cuda-python
        return None


class Prepared:
    """A kernel that is ready to be launched on the device that is current."""

    def __init__(
        self, compiled: Any, kinds: list[Any], num_tensors: int, num_changing: int, arguments: Sequence[Any]
    ) -> None:
        from cuda.bindings import driver

        metadata = compiled.metadata
        self._compiled = compiled  # which keeps the kernel loaded
        self._driver = driver
        self._function = driver.CUfunction(compiled.function)
        tensors, changing = range(num_tensors), range(num_tensors, num_tensors + num_changing)
        self.pointers = [i for i in tensors if kinds[i][0] == "*"]
        self.maps = [i for i in tensors if kinds[i].startswith("tensordesc")]
        self.map_forms: list[dict[str, Any]] = list(getattr(metadata, "tensordesc_meta", None) or [])
        given = [i for i in tensors if kinds[i] != "constexpr"]
        is_known = len(self.maps) == len(self.map_forms) and all(isinstance(form, dict) for form in self.map_forms)
        if (
            not is_known
            or len(given) != len(self.pointers) + len(self.maps)
            or any(kinds[i] != "i32" for i in changing)
        ):
            raise LookupError("arguments of another kind")
        # Eight bytes each, those that change first: pointers, numbers, and what Triton adds, memory to work in and one
        # for its profiler. The driver is told where each is.
        constants = [i for i in range(changing.stop, len(kinds)) if kinds[i] != "constexpr"]
        self._layout = struct.Struct(f"{len(self.pointers)}Q{num_changing}q2Q")
        order = [*self.pointers, *changing, _WORK, _PROFILE, *constants]
        self._values = (ctypes.c_uint64 * (len(order) + 1))()  # the last is 0
        for place, i in enumerate(order):
            if i in constants:
                struct.pack_into(_FORMATS[kinds[i]], self._values, 8 * place, arguments[i])
        begin = ctypes.addressof(self._values)
        places = {i: begin + 8 * place for place, i in enumerate(order)}
        maps = (ctypes.c_uint8 * (_MAP_BYTES * len(self.maps) + 64))()
        self._maps_at = -(-ctypes.addressof(maps) // 64) * 64
        wanted: list[tuple[int, int]] = []  # where each parameter is, and how long
        for i, kind in enumerate(kinds):
            if i in self.maps:  # with sizes and strides, which our kernels do not look at
                rank = len(self.map_forms[self.maps.index(i)]["block_size"])
                wanted.append((self._maps_at + _MAP_BYTES * self.maps.index(i), _MAP_BYTES))
                wanted += [(begin + 8 * len(order), 4)] * rank + [(begin + 8 * len(order), 8)] * rank
            elif kind != "constexpr":
                wanted.append((places[i], struct.calcsize(_FORMATS.get(kind, "Q"))))
        wanted += [(places[_WORK], 8), (places[_PROFILE], 8)]
        if [size for _, size in wanted] != _parameter_sizes(driver, self._function):
            raise LookupError("parameters of another kind")
        self._parameters = (ctypes.c_void_p * len(wanted))(*(place for place, _ in wanted))
        self._parameters_at = ctypes.addressof(self._parameters)
        self._map_memory = maps
        self._scratch_bytes = metadata.global_scratch_size
        self._config = config = driver.CUlaunchConfig()
        config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX = 32 * metadata.num_warps
        config.sharedMemBytes = metadata.shared
        if metadata.launch_pdl:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        self._lock = threading.Lock()  # the driver copies arguments before it returns, but lets go of the GIL before

    def __call__(
        self,
        grid: tuple[int, int],
        device: torch.device,
        addresses: Sequence[int],
        changing: Sequence[int],
        maps: Sequence[bytes] = (),
    ) -> None:
        """Launch in the current stream of a device, with addresses for `pointers`, and what `tensor_map` made."""
        if not grid[0] or not grid[1]:
            return
        work = 0
        if self._scratch_bytes:
            work = scratch(device, -(-self._scratch_bytes * grid[0] * grid[1] // 4), "descriptors").data_ptr()
        config = self._config
        with self._lock:
            self._layout.pack_into(self._values, 0, *addresses, *changing, work, 0)
            for number, one in enumerate(maps):
                ctypes.memmove(self._maps_at + _MAP_BYTES * number, one, _MAP_BYTES)
            config.gridDimX, config.gridDimY = grid
            config.hStream = torch._C._cuda_getCurrentRawStream(device.index)
            error = int(self._driver.cuLaunchKernelEx(config, self._function, self._parameters_at, 0)[0])
            if error == _INVALID_CONTEXT:  # a thread that has not used the GPU yet
                _make_current(self._driver, device.index)
                error = int(self._driver.cuLaunchKernelEx(config, self._function, self._parameters_at, 0)[0])
        if error:
            name = self._driver.CUresult(error).name
            raise RuntimeError(f"{self._compiled.name} could not be launched with {grid} programs: {name}")


def tensor_map(
    device: torch.device,
    address: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    form: dict[str, Any],
) -> bytes:
    """A descriptor for the tensor memory accelerator, of a form that Triton compiled a kernel for.

    Of all elements out of the tensor zeros are fetched. For Hopper the driver does not look whether there is memory.

    Raises
    ------
    ValueError
        A tensor for which there is none.
    """
    from cuda.bindings import driver

    kinds, size = driver.CUtensorMapDataType, dtype.itemsize
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }[dtype]
    arguments = (
        kind,
        len(shape),
        address,
        [driver.cuuint64_t(n) for n in reversed(shape)],
        [driver.cuuint64_t(n * size) for n in reversed(strides[:-1])],
        [driver.cuuint32_t(n) for n in reversed(form["block_size"])],
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle(form["swizzle"]),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    error, found = driver.cuTensorMapEncodeTiled(*arguments)
    if int(error) == _INVALID_CONTEXT:
        _make_current(driver, device.index)
        error, found = driver.cuTensorMapEncodeTiled(*arguments)
    if int(error):
        raise ValueError(f"no descriptor for shape {list(shape)} with strides {list(strides)}: {error.name}")
    return ctypes.string_at(int(found.getPtr()), _MAP_BYTES)


def _parameter_sizes(driver: Any, function: Any) -> list[int]:
    sizes: list[int] = []
    while True:
        try:
            error, _, size = driver.cuFuncGetParamInfo(function, len(sizes))
        except RuntimeError as missing:  # a driver before 12.4
            raise LookupError("parameters that nobody tells of") from missing
        if int(error):
            return sizes
        sizes.append(int(size))


def _make_current(driver: Any, index: int) -> None:
    """Make a device's primary context that of this thread, and keep it for as long as the process lives."""
    error, context = driver.cuDevicePrimaryCtxRetain(index)
    if not int(error):
        driver.cuCtxSetCurrent(context)
