"""Shapes: what both kernels of attention are told of a call, whatever is in its tensors."""

from __future__ import annotations

from typing import Any

import torch
import triton

from vtensor.triton_kernels.arguments import AttentionArguments
from vtensor.triton_kernels.launch import split_width
from vtensor.triton_kernels.lengths import MOST_LENGTHS

__all__ = ["shared_numbers"]


def shared_numbers(call: AttentionArguments, *, has_lse: bool, page_tokens: int, table_width: int) -> dict[str, Any]:
    """The numbers of a call by their names in the kernels: of the cache, of the requests, of options."""
    k, v, batch = call.k, call.v, call.batch_size
    num_slots, slot_tokens, _, value_dim = v.shape
    if page_tokens:
        num_slots, slot_tokens = batch, table_width * page_tokens
    head_dim = call.q.shape[-1]
    main, rest = split_width(head_dim)
    is_small = batch <= MOST_LENGTHS
    return {
        **dict(zip(("stride_k_slot", "stride_k_token", "stride_k_head"), k.stride(), strict=False)),
        **dict(zip(("stride_v_slot", "stride_v_token", "stride_v_head"), v.stride(), strict=False)),
        "stride_table": table_width,
        "batch": batch,
        "num_slots": num_slots,
        "slot_tokens": slot_tokens,
        "scale": call.scale,
        "window": call.window,
        "softcap": call.softcap,
        "k_scale_step": int(call.k_scale is not None and call.k_scale.numel() > 1),
        "v_scale_step": int(call.v_scale is not None and call.v_scale.numel() > 1),
        "GROUP": call.group,
        "D": head_dim,
        "D_MAIN": main,
        "D_REST": rest,
        "DV": value_dim,
        "BLOCK_DV": triton.next_power_of_2(value_dim),
        "BLOCK_B": max(64, triton.next_power_of_2(batch)) if is_small else 1,
        "LOG_B": 0 if is_small else batch.bit_length(),
        "INDEXED": call.batch_idx is not None,
        "WINDOW": call.window > 0,
        "SOFTCAP": call.softcap > 0,
        "ALIBI": call.alibi_slopes is not None,
        "SINKS": call.sinks is not None,
        "K_SCALE": call.k_scale is not None,
        "V_SCALE": call.v_scale is not None,
        "LSE": has_lse,
        "PAGE": page_tokens,
        "PRECISION": "ieee" if call.q.dtype == torch.float32 else "tf32",
    }
