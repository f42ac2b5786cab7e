"""A KV cache beside those of transformers: what StaticCache and DynamicCache take for the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from vtensor.kvcache import KVCacheStats
from vtensor.units import format_bytes

__all__ = ["DynamicBytes", "count_dynamic", "render_bytes"]


@dataclass(frozen=True)
class DynamicBytes:
    """Bytes of a DynamicCache: what it holds at the end, what it held at its peak, and what it copied to grow."""

    held: int
    peak: int
    copied: int


def count_dynamic(cache: Any, prompt_tokens: int) -> DynamicBytes:
    """Count from a DynamicCache's tensors, after the generation.

    It extends K, then V, of one layer after the other by `torch.cat`. So at the peak there are all of them and the old
    copy of the last; and taking over a token copies all that was held before it.
    """
    held = peak = copied = 0
    for tensor in (tensor for layer in cache.layers for tensor in (layer.keys, layer.values)):
        num_tokens = tensor.shape[-2]
        token_bytes = tensor.nbytes // num_tokens
        held += tensor.nbytes
        peak = token_bytes * (num_tokens - 1)
        copied += token_bytes * sum(range(prompt_tokens, num_tokens))
    return DynamicBytes(held, held + peak, copied)


def render_bytes(stats: KVCacheStats, static_bytes: int, dynamic: DynamicBytes, shape: str) -> RenderableType:
    """A table of the three caches.

    Parameters
    ----------
    stats : KVCacheStats
        Of the virtual cache.
    static_bytes : int
        What a StaticCache allocates.
    dynamic : DynamicBytes
    shape : str
        What the StaticCache is for, in words.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("KV cache", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("")
    table.add_row("StaticCache", format_bytes(static_bytes), f"[dim]allocated at once for {shape}")
    table.add_row(
        "DynamicCache",
        format_bytes(dynamic.peak),
        f"[dim]its peak: {format_bytes(dynamic.held)} held, and the old copy of the K or V that is being extended; "
        f"{format_bytes(dynamic.copied)} were copied to grow (counted from its tensors)",
    )
    table.add_row(
        "[bold]VirtualCache",
        f"[bold]{format_bytes(stats.committed_bytes)}",
        f"[dim]committed, {100 * stats.committed_bytes / static_bytes:.2g} % of StaticCache's; "
        f"{format_bytes(stats.used_bytes)} of it hold tokens; it grew in place",
    )
    table.add_row("", "", f"[dim]{format_bytes(stats.reserved_bytes)} of addresses reserved, which is no memory")
    return table
