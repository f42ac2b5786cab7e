"""How the prefill kernel is cut for a shape, and launched."""

from __future__ import annotations

from typing import Any

import torch

from vtensor.triton_kernels.arguments import AttentionArguments
from vtensor.triton_kernels.hopper import HopperPlan
from vtensor.triton_kernels.launch import Launch, device_of, has_dependent_launch, suits_descriptors
from vtensor.triton_kernels.prefill_kernel import prefill_kernel
from vtensor.triton_kernels.shapes import shared_numbers
from vtensor.triton_kernels.tuning import PrefillTuning, prefill_tuning

__all__ = ["PrefillPlan"]

_HOPPER_QUERIES = 65
"""Queries of a request, in the mean, from which on the kernel for Hopper is used: more than a tile of the other has."""


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
        shared = shared_numbers(call, has_lse=has_lse, page_tokens=page_tokens, table_width=table_width)
        self._is_small = shared["LOG_B"] == 0
        suits = tuning is None and not page_tokens and HopperPlan.suits(call)
        self._hopper = HopperPlan(call, has_lse=has_lse, out_strides=out_strides) if suits else None
        tuning = tuning or prefill_tuning(head_dim, v.shape[3], q.element_size())
        self._block_m = tuning.block_m
        tiles = tuning.descriptors and not page_tokens and shared["D_REST"] == 0 and suits_descriptors(k, v)
        numbers: dict[str, Any] = {
            **shared,
            **dict(zip(("stride_q_token", "stride_q_head"), q.stride(), strict=False)),
            **dict(zip(("stride_out_token", "stride_out_head"), out_strides, strict=False)),
            "NUM_HEADS": self._num_heads,
            "BLOCK_M": tuning.block_m,
            "BLOCK_N": tuning.block_n,
            "CAUSAL": call.causal,
            "TILES": tiles,
            "STAGES": tuning.num_stages,
            "DEPENDENT": has_dependent_launch(q.device),
        }
        options = {
            "num_warps": tuning.num_warps,
            "num_stages": tuning.num_stages,
            "launch_pdl": numbers["DEPENDENT"],
            "enable_fp_fusion": True,
        }
        self._prefill = Launch(prefill_kernel, numbers, **options)

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
            if self._hopper is not None and num_queries >= _HOPPER_QUERIES * self._batch:
                if self._hopper.run(call, out, lse):
                    return
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
