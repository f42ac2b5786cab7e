"""Call: attention over a cache by any kernel. Light to import; what it needs is loaded by the first call."""

from __future__ import annotations

import torch

__all__ = ["attention"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    overread_tokens: int = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens over a contiguous KV cache, by any kernel that is there.

    Query i of the n queries of request b stands at position p = seq_lens[b] - n + i, and sees the tokens j <= p of its
    slot. One that sees none, and padding, have output 0 and log-sum-exp -inf. The cache is read where it lies, never
    copied.

    Parameters
    ----------
    q : Tensor
        Queries [B, Hq, D], or [B, Sq, Hq, D], of float16, bfloat16 or float32; with `cu_seqlens` [T, Hq, D].
    k, v : Tensor
        The cache [slots, L, Hkv, D] and [slots, L, Hkv, Dv], of any strides but the last, which is 1; of q's dtype or
        float8_e4m3fn. Hq is a multiple of Hkv.
    seq_lens : Tensor
        Tokens of each request in the cache, the new ones among them: [B] int32, on q's device.
    batch_idx : Tensor, optional
        The slot of each request, or -1 for padding: [B] int32. None: request b is in slot b.
    cu_seqlens : Tensor, optional
        Queries of request b are rows cu_seqlens[b] to cu_seqlens[b + 1] of q: [B + 1] int32.
    causal : bool
        False: all queries see all tokens of their request.
    scale : float, optional
        Factor of the logits; None: 1 / sqrt(D).
    window : int, optional
        W: the query at p sees p - W + 1 to p only. (FlashAttention calls that (W - 1, 0).)
    softcap : float, optional
        C: logits become C tanh(logit / C).
    sinks : Tensor, optional
        A logit of nothing for each head, [Hq].
    alibi_slopes : Tensor, optional
        Added to a logit: slope * (j - p), [Hq] float32.
    k_scale, v_scale : Tensor, optional
        Of a float8_e4m3fn cache: real value = stored one * scale, [Hkv] or one value, float32.
    return_lse : bool
        Also return the logarithm (natural) of the sum of weights.
    backend : str
        ``"auto"``, or one of ``"triton"``, ``"sdpa-flash"``, ``"cudnn"``, ``"flash-attn-2"``, ``"flash-attn-3"`` (or
        one build of it: ``"fa3-upstream"``, ``"fa3-fwd"``, ``"fa3-vllm"``), ``"flashinfer"``, ``"flex"``,
        ``"reference"``.
        ``"auto"`` takes the fastest measured on this kind of GPU, of those that can do the call; on the host Triton's
        interpreter where it is on, else the reference. `vtensor doctor` lists those that are there.
    overread_tokens : int
        Tokens behind each sequence, and with a window before it, that a kernel may read: there is memory, and it holds
        numbers (see `overread_tokens` of `KVCacheConfig`). ``"auto"`` takes no kernel that reads more. A back-end that
        is named is not asked: FlashAttention 3 reads up to 192.

    Returns
    -------
    Tensor, or Tensor and Tensor
        Outputs of q's dtype and shape, Dv wide; with `return_lse` also float32 values of q's shape without its last
        dimension.

    Raises
    ------
    ValueError
        An argument that does not fit, or a back-end that is not there or cannot do the call; the message says which
        can.

    Notes
    -----
    "sdpa-flash", "cudnn", "flashinfer", "flex", "reference", and "flash-attn-2" with `cu_seqlens`, read the lengths on
    the host. That waits for the device, and cannot be in a CUDA graph. "auto" takes none of them unless no other can do
    the call. In a graph of torch.compile it is "triton".

    Kernels read memory without looking whether it is there: give `plain` views of a virtual cache, after `step` for
    these lengths, and the window of the layer (`LayerSpec`). To find a mistake, give the views themselves, which only
    "sdpa-flash" and "reference" take: they raise where there is no memory. These two have gradients as well.

    Examples
    --------
    Two requests of 3 and 5 tokens, in slots 2 and 0, decode one token each:

    >>> import torch, vtensor as vt
    >>> k, v = torch.randn(2, 4, 16, 2, 64)  # 4 slots of up to 16 tokens, 2 heads
    >>> q = torch.randn(2, 8, 64)
    >>> lens, slots = torch.tensor([3, 5], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    >>> vt.attention(q, k, v, lens, slots, backend="sdpa-flash").shape
    torch.Size([2, 8, 64])
    """
    from vtensor.attention_backends.dispatch import dispatch

    given = scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale
    return dispatch(q, k, v, seq_lens, batch_idx, cu_seqlens, causal, given, return_lse, backend, overread_tokens)
