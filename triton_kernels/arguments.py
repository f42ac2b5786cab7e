"""Arguments: what attention over a contiguous KV cache takes, checked before anything is launched."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = [
    "FP8",
    "MOST_HEAD_DIM",
    "QUERY_DTYPES",
    "AttentionArguments",
    "check_attention",
    "check_for_kernels",
    "check_indices",
    "check_target",
    "check_tensor",
    "shown",
]

FP8 = torch.float8_e4m3fn
MOST_HEAD_DIM = 576
_LONGEST = 1 << 30  # a longer window hides nothing, and sums with it stay within 32 bits
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class AttentionArguments(NamedTuple):
    """One attention over a cache, with all that was left out filled in.

    Query i of the n queries of request b stands at position p = seq_lens[b] - n + i, and sees the keys j <= p
    (j < seq_lens[b] if not `causal`), of those with a `window` only j > p - window.
    """

    q: torch.Tensor  # [T, Hq, D], or [B, Sq, Hq, D] without cu_seqlens
    k: torch.Tensor  # [slots, L, Hkv, D]
    v: torch.Tensor  # [slots, L, Hkv, Dv]
    seq_lens: torch.Tensor  # [B] int32
    batch_idx: torch.Tensor | None  # [B] int32
    cu_seqlens: torch.Tensor | None  # [B + 1] int32
    causal: bool
    scale: float
    window: int  # 0: all
    softcap: float  # 0: none
    sinks: torch.Tensor | None  # [Hq]
    alibi_slopes: torch.Tensor | None  # [Hq] float32
    k_scale: torch.Tensor | None  # [Hkv] or [1], float32
    v_scale: torch.Tensor | None

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return self.seq_lens.shape[0]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q.shape[-2] // self.k.shape[2]


def check_tensor(
    name: str,
    tensor: object,
    *,
    device: torch.device,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | str | None, ...],
    dense: bool = True,
) -> None:
    """Raise `ValueError` unless an argument is a tensor of a device, dtype and shape, and (`dense`) contiguous.

    In `shape` a number must be met, and a name stands for any.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}: it must be a tensor")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, and q is on {device}: they must be on one device")
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in dtypes:
        wanted = " or ".join(dict.fromkeys(map(str, dtypes)))
        raise ValueError(f"{name} has dtype {tensor.dtype}: it must be {wanted}")
    fits = tensor.dim() == len(shape) and all(
        not isinstance(wanted, int) or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        names = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}: it must be [{names}]")
    if dense and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}: it must be contiguous, use {name}.contiguous()")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has a stride of {tensor.stride(-1)} in its last dimension: it must be 1")


