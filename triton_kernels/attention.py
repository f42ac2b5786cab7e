"""Attention over a contiguous KV cache: a few new tokens of each request, or many."""

from __future__ import annotations

from typing import Any

import torch

from vtensor.triton_kernels.arguments import (
    AttentionArguments,
    check_attention,
    check_for_kernels,
    check_target,
    check_tensor,
)
from vtensor.triton_kernels.decode import DecodePlan
from vtensor.triton_kernels.launch import num_multiprocessors
from vtensor.triton_kernels.library import attend_into
from vtensor.triton_kernels.prefill import PrefillPlan
from vtensor.triton_kernels.signatures import attention_key, remember

__all__ = ["attend_again", "decode_attention", "plan_of", "prefill_attention"]

MOST_QUERIES = 128
"""Queries of a request up to which its keys are split among programs, where few requests leave a GPU idle otherwise."""
_MOST_QUERIES_OF_MANY = 48

_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> _Result:
    """Attention of one or a few new tokens of each request.

    It reads the rows of k and v that a query sees, and no other, once for all query heads of a KV head: B * length *
    Hkv * (D + Dv) elements. Repeats give the same bits. It does not wait for the device (but where it needs more memory
    to work in than any call in the stream before), and may be captured into a CUDA graph, whose replays take the
    lengths that are then in `seq_lens`. While it runs nobody may write to those. It has no gradients.

    These rows must have memory when the kernel runs: give `plain` views of a virtual cache, after `step`, and the
    window that the cache gives memory back behind. On a CPU it is computed by Triton's interpreter where that is on
    (TRITON_INTERPRET), else in plain torch.

    Parameters
    ----------
    q : Tensor
        [B, Hq, D], or [B, Sq, Hq, D]: the last Sq tokens of each request; float16, bfloat16 or float32.
    k, v : Tensor
        [slots, L, Hkv, D] and [slots, L, Hkv, Dv], strided as they may be but in the last dimension; of q's dtype or
        float8_e4m3fn. Hq is a multiple of Hkv. v may be a part of k (latent attention).
    seq_lens : Tensor
        [B] int32, on q's device: tokens of each request in the cache, those of q included. 0: nothing is read.
    batch_idx : Tensor, optional
        [B] int32, on q's device: the slot of each request, by default its own number; -1 for padding, whose output is
        0.
    scale : float, optional
        Of the scores; 1 / sqrt(D) by default.
    window : int, optional
        The query at position p sees positions p - window + 1 to p (as in transformers; FlashAttention calls that
        ``(window - 1, 0)``).
    softcap : float, optional
        c in c * tanh(score / c).
    sinks : Tensor, optional
        [Hq]: logits that take part in the softmax, and have no value.
    alibi_slopes : Tensor, optional
        [Hq] float32: times the distance of a key, which is 0 or negative, added to its logit.
    k_scale, v_scale : Tensor, optional
        [Hkv] or one, float32, on q's device: what a float8 cache is to be multiplied with.
    return_lse : bool
        Whether the logarithm of the sum of exponentials is wanted as well.
    out : Tensor, optional
        Where the output goes, of q's dtype and shape, with Dv for D.

    Returns
    -------
    Tensor, or Tensor, Tensor
        The output; with `return_lse` also natural log-sum-exp values, float32 [B, Hq] or [B, Sq, Hq]. A query that
        sees no key has 0 and -inf.

    Raises
    ------
    ValueError
        An argument that does not fit, by name, value and rule; nothing was launched. What indices on a CUDA device
        hold is not looked at: lengths are cut to L, and what is no slot counts as padding.
    """
    options = (scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale)
    if isinstance(q, torch.Tensor) and q.dim() == 4 and q.shape[0] and q.shape[1] > _most_queries(q):
        batch, count = q.shape[:2]
        if out is not None:
            check_tensor("out", out, device=q.device, dtype=q.dtype, shape=(*q.shape[:-1], v.shape[-1]), dense=False)
        cu_seqlens = torch.arange(0, (batch + 1) * count, count, dtype=torch.int32, device=q.device)
        found = _attend(q.flatten(0, 1), k, v, seq_lens, batch_idx, cu_seqlens, True, options, return_lse, None)
        rows, sums = found if isinstance(found, tuple) else (found, None)
        rows = rows.view(*q.shape[:-1], v.shape[3])
        result = rows if out is None else out.copy_(rows)
        return result if sums is None else (result, sums.view(q.shape[:-1]))
    return _attend(q, k, v, seq_lens, batch_idx, None, True, options, return_lse, out)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> _Result:
    """Attention of many new tokens of each request: all of a prompt, or a chunk of it.

    It takes 4 * Hq * D floating-point operations for each query and key that it sees. While it runs nobody may write
    to the lengths and indices: several parts of a program read them.

    Parameters
    ----------
    q : Tensor
        [T, Hq, D]: the new tokens of all requests, one request after another.
    cu_seqlens : Tensor
        [B + 1] int32, on q's device: request b has the rows from cu_seqlens[b] to cu_seqlens[b + 1]. Query i of n
        stands at position seq_lens[b] - n + i of its request. Rows of q behind the last request have 0 and -inf.
    causal : bool
        Whether a query sees keys up to its own position; otherwise all of its request.

    All others are as for `decode_attention`.

    Returns
    -------
    Tensor, or Tensor, Tensor
        [T, Hq, Dv]; with `return_lse` also float32 [T, Hq].

    Raises
    ------
    ValueError
        An argument that does not fit, by name, value and rule; nothing was launched.
    """
    options = (scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale)
    if cu_seqlens is None:
        raise ValueError(
            "cu_seqlens is None: it must be a tensor of [B + 1]; decode_attention takes queries [B, Sq, Hq, D]"
        )
    return _attend(q, k, v, seq_lens, batch_idx, cu_seqlens, causal, options, return_lse, out)


