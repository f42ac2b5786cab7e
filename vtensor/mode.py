"""virtual: a mode in which torch's own creation functions make virtual tensors."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch.overrides import TorchFunctionMode

from vtensor.allocator.page_pool import PagePool
from vtensor.effects import is_zero
from vtensor.tensor import VirtualTensor
from vtensor.units import MIB
from vtensor.watched import OnTouch

__all__ = ["virtual"]

# What makes tensors that are zero or have no values; the second kind takes the device of its first argument.
_MAKERS = {torch.empty, torch.zeros, torch.full, torch.empty_strided}
_LIKE = {
    torch.empty_like,
    torch.zeros_like,
    torch.full_like,
    torch.Tensor.new_empty,
    torch.Tensor.new_zeros,
    torch.Tensor.new_full,
    torch.Tensor.new_empty_strided,
}
_FULL = {torch.full, torch.full_like, torch.Tensor.new_full}


class virtual(TorchFunctionMode):
    """Within it, large tensors from torch's creation functions are virtual: unmodified code gets memory on demand.

    These are `torch.empty`, `zeros`, `full` of zeros, `empty_strided`, their ``_like`` and ``Tensor.new_`` forms. A
    model that allocates its KV cache for the longest context, ``torch.zeros(batch, heads, max_len, dim)``, then pays
    for what it writes. Operations that read such a cache whole, masked attention among them, still take time for its
    whole length (and on a GPU map zeros below all of it, once).

    Small tensors, other layouts and devices, pinned memory, ``out=`` and what is made while torch traces remain
    torch's.

    Parameters
    ----------
    min_bytes : int
        Tensors from this size on are virtual.
    on_touch, pool
        As for `vtensor.empty`; a pool serves its own device only, and others have theirs.

    Examples
    --------
    >>> import torch, vtensor as vt
    >>> with vt.virtual():
    ...     cache = torch.zeros(8, 32, 131_072, 128)
    >>> cache[:, :, 0] = 1
    >>> type(cache).__name__, cache.resident_bytes < cache.nbytes / 100
    ('VirtualTensor', True)
    """

    def __init__(
        self, min_bytes: int = 16 * MIB, *, on_touch: OnTouch = "commit", pool: PagePool | None = None
    ) -> None:
        super().__init__()
        if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 1:
            raise ValueError(f"min_bytes={min_bytes!r} must be an integer of at least 1")
        if on_touch not in get_args(OnTouch):
            raise ValueError(f"on_touch={on_touch!r} must be one of {get_args(OnTouch)}")
        if pool is not None and not isinstance(pool, PagePool):
            raise ValueError(f"pool={pool!r} must be a PagePool")
        self._min_bytes, self._on_touch, self._pool = min_bytes, on_touch, pool

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make a virtual tensor where torch would make a large one."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or (func not in _MAKERS and func not in _LIKE):
            return func(*args, **kwargs)
        return self._make(func, args, kwargs)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if device is None:
            device = args[0].device if func in _LIKE else torch.get_default_device()
        device = torch.device(device)
        if (
            device.type not in ("cpu", "cuda")
            or kwargs.get("out") is not None
            or kwargs.get("pin_memory")
            or kwargs.get("names") is not None
            or torch._guards.active_fake_mode() is not None
            or torch._C._len_torch_dispatch_stack() > 0
        ):
            return func(*args, **kwargs)
        meta = func(*args, **{**kwargs, "device": "meta"})
        if (
            meta.layout is not torch.strided
            or meta.is_quantized
            or meta.numel() * meta.element_size() < self._min_bytes
            or (func in _FULL and not _is_zero(func, args, kwargs))
        ):
            return func(*args, **kwargs)
        pool = self._pool
        if pool is not None and pool.driver.device.split(":")[0] != device.type:
            pool = None
        return VirtualTensor.reserve(meta, device, self._on_touch, pool).requires_grad_(meta.requires_grad)


def _is_zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a filled tensor is all zero bits."""
    position = 2 if func is torch.Tensor.new_full else 1
    value = args[position] if len(args) > position else kwargs.get("fill_value")
    return isinstance(value, bool | int | float) and is_zero(value)
