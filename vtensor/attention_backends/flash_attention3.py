"""Back-ends on FlashAttention 3, of which there are three builds: upstream's, fa3_fwd, and the one inside vLLM.

All read whole tiles of keys, also behind a sequence: `overread_tokens` are those of the largest tile, measured on an
H200 as 176 (bfloat16, D 128), 192 (D 64) and 224 (fp8, which none of these takes beside queries of another dtype).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch

from vtensor.attention_backends.backend import Backend, Result, why_no_module
from vtensor.attention_backends.flash_attention import device_lengths, fixed_lse, window_size
from vtensor.attention_backends.support import Support
from vtensor.triton_kernels.arguments import AttentionArguments

__all__ = ["Fa3FwdBackend", "Fa3UpstreamBackend", "Fa3VllmBackend"]

_HOPPER = ((9, 0), (10, 0))
_MOST_OVERREAD = 192


class _FlashAttention3(Backend):
    """What the builds share. Lengths and slots stay on the device."""

    def overread_tokens(self, call: AttentionArguments) -> int:
        """Rows that a call may read behind a sequence, and with a window before it."""
        return _MOST_OVERREAD if call.q.shape[-1] <= 64 else 176

    def run(self, call: AttentionArguments, *, return_lse: bool) -> Result:
        """Compute a call; see `Backend.run`."""
        k, v, lens, slots = device_lengths(call)
        out, sums = self.launch(call, k, v, lens, slots)
        rows = call.cu_seqlens
        if rows is not None:  # what lies behind the last request is not written
            unused = torch.arange(out.shape[0], device=out.device) >= rows[-1]
            out = out.masked_fill_(unused[:, None, None], 0)
            sums = sums.masked_fill(unused, -torch.inf)
        return out, fixed_lse(sums.transpose(-1, -2)) if return_lse else None

    @abstractmethod
    def launch(
        self, call: AttentionArguments, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, slots: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of q's shape, and log-sum-exp values [B, Hq, Sq], or [Hq, T] with cu_seqlens."""


class Fa3UpstreamBackend(_FlashAttention3):
    """flash_attn_interface.flash_attn_with_kvcache, as built from upstream's folder hopper."""

    name = "fa3-upstream"
    package = "flash_attn_3"
    install = "build the folder hopper of flash-attention"
    support = Support(
        (torch.float16, torch.bfloat16),
        frozenset({"batch_idx", "cu_seqlens", "causal=False", "window", "softcap", "return_lse"}),
        overread_tokens=_MOST_OVERREAD,
        capabilities=_HOPPER,
    )

    def why_absent(self) -> str | None:
        """Say why it cannot be loaded, or None."""
        return why_no_module("flash_attn_interface")

    def launch(
        self, call: AttentionArguments, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, slots: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the package's function for caches."""
        out, lse, *_ = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache(
            call.q,
            k,
            v,
            cache_seqlens=lens,
            cache_batch_idx=slots,
            cu_seqlens_q=call.cu_seqlens,
            max_seqlen_q=None if call.cu_seqlens is None else call.q.shape[0],  # at most; the true one is on the device
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=window_size(call),
            softcap=call.softcap,
            return_softmax_lse=True,
        )
        return out, lse


class Fa3FwdBackend(_FlashAttention3):
    """fa3_fwd: upstream's forward kernels for bfloat16, without windows."""

    name = "fa3-fwd"
    package = "fa3_fwd"
    support = Support(
        (torch.bfloat16,),
        frozenset({"batch_idx", "cu_seqlens", "causal=False", "softcap", "return_lse"}),
        overread_tokens=_MOST_OVERREAD,
        capabilities=_HOPPER,
    )

    def why_absent(self) -> str | None:
        """Say why it cannot be loaded, or None."""
        return None if _is_loaded("fa3_fwd") else why_no_module("fa3_fwd_interface")

    def launch(
        self, call: AttentionArguments, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, slots: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the operator."""
        out, lse, *_ = torch.ops.fa3_fwd.fwd(
            call.q,
            k,
            v,
            cu_seqlens_q=call.cu_seqlens,
            seqused_k=lens,
            max_seqlen_q=None if call.cu_seqlens is None else call.q.shape[0],
            kv_batch_idx=slots,
            softmax_scale=call.scale,
            is_causal=call.causal,
            softcap=call.softcap,
        )
        return out, lse


class Fa3VllmBackend(_FlashAttention3):
    """The operator inside vLLM, loaded without vLLM itself. It takes ragged queries only."""

    name = "fa3-vllm"
    package = "vllm"
    support = Support(
        (torch.float16, torch.bfloat16),
        frozenset({"batch_idx", "cu_seqlens", "causal=False", "window", "softcap", "return_lse"}),
        overread_tokens=_MOST_OVERREAD,
        capabilities=_HOPPER,
    )

    def why_absent(self) -> str | None:
        """Say why it cannot be loaded, or None."""
        return None if _is_loaded("_vllm_fa3_C") else _why_no_library()

    def launch(
        self, call: AttentionArguments, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, slots: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the operator, whose arguments have no names in Python."""
        q = call.q.reshape(-1, *call.q.shape[-2:])
        rows, most = call.cu_seqlens, q.shape[0]
        if rows is None:
            most = call.q.shape[1]
            rows = torch.arange(call.batch_size + 1, dtype=torch.int32, device=q.device) * most
        none: list[Any] = [None] * 8
        out, lse, *_ = torch.ops._vllm_fa3_C.fwd(
            q, k, v,
            *none[:4],  # new k and v, q_v, out
            rows,
            *none[:3],  # cu_seqlens of k and of new k, used length of q
            lens, most,
            *none[:2],  # longest k, page table
            slots,
            *none[:7],  # left padding, cos, sin and lengths of rotary embeddings, scales of q, k and v
            call.scale, call.causal, *window_size(call), call.softcap,
            True,  # interleaved
            None, 0, None, 0,  # metadata, splits, packing of heads, multiprocessors left alone
            None, 1, 0, None,  # sinks; context parallelism: ranks, rank, total length
        )  # fmt: skip
        if call.cu_seqlens is None:  # [Hq, B * Sq] to [B, Hq, Sq]
            return out.reshape(*call.q.shape[:-1], -1), lse.unflatten(1, call.q.shape[:2]).transpose(0, 1)
        return out, lse


def _is_loaded(namespace: str) -> bool:
    return hasattr(getattr(torch.ops, namespace), "fwd")


@functools.cache
def _why_no_library() -> str | None:
    ops: Any = torch.ops
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return "vllm is not installed"
    places = [Path(place) / "vllm_flash_attn" for place in spec.submodule_search_locations]
    found = [path for place in places for path in place.glob("_vllm_fa3_C*.so")]
    if not found:
        return "vllm has no vllm_flash_attn/_vllm_fa3_C"
    try:
        ops.load_library(str(found[0]))
    except Exception as error:  # built for another torch
        return f"{found[0].name} does not load: {error}"
    return None
