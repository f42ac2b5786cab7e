"""Cases of attention over a cache, shared by the tests of all kernels: inputs, and how wrong an output may be.

Every cache is NaN wherever a kernel must not read: behind each request's length, in slots that no request names, in the
other layers of a slice, and before the first key that a window shows. Every output starts as NaN.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from vtensor.triton_kernels.arguments import FP8, AttentionArguments, check_attention
from vtensor.triton_kernels.reference import attend

__all__ = [
    "FEATURES",
    "HEADS",
    "LENGTHS",
    "VALUE_WIDTHS",
    "WIDTHS",
    "Case",
    "Inputs",
    "assert_right",
    "by_device",
    "feature_sets",
    "make",
    "moved",
    "nan_cache",
    "on_devices",
    "row_slices",
    "run",
    "sparse",
]

HEADS = ((8, 8), (32, 8), (32, 4), (28, 4), (12, 2), (9, 3), (10, 2), (48, 2), (40, 1))
WIDTHS = (64, 80, 96, 128, 192, 256)
VALUE_WIDTHS = ((192, 128), (128, 64), (64, 128), (80, 96), (96, 16), (16, 256))
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4097)
FEATURES = ("window", "softcap", "sinks", "alibi", "fp8", "fp8 of one scale", "scale")

Layout = Literal["per_layer", "sliced", "latent"]
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_LAYERS, _LAYER = 3, 1  # of the slice: there are others before and behind


@dataclass(frozen=True)
class Case:
    """One attention; what is left out is small."""

    heads: tuple[int, int] = (4, 2)
    width: int = 64
    value_width: int = 0  # 0: as wide as keys
    lens: tuple[int, ...] = (1, 0, 17, 40)
    queries: int | tuple[int, ...] = 1  # of each request: a number for decode, numbers for prefill
    dtype: torch.dtype = torch.float16
    layout: Layout = "per_layer"
    slots: tuple[int, ...] | None = None  # batch_idx
    features: tuple[str, ...] = ()
    window: int = 13
    causal: bool = True
    keeps_dim: bool = False  # q is [B, 1, Hq, D] and not [B, Hq, D]
    capacity: int = 0  # tokens of a slot; 0: a few more than the longest request has

    def __str__(self) -> str:
        width = f"{self.width}" + f"v{self.value_width}" * (self.value_width > 0)
        queries = self.queries if isinstance(self.queries, int) else "+".join(map(str, self.queries))
        lens = "+".join(map(str, self.lens)) if len(self.lens) <= 6 else f"{len(self.lens)}lens"
        parts = [f"{self.heads[0]}/{self.heads[1]}", f"d{width}", f"q{queries}", f"l{lens}", _NAMES[self.dtype]]
        parts += [self.layout] * (self.layout != "per_layer") + ["full"] * (not self.causal)
        parts += [f"window{self.window}" if feature == "window" else feature for feature in self.features]
        return " ".join(parts)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Tensors of a case."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seq_lens: torch.Tensor
    batch_idx: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    options: dict[str, Any]

    def call(self) -> AttentionArguments:
        """The same, checked."""
        return check_attention(self.q, self.k, self.v, self.seq_lens, self.batch_idx, self.cu_seqlens, **self.options)


def by_device(name: str, *, cpu: Iterable[Any], gpu: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise over `device` and something else: few and small ones for the interpreter, many for a GPU."""
    made = [pytest.param("cpu", value, id=f"cpu {value}") for value in cpu]
    made += [pytest.param("cuda:0", value, id=f"cuda:0 {value}", marks=pytest.mark.gpu) for value in gpu]
    return pytest.mark.parametrize(("device", name), made)


def on_devices(*, cpu: Iterable[Case], gpu: Iterable[Case]) -> pytest.MarkDecorator:
    """Parametrise over `device` and `case`."""
    return by_device("case", cpu=cpu, gpu=gpu)


def feature_sets() -> list[tuple[str, ...]]:
    """Every feature, every pair of those that go together, and as many at once as there are."""
    pairs = [pair for pair in itertools.combinations(FEATURES, 2) if pair != ("fp8", "fp8 of one scale")]
    return [*((feature,) for feature in FEATURES), *pairs, tuple(f for f in FEATURES if f != "fp8 of one scale")]


