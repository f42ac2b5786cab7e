"""Decode: attention of a few new tokens of each request, over its slot of the cache.

The work is cut into tiles of BLOCK_N keys, of every KV head of every request, one after another:

    request 0, head 0      head 1                 request 1, head 0    head 1
    | t | t | t | t | t |  | t | t | t | t | t |  | t | t |            | t | t |
    '--- program 0 ---'    '--- program 1 ---'       '- program 2 -'

As many programs as the GPU holds at once take equal parts of it, wherever those begin and end, so one long request is
as well spread as many short ones. Each program finds its part from the lengths on the device: a CUDA graph captured
once stays right, and balanced, whatever the lengths are when it is replayed. An item (the tiles of one head) that lies
within one program is done; of others each program leaves a part, and whoever comes last merges those, in the order of
programs. Few items have many parts: a second kernel then merges those side by side, instead of one program after the
last.

Programs of one column have the same tiles of different heads, which lie beside each other in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vtensor.triton_kernels.lengths import request_at
from vtensor.triton_kernels.softmax import finish, logits, row_offsets, soften

__all__ = ["add_up_kernel", "decode_kernel", "merge_kernel"]


@triton.jit
def _bounds(lens, num_queries, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """First key that is seen, and number of tiles from there on, of requests of so many tokens."""
    first = tl.zeros_like(lens)
    if WINDOW:  # what lies before it may have no memory
        first = tl.maximum(lens - num_queries - window + 1, 0)
    return first, tl.cdiv(lens - first, BLOCK_N)


@triton.jit
def _num_shares(counts, total, num_columns, TURNS: tl.constexpr):
    """Among how many columns `total` tiles are divided, of which requests have `counts` * TURNS.

    Where requests are few and equally long: so many that each column gets whole items, or equal parts of one, as long
    as that leaves at most 1 in 32 columns idle.
    """
    share = tl.maximum(tl.minimum(total, num_columns), 1)  # columns that have a tile at least
    items = tl.sum((counts > 0).to(tl.int32), 0) * TURNS
    is_one = items <= num_columns
    even = tl.where(is_one, num_columns // tl.maximum(items, 1) * items, items // 2)  # or two items each
    is_even = (even * 32 >= num_columns * 31) & (even <= share) & (is_one | (items % 2 == 0))
    is_even &= tl.max(counts, 0) * items == total
    return tl.where(is_even, even, share)


@triton.jit
def _request_lens(seq_lens_ptr, batch_idx_ptr, b, valid, num_slots, slot_tokens, INDEXED: tl.constexpr):
    """Lengths of requests; 0 where there is nothing to do."""
    lens = tl.load(seq_lens_ptr + b, mask=valid, other=0)
    lens = tl.minimum(tl.maximum(lens, 0), slot_tokens)
    if INDEXED:
        slots = tl.load(batch_idx_ptr + b, mask=valid, other=-1)
        lens = tl.where((slots >= 0) & (slots < num_slots), lens, 0)
    return lens


@triton.jit
def add_up_kernel(
    ends_ptr, seq_lens_ptr, batch_idx_ptr, batch, num_slots, slot_tokens, num_queries, window,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, INDEXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the tiles of each request end, in the order of requests."""
    total = tl.zeros([], tl.int64)
    for begin in range(0, batch, BLOCK):
        b = begin + tl.arange(0, BLOCK)
        lens = _request_lens(seq_lens_ptr, batch_idx_ptr, b, b < batch, num_slots, slot_tokens, INDEXED)
        _, count = _bounds(lens, num_queries, window, BLOCK_N, WINDOW)
        count = count.to(tl.int64)
        tl.store(ends_ptr + b, total + tl.cumsum(count, 0), mask=b < batch)
        total += tl.sum(count, 0)


