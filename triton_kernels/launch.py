"""Launch: what the hosts of the kernels share."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
from typing import Any

import torch
import triton

from vtensor.triton_kernels.prepared import Prepared, prepare

__all__ = [
    "Launch",
    "compute_capability",
    "device_of",
    "has_dependent_launch",
    "is_interpreted",
    "num_multiprocessors",
    "split_width",
    "suits_descriptors",
]

_ON_THE_HOST = 4
"""Multiprocessors that the interpreter is said to have: few, since it runs one program after another."""


@triton.jit
def _probe() -> None:
    pass


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels (`TRITON_INTERPRET`, when they were imported)."""
    return not isinstance(_probe, triton.runtime.JITFunction)


@functools.cache
def _of_gpu(index: int) -> tuple[int, int, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.major, properties.minor


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return _of_gpu(device.index)[0] if device.type == "cuda" else _ON_THE_HOST


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a device; (0, 0) of the host."""
    return _of_gpu(device.index)[1:] if device.type == "cuda" else (0, 0)


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one that it waits for has ended (from Hopper on)."""
    return compute_capability(device)[0] >= 9 and not is_interpreted()


_HERE = contextlib.nullcontext()


def device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The device of a tensor as the current one, on which Triton launches."""
    device = tensor.device
    if device.type != "cuda" or torch._C._cuda_getDevice() == device.index:
        return _HERE
    return torch.cuda.device(device)


@functools.cache
def split_width(width: int) -> tuple[int, int]:
    """A head dimension as a power of 2 and one for the rest, at least 16 where there is any (80: 64 and 16)."""
    main = 1 << (width.bit_length() - 1)
    rest = width - main
    return main, max(16, triton.next_power_of_2(rest)) if rest else 0


def suits_descriptors(*caches: torch.Tensor) -> bool:
    """Whether rows lie where the tensor memory accelerator can fetch them: at multiples of 16 bytes, from Hopper on."""
    return all(
        (cache.device.type != "cuda" or compute_capability(cache.device)[0] >= 9)
        and cache.data_ptr() % 16 == 0
        and all(stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:3])
        for cache in caches
    )


_Tensors = tuple[Any, ...]  # tensors, or None; the first is one


class Launch:
    """A kernel with all of its arguments but tensors, and numbers that change from call to call.

    What Triton compiled is kept, by which tensors lie at multiples of 16 bytes. It is launched with addresses rather
    than tensors: of those Triton asks the driver, which knows none where no memory is mapped yet, as at the beginning
    of a virtual tensor of which another part is used.

    Parameters
    ----------
    kernel
        Takes tensors, then changing numbers (which it must not be specialised for), then those in `numbers`.
    numbers
        By name, or in their order.
    options
        For Triton.
    """

    def __init__(self, kernel: Any, numbers: dict[str, Any] | tuple[Any, ...], **options: Any) -> None:
        self._kernel, self._options = kernel, options
        if isinstance(numbers, dict):
            numbers = tuple(numbers[name] for name in kernel.arg_names[-len(numbers) :])
        self._numbers = numbers
        self._aligned: Prepared | None = None  # for tensors that all lie at multiples of 16 bytes: nearly always
        self._others: dict[tuple[bool, ...], Any] = {}

    def __call__(self, grid: int | tuple[int, int], tensors: _Tensors, *changing: int) -> None:
        """Launch so many programs on the current device. The same tensors must be None in all calls."""
        shape = (grid, 1) if isinstance(grid, int) else grid
        prepared = self._aligned
        if prepared is not None:
            addresses = [tensors[i].data_ptr() for i in prepared.pointers]
            if not functools.reduce(operator.or_, addresses) & 15:
                prepared(shape, tensors[0].device, addresses, changing)
                return
        if is_interpreted():
            self._kernel[*shape, 1](*tensors, *changing, *self._numbers, **self._options)
        else:
            self._run(shape, tensors, changing)

    def _run(self, grid: tuple[int, int], tensors: _Tensors, changing: tuple[int, ...]) -> None:
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        aligned = tuple([address is None or address % 16 == 0 for address in addresses])
        found = self._others.get(aligned)
        if found is None:
            found = self._kernel.warmup(*tensors, *changing, *self._numbers, grid=(*grid, 1), **self._options)
            arguments = (*addresses, *changing, *self._numbers)
            found = prepare(found, len(tensors), len(changing), arguments) or found
            self._others[aligned] = found
            if isinstance(found, Prepared) and all(aligned):
                self._aligned = found
        if isinstance(found, Prepared):
            found(grid, tensors[0].device, [addresses[i] or 0 for i in found.pointers], changing)
        elif grid[0] and grid[1]:  # in a copy of the caller's context, whose allocator stays
            stream = torch._C._cuda_getCurrentRawStream(tensors[0].device.index)
            arguments = (*addresses, *changing, *self._numbers)
            contextvars.copy_context().run(_launch_with_scratch, found[*grid, 1], arguments, stream)


def _launch_with_scratch(run: Any, arguments: tuple[Any, ...], stream: int) -> None:
    triton.set_allocator(_scratch)
    run(*arguments, stream=stream)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
