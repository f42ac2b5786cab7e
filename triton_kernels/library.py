"""Library: attention and appending as operators of torch, for torch.compile."""

from __future__ import annotations

from typing import Any

import torch

from vtensor.triton_kernels.append import append_kv
from vtensor.triton_kernels.arguments import AttentionArguments, check_indices
from vtensor.triton_kernels.decode import DecodePlan
from vtensor.triton_kernels.launch import is_interpreted
from vtensor.triton_kernels.prefill import PrefillPlan
from vtensor.triton_kernels.reference import attend
from vtensor.triton_kernels.signatures import attention_key, remember

__all__ = ["attend_into"]

_plans: dict[Any, DecodePlan | PrefillPlan] = {}


def attend_into(
    call: AttentionArguments, out: torch.Tensor, lse: torch.Tensor | None
) -> DecodePlan | PrefillPlan | None:
    """Attend, into `out` and `lse`, where q is [T, Hq, D] or [B, Sq, Hq, D].

    Returns what did it, to be used again; None for plain torch. On a CPU that is plain torch, or Triton's interpreter
    where it is on (which computes wrongly in bfloat16).
    """
    if not out.numel():
        return None
    if call.q.device.type == "cpu":
        check_indices(call)
        if not is_interpreted() or torch.bfloat16 in (call.q.dtype, call.k.dtype):
            with torch.no_grad():
                found, sums = attend(call)
                out.copy_(found.view(out.shape))
                if lse is not None:
                    lse.copy_(sums.view(lse.shape))
            return None
    options = (call.scale, call.window, call.softcap, *call[-4:])  # with sinks, slopes and scales of the cache
    key = attention_key(*call[:7], options, lse is not None, out)
    plan = _plans.get(key)
    if plan is None:
        plan = plan_for(call, out, lse)
        if key is not None:
            remember(_plans, key, plan)
    plan.run(call, out, lse)
    return plan


def plan_for(call: AttentionArguments, out: torch.Tensor, lse: torch.Tensor | None) -> DecodePlan | PrefillPlan:
    """The kernel for a call, and how it is cut."""
    has_lse = lse is not None
    if call.cu_seqlens is not None:
        return PrefillPlan(call, has_lse=has_lse, out_strides=out.stride())
    strides = out.stride() if out.dim() == 4 else (out.stride(0), 0, *out.stride()[1:])
    return DecodePlan(call, has_lse=has_lse, out_strides=strides)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    attend_into(
        AttentionArguments(
            q, k, v, seq_lens, batch_idx, cu_seqlens, causal, scale, window, softcap,
            sinks, alibi_slopes, k_scale, v_scale,
        ),
        out,
        lse,
    )  # fmt: skip


_new_library: Any = torch.library.Library
_library = _new_library("vtensor", "FRAGMENT")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor seq_lens, Tensor? batch_idx, Tensor? cu_seqlens, bool causal, "
    "float scale, int window, float softcap, Tensor? sinks, Tensor? alibi_slopes, Tensor? k_scale, Tensor? v_scale, "
    "Tensor(a!) out, Tensor(b!)? lse) -> ()"
)
_library.define(
    "append_kv(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor seq_lens, Tensor? batch_idx, "
    "Tensor? cu_seqlens, *, Tensor? cos, Tensor? sin, bool interleaved, Tensor(c!)? q, Tensor? k_scale, "
    "Tensor? v_scale) -> ()"
)
for _name, _run in (("attend", _attend), ("append_kv", append_kv)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vtensor::{_name}", lambda *args, **kwargs: None, lib=_library)
