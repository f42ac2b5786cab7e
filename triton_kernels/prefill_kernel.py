"""Prefill: attention of many new tokens of each request, over its slot of the cache.

Each program has BLOCK_M queries of one head, and goes through the keys that they see; the last queries of a request,
which see most, come first. Tiles of keys that all of its queries see need no mask:

    keys        0                                     seq_len
    queries     +-----------------------------------+-.
                |                                   |  '-.     the diagonal, and the end: with a mask
                |   no mask                         |     '-.
                +-----------------------------------+--------'
"""

from __future__ import annotations

import triton
import triton.language as tl

from vtensor.triton_kernels.lengths import request_at
from vtensor.triton_kernels.softmax import finish, logits, row_offsets, soften

__all__ = ["prefill_kernel"]


@triton.jit
def _keys(
    acc, m, l, q, q_rest, position, slopes, begin, end, length, origin, k_head, v_head, k_tiles, v_tiles, table,
    stride_k_slot, stride_k_token, stride_v_slot, stride_v_token, scale, window, softcap,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASKED: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go through the keys from `begin` to `end`."""
    dim, dim_rest, dim_v = (
        tl.arange(0, D_MAIN),
        D_MAIN + tl.arange(0, 16 if D_REST == 0 else D_REST),
        tl.arange(0, BLOCK_DV),
    )
    for key0 in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = key0 + tl.arange(0, BLOCK_N)
        is_key = key < length
        if TILES:
            k = k_tiles.load([key0 - origin, 0]).to(q.dtype)
        else:
            k_row = k_head + row_offsets(key, is_key, stride_k_token, stride_k_slot, table, PAGE)
            if MASKED:
                k = tl.load(k_row[:, None] + dim[None, :], mask=is_key[:, None], other=0.0).to(q.dtype)
            else:
                k = tl.load(k_row[:, None] + dim[None, :]).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if D_REST > 0:
            is_rest = is_key[:, None] & (dim_rest < D)[None, :]
            k_rest = tl.load(k_row[:, None] + dim_rest[None, :], mask=is_rest, other=0.0).to(q.dtype)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        found = logits(scores, scale, softcap, slopes, key[None, :] - position[:, None], SOFTCAP, ALIBI)
        if MASKED:
            sees = is_key[None, :]
            if CAUSAL:
                sees &= key[None, :] <= position[:, None]
            if WINDOW:
                sees &= key[None, :] > position[:, None] - window
            found = tl.where(sees, found, float("-inf"))
        weights, m, l, acc = soften(found, m, l, acc)
        if TILES:
            v = v_tiles.load([key0 - origin, 0]).to(q.dtype)
        else:
            v_row = v_head + row_offsets(key, is_key, stride_v_token, stride_v_slot, table, PAGE)
            if MASKED or BLOCK_DV != DV:
                v = tl.load(v_row[:, None] + dim_v[None, :], mask=is_key[:, None] & (dim_v < DV)[None, :], other=0.0)
            else:
                v = tl.load(v_row[:, None] + dim_v[None, :])
            v = v.to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)
    return acc, m, l


@triton.jit
def _clear(
    out_ptr, lse_ptr, first, num_queries, head, stride_token, stride_head,
    NUM_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write what a query has that sees nothing."""
    token = first.to(tl.int64) + tl.arange(0, BLOCK_M)
    is_row = (token >= 0) & (token < num_queries)
    dim = tl.arange(0, BLOCK_DV)
    out_row = out_ptr + token * stride_token + head.to(tl.int64) * stride_head
    zeros = tl.zeros([BLOCK_M, BLOCK_DV], out_ptr.dtype.element_ty)
    tl.store(out_row[:, None] + dim[None, :], zeros, mask=is_row[:, None] & (dim < DV)[None, :])
    if LSE:
        nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
        tl.store(lse_ptr + token * NUM_HEADS + head, nothing, mask=is_row)


@triton.jit(do_not_specialize=["num_queries"])
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    cu_seqlens_ptr, seq_lens_ptr, batch_idx_ptr, ends_ptr, sinks_ptr, slopes_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
    num_queries,
    stride_q_token, stride_q_head, stride_k_slot, stride_k_token, stride_k_head,
    stride_v_slot, stride_v_token, stride_v_head, stride_out_token, stride_out_head, stride_table,
    batch, num_slots, slot_tokens, scale, window, softcap, k_scale_step, v_scale_step,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, LOG_B: tl.constexpr,
    CAUSAL: tl.constexpr, INDEXED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, LSE: tl.constexpr,
    PAGE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend, with a block of queries of one head."""
    program = tl.program_id(0)
    head = program % NUM_HEADS
    if DEPENDENT:  # launched while what comes before ends
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # -- the block of queries: those of a request follow each other, and the last ones of all come first --
    if LOG_B == 0:
        all_b = tl.arange(0, BLOCK_B)
        starts = tl.load(cu_seqlens_ptr + all_b, mask=all_b < batch, other=0)
        counts = tl.load(cu_seqlens_ptr + all_b + 1, mask=all_b < batch, other=0) - starts
        blocks = tl.cdiv(tl.maximum(counts, 0), BLOCK_M)
        ends = tl.cumsum(blocks, 0)
        total = tl.sum(blocks, 0)
    else:
        total = tl.load(ends_ptr + batch - 1).to(tl.int32)
    which = total - 1 - program // NUM_HEADS
    if which < 0:  # none: rows of q that belong to no request
        _clear(
            out_ptr, lse_ptr, tl.load(cu_seqlens_ptr + batch) - (which + 1) * BLOCK_M, num_queries, head,
            stride_out_token, stride_out_head, NUM_HEADS, DV, BLOCK_DV, BLOCK_M, LSE,
        )  # fmt: skip
    else:
        if LOG_B == 0:
            b = tl.sum((ends <= which).to(tl.int32), 0)
            begin_block = tl.sum(tl.where(all_b < b, blocks, 0), 0)
        else:
            b, before = request_at(which, ends_ptr, batch, 1, LOG_B)
            begin_block = before.to(tl.int32)
        start = tl.load(cu_seqlens_ptr + b)
        count = tl.load(cu_seqlens_ptr + b + 1) - start
        length = tl.minimum(tl.maximum(tl.load(seq_lens_ptr + b), 0), slot_tokens)
        slot = b
        if INDEXED:
            slot = tl.load(batch_idx_ptr + b)
            length = tl.where((slot >= 0) & (slot < num_slots), length, 0)
            slot = tl.where(length > 0, slot, 0)
        if PAGE > 0:
            slot *= 0
        kv_head = head // GROUP
        query = (which - begin_block) * BLOCK_M + tl.arange(0, BLOCK_M)
        token = start + query
        is_row = (query < count) & (token >= 0) & (token < num_queries)
        position = length - count + query
        dim, dim_rest, dim_v = (
            tl.arange(0, D_MAIN),
            D_MAIN + tl.arange(0, 16 if D_REST == 0 else D_REST),
            tl.arange(0, BLOCK_DV),
        )
        q_row = q_ptr + token.to(tl.int64) * stride_q_token + head.to(tl.int64) * stride_q_head
        q = tl.load(q_row[:, None] + dim[None, :], mask=is_row[:, None], other=0.0)
        q_rest = q
        if D_REST > 0:
            q_rest = tl.load(
                q_row[:, None] + dim_rest[None, :], mask=is_row[:, None] & (dim_rest < D)[None, :], other=0.0
            )
        slopes = tl.zeros([BLOCK_M, 1], tl.float32)
        if ALIBI:
            slopes += tl.load(slopes_ptr + head)
        if K_SCALE:
            scale *= tl.load(k_scale_ptr + kv_head * k_scale_step)
        k_head = k_ptr + slot.to(tl.int64) * stride_k_slot + kv_head.to(tl.int64) * stride_k_head
        v_head = v_ptr + slot.to(tl.int64) * stride_v_slot + kv_head.to(tl.int64) * stride_v_head
        table = table_ptr
        if PAGE > 0:
            table += b.to(tl.int64) * stride_table
        # -- its keys: from `begin`; up to `first_clear` and from `last_clear` on with a mask; to `end` --
        first_position = length - count + (which - begin_block) * BLOCK_M
        last_position = tl.minimum(first_position + BLOCK_M, length) - 1
        begin, end, last_clear = first_position * 0, length, length
        if CAUSAL:
            end = tl.maximum(last_position + 1, 0)
            last_clear = tl.maximum(tl.minimum(first_position + 1, length), 0)
        if WINDOW:  # what lies before it may have no memory
            begin = tl.minimum(tl.maximum(first_position - window + 1, 0), end)
        first_clear = begin
        if WINDOW:
            hidden = tl.maximum(tl.minimum(last_position - window + 1, end) - begin, 0)  # from the last of the queries
            first_clear += tl.cdiv(hidden, BLOCK_N) * BLOCK_N
        last_clear = first_clear + tl.maximum(last_clear - first_clear, 0) // BLOCK_N * BLOCK_N
        k_tiles, v_tiles = 0, 0
        if TILES:
            # From the first key on, to the last: what is behind it is not fetched. But for each row out of a tensor the
            # tensor memory accelerator looks up the tensor's first address: there must be memory.
            k_first, v_first = (
                k_head + begin.to(tl.int64) * stride_k_token,
                v_head + begin.to(tl.int64) * stride_v_token,
            )
            k_tiles = tl.make_tensor_descriptor(k_first, [length - begin, D], [stride_k_token, 1], [BLOCK_N, D_MAIN])
            v_tiles = tl.make_tensor_descriptor(v_first, [length - begin, DV], [stride_v_token, 1], [BLOCK_N, BLOCK_DV])
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if WINDOW:
            acc, m, l = _keys(
                acc, m, l, q, q_rest, position, slopes, begin, tl.minimum(first_clear, end), length, begin,
                k_head, v_head, k_tiles, v_tiles, table, stride_k_slot, stride_k_token, stride_v_slot, stride_v_token,
                scale, window, softcap,
                D, D_MAIN, D_REST, DV, BLOCK_DV, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, ALIBI, True, PAGE, TILES, STAGES,
                PRECISION,
            )  # fmt: skip
        acc, m, l = _keys(
            acc, m, l, q, q_rest, position, slopes, first_clear, last_clear, length, begin,
            k_head, v_head, k_tiles, v_tiles, table, stride_k_slot, stride_k_token, stride_v_slot, stride_v_token,
            scale, window, softcap,
            D, D_MAIN, D_REST, DV, BLOCK_DV, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, ALIBI, False, PAGE, TILES, STAGES,
            PRECISION,
        )  # fmt: skip
        acc, m, l = _keys(
            acc, m, l, q, q_rest, position, slopes, last_clear, end, length, begin,
            k_head, v_head, k_tiles, v_tiles, table, stride_k_slot, stride_k_token, stride_v_slot, stride_v_token,
            scale, window, softcap,
            D, D_MAIN, D_REST, DV, BLOCK_DV, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, ALIBI, True, PAGE, TILES, STAGES,
            PRECISION,
        )  # fmt: skip
        if V_SCALE:
            acc *= tl.load(v_scale_ptr + kv_head * v_scale_step)
        sinks = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            sinks += tl.load(sinks_ptr + head).to(tl.float32)
        out, lse = finish(acc, m, l, sinks, SINKS)
        out_row = out_ptr + token.to(tl.int64) * stride_out_token + head.to(tl.int64) * stride_out_head
        tl.store(out_row[:, None] + dim_v[None, :], out, mask=is_row[:, None] & (dim_v < DV)[None, :])
        if LSE:
            tl.store(lse_ptr + token.to(tl.int64) * NUM_HEADS + head, lse, mask=is_row)
