"""generate: tokens of a transformers model by steps that are captured once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from vtensor.integrations.attention_function import NAME, left_padding
from vtensor.integrations.decode_step import DecodeStep
from vtensor.integrations.virtual_cache import VirtualCache

__all__ = ["generate"]

_lock = threading.Lock()
_borrowed: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
"""Models whose attention is ours for a while: for how many generations, and what it was before."""

_TOKENS_BETWEEN_LOOKS = 16  # of whether all sequences have ended: a look waits for the device


@torch.no_grad()
def generate(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int,
    cache: VirtualCache | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int = 0,
    choose: Callable[[torch.Tensor], torch.Tensor] | None = None,
    chunk_tokens: int | None = None,
    compile: bool | dict[str, Any] = False,
) -> torch.Tensor:
    """Generate tokens: the prompts by forwards of the model, each further token by a `DecodeStep`.

    What transformers' own `generate` has beyond that (beams, drafts, processors of logits) it has not.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder. Its attention is set to "vtensor" meanwhile.
    input_ids : Tensor
        [B, n]: the prompts.
    attention_mask : Tensor, optional
        [B, n], 0 for padding, which is all on the left.
    max_new_tokens : int
        How many at most.
    cache : VirtualCache, optional
        An empty one of the model, which holds all tokens but the last afterwards. None: one that is closed afterwards.
    eos_token_id : int or sequence of int, optional
        What ends a sequence.
    pad_token_id : int
        What follows the end of a sequence, where others go on.
    choose : callable, optional
        Tokens [B] for logits [B, vocabulary]; None: the most likely ones. On a GPU it should not wait for it.
    chunk_tokens : int, optional
        At most so many tokens of the prompts in a forward.
    compile : bool or dict
        As for `DecodeStep`.

    Returns
    -------
    Tensor
        [B, n + new tokens], of input_ids' dtype.

    Raises
    ------
    ValueError
        `max_new_tokens` or `chunk_tokens` below 1, no prompt, padding that is not on the left, a cache that is not
        empty, or a `choose` that returns something else.
    OutOfPagesError
        No memory for further tokens; `cache` holds those before.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                                      num_attention_heads=2, max_position_embeddings=4096)).eval()
    >>> tokens, mask = torch.tensor([[1, 2, 3], [0, 4, 5]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    >>> generate(model, tokens, mask, max_new_tokens=5).shape
    torch.Size([2, 8])
    """
    given = {"max_new_tokens": max_new_tokens, **({} if chunk_tokens is None else {"chunk_tokens": chunk_tokens})}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; it must be [B, n], of at least one token each")
    if attention_mask is not None and (
        attention_mask.shape != input_ids.shape or left_padding(attention_mask.bool()) is None
    ):
        raise ValueError(
            f"attention_mask must be of input_ids' shape, {list(input_ids.shape)}, with all zeros of a row before all "
            f"ones; its shape is {list(attention_mask.shape)}"
        )
    if cache is not None and cache.get_seq_length():
        raise ValueError(f"cache holds {cache.get_seq_length()} tokens: it must be empty, by reset()")
    own = VirtualCache.for_model(model) if cache is None else cache
    _borrow_attention(model)
    try:
        ends = torch.tensor([] if eos_token_id is None else eos_token_id, device=input_ids.device).reshape(-1)
        logits = _prefill(model, own, input_ids, attention_mask, chunk_tokens or input_ids.shape[1])
        found, has_ended = [], torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        step: DecodeStep | None = None
        while True:
            tokens = logits[:, -1].argmax(-1) if choose is None else choose(logits[:, -1])
            if tokens.numel() != len(input_ids):
                raise ValueError(f"choose returned shape {list(tokens.shape)}; it must be [{len(input_ids)}]")
            tokens = torch.where(has_ended, pad_token_id, tokens.reshape(-1).to(has_ended.device))
            found.append(tokens)
            has_ended = has_ended | torch.isin(tokens, ends)
            is_time = len(ends) and len(found) % _TOKENS_BETWEEN_LOOKS == 0
            if len(found) == max_new_tokens or (is_time and bool(has_ended.all())):
                break
            step = step or DecodeStep(model, own, attention_mask, compile=compile)
            logits = step(tokens)
    finally:
        _return_attention(model)
        if cache is None:
            own.close()
    new = torch.stack(found, dim=1)
    if len(ends):  # up to where the last sequence ended
        lengths = torch.where(torch.isin(new, ends).any(1), torch.isin(new, ends).int().argmax(1) + 1, new.shape[1])
        new = new[:, : int(lengths.max())]
    return torch.cat([input_ids, new.to(input_ids.dtype)], dim=1)


def _borrow_attention(model: Any) -> None:
    """Have a model's attention computed by our kernels until the last who borrowed it returns it."""
    with _lock:
        count, before = _borrowed.get(model) or (0, model.config.get_text_config(decoder=True)._attn_implementation)
        if not count:
            model.set_attn_implementation(NAME)
        _borrowed[model] = count + 1, before


def _return_attention(model: Any) -> None:
    with _lock:
        count, before = _borrowed.pop(model)
        if count > 1:
            _borrowed[model] = count - 1, before
        else:
            model.set_attn_implementation(before)


def _prefill(
    model: Any, cache: VirtualCache, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, chunk_tokens: int
) -> torch.Tensor:
    """Logits of the last tokens, [B, 1, vocabulary]."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for start in range(0, input_ids.shape[1], chunk_tokens):
        end = min(start + chunk_tokens, input_ids.shape[1])
        found = model(
            input_ids=input_ids[:, start:end],
            attention_mask=None if attention_mask is None else mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    logits: torch.Tensor = found.logits
    return logits