def nan_cache(
    num_slots: int,
    tokens: int,
    num_heads: int,
    width: int,
    value_width: int,
    dtype: torch.dtype,
    layout: Layout,
    device: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer, all NaN as are its neighbours': [num_slots, tokens, num_heads, width or value_width]."""

    def nan(*shape: int) -> torch.Tensor:
        if dtype == FP8:
            return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(FP8)
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    if layout == "per_layer":
        return nan(num_slots, tokens, num_heads, width), nan(num_slots, tokens, num_heads, value_width)
    part = width if layout == "latent" else width + value_width
    rows = nan(num_slots, tokens, _LAYERS * num_heads * part)
    first = _LAYER * num_heads * part
    k = rows[..., first : first + num_heads * width].unflatten(-1, (num_heads, width))
    if layout == "latent":
        return k, k[..., :value_width]
    first += num_heads * width
    return k, rows[..., first : first + num_heads * value_width].unflatten(-1, (num_heads, value_width))


def sparse(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the host that take no memory until they are written, however many."""
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    no_reserve = 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def moved(x: torch.Tensor, elements: int, padding: int) -> torch.Tensor:
    """The same numbers at other places: so many elements further, and rows so many elements further apart."""
    rows, width = x.shape[:-2].numel(), x.shape[-2] * x.shape[-1]
    memory = x.new_empty(elements + rows * (width + padding))
    found = memory[elements:].view(rows, width + padding)[:, :width].unflatten(-1, x.shape[-2:])
    return found.unflatten(0, x.shape[:-2]).copy_(x)


def make(case: Case, device: str, *, seed: int = 0) -> Inputs:
    """Random inputs of a case, the same each time."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype)

    num_heads, num_kv_heads = case.heads
    value_width = case.value_width or case.width
    options = _options(case, device, normal)
    slots = tuple(range(len(case.lens))) if case.slots is None else case.slots
    counts = (case.queries,) * len(case.lens) if isinstance(case.queries, int) else case.queries
    tokens = case.capacity or max(case.lens, default=0) + 21
    cache_dtype = FP8 if "k_scale" in options else case.dtype
    k, v = nan_cache(
        max(slots, default=0) + 2, tokens, num_kv_heads, case.width, value_width, cache_dtype, case.layout, device
    )
    for slot in set(slots) - {-1}:
        requests = [(length, n) for s, length, n in zip(slots, case.lens, counts, strict=True) if s == slot and n]
        last = max((length for length, _ in requests), default=0)
        window = options.get("window") or last + 1
        first = max(0, min((length - n - window + 1 for length, n in requests), default=0))
        if last > first:
            for part in (k,) if case.layout == "latent" else (k, v):
                part[slot, first:last] = normal(*part[slot, first:last].shape, dtype=cache_dtype)
    if isinstance(case.queries, int):
        shape: tuple[int, ...] = (
            (len(case.lens), case.queries) if case.queries > 1 or case.keeps_dim else (len(case.lens),)
        )
    else:
        shape = (sum(counts),)
    if case.layout == "per_layer":
        q = normal(*shape, num_heads, case.width, dtype=case.dtype)
    else:  # q lies beside the new k and v, as one matrix product leaves them
        q = normal(*shape, num_heads + 2 * num_kv_heads, case.width, dtype=case.dtype)[..., :num_heads, :]

    def numbers(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    return Inputs(
        q,
        k,
        v,
        numbers(case.lens),
        None if case.slots is None else numbers(case.slots),
        None if isinstance(case.queries, int) else numbers([0, *itertools.accumulate(counts)]),
        options,
    )


def _options(case: Case, device: str, normal: Callable[..., torch.Tensor]) -> dict[str, Any]:
    num_heads, num_kv_heads = case.heads
    options: dict[str, Any] = {} if case.causal else {"causal": False}
    for feature in case.features:
        match feature:
            case "window":
                options["window"] = case.window
            case "softcap":
                options["softcap"] = 3.0
            case "scale":
                options["scale"] = 0.37
            case "sinks":
                options["sinks"] = normal(num_heads, dtype=case.dtype)
            case "alibi":
                options["alibi_slopes"] = 2.0 ** -torch.linspace(1, 6, num_heads, device=device)
            case "fp8" | "fp8 of one scale":
                count = num_kv_heads if feature == "fp8" else 1
                options["k_scale"] = 1.5 ** normal(count)
                options["v_scale"] = 1.5 ** normal(count)
    return options


def run(
    attention: Callable[..., Any], inputs: Inputs, *, out: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exp values of decode or prefill, the outputs written over NaN."""
    if out is None:
        out = torch.full(
            (*inputs.q.shape[:-1], inputs.v.shape[3]), torch.nan, dtype=inputs.q.dtype, device=inputs.q.device
        )
    ragged = () if inputs.cu_seqlens is None else (inputs.cu_seqlens,)
    found, lse = attention(
        inputs.q,
        inputs.k,
        inputs.v,
        *ragged,
        inputs.seq_lens,
        inputs.batch_idx,
        **inputs.options,
        **options,
        out=out,
        return_lse=True,
    )
    assert found.data_ptr() == out.data_ptr()
    assert found.shape == out.shape
    assert lse.shape == out.shape[:-1]
    assert lse.dtype == torch.float32
    return found, lse


def row_slices(call: AttentionArguments) -> list[slice]:
    """Of each request, its rows in outputs whose first dimensions are flattened."""
    if call.cu_seqlens is None:
        count = call.q.shape[1]
        return [slice(b * count, (b + 1) * count) for b in range(call.batch_size)]
    return [slice(*pair) for pair in itertools.pairwise(call.cu_seqlens.tolist())]


def assert_right(found: tuple[torch.Tensor, torch.Tensor], inputs: Inputs, *, rows: Iterable[int] = ()) -> None:
    """Assert that outputs are as near to exact ones as arithmetic in their dtype allows.

    The distance allowed is in proportion to that of the plain formula computed in q's dtype, for each request by
    itself: outputs of short requests are large, and so are their roundings, which would hide errors of long ones.
    `rows` are those of the requests to look at, if not all.
    """
    call = inputs.call()
    exact = torch.float64 if call.q.dtype == torch.float32 else torch.float32
    right, right_lse = attend(call._replace(q=call.q.to(exact)), exact)
    plain, _ = attend(call, call.q.dtype)
    most, mean = (4.0, 3.0) if call.k.dtype == FP8 else (2.0, 1.5)
    out, right, plain = (x.reshape(-1, *x.shape[-2:]).to(exact) for x in (found[0], right, plain))
    lse, right_lse = (x.reshape(-1, x.shape[-1]) for x in (found[1], right_lse))
    assert torch.isfinite(out).all(), f"outputs that are not finite: {_where(~torch.isfinite(out))}"
    unseen = right_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, unseen), (
        f"-inf where not, or not where: {_where((lse == -torch.inf) != unseen)}"
    )
    assert not out[unseen].any(), f"outputs of what sees nothing: {_where((out != 0).any(-1) & unseen)}"
    torch.testing.assert_close(lse, right_lse, atol=5e-5, rtol=5e-6)
    chosen = set(rows)
    for b, part in enumerate(row_slices(call)):
        if part.stop == part.start or (chosen and b not in chosen):
            continue
        error, allowed = (out[part] - right[part]).abs(), (plain[part] - right[part]).abs()
        for name, value, limit in (
            ("largest", error.max(), most * allowed.max() + 1e-5),
            ("mean", error.mean(), mean * allowed.mean() + 1e-6),
        ):
            assert value <= limit, (
                f"request {b} of {int(call.seq_lens[b])} tokens: {name} error {float(value):.3g}, "
                f"at most {float(limit):.3g}; worst at {_where(error == error.max())} of it"
            )


def _where(mask: torch.Tensor) -> str:
    places = mask.nonzero().tolist()
    return f"{places[:4]}" + f" and {len(places) - 4} more" * (len(places) > 4)
