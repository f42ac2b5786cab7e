"""How the prefill kernel is cut for a shape, and launched."""

from __future__ import annotations

from typing import Any

import torch
import triton

from vtensor.triton_kernels.arguments import AttentionArguments
from vtensor.triton_kernels.launch import Launch, device_of, split_width, suits_descriptors
from vtensor.triton_kernels.lengths import MOST_LENGTHS
from vtensor.triton_kernels.prefill_kernel import prefill_kernel
from vtensor.triton_kernels.tuning import PrefillTuning, prefill_tuning

__all__ = ["PrefillPlan"]


class PrefillPlan:
    """How ragged queries [T, Hq, D] attend to a cache of a shape, whatever T is.

    Parameters
    ----------
    call
        Any call of that kind; of its tensors all but what is in them, and T, counts.
    has_lse
        Whether log-sum-exp values are wanted.
    tuning
        Instead of what is chosen for the shape.
    page_tokens, table_width
        For measuring what pages cost: k and v are [pages, page_tokens, Hkv, D], and a block table of so many pages a
        request says where its tokens are. The rest is the same.
    """

    def __init__(
        self,
        call: AttentionArguments,
        *,
        has_lse: bool,
        out_strides: tuple[int, ...],
        tuning: PrefillTuning | None = None,
        page_tokens: int = 0,
        table_width: int = 0,
    ) -> None:
        q, k, v = call.q, call.k, call.v
        _, self._num_heads, head_dim = q.shape
        self._batch = call.batch_size
        num_slots, slot_tokens, _, value_dim = v.shape
        if page_tokens:
            num_slots, slot_tokens = self._batch, table_width * page_tokens
        tuning = tuning or prefill_tuning(head_dim, value_dim, q.element_size())
        self._block_m = tuning.block_m
        main, rest = split_width(head_dim)
        tiles = tuning.descriptors and not page_tokens and not rest and suits_descriptors(k, v)
        self._is_small = self._batch <= MOST_LENGTHS
        numbers: dict[str, Any] = {
            **dict(zip(("stride_q_token", "stride_q_head"), q.stride(), strict=False)),
            **dict(zip(("stride_k_slot", "stride_k_token", "stride_k_head"), k.stride(), strict=False)),
            **dict(zip(("stride_v_slot", "stride_v_token", "stride_v_head"), v.stride(), strict=False)),
            **dict(zip(("stride_out_token", "stride_out_head"), out_strides, strict=False)),
            "stride_table": table_width,
            "batch": self._batch,
            "num_slots": num_slots,
            "slot_tokens": slot_tokens,
            "scale": call.scale,
            "window": call.window,
            "softcap": call.softcap,
            "k_scale_step": int(call.k_scale is not None and call.k_scale.numel() > 1),
            "v_scale_step": int(call.v_scale is not None and call.v_scale.numel() > 1),
            "NUM_HEADS": self._num_heads,
            "GROUP": call.group,
            "D": head_dim,
            "D_MAIN": main,
            "D_REST": rest,
            "DV": value_dim,
            "BLOCK_DV": triton.next_power_of_2(value_dim),
            "BLOCK_M": tuning.block_m,
            "BLOCK_N": tuning.block_n,
            "BLOCK_B": max(64, triton.next_power_of_2(self._batch)) if self._is_small else 1,
            "LOG_B": 0 if self._is_small else self._batch.bit_length(),
            "CAUSAL": call.causal,
            "INDEXED": call.batch_idx is not None,
            "WINDOW": call.window > 0,
            "SOFTCAP": call.softcap > 0,
            "ALIBI": call.alibi_slopes is not None,
            "SINKS": call.sinks is not None,
            "K_SCALE": call.k_scale is not None,
            "V_SCALE": call.v_scale is not None,
            "LSE": has_lse,
            "PAGE": page_tokens,
            "TILES": tiles,
            "STAGES": tuning.num_stages,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }
        options = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}
        self._prefill = Launch(prefill_kernel, numbers, num_changing=1, makes_descriptors=tiles, **options)

    def run(
        self, call: AttentionArguments, out: torch.Tensor, lse: torch.Tensor | None, table: torch.Tensor | None = None
    ) -> None:
        """Attend, into `out` [T, Hq, Dv] and `lse` [T, Hq]."""
        if not out.numel():
            return
        if not self._batch:
            out.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
            return
        num_queries, ends = out.shape[0], None
        with device_of(out):
            if not self._is_small and call.cu_seqlens is not None:
                ends = (-(call.cu_seqlens.diff().clamp(min=0) // -self._block_m)).cumsum(0)
            tensors = (
                call.q, call.k, call.v, out, lse, call.cu_seqlens, call.seq_lens, call.batch_idx, ends,
                call.sinks, call.alibi_slopes, call.k_scale, call.v_scale, table,
            )  # fmt: skip
            # How the queries are spread is known on the device only: the most blocks that there can be. Those that
            # there are not are enough for rows of q behind the last request.
            most_blocks = -(-num_queries // self._block_m) + min(self._batch, num_queries)
            self._prefill(most_blocks * self._num_heads, tensors, num_queries)