def _most_queries(q: torch.Tensor) -> int:
    """Queries of a request up to which `decode_attention` splits its keys; more fill the GPU by themselves."""
    if q.shape[1] <= _MOST_QUERIES_OF_MANY or q.device.type != "cuda":
        return MOST_QUERIES
    return MOST_QUERIES if q.shape[0] * q.shape[2] < num_multiprocessors(q.device) else _MOST_QUERIES_OF_MANY


_checked: dict[Any, DecodePlan | PrefillPlan] = {}
"""What calls of a kind that was checked are done by, on a GPU."""


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    causal: bool,
    options: tuple[Any, ...],
    return_lse: bool,
    out: torch.Tensor | None,
) -> _Result:
    key = None
    if not torch.compiler.is_compiling():
        key = attention_key(q, k, v, seq_lens, batch_idx, cu_seqlens, causal, options, return_lse, out)
        plan = _checked.get(key)
        if plan is not None:
            return attend_again(plan, q, k, v, seq_lens, batch_idx, cu_seqlens, causal, options, return_lse, out)
    scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale = options
    check_for_kernels(q=q, k=k, v=v, out=out)
    call = check_attention(
        q, k, v, seq_lens, batch_idx, cu_seqlens, causal=causal, scale=scale, window=window, softcap=softcap,
        sinks=sinks, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    if out is not None:
        shape = (*q.shape[:-1], v.shape[3])
        check_tensor("out", out, device=q.device, dtype=q.dtype, shape=shape, dense=False)
        check_target("out", out)
    else:
        out = _output(q, v)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if return_lse else None
    if torch.compiler.is_compiling():
        torch.ops.vtensor.attend(
            call.q, k, v, seq_lens, batch_idx, cu_seqlens, causal, call.scale, call.window, call.softcap,
            sinks, alibi_slopes, call.k_scale, call.v_scale, out, lse,
        )  # fmt: skip
    else:
        plan = attend_into(call, out, lse)
        if plan is not None and key is not None and q.device.type == "cuda":
            remember(_checked, key, plan)
    return out if lse is None else (out, lse)


def attend_again(
    plan: DecodePlan | PrefillPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    causal: bool,
    options: tuple[Any, ...],
    return_lse: bool,
    out: torch.Tensor | None = None,
) -> _Result:
    """Attend by what a call with the same key was done by."""
    if out is None:
        out = _output(q, v)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if return_lse else None
    call = AttentionArguments(q, k, v, seq_lens, batch_idx, cu_seqlens, causal, 0.0, 0, 0.0, *options[3:])
    plan.run(call, out, lse)
    return out if lse is None else (out, lse)


def plan_of(key: Any) -> DecodePlan | PrefillPlan | None:
    """What calls with a key are done by, once there was one on a GPU."""
    return _checked.get(key)


def _output(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if q.shape[-1] == v.shape[3] and q.is_contiguous():
        return torch.empty_like(q, memory_format=torch.contiguous_format)  # half as long for the caller
    return torch.empty((*q.shape[:-1], v.shape[3]), dtype=q.dtype, device=q.device)