def check_attention(
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
) -> AttentionArguments:
    """Check the arguments of attention over a cache, and fill in what was left out.

    Queries of shape [B, Hq, D] become [B, 1, Hq, D] where `cu_seqlens` is None. What indices on a CUDA device hold is
    not looked at: that would wait for the device.

    Raises
    ------
    ValueError
        An argument that does not fit; the message names it, its value and the rule.
    """
    if not isinstance(q, torch.Tensor):
        raise ValueError(f"q is a {type(q).__name__}: it must be a tensor")
    device = q.device
    shape: tuple[str, ...] = ("T", "Hq", "D")
    if cu_seqlens is None:
        if q.dim() not in (3, 4):
            raise ValueError(f"q has shape {list(q.shape)}: it must be [B, Hq, D] or [B, Sq, Hq, D]")
        shape = ("B", "Sq", "Hq", "D")
        q = q.unsqueeze(1) if q.dim() == 3 else q
    check_tensor("q", q, device=device, dtype=QUERY_DTYPES, shape=shape, dense=False)
    head_dim = q.shape[-1]
    cache_dtypes = (q.dtype, FP8)
    if isinstance(k, torch.Tensor) and k.dtype not in cache_dtypes:
        raise ValueError(f"k has dtype {k.dtype}, and q has {q.dtype}: they must be one, or k must be of {FP8}")
    check_tensor("k", k, device=device, dtype=cache_dtypes, shape=("slots", "L", "Hkv", head_dim), dense=False)
    check_tensor("v", v, device=device, dtype=k.dtype, shape=(*k.shape[:3], "Dv"), dense=False)
    for name, width, most in (("q and k", head_dim, MOST_HEAD_DIM), ("v", v.shape[3], 512)):
        if width % 16 or not 16 <= width <= most:
            raise ValueError(f"{name}: a head dimension of {width} must be a multiple of 16, of at most {most}")
    num_heads, num_kv_heads = q.shape[-2], k.shape[2]
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_heads} heads and k has {num_kv_heads}: the first must be a multiple of the second"
        )
    if not isinstance(causal, bool):
        raise ValueError(f"causal={causal!r} must be True or False")
    size: int | str = "B" if cu_seqlens is not None else q.shape[0]
    if cu_seqlens is None and isinstance(seq_lens, torch.Tensor) and seq_lens.shape != (size,):
        raise ValueError(
            f"seq_lens has shape {list(seq_lens.shape)}: it must be [{size}], one for each request of q, "
            f"which has shape {list(q.shape)}; queries [T, Hq, D] of several tokens a request need cu_seqlens"
        )
    check_tensor("seq_lens", seq_lens, device=device, dtype=torch.int32, shape=(size,))
    batch = seq_lens.shape[0]
    if batch_idx is not None:
        check_tensor("batch_idx", batch_idx, device=device, dtype=torch.int32, shape=(batch,))
    elif batch > k.shape[0]:
        raise ValueError(f"seq_lens has {batch} requests and k has {k.shape[0]} slots: give batch_idx, a slot for each")
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens, device=device, dtype=torch.int32, shape=(batch + 1,))
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is not None:
            dtypes = QUERY_DTYPES if name == "sinks" else torch.float32
            check_tensor(name, per_head, device=device, dtype=dtypes, shape=(num_heads,))
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factor is None:
            continue
        if k.dtype != FP8:
            raise ValueError(f"{name} is for a cache of {FP8}, and k has dtype {k.dtype}: leave it out")
        size = 1 if isinstance(factor, torch.Tensor) and factor.numel() == 1 else num_kv_heads
        flat = factor.reshape(-1) if isinstance(factor, torch.Tensor) and factor.dim() == 0 else factor
        check_tensor(name, flat, device=device, dtype=torch.float32, shape=(size,))
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window={window!r} must be a number of tokens of at least 1, or None")
    if softcap is not None and not (_is_number(softcap) and softcap > 0):
        raise ValueError(f"softcap={softcap!r} must be a finite number above 0, or None")
    if scale is not None and not _is_number(scale):
        raise ValueError(f"scale={scale!r} must be a finite number, or None for 1 / sqrt(D)")
    if window is not None and not causal:
        raise ValueError(f"window={window} is for causal attention: leave it out, or let causal be True")
    call = AttentionArguments(
        q,
        k,
        v,
        seq_lens,
        batch_idx,
        cu_seqlens,
        causal,
        head_dim**-0.5 if scale is None else float(scale),
        min(window or 0, _LONGEST),
        softcap or 0.0,
        sinks,
        alibi_slopes,
        None if k_scale is None else k_scale.reshape(-1),
        None if v_scale is None else v_scale.reshape(-1),
    )
    if device.type == "cpu" and not torch.compiler.is_compiling():
        check_indices(call)
    return call


def check_for_kernels(**tensors: object) -> None:
    """Raise `ValueError` for tensors that a kernel, which sees addresses, would take for what they are not."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if type(tensor) is not torch.Tensor and hasattr(tensor, "plain"):
            raise ValueError(
                f"{name} is a virtual tensor, and kernels read memory without looking whether it is there: give "
                f"{name}.plain(), once the rows that they reach have memory (by step, or by commit)"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, and kernels have none: call them under torch.no_grad()")


def check_target(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` for what is written to, where elements share memory."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"{name} has strides {tensor.stride()} for shape {list(tensor.shape)}: its elements overlap")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3e38


def check_indices(call: AttentionArguments) -> None:
    """Look at lengths and indices themselves, which on a CPU costs nothing.

    Raises
    ------
    ValueError
        One that is out of range.
    """
    q, k, seq_lens, batch_idx, cu_seqlens = call.q, call.k, call.seq_lens, call.batch_idx, call.cu_seqlens
    slots, longest = k.shape[:2]
    if not seq_lens.numel():
        if cu_seqlens is not None and cu_seqlens.tolist() != [0]:
            raise ValueError(f"cu_seqlens={cu_seqlens.tolist()} of no request must be [0]")
        return
    if int(seq_lens.min()) < 0 or int(seq_lens.max()) > longest:
        raise ValueError(f"seq_lens={shown(seq_lens.tolist())} must be of 0 to {longest}, the length of k's slots")
    if batch_idx is not None and (int(batch_idx.min()) < -1 or int(batch_idx.max()) >= slots):
        raise ValueError(
            f"batch_idx={shown(batch_idx.tolist())} must be of 0 to {slots - 1}, k's slots, or -1 for padding"
        )
    if cu_seqlens is not None:
        counts = cu_seqlens.diff()
        if int(cu_seqlens[0]) or int(counts.min()) < 0 or int(cu_seqlens[-1]) > q.shape[0]:
            raise ValueError(
                f"cu_seqlens={shown(cu_seqlens.tolist())} must begin with 0, never fall, and end at most at "
                f"{q.shape[0]}, the number of q's rows"
            )


def shown(values: list[int]) -> str:
    """The first of some numbers, for a message."""
    return str(values) if len(values) <= 16 else f"[{', '.join(map(str, values[:16]))}, ...]"
