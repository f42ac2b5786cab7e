"""Prefill on Hopper, in Triton's Gluon: two warpgroups multiply, and one warp fetches for them.

Programs stay on their multiprocessors and take blocks of 128 queries of one head, half of it for each warpgroup. The
longest blocks come first, and every other round is dealt out backwards, so that all programs have about as much to do.

The keys of a block are gone through from the last one that any of its queries sees down to the first: no tile reaches
beyond the length, so descriptors of the whole cache, made on the host, do for requests of all lengths. Only the last
tile may begin before key 0, where zeros are filled in. For each row that is out of a tensor the tensor memory
accelerator looks up the tensor's first address, and a cache may have no memory there; so that tile is fetched with a
descriptor of the request's own rows, made on the device.

    keys       0                                             end (one behind the last key that is seen)
    tiles   <-- n-1 -->|<-- n-2 -->|  ...  |<-- 1 -->|<-- 0 -->|
             masked: key < 0        no mask            masked: the diagonal

    fetched      Q K0 V0 K1 V1 K2 V2 ...                        K and V into rings of STAGES buffers
    multiplied   S0 = Q K0 | S1 = Q K1, O += P0 V0 | S2 = Q K2, O += P1 V1 | ... | O += Pn-1 Vn-1

The two products of a step are issued together: the weights P1 are made of S1 while O += P0 V0 still runs.
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

# As newer versions of Triton call them, or else as 3.6 does.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

ROWS = gl.constexpr(64)  # queries of a warpgroup: the rows of a wgmma
BLOCK_M = gl.constexpr(128)  # queries of both
CONSUMER_REGISTERS = gl.constexpr(240)  # of each thread, instead of the 168 that a launch of 3 warpgroups gives to all
PRODUCER_REGISTERS = gl.constexpr(24)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _exp2(x):
    # Denormal results become 0: a weight below 2**-126 of the largest one counts for nothing. Saves two instructions
    # for each score.
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def _out_layout(D):
    """8 neighbours of a row for each thread: they come from the four threads that share the row after a wgmma."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]][: 6 if D == 128 else 5]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, D])


