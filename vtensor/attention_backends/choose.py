"""Choose: from the name of a back-end, or from none, to one that is here and can do a call."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vtensor.attention_backends.backend import Backend
from vtensor.attention_backends.flash_attention import FlashAttention2Backend
from vtensor.attention_backends.flash_attention3 import Fa3FwdBackend, Fa3UpstreamBackend, Fa3VllmBackend
from vtensor.attention_backends.flash_infer import FlashInferBackend
from vtensor.attention_backends.flex import FlexBackend
from vtensor.attention_backends.own import ReferenceBackend, TritonBackend
from vtensor.attention_backends.table import order
from vtensor.attention_backends.torch_sdpa import CudnnBackend, SdpaFlashBackend
from vtensor.triton_kernels.arguments import AttentionArguments

__all__ = ["BACKENDS", "FAMILIES", "choose", "refusal"]

BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        TritonBackend(),
        SdpaFlashBackend(),
        CudnnBackend(),
        FlashAttention2Backend(),
        Fa3UpstreamBackend(),
        Fa3FwdBackend(),
        Fa3VllmBackend(),
        FlashInferBackend(),
        FlexBackend(),
        ReferenceBackend(),
    )
}
FAMILIES: Mapping[str, tuple[str, ...]] = {"flash-attn-3": ("fa3-upstream", "fa3-fwd", "fa3-vllm")}
"""Names that stand for the first of several builds that can do a call."""


def choose(name: str, call: AttentionArguments, *, return_lse: bool = False, overread_tokens: int = 0) -> Backend:
    """Find the back-end for a call.

    ``"auto"`` takes the first of the table's that is here, can do the call, and reads no more rows beside a sequence
    than `overread_tokens`. One that is named is not held to those.

    Raises
    ------
    ValueError
        There is no back-end of that name, or it is not here, or it cannot do the call.
    """
    if name == "auto":
        capability = torch.cuda.get_device_capability(call.q.device) if call.q.is_cuda else None
        names = order(call, capability)
    else:
        names = FAMILIES.get(name, (name,))
        if names[0] not in BACKENDS:
            known = ["auto", *BACKENDS, *FAMILIES]
            raise ValueError(f"backend={name!r} must be one of {', '.join(known)}")
    reasons = []
    for each in names:
        backend = BACKENDS[each]
        reason = _why_not(backend, call, return_lse=return_lse)
        if reason is None and name == "auto" and backend.overread_tokens(call) > overread_tokens:
            reason = f"it reads up to {backend.overread_tokens(call)} tokens beside a sequence"
        if reason is None:
            return backend
        reasons.append(reason if each == name else f"{each}: {reason}")
    raise refusal(name, "; ".join(reasons), call, return_lse=return_lse)


def refusal(name: str, reason: str, call: AttentionArguments, *, return_lse: bool, but: str = "") -> ValueError:
    """Make the error that says why a back-end is not used, and which can be; `but` is known to be unable."""
    able = [
        each
        for each, backend in BACKENDS.items()
        if each not in (name, but) and _why_not(backend, call, return_lse=return_lse) is None
    ]
    return ValueError(f"backend={name!r} cannot be used: {reason}; these can: {', '.join(able) or 'none'}")


def _why_not(backend: Backend, call: AttentionArguments, *, return_lse: bool) -> str | None:
    return backend.why_not(call, return_lse=return_lse) or backend.why_absent()
