"""Module: a KV cache as an nn.Module of a layer, with the calls of gpt-fast's and of torchtune's."""

from __future__ import annotations

from typing import Any, Self, get_args

import torch
from torch import nn

from vtensor.allocator.page_pool import PagePool
from vtensor.attention_backends import attention
from vtensor.eager import eager
from vtensor.errors import RequestError
from vtensor.integrations.module_layers import ModuleLayers, Pair, Returns
from vtensor.kvcache import KVCacheConfig
from vtensor.kvcache.config import check_positive

__all__ = ["KVCache", "TorchtuneKVCache"]


class _LayerCache(nn.Module):
    """What both adapters are: a cache of one layer, with neither parameters nor buffers."""

    def __init__(
        self,
        sizes: dict[str, int],
        dtype: torch.dtype,
        returns: Returns,
        pool: PagePool | None,
    ) -> None:
        super().__init__()
        for name, size in sizes.items():
            check_positive(name, size)
        if returns not in get_args(Returns):
            raise ValueError(f"returns={returns!r} must be one of {get_args(Returns)}")
        max_batch_size, max_seq_len, num_kv_heads, head_dim = sizes.values()
        config = KVCacheConfig(1, num_kv_heads, head_dim, max_batch_size, max_seq_len, dtype)
        self._layers = ModuleLayers(config, returns, pool)
        self._index = 0

    @classmethod
    def for_layers(cls, num_layers: int, *args: Any, **kwargs: Any) -> list[Self]:
        """Caches for the layers of a model, which share their memory: one growth serves all of them.

        Parameters
        ----------
        num_layers : int
        *args, **kwargs
            As for one cache.

        Notes
        -----
        A page group then holds few tokens of many layers, rather than many of one: a short sequence takes a page group
        or two altogether, where caches that are made one by one take one each.
        """
        check_positive("num_layers", num_layers)
        caches = [cls(*args, **kwargs) for _ in range(num_layers)]
        alone = caches[0]._layers
        config = alone.config
        shared = ModuleLayers(
            KVCacheConfig(
                num_layers,
                config.num_kv_heads,
                config.head_dim,
                config.max_batch_size,
                config.max_context_tokens,
                config.dtype,
            ),
            alone.returns,
            alone.pool,
        )
        for index, cache in enumerate(caches):
            cache._layers, cache._index = shared, index
        return caches

    def _append(self, k: torch.Tensor, v: torch.Tensor) -> Pair:
        layers, index = self._layers, self._index
        layers.check_open()
        self._check_states(k, v)
        rows = layers.start(k.device)
        batch, _, num_new, _ = k.shape
        start, end = self.size, self.size + num_new
        layers.reserve(batch, end)
        for cache, new in zip(rows.plain(index), (k, v), strict=True):
            cache[:batch, start:end].copy_(new.transpose(1, 2))
        layers.sizes[index] = end
        return layers.shown(index)

    def _check_states(self, k: torch.Tensor, v: torch.Tensor) -> None:
        config = self._layers.config
        for name, new in (("k", k), ("v", v)):
            if new.dim() != 4 or new.shape[1::2] != (config.num_kv_heads, config.head_dim):
                raise RequestError(
                    f"{name} has shape {list(new.shape)}; it must be [batch, num_kv_heads={config.num_kv_heads}, "
                    f"tokens, head_dim={config.head_dim}]"
                )
            if new.dtype != config.dtype:
                raise RequestError(f"{name} has dtype {new.dtype}, the cache was made with dtype={config.dtype}")
            if new.requires_grad and torch.is_grad_enabled():
                raise RequestError(f"{name} needs gradients, of which a cache keeps none; use torch.no_grad()")
        if k.shape != v.shape or k.device != v.device:
            raise RequestError(f"v is {list(v.shape)} on {v.device}; it must be as k, {list(k.shape)} on {k.device}")

    @eager
    def attend(self, q: torch.Tensor, **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Causal attention of the newest tokens over all that this layer holds, by `vtensor.attention`.

        It reads the tokens that are there, needs no mask, and repeats no heads.

        Parameters
        ----------
        q : Tensor
            [B, Hq, S, D]: queries of the last S tokens, which `update` was given before.
        **options
            As for `vtensor.attention`: `scale`, `window`, `softcap`, `sinks`, `backend` and others.

        Returns
        -------
        Tensor, or Tensor and Tensor
            [B, Hq, S, D]; with `return_lse` also [B, Hq, S].
        """
        layers = self._layers
        layers.check_open()
        if q.dim() == 4 and q.shape[2] > self.size > 0:
            raise RequestError(
                f"q has {q.shape[2]} queries, and the cache holds {self.size} tokens: update comes first"
            )
        if layers.rows is None or not self.size:
            raise RequestError("the cache holds no tokens; call update first")
        if q.dim() != 4 or q.shape[0] != layers.batch_size:
            raise RequestError(f"q has shape {list(q.shape)}; it must be [batch={layers.batch_size}, heads, tokens, D]")
        key, value = layers.rows.plain(self._index)
        found = attention(q.transpose(1, 2), key, value, layers.lengths(self.size), **options)
        if isinstance(found, tuple):
            return found[0].transpose(1, 2), found[1].transpose(1, 2)
        return found.transpose(1, 2)

    @property
    def size(self) -> int:
        """Tokens that this layer holds of each sequence. Counted on the host."""
        return self._layers.sizes[self._index]

    @property
    def k_cache(self) -> torch.Tensor:
        """K as `update` returns it; before the first one, on torch's default device."""
        return self._layers.shown(self._index)[0]

    @property
    def v_cache(self) -> torch.Tensor:
        """V as `update` returns it."""
        return self._layers.shown(self._index)[1]

    @property
    def committed_bytes(self) -> int:
        """Memory of all layers that share it; a whole number of page groups."""
        return 0 if self._layers.rows is None else self._layers.rows.committed_bytes

    @property
    def used_bytes(self) -> int:
        """What of that holds tokens."""
        return self._layers.batch_size * sum(self._layers.sizes) * self._bytes_of_a_token()

    def _bytes_of_a_token(self) -> int:
        return self._layers.config.bytes_per_token // self._layers.config.num_layers

    @eager
    def crop(self, num_tokens: int) -> None:
        """Keep the first tokens only, in all layers that share memory: the next update writes behind them.

        Raises
        ------
        RequestError
            A number below 0. (One above `size` changes nothing.)
        """
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
            raise RequestError(f"num_tokens={num_tokens!r} must be an integer of 0 or more")
        self._layers.shorten(num_tokens)

    @eager
    def reset(self) -> None:
        """Drop all tokens, in all layers that share memory; the batch may be another one then."""
        self._layers.shorten(0)

    @eager
    def close(self) -> None:
        """Give memory and addresses back, of all layers that share them. A second call does nothing."""
        self._layers.close()

    def extra_repr(self) -> str:
        """As in the module's repr."""
        config = self._layers.config
        state = "closed" if self._layers.closed else f"{self.size:,} tokens of {self._layers.batch_size} sequences"
        return (
            f"{config.max_batch_size} x {config.max_context_tokens:,}, {config.num_kv_heads} heads of "
            f"{config.head_dim}, {config.dtype}, returns={self._layers.returns!r}, {state}"
        )


class KVCache(_LayerCache):
    """A layer's KV cache with the call of gpt-fast's: ``update(input_pos, k, v)``.

    It takes memory as tokens come, up to lengths and batches that cost addresses only. How many tokens there are is
    counted on the host, by how many come: the device is not asked for positions.

    Parameters
    ----------
    max_batch_size, max_seq_len, num_kv_heads, head_dim : int
    dtype : torch.dtype
        fp8 (e4m3fn, e5m2), fp16, bf16, fp32 or fp64; that of `k` and `v`.
    returns : {"full", "held"}
        What `update` returns. ``full``: K and V of length `max_seq_len`, as gpt-fast and torchtune do, for a caller
        that masks; they are virtual tensors, which read as zeros, without memory, behind the tokens held. ``held``:
        plain views of the tokens held. Who uses `attend` takes ``held`` as well.
    pool : PagePool, optional
        Memory to share with others. None: without limit.

    Raises
    ------
    ValueError
        A size that is not positive, a dtype that cannot be cached; the message names it.

    Notes
    -----
    It has no parameters or buffers: `state_dict` leaves it out, and `Module.to` leaves it as it is. The rows are made
    by the first update, on the device of `k`; on another one once it is empty (`reset`). `copy.deepcopy` makes a cache
    of its own that holds the same tokens, and layers that shared memory share it again.

    ``full`` costs the time of attention over `max_seq_len`, and on a GPU a page group of zeros that is shown wherever
    there is none (about 30 us a place, once); when the cache grows into such a place, it waits for the device. ``held``
    never does, and memory is mapped ahead of need. torch.compile does not trace `update`: a graph ends there.

    Examples
    --------
    Two layers, for up to 8 sequences of a million tokens:

    >>> cache, other = KVCache.for_layers(2, 8, 1 << 20, num_kv_heads=2, head_dim=64, returns="held")
    >>> k = v = torch.ones(3, 2, 5, 64, dtype=torch.bfloat16)
    >>> keys, values = cache.update(torch.arange(5), k, v)
    >>> keys.shape, cache.size, other.size
    (torch.Size([3, 2, 5, 64]), 5, 0)
    >>> cache.attend(torch.ones(3, 8, 5, 64, dtype=torch.bfloat16)).shape
    torch.Size([3, 8, 5, 64])
    >>> cache.reset()
    """

    def __init__(
        self,
        max_batch_size: int,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        returns: Returns = "full",
        pool: PagePool | None = None,
    ) -> None:
        sizes = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len}
        super().__init__({**sizes, "num_kv_heads": num_kv_heads, "head_dim": head_dim}, dtype, returns, pool)

    @eager
    def update(self, input_pos: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of new tokens behind those held.

        Parameters
        ----------
        input_pos : Tensor
            Positions of the S new tokens, [S]: `size`, `size` + 1 and so on. On a GPU nobody looks at the values. Who
            goes back to write again says so by `reset` or `crop`.
        k, v : Tensor
            [B, num_kv_heads, S, head_dim] of the cache's dtype. As long as tokens are held, B stays what it is.

        Returns
        -------
        tuple of torch.Tensor
            K and V, [B, num_kv_heads, max_seq_len, head_dim], or with the tokens held in place of `max_seq_len`: views
            of the cache, nothing is copied. Those of the tokens held are good until `reset`, `crop` or `close`, and lie
            in memory that is not all there: `clone` what is to be kept, copied or saved.

        Raises
        ------
        OutOfPagesError
            No memory for the new tokens; the cache holds what it held.
        RequestError
            More tokens than `max_seq_len`, more sequences than `max_batch_size`, or tensors that do not fit; the
            message names them.
        ClosedError
            After `close`.
        """
        self._layers.check_open()
        if not isinstance(input_pos, torch.Tensor) or input_pos.dtype not in (torch.int32, torch.int64):
            what = input_pos.dtype if isinstance(input_pos, torch.Tensor) else type(input_pos).__name__
            raise RequestError(f"input_pos is of {what}; it must be a tensor of int32 or int64")
        if input_pos.dim() != 1 or (k.dim() == 4 and len(input_pos) != k.shape[2]):
            wanted = k.shape[2] if k.dim() == 4 else "S"
            raise RequestError(
                f"input_pos has shape {list(input_pos.shape)}; it must be [{wanted}], one for each token of k"
            )
        if input_pos.device.type == "cpu" and len(input_pos):
            expected = torch.arange(self.size, self.size + len(input_pos), device="cpu")
            if not torch.equal(input_pos.to(expected.dtype), expected):
                raise RequestError(
                    f"input_pos goes from {input_pos[0]} to {input_pos[-1]}; new tokens are at {self.size}, where the "
                    f"cache ends, to {expected[-1]}. To write again, reset() or crop(num_tokens) first"
                )
        return self._append(k, v)


class TorchtuneKVCache(_LayerCache):
    """A layer's KV cache with the call of torchtune's: ``update(k, v)`` writes behind what is held.

    Parameters
    ----------
    batch_size, max_seq_len, num_kv_heads, head_dim, dtype
        As for `KVCache`; `batch_size` is the most sequences.
    returns, pool
        As for `KVCache`.

    Examples
    --------
    >>> cache = TorchtuneKVCache(2, 4096, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    >>> k = v = torch.ones(2, 2, 3, 64)
    >>> keys, values = cache.update(k, v)
    >>> keys.shape, cache.size, keys.sum().item(), cache.committed_bytes
    (torch.Size([2, 2, 4096, 64]), 3, 768.0, 131072)
    """

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        returns: Returns = "full",
        pool: PagePool | None = None,
    ) -> None:
        sizes = {"batch_size": batch_size, "max_seq_len": max_seq_len}
        super().__init__({**sizes, "num_kv_heads": num_kv_heads, "head_dim": head_dim}, dtype, returns, pool)
        self.batch_size = batch_size

    @property
    def cache_pos(self) -> torch.Tensor:
        """Positions from the next token's on, [max_seq_len], on the CPU."""
        return torch.arange(self._layers.config.max_context_tokens, device="cpu") + self.size

    @eager
    def update(self, k_val: torch.Tensor, v_val: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of new tokens, [B, num_kv_heads, S, head_dim], behind those held.

        Returns and raises as `KVCache.update`.
        """
        return self._append(k_val, v_val)
