"""VirtualLayer: one attention layer of a VirtualCache."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers.cache_utils import CacheLayerMixin

from vtensor.eager import eager, untraced
from vtensor.errors import RequestError
from vtensor.integrations.attention_function import Held, tag
from vtensor.integrations.layer_group import LayerGroup
from vtensor.triton_kernels import append_kv

__all__ = ["VirtualLayer"]


class VirtualLayer(CacheLayerMixin):
    """One layer of a `VirtualCache`: K and V as views of fixed address, [B, H, tokens, D].

    With a sliding window W the views begin where the first of the last queries sees, W - 1 tokens before it, and the
    memory of what lies before goes back.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, group: LayerGroup, index: int) -> None:
        super().__init__()
        self.group = group
        self.index = index
        self.sliding_window = group.windows[index]
        self.is_sliding = self.sliding_window is not None
        self.num_tokens = 0
        self._key: torch.Tensor | None = None  # [max_batch, max_tokens, H, D]
        self._value: torch.Tensor | None = None
        self._made_for: tuple[Any, ...] = ()  # heads, widths, dtypes
        self._held: Held | None = None  # what the last views were said to be

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualLayer:
        raise RequestError("layers of a VirtualCache are copied with it: copy.deepcopy(cache)")

    @property
    def was_read_in_place(self) -> bool:
        """Whether kernels have read what the last update returned from where it lies."""
        return self._held is not None and self._held.was_read

    @eager
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Take the layer's views from its group's manager; the first layer to do so makes it."""
        values = key_states if value_states is None else value_states
        self._key, self._value = untraced(self.group.start, self.index, key_states, values)
        self.dtype, self.device = key_states.dtype, key_states.device
        self._made_for = _kind_of(key_states, values)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new K and V, [B, H, n, D] and [B, H, n, Dv], behind the tokens held.

        Returns
        -------
        tuple of torch.Tensor
            K and V of all tokens that the new ones see, [B, H, tokens, D] and [B, H, tokens, Dv]: views of the cache,
            nothing is copied. They are good until tokens are dropped; `clone` what is to be kept, copied or saved.

        Raises
        ------
        OutOfPagesError
            No memory for the new tokens; the cache holds what it held.
        RequestError
            More tokens than `max_cache_len`, more sequences than `max_batch_size`, or states that need gradients.
        """
        if (key_states.requires_grad or value_states.requires_grad) and torch.is_grad_enabled():
            raise RequestError("VirtualCache keeps no autograd history: call the model under torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self._made_for != _kind_of(key_states, value_states):
            self.group.start(self.index, key_states, value_states)  # says what is wrong
        batch, _, num_new, _ = key_states.shape
        start, end = self.num_tokens, self.num_tokens + num_new
        self.group.reserve(batch, end)
        key, value = cast(torch.Tensor, self._key), cast(torch.Tensor, self._value)
        new_keys, new_values = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if self.group.writes_in_place:
            append_kv(new_keys, new_values, key, value, cast(torch.Tensor, self.group.seq_lens))
        else:
            key[:batch, start:end].copy_(new_keys)
            value[:batch, start:end].copy_(new_values)
        self._show(batch, end, num_new)
        return self.keys, self.values

    def hold(self, num_tokens: int) -> None:
        """Hold so many tokens, which lie there: they were written by a graph, or are to be written again."""
        self._show(self.group.batch_size, num_tokens)

    def _show(self, batch: int, num_tokens: int, num_new: int = 0) -> None:
        """Hold so many tokens; the views show what the new ones see."""
        self.num_tokens = num_tokens
        first = self._first_key(num_tokens - num_new)
        key, value, group = cast(torch.Tensor, self._key), cast(torch.Tensor, self._value), self.group
        self.keys = key[:batch, first:num_tokens].transpose(1, 2)
        self.values = value[:batch, first:num_tokens].transpose(1, 2)
        self._held = None
        if group.seq_lens is not None and group.num_tokens == num_tokens:
            self._held = Held(key, value, group.seq_lens, num_tokens)
            tag(self.keys, self._held)

    def _first_key(self, num_past: int) -> int:
        """The first token that a query behind so many sees."""
        return 0 if self.sliding_window is None else max(0, num_past - self.sliding_window + 1)

    def rearrange(self, source: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence ``source[i]``."""
        if self.num_tokens:
            first = self.group.first_row(self.sliding_window)
            for states in (cast(torch.Tensor, self._key), cast(torch.Tensor, self._value)):
                held = states[:, first : self.num_tokens]
                held[: len(source)] = held[source]
            self._show(len(source), self.num_tokens)

    def copy_from(self, other: VirtualLayer) -> None:
        """Hold what another layer holds, of another cache for the same model."""
        if not other.is_initialized:
            return
        self.lazy_initialization(other.keys, other.values)
        if other.num_tokens:
            batch = other.keys.shape[0]
            self.group.reserve(batch, other.num_tokens)
            self.group.pass_windows_of(other.group)
            rows = slice(other.group.first_row(other.sliding_window), other.num_tokens)
            for mine, theirs in ((self._key, other._key), (self._value, other._value)):
                cast(torch.Tensor, mine)[:batch, rows].copy_(cast(torch.Tensor, theirs)[:batch, rows])
            self._show(batch, other.num_tokens)

    def forget(self) -> None:
        """Drop all tokens and views."""
        self.num_tokens = 0
        self._key = self._value = self._held = None
        self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized = False

    def reset(self) -> None:
        """Drop all tokens."""
        self.forget()

    def kept_by(self, tokens_to_remove: int) -> int:
        """Tokens that `crop` would leave."""
        if tokens_to_remove > 0:
            return min(tokens_to_remove, self.num_tokens)
        return max(self.num_tokens + tokens_to_remove, 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens at the end: -n or 0 removes n; a positive number is the length to keep (before 5.16)."""
        if self.num_tokens:
            self._show(self.keys.shape[0], self.kept_by(tokens_to_remove))

    def get_seq_length(self, *args: Any) -> int:
        """Tokens held, those that a window has passed among them."""
        return self.num_tokens

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """Number of keys that `update` will return, and the position of the first.

        `query` is the query's length; before 5.5 its positions.
        """
        query_length = query.shape[0] if isinstance(query, torch.Tensor) else query
        first = self._first_key(self.num_tokens)
        return self.num_tokens - first + query_length, first

    def get_max_length(self) -> int:
        """No fixed length that every update returns (transformers' meaning of -1); the limit is `max_cache_len`."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Name of `get_max_length` in earlier releases."""
        return -1

    def offload(self) -> None:
        """Nothing: the cache stays where it is."""

    def prefetch(self) -> None:
        """Nothing: the cache stays where it is."""


def _kind_of(keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, ...]:
    return keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype, values.dtype, keys.device
