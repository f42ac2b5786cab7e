"""Eager: what torch.compile is to call as it is, rather than to trace into."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["eager", "skip_our_frames", "untraced"]

P = ParamSpec("P")
R = TypeVar("R")

# What works on memory, and would be looked at where a graph has ended and the next one has not begun.
_SKIPPED = (
    *("vtensor.eager", "vtensor.factory", "vtensor.tensor", "vtensor.traced", "vtensor.region", "vtensor.effects"),
    *("vtensor.watched", "vtensor.access", "vtensor.growth", "vtensor.copies"),
    *("vtensor.indexing", "vtensor.footprint", "vtensor.pools", "vtensor.streams", "vtensor.interrupts"),
    *("vtensor.allocator", "vtensor.kvcache"),
    *("vtensor.integrations.module", "vtensor.integrations.module_layers", "vtensor.integrations.layer_rows"),
    "vtensor.integrations.first_slots",
)
_has_told = False


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """A function that `torch.compile` does not trace: a graph ends before it and another one begins after it.

    As `torch.compiler.disable`, which imports Dynamo, a second of work; here that is left to who compiles.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _has_told:
            skip_our_frames()
        return function(*args, **kwargs)

    reason = f"vtensor's {function.__name__} is not for graphs"
    call._torchdynamo_disable, call._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
    return call


def untraced(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function of which nothing is to be traced, nor of what it calls; from one that is `eager`."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        function = dynamo.disable(function)
    return function(*args, **kwargs)


def skip_our_frames() -> None:
    """Have Dynamo, once it is loaded, leave the functions that work on memory as they are."""
    global _has_told
    add = getattr(sys.modules.get("torch._dynamo.trace_rules"), "add", None)
    if not _has_told and add is not None:
        _has_told = True
        for module in _SKIPPED:
            add(module)


skip_our_frames._torchdynamo_disable = True  # type: ignore[attr-defined]
