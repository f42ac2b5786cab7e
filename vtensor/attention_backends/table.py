"""Table: which back-ends `auto` tries first, by GPU and shape. Nothing is timed in a user's process."""

from __future__ import annotations

from typing import Literal

import torch

from vtensor.triton_kernels.arguments import AttentionArguments

__all__ = ["ShapeClass", "order", "shape_class"]

ShapeClass = Literal["decode", "prefill"]

_MOST_DECODE_QUERIES = 16

# Measured on an H200 (notebooks/results/h200-kernels.jsonl), bfloat16, Hq 32, Hkv 8 and 4, D 128. Causal prefill, our
# kernel's time over that of the builds of FlashAttention 3: 0.89 to 0.99 for 2k tokens, 0.96 to 1.05 for 8k, 0.97 to
# 1.11 for 16k, 1.04 to 1.12 for a chunk of 2k that ends 128k. Theirs read behind the tokens, so they are only taken
# where the caller allows that. In decode nothing that takes lengths on the device is faster than ours.
_WINNERS: dict[tuple[tuple[int, int], ShapeClass], tuple[str, ...]] = {
    ((9, 0), "prefill"): ("fa3-upstream", "fa3-fwd", "fa3-vllm"),
}
_ELSE = ("triton", "fa3-upstream", "fa3-fwd", "fa3-vllm", "flash-attn-2", "reference")


def shape_class(q: torch.Tensor, batch_size: int) -> ShapeClass | None:
    """What a call with these queries is like, as far as shapes tell; None where nothing like it was measured."""
    if q.dtype == torch.float32 or q.shape[-1] != 128:
        return None
    num_queries = q.shape[:-2].numel()
    return "decode" if num_queries <= _MOST_DECODE_QUERIES * batch_size else "prefill"


def order(call: AttentionArguments, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """Names of back-ends, best first; `capability` of the GPU, None on the host."""
    if capability is None:
        return ("triton", "reference")
    kind = shape_class(call.q, call.batch_size)
    winners = _WINNERS.get((capability, kind), ()) if kind else ()
    return winners + tuple(name for name in _ELSE if name not in winners)
