"""Attention function: our kernels as attention of transformers, ``model.set_attn_implementation("vtensor")``.

transformers asks twice. Once a forward, a mask function is asked for each pattern of the model's layers. Ours says
`Pattern` where the pattern is one that the kernels know: causal, maybe with a sliding window, maybe with padding on the
left. Once a layer, the attention function gets what that said, and the K and V that the cache returned. Those of a
`VirtualCache` say where they lie (`Held`), so that the kernels get whole slots and lengths on the device.

All else (other patterns, padding elsewhere, gradients, widths that no kernel takes) is computed in torch.

**Padding on the left.** The first token of a sequence then lies in some row of its slot, and kernels know no such rows.
But to them a slot is only a multiple of a stride. With a stride that divides both the slot's and the row's, every row
of every slot begins a "slot"::

    rows of slot 0          | pad pad  a   b   c  ..  | pad  d   e   f   g  ..  |         slot 1
    with a stride of a row    0   1   [2]  3   4        n  [n+1]                          batch_idx = 2, n + 1

So nothing is copied, and there is nothing that kernels would have to know. What it costs is one look at the mask, on
the host, once a forward, which transformers' own attention takes as well.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask, sliding_window_overlay

from vtensor.triton_kernels import decode_attention
from vtensor.triton_kernels.arguments import MOST_HEAD_DIM, QUERY_DTYPES

__all__ = [
    "NAME",
    "TAKES_POSITIONS",
    "Held",
    "LeftPadding",
    "Pattern",
    "attention",
    "known",
    "left_padding",
    "mask",
    "register",
    "tag",
]

NAME = "vtensor"
TAKES_POSITIONS = "cache_position" in inspect.signature(sdpa_mask).parameters  # releases before 5.5
_MOST_VALUE_DIM = 512
_LARGEST_INDEX = (1 << 31) - 1


def register() -> None:
    """Make the name known to transformers, for attention and for masks. Done by importing this module."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


# -- what the two are told ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Held:
    """Where the K and V lie that a cache returned, of which the returned tensors show a part.

    Attributes
    ----------
    key, value : Tensor
        [slots, L, Hkv, D] and [slots, L, Hkv, Dv]: the same two in every forward. Sequence b is in slot b.
    seq_lens : Tensor
        [B] int32, on their device: tokens of each sequence, the new ones included.
    num_tokens : int
        The largest of these, as known on the host.
    was_read : bool
        Whether kernels have attended to it.
    """

    key: torch.Tensor
    value: torch.Tensor
    seq_lens: torch.Tensor
    num_tokens: int
    was_read: bool = False


@dataclass(frozen=True, eq=False)
class LeftPadding:
    """Padding that is all on the left.

    Attributes
    ----------
    starts : Tensor
        [B] int32: the position of each sequence's first token.
    most_start : int
        The largest of these.
    """

    starts: torch.Tensor
    most_start: int

    def mask_of(self, num_keys: int) -> torch.Tensor:
        """Its mask, [B, num_keys]."""
        return torch.arange(num_keys, device=self.starts.device) >= self.starts[:, None]


