"""How rows are appended: arguments that are checked once for each combination of shapes, and then the launch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton

from vtensor.triton_kernels.append_kernel import append_kernel
from vtensor.triton_kernels.arguments import FP8, QUERY_DTYPES, check_target, check_tensor
from vtensor.triton_kernels.launch import Launch, has_dependent_launch, is_interpreted
from vtensor.triton_kernels.signatures import remember, signature

__all__ = ["Appending", "Tensors", "launch_of"]

_MOST_WIDTH = 1024
_MOST_LAYERS = 65_535  # of a grid's second axis
_TILE = 2048  # elements of K that a program moves: 16 bytes at a time, two of them a thread
_MOST_LINES = 2**31 - 2 * _TILE  # heads of rows
_MOST_LAUNCHES = 4096

_NAMES = (
    "k", "v", "k_cache", "v_cache", "q", "cos", "sin", "seq_lens", "batch_idx", "cu_seqlens", "k_scale", "v_scale",
)  # fmt: skip
Tensors = tuple[Any, ...]  # tensors or None, in the order of _NAMES, which is that of the kernel's pointers


class Appending(NamedTuple):
    """How a kernel is launched for tensors of certain dtypes, shapes and strides, which have been checked.

    Of ragged rows their number, T, may be any.
    """

    launch: Launch
    num_layers: int
    layered: int  # 1 where tensors have a dimension of layers
    rows_each: int  # of a request; 1 if ragged
    heads: int
    q_heads: int
    lines: int  # of a program
    is_empty: bool

    def num_rows(self, tensors: Tensors) -> int:
        """Rows of all requests in k."""
        return math.prod(tensors[0].shape[self.layered : -2])

    def run(self, tensors: Tensors) -> None:
        """Launch."""
        num_rows = self.num_rows(tensors)
        blocks = -(-num_rows * self.heads // self.lines) - (-num_rows * self.q_heads // self.lines)
        if blocks and not self.is_empty:
            self.launch((blocks, self.num_layers), tensors, num_rows)


_launches: dict[Any, Appending] = {}


def launch_of(tensors: Tensors, interleaved: bool) -> Appending:
    """Check the arguments, of each combination of dtypes, shapes (but T) and strides only once."""
    try:
        key = _key(tensors, interleaved)
        found = _launches.get(key)
    except (AttributeError, TypeError, IndexError):  # not all of them are what they should be
        return _prepare(tensors, interleaved)
    if found is None:
        found = _prepare(tensors, interleaved)
        remember(_launches, key, found, _MOST_LAUNCHES)
    return found


def _key(tensors: Tensors, interleaved: bool) -> Any:
    k, v, k_cache, v_cache, q, *others, k_scale, v_scale = tensors
    if others[-1] is None or k_cache.dim() != 4:
        return interleaved, signature(*tensors)
    num_rows, most = k.shape[0], _MOST_LINES // max(k.shape[1], 1 if q is None else q.shape[1], 1)
    new = [
        x is None or (x.shape[0] == num_rows, x.shape[1:], x.stride(), x.dtype, x.device, type(x)) for x in (k, v, q)
    ]
    return interleaved, num_rows <= most, num_rows > 1, *new, signature(k_cache, v_cache, *others, k_scale, v_scale)


def _prepare(tensors: Tensors, interleaved: bool) -> Appending:
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
    check_tensor("k", k, device=device, dtype=QUERY_DTYPES, shape=(*("N",) * layers, *rows, "Hkv", "D"), dense=False)
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
    if num_rows > _MOST_LINES // max(heads, q_heads):
        raise ValueError(f"k has {num_rows} rows of {max(heads, q_heads)} heads: together they must be below 2^31")
    rows_each = 1 if len(rows) == 1 else leading[-1]
    numbers = (
        seq_lens.shape[0], rows_each, slots, slot_tokens,
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
    dependent = has_dependent_launch(device)
    numbers = (*numbers, is_interpreted(), dependent)
    launch = Launch(append_kernel, numbers, num_warps=4, enable_fp_fusion=False, launch_pdl=dependent)
    is_empty = not seq_lens.shape[0] or not num_layers
    return Appending(launch, num_layers, layers, rows_each, heads, q_heads, lines, is_empty)


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
