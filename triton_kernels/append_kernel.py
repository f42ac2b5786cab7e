"""The kernel that appends.

A line is one head of one row. Lines of k (and of v with it) come first, those of q after them; a program takes LINES
of one kind, of one layer::

    axis 0:  | k, v: row 0, head 0 | head 1 | ... | row 1, head 0 | ... || q: row 0, head 0 | head 1 | ...
    axis 1:  layer
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["append_kernel"]

_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _locate(
    row, is_row, seq_lens_ptr, batch_idx_ptr, cu_seqlens_ptr, num_requests, rows_each, num_slots, slot_tokens
):  # fmt: skip
    """Where rows come from and go to: request, row in it (ragged: in all), slot, position, and whether they go."""
    if cu_seqlens_ptr is None:
        request, index = row // rows_each, row % rows_each
        place, count = index, rows_each
        is_valid = is_row
    else:
        # the last request that begins at the row or before it: of those that begin there, the one that is not empty
        step = 1
        while step * 2 < num_requests:
            step *= 2
        request = tl.zeros_like(row)
        while step > 0:
            probe = request + step
            is_in = is_row & (probe < num_requests)
            request = tl.where(is_in & (tl.load(cu_seqlens_ptr + probe, mask=is_in, other=0) <= row), probe, request)
            step = step // 2
        begin = tl.load(cu_seqlens_ptr + request, mask=is_row, other=0)
        count = tl.load(cu_seqlens_ptr + request + 1, mask=is_row, other=0) - begin
        place, index = row - begin, row
        is_valid = is_row & (place >= 0) & (place < count)  # no request has the rows past the last one's
    position = tl.load(seq_lens_ptr + request, mask=is_valid, other=0) - count + place
    if batch_idx_ptr is None:
        slot = request
    else:
        slot = tl.load(batch_idx_ptr + request, mask=is_valid, other=-1)
    is_valid &= (slot >= 0) & (slot < num_slots) & (position >= 0) & (position < slot_tokens)
    return request.to(tl.int64), index.to(tl.int64), slot.to(tl.int64), position.to(tl.int64), is_valid


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """float32 values, rounded to what a dtype has: the interpreter's casts cut off (bf16) or do not carry (fp8)."""
    DROPPED: tl.constexpr = 20 if dtype == tl.float8e4nv else 16
    bits = x.to(tl.uint32, bitcast=True)
    sign = bits & 0x80000000
    bits = (bits + (((1 << DROPPED - 1) - 1) + ((bits >> DROPPED) & 1))) & (0x100000000 - (1 << DROPPED))
    if dtype == tl.float8e4nv:  # below 2^-6 they are 2^-9 apart, as are those of float32 at 1.5 * 2^14
        small = (tl.abs(x) + 24576.0) - 24576.0
        bits = tl.where(tl.abs(x) < 0.015625, small.to(tl.uint32, bitcast=True) | sign, bits)
    bits = tl.where(x == x, bits, 0x7FF00000 | sign)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _stored(x, target, scale_ptr, scale_at, FP8: tl.constexpr, INTERPRETED: tl.constexpr):
    """Values as they are kept where `target` points."""
    dtype: tl.constexpr = target.dtype.element_ty
    if FP8:
        x = x.to(tl.float32)
        if scale_ptr is not None:
            x = tl.div_rn(x, tl.load(scale_ptr + scale_at)[:, None] + tl.zeros_like(x))
        x = tl.where(x > _FP8_MAX, _FP8_MAX, tl.where(x < -_FP8_MAX, -_FP8_MAX, x))  # NaN stays NaN
    if INTERPRETED and x.dtype == tl.float32 and (dtype == tl.bfloat16 or dtype == tl.float8e4nv):
        x = _rounded(x, dtype)
    return x.to(dtype)


