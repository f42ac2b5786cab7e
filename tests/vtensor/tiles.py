"""A kernel that reads whole tiles of a cache, as those do that load them with TMA. Imports triton."""

import triton
import triton.language as tl

__all__ = ["sum_of_tiles"]


@triton.jit
def sum_of_tiles(
    view,  # [B, L, H, D], the last dimension contiguous
    sums,  # [B, H, D] of float32, written
    seq_lens,  # [B]
    stride_slot,
    stride_token,
    stride_head,
    tile: tl.constexpr,
    head_dim: tl.constexpr,
):
    """Sum over the tokens of a slot and head, from tiles that are loaded whole and weighted with 1 or 0."""
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = tl.load(seq_lens + slot)
    rows, columns = tl.arange(0, tile), tl.arange(0, head_dim)
    total = tl.zeros((head_dim,), tl.float32)
    for first in range(0, tokens, tile):
        places = (first + rows)[:, None] * stride_token + columns[None, :]
        loaded = tl.load(view + slot * stride_slot + head * stride_head + places).to(tl.float32)
        weights = (first + rows < tokens).to(tl.float32)
        total += tl.sum(loaded * weights[:, None], 0)
    tl.store(sums + (slot * tl.num_programs(1) + head) * head_dim + columns, total)
