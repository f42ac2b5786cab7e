"""Backend: the base of all that run an attention."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from vtensor.attention_backends.support import Support
from vtensor.tensor import VirtualTensor
from vtensor.triton_kernels.arguments import AttentionArguments

__all__ = ["Backend", "CannotRunError", "Result", "why_no_module", "with_sinks"]

Result = tuple[torch.Tensor, torch.Tensor | None]


class CannotRunError(ValueError):
    """A back-end finds by the lengths that it cannot do a call; nothing has run."""


class Backend(ABC):
    """One way to compute an attention over a cache: what it can do, whether it is here, and how it is called.

    A back-end has no state, copies nothing of k and v, and reads at most `overread_tokens` rows that no query sees.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    """The distribution that it is in."""
    install: ClassVar[str] = ""
    """How to get it, where that is not by pip."""
    support: ClassVar[Support]
    of_torch: ClassVar[bool] = False
    """Whether it is made of torch's operators, which virtual tensors watch, and which have gradients."""

    @abstractmethod
    def why_absent(self) -> str | None:
        """Say why it cannot be loaded, or None. The first call loads it; never raises."""

    def version(self) -> str:
        """Version of its package, or an empty text where that is not told."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def why_not_on(self, device: torch.device) -> str | None:
        """Say why it does not run on a device, or None."""
        return self.support.why_not_on(device)

    def why_not(self, call: AttentionArguments, *, return_lse: bool = False) -> str | None:
        """Say what of a call it cannot do, or None. Looks at no length, and so waits for nothing."""
        reason = self.why_not_on(call.q.device) or self.support.why_not(call, return_lse=return_lse)
        if reason is None and not self.of_torch:
            reason = _why_not_by_address(call)
        if reason is None and self.reads_lengths(call) and _is_capturing(call.q):
            reason = "it reads the lengths on the host, which cannot be in a CUDA graph"
        return reason

    def reads_lengths(self, call: AttentionArguments) -> bool:
        """Whether a call waits for lengths or indices that are on the device."""
        return self.support.lengths == "host"

    def overread_tokens(self, call: AttentionArguments) -> int:
        """Rows behind each sequence, and with a window before it, that a call may read."""
        return self.support.overread_tokens

    @abstractmethod
    def run(self, call: AttentionArguments, *, return_lse: bool) -> Result:
        """Compute a call for which `why_not` is None, sinks apart unless they are of its features.

        Returns
        -------
        Tensor, Tensor or None
            Outputs [..., Hq, Dv] of q's dtype, and with `return_lse` float32 log-sum-exp values [..., Hq].

        Raises
        ------
        CannotRunError
            What the lengths tell; only of a back-end that reads them.
        """

    def attend(self, call: AttentionArguments, *, return_lse: bool) -> Result:
        """Compute a call, sinks included."""
        if call.sinks is None or "sinks" in self.support.features:
            return self.run(call, return_lse=return_lse)
        out, lse = self.run(call._replace(sinks=None), return_lse=True)
        assert lse is not None
        out, lse = with_sinks(out, lse, call.sinks)
        return out, lse if return_lse else None


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add sinks to an attention that was computed without them.

    A sink adds exp(sink) to the sum of weights S and nothing to the values. With S = exp(lse), outputs shrink by
    S / (S + exp(sink)) = sigmoid(lse - sink).
    """
    sinks = sinks.float()
    is_empty = lse == -torch.inf
    share = torch.where(is_empty, 0.0, torch.sigmoid(lse - sinks)).unsqueeze(-1)
    both = torch.logaddexp(lse, sinks)
    return (out.float() * share).to(out.dtype), torch.where(is_empty, lse, both)


def _why_not_by_address(call: AttentionArguments) -> str | None:
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        if isinstance(tensor, VirtualTensor):
            return f"{name} is a virtual tensor, whose memory it would not look for; give {name}.plain() after a step"
        if tensor.requires_grad and torch.is_grad_enabled():
            return f"{name} requires grad, and it has none; use torch.no_grad()"
    return None


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@functools.cache
def why_no_module(*names: str) -> str | None:
    """Import the first module of these that there is; say why none could be, or None."""
    reasons = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a package built for another torch fails in any way
            found = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
            told = (str(error).strip().splitlines() or [type(error).__name__])[0]
            reasons.append(f"{name} is not installed" if found else f"{name} does not load: {told}")
        else:
            return None
    return "; ".join(reasons)