@triton.jit
def _copy(
    source, target, is_line, scale_ptr, scale_at,
    FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Put the elements FIRST to END of lines where they go."""
    dim = FIRST + tl.arange(0, BLOCK)
    mask = is_line[:, None] & (dim < END)[None, :]
    x = tl.load(source[:, None] + dim[None, :], mask=mask)
    tl.store(target[:, None] + dim[None, :], _stored(x, target, scale_ptr, scale_at, FP8, INTERPRETED), mask=mask)


@triton.jit
def _rotate(
    source, target, is_line, cos_ptr, sin_ptr, angle_at, scale_ptr, scale_at,
    LINES: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Put the first 2 HALF elements of lines where they go, rotated. `target` may be `source`."""
    pair = tl.arange(0, BLOCK)
    mask = is_line[:, None] & (pair < HALF)[None, :]
    angle = angle_at[:, None] + pair[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    if INTERLEAVED:
        dim = tl.arange(0, 2 * BLOCK)
        mask = is_line[:, None] & (dim < 2 * HALF)[None, :]
        x = tl.load(source[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [LINES, BLOCK, 2]))
        x = tl.interleave(a * cos - b * sin, b * cos + a * sin)
        tl.store(target[:, None] + dim[None, :], _stored(x, target, scale_ptr, scale_at, FP8, INTERPRETED), mask=mask)
    else:
        a = tl.load(source[:, None] + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source[:, None] + HALF + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        first = _stored(a * cos - b * sin, target, scale_ptr, scale_at, FP8, INTERPRETED)
        second = _stored(b * cos + a * sin, target, scale_ptr, scale_at, FP8, INTERPRETED)
        tl.store(target[:, None] + pair[None, :], first, mask=mask)
        tl.store(target[:, None] + HALF + pair[None, :], second, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def append_kernel(
    k_ptr,  # [N, T..., HEADS, D]
    v_ptr,  # [N, T..., HEADS, DV], or None
    k_cache_ptr,  # [N, slots, L, HEADS, D]
    v_cache_ptr,  # [N, slots, L, HEADS, DV], or None
    q_ptr,  # [N, T..., Q_HEADS, D], or None
    cos_ptr, sin_ptr,  # [positions, HALF], or None
    seq_lens_ptr, batch_idx_ptr, cu_seqlens_ptr, k_scale_ptr, v_scale_ptr,
    num_rows, num_requests, rows_each, num_slots, slot_tokens,
    k_layer, k_request, k_row, v_layer, v_request, v_row, q_layer, q_request, q_row,
    k_cache_layer, k_cache_slot, k_cache_token, v_cache_layer, v_cache_slot, v_cache_token, angle_position,
    K_HEAD: tl.constexpr, V_HEAD: tl.constexpr, Q_HEAD: tl.constexpr,  # strides
    K_CACHE_HEAD: tl.constexpr, V_CACHE_HEAD: tl.constexpr,
    K_SCALE_LAYER: tl.constexpr, K_SCALE_HEAD: tl.constexpr, V_SCALE_LAYER: tl.constexpr, V_SCALE_HEAD: tl.constexpr,
    HEADS: tl.constexpr, Q_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_HALF: tl.constexpr, LINES: tl.constexpr,
    INTERLEAVED: tl.constexpr, FP8: tl.constexpr, INTERPRETED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write rows of k and v into the cache, and rotate those of q."""
    block, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if DEPENDENT:  # launched while what comes before ends
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_blocks = tl.cdiv(num_rows * HEADS, LINES)
    line = tl.arange(0, LINES)
    if block < kv_blocks:
        line += block * LINES
        row, head = line // HEADS, line % HEADS
        request, index, slot, position, is_line = _locate(
            row, row < num_rows, seq_lens_ptr, batch_idx_ptr, cu_seqlens_ptr,
            num_requests, rows_each, num_slots, slot_tokens,
        )  # fmt: skip
        source = k_ptr + layer * k_layer + request * k_request + index * k_row + head.to(tl.int64) * K_HEAD
        # int64 before they are multiplied: a token of a slice of 32 layers is 65,536 elements wide
        target = k_cache_ptr + layer * k_cache_layer + slot * k_cache_slot + position * k_cache_token
        target += head.to(tl.int64) * K_CACHE_HEAD
        scale_at = layer * K_SCALE_LAYER + head * K_SCALE_HEAD
        if HALF > 0:
            _rotate(
                source, target, is_line, cos_ptr, sin_ptr, position * angle_position, k_scale_ptr, scale_at,
                LINES, HALF, BLOCK_HALF, INTERLEAVED, FP8, INTERPRETED,
            )  # fmt: skip
        if D > 2 * HALF:
            _copy(source, target, is_line, k_scale_ptr, scale_at, 2 * HALF, D, BLOCK_D, FP8, INTERPRETED)
        if v_ptr is not None:
            source = v_ptr + layer * v_layer + request * v_request + index * v_row + head.to(tl.int64) * V_HEAD
            target = v_cache_ptr + layer * v_cache_layer + slot * v_cache_slot + position * v_cache_token
            target += head.to(tl.int64) * V_CACHE_HEAD
            scale_at = layer * V_SCALE_LAYER + head * V_SCALE_HEAD
            _copy(source, target, is_line, v_scale_ptr, scale_at, 0, DV, BLOCK_DV, FP8, INTERPRETED)
    else:
        if q_ptr is not None:
            line += (block - kv_blocks) * LINES
            row, head = line // Q_HEADS, line % Q_HEADS
            request, index, _, position, is_line = _locate(
                row, row < num_rows, seq_lens_ptr, batch_idx_ptr, cu_seqlens_ptr,
                num_requests, rows_each, num_slots, slot_tokens,
            )  # fmt: skip
            source = q_ptr + layer * q_layer + request * q_request + index * q_row + head.to(tl.int64) * Q_HEAD
            _rotate(
                source, source, is_line, cos_ptr, sin_ptr, position * angle_position, None, 0,
                LINES, HALF, BLOCK_HALF, INTERLEAVED, False, INTERPRETED,
            )  # fmt: skip
