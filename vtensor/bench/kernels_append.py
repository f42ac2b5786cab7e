"""Appending: a new row of K and V of each request into the cache, for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vtensor.bench.frame import Metric, Variant
from vtensor.bench.kernels_case import Heads
from vtensor.bench.kernels_timing import Repeated
from vtensor.bench.kernels_variant import KernelVariant
from vtensor.errors import VTensorError
from vtensor.triton_kernels.append import append_kv

__all__ = ["METRICS", "append_variants"]

METRICS = {"append": Metric("us"), "of its bytes": Metric("x")}

_NUM_SETS = 4  # of new rows, taken in turn: one would stay in the L2 cache
_TERABYTES_A_SECOND = 4.2
_SEED = 3


@dataclass(kw_only=True, eq=False)
class _Rows:
    """What all variants append, and where to."""

    device: str
    dtype: torch.dtype
    heads: Heads
    batch_size: int
    num_layers: int
    slot_tokens: int
    _tensors: dict[str, torch.Tensor] = field(init=False, default_factory=dict)

    @property
    def bytes_moved(self) -> int:
        """Read and written."""
        rows = self.num_layers * self.batch_size
        return 2 * rows * self.heads.kv * 2 * self.heads.dim * self.dtype.itemsize

    @property
    def least_us(self) -> float:
        """What the bytes take at 4.2 TB/s."""
        return self.bytes_moved / _TERABYTES_A_SECOND / 1e6

    def new(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New rows, [N, B, Hkv, D] each."""
        shape = 2, self.num_layers, self.batch_size, self.heads.kv, self.heads.dim

        def normal() -> torch.Tensor:
            generator = torch.Generator(self.device).manual_seed(_SEED + number)
            return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=generator)

        k, v = self.once(f"rows {number}", normal)
        return k, v

    def seq_lens(self, number: int) -> torch.Tensor:
        """[B] int32, other ones for each set."""

        def drawn() -> torch.Tensor:
            generator = torch.Generator("cpu").manual_seed(_SEED + number)
            lens = torch.randint(1, self.slot_tokens + 1, (self.batch_size,), generator=generator)
            return lens.to(self.device, torch.int32)

        return self.once(f"lens {number}", drawn)

    def caches(self, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all layers, [N, slots, L, Hkv, D] each, of one memory in each layout."""
        n, slots, tokens, heads, dim = (
            self.num_layers, self.batch_size, self.slot_tokens, self.heads.kv, self.heads.dim,
        )  # fmt: skip
        flat = self.once(
            "cache", lambda: torch.zeros(2 * n * slots * tokens * heads * dim, dtype=self.dtype, device=self.device)
        )
        if layout == "per_layer":
            k, v = flat.view(n, 2, slots, tokens, heads, dim).unbind(1)
        else:
            k, v = flat.view(slots, tokens, n, 2, heads, dim).permute(3, 2, 0, 1, 4, 5)
        return k, v

    def once(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor, made when it is first asked for."""
        if name not in self._tensors:
            self._tensors[name] = make()
        return self._tensors[name]

    def close(self) -> None:
        """Drop all tensors."""
        self._tensors.clear()


_Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], Any]]


