"""VirtualCache: the KV cache of a Hugging Face transformers model, in virtual tensors.

Works with transformers 5.0 and later; the signatures that changed between its releases are noted where they matter.
"""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from vtensor.errors import ClosedError, OutOfPagesError, RequestError
from vtensor.kvcache import KVCacheConfig, KVCacheManager
from vtensor.kvcache.config import check_positive
from vtensor.units import format_bytes

__all__ = ["VirtualCache", "VirtualLayer"]

_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_CONFIG_OPTIONS = {
    "layout",
    "layers_per_slice",
    "page_group_bytes",
    "max_size_class_bytes",
    "overread_tokens",
    "expected_context_tokens",
}
_MANAGER_OPTIONS = set(inspect.signature(KVCacheManager).parameters) - {"config", "device"}


class VirtualCache(Cache):
    """A KV cache of fixed addresses that grows: for ``past_key_values=`` of a model's `forward` and `generate`.

    Nothing is copied when it grows, and what it may grow to costs nothing. The first update that needs more tokens has
    the manager commit page groups for all layers at once. Layers with a sliding window keep every token.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Of the model.
    max_cache_len : int, optional
        The most tokens a sequence may have. Default: the model's own maximum.
    max_batch_size : int, optional
        The most sequences, beams included. Default: the batch of the first update.
    device : torch.device or str, optional
        Default: the device of the first update.
    **options
        For `KVCacheConfig` (`layout`, `layers_per_slice`, `page_group_bytes`) and `KVCacheManager` (`pool`,
        `capacity_bytes`, ...).

    Raises
    ------
    ValueError
        A bad option, or a model with layers of another kind than attention over a growing cache.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                                      num_attention_heads=2, max_position_embeddings=4096)).eval()
    >>> with VirtualCache.for_model(model) as cache:
    ...     tokens = model.generate(torch.tensor([[1, 2, 3]]), past_key_values=cache, max_new_tokens=5, do_sample=False,
    ...                             pad_token_id=0, eos_token_id=None)
    ...     tokens.shape[1], cache.get_seq_length(), cache.manager.stats().num_active_slots
    (8, 7, 1)
    """

    def __init__(
        self,
        config: Any,
        max_cache_len: int | None = None,
        max_batch_size: int | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        decoder = config.get_text_config(decoder=True)
        _check_layer_types(decoder)
        unknown = sorted(set(options) - _CONFIG_OPTIONS - _MANAGER_OPTIONS)
        if unknown:
            known = ", ".join(sorted(_CONFIG_OPTIONS | _MANAGER_OPTIONS))
            raise ValueError(f"VirtualCache has no option {', '.join(unknown)}; it has {known}")
        if max_cache_len is None:
            max_cache_len = getattr(decoder, "max_position_embeddings", None)
        check_positive("max_cache_len", max_cache_len)
        if max_batch_size is not None:
            check_positive("max_batch_size", max_batch_size)
        self._max_cache_len = cast(int, max_cache_len)
        self._max_batch_size = max_batch_size
        self._config = config
        self._device = device
        self._options = options
        self._manager: KVCacheManager | None = None
        self._batch_size = 0  # slots 0 .. batch - 1 are ours
        self._num_tokens = 0  # of the last step
        self._closed = False
        super().__init__(layers=[VirtualLayer(self, index) for index in range(decoder.num_hidden_layers)])

    @classmethod
    def for_model(
        cls, model: Any, max_cache_len: int | None = None, max_batch_size: int | None = None, **options: Any
    ) -> VirtualCache:
        """A cache for a model; see the class for the parameters."""
        return cls(model.config, max_cache_len, max_batch_size, **options)

    def __enter__(self) -> VirtualCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def manager(self) -> KVCacheManager:
        """The manager below.

        Raises
        ------
        RequestError
            Before the first update: only that tells the batch, the dtype and the device.
        """
        if self._manager is None:
            raise RequestError("this cache has no manager before the model's first forward with it")
        return self._manager

    @property
    def max_cache_len(self) -> int:
        """The most tokens a sequence may have."""
        return self._max_cache_len

    @property
    def max_batch_size(self) -> int | None:
        """The most sequences; None where the first update is still to tell."""
        return self._max_batch_size

    def close(self) -> None:
        """Give the memory back. A second call does nothing."""
        self._closed = True
        for layer in self.layers:
            layer.forget()
        if self._manager is not None:
            self._manager.close()

    # -- what the layers ask for ----------------------------------------------------------------------------------

    def start(self, states: torch.Tensor) -> None:
        """Make the manager, and take a slot for every sequence; once a generation. `states`: [B, H, n, D]."""
        if self._closed:
            raise ClosedError("this VirtualCache was closed; make a new one")
        batch, num_heads, _, head_dim = states.shape
        if self._manager is None:
            config_options = {name: value for name, value in self._options.items() if name in _CONFIG_OPTIONS}
            manager_options: dict[str, Any] = {"eager_slot": False}  # no other requests will come
            manager_options |= {name: value for name, value in self._options.items() if name in _MANAGER_OPTIONS}
            max_batch_size = self._max_batch_size or batch
            config = KVCacheConfig(
                num_layers=len(self.layers),
                num_kv_heads=num_heads,
                head_dim=head_dim,
                max_batch_size=max_batch_size,
                max_context_tokens=self.max_cache_len,
                dtype=states.dtype,
                **config_options,
            )
            self._manager = KVCacheManager(config, self._device or states.device, **manager_options)
            self._max_batch_size = max_batch_size
        self._resize(batch)

    def reserve(self, batch: int, num_tokens: int) -> None:
        """Commit memory for so many tokens of every sequence, in all layers. A no-op for all layers but the first."""
        if batch != self._batch_size and self._num_tokens == 0:
            self._resize(batch)
        if batch != self._batch_size:
            raise RequestError(f"the cache holds {self._batch_size} sequences, the new keys are for {batch}")
        if num_tokens == self._num_tokens:
            return
        if num_tokens > self.max_cache_len:
            raise RequestError(
                f"{num_tokens:,} tokens exceed max_cache_len={self.max_cache_len:,}; make the VirtualCache with "
                "a larger one (it costs addresses only)"
            )
        self._step(batch, num_tokens)
        self._num_tokens = num_tokens

    def _step(self, batch: int, num_tokens: int) -> None:
        manager = self.manager
        lengths = [num_tokens] * batch + [0] * (manager.config.max_batch_size - batch)
        result = manager.step(lengths)
        if not result:
            raise OutOfPagesError(
                f"{batch} sequences of {num_tokens:,} tokens need {result.shortfall_page_groups} more page groups of "
                f"{format_bytes(manager.pool.page_group_bytes)} than can be had on {manager.device}; the cache still "
                f"holds its {self._num_tokens:,} tokens. Free memory, or give the cache more capacity_bytes"
            )

    def _check_batch(self, batch: int) -> None:
        limit = cast(int, self._max_batch_size)
        if batch > limit:
            raise RequestError(
                f"a batch of {batch} sequences exceeds max_batch_size={limit}; beams and returned sequences count, so "
                "make the VirtualCache with max_batch_size >= batch x num_beams (it costs addresses only)"
            )

    def _resize(self, batch: int) -> None:
        """Hold the slots 0 .. batch - 1."""
        self._check_batch(batch)
        manager = self.manager
        while self._batch_size > batch:
            self._batch_size -= 1
            manager.free_reqid(self._batch_size)
        while self._batch_size < batch:
            # All lower slots are active, so this is the lowest id that is not.
            reqid = manager.alloc_reqid()
            if reqid != self._batch_size:
                manager.free_reqid(reqid)
                raise RequestError("slots of this cache's manager were taken by somebody else")
            self._batch_size += 1

    # -- the Cache interface --------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens. The page groups stay with their slots, for the next generation."""
        if self._manager is not None and not self._closed:
            self._resize(0)
        self._num_tokens = 0
        for layer in self.layers:
            layer.forget()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence ``beam_idx[i]``, in place."""
        self._rearrange(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at these positions, in this order."""
        self._rearrange(torch.arange(self._batch_size)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence becomes `repeats` copies of itself, side by side."""
        self._rearrange(torch.arange(self._batch_size).repeat_interleave(repeats))

    def _rearrange(self, source: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence ``source[i]``; there are as many afterwards as `source` is long."""
        if self._num_tokens == 0:
            return
        batch, old_batch, num_tokens = len(source), self._batch_size, self._num_tokens
        self._check_batch(batch)
        if batch and not 0 <= int(source.min()) <= int(source.max()) < old_batch:
            raise RequestError(f"sequences {source.tolist()} were asked for; the cache holds 0 to {old_batch - 1}")
        if batch > old_batch:
            self._resize(batch)
            try:
                self._step(batch, num_tokens)
            except BaseException:
                self._resize(old_batch)
                raise
        source = source.to(self.manager.device)
        for layer in self.layers:
            layer.rearrange(source)
        self._resize(batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualCache:
        """A cache of its own with the same tokens: how a computed prefix is used several times."""
        if self._closed:
            raise ClosedError("this VirtualCache was closed and holds nothing to copy")
        copied = memo[id(self)] = VirtualCache(
            self._config, self._max_cache_len, self._max_batch_size, self._device, **self._options
        )
        for index, layer in enumerate(self.layers):
            if layer.keys is not None:
                copied.update(layer.keys, layer.values, index)
        return copied


class VirtualLayer(CacheLayerMixin):
    """One layer of a `VirtualCache`: K and V as views of fixed address, [B, H, tokens so far, D]."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, cache: VirtualCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index
        self._num_tokens = 0
        self._key: torch.Tensor | None = None  # [max_batch, max_tokens, H, D]
        self._value: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Take the layer's views from the manager; the first layer to do so starts the cache."""
        if value_states is not None and value_states.shape != key_states.shape:
            raise RequestError(
                f"K of shape {tuple(key_states.shape)} and V of {tuple(value_states.shape)} must be alike"
            )
        if self._index == 0 or self._cache._manager is None:
            self._cache.start(key_states)
        manager = self._cache.manager
        if key_states.device != manager.device:
            raise RequestError(
                f"layer {self._index} computes on {key_states.device}, the cache lies on {manager.device}; "
                "VirtualCache serves models on one device"
            )
        config = manager.config
        made_for = (config.num_kv_heads, config.head_dim, config.dtype)
        given = (key_states.shape[1], key_states.shape[3], key_states.dtype)
        if made_for != given:
            raise RequestError(
                f"layer {self._index} gives {given[0]} heads of {given[1]} {given[2]}, the cache is for {made_for[0]} "
                f"heads of {made_for[1]} {made_for[2]}; make a VirtualCache for each model"
            )
        self._key, self._value = manager.layer(self._index, plain=True)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new K and V, each [B, H, n, D], behind the tokens held.

        Returns
        -------
        tuple of torch.Tensor
            K and V of all tokens, [B, H, tokens, D]: views of the cache, nothing is copied.

        Raises
        ------
        OutOfPagesError
            No memory for the new tokens; the cache holds what it held.
        RequestError
            More tokens than `max_cache_len`, more sequences than `max_batch_size`, or states that need gradients.
        """
        if key_states.requires_grad and torch.is_grad_enabled():
            raise RequestError("VirtualCache keeps no autograd history: call the model under torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, num_new, _ = key_states.shape
        start, end = self._num_tokens, self._num_tokens + num_new
        self._cache.reserve(batch, end)
        key, value = cast(torch.Tensor, self._key), cast(torch.Tensor, self._value)
        key[:batch, start:end].copy_(key_states.transpose(1, 2))
        value[:batch, start:end].copy_(value_states.transpose(1, 2))
        self._show(batch, end)
        return self.keys, self.values

    def _show(self, batch: int, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.keys = cast(torch.Tensor, self._key)[:batch, :num_tokens].transpose(1, 2)
        self.values = cast(torch.Tensor, self._value)[:batch, :num_tokens].transpose(1, 2)

    def rearrange(self, source: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence ``source[i]``."""
        if self._num_tokens:
            for states in (cast(torch.Tensor, self._key), cast(torch.Tensor, self._value)):
                held = states[:, : self._num_tokens]
                held[: len(source)] = held[source]
            self._show(len(source), self._num_tokens)

    def forget(self) -> None:
        """Drop all tokens and views."""
        self._num_tokens = 0
        self._key = self._value = None
        self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized = False

    def reset(self) -> None:
        """Drop all tokens."""
        self.forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens at the end: -n or 0 removes n; a positive number is the length to keep (before 5.16)."""
        keep = min(tokens_to_remove, self._num_tokens) if tokens_to_remove > 0 else self._num_tokens + tokens_to_remove
        if self._num_tokens:
            self._show(self.keys.shape[0], max(keep, 0))

    def get_seq_length(self, *args: Any) -> int:
        """Tokens held."""
        return self._num_tokens

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """Number of keys that `update` will return, and the position of the first.

        `query` is the query's length; before 5.5 its positions.
        """
        query_length = query.shape[0] if isinstance(query, torch.Tensor) else query
        return self._num_tokens + query_length, 0

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


def _check_layer_types(decoder: Any) -> None:
    layer_types = set(getattr(decoder, "layer_types", None) or ())
    unsupported = sorted(layer_types - _SUPPORTED_LAYER_TYPES)
    if getattr(decoder, "num_kv_shared_layers", None):
        unsupported.append("layers that share K and V")
    if getattr(decoder, "attention_chunk_size", None):
        unsupported.append("chunked attention")
    if unsupported:
        raise ValueError(
            f"model_type={getattr(decoder, 'model_type', '?')!r} has {', '.join(unsupported)}; VirtualCache holds "
            f"{' and '.join(sorted(_SUPPORTED_LAYER_TYPES))} layers only, so use the model's default cache"
        )