@triton.jit
def _write(
    out_ptr, lse_ptr, sinks_ptr, acc, m, l, b, r, head, is_row, stride_request, stride_token, stride_head,
    NUM_QUERIES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write rows of an item that are complete: row r is query r // GROUP, head r % GROUP of the group."""
    query, q_head = r // GROUP, head * GROUP + r % GROUP
    sinks = tl.zeros_like(m)
    if SINKS:
        sinks = tl.load(sinks_ptr + q_head, mask=is_row, other=0.0).to(tl.float32)
    out, lse = finish(acc, m, l, sinks, SINKS)
    dim = tl.arange(0, BLOCK_DV)
    out_row = out_ptr + b.to(tl.int64) * stride_request
    out_row += query.to(tl.int64) * stride_token + q_head.to(tl.int64) * stride_head
    tl.store(out_row[:, None] + dim[None, :], out, mask=is_row[:, None] & (dim < DV)[None, :])
    if LSE:
        at = (b.to(tl.int64) * NUM_QUERIES + query) * (NUM_KV_HEADS * GROUP) + q_head
        tl.store(lse_ptr + at, lse, mask=is_row)


@triton.jit
def _merge(
    out_ptr, lse_ptr, sinks_ptr, part_ptr, part_sums_ptr, first, last, lane, b, head, block, first_row,
    stride_request, stride_token, stride_head,
    NUM_QUERIES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Put together some rows of an item, of which columns `first` to `last` left a part each; `PARTS` at a time."""
    dim = tl.arange(0, BLOCK_DV)
    row = first_row + tl.arange(0, ROWS)
    r = block * BLOCK_M + row
    is_row = r < NUM_QUERIES * GROUP
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for begin in range(first, last + 1, PARTS):
        column = begin + tl.arange(0, PARTS)
        is_part = (column <= last)[:, None] & is_row[None, :]
        part = ((column * LANES + lane) * 2 + (column == first).to(tl.int32)).to(tl.int64)
        # Past the first-level cache, which does not see what other multiprocessors write.
        sums = part_sums_ptr + part[:, None] * 2 * BLOCK_M + row[None, :]
        part_m = tl.load(sums, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        part_l = tl.load(sums + BLOCK_M, mask=is_part, other=0.0, cache_modifier=".cg")
        at = part_ptr + ((part[:, None] * BLOCK_M + row[None, :]) * BLOCK_DV)[:, :, None] + dim[None, None, :]
        part_acc = tl.load(at, mask=is_part[:, :, None], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(part_m, 0))
        m_used = tl.where(m_new == float("-inf"), 0.0, m_new)
        factor = tl.exp2(part_m - m_used[None, :])
        alpha = tl.exp2(m - m_used)
        l = l * alpha + tl.sum(part_l * factor, 0)
        acc = acc * alpha[:, None] + tl.sum(part_acc * factor[:, :, None], 0)
        m = m_new
    _write(
        out_ptr, lse_ptr, sinks_ptr, acc, m, l, b, r, head, is_row, stride_request, stride_token, stride_head,
        NUM_QUERIES, NUM_KV_HEADS, GROUP, DV, BLOCK_DV, SINKS, LSE,
    )  # fmt: skip


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, counters_ptr,
    seq_lens_ptr, batch_idx_ptr, ends_ptr, sinks_ptr, slopes_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
    stride_q_request, stride_q_token, stride_q_head,
    stride_k_slot, stride_k_token, stride_k_head, stride_v_slot, stride_v_token, stride_v_head,
    stride_out_request, stride_out_token, stride_out_head, stride_table, num_part_elements,
    batch, num_slots, slot_tokens, scale, window, softcap, k_scale_step, v_scale_step,
    NUM_QUERIES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, LOG_B: tl.constexpr, LANES: tl.constexpr,
    MERGED_ROWS: tl.constexpr, MERGED_PARTS: tl.constexpr,
    INDEXED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, V_IS_K: tl.constexpr, LSE: tl.constexpr,
    PAGE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, APART: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend, with this program's part of all tiles."""
    program = tl.program_id(0)
    part_sums_ptr = part_ptr + num_part_elements
    column, lane = program // LANES, program % LANES
    ROWS: tl.constexpr = NUM_QUERIES * GROUP
    NUM_M: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    ITEMS: tl.constexpr = NUM_KV_HEADS * NUM_M  # of a request
    TURNS: tl.constexpr = ITEMS // LANES
    row = tl.arange(0, BLOCK_M)
    dim, dim_v = tl.arange(0, D_MAIN), tl.arange(0, BLOCK_DV)
    dim_rest = D_MAIN + tl.arange(0, 16 if D_REST == 0 else D_REST)
    if DEPENDENT:  # launched while what comes before ends; even the lengths may be of its making
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # -- the tiles of this program --
    all_b = tl.arange(0, BLOCK_B)
    if LOG_B == 0:
        all_lens = _request_lens(seq_lens_ptr, batch_idx_ptr, all_b, all_b < batch, num_slots, slot_tokens, INDEXED)
        _, counts = _bounds(all_lens, NUM_QUERIES, window, BLOCK_N, WINDOW)
        counts = counts.to(tl.int64)
        total = tl.sum(counts, 0) * TURNS
        share = _num_shares(counts, total, tl.num_programs(0) // LANES, TURNS)
        counts *= TURNS
        ends = tl.cumsum(counts, 0)
    else:
        total = tl.load(ends_ptr + batch - 1) * TURNS
        share = tl.maximum(tl.minimum(total, tl.num_programs(0) // LANES), 1)
    tile, last_tile = total * column // share, tl.minimum(total * (column + 1) // share, total)
    while tile < last_tile:
        # -- the item in which the tile lies: request b, head and block of rows --
        if LOG_B == 0:
            b = tl.sum((ends <= tile).to(tl.int32), 0)
            begin = tl.sum(tl.where(all_b < b, counts, 0), 0)
        else:
            b, begin = request_at(tile, ends_ptr, batch, TURNS, LOG_B)
        length = _request_lens(seq_lens_ptr, batch_idx_ptr, b, True, num_slots, slot_tokens, INDEXED)
        first_key, count = _bounds(length, NUM_QUERIES, window, BLOCK_N, WINDOW)
        within = (tile - begin).to(tl.int32)  # a request has less than 2^31 tiles
        turn, skipped = within // count, within % count
        here = tl.minimum(count - skipped, last_tile - tile).to(tl.int32)
        item = turn * LANES + lane
        head, block = item // NUM_M, item % NUM_M
        slot = b
        if INDEXED:
            slot = tl.load(batch_idx_ptr + b)
        if PAGE > 0:
            slot *= 0
        # -- its queries --
        r = block * BLOCK_M + row
        query, q_head = r // GROUP, head * GROUP + r % GROUP
        is_row = r < ROWS
        position = length - NUM_QUERIES + query
        q_row = q_ptr + b.to(tl.int64) * stride_q_request
        q_row += query.to(tl.int64) * stride_q_token + q_head.to(tl.int64) * stride_q_head
        q = tl.load(q_row[:, None] + dim[None, :], mask=is_row[:, None], other=0.0)
        if D_REST > 0:
            q_rest = tl.load(
                q_row[:, None] + dim_rest[None, :], mask=is_row[:, None] & (dim_rest < D)[None, :], other=0.0
            )
        slopes = tl.zeros([BLOCK_M, 1], tl.float32)
        if ALIBI:
            slopes = tl.load(slopes_ptr + q_head, mask=is_row, other=0.0)[:, None]
        scale_here = scale
        if K_SCALE:
            scale_here = scale * tl.load(k_scale_ptr + head * k_scale_step)
        # -- its keys and values --
        k_head = k_ptr + slot.to(tl.int64) * stride_k_slot + head.to(tl.int64) * stride_k_head
        v_head = v_ptr + slot.to(tl.int64) * stride_v_slot + head.to(tl.int64) * stride_v_head
        table = table_ptr
        if PAGE > 0:
            table += b.to(tl.int64) * stride_table
        begin_key = first_key + skipped * BLOCK_N
        end_key = tl.minimum(begin_key + here * BLOCK_N, length)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        for key0 in tl.range(begin_key, end_key, BLOCK_N, num_stages=STAGES):
            key = key0 + tl.arange(0, BLOCK_N)
            is_key = key < length
            k_row = k_head + row_offsets(key, is_key, stride_k_token, stride_k_slot, table, PAGE)
            k = tl.load(k_row[:, None] + dim[None, :], mask=is_key[:, None], other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if D_REST > 0:
                is_rest = is_key[:, None] & (dim_rest < D)[None, :]
                k_rest = tl.load(k_row[:, None] + dim_rest[None, :], mask=is_rest, other=0.0).to(q.dtype)
                scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
            found = logits(scores, scale_here, softcap, slopes, key[None, :] - position[:, None], SOFTCAP, ALIBI)
            sees = is_key[None, :] & (key[None, :] <= position[:, None])
            if WINDOW:
                sees &= key[None, :] > position[:, None] - window
            found = tl.where(sees, found, float("-inf"))
            weights, m, l, acc = soften(found, m, l, acc)
            if V_IS_K:
                v = k
            else:
                v_row = v_head + row_offsets(key, is_key, stride_v_token, stride_v_slot, table, PAGE)
                is_value = is_key[:, None]
                if BLOCK_DV != DV:
                    is_value &= (dim_v < DV)[None, :]
                v = tl.load(v_row[:, None] + dim_v[None, :], mask=is_value, other=0.0).to(q.dtype)
            acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)
        if V_SCALE:
            acc *= tl.load(v_scale_ptr + head * v_scale_step)
        if here == count:
            _write(
                out_ptr, lse_ptr, sinks_ptr, acc, m, l, b, r, head, is_row,
                stride_out_request, stride_out_token, stride_out_head,
                NUM_QUERIES, NUM_KV_HEADS, GROUP, DV, BLOCK_DV, SINKS, LSE,
            )  # fmt: skip
        else:
            # A program leaves at most two parts: of the item in which it begins, and of the one in which it ends.
            part = program * 2
            if skipped == 0:
                part += 1
            part_row = part_ptr + (part.to(tl.int64) * BLOCK_M + row) * BLOCK_DV
            tl.store(part_row[:, None] + dim_v[None, :], acc, mask=is_row[:, None])
            sums = part_sums_ptr + part.to(tl.int64) * 2 * BLOCK_M + row
            tl.store(sums, m, mask=is_row)
            tl.store(sums + BLOCK_M, l, mask=is_row)
            # Column i has the tiles from total * i // share on, so tile t is that of ((t + 1) * share - 1) // total.
            begin += turn.to(tl.int64) * count
            first = (((begin + 1) * share - 1) // total).to(tl.int32)
            last = (((begin + count) * share - 1) // total).to(tl.int32)
            if not APART:
                tl.debug_barrier()  # all threads have stored, and one tells the other programs
                counter = counters_ptr + b.to(tl.int64) * ITEMS + item
                arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                if arrived == last - first:  # all parts are there
                    tl.store(counter, 0)
                    for first_row in range(0, min(ROWS, BLOCK_M), MERGED_ROWS):
                        _merge(
                            out_ptr, lse_ptr, sinks_ptr, part_ptr, part_sums_ptr, first, last, lane, b, head, block,
                            first_row, stride_out_request, stride_out_token, stride_out_head,
                            NUM_QUERIES, NUM_KV_HEADS, GROUP, DV, BLOCK_DV, BLOCK_M, LANES, MERGED_ROWS, MERGED_PARTS,
                            SINKS, LSE,
                        )  # fmt: skip
        tile += here
    # -- what nobody has a tile of --
    for number in range(program, batch, tl.num_programs(0)):
        empty = program * 0 + number  # a number to the interpreter otherwise
        if _request_lens(seq_lens_ptr, batch_idx_ptr, empty, True, num_slots, slot_tokens, INDEXED) == 0:
            nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
            zeros = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            for item in range(ITEMS):
                r = item % NUM_M * BLOCK_M + row
                _write(
                    out_ptr, lse_ptr, sinks_ptr, zeros, nothing, nothing, empty, r, item // NUM_M, r < ROWS,
                    stride_out_request, stride_out_token, stride_out_head,
                    NUM_QUERIES, NUM_KV_HEADS, GROUP, DV, BLOCK_DV, SINKS, LSE,
                )  # fmt: skip


@triton.jit
def merge_kernel(
    out_ptr, lse_ptr, sinks_ptr, part_ptr, seq_lens_ptr, batch_idx_ptr,
    stride_out_request, stride_out_token, stride_out_head, num_part_elements,
    batch, num_slots, slot_tokens, window, num_columns,
    NUM_QUERIES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
    LANES: tl.constexpr, PARTS: tl.constexpr,
    INDEXED: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Put together one row of an item that several programs had."""
    NUM_M: tl.constexpr = (NUM_QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
    ITEMS: tl.constexpr = NUM_KV_HEADS * NUM_M
    part_sums_ptr = part_ptr + num_part_elements
    tl.extra.cuda.gdc_launch_dependents()
    # The lengths are older than the first kernel, all of whose programs have waited before this one is let in.
    which, row = tl.program_id(0) // BLOCK_M, tl.program_id(0) % BLOCK_M
    b, item = which // ITEMS, which % ITEMS
    all_b = tl.arange(0, BLOCK_B)
    lens = _request_lens(seq_lens_ptr, batch_idx_ptr, all_b, all_b < batch, num_slots, slot_tokens, INDEXED)
    _, counts = _bounds(lens, NUM_QUERIES, window, BLOCK_N, WINDOW)
    counts = counts.to(tl.int64)
    TURNS: tl.constexpr = ITEMS // LANES
    count, total = tl.sum(tl.where(all_b == b, counts, 0), 0), tl.sum(counts, 0) * TURNS
    begin = tl.sum(tl.where(all_b < b, counts, 0), 0) * TURNS + item // LANES * count
    share, some = _num_shares(counts, total, num_columns, TURNS), tl.maximum(total, 1)
    first = (((begin + 1) * share - 1) // some).to(tl.int32)
    last = (((begin + count) * share - 1) // some).to(tl.int32)
    tl.extra.cuda.gdc_wait()  # in every program: what comes next waits for this kernel alone
    if (count > 0) & (first < last):
        _merge(
            out_ptr, lse_ptr, sinks_ptr, part_ptr, part_sums_ptr, first, last, item % LANES, b,
            item // NUM_M, item % NUM_M, row, stride_out_request, stride_out_token, stride_out_head,
            NUM_QUERIES, NUM_KV_HEADS, GROUP, DV, BLOCK_DV, BLOCK_M, LANES, 1, PARTS, SINKS, LSE,
        )  # fmt: skip
