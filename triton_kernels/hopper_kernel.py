"""Prefill on Hopper, in Triton's Gluon: two groups of warps multiply, and one warp fetches for them.

Each group has 64 queries of one head. The keys are gone through from the last that any query of the block sees down to
the first, so that no tile reaches behind the length, whatever it is: descriptors of the whole cache, made on the host,
do. The last tile may begin before key 0, where the tensor memory accelerator fills in zeros.

    keys       0                                             end (one behind the last key that is seen)
    tiles   <-- n-1 -->|<-- n-2 -->|  ...  |<-- 1 -->|<-- 0 -->|
             masked: key < 0         clear             masked: the diagonal

    fetches      K0 V0 K1 V1 K2 ...                              through rings of STAGES buffers
    multiplies   S0=Q K0, weights 0 | S1=Q K1 and O+=P0 V0 issued; S1 is there: weights 1; O is there: rescaled | S2 ...

So the exponentials of a tile run beside the products of the tile before.

Programs stay, one on each multiprocessor, and take blocks of queries in turn; that the longest come first, and each
round goes the other way, balances them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["hopper_prefill_kernel"]

_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # from 3.7 on
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _exp2(x):
    # Denormal results become 0: a weight below 2**-126 of the largest one counts for nothing. Saves two
    # instructions for each score.
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _item(
    item,
    ends,
    total,
    cu_seqlens_ptr,
    seq_lens_ptr,
    batch_idx_ptr,
    num_queries,
    batch,
    num_slots,
    slot_tokens,
    NUM_HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
    INDEXED: gl.constexpr,
):
    """Which queries and keys a block has: the last of all come first. All partitions compute the same."""
    head = item % NUM_HEADS
    which = total - 1 - item // NUM_HEADS
    token = 0
    last_token = num_queries
    first = 0
    end = 0
    slot = 0
    if which >= 0:
        is_before = ends <= which
        b = gl.sum(is_before.to(gl.int32), 0)
        before = gl.max(gl.where(is_before, ends, 0), 0)
        start = gl.load(cu_seqlens_ptr + b)
        count = gl.load(cu_seqlens_ptr + b + 1) - start
        length = gl.minimum(gl.maximum(gl.load(seq_lens_ptr + b), 0), slot_tokens)
        slot = b
        if INDEXED:
            slot = gl.load(batch_idx_ptr + b)
            length = gl.where((slot >= 0) & (slot < num_slots), length, 0)
        slot = gl.where(length > 0, slot, 0)
        token = start + (which - before) * BLOCK_M
        last_token = gl.minimum(start + count, num_queries)
        first = length - count + (which - before) * BLOCK_M
        end = length
        if CAUSAL:
            end = gl.maximum(gl.minimum(first + BLOCK_M, length), 0)
    else:  # rows of no request
        token = gl.load(cu_seqlens_ptr + batch) - (which + 1) * BLOCK_M
    tiles = (end + BLOCK_N - 1) // BLOCK_N
    return head, token, last_token, first, end, slot, tiles


@gluon.jit
def _produce(
    q_desc,
    k_desc,
    v_desc,
    q_smem,
    k_smem,
    v_smem,
    ends_smem,
    q_ready,
    q_empty,
    k_ready,
    k_empty,
    v_ready,
    v_empty,
    cu_seqlens_ptr,
    seq_lens_ptr,
    batch_idx_ptr,
    total,
    items,
    num_queries,
    batch,
    num_slots,
    slot_tokens,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_B: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    INDEXED: gl.constexpr,
):
    """Fetch Q, K and V of all blocks of this program."""
    lengths: gl.constexpr = gl.BlockedLayout([BLOCK_B // 32], [32], [1], [0])  # all in each warp
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    done = 0  # tiles, of all blocks before
    blocks = 0  # blocks that had tiles
    turn = 0
    for begin in range(0, items, programs):
        # boustrophedon: who has the longest of one round has the shortest of the next
        item = begin + gl.where(turn == 0, program, programs - 1 - program)
        turn = 1 - turn
        if item < items:
            head, token, last_token, first, end, slot, tiles = _item(
                item,
                ends_smem.load(lengths),
                total,
                cu_seqlens_ptr,
                seq_lens_ptr,
                batch_idx_ptr,
                num_queries,
                batch,
                num_slots,
                slot_tokens,
                NUM_HEADS,
                BLOCK_M,
                BLOCK_N,
                CAUSAL,
                INDEXED,
            )
            kv_head = head // GROUP
            for tile in range(tiles):
                key = end - (tile + 1) * BLOCK_N
                stage = (done + tile) % STAGES
                free = (((done + tile) // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), free)
                mbarrier.expect(k_ready.index(stage), BLOCK_N * D * 2)
                tma.async_copy_global_to_shared(
                    k_desc, [slot, key, kv_head, 0], k_ready.index(stage), k_smem.index(stage)
                )
                if tile == 0:
                    for part in gl.static_range(BLOCK_M // 64):
                        mbarrier.wait(q_empty.index(part), (blocks & 1) ^ 1)
                        mbarrier.expect(q_ready.index(part), 64 * D * 2)
                        tma.async_copy_global_to_shared(
                            q_desc, [token + part * 64, head, 0], q_ready.index(part), q_smem.index(part)
                        )
                mbarrier.wait(v_empty.index(stage), free)
                mbarrier.expect(v_ready.index(stage), BLOCK_N * D * 2)
                tma.async_copy_global_to_shared(
                    v_desc, [slot, key, kv_head, 0], v_ready.index(stage), v_smem.index(stage)
                )
            done += tiles
            blocks += (tiles > 0).to(gl.int32)


@gluon.jit
def _soften(
    s, m, key, first, c, s_layout: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr
):
    """Weights of a tile, and what the sums so far are to be multiplied with."""
    if MASKED:
        keys = key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
        sees = (keys >= 0)[None, :]
        if CAUSAL:
            position = first + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
            sees = sees & (keys[None, :] <= position[:, None])
        s = gl.where(sees, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    m_used = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: no -inf less -inf
    weights = _exp2(s * c - (m_used * c)[:, None])
    alpha = _exp2((m - m_used) * c)
    return weights, m_new, alpha


@gluon.jit
def _sums(weights, BLOCK_N: gl.constexpr):
    """Sums of rows, one for each of the four threads that share a row: those are added up once, at the end."""
    return gl.sum(gl.sum(gl.reshape(weights, [64, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _steps(
    acc,
    p,
    m,
    l,
    q,
    k_smem,
    v_smem,
    k_ready,
    k_empty,
    v_ready,
    v_empty,
    turns,
    turn,
    begin,
    stop,
    done,
    first,
    end,
    c,
    s_layout: gl.constexpr,
    acc_layout: gl.constexpr,
    p_layout: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    PING_PONG: gl.constexpr,
    WHO: gl.constexpr,
):
    """Scores and weights of the tiles from `begin` to `stop`, and the output of each one before."""
    for tile in range(begin, stop):
        at = done + tile
        stage = at % STAGES
        before = (at - 1) % STAGES
        mbarrier.wait(k_ready.index(stage), (at // STAGES) & 1)
        if PING_PONG:
            mbarrier.wait(turns.index(WHO), (turn & 1) ^ (1 - WHO))
        k = k_smem.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
        s = warpgroup_mma(q, k, gl.zeros([64, BLOCK_N], gl.float32, s_layout), use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), ((at - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(before).reshape([BLOCK_N, D]), acc, is_async=True)
        if PING_PONG:
            mbarrier.arrive(turns.index(1 - WHO), count=1)
            turn += 1
        s = warpgroup_mma_wait(1, deps=[s])
        _barrier()  # all four warps have read it
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, m, alpha = _soften(s, m, end - (tile + 1) * BLOCK_N, first, c, s_layout, BLOCK_N, CAUSAL, MASKED)
        l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + _sums(weights, BLOCK_N)
        p_next = gl.convert_layout(weights.to(v_smem.dtype), p_layout)
        # It is there since long, but where a loop begins ptxas ends a block: the exponentials stay in front of it,
        # while the tensor cores work, instead of behind the wait for those.
        mbarrier.wait(v_ready.index(before), ((at - 1) // STAGES) & 1)
        acc, p, p_next = warpgroup_mma_wait(0, deps=[acc, p, p_next])
        _barrier()
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout))[:, None]
        p = p_next
    return acc, p, m, l, turn


@gluon.jit
def _consume(
    q_smem,
    k_smem,
    v_smem,
    ends_smem,
    q_ready,
    q_empty,
    k_ready,
    k_empty,
    v_ready,
    v_empty,
    turns,
    out_ptr,
    lse_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    batch_idx_ptr,
    total,
    items,
    num_queries,
    batch,
    num_slots,
    slot_tokens,
    c,
    STRIDE_TOKEN: gl.constexpr,
    STRIDE_HEAD: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_B: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    INDEXED: gl.constexpr,
    LSE: gl.constexpr,
    PING_PONG: gl.constexpr,
    DIRECT: gl.constexpr,
    WHO: gl.constexpr,
):
    """Attend, with 64 queries of each block of this program."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    # the output: 8 numbers of one row for a thread, so that only threads of a quad exchange what acc_layout gives them
    if DIRECT:  # needs no shared memory
        out_layout: gl.constexpr = acc_layout
    elif D == 128:
        out_layout: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
            [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [64, 128],
        )
    else:
        out_layout: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
            [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [64, 64],
        )
    lengths: gl.constexpr = gl.BlockedLayout([BLOCK_B // 32], [32], [4], [0])  # all in each warp
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    done = 0
    blocks = 0
    turn = 0
    round_ = 0
    for begin in range(0, items, programs):
        item = begin + gl.where(round_ == 0, program, programs - 1 - program)
        round_ = 1 - round_
        if item < items:
            head, token, last_token, first, end, slot, tiles = _item(
                item,
                ends_smem.load(lengths),
                total,
                cu_seqlens_ptr,
                seq_lens_ptr,
                batch_idx_ptr,
                num_queries,
                batch,
                num_slots,
                slot_tokens,
                NUM_HEADS,
                BLOCK_M,
                BLOCK_N,
                CAUSAL,
                INDEXED,
            )
            token += WHO * 64
            first += WHO * 64
            m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
            l = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
            acc = gl.zeros([64, D], gl.float32, acc_layout)
            if tiles > 0:
                # -- masked: those up to `top` (at least one), and from `low` on --
                top = 1
                if CAUSAL:
                    top = gl.minimum(gl.maximum((end - 1 - first + BLOCK_N - 1) // BLOCK_N, 1), tiles)
                low = gl.maximum(tiles - (end % BLOCK_N != 0).to(gl.int32), top)
                q = q_smem.index(WHO).reshape([64, D])
                mbarrier.wait(q_ready.index(WHO), blocks & 1)
                stage = done % STAGES
                mbarrier.wait(k_ready.index(stage), (done // STAGES) & 1)
                k = k_smem.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
                s = warpgroup_mma(q, k, gl.zeros([64, BLOCK_N], gl.float32, s_layout), use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                _barrier()
                mbarrier.arrive(k_empty.index(stage), count=1)
                weights, m, alpha = _soften(s, m, end - BLOCK_N, first, c, s_layout, BLOCK_N, CAUSAL, True)
                l4 = _sums(weights, BLOCK_N)
                p = gl.convert_layout(weights.to(v_smem.dtype), p_layout)
                acc, p, m, l4, turn = _steps(
                    acc,
                    p,
                    m,
                    l4,
                    q,
                    k_smem,
                    v_smem,
                    k_ready,
                    k_empty,
                    v_ready,
                    v_empty,
                    turns,
                    turn,
                    1,
                    top,
                    done,
                    first,
                    end,
                    c,
                    s_layout,
                    acc_layout,
                    p_layout,
                    D,
                    BLOCK_N,
                    STAGES,
                    CAUSAL,
                    True,
                    PING_PONG,
                    WHO,
                )
                acc, p, m, l4, turn = _steps(
                    acc,
                    p,
                    m,
                    l4,
                    q,
                    k_smem,
                    v_smem,
                    k_ready,
                    k_empty,
                    v_ready,
                    v_empty,
                    turns,
                    turn,
                    top,
                    low,
                    done,
                    first,
                    end,
                    c,
                    s_layout,
                    acc_layout,
                    p_layout,
                    D,
                    BLOCK_N,
                    STAGES,
                    CAUSAL,
                    False,
                    PING_PONG,
                    WHO,
                )
                acc, p, m, l4, turn = _steps(
                    acc,
                    p,
                    m,
                    l4,
                    q,
                    k_smem,
                    v_smem,
                    k_ready,
                    k_empty,
                    v_ready,
                    v_empty,
                    turns,
                    turn,
                    low,
                    tiles,
                    done,
                    first,
                    end,
                    c,
                    s_layout,
                    acc_layout,
                    p_layout,
                    D,
                    BLOCK_N,
                    STAGES,
                    CAUSAL,
                    True,
                    PING_PONG,
                    WHO,
                )
                l = gl.convert_layout(gl.sum(l4, 1), gl.SliceLayout(1, s_layout))
                _barrier()  # all four warps have multiplied with q for the last time
                mbarrier.arrive(q_empty.index(WHO), count=1)
                last = done + tiles - 1
                stage = last % STAGES
                mbarrier.wait(v_ready.index(stage), (last // STAGES) & 1)
                acc = warpgroup_mma(p, v_smem.index(stage).reshape([BLOCK_N, D]), acc, is_async=True)
                acc, p = warpgroup_mma_wait(0, deps=[acc, p])
                _barrier()
                mbarrier.arrive(v_empty.index(stage), count=1)
                done += tiles
                blocks += 1
            # -- outputs, and natural log-sum-exp --
            sees_any = (m > float("-inf")) | (l != l)
            l = gl.where(sees_any, l, 1.0)
            inverse = gl.where(sees_any, 1.0 / l, 0.0)
            factor = gl.convert_layout(inverse, gl.SliceLayout(1, acc_layout))[:, None]
            acc = gl.where(factor == 0.0, 0.0, acc * factor)  # also where a value that is not seen is NaN
            out = acc.to(out_ptr.dtype.element_ty)
            out = gl.convert_layout(out, out_layout)
            row = token.to(gl.int64) + gl.arange(0, 64, gl.SliceLayout(1, out_layout))
            dim = gl.arange(0, D, gl.SliceLayout(0, out_layout))
            is_row = (row >= 0) & (row < last_token)
            out_row = out_ptr + row * STRIDE_TOKEN + head * STRIDE_HEAD
            gl.store(out_row[:, None] + dim[None, :], out, mask=is_row[:, None] & (dim < D)[None, :])
            if LSE:
                lse = gl.where(sees_any, (m * c + gl.log2(l)) * LN2, float("-inf"))
                lse_row = token.to(gl.int64) + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
                gl.store(lse_ptr + lse_row * NUM_HEADS + head, lse, mask=(lse_row >= 0) & (lse_row < last_token))


@gluon.jit(do_not_specialize=["num_queries", "items", "batch", "num_slots", "slot_tokens"])
def hopper_prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    batch_idx_ptr,
    num_queries,
    items,
    batch,
    num_slots,
    slot_tokens,
    c,
    STRIDE_TOKEN: gl.constexpr,
    STRIDE_HEAD: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_B: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    INDEXED: gl.constexpr,
    LSE: gl.constexpr,
    PING_PONG: gl.constexpr,
    DIRECT: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """Attend, with blocks of queries of one head each: all that there can be are `items`."""
    gl.static_assert(BLOCK_M == 128)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [BLOCK_M // 64, 64, 1, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_N, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BLOCK_N, 1, D], v_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [BLOCK_M // 64, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [BLOCK_M // 64, 1], barrier)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(BLOCK_M // 64):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=BLOCK_M // 64)
        mbarrier.init(v_empty.index(i), count=BLOCK_M // 64)
    if PING_PONG:
        for i in gl.static_range(2):
            mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    # -- blocks of queries up to the end of each request --
    lengths: gl.constexpr = gl.BlockedLayout([BLOCK_B // 32], [32], [4], [0])  # all in each warp
    all_b = gl.arange(0, BLOCK_B, lengths)
    starts = gl.load(cu_seqlens_ptr + all_b, mask=all_b < batch, other=0)
    counts = gl.load(cu_seqlens_ptr + all_b + 1, mask=all_b < batch, other=0) - starts
    query_blocks = (gl.maximum(counts, 0) + BLOCK_M - 1) // BLOCK_M
    ends = gl.associative_scan(query_blocks, 0, _add)
    total = gl.sum(query_blocks, 0)
    ends_smem = gl.allocate_shared_memory(gl.int32, [BLOCK_B], gl.SwizzledSharedLayout(1, 1, 1, [0]), ends)
    _barrier()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_smem,
                    k_smem,
                    v_smem,
                    ends_smem,
                    q_ready,
                    q_empty,
                    k_ready,
                    k_empty,
                    v_ready,
                    v_empty,
                    turns,
                    out_ptr,
                    lse_ptr,
                    cu_seqlens_ptr,
                    seq_lens_ptr,
                    batch_idx_ptr,
                    total,
                    items,
                    num_queries,
                    batch,
                    num_slots,
                    slot_tokens,
                    c,
                    STRIDE_TOKEN,
                    STRIDE_HEAD,
                    NUM_HEADS,
                    D,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_B,
                    STAGES,
                    CAUSAL,
                    INDEXED,
                    LSE,
                    PING_PONG,
                    DIRECT,
                    0,
                ),
            ),
            (
                _consume,
                (
                    q_smem,
                    k_smem,
                    v_smem,
                    ends_smem,
                    q_ready,
                    q_empty,
                    k_ready,
                    k_empty,
                    v_ready,
                    v_empty,
                    turns,
                    out_ptr,
                    lse_ptr,
                    cu_seqlens_ptr,
                    seq_lens_ptr,
                    batch_idx_ptr,
                    total,
                    items,
                    num_queries,
                    batch,
                    num_slots,
                    slot_tokens,
                    c,
                    STRIDE_TOKEN,
                    STRIDE_HEAD,
                    NUM_HEADS,
                    D,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_B,
                    STAGES,
                    CAUSAL,
                    INDEXED,
                    LSE,
                    PING_PONG,
                    DIRECT,
                    1,
                ),
            ),
            (
                _produce,
                (
                    q_desc,
                    k_desc,
                    v_desc,
                    q_smem,
                    k_smem,
                    v_smem,
                    ends_smem,
                    q_ready,
                    q_empty,
                    k_ready,
                    k_empty,
                    v_ready,
                    v_empty,
                    cu_seqlens_ptr,
                    seq_lens_ptr,
                    batch_idx_ptr,
                    total,
                    items,
                    num_queries,
                    batch,
                    num_slots,
                    slot_tokens,
                    NUM_HEADS,
                    GROUP,
                    D,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_B,
                    STAGES,
                    CAUSAL,
                    INDEXED,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )
