"""Adoption: every ``generate()`` of the process with virtual layers, by one line."""

from __future__ import annotations

import functools
import threading
from typing import Any

from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from vtensor.integrations.attention_function import register
from vtensor.integrations.virtual_cache import VirtualCache, check_options, own_layers

__all__ = ["install", "uninstall"]

_HOOK = "_prepare_cache_for_generation"
_NAMES = ("past_key_values", "cache", "cache_params")  # of a cache among a model's arguments; the second from 5.24
_SPARE_TOKENS = 32  # a forward may run after the last token is chosen

_lock = threading.Lock()
_options: dict[str, Any] | None = None  # None: not installed
_placed: tuple[Any, Any] | None = None  # our method, and transformers' that it stands for


def install(**options: Any) -> None:
    """Have every `generate()` of the process use a `VirtualCache` where it would make a `DynamicCache`.

    Caches that the caller gives, or names (``cache_implementation="static"``), are left alone, and so are models
    whose caches `VirtualCache` does not hold. Also makes ``model.set_attn_implementation("vtensor")`` known. A second
    call changes the options.

    Parameters
    ----------
    **options
        For each `VirtualCache`: `layout`, `pool`, `rollback_tokens`, ...

    Raises
    ------
    ValueError
        An unknown option.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                                      num_attention_heads=2, max_position_embeddings=4096)).eval()
    >>> install()
    >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, pad_token_id=0, eos_token_id=None).shape
    torch.Size([1, 8])
    >>> uninstall()
    """
    global _options, _placed
    rollback_tokens = options.get("rollback_tokens", 0)
    check_options({name: value for name, value in options.items() if name != "rollback_tokens"}, rollback_tokens)
    register()
    with _lock:
        _options = options
        current = getattr(GenerationMixin, _HOOK)
        if _placed is None or current is not _placed[0]:  # others may have put theirs around, or in place of ours
            _placed = _around(current), current
            setattr(GenerationMixin, _HOOK, _placed[0])


def uninstall() -> None:
    """Take `install` back. Does nothing where it was not called."""
    global _options, _placed
    with _lock:
        _options = None
        if _placed is not None and getattr(GenerationMixin, _HOOK) is _placed[0]:
            setattr(GenerationMixin, _HOOK, _placed[1])
        _placed = None  # where others have put theirs around ours, it stays, and does nothing


def _around(original: Any) -> Any:
    """A method that does what transformers' own does, and then puts our cache in place of the one that it made."""

    @functools.wraps(original)
    def prepare(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> Any:
        given = any(model_kwargs.get(name) is not None for name in _NAMES)
        kind = generation_config.cache_implementation
        result = original(self, generation_config, model_kwargs, generation_mode, *args, **kwargs)
        options = _options
        if options is None or given or kind not in (None, "dynamic", "dynamic_full", "hybrid"):
            return result
        max_tokens = kwargs["max_cache_length"] if "max_cache_length" in kwargs else args[1]
        if kind == "dynamic_full" or getattr(generation_config, "is_assistant", False):  # drafts are taken back
            options = {"rollback_tokens": _longest(self, max_tokens), **options}
        name = next((name for name in _NAMES if model_kwargs.get(name) is not None), _NAMES[0])
        made = model_kwargs.get(name)
        if made is None:  # in releases that leave it to the model
            if generation_config.use_cache is False or not self._supports_default_dynamic_cache():
                return result
            made = _made_by_forward(self)
        own: Any = made.self_attention_cache if type(made) is EncoderDecoderCache else made
        ours = _cache_for(self, max_tokens, options) if type(own) is DynamicCache else None
        if ours is not None:
            is_pair = own is not made
            model_kwargs[name] = EncoderDecoderCache(ours, made.cross_attention_cache) if is_pair else ours
        return result

    return prepare


def _made_by_forward(model: Any) -> Any:
    """What a model's forward makes where it is given no cache."""
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    return EncoderDecoderCache(cache, DynamicCache(config=config)) if model.config.is_encoder_decoder else cache


def _longest(model: Any, max_tokens: int) -> int:
    """Tokens for which a cache has addresses: as many as the model or this generation may have."""
    decoder = model.config.get_text_config(decoder=True)
    return max(getattr(decoder, "max_position_embeddings", None) or 0, max_tokens + _SPARE_TOKENS)


def _cache_for(model: Any, max_tokens: int, options: dict[str, Any]) -> VirtualCache | None:
    """A cache for one generation; None for a model that it does not serve."""
    if own_layers(model.config.get_text_config(decoder=True))[1]:
        return None
    return VirtualCache.for_model(model, _longest(model, max_tokens), **options)