@dataclass(frozen=True, eq=False)
class Pattern:
    """What queries see, where kernels know it: the last queries of a causal attention.

    Attributes
    ----------
    window : int, optional
        The query at position p sees p - window + 1 to p.
    starts : Tensor, optional
        [B] int32: the position of each sequence's first token, all before it being padding. None: 0.
    most_start : int
        The largest of these.
    first_key : int
        The position of the first key that the cache returns.
    """

    window: int | None = None
    starts: torch.Tensor | None = None
    most_start: int = 0
    first_key: int = 0
    shifted: dict[Any, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def tag(states: torch.Tensor, held: Held) -> torch.Tensor:
    """Say of the keys that a cache returns where they lie."""
    states._vtensor_held = held  # type: ignore[attr-defined]
    return states


# -- the mask, once a forward -------------------------------------------------------------------------------------


def mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    *,
    q_length: int | None = None,
    q_offset: int | torch.Tensor = 0,
    cache_position: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """What transformers' attention masks are made by; see `transformers.masking_utils.sdpa_mask` for the arguments.

    Returns
    -------
    Tensor, optional
        None: plain causal attention. Of two dimensions: a `Pattern`, carried by the padding mask [B, keys] (bool,
        false: padding), or by [B, 0] where there is no padding. Of four, [B, 1, queries, keys], bool: any other.
    """
    asked = _Asked(
        batch_size, kv_length, kv_offset, mask_function, attention_mask, q_length, q_offset, cache_position, options
    )
    if not torch.compiler.is_compiling():
        return _mask(asked)
    if cache_position is not None or isinstance(q_offset, torch.Tensor):
        return _dense_mask(asked)  # nobody can look where a static cache is
    if mask_function is causal_mask_function and attention_mask is None:
        return _mask(asked)
    found: torch.Tensor | None = _mask_apart(asked)
    return found


class _Asked(NamedTuple):
    """The arguments of `mask`."""

    batch_size: int
    kv_length: int
    kv_offset: int
    mask_function: Callable[..., Any]
    attention_mask: torch.Tensor | None
    q_length: int | None
    q_offset: int | torch.Tensor
    cache_position: torch.Tensor | None
    options: dict[str, Any]


def _mask(asked: _Asked) -> torch.Tensor | None:
    pattern = None
    window = _window_of(asked.mask_function)
    num_keys = asked.kv_offset + asked.kv_length
    if window is not None and _are_last(num_keys, asked.q_length, asked.q_offset, asked.cache_position):
        pattern = _pattern(asked.attention_mask, window or None, asked.kv_offset, num_keys)
    if pattern is None:
        return _dense_mask(asked)
    if pattern.starts is not None and asked.attention_mask is not None:
        carrier = asked.attention_mask[:, asked.kv_offset :]
    elif pattern.window is not None:
        carrier = torch.empty(asked.batch_size, 0, dtype=torch.bool, device=asked.options.get("device"))
    else:
        return None
    carrier._vtensor_pattern = pattern  # type: ignore[attr-defined]
    return carrier


_disable: Any = torch.compiler.disable
_mask_apart: Any = _disable(_mask, recursive=True)
"""It looks into functions and tensors, which is not for torch.compile."""


def _are_last(
    num_keys: int, q_length: int | None, q_offset: int | torch.Tensor, cache_position: torch.Tensor | None
) -> bool:
    """Whether the queries are at the last keys. A static cache has more, and says where it is on the device."""
    if cache_position is None:  # from 5.5
        return not isinstance(q_offset, torch.Tensor) and q_offset + (q_length or 0) == num_keys
    if cache_position.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True  # nobody can look, and it is a cache of ours
    return int(cache_position[-1]) + 1 == num_keys


def _dense_mask(asked: _Asked) -> torch.Tensor | None:
    positions: dict[str, Any] = {"q_length": asked.q_length, "q_offset": asked.q_offset}
    if asked.cache_position is not None:
        positions = {"cache_position": asked.cache_position}
    options = asked.options
    if torch.compiler.is_compiling() or _window_of(asked.mask_function) is not None:
        options = {**options, "allow_is_causal_skip": False}  # to attention None is what it says, not what sdpa has
    found: torch.Tensor | None = sdpa_mask(
        batch_size=asked.batch_size, kv_length=asked.kv_length, kv_offset=asked.kv_offset,
        mask_function=asked.mask_function, attention_mask=asked.attention_mask, **positions, **options,
    )  # fmt: skip
    return found


_AND_CODE = and_masks(causal_mask_function).__code__
_OVERLAY_CODE = sliding_window_overlay(1).__code__


def _window_of(function: Callable[..., Any]) -> int | None:
    """The window of a causal pattern; 0 where it has none. None: some other pattern, or one that we do not know."""
    if function is causal_mask_function:
        return 0
    try:
        (parts,) = _closure(function, _AND_CODE)
        overlay, causal = parts
        (window,) = _closure(overlay, _OVERLAY_CODE)
    except (TypeError, ValueError):
        return None
    return window if causal is causal_mask_function and isinstance(window, int) else None


def _closure(function: Any, code: Any) -> list[Any]:
    """What a function with this code was made of."""
    if getattr(function, "__code__", None) is not code:
        raise ValueError("a function of another kind")
    return [cell.cell_contents for cell in function.__closure__]


def _pattern(attention_mask: torch.Tensor | None, window: int | None, first_key: int, num_keys: int) -> Pattern | None:
    """The pattern with this padding mask, [B, keys]; None where it is not all on the left."""
    if attention_mask is None:
        return Pattern(window, first_key=first_key)
    if attention_mask.dim() != 2 or attention_mask.shape[1] != num_keys:
        return None
    padding = _known_padding.get()
    if padding is None or len(padding.starts) != len(attention_mask):
        padding = left_padding(attention_mask)
    if padding is None:
        return None
    if not padding.most_start:
        return Pattern(window, first_key=first_key)
    return Pattern(window, padding.starts, padding.most_start, first_key)


def left_padding(attention_mask: torch.Tensor) -> LeftPadding | None:
    """What a mask [B, keys] of bool masks, where that is all on the left; else None. Waits for the device."""
    num_keys = attention_mask.shape[1]
    starts = num_keys - attention_mask.sum(-1)
    is_token = torch.arange(num_keys, device=starts.device) >= starts[:, None]
    is_left, most_start = torch.stack([(is_token == attention_mask).all().long(), starts.max()]).tolist()
    return LeftPadding(starts.int(), most_start) if is_left else None


_known_padding: ContextVar[LeftPadding | None] = ContextVar("known_padding", default=None)


@contextmanager
def known(padding: LeftPadding | None) -> Iterator[None]:
    """Within it masks of two dimensions are taken to be of this padding, and nobody looks at them."""
    token = _known_padding.set(padding)
    try:
        yield
    finally:
        _known_padding.reset(token)


# -- attention, once a layer --------------------------------------------------------------------------------------


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer of a transformers model.

    Parameters
    ----------
    module : Module
        The layer.
    query : Tensor
        [B, Hq, n, D].
    key, value : Tensor
        What the cache returned, or what the layer computed: [B, Hkv, keys, D] and [B, Hkv, keys, Dv].
    attention_mask : Tensor, optional
        What `mask` returned, or any mask of four dimensions.
    dropout, scaling, softcap, is_causal
        As transformers' own functions have them.
    sliding_window
        Not used: the mask says it, for models that do not.
    s_aux : Tensor, optional
        Sinks, a logit for each head: [Hq].
    **options
        For transformers' attention by `scaled_dot_product_attention`, where that is taken.

    Returns
    -------
    Tensor, None
        [B, n, Hq, Dv], and no weights.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    pattern = _pattern_of(attention_mask, key, sliding_window) if causal else None
    if pattern is not None and not dropout and options.get("position_bias") is None and _fits(query, key, value):
        found = _by_kernels(query, key, value, pattern, scaling, softcap, s_aux)
        if found is not None:
            return found, None
    if pattern is not None:
        attention_mask = _dense(pattern, query, key)
    if softcap is None and s_aux is None:
        found, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
        )
        return found, None
    return _in_torch(query, key, value, attention_mask, dropout, scaling, softcap, s_aux), None


