"""Back-ends of our own: the Triton kernels, and the reference in torch."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any, get_args

import torch

from vtensor.attention_backends.backend import Backend, Result, why_no_module
from vtensor.attention_backends.support import Feature, Support
from vtensor.triton_kernels.arguments import MOST_HEAD_DIM, QUERY_DTYPES, AttentionArguments

__all__ = ["ReferenceBackend", "TritonBackend"]

_ALL: frozenset[Feature] = frozenset(get_args(Feature))


class TritonBackend(Backend):
    """`decode_attention` and `prefill_attention`; tensors on the host by Triton's interpreter, where it is on."""

    name = "triton"
    package = "triton"
    support = Support(QUERY_DTYPES, _ALL, devices=("cuda", "cpu"), most_head_dim=MOST_HEAD_DIM)

    def why_absent(self) -> str | None:
        """Say why it cannot be loaded, or None."""
        return why_no_module("triton") or why_no_module("vtensor.triton_kernels.attention")

    def why_not_on(self, device: torch.device) -> str | None:
        """Say why it does not run on a device, or None."""
        if device.type == "cpu" and not _is_interpreted():
            return "tensors on the host need Triton's interpreter (TRITON_INTERPRET=1 before it is imported)"
        return super().why_not_on(device)

    def why_not(self, call: AttentionArguments, *, return_lse: bool = False) -> str | None:
        """Say what of a call it cannot do, or None."""
        if call.q.device.type == "cpu" and call.q.dtype == torch.bfloat16:
            return "Triton's interpreter computes torch.bfloat16 wrongly; use float16 or float32"
        return super().why_not(call, return_lse=return_lse)

    def run(self, call: AttentionArguments, *, return_lse: bool) -> Result:
        """Compute a call; see `Backend.run`."""
        options = {
            "scale": call.scale,
            "window": call.window or None,
            "softcap": call.softcap or None,
            "sinks": call.sinks,
            "alibi_slopes": call.alibi_slopes,
            "k_scale": call.k_scale,
            "v_scale": call.v_scale,
            "return_lse": return_lse,
        }
        cache = call.k, call.v
        found: Any
        if call.cu_seqlens is not None:
            prefill = _kernel("prefill_attention")
            found = prefill(
                call.q, *cache, call.cu_seqlens, call.seq_lens, call.batch_idx, causal=call.causal, **options
            )
        elif call.causal or call.q.shape[1] <= 1:
            found = _kernel("decode_attention")(call.q, *cache, call.seq_lens, call.batch_idx, **options)
        else:
            batch, count = call.q.shape[:2]
            rows = torch.arange(0, (batch + 1) * count, count, dtype=torch.int32, device=call.q.device)
            prefill = _kernel("prefill_attention")
            q = call.q.reshape(-1, *call.q.shape[-2:])
            found = prefill(q, *cache, rows, call.seq_lens, call.batch_idx, causal=call.causal, **options)
        out, lse = found if return_lse else (found, None)
        shape = call.q.shape[:-1]
        return out.reshape(*shape, call.v.shape[3]), None if lse is None else lse.reshape(shape)


@functools.cache
def _kernel(name: str) -> Any:
    return getattr(importlib.import_module("vtensor.triton_kernels"), name)


def _is_interpreted() -> bool:
    if "TRITON_INTERPRET" not in os.environ or why_no_module("triton"):
        return False  # without loading Triton
    from vtensor.triton_kernels.launch import is_interpreted

    return is_interpreted()


class ReferenceBackend(Backend):
    """Plain torch in float32, one request after another. Takes all, slowly."""

    name = "reference"
    of_torch = True
    package = "torch"
    support = Support(
        QUERY_DTYPES,
        _ALL,
        lengths="host",
        devices=("cuda", "cpu"),
        most_head_dim=MOST_HEAD_DIM,
        capabilities=((0, 0), (99, 0)),
    )

    def why_absent(self) -> str | None:
        """It is always there."""
        return None

    def run(self, call: AttentionArguments, *, return_lse: bool) -> Result:
        """Compute a call; see `Backend.run`."""
        from vtensor.triton_kernels.reference import attend

        out, lse = attend(call)
        return out, lse if return_lse else None
