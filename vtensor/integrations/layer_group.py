"""LayerGroup: layers of a VirtualCache that lie in one KVCacheManager."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vtensor.allocator.page_pool import PagePool
from vtensor.devices import device_name, resolve_device
from vtensor.errors import ClosedError, RequestError
from vtensor.integrations.first_slots import FirstSlots
from vtensor.kvcache import KVCacheConfig, KVCacheManager
from vtensor.kvcache.layers import LayerSpec

__all__ = ["CacheLimits", "LayerGroup"]


@dataclass
class CacheLimits:
    """What all groups of a cache are made with.

    Attributes
    ----------
    max_cache_len : int
        The most tokens a sequence may have.
    max_batch_size : int, optional
        The most sequences. None: the first group that is started takes the batch that it is started with.
    rollback_tokens : int
        By how many tokens a sequence may be shortened where layers have a sliding window.
    config_options, manager_options : dict
        For `KVCacheConfig` and `KVCacheManager`.
    pools : dict of str to PagePool
        The cache's own, one a device: its groups share them.
    """

    max_cache_len: int
    max_batch_size: int | None
    rollback_tokens: int
    config_options: dict[str, Any]
    manager_options: dict[str, Any]
    pools: dict[str, PagePool] = field(default_factory=dict)

    def with_pool(self, device: torch.device) -> dict[str, Any]:
        """The options of a manager on a device, with a pool among them."""
        options = {"eager_slot": False, **self.manager_options}  # no other requests will come
        capacity_bytes = options.pop("capacity_bytes", None) if options.get("pool") is None else None
        if options.get("pool") is None:
            name = device_name(device)
            if name not in self.pools:
                self.pools[name] = PagePool(
                    name,
                    capacity_bytes=capacity_bytes,
                    page_group_bytes=self.config_options.get("page_group_bytes"),
                    max_size_class_bytes=self.config_options.get("max_size_class_bytes"),
                )
            options["pool"] = self.pools[name]
        return options


class LayerGroup:
    """Layers that have K and V of one shape, on one device: one manager, made when the first of them is used.

    All layers hold the same tokens of the same sequences, but for those that a forward has not reached yet. Sequence b
    is in slot b.

    Parameters
    ----------
    windows : dict of int to int or None
        The layers' numbers in the model, and their sliding windows.
    limits : CacheLimits
        Of the cache, shared by its groups.
    device : torch.device or str, optional
        None: that of the first states.
    """

    def __init__(self, windows: dict[int, int | None], limits: CacheLimits, device: torch.device | str | None) -> None:
        self.windows = windows
        self.limits = limits
        self.manager: KVCacheManager | None = None
        self._slots: FirstSlots | None = None  # of the manager
        self.num_tokens = 0  # of each sequence, as of the last step
        self.writes_in_place = False  # by the lengths on the device, behind memory that is there
        self.changes = 0  # how often all sequences were dropped, or some changed places
        self._device = device
        self._places = {index: place for place, index in enumerate(windows)}
        self._passed_from = 0  # the largest length that a step has grown from: windows have moved up to there
        self._lengths: torch.Tensor | None = None  # [max_batch] int32 on the device: num_tokens
        self.seq_lens: torch.Tensor | None = None  # the first batch_size of them
        self._closed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGroup:
        raise RequestError("layers of a VirtualCache are copied with it: copy.deepcopy(cache)")

    def start(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, each [slots, max_cache_len, heads, width], for states [B, H, n, D]; makes the manager.

        Raises
        ------
        RequestError
            States that do not fit what the manager was made for.
        """
        if self._closed:
            raise ClosedError("this VirtualCache was closed; make a new one")
        if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise RequestError(
                f"layer {index} gives K of shape {tuple(keys.shape)} {keys.dtype} and V of {tuple(values.shape)} "
                f"{values.dtype}; they must be alike but for their width (under torch.autocast they may not be)"
            )
        if self.manager is None:
            self._make_manager(keys, values)
        manager = self.manager
        assert manager is not None
        if keys.device != manager.device:
            raise RequestError(
                f"layer {index} computes on {keys.device}, its cache lies on {manager.device}; "
                "VirtualCache.for_model(model) knows on which device each layer is, device=[...] tells it"
            )
        spec = manager.config.layer_specs[self._places[index]]
        made_for = spec.num_kv_heads, spec.head_dim, spec.value_head_dim, spec.dtype
        given = keys.shape[1], keys.shape[3], values.shape[3], keys.dtype
        if made_for != given:
            raise RequestError(
                f"layer {index} gives {_shown(given)}, the cache is for {_shown(made_for)}; make a VirtualCache for "
                "each model and dtype"
            )
        return manager.layer(self._places[index], plain=True)

    def _make_manager(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        limits = self.limits
        batch, num_heads, _, key_dim = keys.shape
        specs = [
            LayerSpec(
                num_heads,
                key_dim,
                values.shape[3],
                window=None if window is None else window + limits.rollback_tokens,
            )
            for window in self.windows.values()
        ]
        config = KVCacheConfig(
            layers=specs,
            max_batch_size=limits.max_batch_size or batch,
            max_context_tokens=limits.max_cache_len,
            dtype=keys.dtype,
            **limits.config_options,
        )
        device = resolve_device(self._device or keys.device)
        manager = KVCacheManager(config, device, **limits.with_pool(device))
        with torch.inference_mode(False):  # later steps may be in any mode
            self._lengths = torch.zeros(config.max_batch_size, dtype=torch.int32, device=manager.device)
        self.manager = manager
        self._slots = FirstSlots(manager, "Free memory, or give the cache more capacity_bytes")
        limits.max_batch_size = config.max_batch_size

    @property
    def batch_size(self) -> int:
        """Sequences held; slots 0 .. batch_size - 1 are theirs."""
        return 0 if self._slots is None else self._slots.batch_size

    # -- sequences and tokens -------------------------------------------------------------------------------------

    def reserve(self, batch: int, num_tokens: int) -> None:
        """Commit memory for so many tokens of every sequence, in all layers. A no-op for all layers but the first.

        Raises
        ------
        RequestError
            Too many tokens or sequences, or another number of sequences than the cache holds.
        OutOfPagesError
            No memory; nothing has changed.
        """
        if batch != self.batch_size and self.num_tokens == 0:
            self.resize(batch)
        if batch != self.batch_size:
            raise RequestError(f"the cache holds {self.batch_size} sequences, the new keys are for {batch}")
        if num_tokens <= self.num_tokens:
            return
        if num_tokens > self.limits.max_cache_len:
            raise RequestError(
                f"{num_tokens:,} tokens exceed max_cache_len={self.limits.max_cache_len:,}; make the VirtualCache with "
                "a larger one (it costs addresses only)"
            )
        self._step(num_tokens)
        self._passed_from = max(self._passed_from, self.num_tokens)
        self._hold(num_tokens)

    def _step(self, num_tokens: int) -> None:
        assert self._slots is not None
        self._slots.step(num_tokens, self.num_tokens)

    def _hold(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        if self._lengths is not None:
            self._lengths.fill_(num_tokens)

    def check_batch(self, batch: int) -> None:
        """Raise `RequestError` for more sequences than there are slots."""
        limit = self.limits.max_batch_size
        if limit is not None and batch > limit:
            raise RequestError(
                f"a batch of {batch} sequences exceeds max_batch_size={limit}; beams and returned sequences count, so "
                "make the VirtualCache with max_batch_size >= batch x num_beams (it costs addresses only)"
            )

    def resize(self, batch: int) -> None:
        """Hold the slots 0 .. batch - 1."""
        self.check_batch(batch)
        if self._slots is None:
            return
        self._slots.resize(batch)
        if not batch:
            self.changes += 1
            self._passed_from = 0
            self._hold(0)
        assert self._lengths is not None
        self.seq_lens = self._lengths[:batch]

    def grow(self, batch: int) -> None:
        """Take slots for more sequences, with memory for as many tokens as the others hold; all or nothing."""
        if batch > self.batch_size and self.num_tokens:
            old_batch = self.batch_size
            self.resize(batch)
            try:
                self._step(self.num_tokens)
            except BaseException:
                self.resize(old_batch)
                raise

    def check_shorter(self, num_tokens: int) -> None:
        """Raise `RequestError` where what a shorter sequence's window sees may be gone."""
        limit = self._passed_from - self.limits.rollback_tokens
        if num_tokens < limit and num_tokens and any(self.first_row(window) for window in self.windows.values()):
            raise RequestError(
                f"{self.num_tokens:,} tokens cannot be shortened to {num_tokens:,}: layers with a sliding window have "
                f"given back what so short a sequence sees. Make the VirtualCache with rollback_tokens="
                f"{self._passed_from - num_tokens} or more, which is {self.limits.rollback_tokens}"
            )

    def shorten(self, num_tokens: int) -> None:
        """Drop the tokens behind these. The page groups stay with their slots."""
        if num_tokens >= self.num_tokens:
            return
        if num_tokens:
            self.check_shorter(num_tokens)
            self._step(num_tokens)
            self._hold(num_tokens)
        else:
            self.resize(0)

    def first_row(self, window: int | None) -> int:
        """The first token that a layer with this window still holds."""
        return 0 if window is None else max(0, self._passed_from - window - self.limits.rollback_tokens + 1)

    def pass_windows_of(self, other: LayerGroup) -> None:
        """Hold no more than another group, whose rows are copied."""
        self._passed_from = max(self._passed_from, other._passed_from)

    def close(self) -> None:
        """Give the memory back."""
        self._closed = True
        if self.manager is not None:
            self.manager.close()


def _shown(states: tuple[Any, ...]) -> str:
    heads, width, value_width, dtype = states
    return f"{heads} heads of {width if width == value_width else f'{width} and {value_width}'} {dtype}"
