"""Launch overhead: the caller's time of calls outside of CUDA graphs, with so little to do that the device waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vtensor.attention_backends import attention
from vtensor.bench.frame import Metric, Variant, timed_us
from vtensor.bench.kernels_case import Heads
from vtensor.bench.kernels_variant import KernelVariant
from vtensor.errors import VTensorError
from vtensor.triton_kernels.append import append_kv
from vtensor.triton_kernels.arguments import check_attention
from vtensor.triton_kernels.attention import decode_attention, prefill_attention
from vtensor.triton_kernels.reference import attend

__all__ = ["METRICS", "overhead_variants"]

METRICS = {"call": Metric("us")}

_BATCH, _TOKENS = 4, 32
_SEED = 3


@dataclass(kw_only=True)
class _Overhead(KernelVariant):
    device: str
    dtype: torch.dtype
    heads: Heads
    num_calls: int
    what: str
    call: Callable[[], Any] = field(init=False)
    found: Callable[[], torch.Tensor] = field(init=False)
    expected: Callable[[], torch.Tensor] = field(init=False)

    def prepare(self) -> None:
        generator = torch.Generator(self.device).manual_seed(_SEED)
        heads = self.heads

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=generator)

        k, v = (normal(_BATCH, _TOKENS, heads.kv, heads.dim) for _ in range(2))
        q = normal(_BATCH, heads.q, heads.dim)
        lens = torch.full((_BATCH,), _TOKENS, dtype=torch.int32, device=self.device)
        rows = torch.arange(_BATCH + 1, dtype=torch.int32, device=self.device)
        new = normal(2, _BATCH, heads.kv, heads.dim)
        new_k, new_v = new
        calls: dict[str, Callable[[], Any]] = {
            "decode_attention": lambda: decode_attention(q, k, v, lens),
            "prefill_attention": lambda: prefill_attention(q, k, v, rows, lens),
            "append_kv": lambda: append_kv(new_k, new_v, k, v, lens),
            "vtensor.attention": lambda: attention(q, k, v, lens),
            "vtensor.attention, triton": lambda: attention(q, k, v, lens, backend="triton"),
        }
        self.call = calls[self.what]
        if self.what == "append_kv":
            self.expected = lambda: new
            self.found = lambda: torch.stack([cache[:, -1] for cache in (k, v)])
        else:
            self.found = self.call
            self.expected = lambda: attend(check_attention(q, k, v, lens))[0].squeeze(1)

    def compare(self) -> None:
        self.call()
        found, expected = self.found().float(), self.expected().float()
        if not float((found - expected).abs().max()) <= 0.03 * float(expected.abs().max()):
            raise VTensorError("what comes out is wrong")

    def get_ready(self) -> None:
        for _ in range(2):
            self.sample()

    def sample(self) -> Mapping[str, Sequence[float]]:
        self.finish()
        _, spent_us = timed_us(self.calls)
        self.finish()
        return {"call": [spent_us / self.num_calls]}

    def calls(self) -> None:
        """One after another, without a wait for the device."""
        call = self.call
        for _ in range(self.num_calls):
            call()

    def finish(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def drop(self) -> None:
        for name in ("call", "found", "expected"):
            self.__dict__.pop(name, None)


def overhead_variants(device: str, dtype: torch.dtype, heads: Heads, *, num_calls: int) -> Iterator[Variant]:
    """Our functions, by name."""
    names = ["decode_attention", "prefill_attention", "append_kv", "vtensor.attention"]
    if device != "cpu":
        names.append("vtensor.attention, triton")
    for name in names:
        yield _Overhead(
            name=f"overhead: {name}",
            parameters={"kind": "overhead", "case": "overhead", "contender": name, "batch_size": _BATCH},
            predicted={"call": 13.0},
            targets={"call": 15.0},
            device=device,
            dtype=dtype,
            heads=heads,
            num_calls=num_calls,
            what=name,
        )
