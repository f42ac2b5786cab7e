"""Decode, ragged decode and prefill, by all contenders, over the same caches."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vtensor.bench.frame import Metric
from vtensor.bench.kernels_case import Case, Heads, Layer, Memory, layout_name, tokens_name
from vtensor.bench.kernels_contenders import Contender, contenders
from vtensor.bench.kernels_timing import Repeated
from vtensor.bench.kernels_variant import KernelVariant, shortened
from vtensor.errors import VTensorError

__all__ = ["METRICS", "Figures", "Sizes", "decode_cases", "prefill_cases", "ragged_cases", "variants_of"]

METRICS = {
    "layer": Metric("us"),
    "bandwidth": Metric("TB/s", higher_is_better=True),
    "rate": Metric("TFLOP/s", higher_is_better=True),
}
_SEED = 5
_PATIENCE_S = 1.0

Figures = Callable[[Case], Mapping[str, float]]


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes
    ----------
    decode : sequence of (int, int)
        Requests, and tokens of each.
    ragged : (int, int, int)
        Requests, tokens of the shortest and of the longest that there may be.
    prefill : sequence of (int, int)
        New tokens of a request, and all of its tokens.
    slices : sequence of int
        Layers of a slice; 0: per_layer.
    """

    heads: Sequence[Heads]
    decode: Sequence[tuple[int, int]]
    ragged: tuple[int, int, int]
    prefill: Sequence[tuple[int, int]]
    slices: Sequence[int]
    prefill_slices: Sequence[int]
    decode_pages: tuple[int, ...]
    prefill_pages: tuple[int, ...]
    least_bytes: int


@dataclass(kw_only=True)
class _Attention(KernelVariant):
    """A contender at a case.

    Parameters
    ----------
    case : Case
    contender : Contender
    hopeless : dict
        Shared by all: contenders that took long to fail, as what cannot compile does, and why. Not tried again.
    """

    case: Case
    contender: Contender
    hopeless: dict[str, str]
    layers: list[Layer] = field(init=False, default_factory=list)
    calls: list[Callable[[], torch.Tensor]] = field(init=False, default_factory=list)
    repeated: Repeated | None = field(init=False, default=None)
    no_graph: str | None = field(init=False, default=None)

    def prepare(self) -> None:
        self.layers = self.case.layers()
        self.calls = [self.contender.make(self.case, layer) for layer in self.layers]

    def compare(self) -> None:
        if reason := self.hopeless.get(self.contender.name):
            raise VTensorError(reason)
        start = time.monotonic()
        try:
            out = self.calls[-1]()
        except Exception as error:
            if time.monotonic() - start > _PATIENCE_S and not self.is_ours:
                self.hopeless[self.contender.name] = f"as {self.name}: {shortened(error)}"
            raise
        if reason := self.case.why_wrong(out, self.layers[-1], self.contender.page_tokens):
            raise VTensorError(reason)

    def get_ready(self) -> None:
        try:
            self.repeated = self.repeat(in_graph=self.contender.in_graph)
        except Exception as error:  # it waits for the host within a graph
            if self.is_ours or not self.contender.in_graph:
                raise
            self.no_graph = shortened(error)
            self.repeated = self.repeat(in_graph=False)

    def sample(self) -> Mapping[str, Sequence[float]]:
        assert self.repeated is not None
        self.details["in_graph"] = self.repeated.is_graph
        if self.no_graph is not None:
            self.details["no_graph"] = self.no_graph
        us = self.repeated.us()
        if self.case.kind == "prefill":
            return {"layer": [us], "rate": [self.case.flops / us / 1e6]}
        return {"layer": [us], "bandwidth": [self.case.bytes_read / us / 1e6]}

    def repeat(self, *, in_graph: bool) -> Repeated:
        """Calls over all layers, ready."""
        repeated = Repeated(
            self.calls,
            self.case.memory.device,
            about_us=self.case.about_us,
            least=1 if self.case.kind == "prefill" else len(self.calls),
            in_graph=in_graph,
        )
        repeated.prepare()
        return repeated

    def drop(self) -> None:
        self.calls, self.layers, self.repeated = [], [], None

    def close(self) -> None:
        self.drop()
        self.case.close()
        self.case.memory.close()


