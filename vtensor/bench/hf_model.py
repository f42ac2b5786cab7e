"""Models for `vtensor bench hf`: shapes of known ones, with random weights that are made where they are used."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import vtensor.integrations.transformers  # noqa: F401 - makes the attention "vtensor" known

__all__ = ["SHAPES", "SMALL_SHAPES", "Model", "Shape", "free_memory", "in_float32"]

_SEED = 7


@dataclass(frozen=True)
class Shape:
    """What a model is made of.

    Attributes
    ----------
    family : str
        As in transformers' ``<family>Config``.
    options : mapping
        Of that config.
    """

    family: str
    options: Mapping[str, Any]


SHAPES = {
    "8b": Shape(
        "Llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
        },
    ),
    "0.6b": Shape(
        "Qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
        },
    ),
}
_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
}
SMALL_SHAPES = {name: Shape(shape.family, _SMALL) for name, shape in SHAPES.items()}


@dataclass(eq=False)
class Model:
    """A model that is made when it is first asked for, and dropped when the last of its users has left.

    Parameters
    ----------
    name : str
    shape : Shape
    device : str
    dtype : torch.dtype
    max_tokens : int
        The longest sequence that it is for.
    """

    name: str
    shape: Shape
    device: str
    dtype: torch.dtype
    max_tokens: int
    _users: list[object] = field(default_factory=list, init=False)
    _made: Any = field(default=None, init=False)
    _attention: str = field(default="", init=False)

    @functools.cached_property
    def config(self) -> Any:
        """Its configuration."""
        make = getattr(transformers, f"{self.shape.family}Config")
        return make(max_position_embeddings=self.max_tokens, **self.shape.options)

    @functools.cached_property
    def cache_argument(self) -> str:
        """What a forward calls its cache: another name since 5.24."""
        names = inspect.signature(type(self.with_attention("sdpa")).forward).parameters
        return "cache" if "cache" in names else "past_key_values"

    @property
    def bytes_per_token(self) -> int:
        """K and V of a token, in all layers."""
        config = self.config
        width = config.num_key_value_heads * config.head_dim * self.dtype.itemsize
        return int(2 * config.num_hidden_layers * width)

    def with_attention(self, name: str) -> Any:
        """The model, with this attention until it is asked for with another."""
        if self._made is None:
            torch.manual_seed(_SEED)
            with torch.device(self.device):  # normal_() there: nothing is copied
                self._made = transformers.AutoModelForCausalLM.from_config(self.config, dtype=self.dtype).eval()
            self._attention = ""
        if name != self._attention:
            self._made.set_attn_implementation(name)
            self._attention = name
        return self._made

    def claim(self, user: object) -> None:
        """Somebody will need it."""
        self._users.append(user)

    def release(self, user: object) -> None:
        """Somebody needs it no more."""
        self._users = [each for each in self._users if each is not user]
        if not self._users:
            self._made = None
            free_memory(self.device, in_cycles=True)


def free_memory(device: str, *, in_cycles: bool = False) -> None:
    """Give the device back what nobody holds; on a CPU that comes by itself."""
    if device == "cpu":
        return
    if in_cycles:  # 0.3 s
        gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Within it the model's products are in float32, and so is all else, if its embeddings and its cache are.

    Its weights stay what they are; each is converted for the moment.
    """
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    for linear in linears:
        linear.forward = functools.partial(_product, linear)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


def _product(linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias.float()
    return torch.nn.functional.linear(x.float(), linear.weight.float(), bias)
