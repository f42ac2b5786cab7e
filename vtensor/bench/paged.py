"""Paged twin: the very kernels of decode and prefill, reading through a block table.

What paging costs is measured with all else equal, and so is what it does not: for measurements and tests only.

    table [B, width]            pages [pages, page_tokens, Hkv, D]
    request 0:  | 5 | 2 | . |   token t of request b is row t % page_tokens of page table[b, t // page_tokens]
    request 1:  | 0 | 7 | 1 |

Entries behind a request's last token are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vtensor.triton_kernels.arguments import AttentionArguments, check_attention, check_tensor
from vtensor.triton_kernels.decode import DecodePlan
from vtensor.triton_kernels.launch import is_interpreted
from vtensor.triton_kernels.prefill import PrefillPlan
from vtensor.triton_kernels.reference import attend
from vtensor.triton_kernels.tuning import DecodeTuning, PrefillTuning

__all__ = ["PagedCache", "paged_decode", "paged_prefill"]

_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class PagedCache:
    """Keys and values in pages, and where the pages of each request are.

    Attributes
    ----------
    k, v : Tensor
        [pages, page_tokens, Hkv, D] and [pages, page_tokens, Hkv, Dv].
    table : Tensor
        [B, width] int32, on their device.

    Raises
    ------
    ValueError
        A table that is none, k and v that differ, no page, or pages of no power of 2 tokens.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor

    def __post_init__(self) -> None:
        check_tensor("table", self.table, device=self.k.device, dtype=torch.int32, shape=("B", "width"))
        if not len(self.k):
            raise ValueError("k has 0 pages: it must have at least 1")
        if self.v.shape[:3] != self.k.shape[:3]:
            raise ValueError(
                f"v has shape {list(self.v.shape)} and k has {list(self.k.shape)}: all but D must be equal"
            )
        if self.page_tokens < 1 or self.page_tokens & (self.page_tokens - 1):
            raise ValueError(f"k has pages of {self.page_tokens} tokens: they must be of a power of 2")

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.k.shape[1]

    def contiguous(self, requests: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of what some requests hold, [requests, width * page_tokens, Hkv, D]: a slot for each."""
        table = self.table[requests].long().clamp(0, len(self.k) - 1)  # behind the last token there may be anything
        k, v = (pages[table].flatten(1, 2) for pages in (self.k, self.v))
        return k, v


def paged_decode(
    q: torch.Tensor,
    cache: PagedCache,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    *,
    return_lse: bool = False,
    tuning: DecodeTuning | None = None,
    **options: Any,
) -> _Result:
    """`decode_attention` over pages.

    Parameters
    ----------
    q : Tensor
        [B, Hq, D] or [B, Sq, Hq, D].
    cache : PagedCache
    seq_lens : Tensor
        [B] int32: at most width * page_tokens, or they are cut to that.
    batch_idx : Tensor, optional
        [B] int32: -1 for padding, else the request's own number; the table says where it is.
    return_lse : bool
    tuning : DecodeTuning, optional
        Instead of what is chosen for the shape.
    **options
        Those of `decode_attention`.

    Returns
    -------
    Tensor, or Tensor, Tensor
        As `decode_attention`.

    Raises
    ------
    ValueError
        An argument that does not fit.
    """
    return _attend(q, cache, seq_lens, batch_idx, None, return_lse, tuning, options)


def paged_prefill(
    q: torch.Tensor,
    cache: PagedCache,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    *,
    return_lse: bool = False,
    tuning: PrefillTuning | None = None,
    **options: Any,
) -> _Result:
    """`prefill_attention` over pages; see `paged_decode`.

    Parameters
    ----------
    q : Tensor
        [T, Hq, D].
    cu_seqlens : Tensor
        [B + 1] int32.

    Raises
    ------
    ValueError
        An argument that does not fit.
    """
    return _attend(q, cache, seq_lens, batch_idx, cu_seqlens, return_lse, tuning, options)


def _attend(
    q: torch.Tensor,
    cache: PagedCache,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    return_lse: bool,
    tuning: Any,
    options: dict[str, Any],
) -> _Result:
    batch, width = cache.table.shape
    k, v = (x[:1, :1].expand(batch, width * cache.page_tokens, -1, -1) for x in (cache.k, cache.v))  # as slots
    call = check_attention(q, k, v, seq_lens, batch_idx, cu_seqlens, **options)
    check_tensor("table", cache.table, device=q.device, dtype=torch.int32, shape=(call.batch_size, "width"))
    call = _with(call, cache.k, cache.v, batch_idx)
    shape = call.q.shape[:-1]
    out = q.new_empty(*shape, cache.v.shape[3])
    lse = torch.empty(shape, dtype=torch.float32, device=q.device) if return_lse else None
    if q.device.type == "cpu" and (not is_interpreted() or torch.bfloat16 in (q.dtype, cache.k.dtype)):
        own = torch.arange(batch, dtype=torch.int32)
        slots = own if batch_idx is None else torch.where(batch_idx >= 0, own, -1)
        found, sums = attend(_with(call, *cache.contiguous(), slots))
        out.copy_(found)
        if lse is not None:
            lse.copy_(sums)
    else:
        kind: Any = DecodePlan if cu_seqlens is None else PrefillPlan
        plan = kind(
            call,
            has_lse=return_lse,
            out_strides=out.stride(),
            tuning=tuning,
            page_tokens=cache.page_tokens,
            table_width=width,
        )
        plan.run(call, out, lse, cache.table)
    out = out.view(*q.shape[:-1], out.shape[-1])
    return out if lse is None else (out, lse.view(q.shape[:-1]))


def _with(
    call: AttentionArguments, k: torch.Tensor, v: torch.Tensor, batch_idx: torch.Tensor | None
) -> AttentionArguments:
    return AttentionArguments(
        call.q, k, v, call.seq_lens, batch_idx, call.cu_seqlens, call.causal, call.scale, call.window, call.softcap,
        call.sinks, call.alibi_slopes, call.k_scale, call.v_scale,
    )  # fmt: skip
