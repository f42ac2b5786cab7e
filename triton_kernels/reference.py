"""Reference: what the kernels compute, in plain torch and float32, one request after another."""

from __future__ import annotations

import torch

from vtensor.triton_kernels.arguments import AttentionArguments

__all__ = ["attend"]


def attend(call: AttentionArguments, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a cache, computed in `dtype`.

    Reads lengths and indices (on a CUDA device that waits for it), and no row of k and v that no query sees.

    Returns
    -------
    Tensor, Tensor
        Outputs of q's dtype and shape, of the width of v, and float32 log-sum-exp values (natural logarithm, sinks
        included) of q's shape without its last dimension. A query that sees nothing, and padding, have 0 and -inf.
    """
    q, k, v = call.q, call.k, call.v
    queries = q.reshape(-1, *q.shape[-2:])
    out = queries.new_zeros(*queries.shape[:2], v.shape[3])
    lse = torch.full(queries.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    lens = call.seq_lens.tolist()
    slots = list(range(len(lens))) if call.batch_idx is None else call.batch_idx.tolist()
    per_request = q.shape[1] if call.cu_seqlens is None else 0
    starts = [per_request * b for b in range(len(lens) + 1)] if call.cu_seqlens is None else call.cu_seqlens.tolist()
    for b, (slot, length) in enumerate(zip(slots, lens, strict=True)):
        first, last = starts[b], starts[b + 1]
        if 0 <= slot < k.shape[0] and first < last and length > 0:
            _attend_one(call, queries[first:last], k[slot, :length], v[slot, :length], out, lse, first, dtype)
    return out.reshape(*q.shape[:-1], v.shape[3]), lse.reshape(q.shape[:-1])


def _attend_one(
    call: AttentionArguments,
    q: torch.Tensor,  # [n, Hq, D]
    k: torch.Tensor,  # [length, Hkv, D]
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    first: int,
    dtype: torch.dtype,
) -> None:
    count, length = q.shape[0], k.shape[0]
    position = torch.arange(length - count, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None, :]
    sees = key <= position if call.causal else torch.ones_like(key <= position)
    if call.window:
        sees &= key > position - call.window
    begin = int(sees.any(0).int().argmax())  # what lies before a window may have no memory
    sees, key, k, v = sees[:, begin:], key[:, begin:], k[begin:], v[begin:]
    keys, values = _scaled(k, call.k_scale, dtype), _scaled(v, call.v_scale, dtype)
    keys, values = (x.repeat_interleave(call.group, dim=1) for x in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", q.to(dtype), keys) * call.scale
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.alibi_slopes is not None:
        logits = logits + call.alibi_slopes.to(dtype)[:, None, None] * (key - position)
    logits = logits.masked_fill(~sees, -torch.inf).float()
    if call.sinks is not None:
        sink = call.sinks.float()[:, None, None].expand(-1, count, 1)
        weights = torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
        sums = torch.logaddexp(logits.logsumexp(-1), sink[..., 0])
    else:
        weights, sums = logits.softmax(-1), logits.logsumexp(-1)
    sees_any = sees.any(1)
    found = torch.einsum("hqk,khd->qhd", weights.to(dtype), values).to(out.dtype)
    out[first : first + count] = torch.where(sees_any[:, None, None], found, torch.zeros_like(found))
    lse[first : first + count] = torch.where(sees_any[:, None], sums.T, -torch.inf)


def _scaled(cache: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    found = cache.to(dtype)
    return found if scale is None else found * scale.to(dtype)[:, None]
