"""VirtualCache: the KV cache of a Hugging Face transformers model, in virtual tensors.

Works with transformers 5.0 and later; the signatures that changed between its releases are noted where they matter.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from vtensor.errors import ClosedError, RequestError
from vtensor.integrations.layer_group import CacheLimits, LayerGroup
from vtensor.integrations.virtual_layer import VirtualLayer
from vtensor.kvcache import KVCacheManager
from vtensor.kvcache.config import check_positive

__all__ = ["VirtualCache", "check_options", "own_layers"]

_CONFIG_OPTIONS = {
    "layout",
    "layers_per_slice",
    "page_group_bytes",
    "max_size_class_bytes",
    "overread_tokens",
    "expected_context_tokens",
}
_MANAGER_OPTIONS = set(inspect.signature(KVCacheManager).parameters) - {"config", "device"}
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_TWO_SHAPES = ("global_head_dim", "num_global_key_value_heads", "swa_head_dim", "swa_num_key_value_heads")
"""Where a config without `per_layer_config` says that layers with and without a window have K and V of other shapes."""
_TWO_SHAPES_UNSAID = {"mimo_v2_flash"}
"""Models that have such layers, and do not say so."""

Device = torch.device | str | None


class VirtualCache(Cache):
    """A KV cache of fixed addresses that grows: for ``past_key_values=`` of a model's `forward` and `generate`.

    Nothing is copied when it grows, and what it may grow to costs nothing. The first update that needs more tokens has
    the manager commit page groups for all layers at once. Layers with a sliding window give back what lies before it.
    Layers of other kinds, such as those of linear attention, are transformers' own.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Of the model.
    max_cache_len : int, optional
        The most tokens a sequence may have. Default: the model's own maximum.
    max_batch_size : int, optional
        The most sequences, beams included. Default: the batch of the first update.
    device : torch.device or str, or a sequence of them, optional
        Of all layers, or of each. Default: the device of the first update.
    rollback_tokens : int
        By how many tokens a sequence may be shortened (`crop`, in assisted decoding) beyond those of the last update.
        Layers with a sliding window keep so many tokens more; others may always be shortened.
    **options
        For `KVCacheConfig` (`layout`, `layers_per_slice`, `page_group_bytes`) and `KVCacheManager` (`pool`,
        `capacity_bytes`, ...).

    Raises
    ------
    ValueError
        A bad option, or a model without layers of attention over a growing cache.

    Notes
    -----
    Where there is no memory for new tokens, `OutOfPagesError` is raised in the middle of a forward, and all layers of
    attention hold what they held. Recurrent layers may have gone on by then: of models with such layers `reset` the
    cache.

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
        device: Device | Sequence[Device] = None,
        *,
        rollback_tokens: int = 32,
        **options: Any,
    ) -> None:
        if not hasattr(config, "get_text_config"):
            raise ValueError(f"config={config!r} must be the configuration of a transformers model: model.config")
        decoder = config.get_text_config(decoder=True)
        check_options(options, rollback_tokens)
        if max_cache_len is None:
            max_cache_len = getattr(decoder, "max_position_embeddings", None)
        check_positive("max_cache_len", max_cache_len)
        if max_batch_size is not None:
            check_positive("max_batch_size", max_batch_size)
        self._config, self._device, self._options = config, device, options
        self._limits = CacheLimits(
            cast(int, max_cache_len),
            max_batch_size,
            rollback_tokens,
            {name: value for name, value in options.items() if name in _CONFIG_OPTIONS},
            {name: value for name, value in options.items() if name in _MANAGER_OPTIONS},
        )
        self._closed = False
        layers, refusal = own_layers(decoder)
        if refusal:
            raise ValueError(f"{refusal}; use the model's default cache")
        self._groups = _groups(decoder, layers, device, self._limits)
        for group in self._groups:
            for index in group.windows:
                layers[index] = VirtualLayer(group, index)
        super().__init__(layers=layers)

    @classmethod
    def for_model(
        cls, model: Any, max_cache_len: int | None = None, max_batch_size: int | None = None, **options: Any
    ) -> VirtualCache:
        """A cache for a model, each layer on the device that the model has it on; see the class for the parameters."""
        if "device" not in options:
            options["device"] = _devices(model)
        return cls(model.config, max_cache_len, max_batch_size, **options)

    def __enter__(self) -> VirtualCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def managers(self) -> tuple[KVCacheManager, ...]:
        """The managers below, as far as they are made: one a device, and for layers with K and V of one shape."""
        return tuple(group.manager for group in self._groups if group.manager is not None)

    @property
    def manager(self) -> KVCacheManager:
        """The manager below, of which most models need one.

        Raises
        ------
        RequestError
            There are several; or none, before the first update: only that tells the batch, the dtype and the device.
        """
        managers = self.managers
        if not managers:
            raise RequestError("this cache has no manager before the model's first forward with it")
        if len(self._groups) > 1:
            raise RequestError(f"this cache has {len(self._groups)} managers: use `managers`")
        return managers[0]

    @property
    def max_cache_len(self) -> int:
        """The most tokens a sequence may have."""
        return self._limits.max_cache_len

    @property
    def max_batch_size(self) -> int | None:
        """The most sequences; None where the first update is still to tell."""
        return self._limits.max_batch_size

    def close(self) -> None:
        """Give the memory back. A second call does nothing."""
        self._closed = True
        self.reset()
        for group in self._groups:
            group.close()
        for pool in self._limits.pools.values():
            if not pool.closed:
                pool.retire()

    # -- the Cache interface --------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new K and V behind what it holds; see `VirtualLayer.update`.

        Where that fails, in whatever layer, all layers of attention hold what they held before the forward.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise RequestError(
                f"layer {layer_idx} writes to a cache of {len(self.layers)} layers: make a VirtualCache for each model"
            )
        try:
            return cast(
                tuple[torch.Tensor, torch.Tensor],
                super().update(key_states, value_states, layer_idx, *args, **kwargs),
            )
        except BaseException:
            failed = self.layers[layer_idx]
            if isinstance(failed, VirtualLayer) and not self._closed:
                self._shorten(failed.num_tokens)
            raise

    def begin_step(self) -> int:
        """Have memory, and lengths on the device, for one more token of every sequence, which is written next.

        For `DecodeStep`. Returns the tokens held before.

        Raises
        ------
        OutOfPagesError
            No memory; nothing has changed.
        RequestError
            More tokens than `max_cache_len`.
        """
        held = next(self._virtual_layers()).num_tokens
        try:
            for group in self._groups:
                group.reserve(group.batch_size, held + 1)
        except BaseException:
            self.end_step(held)
            raise
        return held

    def end_step(self, held: int) -> None:
        """Hold so many tokens again: the step that was begun came to nothing."""
        self._shorten(held)

    @contextmanager
    def writing_in_place(self) -> Iterator[None]:
        """Within it updates write K and V where the lengths on the device say; `reserve` comes first."""
        for group in self._groups:
            group.writes_in_place = True
        try:
            yield
        finally:
            for group in self._groups:
                group.writes_in_place = False

    def reset(self) -> None:
        """Forget all tokens. The page groups stay with their slots, for the next generation."""
        if not self._closed:
            for group in self._groups:
                group.resize(0)
        fresh, _ = own_layers(self._config.get_text_config(decoder=True))  # theirs keep their batch
        for index, layer in enumerate(self.layers):
            if isinstance(layer, VirtualLayer):
                layer.reset()
            else:
                self.layers[index] = fresh[index]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens at the end: -n or 0 removes n; a positive number is the length to keep (before 5.16).

        Raises
        ------
        RequestError
            Layers with a sliding window have given back what so short a sequence sees (`rollback_tokens`); nothing was
            changed.
        """
        # By the first layer's length, which callers know. A forward that failed may have left others shorter.
        kept = next(self._virtual_layers()).kept_by(tokens_to_remove)
        for group in self._groups:
            group.check_shorter(kept)
        for layer in self.layers:
            if not isinstance(layer, VirtualLayer):
                layer.crop(tokens_to_remove)
        self._shorten(kept)

    def _shorten(self, num_tokens: int) -> None:
        for layer in self._virtual_layers():
            if layer.num_tokens > num_tokens:
                layer.crop(num_tokens - layer.num_tokens)
        for group in self._groups:
            group.shorten(num_tokens)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence ``beam_idx[i]``, in place."""
        self._rearrange(beam_idx)
        for layer in self._other_layers():
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at these positions, in this order."""
        self._rearrange(torch.arange(self._groups[0].batch_size)[indices.cpu()])
        for layer in self._other_layers():
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence becomes `repeats` copies of itself, side by side."""
        self._rearrange(torch.arange(self._groups[0].batch_size).repeat_interleave(repeats))
        for layer in self._other_layers():
            layer.batch_repeat_interleave(repeats)

    def _rearrange(self, source: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence ``source[i]``; there are as many afterwards as `source` is long."""
        groups = [group for group in self._groups if group.num_tokens]
        batch = len(source)
        if not batch:
            raise RequestError("no sequence was asked for, and a cache keeps at least one: reset() drops all of them")
        for group in groups:
            group.check_batch(batch)
            if not 0 <= int(source.min()) <= int(source.max()) < group.batch_size:
                raise RequestError(
                    f"sequences {source.tolist()} were asked for; the cache holds 0 to {group.batch_size - 1}"
                )
        old_batches = [group.batch_size for group in groups]
        try:
            for group in groups:
                group.grow(batch)
        except BaseException:
            for group, old_batch in zip(groups, old_batches, strict=True):
                group.resize(old_batch)
            raise
        for layer in self._virtual_layers():
            if layer.num_tokens:
                layer.rearrange(source.to(layer.device))
        for group in groups:
            group.resize(batch)
            group.changes += 1

    def _virtual_layers(self) -> Iterator[VirtualLayer]:
        return (layer for layer in self.layers if isinstance(layer, VirtualLayer))

    def _other_layers(self) -> Iterator[Any]:
        return (layer for layer in self.layers if not isinstance(layer, VirtualLayer))

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualCache:
        """A cache of its own with the same tokens: how a computed prefix is used several times."""
        if self._closed:
            raise ClosedError("this VirtualCache was closed and holds nothing to copy")
        limits = self._limits
        copied = memo[id(self)] = VirtualCache(
            self._config,
            limits.max_cache_len,
            limits.max_batch_size,
            self._device,
            rollback_tokens=limits.rollback_tokens,
            **self._options,
        )
        for index, layer in enumerate(self.layers):
            if isinstance(layer, VirtualLayer):
                copied.layers[index].copy_from(layer)
            else:
                copied.layers[index] = copy.deepcopy(layer, memo)
        return copied


def check_options(options: dict[str, Any], rollback_tokens: int) -> None:
    """Raise `ValueError` for what is no option of a `VirtualCache`, `KVCacheConfig` or `KVCacheManager`."""
    if isinstance(rollback_tokens, bool) or not isinstance(rollback_tokens, int) or rollback_tokens < 0:
        raise ValueError(f"rollback_tokens={rollback_tokens!r} must be an integer of 0 or more")
    unknown = sorted(set(options) - _CONFIG_OPTIONS - _MANAGER_OPTIONS)
    if unknown:
        known = ", ".join(sorted(_CONFIG_OPTIONS | _MANAGER_OPTIONS))
        raise ValueError(f"VirtualCache has no option {', '.join(unknown)}; it has {known}")


# -- what a model's layers are ------------------------------------------------------------------------------------


def own_layers(decoder: Any) -> tuple[list[Any], str | None]:
    """The layers that transformers' own cache has for a model; and why a `VirtualCache` does not serve it, or None."""
    name = f"model_type={getattr(decoder, 'model_type', '?')!r}"
    kinds = getattr(decoder, "layer_types", None) or ()
    layers = list(DynamicCache(config=decoder).layers)
    if not layers and kinds and getattr(decoder, "num_kv_shared_layers", None) == 0:
        one_more = copy.copy(decoder)  # to early releases 0 shared layers are all of them
        one_more.layer_types, one_more.num_kv_shared_layers = [*kinds, kinds[-1]], 1
        layers = list(DynamicCache(config=one_more).layers)
    for layer, kind in zip(layers, kinds, strict=False):
        if type(layer) is DynamicLayer and kind not in _ATTENTION_TYPES:
            return (
                layers,
                f"{name} has {kind} layers, which DynamicCache of this release of transformers has not either",
            )
    if not any(_is_attention(layer) for layer in layers):
        found = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
        return layers, f"{name} has no layers of attention alone (transformers caches them by: {found})"
    return layers, None


def _is_attention(layer: Any) -> bool:
    """Whether a layer of transformers holds K and V of past tokens, and nothing else."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def _groups(
    decoder: Any, layers: list[Any], device: Device | Sequence[Device], limits: CacheLimits
) -> list[LayerGroup]:
    """Layers that are on one device and, as far as the config tells, have K and V of one shape."""
    is_one = device is None or isinstance(device, torch.device | str)
    devices = [device] * len(layers) if is_one else list(cast(Sequence[Device], device))
    if len(devices) < len(layers):
        raise ValueError(f"device={device!r} has {len(devices)} entries; the model has {len(layers)} layers")
    windows: dict[Any, dict[int, int | None]] = {}
    for index, layer in enumerate(layers):
        if _is_attention(layer):
            window = getattr(layer, "sliding_window", None)
            name = str(devices[index]), _shape_of(decoder, index, window)
            windows.setdefault(name, {})[index] = window
    own = {index: cast(Device, devices[index]) for index in range(len(layers))}
    return [LayerGroup(group, limits, own[next(iter(group))]) for group in windows.values()]


def _shape_of(decoder: Any, index: int, window: int | None) -> object:
    """What differs where K and V of two layers have other shapes."""
    if getattr(decoder, "is_heterogeneous", False):
        layer = decoder.per_layer_config[index]
        return getattr(layer, "head_dim", None), getattr(layer, "num_key_value_heads", None)
    two_shapes = decoder.model_type in _TWO_SHAPES_UNSAID or any(getattr(decoder, name, None) for name in _TWO_SHAPES)
    return two_shapes and window is None


def _devices(model: Any) -> list[Device] | None:
    """The device of each layer, where a model is on several."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) < 2:
        return None
    found: dict[int, Device] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in found:
            continue
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        parameter = next(module.parameters(), None)
        if device is None and parameter is not None:
            device = parameter.device
        if device is not None:
            found[index] = torch.device(device)
    return [found.get(index) for index in range(model.config.get_text_config(decoder=True).num_hidden_layers)]