@gluon.jit
def _block(
    item, ends_smem, total, requests,
    NUM_HEADS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_B: gl.constexpr, CAUSAL: gl.constexpr,
    INDEXED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Which queries and keys an item has. Producer and consumers each find out for themselves."""
    cu_seqlens_ptr, seq_lens_ptr, batch_idx_ptr, num_queries, batch, num_slots, slot_tokens = requests
    ends = ends_smem.load(gl.BlockedLayout([BLOCK_B // 32], [32], [WARPS], [0]))  # all of them in each warp
    head = item % NUM_HEADS
    which = total - 1 - item // NUM_HEADS  # the last blocks of all come first
    token, last_token = 0, num_queries
    first, end, slot = 0, 0, 0
    if which >= 0:
        is_before = ends <= which
        b = gl.sum(is_before.to(gl.int32), 0)
        query = (which - gl.max(gl.where(is_before, ends, 0), 0)) * BLOCK_M
        start = gl.load(cu_seqlens_ptr + b)
        count = gl.load(cu_seqlens_ptr + b + 1) - start
        length = gl.minimum(gl.maximum(gl.load(seq_lens_ptr + b), 0), slot_tokens)
        slot = b
        if INDEXED:
            slot = gl.load(batch_idx_ptr + b)
            length = gl.where((slot >= 0) & (slot < num_slots), length, 0)
        slot = gl.where(length > 0, slot, 0)
        token = start + query
        last_token = gl.minimum(start + count, num_queries)
        first = length - count + query
        end = length
        if CAUSAL:
            end = gl.maximum(gl.minimum(first + BLOCK_M, length), 0)
    else:  # none: rows of q that belong to no request
        token = gl.load(cu_seqlens_ptr + batch) - (which + 1) * BLOCK_M
    return head, token, last_token, first, end, slot, (end + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _fetch(desc, where, ring, buffer, turn):
    """Fill a buffer for the `turn`-th time, once its users are done with what it had before."""
    smem, ready, empty = ring
    mbarrier.wait(empty.index(buffer), (turn & 1) ^ 1)
    mbarrier.expect(ready.index(buffer), desc.block_type.nbytes)
    _async_load(desc, where, ready.index(buffer), smem.index(buffer))


@gluon.jit
def _rows_of(desc, rows, slot, kv_head, end):
    """A descriptor for tiles of one head of the first `end` rows of a slot."""
    base_ptr, stride_slot, stride_token, stride_head = rows
    base = base_ptr + slot.to(gl.int64) * stride_slot + kv_head.to(gl.int64) * stride_head
    D: gl.constexpr = desc.block_type.shape[3]
    return tma.make_tensor_descriptor(  # the strides of its one slot and one head do not matter
        base, [1, end, 1, D], [stride_token, stride_token, stride_token, 1], desc.block_type.shape, desc.layout
    )


@gluon.jit
def _release(empty, buffer):
    """Be done with a buffer, as soon as all four warps are."""
    _barrier()
    mbarrier.arrive(empty.index(buffer), count=1)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, k_rows, v_rows, q_ring, k_ring, v_ring, ends_smem, total, requests, items,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_B: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, INDEXED: gl.constexpr,
):  # fmt: skip
    """Fetch Q, K and V of all blocks of this program."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    done, blocks, backwards = 0, 0, 0  # tiles, and blocks that had any, so far; direction of the round
    for begin in range(0, items, programs):
        item = begin + gl.where(backwards == 0, program, programs - 1 - program)
        backwards = 1 - backwards
        if item < items:
            head, token, _last_token, _first, end, slot, tiles = _block(
                item, ends_smem, total, requests, NUM_HEADS, BLOCK_N, BLOCK_B, CAUSAL, INDEXED, 1
            )
            kv_head = head // GROUP
            for tile in range(tiles):
                key = end - (tile + 1) * BLOCK_N
                stage, turn = (done + tile) % STAGES, (done + tile) // STAGES
                if tile == 0:
                    for part in gl.static_range(BLOCK_M // ROWS):
                        _fetch(q_desc, [token + part * ROWS, head, 0], q_ring, part, blocks)
                if key >= 0:
                    _fetch(k_desc, [slot, key, kv_head, 0], k_ring, stage, turn)
                    _fetch(v_desc, [slot, key, kv_head, 0], v_ring, stage, turn)
                else:
                    low_k = _rows_of(k_desc, k_rows, slot, kv_head, end)
                    _fetch(low_k, [0, key, 0, 0], k_ring, stage, turn)
                    low_v = _rows_of(v_desc, v_rows, slot, kv_head, end)
                    _fetch(low_v, [0, key, 0, 0], v_ring, stage, turn)
                    # the next ones are made in the same memory
                    mbarrier.wait(k_ring[1].index(stage), turn & 1)
                    mbarrier.wait(v_ring[1].index(stage), turn & 1)
            done += tiles
            blocks += (tiles > 0).to(gl.int32)


@gluon.jit
def _soften(s, m, key, first, scale_log2, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
    """Weights of a tile, the new maximum, and what the sums so far are to be multiplied with."""
    if MASKED:
        keys = key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
        sees = (keys >= 0)[None, :]
        if CAUSAL:
            position = first + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
            sees = sees & (keys[None, :] <= position[:, None])
        s = gl.where(sees, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    m_used = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: no -inf less -inf
    weights = _exp2(s * scale_log2 - (m_used * scale_log2)[:, None])
    alpha = _exp2((m - m_used) * scale_log2)
    return weights, m_new, alpha


@gluon.jit
def _sums(weights, BLOCK_N: gl.constexpr):
    """Sums of rows, one for each of the four threads that share a row: those are added up once, at the end."""
    return gl.sum(gl.sum(gl.reshape(weights, [ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _steps(
    acc, p, m, l4, q, k_ring, v_ring, begin, stop, done, first, end, scale_log2,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and weights of the tiles from `begin` to `stop`, and the output of the one before each."""
    s_layout: gl.constexpr = m.type.layout.parent
    acc_layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = p.type.layout
    k_smem, k_ready, k_empty = k_ring
    v_smem, v_ready, v_empty = v_ring
    for tile in range(begin, stop):
        at = done + tile
        stage, before = at % STAGES, (at - 1) % STAGES
        mbarrier.wait(k_ready.index(stage), (at // STAGES) & 1)
        k = k_smem.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
        s = warpgroup_mma(q, k, gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout), use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), ((at - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(before).reshape([BLOCK_N, D]), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        _release(k_empty, stage)
        weights, m, alpha = _soften(s, m, end - (tile + 1) * BLOCK_N, first, scale_log2, BLOCK_N, CAUSAL, MASKED)
        l4 = l4 * gl.convert_layout(alpha, gl.SliceLayout(1, l4.type.layout))[:, None] + _sums(weights, BLOCK_N)
        p_next = gl.convert_layout(weights.to(v_smem.dtype), p_layout)
        # These values arrived long ago. But this wait is a loop, and ptxas does not move the exponentials across it:
        # they stay beside the running product, instead of behind the wait for that one.
        mbarrier.wait(v_ready.index(before), ((at - 1) // STAGES) & 1)
        acc, p, p_next = warpgroup_mma_wait(0, deps=[acc, p, p_next])
        _release(v_empty, before)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout))[:, None]
        p = p_next
    return acc, p, m, l4


@gluon.jit
def _consume(
    q_ring, k_ring, v_ring, ends_smem, total, requests, items, out_ptr, lse_ptr, scale_log2,
    STRIDE_TOKEN: gl.constexpr, STRIDE_HEAD: gl.constexpr, NUM_HEADS: gl.constexpr, D: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_B: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, INDEXED: gl.constexpr,
    LSE: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Attend, with one half of the queries of each block of this program."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    out_layout: gl.constexpr = _out_layout(D)
    q_smem, q_ready, q_empty = q_ring
    k_smem, k_ready, k_empty = k_ring
    v_smem, v_ready, v_empty = v_ring
    q = q_smem.index(PART).reshape([ROWS, D])
    program, programs = gl.program_id(0), gl.num_programs(0)
    done, blocks, backwards = 0, 0, 0  # as in _produce
    for begin in range(0, items, programs):
        item = begin + gl.where(backwards == 0, program, programs - 1 - program)
        backwards = 1 - backwards
        if item < items:
            head, token, last_token, first, end, _slot, tiles = _block(
                item, ends_smem, total, requests, NUM_HEADS, BLOCK_N, BLOCK_B, CAUSAL, INDEXED, 4
            )
            token += PART * ROWS
            first += PART * ROWS
            m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
            l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
            acc = gl.zeros([ROWS, D], gl.float32, acc_layout)
            if tiles > 0:
                # -- with a mask: tiles up to `top` (at least one), and from `low` on --
                top = 1
                if CAUSAL:
                    top = gl.minimum(gl.maximum((end - 1 - first + BLOCK_N - 1) // BLOCK_N, 1), tiles)
                low = gl.maximum(tiles - (end % BLOCK_N != 0).to(gl.int32), top)
                mbarrier.wait(q_ready.index(PART), blocks & 1)
                stage = done % STAGES
                mbarrier.wait(k_ready.index(stage), (done // STAGES) & 1)
                k = k_smem.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
                s = warpgroup_mma(q, k, gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout), use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                _release(k_empty, stage)
                weights, m, _alpha = _soften(s, m, end - BLOCK_N, first, scale_log2, BLOCK_N, CAUSAL, True)
                l4 = _sums(weights, BLOCK_N)
                p = gl.convert_layout(weights.to(v_smem.dtype), p_layout)
                acc, p, m, l4 = _steps(
                    acc, p, m, l4, q, k_ring, v_ring, 1, top, done, first, end, scale_log2,
                    D, BLOCK_N, STAGES, CAUSAL, True,
                )  # fmt: skip
                acc, p, m, l4 = _steps(
                    acc, p, m, l4, q, k_ring, v_ring, top, low, done, first, end, scale_log2,
                    D, BLOCK_N, STAGES, CAUSAL, False,
                )  # fmt: skip
                acc, p, m, l4 = _steps(
                    acc, p, m, l4, q, k_ring, v_ring, low, tiles, done, first, end, scale_log2,
                    D, BLOCK_N, STAGES, CAUSAL, True,
                )  # fmt: skip
                _release(q_empty, PART)
                l = gl.convert_layout(gl.sum(l4, 1), gl.SliceLayout(1, s_layout))
                done += tiles
                blocks += 1
                stage = (done - 1) % STAGES
                mbarrier.wait(v_ready.index(stage), ((done - 1) // STAGES) & 1)
                acc = warpgroup_mma(p, v_smem.index(stage).reshape([BLOCK_N, D]), acc, is_async=True)
                acc, p = warpgroup_mma_wait(0, deps=[acc, p])
                _release(v_empty, stage)
            # -- outputs, and natural log-sum-exp --
            sees_any = (m > float("-inf")) | (l != l)  # NaN stays NaN
            l = gl.where(sees_any, l, 1.0)
            factor = gl.convert_layout(gl.where(sees_any, 1.0 / l, 0.0), gl.SliceLayout(1, acc_layout))[:, None]
            acc = gl.where(factor == 0.0, 0.0, acc * factor)  # also where a value that is not seen is NaN
            out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), out_layout)
            row = token.to(gl.int64) + gl.arange(0, ROWS, gl.SliceLayout(1, out_layout))
            dim = gl.arange(0, D, gl.SliceLayout(0, out_layout))
            out_row = out_ptr + row * STRIDE_TOKEN + head * STRIDE_HEAD
            gl.store(out_row[:, None] + dim[None, :], out, mask=((row >= 0) & (row < last_token))[:, None])
            if LSE:
                lse = gl.where(sees_any, (m * scale_log2 + gl.log2(l)) * LN2, float("-inf"))
                row = token.to(gl.int64) + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
                gl.store(lse_ptr + row * NUM_HEADS + head, lse, mask=(row >= 0) & (row < last_token))


@gluon.jit(do_not_specialize=["num_queries", "items", "batch", "num_slots", "slot_tokens"])
def hopper_prefill_kernel(
    q_desc, k_desc, v_desc, k_ptr, v_ptr, out_ptr, lse_ptr, cu_seqlens_ptr, seq_lens_ptr, batch_idx_ptr,
    num_queries, items, batch, num_slots, slot_tokens, scale_log2,
    stride_k_slot, stride_k_token, stride_k_head, stride_v_slot, stride_v_token, stride_v_head,
    STRIDE_TOKEN: gl.constexpr, STRIDE_HEAD: gl.constexpr, NUM_HEADS: gl.constexpr, GROUP: gl.constexpr,
    D: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_B: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, INDEXED: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Attend, with up to `items` blocks of queries of one head; `scale_log2` is the scale (above 0) times log2(e)."""
    # -- rings of buffers: barriers say of each buffer that it is filled, and that all who use it are done --
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [BLOCK_M // ROWS, ROWS, 1, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_N, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BLOCK_N, 1, D], v_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [BLOCK_M // ROWS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [BLOCK_M // ROWS, 1], barrier)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for part in gl.static_range(BLOCK_M // ROWS):
        mbarrier.init(q_ready.index(part), count=1)
        mbarrier.init(q_empty.index(part), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=BLOCK_M // ROWS)
        mbarrier.init(v_empty.index(stage), count=BLOCK_M // ROWS)
    q_ring, k_ring, v_ring = (q_smem, q_ready, q_empty), (k_smem, k_ready, k_empty), (v_smem, v_ready, v_empty)
    fence_async_shared()
    # -- where the blocks of queries of each request end --
    all_b = gl.arange(0, BLOCK_B, gl.BlockedLayout([BLOCK_B // 32], [32], [4], [0]))
    starts = gl.load(cu_seqlens_ptr + all_b, mask=all_b < batch, other=0)
    counts = gl.load(cu_seqlens_ptr + all_b + 1, mask=all_b < batch, other=0) - starts
    query_blocks = (gl.maximum(counts, 0) + BLOCK_M - 1) // BLOCK_M
    ends = gl.associative_scan(query_blocks, 0, _add)
    total = gl.sum(query_blocks, 0)
    ends_smem = gl.allocate_shared_memory(gl.int32, [BLOCK_B], gl.SwizzledSharedLayout(1, 1, 1, [0]), ends)
    _barrier()
    k_rows = (k_ptr, stride_k_slot, stride_k_token, stride_k_head)
    v_rows = (v_ptr, stride_v_slot, stride_v_token, stride_v_head)
    requests = (cu_seqlens_ptr, seq_lens_ptr, batch_idx_ptr, num_queries, batch, num_slots, slot_tokens)
    gl.warp_specialize(
        [
            (_consume, (
                q_ring, k_ring, v_ring, ends_smem, total, requests, items, out_ptr, lse_ptr, scale_log2,
                STRIDE_TOKEN, STRIDE_HEAD, NUM_HEADS, D, BLOCK_N, BLOCK_B, STAGES, CAUSAL, INDEXED, LSE, 0,
            )),
            (_consume, (
                q_ring, k_ring, v_ring, ends_smem, total, requests, items, out_ptr, lse_ptr, scale_log2,
                STRIDE_TOKEN, STRIDE_HEAD, NUM_HEADS, D, BLOCK_N, BLOCK_B, STAGES, CAUSAL, INDEXED, LSE, 1,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, k_rows, v_rows, q_ring, k_ring, v_ring, ends_smem, total, requests, items,
                NUM_HEADS, GROUP, BLOCK_N, BLOCK_B, STAGES, CAUSAL, INDEXED,
            )),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
