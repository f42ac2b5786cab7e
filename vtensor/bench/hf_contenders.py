"""Contenders of `vtensor bench hf`: a model's decode and prefill over transformers' caches and over ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from vtensor.bench.hf_case import Case
from vtensor.bench.hf_contender import Contender, Turn
from vtensor.integrations.attention_function import NAME, TAKES_POSITIONS
from vtensor.integrations.transformers import DecodeStep, VirtualCache

__all__ = ["CompiledStatic", "Eager", "Step", "contenders"]

_MOST_STATIC_MASK = 1 << 28  # of queries and keys: what StaticCache's prefill, which has such a mask, is timed with


@dataclass(kw_only=True)
class Eager(Contender):
    """A forward of the model for each token.

    Parameters
    ----------
    make : callable
        An empty cache for a case.
    """

    make: Callable[[Case], Any]

    def make_cache(self) -> Any:
        """See `Contender.make_cache`."""
        return self.make(self.case)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Contender.logits`."""
        return self.case.forward(self.model, self.cache, tokens)


@dataclass(kw_only=True)
class CompiledStatic(Contender):
    """StaticCache and the forward compiled, in CUDA graphs by torch.compile's own doing."""

    max_cache_len: int
    is_kept: bool = True
    is_compiled: bool = True
    is_ours: bool = False
    _call: Any = field(init=False, default=None)
    _positions: torch.Tensor | None = field(init=False, default=None)

    def make_cache(self) -> Any:
        """See `Contender.make_cache`."""
        return StaticCache(config=self.case.model.config, max_cache_len=self.max_cache_len)

    def open(self) -> None:
        """See `Contender.open`."""
        if self.cache is None:
            self.cache = self.make_cache()
            self._call = torch.compile(self.model.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)
            shape = self.case.batch, 1
            self._positions = torch.zeros(shape, dtype=torch.long, device=self.case.model.device)
        else:
            self.cache.reset()
        self.case.reference.fill(self.cache)
        assert self._positions is not None
        self._positions.fill_(self.case.context)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Contender.logits`."""
        assert self._positions is not None
        self.model  # noqa: B018 - the attention that it is compiled with
        extra: dict[str, Any] = {"cache_position": self._positions[0]} if TAKES_POSITIONS else {}
        extra[self.case.model.cache_argument] = self.cache
        begin: Any = torch.compiler.cudagraph_mark_step_begin
        begin()
        found = self._call(input_ids=tokens, position_ids=self._positions, use_cache=True, **extra)
        self._positions.add_(1)
        logits: torch.Tensor = found.logits[:, -1]
        return logits

    def drop(self) -> None:
        """See `Contender.drop`."""
        self._call = self._positions = None
        super().drop()


@dataclass(kw_only=True)
class Step(Contender):
    """`DecodeStep` over a VirtualCache: on a GPU one CUDA graph."""

    max_cache_len: int
    attention: str = NAME
    is_kept: bool = True
    _step: DecodeStep | None = field(init=False, default=None)

    def make_cache(self) -> Any:
        """See `Contender.make_cache`."""
        return VirtualCache(self.case.model.config, self.max_cache_len)

    def open(self) -> None:
        """See `Contender.open`."""
        if self.cache is None:
            super().open()
            cache: Any = self.cache
            self._step = DecodeStep(self.model, cache, compile=self.is_compiled)
        else:
            self.cache.crop(self.case.context - self.cache.get_seq_length())

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Contender.logits`."""
        assert self._step is not None
        self.model  # noqa: B018 - the attention that it is compiled with
        return self._step(tokens)[:, -1]

    def drop(self) -> None:
        """See `Contender.drop`."""
        self._step = None
        super().drop()


def contenders(
    case: Case,
    turn: Turn,
    *,
    max_cache_len: int,
    static_lens: Sequence[int],
    compiled_lens: Sequence[int],
    figures: Mapping[str, Mapping[str, Any]],
) -> list[Contender]:
    """All contenders at a case.

    Parameters
    ----------
    case : Case
    turn : Turn
    max_cache_len : int
        Of ours.
    static_lens, compiled_lens : sequence of int
        `max_cache_len` of each StaticCache, and of each that is compiled. Nothing is compiled unless the case says so.
    figures : mapping
        By the contender's name: `predicted` and `targets`.
    """

    def dynamic(case: Case) -> Any:
        return DynamicCache(config=case.model.config)

    def virtual(case: Case) -> VirtualCache:
        return VirtualCache(case.model.config, max_cache_len)

    def static(length: int) -> Callable[[Case], Any]:
        return lambda case: StaticCache(config=case.model.config, max_cache_len=length)

    def described(name: str, attention: str, length: int | None, is_compiled: bool = False) -> dict[str, Any]:
        case.claim()
        parameters = {
            "model": case.model.name,
            "case": f"{case.model.name}, {case.name}",
            "contender": name,
            "attention": attention,
            "batch": case.batch,
            "context": case.context,
            "max_cache_len": length,
            "compiled": is_compiled,
            "token_bytes": case.token_bytes,
        }
        return {
            "name": f"{case.model.name}, {case.name}: {name}",
            "parameters": parameters,
            "case": case,
            "attention": attention,
            "turn": turn,
            "is_compiled": is_compiled,
            **figures.get(name, {}),
        }

    found: list[Contender] = [
        Eager(make=dynamic, is_ours=False, prefills=True, **described("DynamicCache", "sdpa", None))
    ]
    for length in static_lens:
        prefills = case.context * length <= _MOST_STATIC_MASK
        how = described(f"StaticCache {length:,}", "sdpa", length)
        found.append(Eager(make=static(length), is_ours=False, prefills=prefills, **how))
    for attention in ("sdpa", NAME):
        how = described(f"VirtualCache, {attention}", attention, max_cache_len)
        found.append(Eager(make=virtual, prefills=True, **how))
    found.append(Step(max_cache_len=max_cache_len, **described("DecodeStep", NAME, max_cache_len)))
    if case.is_compiled:
        for length in compiled_lens:
            how = described(f"StaticCache {length:,}, compiled", "sdpa", length, is_compiled=True)
            found.append(CompiledStatic(max_cache_len=length, **how))
        how = described("DecodeStep, compiled", NAME, max_cache_len, is_compiled=True)
        found.append(Step(max_cache_len=max_cache_len, **how))
    return found
