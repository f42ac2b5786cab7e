"""Append: new rows of K and V into the cache, each at its request's next position, in one launch.

A line is one head of one row. Lines of k (and of v with it) come first, those of q after them; a program takes LINES
of one kind, of one layer::

    axis 0:  | k, v: row 0, head 0 | head 1 | ... | row 1, head 0 | ... || q: row 0, head 0 | head 1 | ...
    axis 1:  layer
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vtensor.triton_kernels.arguments import FP8, check_for_kernels, check_target, check_tensor, shown
from vtensor.triton_kernels.launch import Launch, device_of, is_interpreted

__all__ = ["append_kv", "append_reference"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_WIDTH = 1024
_MOST_LAYERS = 65_535  # of a grid's second axis
_TILE = 2048  # elements of K that a program moves: 16 bytes at a time, two of them a thread
_MOST_LAUNCHES = 4096
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
def _append_kernel(
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
    INTERLEAVED: tl.constexpr, FP8: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    block, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
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


# -- checks -------------------------------------------------------------------------------------------------------

_NAMES = (
    "k", "v", "k_cache", "v_cache", "q", "cos", "sin", "seq_lens", "batch_idx", "cu_seqlens", "k_scale", "v_scale",
)  # fmt: skip
_Tensors = tuple[Any, ...]  # tensors or None, in the order of _NAMES, which is that of the kernel's pointers


class _Appending(NamedTuple):
    """How a kernel is launched for tensors of certain dtypes, shapes and strides, which have been checked."""

    grid: tuple[int, int]
    launch: Launch
    rows: tuple[Any, ...]  # their number, and the next two numbers of the kernel

    def run(self, tensors: _Tensors) -> None:
        """Launch."""
        self.launch(self.grid, tensors)


_launches: dict[Any, _Appending] = {}


def _launch_of(tensors: _Tensors, interleaved: bool) -> _Appending:
    """Check the arguments, of each combination of dtypes, shapes and strides only once."""
    try:
        key = (interleaved, *[x if x is None else (x.dtype, x.device, x.shape, x.stride()) for x in tensors])
        found = _launches.get(key)
    except (AttributeError, TypeError):  # not all of them are tensors
        return _prepare(tensors, interleaved)
    if found is None:
        found = _prepare(tensors, interleaved)
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = found
    return found


def _prepare(tensors: _Tensors, interleaved: bool) -> _Appending:
    """Check the arguments, but for the indices that they hold, and say how the kernel is launched."""
    k, v, k_cache, v_cache, q, cos, sin, seq_lens, batch_idx, cu_seqlens, k_scale, v_scale = tensors
    _check_places(tensors)
    layers = k_cache.dim() - 4
    if layers not in (0, 1):
        raise ValueError(
            f"k_cache has shape {list(k_cache.shape)}: it must be [slots, L, Hkv, D], or [N, slots, L, Hkv, D]"
        )
    is_ragged, device = cu_seqlens is not None, k.device
    rows: tuple[str, ...] = ("T",) if is_ragged else ("B",) if k.dim() - layers == 3 else ("B", "Sq")
    check_tensor("k", k, device=device, dtype=_DTYPES, shape=(*("N",) * layers, *rows, "Hkv", "D"), dense=False)
    *leading, heads, width = k.shape
    shape = (*leading[:layers], "slots", "L", heads, width)
    check_tensor("k_cache", k_cache, device=device, dtype=(k.dtype, FP8), shape=shape, dense=False)
    *places, _, _ = k_cache.shape
    value_width = 0
    if v is not None:
        check_tensor("v", v, device=device, dtype=k.dtype, shape=(*leading, heads, "Dv"), dense=False)
        value_width = v.shape[-1]
        shape = (*places, heads, value_width)
        check_tensor("v_cache", v_cache, device=device, dtype=k_cache.dtype, shape=shape, dense=False)
    for name, size in (("k", width), ("v", value_width)):
        if size > _MOST_WIDTH or (size < 1 and (name == "k" or v is not None)):
            raise ValueError(f"{name} has rows of {size} elements a head: they must be of 1 to {_MOST_WIDTH}")
    slots, slot_tokens = places[-2:]
    if not heads or (q is not None and not q.shape[-2:-1].numel()):
        raise ValueError("k and q must have at least one head")
    _check_indices_fit(k, leading[layers:], slots, seq_lens, batch_idx, cu_seqlens)
    half, q_heads = _check_rotation(k, leading, slot_tokens, q, cos, sin)
    num_layers = leading[0] if layers else 1
    if num_layers > _MOST_LAYERS:
        raise ValueError(f"k has {num_layers} layers: one launch takes at most {_MOST_LAYERS}")
    scale_strides = [
        _check_scale(name, scale, k_cache.dtype, device, num_layers if layers else 0, heads)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    num_rows = math.prod(leading[layers:])
    block_d, block_dv = (triton.next_power_of_2(max(1, size)) for size in (width - 2 * half, value_width))
    block_half = triton.next_power_of_2(max(1, half))
    lines = max(1, _TILE // max(block_d, block_dv, 2 * block_half))
    if num_rows * max(heads, q_heads) > 2**31 - 2 * _TILE:
        raise ValueError(f"k has {num_rows} rows of {max(heads, q_heads)} heads: together they must be below 2^31")
    blocks = triton.cdiv(num_rows * heads, lines) + triton.cdiv(num_rows * q_heads, lines)
    if not seq_lens.shape[0] or not num_layers:
        blocks = 0
    numbers = (
        num_rows, seq_lens.shape[0], 1 if len(rows) == 1 else leading[-1], slots, slot_tokens,
        *_row_strides(k, layers, rows), *_row_strides(v, layers, rows), *_row_strides(q, layers, rows),
        *_row_strides(k_cache, layers, ("slot", "L")), *_row_strides(v_cache, layers, ("slot", "L")),
        0 if cos is None else cos.stride(0),
        *(0 if x is None else x.stride(-2) for x in (k, v, q, k_cache, v_cache)),
        *scale_strides[0], *scale_strides[1], heads, q_heads, width, value_width, half,
        block_d, block_dv, block_half, lines, bool(interleaved), k_cache.dtype == FP8,
    )  # fmt: skip
    for name, target in (("k_cache", k_cache), ("v_cache", v_cache), ("q", q)):
        if target is not None:
            check_target(name, target)
    # no fused multiply and add: results are to the bit those of the reference
    launch = Launch(_append_kernel, (*numbers, is_interpreted()), num_warps=4, enable_fp_fusion=False)
    return _Appending((blocks, num_layers), launch, numbers[:3])


def _check_places(tensors: tuple[Any, ...]) -> None:
    """Check that what must be there is, as tensors of one device."""
    given = dict(zip(_NAMES, tensors, strict=True))
    device: Any = getattr(given["k"], "device", None)
    for name, tensor in given.items():
        if tensor is None and name not in ("k", "k_cache", "seq_lens"):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}: it must be a tensor")
        if tensor.device != device or device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} is on {tensor.device}, and k is on {device}: both must be on one CPU or GPU")
    for first, second in (("v", "v_cache"), ("cos", "sin")):
        if (given[first] is None) != (given[second] is None):
            lacking = first if given[first] is None else second
            raise ValueError(f"{lacking} is None: {first} and {second} must be given together, or both left out")
    if given["k_cache"].dtype == FP8 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise ValueError(f"k_cache has dtype {FP8}: it takes compute capability 8.9, and {device} has {capability}")


def _check_indices_fit(
    k: torch.Tensor, rows: list[int], slots: int, seq_lens: Any, batch_idx: Any, cu_seqlens: Any
) -> None:  # fmt: skip
    size: int | str = "B" if cu_seqlens is not None else rows[0]
    check_tensor("seq_lens", seq_lens, device=k.device, dtype=torch.int32, shape=(size,))
    batch = seq_lens.shape[0]
    if batch_idx is not None:
        check_tensor("batch_idx", batch_idx, device=k.device, dtype=torch.int32, shape=(batch,))
    elif batch > slots:
        raise ValueError(f"seq_lens has {batch} requests and k_cache {slots} slots: give batch_idx, a slot for each")
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens, device=k.device, dtype=torch.int32, shape=(batch + 1,))


def _check_rotation(
    k: torch.Tensor, leading: list[int], slot_tokens: int, q: Any, cos: Any, sin: Any
) -> tuple[int, int]:  # fmt: skip
    """Check what RoPE takes; returns pairs a head, and heads of q."""
    if q is not None:
        if cos is None:
            raise ValueError("q is given and cos is None: q is only rotated, give cos and sin, or leave it out")
        check_tensor("q", q, device=k.device, dtype=k.dtype, shape=(*leading, "Hq", k.shape[-1]), dense=False)
    if cos is None:
        return 0, 0
    shape: tuple[int | str, ...] = ("max_positions", "R / 2")
    check_tensor("cos", cos, device=k.device, dtype=(torch.float32, k.dtype), shape=shape, dense=False)
    check_tensor("sin", sin, device=k.device, dtype=cos.dtype, shape=tuple(cos.shape), dense=False)
    if sin.stride(0) != cos.stride(0):
        raise ValueError(f"sin has strides {sin.stride()} and cos has {cos.stride()}: they must be the same")
    positions, half = cos.shape
    if not 1 <= half <= k.shape[-1] // 2:
        raise ValueError(
            f"cos has {half} columns, one a pair of elements: they must be 1 to {k.shape[-1] // 2}, half of k's width"
        )
    if k.device.type == "cuda" and positions < slot_tokens:
        raise ValueError(f"cos has {positions} rows and k_cache has slots of {slot_tokens} tokens: each needs one")
    return half, 0 if q is None else q.shape[-2]


def _check_scale(
    name: str, scale: Any, dtype: torch.dtype, device: torch.device, layers: int, heads: int
) -> tuple[int, int]:  # fmt: skip
    """Check a scale; returns its strides of layer and head. `layers` is 0 without that dimension."""
    if scale is None:
        return 0, 0
    if dtype != FP8:
        raise ValueError(f"{name} is for a cache of {FP8}, and k_cache has dtype {dtype}: leave it out")
    if scale.numel() == 1:
        check_tensor(name, scale.reshape(1), device=device, dtype=torch.float32, shape=(1,))
        return 0, 0
    per_layer = layers and scale.dim() == 2
    check_tensor(name, scale, device=device, dtype=torch.float32, shape=(layers, heads) if per_layer else (heads,))
    return heads if per_layer else 0, 1


def _row_strides(x: torch.Tensor | None, layers: int, rows: tuple[str, ...]) -> tuple[int, int, int]:
    """Strides of layer, request (or slot), and row in it (or token)."""
    if x is None:
        return 0, 0, 0
    layer = x.stride(0) if layers else 0
    if len(rows) == 2:
        return layer, x.stride(-4), x.stride(-3)
    return (layer, 0, x.stride(-3)) if rows == ("T",) else (layer, x.stride(-3), 0)


# -- reference ----------------------------------------------------------------------------------------------------


def _destinations(
    tensors: _Tensors, num_rows: int, rows_each: int, *, raises: bool
) -> list[tuple[int, int, int, int, int]]:
    """List what goes where: request, its first row and the end of its rows (ragged: of all), slot, first position.

    Waits for the device. Rows that fit nowhere are left out, or (`raises`) are errors.
    """
    _, _, k_cache, _, _, cos, _, seq_lens, batch_idx, cu_seqlens, _, _ = tensors
    slots, slot_tokens = k_cache.shape[-4:-2]
    longest = slot_tokens if cos is None else min(slot_tokens, cos.shape[0])
    lengths = seq_lens.tolist()
    ends = None if cu_seqlens is None else cu_seqlens.tolist()
    if raises and ends is not None and (ends[0] or ends[-1] > num_rows or ends != sorted(ends)):
        raise ValueError(
            f"cu_seqlens={shown(ends)} must begin with 0, never fall, and end at most at {num_rows}, k's rows"
        )
    wanted = list(range(len(lengths))) if batch_idx is None else batch_idx.tolist()
    if raises and any(not -1 <= slot < slots for slot in wanted):
        raise ValueError(f"batch_idx={shown(wanted)} must be of 0 to {slots - 1}, k_cache's slots, or -1 for padding")
    found = []
    for request, (slot, length) in enumerate(zip(wanted, lengths, strict=True)):
        begin, end = (0, rows_each) if ends is None else ends[request : request + 2]
        first = length - (end - begin)
        if slot != -1 and begin < end and raises and (first < 0 or length > longest):
            raise ValueError(
                f"seq_lens[{request}]={length} must be of {end - begin}, the new rows, to {longest}, "
                f"{'the length of k_cache' if longest == slot_tokens else 'the rows of cos'}; "
                "batch_idx of -1 is padding"
            )
        begin, end = begin + max(0, -first), end - max(0, length - slot_tokens)
        if ends is not None:
            end = min(end, num_rows)
        if 0 <= slot < slots and begin < end:
            found.append((request, begin, end, slot, max(0, first)))
    return found


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rows [..., n, H, D] with their first R elements rotated, in float32; cos and sin are [n, R / 2]."""
    half, x = cos.shape[-1], x.float()
    cos, sin = cos.float()[:, None, :], sin.float()[:, None, :]
    a, b = (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else x[..., : 2 * half].chunk(2, -1)
    first, second = a * cos - b * sin, b * cos + a * sin
    pairs = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    return torch.cat([pairs, x[..., 2 * half :]], -1)


def _quantised(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Rows [..., n, H, D] as a cache of fp8 keeps them."""
    x = x.float()
    if scale is not None:
        per_head = scale.reshape(()) if scale.numel() == 1 else scale[..., None]  # [(N,) H, 1]
        x = x / (per_head.unsqueeze(1) if per_head.dim() == 3 else per_head)
    return x.clamp(-448.0, 448.0).to(FP8)


def _append_in_torch(tensors: _Tensors, destinations: list[tuple[int, int, int, int, int]], interleaved: bool) -> None:
    k, v, k_cache, v_cache, q, cos, sin, _, _, cu_seqlens, k_scale, v_scale = tensors
    layers = k_cache.dim() - 4

    def rows_of(x: torch.Tensor, request: int, begin: int, end: int) -> torch.Tensor:
        if cu_seqlens is not None:
            return x[..., begin:end, :, :]
        return (x if x.dim() == 4 + layers else x.unsqueeze(-3))[..., request, begin:end, :, :]

    for request, begin, end, slot, position in destinations:
        here = slice(position, position + end - begin)
        keys = rows_of(k, request, begin, end)
        if cos is not None and sin is not None:
            keys = _rotated(keys, cos[here], sin[here], interleaved)
        for rows, cache, scale in ((keys, k_cache, k_scale), (v, v_cache, v_scale)):
            if rows is None or cache is None:
                continue
            new = rows if rows is keys else rows_of(rows, request, begin, end)
            cache[..., slot, here, :, :] = _quantised(new, scale) if cache.dtype == FP8 else new.to(cache.dtype)
    if q is not None and cos is not None and sin is not None:
        for request, begin, end, _, position in destinations:
            here = slice(position, position + end - begin)
            queries = rows_of(q, request, begin, end)
            queries.copy_(_rotated(queries, cos[here], sin[here], interleaved))


# -- interface ----------------------------------------------------------------------------------------------------


def append_reference(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    q: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """`append_kv` in plain torch, one request after another; on a CUDA device it waits for the indices.

    Raises
    ------
    ValueError
        As `append_kv`.
    """
    tensors = (k, v, k_cache, v_cache, q, cos, sin, seq_lens, batch_idx, cu_seqlens, k_scale, v_scale)
    launch = _launch_of(tensors, interleaved)
    num_rows, _, rows_each = launch.rows
    with torch.no_grad():
        found = _destinations(tensors, num_rows, rows_each, raises=k.device.type == "cpu")
        _append_in_torch(tensors, found, interleaved)


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    q: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write new rows of K and V into the cache, behind what each request has there. One launch.

    Row i of the n new rows of request b goes to position seq_lens[b] - n + i of slot batch_idx[b]. Mutates `k_cache`
    and `v_cache` at these rows, and `q`; all else stays as it is. Of two rows for one place either may remain.

    Parameters
    ----------
    k : Tensor
        New keys, float16, bfloat16 or float32: [B, Hkv, D] (one row a request), [B, Sq, Hkv, D], or ragged [T, Hkv, D]
        with `cu_seqlens`. D is 1 to 1,024, of stride 1. With a `k_cache` of N layers all of k, v and q have N in front.
    v : Tensor or None
        New values, of k's dtype and shape but for a width Dv of their own. None, as `v_cache`: the keys are all (MLA).
    k_cache, v_cache : Tensor
        [slots, L, Hkv, D] and [slots, L, Hkv, Dv], or [N, slots, L, ...] for N layers; of any strides but the last,
        which is 1. Of k's dtype or float8_e4m3fn. Of a virtual cache the rows that are written must have memory.
    seq_lens : Tensor
        [B] int32: tokens of each request, the new ones included.
    batch_idx : Tensor, optional
        [B] int32: slot of each request, or -1 for padding, of which nothing is read or written. Default: slot b.
    cu_seqlens : Tensor, optional
        [B + 1] int32: request b has the rows cu_seqlens[b] to cu_seqlens[b + 1]. Rows past the last are padding.
    cos, sin : Tensor, optional
        [max_positions, R / 2] of float32 or k's dtype, both with the same strides: RoPE rotates the first R elements of
        each key by the angles of its position. On a CUDA device they have a row for each of the L positions.
    interleaved : bool
        False: element j is rotated with j + R / 2 (GPT-NeoX). True: 2j with 2j + 1 (GPT-J).
    q : Tensor, optional
        [..., Hq, D], leading dimensions as of k: rotated in place at the same positions.
    k_scale, v_scale : Tensor, optional
        float32, one value, [Hkv], or [N, Hkv] with layers. A cache of float8_e4m3fn keeps x / scale, held within
        -448 to 448. Default: 1.

    Raises
    ------
    ValueError
        An argument that does not fit; the message names it, its value and the rule. Nothing was written. Positions and
        slots out of range are errors on a CPU; on a CUDA device nobody looks, and such rows are not written.

    Notes
    -----
    Arithmetic is in float32, with one rounding at the end; without RoPE and fp8 rows are copied to the bit. For T rows
    the call reads N * T * Hkv * (D + Dv) elements of k and v and writes as many to the cache, reads and writes
    N * T * Hq * R of q, and reads T * R of cos and sin; in bfloat16, for T 256, N 32, Hkv 8, D 128, that is 64 MiB.

    The rows must have memory when the kernel runs: give `plain` views of a virtual cache, after `step`. A request of
    which `seq_lens` lacks the new rows has its last ones overwritten, which nobody can see. There are no gradients.

    CPU tensors are appended by Triton's interpreter where that is on (TRITON_INTERPRET), else by `append_reference`.
    """
    check_for_kernels(k=k, v=v, k_cache=k_cache, v_cache=v_cache, q=q)
    if torch.compiler.is_compiling():
        torch.ops.vtensor.append_kv(
            k, v, k_cache, v_cache, seq_lens, batch_idx, cu_seqlens,
            cos=cos, sin=sin, interleaved=interleaved, q=q, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        return
    tensors = (k, v, k_cache, v_cache, q, cos, sin, seq_lens, batch_idx, cu_seqlens, k_scale, v_scale)
    launch = _launch_of(tensors, interleaved)
    if k.device.type == "cpu":
        num_rows, _, rows_each = launch.rows
        found = _destinations(tensors, num_rows, rows_each, raises=True)
        if not is_interpreted():
            with torch.no_grad():
                _append_in_torch(tensors, found, interleaved)
            return
    if launch.grid[0]:
        with device_of(k):
            launch.run(tensors)
