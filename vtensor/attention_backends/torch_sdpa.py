"""Back-ends in torch's scaled_dot_product_attention: its FlashAttention 2, and cuDNN.

The operators below that function are called, as they give the log-sum-exp values, and (FlashAttention) align a causal
mask with the last token, which the function refuses.
"""

from __future__ import annotations

from typing import Any

import torch

from vtensor.attention_backends.backend import Result
from vtensor.attention_backends.groups import Group, GroupBackend
from vtensor.attention_backends.support import Support
from vtensor.triton_kernels.arguments import QUERY_DTYPES, AttentionArguments

__all__ = ["CudnnBackend", "SdpaFlashBackend"]


class _SdpaBackend(GroupBackend):
    package = "torch"
    of_torch = True

    def why_absent(self) -> str | None:
        """Say why it cannot be used, or None."""
        return None

    def why_not(self, call: AttentionArguments, *, return_lse: bool = False) -> str | None:
        """Say what of a call it cannot do, or None."""
        several = call.cu_seqlens is not None or call.q.shape[1] > 1
        if call.window and several and call.q.device.type != "cpu":  # a single query's window is a shorter view
            return "it cannot do a window with several queries of a request"
        return super().why_not(call, return_lse=return_lse)


class SdpaFlashBackend(_SdpaBackend):
    """torch's own FlashAttention 2 on a GPU, and its counterpart on the host."""

    name = "sdpa-flash"
    support = Support(
        QUERY_DTYPES,
        frozenset({"batch_idx", "cu_seqlens", "causal=False", "window", "return_lse"}),
        lengths="host",
        devices=("cuda", "cpu"),
    )

    def why_not(self, call: AttentionArguments, *, return_lse: bool = False) -> str | None:
        """Say what of a call it cannot do, or None."""
        if call.q.is_cuda and call.q.dtype == torch.float32:
            return "it takes q of torch.float16 or torch.bfloat16 on a GPU, and q has dtype torch.float32"
        return super().why_not(call, return_lse=return_lse)

    def run_group(
        self, call: AttentionArguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool
    ) -> Result:
        """Compute a group; see `GroupBackend.run_group`."""
        heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        is_causal = call.causal and q.shape[1] > 1
        if q.device.type == "cpu":
            mask = _mask(call, q, k) if is_causal else None
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = flash(*heads, 0.0, False, attn_mask=mask, scale=call.scale)
        else:
            found = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, is_causal, False, scale=call.scale)
            out, lse = found[0], found[1][:, :, : q.shape[1]]
        return out.transpose(1, 2), lse.transpose(1, 2)


def _mask(call: AttentionArguments, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[n, tokens]: the host's operator aligns its own causal mask with the first token."""
    position = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    key = torch.arange(k.shape[1])[None, :]
    sees = key <= position
    if call.window:
        sees &= key > position - call.window
    return torch.zeros(sees.shape, dtype=q.dtype).masked_fill_(~sees, -torch.inf)


class CudnnBackend(_SdpaBackend):
    """cuDNN as it comes with torch. It makes a plan for each length that it meets, which takes milliseconds."""

    name = "cudnn"
    install = "a torch that is built for CUDA"
    support = Support(
        (torch.float16, torch.bfloat16),
        frozenset({"batch_idx", "cu_seqlens", "causal=False", "window", "return_lse"}),
        lengths="host",
        most_head_dim=128,
    )

    def why_absent(self) -> str | None:
        """Say why it cannot be used, or None."""
        cudnn: Any = torch.backends.cudnn
        return None if cudnn.is_available() else "this torch has no cuDNN"

    def version(self) -> str:
        """Version of cuDNN."""
        cudnn: Any = torch.backends.cudnn
        return f"cuDNN {cudnn.version()}" if cudnn.is_available() else ""

    def why_not_group(self, call: AttentionArguments, group: Group) -> str | None:
        """Say why a group cannot be done, or None: its causal mask is aligned with the first token."""
        count = group.num_queries - group.num_blind(call.causal)
        if call.causal and 1 < count < group.num_tokens:
            return f"{count} new tokens behind {group.num_tokens - count} cached ones; it does either one or all"
        return None

    def run_group(
        self, call: AttentionArguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool
    ) -> Result:
        """Compute a group; see `GroupBackend.run_group`."""
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            None,
            return_lse,
            0.0,
            call.causal and q.shape[1] > 1,
            False,
            scale=call.scale,
        )
        lse = found[1].reshape(*q.shape[:1], q.shape[2], q.shape[1]).transpose(1, 2) if return_lse else None
        return found[0].transpose(1, 2), lse
