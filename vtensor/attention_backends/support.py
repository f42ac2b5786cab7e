"""Support: what a kernel can do, stated as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from vtensor.triton_kernels.arguments import FP8, AttentionArguments

__all__ = ["Feature", "Lengths", "Support", "needed_features"]

Feature = Literal[
    "batch_idx", "cu_seqlens", "causal=False", "window", "softcap", "sinks", "alibi_slopes", "fp8", "return_lse", "Dv"
]
Lengths = Literal["device", "host"]


@dataclass(frozen=True)
class Support:
    """What a kernel can do.

    Attributes
    ----------
    dtypes : tuple of torch.dtype
        Of q.
    features : frozenset of str
        What it can do beyond the plain call. ``"Dv"``: values of another width than that of the keys. ``"return_lse"``
        brings ``"sinks"`` with it: see `vtensor.attention_backends.backend.with_sinks`.
    lengths : {"device", "host"}
        Where it needs `seq_lens`, `batch_idx` and `cu_seqlens`. ``"host"``: they are read, which waits for the device
        and cannot be in a CUDA graph.
    overread_tokens : int
        The most rows behind a sequence that it may read, as kernels do that read whole tiles. They must have memory and
        hold numbers: what is no number there (NaN) may reach the result.
    devices : tuple of str
    head_dims : tuple of int
        Those that it can do; empty: all up to `most_head_dim`.
    most_head_dim : int
    capabilities : (int, int), (int, int)
        The first compute capability that it runs on, and the first after that on which it does not.
    """

    dtypes: tuple[torch.dtype, ...]
    features: frozenset[Feature]
    lengths: Lengths = "device"
    overread_tokens: int = 0
    devices: tuple[str, ...] = ("cuda",)
    head_dims: tuple[int, ...] = ()
    most_head_dim: int = 256
    capabilities: tuple[tuple[int, int], tuple[int, int]] = ((8, 0), (99, 0))

    def __post_init__(self) -> None:
        unknown = self.features - set(get_args(Feature))
        if unknown:
            raise ValueError(f"features={sorted(unknown)} must be of {get_args(Feature)}")
        if self.overread_tokens < 0:
            raise ValueError(f"overread_tokens={self.overread_tokens} must be 0 or more")

    def why_not_on(self, device: torch.device) -> str | None:
        """Say why a kernel does not run on a device, or None."""
        if device.type not in self.devices:
            return f"it is for tensors on {' or '.join(self.devices)}, not {device.type}"
        if device.type == "cuda":
            (first, last), capability = self.capabilities, torch.cuda.get_device_capability(device)
            if not first <= capability < last:
                return f"it is not for GPUs of compute capability {capability[0]}.{capability[1]}"
        return None

    def why_not(self, call: AttentionArguments, *, return_lse: bool) -> str | None:
        """Say what of a call, apart from its device, a kernel cannot do, or None."""
        head_dim = call.q.shape[-1]
        if call.q.dtype not in self.dtypes:
            return f"it takes q of {' or '.join(map(str, self.dtypes))}, and q has dtype {call.q.dtype}"
        if self.head_dims and head_dim not in self.head_dims:
            return f"it takes head dimensions of {', '.join(map(str, self.head_dims))}, and q has {head_dim}"
        if head_dim > self.most_head_dim:
            return f"it takes head dimensions of at most {self.most_head_dim}, and q has {head_dim}"
        for feature in needed_features(call, return_lse=return_lse):
            if feature not in self.features and not (feature == "sinks" and "return_lse" in self.features):
                return f"it cannot do {_IN_WORDS.get(feature, feature)}"
        return None


_IN_WORDS: dict[Feature, str] = {
    "fp8": f"a cache of {FP8} beside q of another dtype",
    "Dv": "values of another width than the keys'",
    "cu_seqlens": "requests of different numbers of queries (cu_seqlens)",
}


def needed_features(call: AttentionArguments, *, return_lse: bool) -> Iterator[Feature]:
    """What a call asks for beyond the plain one."""
    if call.batch_idx is not None:
        yield "batch_idx"
    if call.cu_seqlens is not None:
        yield "cu_seqlens"
    if not call.causal and (call.cu_seqlens is not None or call.q.shape[1] > 1):  # a single query sees all either way
        yield "causal=False"
    if call.window:
        yield "window"
    if call.softcap:
        yield "softcap"
    if call.sinks is not None:
        yield "sinks"
    if call.alibi_slopes is not None:
        yield "alibi_slopes"
    if call.k.dtype == FP8:
        yield "fp8"
    if return_lse:
        yield "return_lse"
    if call.v.shape[3] != call.k.shape[3]:
        yield "Dv"
