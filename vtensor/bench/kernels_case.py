"""Case: one attention over a cache, whose tensors all contenders read, and what must come out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from vtensor.bench.paged import PagedCache
from vtensor.triton_kernels.arguments import AttentionArguments, check_attention
from vtensor.triton_kernels.reference import attend

__all__ = ["Case", "Heads", "Layer", "Memory", "layout_name", "tokens_name"]

_PROBED_QUERIES = 16
_SEED = 11


@dataclass(frozen=True)
class Heads:
    """Heads of queries and of keys, and their width."""

    q: int
    kv: int
    dim: int


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's cache: [slots, L, Hkv, D]."""

    k: torch.Tensor
    v: torch.Tensor


class Memory:
    """Normally distributed numbers, of which all caches are views: those of several cases overlap.

    Parameters
    ----------
    device : str
    dtype : torch.dtype
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._needed = 0
        self._flat: torch.Tensor | None = None

    def need(self, num_elements: int) -> None:
        """There are to be so many, at least."""
        self._needed = max(self._needed, num_elements)

    @property
    def flat(self) -> torch.Tensor:
        """All of it; made when it is first asked for."""
        if self._flat is None:
            generator = torch.Generator(self.device).manual_seed(_SEED)
            self._flat = torch.empty(self._needed, dtype=self.dtype, device=self.device).normal_(generator=generator)
        return self._flat

    def close(self) -> None:
        """Drop it."""
        self._flat = None


@dataclass(kw_only=True, eq=False)
class Case:
    """One attention over a cache.

    Parameters
    ----------
    kind : {"decode", "ragged", "prefill"}
    name : str
        Of all variants that do it, a contender's name apart.
    memory : Memory
    heads : Heads
    lens : tuple of int
        Tokens of each request, the new ones included.
    slot_tokens : int
        What a slot may hold.
    queries : int
        New tokens of each request; causal.
    slice_layers : int
        Layers of a slice; 0: each layer has memory of its own.
    least_bytes : int
        Of all caches that are cycled over.
    """

    kind: Literal["decode", "ragged", "prefill"]
    name: str
    memory: Memory
    heads: Heads
    lens: tuple[int, ...]
    slot_tokens: int
    queries: int
    slice_layers: int
    least_bytes: int
    _expected: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    _tensors: dict[str, torch.Tensor] = field(init=False, default_factory=dict)

    # -- sizes ------------------------------------------------------------------------------------------------------

    @property
    def layer_elements(self) -> int:
        """Elements of a layer's K and V."""
        return 2 * len(self.lens) * self.slot_tokens * self.heads.kv * self.heads.dim

    @property
    def num_layers(self) -> int:
        """Layers that are cycled over: whole slices, and two at least."""
        unit = max(self.slice_layers, 1)
        layers = max(2, math.ceil(self.least_bytes / (self.layer_elements * self.memory.dtype.itemsize)))
        return math.ceil(layers / unit) * unit

    @property
    def cache_bytes(self) -> int:
        """Bytes of all layers."""
        return self.num_layers * self.layer_elements * self.memory.dtype.itemsize

    @property
    def bytes_read(self) -> int:
        """Of K and V, by one attention."""
        return 2 * sum(self.lens) * self.heads.kv * self.heads.dim * self.memory.dtype.itemsize

    @property
    def flops(self) -> int:
        """Of one attention, what the mask hides left out."""
        n = self.queries
        seen = sum(n * (length - n) + n * (n + 1) // 2 for length in self.lens)
        return 4 * self.heads.q * self.heads.dim * seen

    @property
    def is_equal(self) -> bool:
        """Whether all requests are as long."""
        return len({*self.lens}) == 1

    @property
    def about_us(self) -> float:
        """About how long one takes on a large GPU."""
        return max(self.bytes_read / 4.2e6 + 5, self.flops / 6e8)

    # -- tensors ----------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Tell the memory how much it takes; before anything is asked for."""
        self.memory.need(self.num_layers * self.layer_elements)

    def layers(self) -> list[Layer]:
        """The caches."""
        slots, heads, flat = len(self.lens), self.heads, self.memory.flat
        unit, size = max(self.slice_layers, 1), self.layer_elements
        found = []
        for first in range(0, self.num_layers, unit):
            part = flat[first * size : (first + unit) * size]
            if self.slice_layers:  # a token's row: layer 0: K V | layer 1: K V | ...
                rows = part.view(slots, self.slot_tokens, unit, 2, heads.kv, heads.dim)
                found += [Layer(rows[:, :, i, 0], rows[:, :, i, 1]) for i in range(unit)]
            else:
                found.append(Layer(*part.view(2, slots, self.slot_tokens, heads.kv, heads.dim)))
        return found

    def pages(self, layer: Layer, page_tokens: int) -> PagedCache:
        """A layer's memory as pages, those of each request anywhere."""
        slots, width = len(self.lens), self.slot_tokens // page_tokens

        def table() -> torch.Tensor:
            order = torch.randperm(slots * width, generator=torch.Generator("cpu").manual_seed(_SEED))
            return order.to(self.memory.device, torch.int32).view(slots, width)

        k, v = (x.view(slots * width, page_tokens, *x.shape[2:]) for x in (layer.k, layer.v))
        return PagedCache(k, v, self._once(f"table of {page_tokens}", table))

    @property
    def q(self) -> torch.Tensor:
        """[T, Hq, D]; for decode [B, Hq, D] is the same."""
        shape = len(self.lens) * self.queries, self.heads.q, self.heads.dim

        def normal() -> torch.Tensor:
            generator = torch.Generator(self.memory.device).manual_seed(_SEED)
            empty = torch.empty(shape, dtype=self.memory.dtype, device=self.memory.device)
            return empty.normal_(generator=generator)

        return self._once("q", normal)

    @property
    def seq_lens(self) -> torch.Tensor:
        """[B] int32."""
        return self._once("seq_lens", lambda: self._int32(self.lens))

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """[B + 1] int32."""
        rows = range(0, (len(self.lens) + 1) * self.queries, self.queries)
        return self._once("cu_seqlens", lambda: self._int32(rows))

    def call(self, layer: Layer, *, ragged: bool = False) -> AttentionArguments:
        """Its arguments: q [B, Sq, Hq, D], or (`ragged`) [T, Hq, D] with cu_seqlens."""
        if ragged:
            return check_attention(self.q, layer.k, layer.v, self.seq_lens, None, self.cu_seqlens)
        q = self.q.view(len(self.lens), self.queries, *self.q.shape[1:])
        return check_attention(q, layer.k, layer.v, self.seq_lens)

    def close(self) -> None:
        """Drop all tensors."""
        self._tensors.clear()
        self._expected.clear()

    def _once(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._tensors:
            self._tensors[name] = make()
        return self._tensors[name]

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.memory.device)

    # -- what must come out -----------------------------------------------------------------------------------------

    def why_wrong(self, out: torch.Tensor, layer: Layer, page_tokens: int = 0) -> str | None:
        """Compare an output with the reference, for some queries of the first request and the last one.

        Returns
        -------
        str or None
            What is wrong.
        """
        rows = out.reshape(-1, *out.shape[-2:])
        if rows.shape != self.q.shape:
            return f"the output has shape {list(out.shape)}"
        probed = torch.cat([rows[place] for place, _, _ in self._probes()]).float()
        if page_tokens not in self._expected:
            self._expected[page_tokens] = self._reference(layer, page_tokens)
        expected = self._expected[page_tokens]
        tolerance = (0.03 if self.memory.dtype.itemsize == 2 else 1e-3) * float(expected.abs().max())
        error = float((probed - expected).abs().max())
        return None if error <= tolerance else f"it is off by {error:.3g}, of which {tolerance:.3g} would do"

    def _reference(self, layer: Layer, page_tokens: int) -> torch.Tensor:
        found = []
        for place, request, length in self._probes():
            k, v, slot = layer.k, layer.v, request
            if page_tokens:
                (k, v), slot = self.pages(layer, page_tokens).contiguous(slice(request, request + 1)), 0
            q = self.q[place].unsqueeze(0)
            call = check_attention(q, k, v, self._int32([length]), self._int32([slot]))
            found.append(attend(call)[0].flatten(0, 1).float())
        return torch.cat(found)

    def _probes(self) -> Iterator[tuple[slice, int, int]]:
        """Rows of q, their request, and its length when the last of them was the last token."""
        count = min(self.queries, _PROBED_QUERIES)
        for request in sorted({0, len(self.lens) - 1}):
            length, begin = self.lens[request], request * self.queries
            for skipped in sorted({0, self.queries - count}):
                place = slice(begin + skipped, begin + skipped + count)
                yield place, request, length - self.queries + skipped + count


def tokens_name(tokens: int) -> str:
    """Tokens in short: 16k for 16,384."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def layout_name(slice_layers: int) -> str:
    """A layout as it is called here."""
    return f"sliced {slice_layers}" if slice_layers else "per_layer"
