"""Contenders: ways to compute an attention over the same caches, ours and others'.

What others' take is what their kernels take: where a back-end of ours reads lengths on the host, its kernel is called
for equal lengths without that; only where lengths differ it is called as a user would, outside of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vtensor.attention_backends import attention
from vtensor.attention_backends.choose import BACKENDS
from vtensor.attention_backends.flash_attention import device_lengths
from vtensor.attention_backends.groups import Group, GroupBackend
from vtensor.bench.kernels_case import Case, Layer
from vtensor.bench.paged import paged_decode, paged_prefill
from vtensor.errors import VTensorError
from vtensor.triton_kernels.attention import decode_attention, prefill_attention
from vtensor.triton_kernels.prefill import PrefillPlan
from vtensor.triton_kernels.tuning import prefill_tuning

__all__ = ["Contender", "absent_rivals", "contenders"]

Call = Callable[[], torch.Tensor]

_RIVALS = ("cudnn", "sdpa-flash", "flash-attn-2", "fa3-upstream", "fa3-fwd", "fa3-vllm", "flashinfer")
_FA3 = ("fa3-upstream", "fa3-fwd")


@dataclass(frozen=True)
class Contender:
    """A way to compute an attention.

    Attributes
    ----------
    name : str
    make : callable
        From a case and one of its layers to a call without arguments, which returns the output.
    page_tokens : int
        Tokens of a page; 0: it reads the contiguous cache.
    in_graph : bool
        Whether a CUDA graph can hold it.
    version : str
        Of the package that it is in.
    """

    name: str
    make: Callable[[Case, Layer], Call]
    page_tokens: int = 0
    in_graph: bool = True
    version: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it is a kernel of ours."""
        return self.name.startswith("ours")


def contenders(case: Case, page_tokens: tuple[int, ...]) -> Iterator[Contender]:
    """All that are there for a case; ours also with pages of so many tokens, where those are contiguous."""
    pages = () if case.slice_layers else page_tokens
    yield Contender("ours", _ours)
    if case.kind == "prefill" and case.memory.device != "cpu":
        yield Contender("ours, plain", _plain)
    for tokens in pages:
        yield Contender(f"ours, paged {tokens}", _paged(tokens), tokens)
    for name in _RIVALS:
        if why_absent(name, case.memory.device) is not None:
            continue
        version = BACKENDS[name].version()
        if name == "fa3-vllm":
            yield Contender(name, _fa3_vllm(0), version=version)
            for tokens in pages:
                yield Contender(f"{name}, paged {tokens}", _fa3_vllm(tokens), tokens, version=version)
        elif name in _FA3:
            if case.kind == "prefill":
                yield Contender(f"{name}, dense", _fa3(name, is_dense=True), version=version)
            yield Contender(name, _fa3(name, is_dense=case.kind != "prefill"), version=version)
        elif name == "flash-attn-2" and case.kind != "prefill":
            yield Contender(name, _flash_attn_2, version=version)
        elif case.is_equal:
            yield Contender(name, _one_group(name), version=version)
        else:
            yield Contender(f"{name}, no graph", _as_called(name), in_graph=False, version=version)


def why_absent(name: str, device: str) -> str | None:
    """Say why a rival is not measured on a device, or None."""
    backend = BACKENDS[name]
    return backend.why_not_on(torch.device(device)) or backend.why_absent()


def absent_rivals(device: str) -> dict[str, str]:
    """Rivals that are not measured, and why."""
    return {name: reason for name in _RIVALS if (reason := why_absent(name, device))}


# -- ours ---------------------------------------------------------------------------------------------------------


def _ours(case: Case, layer: Layer) -> Call:
    q, k, v, lens = case.q, layer.k, layer.v, case.seq_lens
    if case.kind == "prefill":
        rows = case.cu_seqlens
        return lambda: _only(prefill_attention(q, k, v, rows, lens))
    return lambda: _only(decode_attention(q, k, v, lens))


