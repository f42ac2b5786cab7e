"""Dispatch: a call to the back-end that is chosen for it, once for all calls of its kind."""

from __future__ import annotations

from typing import Any

import torch

from vtensor.attention_backends.backend import Backend, CannotRunError
from vtensor.attention_backends.choose import choose, refusal
from vtensor.attention_backends.table import shape_class
from vtensor.triton_kernels.arguments import AttentionArguments, check_attention
from vtensor.triton_kernels.attention import attend_again, decode_attention, plan_of, prefill_attention
from vtensor.triton_kernels.signatures import attention_key, remember

__all__ = ["dispatch"]

_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_kinds: dict[Any, tuple[Backend, float, int, float]] = {}
"""By kind of call on a GPU: what does it, and the scale, window and softcap that it is told."""


def dispatch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    causal: bool,
    options: tuple[Any, ...],
    return_lse: bool,
    backend: str,
    overread_tokens: int,
) -> _Result:
    """Check a call of `vtensor.attention`, choose a back-end, and have it done; `options` as for `attention_key`."""
    key = kind = whole = None
    if torch.compiler.is_compiling():
        if backend in ("auto", "triton") and (cu_seqlens is not None or causal or q.dim() == 3):
            return _with_kernels(q, k, v, seq_lens, batch_idx, cu_seqlens, causal, options, return_lse)
    elif type(backend) is str and type(overread_tokens) is int:
        key = attention_key(q, k, v, seq_lens, batch_idx, cu_seqlens, causal, options, return_lse, None)
        if key is not None:  # in which the number of ragged queries does not count, and for the table it does
            whole = key, backend, overread_tokens, shape_class(q, seq_lens.shape[0])
            kind = _kinds.get(whole)
        plan = plan_of(key) if kind is not None and kind[0].name == "triton" else None
        if plan is not None:
            return attend_again(plan, q, k, v, seq_lens, batch_idx, cu_seqlens, causal, options, return_lse)
    if kind is not None:
        chosen, scale, window, softcap = kind
        call = AttentionArguments(
            q.unsqueeze(1) if cu_seqlens is None and q.dim() == 3 else q,
            k, v, seq_lens, batch_idx, cu_seqlens, causal, scale, window, softcap, *options[3:5],
            *(None if x is None else x.reshape(-1) for x in options[5:]),
        )  # fmt: skip
    else:
        scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale = options
        call = check_attention(
            q, k, v, seq_lens, batch_idx, cu_seqlens, causal=causal, scale=scale, window=window, softcap=softcap,
            sinks=sinks, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        if isinstance(overread_tokens, bool) or not isinstance(overread_tokens, int) or overread_tokens < 0:
            raise ValueError(f"overread_tokens={overread_tokens!r} must be an integer of 0 or more")
        chosen = choose(backend, call, return_lse=return_lse, overread_tokens=overread_tokens)
        # Those that read lengths are refused in a capture, and so others are chosen there.
        is_settled = q.is_cuda and not chosen.reads_lengths(call) and not torch.cuda.is_current_stream_capturing()
        if whole is not None and is_settled:
            remember(_kinds, whole, (chosen, call.scale, call.window, call.softcap))
    if chosen.name == "triton" and (cu_seqlens is not None or causal):
        # as a user calls them, so that they remember the call
        return _with_kernels(q, k, v, seq_lens, batch_idx, cu_seqlens, causal, options, return_lse)
    try:
        out, lse = chosen.attend(call, return_lse=return_lse)
    except CannotRunError as error:
        raise refusal(backend, str(error), call, return_lse=return_lse, but=chosen.name) from None
    out = out.reshape(*q.shape[:-1], v.shape[3])
    return (out, lse.reshape(q.shape[:-1])) if lse is not None else out


def _with_kernels(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    causal: bool,
    options: tuple[Any, ...],
    return_lse: bool,
) -> _Result:
    """Call our own kernels."""
    names = "scale", "window", "softcap", "sinks", "alibi_slopes", "k_scale", "v_scale"
    named: dict[str, Any] = dict(zip(names, options, strict=True), return_lse=return_lse)
    if cu_seqlens is not None:
        return prefill_attention(q, k, v, cu_seqlens, seq_lens, batch_idx, causal=causal, **named)
    return decode_attention(q, k, v, seq_lens, batch_idx, **named)
