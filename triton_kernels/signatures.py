"""Signatures: what checks, choices and plans depend on, so that calls of a kind are looked at once.

By them are kept: back-ends that were chosen (`attention_backends.dispatch`), plans for calls of our functions as their
callers make them (`attention`), and plans for operators of torch.compile, whose arguments are filled in (`library`).
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["attention_key", "remember", "signature"]


def signature(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """What checks and launches depend on: all of tensors but where their memory is and what is in it."""
    return tuple(
        None if one is None else (type(one), one.shape, one.stride(), one.dtype, one.device) for one in tensors
    )


def attention_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    causal: bool,
    options: tuple[Any, ...],
    return_lse: bool,
    out: torch.Tensor | None,
) -> Any:
    """A key of all that counts in a call of attention but T; None where it has arguments that are not what they should.

    `options`: scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale.
    """
    try:
        scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale = options
        if type(causal) is not bool or not all(x is None or type(x) in (int, float) for x in options[:3]):
            return None
        addresses = k.data_ptr(), v.data_ptr()  # latents are one memory; descriptors want multiples of 16
        has_grad = q.requires_grad or k.requires_grad or v.requires_grad or (out is not None and out.requires_grad)
        key: tuple[Any, ...] = (
            q.shape if cu_seqlens is None else q.shape[1:], q.stride(), q.dtype, q.device, type(q),
            k.shape, k.stride(), k.dtype, k.device, type(k),
            v.shape, v.stride(), v.dtype, v.device, type(v),
            seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.device,
            addresses[0] == addresses[1], (addresses[0] | addresses[1]) % 16,
            has_grad and torch.is_grad_enabled(), causal, bool(return_lse),
        )  # fmt: skip
        if batch_idx is not None or cu_seqlens is not None:
            key += (signature(batch_idx, cu_seqlens),)
        if out is not None:
            fits = out.shape == (*q.shape[:-1], v.shape[3])  # rather than its shape, in which T is
            key += ("out", fits, out.stride(), out.dtype, out.device, type(out))
        if any(x is not None for x in options):
            key += (
                signature(sinks, alibi_slopes, k_scale, v_scale),
                scale, type(scale), window, type(window), softcap, type(softcap),
            )  # fmt: skip
    except (AttributeError, TypeError, RuntimeError, IndexError):  # no tensors, or none with memory
        return None
    return key


def remember(known: dict[Any, Any], key: Any, value: Any, most: int = 4096) -> None:
    """Keep what is known of a kind of call; so many kinds, and after that all anew."""
    if len(known) >= most:
        known.clear()
    known[key] = value
