"""Back-end on FlashInfer: its kernel of one request, which reads the cache where it lies."""

from __future__ import annotations

import importlib
import math

import torch

from vtensor.attention_backends.backend import Result, why_no_module
from vtensor.attention_backends.groups import GroupBackend
from vtensor.attention_backends.support import Support
from vtensor.triton_kernels.arguments import AttentionArguments

__all__ = ["FlashInferBackend"]


class FlashInferBackend(GroupBackend):
    """flashinfer.single_prefill_with_kv_cache, a launch for each request.

    Its kernels of batches want lengths on the host as well, to plan, and pages.
    """

    name = "flashinfer"
    package = "flashinfer-python"
    support = Support(
        (torch.float16, torch.bfloat16),
        frozenset({"batch_idx", "cu_seqlens", "causal=False", "window", "softcap", "return_lse"}),
        lengths="host",
        head_dims=(64, 128, 256),
    )

    def why_absent(self) -> str | None:
        """Say why it cannot be loaded, or None."""
        return why_no_module("flashinfer")

    def run_group(
        self, call: AttentionArguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool
    ) -> Result:
        """Compute a group; see `GroupBackend.run_group`."""
        attend = importlib.import_module("flashinfer").single_prefill_with_kv_cache
        found = [
            attend(
                q_one,
                k_one,
                v_one,
                causal=call.causal and q.shape[1] > 1,
                kv_layout="NHD",
                sm_scale=call.scale,
                window_left=call.window - 1 if call.window else -1,
                logits_soft_cap=call.softcap or None,
                return_lse=return_lse,
            )
            for q_one, k_one, v_one in zip(q, k, v, strict=True)
        ]
        if not return_lse:
            return torch.stack(found), None
        outs, sums = zip(*found, strict=True)
        return torch.stack(outs), torch.stack(sums) * math.log(2)  # its logarithms are of base 2
