"""How the decode kernel is cut for a shape, and launched."""

from __future__ import annotations

from typing import Any

import torch
import triton

from vtensor.triton_kernels.arguments import AttentionArguments
from vtensor.triton_kernels.decode_kernel import add_up_kernel, decode_kernel, merge_kernel
from vtensor.triton_kernels.launch import (
    Launch,
    device_of,
    has_dependent_launch,
    num_multiprocessors,
    split_width,
)
from vtensor.triton_kernels.lengths import MOST_LENGTHS
from vtensor.triton_kernels.tuning import DecodeTuning, decode_tuning
from vtensor.triton_kernels.workspace import counters

__all__ = ["DecodePlan"]


def _lanes(items: int, num_programs: int) -> int:
    """Items of a request that are worked on side by side: as many as leave less than 1 in 32 programs idle."""
    fitting = (n for n in range(min(items, num_programs), 0, -1) if items % n == 0)
    return next((n for n in fitting if num_programs % n * 32 <= num_programs), 1)


class DecodePlan:
    """How queries [B, Sq, Hq, D] of a shape attend to a cache of a shape, the keys split among programs.

    Parameters
    ----------
    call
        Any call of that kind; of its tensors all but what is in them counts.
    has_lse
        Whether log-sum-exp values are wanted.
    tuning, num_programs
        Instead of what is chosen for the shape and the device.
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
        tuning: DecodeTuning | None = None,
        num_programs: int | None = None,
        page_tokens: int = 0,
        table_width: int = 0,
    ) -> None:
        q, k, v = call.q, call.k, call.v
        self._batch, num_queries, _, head_dim = q.shape
        num_slots, slot_tokens, num_kv_heads, value_dim = v.shape
        if page_tokens:
            num_slots, slot_tokens = self._batch, table_width * page_tokens
        most_rows = 16 if q.element_size() * head_dim > 2048 else 64  # of float32 latents more do not fit
        block_m = max(16, min(most_rows, triton.next_power_of_2(num_queries * call.group)))
        main, rest = split_width(head_dim)
        block_dv = triton.next_power_of_2(value_dim)
        is_latent = v.data_ptr() == k.data_ptr() and v.stride()[:3] == k.stride()[:3] and value_dim == main
        width = head_dim if is_latent else head_dim + value_dim
        items = num_kv_heads * -(-num_queries * call.group // block_m)
        multiprocessors = num_multiprocessors(q.device)
        head_bytes = width * max(k.element_size(), 2)
        tuning = tuning or decode_tuning(block_m, head_bytes, self._batch * items / multiprocessors)
        if num_programs is None:
            num_programs = multiprocessors * tuning.programs
        self._num_programs = num_programs
        apart = tuning.merges_apart and has_dependent_launch(q.device) and self._batch <= MOST_LENGTHS
        lanes = _lanes(items, num_programs)
        self._num_counters = self._batch * items
        self._num_parts = 2 * num_programs * block_m
        self._block_dv = block_dv
        merged = max(tuning.merged, 1) * 32 * tuning.num_warps  # elements at a time
        merged_rows = min(triton.next_power_of_2(min(block_m, num_queries * call.group)), max(1, merged // block_dv))
        is_small = self._batch <= MOST_LENGTHS
        numbers: dict[str, Any] = {
            **dict(zip(("stride_q_request", "stride_q_token", "stride_q_head"), q.stride(), strict=False)),
            **dict(zip(("stride_k_slot", "stride_k_token", "stride_k_head"), k.stride(), strict=False)),
            **dict(zip(("stride_v_slot", "stride_v_token", "stride_v_head"), v.stride(), strict=False)),
            **dict(zip(("stride_out_request", "stride_out_token", "stride_out_head"), out_strides, strict=False)),
            "stride_table": table_width,
            "batch": self._batch,
            "num_slots": num_slots,
            "slot_tokens": slot_tokens,
            "scale": call.scale,
            "window": call.window,
            "softcap": call.softcap,
            "k_scale_step": int(call.k_scale is not None and call.k_scale.numel() > 1),
            "v_scale_step": int(call.v_scale is not None and call.v_scale.numel() > 1),
            "NUM_QUERIES": num_queries,
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": call.group,
            "D": head_dim,
            "D_MAIN": main,
            "D_REST": rest,
            "DV": value_dim,
            "BLOCK_DV": block_dv,
            "BLOCK_M": block_m,
            "BLOCK_N": tuning.block_n,
            "BLOCK_B": max(64, triton.next_power_of_2(self._batch)) if is_small else 1,
            "LOG_B": 0 if is_small else self._batch.bit_length(),
            "LANES": lanes,
            "MERGED_ROWS": merged_rows,
            "MERGED_PARTS": max(1, merged // (merged_rows * block_dv)),
            "INDEXED": call.batch_idx is not None,
            "WINDOW": call.window > 0,
            "SOFTCAP": call.softcap > 0,
            "ALIBI": call.alibi_slopes is not None,
            "SINKS": call.sinks is not None,
            "K_SCALE": call.k_scale is not None,
            "V_SCALE": call.v_scale is not None,
            "V_IS_K": is_latent,
            "LSE": has_lse,
            "PAGE": page_tokens,
            "STAGES": tuning.num_stages,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
            "APART": apart,
        }
        options: dict[str, Any] = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}
        self._decode = Launch(decode_kernel, numbers, **options)
        self._merge = self._add_up = None
        if apart:
            columns = num_programs // lanes
            parts = min(triton.next_power_of_2(columns), max(1, 8192 // block_dv))
            sizes = {name: numbers[name] for name in merge_kernel.arg_names[7:] if name in numbers}
            sizes |= {"num_columns": columns, "PARTS": parts}
            self._merge = Launch(merge_kernel, sizes, num_warps=4, launch_pdl=True)
            self._num_merges = self._batch * items * block_m
        if not is_small:
            shared = ("batch", "num_slots", "slot_tokens", "window", "BLOCK_N", "WINDOW", "INDEXED")
            sizes = {name: numbers[name] for name in shared}
            self._add_up = Launch(add_up_kernel, {**sizes, "num_queries": num_queries, "BLOCK": MOST_LENGTHS})

    def run(
        self, call: AttentionArguments, out: torch.Tensor, lse: torch.Tensor | None, table: torch.Tensor | None = None
    ) -> None:
        """Attend, into `out` [B, Sq, Hq, Dv] and `lse` [B, Sq, Hq]."""
        device, ends = out.device, None
        if not out.numel():
            return
        parts = torch.empty(self._num_parts * (self._block_dv + 2), dtype=torch.float32, device=device)
        sums = parts[self._num_parts * self._block_dv :]
        with device_of(out):
            if self._add_up is not None:
                ends = torch.empty(self._batch, dtype=torch.int64, device=device)
                self._add_up(1, (ends, call.seq_lens, call.batch_idx))
            zeros = None if self._merge is not None else counters(device, self._num_counters)
            tensors = (
                call.q, call.k, call.v, out, lse, parts, sums, zeros,
                call.seq_lens, call.batch_idx, ends, call.sinks, call.alibi_slopes, call.k_scale, call.v_scale, table,
            )  # fmt: skip
            self._decode(self._num_programs, tensors)
            if self._merge is not None:
                self._merge(self._num_merges, (out, lse, call.sinks, parts, sums, call.seq_lens, call.batch_idx))
