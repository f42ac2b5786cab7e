"""Table: which back-ends `auto` tries first, by GPU and shape. Nothing is timed in a user's process."""

from __future__ import annotations

from typing import Literal

import torch

from vtensor.triton_kernels.arguments import AttentionArguments

__all__ = ["ShapeClass", "order", "shape_class"]

ShapeClass = Literal["decode", "prefill"]

_MOST_DECODE_QUERIES = 16

# Causal prefill, H200, bfloat16, Hq 32, Hkv 8, D 128, 8k to 128k tokens: FlashAttention 3 inside vLLM 627 to 648
# TFLOP/s, and upstream's takes 0.92 to 0.98 of its time. Published for Triton on an H100: up to 378, newer ones 450 and
# more. In decode FlashAttention 3 is nearly as fast as the memory, and what is faster (cuDNN) wants lengths on the
# host: nothing comes before "triton".
_WINNERS: dict[tuple[tuple[int, int], ShapeClass], tuple[str, ...]] = {
    ((9, 0), "prefill"): ("fa3-upstream", "fa3-fwd", "fa3-vllm"),
}
_ELSE = ("triton", "fa3-upstream", "fa3-fwd", "fa3-vllm", "flash-attn-2", "reference")


def shape_class(call: AttentionArguments) -> ShapeClass | None:
    """What a call is like, as far as shapes tell; None where nothing like it was measured."""
    if call.q.dtype == torch.float32 or call.q.shape[-1] != 128:
        return None
    rows = call.q.shape[0] * call.q.shape[1] if call.cu_seqlens is None else call.q.shape[0]
    return "decode" if rows <= _MOST_DECODE_QUERIES * call.batch_size else "prefill"


def order(call: AttentionArguments, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """Names of back-ends, best first; `capability` of the GPU, None on the host."""
    if capability is None:
        return ("triton", "reference")
    kind = shape_class(call)
    winners = _WINNERS.get((capability, kind), ()) if kind else ()
    return winners + tuple(name for name in _ELSE if name not in winners)
