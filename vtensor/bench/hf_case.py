"""Cases of `vtensor bench hf`: prompts of a model, what DynamicCache makes of them, and how far others may be off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from vtensor.bench.hf_model import Model, free_memory, in_float32
from vtensor.bench.kernels_variant import shortened
from vtensor.errors import VTensorError
from vtensor.integrations.attention_function import TAKES_POSITIONS

__all__ = ["CHECKED_TOKENS", "Case", "Reference"]

CHECKED_TOKENS = 4
_SEED = 3
_MOST_SCORES = 1 << 29  # of attention that holds them all, at a time
_SLACK = 1e-5


@dataclass(frozen=True)
class Reference:
    """What DynamicCache with transformers' own "sdpa" makes of a case's prompts.

    Attributes
    ----------
    keys, values : sequence of Tensor
        By layer, [B, Hkv, tokens, D]: of the prompts.
    prompt_logits : Tensor
        [B, vocabulary], float32: of the prompts' last tokens.
    tokens : sequence of Tensor
        [B, 1] each: the most likely ones, which are the input of the steps.
    logits : sequence of Tensor
        [B, vocabulary], float32: of each step.
    prompt_tolerance, tolerance, compiled_tolerance : float
        How far logits may be off: of the prompts, of steps, and of steps that are compiled.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    prompt_logits: torch.Tensor
    tokens: Sequence[torch.Tensor]
    logits: Sequence[torch.Tensor]
    prompt_tolerance: float
    tolerance: float
    compiled_tolerance: float

    def fill(self, cache: Any) -> None:
        """Put the prompts' K and V into an empty cache, as a forward would."""
        _fill(cache, self.keys, self.values)


@dataclass(eq=False, kw_only=True)
class Case:
    """So many prompts of so many tokens.

    Parameters
    ----------
    model : Model
    name : str
    batch, context : int
        Prompts, and tokens of each.
    is_compiled : bool
        Whether contenders are, so that there must be a tolerance for them.

    Notes
    -----
    Logits may be off by twice what another stock way to compute them is off by: that is "eager" attention. What
    is compiled rounds less on its way; there float32 between the weights is another such way.
    """

    model: Model
    name: str
    batch: int
    context: int
    is_compiled: bool = False
    num_users: int = field(default=0, init=False)
    _reference: Reference | None = field(default=None, init=False)
    _failed: str | None = field(default=None, init=False)

    @property
    def prompt(self) -> torch.Tensor:
        """[B, context]."""
        generator = torch.Generator().manual_seed(_SEED)
        shape = self.batch, self.context
        vocabulary: int = self.model.config.vocab_size
        return torch.randint(vocabulary, shape, generator=generator).to(self.model.device)

    @property
    def token_bytes(self) -> int:
        """K and V of the prompts."""
        return self.batch * self.context * self.model.bytes_per_token

    @property
    def reference(self) -> Reference:
        """What is right; computed once.

        Raises
        ------
        VTensorError
            It cannot be computed.
        """
        if self._failed is not None:
            raise VTensorError(self._failed)
        if self._reference is None:
            try:
                self._reference = self._compute()
            except Exception as error:  # memory, mostly
                self._failed = f"there is nothing to compare with: {shortened(error)}"
                raise VTensorError(self._failed) from error
        return self._reference

    def claim(self) -> None:
        """A variant will need it."""
        if not self.num_users:
            self.model.claim(self)
        self.num_users += 1

    def close(self) -> None:
        """A variant needs it no more; the last one ends it."""
        self.num_users -= 1
        if not self.num_users:
            self._reference = None
            if self.is_compiled:
                _reset_compiler()
            self.model.release(self)

    def forward(self, model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocabulary] of the last of some tokens, [B, n]."""
        found = model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{self.model.cache_argument: cache})
        logits: torch.Tensor = found.logits[:, -1]
        return logits

    @torch.no_grad()
    def _compute(self) -> Reference:
        model, prompt = self.model.with_attention("sdpa"), self.prompt
        cache = DynamicCache(config=self.model.config)
        prompt_logits = self.forward(model, cache, prompt).float()
        keys, values = zip(*((layer.keys, layer.values) for layer in cache.layers), strict=True)
        tokens, logits = [prompt_logits.argmax(-1, keepdim=True)], []
        for _ in range(CHECKED_TOKENS):
            logits.append(self.forward(model, cache, tokens[-1]).float())
            tokens.append(logits[-1].argmax(-1, keepdim=True))
        del cache, tokens[-1]
        off = _most_off(self._steps("eager", keys, values, tokens), logits)
        compiled_off = off
        if self.is_compiled:
            compiled_off = max(off, _most_off(self._steps_in_float32(keys, values, tokens), logits))
        prompt_off = _most_off([self._eager_prefill(prompt)], [prompt_logits])
        free_memory(self.model.device, in_cycles=True)
        tolerances = (2 * each + _SLACK for each in (prompt_off, off, compiled_off))
        return Reference(keys, values, prompt_logits, tokens, logits, *tolerances)

    def _steps(
        self, attention: str, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], tokens: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        model, cache = self.model.with_attention(attention), DynamicCache(config=self.model.config)
        _fill(cache, keys, values)
        return [self.forward(model, cache, each) for each in tokens]

    def _steps_in_float32(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], tokens: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        model, cache = self.model.with_attention("sdpa"), DynamicCache(config=self.model.config)
        for index, (key, value) in enumerate(zip(keys, values, strict=True)):
            _fill(cache, [key.float()], [value.float()], first=index)
        embed, argument = model.get_input_embeddings(), {self.model.cache_argument: cache}
        with in_float32(model):
            return [
                model(inputs_embeds=embed(each).float(), use_cache=True, **argument).logits[:, -1] for each in tokens
            ]

    def _eager_prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        """In parts, as this attention holds all scores."""
        model, cache = self.model.with_attention("eager"), DynamicCache(config=self.model.config)
        size = max(1, _MOST_SCORES // (self.batch * self.model.config.num_attention_heads * self.context))
        for start in range(0, self.context, size):
            logits = self.forward(model, cache, prompt[:, start : start + size])
        return logits


def _reset_compiler() -> None:
    """Forget what was compiled, and the memory of its graphs."""
    torch.compiler.reset()


def _fill(cache: Any, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], first: int = 0) -> None:
    extra = []
    if TAKES_POSITIONS:  # StaticCache did
        extra = [{"cache_position": torch.arange(keys[0].shape[2], device=keys[0].device)}]
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        cache.update(key, value, first + index, *extra)


def _most_off(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
