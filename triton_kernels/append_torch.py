"""Appending in plain torch, one request after another."""

from __future__ import annotations

import torch

from vtensor.triton_kernels.append_checks import Tensors
from vtensor.triton_kernels.arguments import FP8, shown

__all__ = ["append_in_torch", "destinations"]


def destinations(
    tensors: Tensors, num_rows: int, rows_each: int, *, raises: bool
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


def append_in_torch(tensors: Tensors, destinations: list[tuple[int, int, int, int, int]], interleaved: bool) -> None:
    """Write rows of k and v into the cache, and then rotate q: if memory is missing, q is what it was."""
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