@dataclass(kw_only=True)
class _Append(KernelVariant):
    rows: _Rows
    layout: str
    way: _Way
    calls: list[Callable[[], Any]] = field(init=False, default_factory=list)
    repeated: Repeated | None = field(init=False, default=None)

    def prepare(self) -> None:
        k_cache, v_cache = self.rows.caches(self.layout)
        self.calls = [
            self.way(*self.rows.new(number), k_cache, v_cache, self.rows.seq_lens(number))
            for number in range(_NUM_SETS)
        ]

    def compare(self) -> None:
        request = torch.arange(self.rows.batch_size, device=self.rows.device)
        caches = self.rows.caches(self.layout)
        for number in range(_NUM_SETS):
            position = self.rows.seq_lens(number).long() - 1
            for cache in caches:
                cache[:, request, position] = 0
            self.calls[number]()
            for new, cache in zip(self.rows.new(number), caches, strict=True):
                if not torch.equal(cache[:, request, position], new):
                    raise VTensorError("the cache does not hold the new rows")

    def get_ready(self) -> None:
        self.repeated = Repeated(self.calls, self.rows.device, about_us=self.rows.least_us, least=_NUM_SETS)
        self.repeated.prepare()

    def sample(self) -> Mapping[str, Sequence[float]]:
        assert self.repeated is not None
        us = self.repeated.us()
        self.details["bytes_at_4.2_tb_per_s_us"] = round(self.rows.least_us, 3)
        return {"append": [us], "of its bytes": [us / self.rows.least_us]}

    def drop(self) -> None:
        self.calls, self.repeated = [], None

    def close(self) -> None:
        self.drop()
        self.rows.close()


def append_variants(
    device: str, dtype: torch.dtype, heads: Heads, *, batch_size: int, num_layers: int, slot_tokens: int
) -> Iterator[Variant]:
    """Ways to append a row of each request to each layer."""
    rows = _Rows(
        device=device,
        dtype=dtype,
        heads=heads,
        batch_size=batch_size,
        num_layers=num_layers,
        slot_tokens=slot_tokens,
    )
    ways: dict[str, tuple[str, _Way]] = {
        "one launch, sliced": ("sliced", _one_launch),
        "one launch, per_layer": ("per_layer", _one_launch),
        "a launch a layer, sliced": ("sliced", _launch_a_layer),
        "a launch a layer, per_layer": ("per_layer", _launch_a_layer),
        "index_put, all layers, sliced": ("sliced", _put_all),
        "index_put, a layer each, per_layer": ("per_layer", _put_each),
    }
    for name, (layout, way) in ways.items():
        is_goal = name.startswith("one launch")
        yield _Append(
            name=f"append {batch_size}, {num_layers} layers: {name}",
            parameters={
                "kind": "append",
                "case": f"append {batch_size}, {num_layers} layers",
                "contender": name,
                "layout": layout,
                "batch_size": batch_size,
                "num_layers": num_layers,
                "num_kv_heads": heads.kv,
                "head_dim": heads.dim,
                "bytes_moved": rows.bytes_moved,
            },
            predicted={"of its bytes": 1.3} if is_goal else {},
            targets={"of its bytes": 1.2} if is_goal else {},
            is_ours=way in (_one_launch, _launch_a_layer),
            rows=rows,
            layout=layout,
            way=way,
        )


def _one_launch(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seq_lens: torch.Tensor
) -> Callable[[], Any]:
    return lambda: append_kv(k, v, k_cache, v_cache, seq_lens)


def _launch_a_layer(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seq_lens: torch.Tensor
) -> Callable[[], Any]:
    layers = [(*each, seq_lens) for each in zip(k, v, k_cache, v_cache, strict=True)]

    def append() -> None:
        for each in layers:
            append_kv(*each)

    return append


def _put_all(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seq_lens: torch.Tensor
) -> Callable[[], Any]:
    # [slots, L, N, Hkv, D]: what is indexed comes first.
    where = torch.arange(len(seq_lens), device=k.device), seq_lens.long() - 1
    pairs = [(cache.permute(1, 2, 0, 3, 4), new.transpose(0, 1)) for cache, new in ((k_cache, k), (v_cache, v))]
    return lambda: [cache.index_put_(where, new) for cache, new in pairs]


def _put_each(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seq_lens: torch.Tensor
) -> Callable[[], Any]:
    where = torch.arange(len(seq_lens), device=k.device), seq_lens.long() - 1
    pairs = [*zip(k_cache, k, strict=True), *zip(v_cache, v, strict=True)]
    return lambda: [cache.index_put_(where, new) for cache, new in pairs]
