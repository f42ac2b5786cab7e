"""Eager: what torch.compile is to call as it is, rather than to trace into."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["eager", "skip_our_frames"]

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """A function that `torch.compile` does not trace: a graph ends before it and another one begins after it.

    As `torch.compiler.disable`, which imports Dynamo, a second of work; here that is left to who compiles.
    """
    reason = f"vtensor's {function.__name__} is not for graphs"

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        disabled: Callable[P, R] = _disabled(function, reason)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable, call._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
    return call


@functools.cache
def _disabled(function: Any, reason: str) -> Any:
    skip_our_frames()
    return torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]


@functools.cache
def skip_our_frames() -> None:
    """Have Dynamo, which is loaded, leave the functions of this package as they are.

    Where a graph has ended, it would look at all that is called before the next one begins, operators of virtual
    tensors among it.
    """
    trace_rules = sys.modules.get("torch._dynamo.trace_rules")
    if trace_rules is not None:
        for package in ("vtensor", "vtensor.allocator"):
            trace_rules.add(package)