def _pattern_of(attention_mask: torch.Tensor | None, key: torch.Tensor, window: int | None) -> Pattern | None:
    if attention_mask is None:
        return Pattern()
    if attention_mask.dim() != 2:
        return None
    pattern = getattr(attention_mask, "_vtensor_pattern", None)
    if pattern is None:  # it was copied to another device
        padding = attention_mask if attention_mask.shape[1] else None
        pattern = _pattern(padding, window, 0, key.shape[2])
        if pattern is None:
            raise ValueError(f"attention_mask of shape {list(attention_mask.shape)} is not made by vtensor's mask")
    return pattern


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether kernels take them."""
    tensors = query, key, value
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    if any(tensor.dtype != query.dtype or tensor.stride(-1) != 1 for tensor in tensors):
        return False
    widths = (query.shape[3], MOST_HEAD_DIM), (value.shape[3], _MOST_VALUE_DIM)
    return (
        query.device.type in ("cpu", "cuda")
        and query.dtype in QUERY_DTYPES
        and key.shape[2] >= query.shape[2]
        and query.shape[1] % key.shape[1] == 0
        and all(width % 16 == 0 and 16 <= width <= most for width, most in widths)
    )


def _by_kernels(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    """Attention by kernels; None where they cannot reach the keys behind the padding."""
    held: Held | None = getattr(key, "_vtensor_held", None)
    if held is None:  # some other cache's, or none's
        if pattern.starts is not None:
            return None
        lens = torch.full((key.shape[0],), key.shape[2], dtype=torch.int32, device=key.device)
        held = Held(key.transpose(1, 2), value.transpose(1, 2), lens, key.shape[2])
    keys, values, seq_lens, slots = held.key, held.value, held.seq_lens, None
    if pattern.starts is not None:
        stride = _common_stride(keys, values)
        if stride is None or held.num_tokens + pattern.most_start > keys.shape[1]:
            return None
        name = stride, keys.stride()
        if name not in pattern.shifted:
            starts = pattern.starts.to(keys.device)
            first = torch.arange(len(starts), device=keys.device) * (keys.stride(0) // stride)
            places = (first + starts * (keys.stride(1) // stride)).int()
            pattern.shifted[name] = places, seq_lens - starts
        slots, seq_lens = pattern.shifted[name]
        values = _row_by_row(values, stride * values.stride(1) // keys.stride(1), pattern.most_start)
        keys = _row_by_row(keys, stride, pattern.most_start)
    held.was_read = True
    found = decode_attention(
        query.transpose(1, 2), keys, values, seq_lens, slots, scale=scaling, window=pattern.window, softcap=softcap,
        sinks=None if sinks is None else sinks.detach(),
    )  # fmt: skip
    return found if isinstance(found, torch.Tensor) else found[0]


def _common_stride(keys: torch.Tensor, values: torch.Tensor) -> int | None:
    """A stride in K, in elements, of which its slots' and rows' are multiples, and V's the same ones."""
    (slot, row), (value_slot, value_row) = keys.stride()[:2], values.stride()[:2]
    stride = math.gcd(slot, row)
    fits = slot * value_row == value_slot * row and stride * value_row % row == 0
    return stride if fits and keys.shape[0] * slot // stride <= _LARGEST_INDEX else None


