"""Append: new rows of K and V into the cache, each at its request's next position, in one launch."""

from __future__ import annotations

import torch

from vtensor.triton_kernels.append_checks import launch_of
from vtensor.triton_kernels.append_torch import append_in_torch, destinations
from vtensor.triton_kernels.arguments import check_for_kernels
from vtensor.triton_kernels.launch import device_of, is_interpreted

__all__ = ["append_kv", "append_reference"]


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
    launch = launch_of(tensors, interleaved)
    with torch.no_grad():
        num_rows = launch.num_rows(tensors)
        found = destinations(tensors, num_rows, launch.rows_each, raises=k.device.type == "cpu")
        append_in_torch(tensors, found, interleaved)


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
    launch = launch_of(tensors, interleaved)
    if k.device.type == "cpu":
        found = destinations(tensors, launch.num_rows(tensors), launch.rows_each, raises=True)
        if not is_interpreted():
            with torch.no_grad():
                append_in_torch(tensors, found, interleaved)
            return
    with device_of(k):
        launch.run(tensors)