def _plain(case: Case, layer: Layer) -> Call:
    """Our kernel in plain Triton, also where there is one for the GPU: the one that reads pages, too."""
    call, q = case.call(layer, ragged=True), case.q
    tuning = prefill_tuning(case.heads.dim, case.heads.dim, q.element_size())
    plan = PrefillPlan(call, has_lse=False, out_strides=q.stride(), tuning=tuning)

    def run() -> torch.Tensor:
        out = torch.empty_like(q)
        plan.run(call, out, None)
        return out

    return run


def _paged(page_tokens: int) -> Callable[[Case, Layer], Call]:
    def make(case: Case, layer: Layer) -> Call:
        q, lens, cache = case.q, case.seq_lens, case.pages(layer, page_tokens)
        if case.kind == "prefill":
            rows = case.cu_seqlens
            return lambda: _only(paged_prefill(q, cache, rows, lens))
        return lambda: _only(paged_decode(q, cache, lens))

    return make


def _only(found: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    assert isinstance(found, torch.Tensor)  # none is asked for its log-sum-exp values
    return found


# -- others' ------------------------------------------------------------------------------------------------------


def _one_group(name: str) -> Callable[[Case, Layer], Call]:
    """A kernel that knows one length only, for all requests at once."""

    def make(case: Case, layer: Layer) -> Call:
        backend: Any = BACKENDS[name]
        assert isinstance(backend, GroupBackend)
        call = case.call(layer)
        group = Group(0, len(case.lens), case.lens[0], 0, case.queries)
        if reason := backend.why_not(call) or backend.why_not_group(call, group):
            raise VTensorError(reason)
        k, v = group.tokens_of(layer.k, 0), group.tokens_of(layer.v, 0)
        return lambda: _only(backend.run_group(call, call.q, k, v, return_lse=False)[0])

    return make


def _as_called(name: str) -> Callable[[Case, Layer], Call]:
    """As a user calls it, lengths on the device."""

    def make(case: Case, layer: Layer) -> Call:
        q, k, v, lens = case.q, layer.k, layer.v, case.seq_lens
        rows = case.cu_seqlens if case.kind == "prefill" else None
        return lambda: _only(attention(q, k, v, lens, None, rows, backend=name))

    return make


def _flash_attn_2(case: Case, layer: Layer) -> Call:
    call, backend = case.call(layer), BACKENDS["flash-attn-2"]
    return lambda: backend.run(call, return_lse=False)[0]


def _fa3(name: str, *, is_dense: bool) -> Callable[[Case, Layer], Call]:
    """The kernel alone. Dense: queries [B, Sq, Hq, D], of which all requests have as many."""

    def make(case: Case, layer: Layer) -> Call:
        backend: Any = BACKENDS[name]
        call = case.call(layer, ragged=not is_dense)
        if reason := backend.why_not(call):
            raise VTensorError(reason)
        lengths = device_lengths(call)
        return lambda: _only(backend.launch(call, *lengths)[0])

    return make


def _fa3_vllm(page_tokens: int) -> Callable[[Case, Layer], Call]:
    """The operator inside vLLM, with the most queries of a request and where each begins told beforehand."""

    def make(case: Case, layer: Layer) -> Call:
        call = case.call(layer, ragged=True)
        k, v, table = layer.k, layer.v, None
        if page_tokens:
            cache = case.pages(layer, page_tokens)
            k, v, table = cache.k, cache.v, cache.table
        none: list[Any] = [None] * 8
        arguments = (
            call.q, k, v,
            *none[:4],  # new k and v, q_v, out
            case.cu_seqlens,
            *none[:3],  # cu_seqlens of k and of new k, used length of q
            case.seq_lens, case.queries,
            None, table,  # longest k
            *none[:8],  # slots; left padding, cos, sin and lengths of rotary embeddings, scales of q, k and v
            call.scale, True, -1, -1, 0.0,  # causal, window, softcap
            True,  # interleaved
            None, 0, None, 0,  # metadata, splits, packing of heads, multiprocessors left alone
            None, 1, 0, None,  # sinks; context parallelism: ranks, rank, total length
        )  # fmt: skip
        run: Any = torch.ops._vllm_fa3_C.fwd
        return lambda: _only(run(*arguments)[0])

    return make