def variants_of(
    case: Case,
    page_tokens: tuple[int, ...],
    hopeless: dict[str, str],
    *,
    ceiling: Callable[[Contender], str | None] = lambda contender: None,
    predicted: Figures = lambda case: {},
    targets: Figures = lambda case: {},
) -> Iterator[_Attention]:
    """All contenders at a case. Figures are for ours, without pages."""
    case.claim()
    for contender in contenders(case, page_tokens):
        parameters: dict[str, Any] = {
            "kind": case.kind,
            "case": case.name,
            "contender": contender.name,
            "version": contender.version,
            "num_q_heads": case.heads.q,
            "num_kv_heads": case.heads.kv,
            "head_dim": case.heads.dim,
            "batch_size": len(case.lens),
            "tokens": case.lens[0] if case.is_equal else list(case.lens),
            "queries": case.queries,
            "layout": layout_name(case.slice_layers),
            "num_layers": case.num_layers,
            "bytes_read": case.bytes_read,
            "flops": case.flops,
        }
        yield _Attention(
            name=f"{case.name}: {contender.name}",
            parameters=parameters,
            ceiling=ceiling(contender),
            predicted=predicted(case) if contender.name == "ours" else {},
            targets=targets(case) if contender.name == "ours" else {},
            is_ours=contender.is_ours,
            case=case,
            contender=contender,
            hopeless=hopeless,
        )


# -- cases --------------------------------------------------------------------------------------------------------


def decode_cases(memory: Memory, sizes: Sizes) -> Iterator[Case]:
    """One new token a request."""
    for heads in sizes.heads:
        for batch, tokens in sizes.decode:
            for slice_layers in sizes.slices:
                where = f"Hkv {heads.kv}, {layout_name(slice_layers)}"
                yield Case(
                    kind="decode",
                    name=f"decode {batch} x {tokens_name(tokens)}, {where}",
                    memory=memory,
                    heads=heads,
                    lens=(tokens,) * batch,
                    slot_tokens=tokens,
                    queries=1,
                    slice_layers=slice_layers,
                    least_bytes=sizes.least_bytes,
                )


def ragged_cases(memory: Memory, sizes: Sizes) -> Iterator[Case]:
    """Lengths that are log-uniform, and equal ones of as many tokens in all."""
    batch, shortest, longest = sizes.ragged
    between = random.Random(_SEED).uniform
    lens = tuple(round(math.exp(between(math.log(shortest), math.log(longest)))) for _ in range(batch))
    equal = (round(sum(lens) / batch),) * batch
    for heads in sizes.heads:
        for how, each in (("equal", equal), ("log-uniform", lens)):
            yield Case(
                kind="ragged",
                name=f"ragged {batch} x {shortest}..{tokens_name(longest)}, Hkv {heads.kv}, {how}",
                memory=memory,
                heads=heads,
                lens=each,
                slot_tokens=longest,
                queries=1,
                slice_layers=0,
                least_bytes=0,
            )


def prefill_cases(memory: Memory, sizes: Sizes) -> Iterator[Case]:
    """A whole prompt of one request, or its last chunk."""
    for heads in sizes.heads:
        for queries, tokens in sizes.prefill:
            for slice_layers in sizes.prefill_slices:
                what = tokens_name(queries)
                if queries != tokens:
                    what = f"chunk {what} of {tokens_name(tokens)}"
                yield Case(
                    kind="prefill",
                    name=f"prefill {what}, Hkv {heads.kv}, {layout_name(slice_layers)}",
                    memory=memory,
                    heads=heads,
                    lens=(tokens,),
                    slot_tokens=tokens,
                    queries=queries,
                    slice_layers=slice_layers,
                    least_bytes=0,
                )
