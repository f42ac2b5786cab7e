"""Back-end on FlashAttention 2, the package flash_attn."""

from __future__ import annotations

import importlib

import torch

from vtensor.attention_backends.backend import Result, why_no_module
from vtensor.attention_backends.groups import GroupBackend
from vtensor.attention_backends.support import Support
from vtensor.triton_kernels.arguments import AttentionArguments

__all__ = ["FlashAttention2Backend", "device_lengths", "fixed_lse", "window_size"]

_MOST_TILE = 256
"""Keys of the largest tile. Rows behind a sequence are masked when they are read; those before a window are not."""


class FlashAttention2Backend(GroupBackend):
    """flash_attn_with_kvcache: all requests in one launch where they have one number of queries, else in groups."""

    name = "flash-attn-2"
    package = "flash_attn"
    support = Support(
        (torch.float16, torch.bfloat16),
        frozenset(
            {"batch_idx", "cu_seqlens", "causal=False", "window", "softcap", "alibi_slopes", "return_lse"},
        ),
    )

    def why_absent(self) -> str | None:
        """Say why it cannot be loaded, or None."""
        return why_no_module("flash_attn")

    def why_not(self, call: AttentionArguments, *, return_lse: bool = False) -> str | None:
        """Say what of a call it cannot do, or None."""
        if call.alibi_slopes is not None and not call.causal:
            return "its alibi_slopes count the distance to later keys as that to earlier ones"
        return super().why_not(call, return_lse=return_lse)

    def reads_lengths(self, call: AttentionArguments) -> bool:
        """Whether a call waits for the device."""
        return call.cu_seqlens is not None

    def overread_tokens(self, call: AttentionArguments) -> int:
        """Rows that a call may read beside a sequence."""
        return _MOST_TILE if call.window and not self.reads_lengths(call) else 0

    def run(self, call: AttentionArguments, *, return_lse: bool) -> Result:
        """Compute a call; see `Backend.run`."""
        if self.reads_lengths(call):
            return super().run(call, return_lse=return_lse)
        k, v, lens, slots = device_lengths(call)
        return self._call(call, call.q, k, v, lens, slots, return_lse=return_lse)

    def run_group(
        self, call: AttentionArguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool
    ) -> Result:
        """Compute a group; see `GroupBackend.run_group`."""
        return self._call(call, q, k, v, k.shape[1], None, return_lse=return_lse)

    def _call(
        self,
        call: AttentionArguments,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lens: torch.Tensor | int,
        slots: torch.Tensor | None,
        *,
        return_lse: bool,
    ) -> Result:
        found = importlib.import_module("flash_attn").flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=lens,
            cache_batch_idx=slots,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=window_size(call),
            softcap=call.softcap,
            alibi_slopes=call.alibi_slopes,
            return_softmax_lse=return_lse,
        )
        return (found[0], fixed_lse(found[1].transpose(1, 2))) if return_lse else (found, None)


def window_size(call: AttentionArguments) -> tuple[int, int]:
    """A window as FlashAttention has it: (keys before the query, keys after it), -1 for all."""
    return (call.window - 1, 0) if call.window else (-1, -1)


def fixed_lse(lse: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp values of which those of no key are -inf; FlashAttention 2 has inf there."""
    return torch.where(lse == torch.inf, -torch.inf, lse)


def device_lengths(
    call: AttentionArguments,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """K and v of as many slots as it takes, lengths, and slots: padding becomes requests of length 0 in slot 0."""
    if call.batch_idx is None:
        return call.k[: call.batch_size], call.v[: call.batch_size], call.seq_lens, None
    lens = torch.where(call.batch_idx >= 0, call.seq_lens, 0)
    return call.k, call.v, lens, call.batch_idx.clamp(min=0)