def _row_by_row(states: torch.Tensor, stride: int, most_start: int) -> torch.Tensor:
    """A view [places, L - most_start, H, D] of slots [slots, L, H, D], with a place every `stride` elements."""
    num_slots, num_rows = states.shape[:2]
    slot, row = states.stride()[:2]
    places = ((num_slots - 1) * slot + most_start * row) // stride + 1
    size = places, num_rows - most_start, *states.shape[2:]
    return states.as_strided(size, (stride, *states.stride()[1:]))


def _dense(pattern: Pattern, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask of a pattern, [B or 1, 1, queries, keys]; None where torch needs none."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if pattern.window is None and pattern.starts is None and num_queries in (1, num_keys):
        return None
    positions = torch.arange(num_keys, device=key.device)
    queries = positions[num_keys - num_queries :, None]
    sees = positions <= queries
    if pattern.window is not None:
        sees = sees & (positions > queries - pattern.window)
    sees = sees[None, None]
    if pattern.starts is not None:
        starts = pattern.starts.to(key.device) - pattern.first_key
        sees = sees & (positions >= starts[:, None])[:, None, None]
    return sees


def _in_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a cap or sinks, which `scaled_dot_product_attention` does not have."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    logits = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if attention_mask is None and query.shape[2] > 1:
        attention_mask = torch.ones(logits.shape[2:], dtype=torch.bool, device=logits.device).tril()
    if attention_mask is not None:
        lowest = torch.finfo(logits.dtype).min  # not -inf: a query may see no key, and must not become NaN
        is_bool = attention_mask.dtype == torch.bool
        logits = logits.masked_fill(~attention_mask, lowest) if is_bool else logits + attention_mask
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1).to(logits.dtype)], dim=-1)
    weights = logits.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous()


register()
