"""Virtual tensors for PyTorch: contiguous addresses reserved at once, memory mapped on demand."""

import vtensor.traced  # noqa: F401  for torch.compile
from vtensor.allocator.arena import MemoryStats
from vtensor.allocator.page_pool import PagePool
from vtensor.allocator.pluggable import memory_stats, sleep, trim, use_allocator, wake
from vtensor.attention_backends import attention
from vtensor.errors import (
    ClosedError,
    DriverError,
    ForkedError,
    OutOfPagesError,
    OutOfSlotsError,
    RequestError,
    ReservationError,
    UnmappedAccessError,
    VTensorError,
)
from vtensor.factory import as_virtual, empty, empty_like, empty_strided, full, zeros, zeros_like
from vtensor.indexing import unread_indices
from vtensor.kvcache import KVCacheConfig, KVCacheManager, KVCacheStats, LayerSpec, StepResult
from vtensor.mode import virtual
from vtensor.tensor import VirtualTensor

__all__ = [
    "ClosedError",
    "DriverError",
    "ForkedError",
    "KVCacheConfig",
    "KVCacheManager",
    "KVCacheStats",
    "LayerSpec",
    "MemoryStats",
    "OutOfPagesError",
    "OutOfSlotsError",
    "PagePool",
    "RequestError",
    "ReservationError",
    "StepResult",
    "UnmappedAccessError",
    "VTensorError",
    "VirtualTensor",
    "as_virtual",
    "attention",
    "empty",
    "empty_like",
    "empty_strided",
    "full",
    "memory_stats",
    "sleep",
    "trim",
    "unread_indices",
    "use_allocator",
    "virtual",
    "wake",
    "zeros",
    "zeros_like",
]
