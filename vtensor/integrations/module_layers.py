"""ModuleLayers: what the caches of a model's layers share, where they are modules."""

from __future__ import annotations

from typing import Any, Literal

import torch

from vtensor.allocator.page_pool import PagePool
from vtensor.devices import resolve_device
from vtensor.errors import ClosedError, RequestError
from vtensor.integrations.layer_rows import ManagedRows, Pair, ZeroedRows
from vtensor.kvcache import KVCacheConfig

__all__ = ["ModuleLayers", "Pair", "Returns"]

Returns = Literal["full", "held"]


class ModuleLayers:
    """What the caches of a model's layers share: rows, which are made by the first use, and the books.

    Memory is committed for all layers by the first that needs it. All hold the same tokens, but for those that a
    forward has not reached yet.
    """

    def __init__(self, config: KVCacheConfig, returns: Returns, pool: PagePool | None) -> None:
        self.config = config
        self.returns = returns
        self.pool = pool
        self.rows: ManagedRows | ZeroedRows | None = None
        self.batch_size = 0
        self.sizes = [0] * config.num_layers  # tokens that each layer holds of each sequence
        self.reserved = 0  # tokens of each sequence that there is memory for, as the rows were told
        self.closed = False
        self._readable: dict[int, Pair] = {}  # by layer, for this batch
        self._lengths: torch.Tensor | None = None  # [max_batch] int32 on the device
        self._length = -1  # the value of all of them

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleLayers:
        """Rows of their own that hold the same tokens. As it is, torch would copy all addresses."""
        other = ModuleLayers(self.config, self.returns, self.pool)
        other.closed = self.closed
        if self.rows is not None and self.reserved:
            rows = other.start(self.rows.device)
            other.reserve(self.batch_size, self.reserved)
            for index, size in enumerate(self.sizes):
                for to, of in zip(rows.plain(index), self.rows.plain(index), strict=True):
                    to[: self.batch_size, :size].copy_(of[: self.batch_size, :size])
            other.sizes = list(self.sizes)
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled one is empty, and so must this one be: memory stays in its process."""
        if self.reserved:
            raise RequestError(
                "a KVCache that holds tokens cannot be pickled; reset() it first, or save the model's state_dict(), "
                "which leaves caches out"
            )
        return ModuleLayers, (self.config, self.returns, self.pool), {"closed": self.closed}

    def check_open(self) -> None:
        """Raise `ClosedError` once it was closed."""
        if self.closed:
            raise ClosedError("this KVCache was closed; make a new one")

    def start(self, device: torch.device | None) -> ManagedRows | ZeroedRows:
        """The rows on a device; None: wherever they are."""
        self.check_open()
        if self.rows is not None and device not in (None, self.rows.device):
            if self.reserved:
                raise RequestError(f"k lies on {device}, the cache's tokens on {self.rows.device}; reset() it first")
            self._drop()
        if self.rows is None:
            kind = ZeroedRows if self.returns == "full" else ManagedRows
            self.rows = kind(self.config, resolve_device(device), self.pool)
        return self.rows

    def reserve(self, batch: int, num_tokens: int) -> None:
        """Have memory for so many tokens of so many sequences, in all layers."""
        rows, limits = self.rows, self.config
        assert rows is not None
        if not 1 <= batch <= limits.max_batch_size:
            raise RequestError(
                f"k is for a batch of {batch} sequences, which must be 1 to max_batch_size={limits.max_batch_size} (a "
                "larger one costs addresses only)"
            )
        if self.reserved and batch != self.batch_size:
            raise RequestError(f"k is for {batch} sequences, the cache holds {self.batch_size}; reset() it first")
        if num_tokens > limits.max_context_tokens:
            raise RequestError(
                f"{num_tokens:,} tokens exceed max_seq_len={limits.max_context_tokens:,} (a larger one costs addresses "
                "only)"
            )
        if num_tokens > self.reserved:
            rows.reserve(batch, self.reserved, num_tokens)
            self.reserved = num_tokens
        if batch != self.batch_size:
            self.batch_size = batch
            self._readable.clear()

    def shorten(self, num_tokens: int) -> None:
        """Have all layers hold so many tokens at most."""
        self.check_open()
        self.sizes = [min(size, num_tokens) for size in self.sizes]
        if self.rows is not None and num_tokens < self.reserved:
            self.rows.shorten(self.batch_size, self.reserved, num_tokens)
            self.reserved = num_tokens

    def shown(self, index: int) -> Pair:
        """K and V of a layer as its callers get them, [batch, heads, tokens, width]."""
        rows = self.start(None)
        batch, size = self.batch_size, self.sizes[index]
        if isinstance(rows, ManagedRows):
            key, value = rows.plain(index)
            return key[:batch, :size].transpose(1, 2), value[:batch, :size].transpose(1, 2)
        if index not in self._readable:
            self._readable[index] = rows.readable(index, batch or self.config.max_batch_size)
        return self._readable[index]

    def lengths(self, num_tokens: int) -> torch.Tensor:
        """So many tokens for each sequence, [batch] int32 on the device, in the order of the stream."""
        assert self.rows is not None
        if self._lengths is None:
            with torch.inference_mode(False):
                self._lengths = torch.zeros(self.config.max_batch_size, dtype=torch.int32, device=self.rows.device)
        if num_tokens != self._length:
            self._lengths.fill_(num_tokens)
            self._length = num_tokens
        return self._lengths[: self.batch_size]

    def close(self) -> None:
        """Give the memory back."""
        self.closed = True
        self.sizes = [0] * len(self.sizes)
        self._drop()

    def _drop(self) -> None:
        self._readable.clear()
        self._lengths, self._length = None, -1
        self.batch_size = self.reserved = 0
        if self.rows is not None:
            self.rows.close()
            self.rows = None
