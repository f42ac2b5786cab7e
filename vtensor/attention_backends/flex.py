"""Back-end on torch's flex_attention: compiled on a GPU, unfused on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from vtensor.attention_backends.backend import Result, why_no_module
from vtensor.attention_backends.groups import GroupBackend
from vtensor.attention_backends.support import Support
from vtensor.triton_kernels.arguments import MOST_HEAD_DIM, QUERY_DTYPES, AttentionArguments

__all__ = ["FlexBackend"]

ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class FlexBackend(GroupBackend):
    """torch.nn.attention.flex_attention.

    Masks are part of the scores: a mask of blocks would have to be made for each length.
    """

    name = "flex"
    package = "torch"
    support = Support(
        QUERY_DTYPES,
        frozenset({"batch_idx", "cu_seqlens", "causal=False", "window", "softcap", "alibi_slopes", "return_lse", "Dv"}),
        lengths="host",
        devices=("cuda", "cpu"),
        most_head_dim=MOST_HEAD_DIM,
    )

    def why_absent(self) -> str | None:
        """Say why it cannot be loaded, or None."""
        return why_no_module("torch.nn.attention.flex_attention")

    def run_group(
        self, call: AttentionArguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool
    ) -> Result:
        """Compute a group; see `GroupBackend.run_group`."""
        from torch.nn.attention.flex_attention import AuxRequest

        out, aux = _flex(q.device.type)(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=_score_mod(call, k.shape[1] - q.shape[1]),
            scale=call.scale,
            enable_gqa=call.group > 1,
            return_aux=AuxRequest(lse=True),
        )
        return out.transpose(1, 2), aux.lse.transpose(1, 2)


@functools.cache
def _flex(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=True)


def _score_mod(call: AttentionArguments, offset: int) -> ScoreMod:
    # Numbers as tensors: a new one compiles nothing, and of a float the compiler makes one itself, and cannot read it.
    def number(value: float) -> torch.Tensor:
        return torch.tensor(value, device=call.q.device)

    causal, slopes, first = call.causal, call.alibi_slopes, number(offset)
    window = number(call.window) if call.window else None
    softcap = number(call.softcap) if call.softcap else None

    def score_mod(
        score: torch.Tensor, b: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        position = query + first
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score + slopes[head] * (key - position)
        if causal:
            score = torch.where(key <= position, score, -float("inf"))
        if window is not None:
            score = torch.where(key > position - window, score, -float("inf"))
        return score

    return score_mod
