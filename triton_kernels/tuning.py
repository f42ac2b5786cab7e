"""Tuning: how the kernels are cut, by shape; measured once, and never by timing in anybody's process."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecodeTuning", "PrefillTuning", "decode_tuning", "prefill_tuning"]


@dataclass(frozen=True)
class DecodeTuning:
    """How the decode kernel is cut."""

    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    programs: int  # of a multiprocessor
    merged: int = 32  # numbers of parts that a thread adds up at a time
    merges_apart: bool = False  # whether a second kernel merges the parts (where the GPU lets it wait on the device)


@dataclass(frozen=True)
class PrefillTuning:
    """How the prefill kernel is cut."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    descriptors: bool  # whether tiles are fetched by the tensor memory accelerator


def decode_tuning(block_m: int, head_bytes: int, items: float) -> DecodeTuning:
    """For tiles of so many rows of queries, so many bytes of a key and a value of one head, and items a multiprocessor.

    Measured on an H200, with 512 bytes and 16 rows, the lengths unknown.
    """
    if head_bytes > 2304:
        return DecodeTuning(16, 4, 1, 1, merged=16)
    if head_bytes > 1024:  # latents (MLA)
        return DecodeTuning(32, 8 if block_m >= 32 else 4, 2, 1, merged=16)
    if block_m >= 64:
        return DecodeTuning(64, 4, 3 if head_bytes <= 512 else 2, 2 if head_bytes <= 512 else 1)
    if head_bytes <= 256:
        return DecodeTuning(128, 4, 3, 2, merges_apart=items <= 0.25)
    if head_bytes > 512:
        return DecodeTuning(64, 8, 2, 1, merges_apart=items <= 0.25)
    if items <= 1:
        return DecodeTuning(128, 8, 3, 1, merged=8, merges_apart=items <= 0.25)
    return DecodeTuning(64, 4, 3, 2, merged=8)


def prefill_tuning(head_dim: int, value_dim: int, element_bytes: int) -> PrefillTuning:
    """For heads of so many elements, of so many bytes each."""
    width = max(head_dim, value_dim)
    if element_bytes == 4:
        return PrefillTuning(64 if width <= 128 else 32, 32, 4, 1, False)
    if width <= 128:
        return PrefillTuning(64, 64, 4, 3, True)
    if width <= 256:
        return PrefillTuning(128 if value_dim <= 128 else 64, 64, 8, 2, False)
    return PrefillTuning(32, 32, 4, 1, False)
