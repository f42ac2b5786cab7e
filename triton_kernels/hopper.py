"""Prefill by the kernel for Hopper, where that can do a call."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import triton

from vtensor.triton_kernels.arguments import AttentionArguments
from vtensor.triton_kernels.launch import compute_capability, is_interpreted, num_multiprocessors
from vtensor.triton_kernels.lengths import MOST_LENGTHS
from vtensor.triton_kernels.prepared import Prepared, prepare, tensor_map
from vtensor.triton_kernels.signatures import remember

__all__ = ["HopperPlan"]

_PROVEN = ("3.6",)
"""Versions of Triton with which this kernel has run. Gluon changes from one to the next."""

_BLOCK_M, _BLOCK_N, _STAGES = 128, 128, 2
_MOST_STRIDE = 1 << 40  # bytes
_MOST_MAPS = 1024


class HopperPlan:
    """How ragged queries [T, Hq, D] attend to a cache of a shape, whatever T is.

    Parameters
    ----------
    call
        Any call of that kind, for which `suits` is true; of its tensors all but what is in them, and T, counts.
    """

    def __init__(self, call: AttentionArguments, *, has_lse: bool, out_strides: tuple[int, ...]) -> None:
        q, k = call.q, call.k
        _, self._num_heads, head_dim = q.shape
        self._batch = call.batch_size
        numbers = {
            "STRIDE_TOKEN": out_strides[0],
            "STRIDE_HEAD": out_strides[1],
            "NUM_HEADS": self._num_heads,
            "GROUP": call.group,
            "D": head_dim,
            "BLOCK_N": _BLOCK_N,
            "BLOCK_B": max(64, triton.next_power_of_2(self._batch)),
            "STAGES": _STAGES,
            "CAUSAL": call.causal,
            "INDEXED": call.batch_idx is not None,
            "LSE": has_lse,
        }
        strides = (*k.stride()[:3], *call.v.stride()[:3])
        self._numbers = (self._batch, *k.shape[:2], call.scale * math.log2(math.e), *strides, *numbers.values())
        self._prepared: Prepared | None = None
        self._maps: dict[Any, bytes] = {}  # by tensor, address, and rows of q
        self._is_usable = True

    @staticmethod
    def suits(call: AttentionArguments) -> bool:
        """Whether it can do calls of a kind, where tensors begin at multiples of 16 bytes."""
        q, k, v = call.q, call.k, call.v
        features = (call.sinks, call.alibi_slopes, call.k_scale, call.v_scale)
        return (
            q.device.type == "cuda"
            and compute_capability(q.device) == (9, 0)
            and ".".join(triton.__version__.split(".")[:2]) in _PROVEN
            and not is_interpreted()
            and q.dtype in (torch.float16, torch.bfloat16)
            and k.dtype == q.dtype
            and k.shape == v.shape
            and q.shape[-1] in (64, 128)
            and not (call.window or call.softcap)
            and all(tensor is None for tensor in features)
            and call.scale > 0
            and 0 < call.batch_size <= MOST_LENGTHS
            and k.numel() > 0
            and all(_fits(tensor) for tensor in (q, k, v))
        )

    def run(self, call: AttentionArguments, out: torch.Tensor, lse: torch.Tensor | None) -> bool:
        """Attend, into `out` [T, Hq, D] and `lse` [T, Hq], on the current device; False where it could not."""
        slots = call.seq_lens if call.batch_idx is None else call.batch_idx
        caches = call.k, call.v
        sums = out if lse is None else lse
        tensors: tuple[Any, ...] = (call.q, *caches, *caches, out, sums, call.cu_seqlens, call.seq_lens, slots)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if not self._is_usable or any(address % 16 for address in addresses):
            return False
        num_queries = out.shape[0]
        items = (-(-num_queries // _BLOCK_M) + min(self._batch, num_queries)) * self._num_heads
        prepared = self._prepared
        if prepared is None:
            prepared = self._prepared = self._prepare(tensors, num_queries, items)
        if prepared is None:
            self._is_usable = False
            return False
        forms = prepared.map_forms
        try:
            maps = [self._map(i, tensors[i], addresses[i], forms[i]) for i in range(3)]
        except ValueError:  # strides of q of which one row did not tell
            return False
        programs = min(items, num_multiprocessors(out.device))
        prepared((programs, 1), out.device, addresses[3:], (num_queries, items), maps)
        return True

    def _prepare(self, tensors: tuple[Any, ...], *changing: int) -> Prepared | None:
        try:
            from triton.experimental.gluon.language import NVMMASharedLayout
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

            from vtensor.triton_kernels.hopper_kernel import hopper_prefill_kernel
        except (ImportError, AttributeError):  # a Triton without Gluon, or with another one
            return None
        head_dim = tensors[0].shape[-1]
        tiles = [64, 1, head_dim], [1, _BLOCK_N, 1, head_dim], [1, _BLOCK_N, 1, head_dim]
        described = [
            TensorDescriptor(tensor, list(tensor.shape), _strides(tensor), tile, NVMMASharedLayout(128, 16, len(tile)))
            for tensor, tile in zip(tensors[:3], tiles, strict=True)
        ]
        arguments = (*described, *tensors[3:], *changing, *self._numbers)
        try:
            compiled = hopper_prefill_kernel.warmup(*arguments, grid=(1,), num_warps=4, enable_fp_fusion=True)
        except Exception as error:  # the kernel for any GPU does it as well
            warnings.warn(
                f"the prefill kernel for Hopper does not compile, a slower one is used: {error}", stacklevel=2
            )
            return None
        addresses = [0 if isinstance(one, torch.Tensor) else one for one in arguments]
        return prepare(compiled, len(tensors), len(changing), addresses)

    def _map(self, which: int, tensor: torch.Tensor, address: int, form: dict[str, Any]) -> bytes:
        key = which, address, tensor.shape[0]
        found = self._maps.get(key)
        if found is None:
            found = tensor_map(tensor.device, address, tensor.dtype, tensor.shape, _strides(tensor), form)
            remember(self._maps, key, found, _MOST_MAPS)
        return found


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides as a descriptor has them: that of a dimension of one element does not matter, and must be allowed."""
    return [stride if size > 1 else 8 for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False)] + [1]


def _fits(tensor: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can be told of a tensor."""
    nbytes = [stride * tensor.element_size() for stride in _strides(tensor)[:-1]]
    return all(0 < stride < _MOST_STRIDE and stride % 16 == 0 for stride in nbytes)
