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
)
from vtensor.triton_kernels.lengths import MOST_LENGTHS
from vtensor.triton_kernels.shapes import shared_numbers
from vtensor.triton_kernels.tuning import DecodeTuning, decode_tuning
from vtensor.triton_kernels.workspace import counters, scratch

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
        shared = shared_numbers(call, has_lse=has_lse, page_tokens=page_tokens, table_width=table_width)
        self._batch, num_queries, _, head_dim = q.shape
        num_kv_heads, value_dim = v.shape[2:]
        most_rows = 16 if q.element_size() * head_dim > 2048 else 64  # of float32 latents more do not fit
        block_m = max(16, min(most_rows, triton.next_power_of_2(num_queries * call.group)))
        block_dv = shared["BLOCK_DV"]
        is_latent = v.data_ptr() == k.data_ptr() and v.stride()[:3] == k.stride()[:3] and value_dim == shared["D_MAIN"]
        width = head_dim if is_latent else head_dim + value_dim
        items = num_kv_heads * -(-num_queries * call.group // block_m)
        multiprocessors = num_multiprocessors(q.device)
        head_bytes = width * max(k.element_size(), 2)
        tuning = tuning or decode_tuning(block_m, head_bytes, self._batch * items / multiprocessors)
        if num_programs is None:
            num_programs = multiprocessors * tuning.programs
        self._num_programs = num_programs
        dependent = has_dependent_launch(q.device)
        apart = tuning.merges_apart and dependent and shared["LOG_B"] == 0
        lanes = _lanes(items, num_programs)
        self._num_counters = self._batch * items
        self._num_parts = 2 * num_programs * block_m
        self._block_dv = block_dv
        merged = max(tuning.merged, 1) * 32 * tuning.num_warps  # elements at a time
        merged_rows = min(triton.next_power_of_2(min(block_m, num_queries * call.group)), max(1, merged // block_dv))
        numbers: dict[str, Any] = {
            **shared,
            "num_part_elements": self._num_parts * block_dv,
            **dict(zip(("stride_q_request", "stride_q_token", "stride_q_head"), q.stride(), strict=False)),
            **dict(zip(("stride_out_request", "stride_out_token", "stride_out_head"), out_strides, strict=False)),
            "NUM_QUERIES": num_queries,
            "NUM_KV_HEADS": num_kv_heads,
            "BLOCK_M": block_m,
            "BLOCK_N": tuning.block_n,
            "LANES": lanes,
            "MERGED_ROWS": merged_rows,
            "MERGED_PARTS": max(1, merged // (merged_rows * block_dv)),
            "V_IS_K": is_latent,
            "STAGES": tuning.num_stages,
            "APART": apart,
            "DEPENDENT": dependent,
        }
        options: dict[str, Any] = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}
        options |= {"launch_pdl": dependent, "enable_fp_fusion": True}
        self._decode = Launch(decode_kernel, numbers, **options)
        self._merge = self._add_up = None
        if apart:
            columns = num_programs // lanes
            parts = min(triton.next_power_of_2(columns), max(1, 8192 // block_dv))
            sizes = {name: numbers[name] for name in merge_kernel.arg_names[6:] if name in numbers}
            sizes |= {"num_columns": columns, "PARTS": parts}
            self._merge = Launch(merge_kernel, sizes, num_warps=4, launch_pdl=True, enable_fp_fusion=True)
            self._num_merges = self._batch * items * block_m
        if shared["LOG_B"] > 0:
            needed = ("batch", "num_slots", "slot_tokens", "window", "BLOCK_N", "WINDOW", "INDEXED")
            sizes = {name: numbers[name] for name in needed}
            self._add_up = Launch(add_up_kernel, {**sizes, "num_queries": num_queries, "BLOCK": MOST_LENGTHS})

    def run(
        self, call: AttentionArguments, out: torch.Tensor, lse: torch.Tensor | None, table: torch.Tensor | None = None
    ) -> None:
        """Attend, into `out` [B, Sq, Hq, Dv] and `lse` [B, Sq, Hq]."""
        device, ends = out.device, None
        if not out.numel():
            return
        with device_of(out):
            number = self._num_parts * (self._block_dv + 2)
            if self._merge is None:
                parts = scratch(device, number, "parts")
            else:  # for both launches, between which other threads may launch
                parts = torch.empty(number, dtype=torch.float32, device=device)
            if self._add_up is not None:
                ends = torch.empty(self._batch, dtype=torch.int64, device=device)
                self._add_up(1, (ends, call.seq_lens, call.batch_idx))
            zeros = None if self._merge is not None else counters(device, self._num_counters)
            tensors = (
                call.q, call.k, call.v, out, lse, parts, zeros,
                call.seq_lens, call.batch_idx, ends, call.sinks, call.alibi_slopes, call.k_scale, call.v_scale, table,
            )  # fmt: skip
            self._decode(self._num_programs, tensors)
            if self._merge is not None:
                self._merge(self._num_merges, (out, lse, call.sinks, parts, call.seq_lens, call.batch_idx))
