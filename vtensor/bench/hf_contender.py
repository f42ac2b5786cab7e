"""Contender of `vtensor bench hf`: what all ways to decode have in common.

What a contender does for a token is a user's loop: a forward, and the most likely token, which stays on the device.
All begin a turn with the same K and V of the prompts. The cache of one that is neither compiled nor captured lives for
a turn; of the others it stays until the end, as they are made for its addresses.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vtensor.bench.frame import Metric
from vtensor.bench.hf_case import Case
from vtensor.bench.hf_memory import Watch, cache_bytes, mapped_bytes
from vtensor.bench.hf_model import free_memory
from vtensor.bench.kernels_variant import KernelVariant, shortened
from vtensor.errors import VTensorError
from vtensor.integrations.transformers import VirtualCache
from vtensor.units import MIB

__all__ = ["METRICS", "Contender", "Turn"]

METRICS = {
    "token": Metric("ms"),
    "prefill": Metric("ms"),
    "cache": Metric("MiB"),
    "peak, decode": Metric("MiB"),
    "peak, prefill": Metric("MiB"),
    "device": Metric("MiB"),
}
_SHORT_PROMPTS = 8192  # tokens in all, of prompts that are computed several times in each round
_SHORT_PASSES = 4
_LONG_ROUNDS = 2


@dataclass(frozen=True)
class Turn:
    """What a contender does in a round: samples, tokens that each takes, and tokens before them that do not count."""

    samples: int
    tokens: int
    warm_tokens: int = 2


@dataclass(kw_only=True)
class Contender(KernelVariant):
    """A way to decode.

    Parameters
    ----------
    case : Case
    attention : str
        The model's, as it is named in transformers.
    turn : Turn
    prefills : bool
        Whether it is to compute the prompts as well.
    is_compiled : bool
    is_kept : bool
        Whether its cache stays from turn to turn.
    """

    case: Case
    attention: str
    turn: Turn
    prefills: bool = False
    is_compiled: bool = False
    is_kept: bool = False
    cache: Any = field(init=False, default=None)
    _memory: dict[str, float] = field(init=False, default_factory=dict)
    _facts: dict[str, Any] = field(init=False, default_factory=dict)
    _num_rounds: int = field(init=False, default=0)

    @abstractmethod
    def make_cache(self) -> Any:
        """An empty cache."""

    @abstractmethod
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, vocabulary] behind [B, 1]; maybe in memory that the next call writes to."""

    def open(self) -> None:
        """Have the cache hold the prompts, and nothing else."""
        self.cache = self.make_cache()
        self.case.reference.fill(self.cache)

    @property
    def model(self) -> Any:
        """The model, with its attention."""
        return self.case.model.with_attention(self.attention)

    def prepare(self) -> None:
        """Nothing: what it takes would be in the way of the others."""

    def get_ready(self) -> None:
        """Nothing: the check has paid what is paid once."""

    @torch.no_grad()
    def compare(self) -> None:
        """Compare logits, step by step, behind the reference's tokens; and see what memory that takes."""
        reference, device = self.case.reference, self.case.model.device
        if self.prefills:
            watch = Watch(device)
            self._compare("of the prompt", self._prefill(), reference.prompt_logits, reference.prompt_tolerance)
            self._memory |= watch.peak("peak, prefill", mapped_bytes(self.cache))
            self.drop()
        tolerance = reference.compiled_tolerance if self.is_compiled else reference.tolerance
        watch, start, num_equal = Watch(device), time.monotonic(), 0
        self.open()
        watch.forget_peak()
        for number, (tokens, expected) in enumerate(zip(reference.tokens, reference.logits, strict=True)):
            found = self.logits(tokens).float()
            self._compare(f"of step {number + 1}", found, expected, tolerance)
            num_equal += int((found.argmax(-1) == expected.argmax(-1)).sum())
        self._memory |= {"cache": cache_bytes(self.cache) / MIB}
        self._memory |= watch.peak("peak, decode", mapped_bytes(self.cache)) | watch.device()
        self._facts |= {
            "ready_s": round(time.monotonic() - start, 2),
            "tolerance": tolerance,
            "equal_tokens": f"{num_equal} of {len(reference.tokens) * self.case.batch}",
        }
        self._set_memory_target(len(reference.tokens))
        if not self.is_kept:
            self.drop()

    @torch.no_grad()
    def sample(self) -> Mapping[str, Sequence[float]]:
        """Decode a few tokens; before that, in some rounds, compute the prompts."""
        self._num_rounds += 1
        samples: dict[str, Sequence[float]] = {}
        try:
            if self.prefills and (times := self._time_prefill()):
                samples["prefill"] = times
            else:
                self.open()
            samples["token"] = self._time_tokens()
        except Exception as error:  # there is less memory than there was in the check
            self.failed = self.details["failed"] = shortened(error)
        if self.failed is not None or not self.is_kept:
            self.drop()
        self.details |= self._facts
        samples |= {name: [value] for name, value in self._memory.items()}
        self._memory = {}
        return samples

    def drop(self) -> None:
        """Give the cache back."""
        cache, self.cache = self.cache, None
        if isinstance(cache, VirtualCache):
            cache.close()
        del cache
        free_memory(self.case.model.device)

    def close(self) -> None:
        """See `KernelVariant.close`."""
        self.drop()
        self.case.close()

    def _compare(self, what: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
        off = float((found.float() - expected).abs().max())
        if not off <= tolerance:  # nan is not
            raise VTensorError(f"logits {what} are off by {off:.3g}, where {tolerance:.3g} is allowed")
        self._facts["off"] = max(off, self._facts.get("off", 0.0))

    def _set_memory_target(self, num_more: int) -> None:
        """What may be mapped: the tokens, the one ahead, and a page group of each slice and request."""
        if isinstance(self.cache, VirtualCache):
            manager, case = self.cache.manager, self.case
            tokens = case.batch * (case.context + num_more + 1) * manager.config.bytes_per_token
            rest = case.batch * len(manager.config.buffers) * manager.pool.page_group_bytes
            self.targets = {**self.targets, "cache": round((tokens + rest) / MIB, 1)}

    def _prefill(self) -> torch.Tensor:
        self.cache = self.make_cache()
        return self.case.forward(self.model, self.cache, self.case.prompt)

    def _time_prefill(self) -> list[float]:
        """Samples in ms, after one that does not count where prompts are short. The cache then holds the prompts."""
        is_short = self.case.batch * self.case.context <= _SHORT_PROMPTS
        if not is_short and self._num_rounds > _LONG_ROUNDS:
            return []
        model, prompt, times = self.model, self.case.prompt, []
        for _ in range(_SHORT_PASSES if is_short else 1):
            if isinstance(self.cache, VirtualCache):
                self.cache.close()
            self.cache = None
            self._wait()
            start = time.perf_counter()
            self.cache = self.make_cache()
            self.case.forward(model, self.cache, prompt)
            self._wait()
            times.append(1000 * (time.perf_counter() - start))
        return times[1:] if is_short else times

    def _time_tokens(self) -> list[float]:
        """Samples in ms a token."""
        tokens, times = self.case.reference.tokens[0], []
        for number in range(self.turn.samples + 1):
            num_tokens = self.turn.tokens if number else self.turn.warm_tokens
            self._wait()
            start = time.perf_counter()
            for _ in range(num_tokens):
                tokens = self.logits(tokens).argmax(-1, keepdim=True)
            self._wait()
            times.append(1000 * (time.perf_counter() - start) / num_tokens)
        return times[1:]

    def _wait(self) -> None:
        if self.case.model.device != "cpu":
            torch.cuda.synchronize(self.case.model.device)
