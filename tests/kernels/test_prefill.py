"""Prefill: many queries of each request, full, in chunks, or behind what is there, against its slot of the cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.child import in_interpreter
from tests.kernels.attention_cases import (
    HEADS,
    LENGTHS,
    VALUE_WIDTHS,
    WIDTHS,
    Case,
    Inputs,
    assert_right,
    by_device,
    feature_sets,
    make,
    moved,
    on_devices,
    run,
    sparse,
)
from vtensor.triton_kernels.attention import prefill_attention
from vtensor.triton_kernels.reference import attend

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
COUNTS = (1, 2, 5, 64, 300, 2048)
# A whole prompt, one with more queries than tokens, a chunk, one token, no query, no token, another chunk.
SMALL: dict[str, Any] = {"queries": (9, 5, 6, 1, 0, 3, 20), "lens": (9, 2, 40, 17, 8, 0, 33)}
LARGE: dict[str, Any] = {
    "queries": (64, 300, 1, 129, 0, 5, 65, 200, 2, 128),
    "lens": (64, 1000, 4097, 100, 63, 0, 129, 200, 1, 2049),
}


def check(case: Case, device: str, **options: Any) -> None:
    inputs = make(case, device)
    assert_right(run(prefill_attention, inputs, **options), inputs)


# -- shapes -------------------------------------------------------------------------------------------------------


@on_devices(
    cpu=[Case(heads, width=16, queries=(4,), lens=(20,)) for heads in HEADS],
    gpu=[
        Case(heads, width, dtype=BF16, layout=("per_layer", "sliced")[i % 2], **LARGE)
        for i, heads in enumerate(HEADS)
        for j, width in enumerate(WIDTHS)
        if (i + j) % 2 or width == 128  # each pair is a kernel to compile
    ],
)
def test_heads(device: str, case: Case) -> None:
    check(case, device)


@on_devices(
    cpu=[
        Case((2, 1), width, dtype=dtype, layout="sliced", queries=(9, 2, 6), lens=(9, 0, 40))
        for width in (16, *WIDTHS)
        for dtype in (FP16, FP32)
    ],
    gpu=[
        Case((4, 2), width, dtype=dtype, layout="sliced", causal=causal, **LARGE)
        for width in (16, *WIDTHS, 512)
        for dtype, causal in ((FP16, True), (FP32, True), (BF16, False))
    ],
)
def test_widths_and_dtypes(device: str, case: Case) -> None:
    check(case, device)


MLA = Case((3, 1), width=576, value_width=512, layout="latent")


@on_devices(
    cpu=[
        *(
            Case((2, 1), width=width, value_width=value_width, queries=(5, 7), lens=(5, 30))
            for width, value_width in VALUE_WIDTHS
        ),
        *(replace(MLA, queries=(5, 0, 2), lens=(9, 4, 20), dtype=dtype) for dtype in (FP16, FP32)),
        replace(MLA, queries=(4, 2), lens=(4, 20), features=("fp8",)),
        replace(MLA, width=80, value_width=64, queries=(4, 2), lens=(4, 20), features=("window", "sinks")),
    ],
    gpu=[
        *(
            Case((8, 2), width, value_width, dtype=BF16, layout=layout, **LARGE)
            for width, value_width in VALUE_WIDTHS
            for layout in ("per_layer", "sliced")
        ),
        *(replace(MLA, heads=(heads, 1), dtype=BF16, **LARGE) for heads in (16, 40)),
        replace(MLA, heads=(4, 1), dtype=FP16, **LARGE),
        replace(MLA, heads=(4, 1), dtype=FP32, **LARGE),
        *(
            replace(MLA, heads=(4, 1), dtype=BF16, features=features, **LARGE)
            for features in (("fp8",), ("window",), ("sinks", "softcap"), ("alibi",))
        ),
        replace(MLA, heads=(8, 4), width=96, value_width=80, dtype=BF16, **LARGE),
    ],
)
def test_values_of_another_width(device: str, case: Case) -> None:
    check(case, device)


@on_devices(
    cpu=[
        *(Case((2, 1), width=16, queries=(count,), lens=(length,)) for count in (1, 5, 64) for length in LENGTHS[:-2]),
        Case((1, 1), width=16, queries=(300,), lens=(320,)),
        Case((1, 1), width=16, queries=(5,), lens=(1000,)),
        Case((2, 1), width=16, queries=(2,), lens=(4097,)),
    ],
    gpu=[
        Case((8, 2), 128, queries=(count,), lens=(length,), dtype=BF16, layout="sliced")
        for count in COUNTS
        for length in LENGTHS
    ],
)
def test_one_request(device: str, case: Case) -> None:
    # Of one with more queries than tokens, the first see nothing.
    check(case, device)


@on_devices(
    cpu=[],
    gpu=[
        Case((4, 1), 64, queries=(count,) * 3, lens=(length, length + 1, 0), dtype=BF16, features=("window",), window=w)
        for count in COUNTS
        for length, w in ((4097, 1000), (2049, 64), (300, 299), (129, 1))
    ]
    + [Case((4, 1), 128, queries=(count,) * 3, lens=(4097, 1000, 17), dtype=BF16, causal=False) for count in COUNTS],
)
def test_numbers_of_queries(device: str, case: Case) -> None:
    check(case, device)


@on_devices(
    cpu=[Case((2, 1), width=16, dtype=FP32, queries=(1, 70, 1, 1), lens=(300, 70, 2, 9))],
    gpu=[
        Case((8, 2), 128, dtype=BF16, queries=(2048, *(1,) * 40), lens=(60_000, *(500,) * 40)),
        Case((8, 2), 128, dtype=BF16, queries=(1, 700, 3), lens=(100_000, 700, 9), layout="sliced"),
        Case((2, 1), 64, dtype=FP32, queries=(1, 500, 3), lens=(50_000, 900, 9)),
        Case((8, 2), 128, dtype=BF16, queries=(3000,), lens=(70_000,), features=("window",), window=4096),
    ],
)
def test_one_long_request_beside_short_ones(device: str, case: Case) -> None:
    check(case, device)


EDGES = tuple(edge + i for edge in (32, 64, 128, 192) for i in (-3, -2, -1, 0, 1))


@on_devices(
    cpu=[
        Case((1, 1), width, queries=(3,) * len(EDGES), lens=tuple(edge + 3 for edge in EDGES), dtype=FP32)
        for width in (16, 128)
    ],
    gpu=[
        Case(
            (2, 1), width, queries=(count,) * 260, lens=tuple(i + count for i in range(260)), dtype=dtype, features=some
        )
        for width in (64, 128)
        for count in (3, 130)
        for dtype in (BF16, FP32)
        for some in ((), ("window",))
    ],
)
def test_wherever_the_diagonal_meets_a_tile(device: str, case: Case) -> None:
    check(case, device)


def test_chunks_find_what_the_whole_finds(device: str) -> None:
    length, cuts = 90, (0, 17, 33, 64, 65, 90)
    whole = make(Case((2, 1), width=32, dtype=FP32, queries=(length,), lens=(length,)), device)
    right, right_lse = run(prefill_attention, whole)
    for begin, end in itertools.pairwise(cuts):
        chunk = replace(
            whole,
            q=whole.q[begin:end],
            seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
            cu_seqlens=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
        )
        out, lse = run(prefill_attention, chunk)
        torch.testing.assert_close(out, right[begin:end], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, right_lse[begin:end], atol=1e-5, rtol=1e-5)


# -- features -----------------------------------------------------------------------------------------------------


@on_devices(
    cpu=[
        Case((4, 2), 16, queries=(9, 2), lens=(9, 40), features=features, layout=("sliced", "per_layer")[i % 2])
        for i, features in enumerate(feature_sets())
    ]
    + [
        Case((2, 1), 32, queries=(9, 2), lens=(9, 40), features=features, causal=False)
        for features in ((), ("softcap", "sinks"), ("alibi",), ("fp8",))
    ],
    gpu=[
        Case((6, 2), 64, dtype=BF16, features=features, layout="sliced", window=100, **LARGE)
        for features in feature_sets()
    ]
    + [
        Case((6, 2), 64, dtype=BF16, features=features, causal=False, **LARGE)
        for features in ((), ("softcap", "sinks"), ("alibi",), ("fp8", "scale"), ("fp8 of one scale", "alibi"))
    ],
)
def test_features_and_their_pairs(device: str, case: Case) -> None:
    check(case, device)


@on_devices(
    cpu=[
        Case((2, 1), 16, queries=(70, 5, 3), lens=(70, 40, 2), features=("window",), window=window)
        for window in (1, 2, 16, 64, 1000)
    ]
    + [Case((2, 1), 16, queries=(3, 140), lens=(200, 140), features=("window",), window=50)],
    gpu=[
        Case((8, 2), width, dtype=BF16, features=("window",), window=window, layout=layout, **LARGE)
        for window in (1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 500, 4096, 100_000)
        for width, layout in ((64, "per_layer"), (128, "sliced"), (80, "sliced"))
    ],
)
def test_windows(device: str, case: Case) -> None:
    check(case, device)


@by_device("dtype", cpu=[FP16, FP32], gpu=[FP16, FP32, BF16])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_logits_of_1e4(softcap: float | None, dtype: torch.dtype, device: str) -> None:
    inputs = make(Case(queries=(5, 20), lens=(5, 80), dtype=dtype), device)
    inputs.options.update(scale=1e4 / 8.0, **({} if softcap is None else {"softcap": softcap}))
    out, lse = run(prefill_attention, inputs)
    assert torch.isfinite(out).all()
    right, right_lse = attend(inputs.call()._replace(q=inputs.q.double()), torch.float64)
    torch.testing.assert_close(lse, right_lse, atol=1e-4, rtol=1e-5)
    if dtype == FP32 and softcap is not None:
        torch.testing.assert_close(out.double(), right, atol=1e-3, rtol=1e-3)


# -- slots --------------------------------------------------------------------------------------------------------

SLOTS = [(3, 1, 0, 2), (5, 5, 5, 5), (-1, 4, -1, 4), (0, -1, 7, 0), (-1, -1, -1, -1), (3, 3, -1, 0)]


@on_devices(
    cpu=[Case((2, 1), slots=slots, width=16, queries=(5, 3, 0, 2), lens=(5, 30, 0, 17)) for slots in SLOTS],
    gpu=[
        Case((8, 2), 128, slots=slots, lens=lens, queries=counts, dtype=BF16, layout=layout, features=features)
        for slots in SLOTS
        for lens, counts in (((5, 1000, 0, 129), (5, 300, 2, 1)), ((64, 63, 4097, 1), (64, 70, 129, 0)))
        for layout in ("per_layer", "sliced")
        for features in ((), ("window",))
    ],
)
def test_slots(device: str, case: Case) -> None:
    check(case, device)


def test_a_batch_of_none(device: str) -> None:
    inputs = make(Case(lens=(), queries=()), device)
    out, lse = run(prefill_attention, inputs)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_requests_without_queries(device: str) -> None:
    inputs = make(Case(lens=(5, 9), queries=(0, 0)), device)
    assert run(prefill_attention, inputs)[0].shape == (0, 4, 64)


def test_rows_behind_the_last_request_change_nothing(device: str) -> None:
    inputs = make(Case(lens=(5, 9), queries=(3, 4)), device)
    out, lse = run(prefill_attention, inputs)
    longer = replace(inputs, q=torch.cat([inputs.q, inputs.q.new_full((100, 4, 64), torch.nan)]))
    long, long_lse = run(prefill_attention, longer)
    assert torch.equal(long[:7], out)
    assert torch.equal(long_lse[:7], lse)


@pytest.mark.parametrize("padded", [False, True])
def test_more_requests_than_one_program_adds_up(padded: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Beyond 1,024 of them the blocks are added up beforehand; so many would take the interpreter minutes.
    count = 3000
    if device == "cpu":
        monkeypatch.setattr("vtensor.triton_kernels.shapes.MOST_LENGTHS", 4)
        count = 11
    lens = tuple((7 * i) % 40 if i % 5 else 0 for i in range(count))
    counts = tuple(i % 4 for i in range(count))
    slots = tuple(-1 if padded and i % 3 == 0 else i % 7 for i in range(count))
    check(Case((1, 1), width=16, lens=lens, slots=slots, queries=counts, dtype=FP32), device)


# -- how it is computed -------------------------------------------------------------------------------------------


@on_devices(
    cpu=[Case((2, 1), 32, queries=(30, 5), lens=(70, 33), features=("window", "sinks"))],
    gpu=[
        Case((8, 2), 128, dtype=dtype, layout="sliced", features=features, **LARGE)
        for dtype in (BF16, FP32)
        for features in ((), ("window", "sinks"), ("fp8",))
    ],
)
def test_repeats_are_the_same_to_the_bit(device: str, case: Case) -> None:
    inputs = make(case, device)
    first, first_lse = run(prefill_attention, inputs)
    for _ in range(2 if device == "cpu" else 20):
        again, again_lse = run(prefill_attention, inputs)
        assert torch.equal(first, again)
        assert torch.equal(first_lse, again_lse)


@on_devices(
    cpu=[Case((2, 1), 32, lens=(70, 33, 0), queries=(3, 33, 1), slots=(1, 4, 2), features=("window",))],
    gpu=[
        Case((8, 2), 128, dtype=BF16, layout=layout, features=features, **LARGE)
        for layout in ("per_layer", "sliced")
        for features in ((), ("window",), ("fp8",))
    ],
)
def test_what_is_not_seen_makes_no_difference(device: str, case: Case) -> None:
    inputs = make(case, device)
    out, lse = run(prefill_attention, inputs)
    for part in (inputs.k, inputs.v):
        numbers = part.float()
        part.copy_(torch.where(numbers.isnan(), torch.full_like(numbers, 3.0), numbers).to(part.dtype))
    again, again_lse = run(prefill_attention, inputs)
    assert torch.equal(out, again)
    assert torch.equal(lse, again_lse)


def test_outputs_are_made_where_none_is_given(device: str) -> None:
    inputs = make(Case(value_width=32, queries=(1, 3, 5, 2)), device)
    out, lse = run(prefill_attention, inputs)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.seq_lens)
    alone = prefill_attention(*arguments)
    assert isinstance(alone, torch.Tensor)
    assert (alone.shape, alone.dtype) == (out.shape, out.dtype)
    assert torch.equal(alone, out)
    both = prefill_attention(*arguments, return_lse=True)
    assert torch.equal(both[0], out)
    assert torch.equal(both[1], lse)


@by_device("shift", cpu=[(1, 0), (8, 3)], gpu=[(0, 8), (0, 1), (1, 0), (2, 2), (4, 4), (8, 0), (3, 5)])
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_rows_at_any_address(dtype: torch.dtype, shift: tuple[int, int], device: str) -> None:
    # After rows at round addresses, so that whatever is kept from that call must not be taken for these.
    inputs = make(Case((4, 2), 64, queries=(20, 0, 33), lens=(70, 0, 33), dtype=dtype), device)
    right, right_lse = run(prefill_attention, inputs)
    for names in (("q",), ("k",), ("v",), ("q", "k", "v")):
        changed = {name: moved(getattr(inputs, name), *shift) for name in names}
        out, lse = run(prefill_attention, replace(inputs, **changed))
        torch.testing.assert_close(out, right, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(lse, right_lse, atol=1e-5, rtol=1e-5)
        out = moved(torch.full_like(right, torch.nan), *shift)
        out, lse = run(prefill_attention, inputs, out=out)
        torch.testing.assert_close(out, right, atol=1e-3, rtol=1e-3)


def test_calls_of_other_options_one_after_another(device: str) -> None:
    inputs = make(Case((4, 2), 64, queries=(20, 0, 33), lens=(70, 0, 33), dtype=FP32), device)
    options: list[dict[str, Any]] = [{}, {"window": 16}, {"window": 17}, {"window": 1}, {"scale": 1.0}, {"scale": 0.3}]
    options += [{"softcap": 1.0}, {"softcap": 2.5}, {"window": 32, "softcap": 1.0}, {}]
    for some in options:
        changed = replace(inputs, options=some)
        assert_right(run(prefill_attention, changed), changed)


@pytest.mark.gpu
def test_streams_side_by_side(gpu: str) -> None:
    cases = [
        Case((8, 2), 128, queries=(300, 1, 129), lens=(4097, 1, 129 + i), dtype=BF16, features=(("sinks",), ())[i % 2])
        for i in range(4)
    ]
    all_inputs = [make(case, gpu, seed=i) for i, case in enumerate(cases)]
    right = [run(prefill_attention, inputs) for inputs in all_inputs]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in cases]
    for _ in range(30):
        for stream, inputs, results in zip(streams, all_inputs, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(prefill_attention, inputs))
    torch.cuda.synchronize()
    for results, (out, lse) in zip(found, right, strict=True):
        assert all(torch.equal(x, out) and torch.equal(y, lse) for x, y in results)


@pytest.mark.gpu
def test_graphs_replayed_side_by_side(gpu: str) -> None:
    all_inputs = [
        make(Case((8, 2), 128, queries=(300, 1, 129), lens=(4097, 1, 129 + i), dtype=BF16), gpu, seed=i)
        for i in range(3)
    ]
    right = [run(prefill_attention, inputs) for inputs in all_inputs]
    graphs, found, streams = [], [], [torch.cuda.Stream() for _ in all_inputs]
    for inputs in all_inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append([run(prefill_attention, inputs) for _ in range(3)])
        graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = run(prefill_attention, all_inputs[0])  # in a stream of its own
        assert torch.equal(eager[0], right[0][0])
    torch.cuda.synchronize()
    for results, (out, lse) in zip(found, right, strict=True):
        assert all(torch.equal(x, out) and torch.equal(y, lse) for x, y in results)


@pytest.mark.gpu
def test_threads_side_by_side(gpu: str) -> None:
    all_inputs = [
        make(Case((8, 2), 128, queries=(300, 1, 129), lens=(4097, 1, 129 + i), dtype=BF16), gpu, seed=i)
        for i in range(4)
    ]

    def repeat(inputs: Inputs) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [run(prefill_attention, inputs) for _ in range(30)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(x, results[0][0]) and torch.equal(y, results[0][1]) for x, y in results)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(repeat, all_inputs))


@pytest.mark.parametrize("causal", [True, False])
def test_a_compiled_graph_holds_it(causal: bool, device: str) -> None:
    features = ("sinks",) + ("window",) * causal
    case = Case(queries=(1, 3, 5, 2), slots=(1, 2, -1, 0), features=features, causal=causal)
    inputs = make(case, device)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: Any, lens: Any, slots: Any) -> Any:
        out, lse = prefill_attention(q * 2, k, v, starts, lens, slots, **inputs.options, return_lse=True)
        return out + 1, lse * 2

    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(step, fullgraph=True, backend="aot_eager")
    arguments = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.seq_lens, inputs.batch_idx)
    for found, right in zip(compiled(*arguments), step(*arguments), strict=True):
        assert found.shape == right.shape
        assert torch.equal(found, right)


def test_a_compiled_graph_writes_to_an_output(device: str) -> None:
    inputs = make(Case(queries=(1, 3, 5, 2)), device)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: Any, lens: Any, out: torch.Tensor) -> Any:
        prefill_attention(q, k, v, starts, lens, out=out)
        return out * 2

    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(step, fullgraph=True, backend="aot_eager")
    out, right = (torch.full_like(inputs.q, torch.nan) for _ in range(2))
    arguments = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.seq_lens)
    doubled = compiled(*arguments, out)
    step(*arguments, right)
    assert torch.equal(out, right)
    assert torch.equal(doubled, right * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [(), ("window",), ("fp8", "sinks")], ids="+".join)
def test_a_cuda_graph_captured_short_and_replayed_long(features: tuple[str, ...], gpu: str) -> None:
    counts, lens, slots = (600, 1, 0, 129, 64, 230), (4097, 20_000, 5, 129, 64, 999), (3, 1, 0, -1, 2, 5)
    case = Case((8, 2), 128, lens=lens, queries=counts, slots=slots, dtype=BF16, layout="sliced", features=features)
    final = make(case, gpu)
    assert final.batch_idx is not None
    assert final.cu_seqlens is not None
    static = replace(
        final,
        seq_lens=torch.ones_like(final.seq_lens),
        batch_idx=torch.full_like(final.batch_idx, -1),
        cu_seqlens=torch.arange(7, dtype=torch.int32, device=gpu),
    )
    assert static.batch_idx is not None
    assert static.cu_seqlens is not None
    out = torch.full_like(final.q, torch.nan)
    run(prefill_attention, static, out=out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(prefill_attention, static, out=out)
    for new in (final, replace(final, batch_idx=final.batch_idx.clone().fill_(-1)), final):
        assert new.batch_idx is not None
        assert new.cu_seqlens is not None
        static.seq_lens.copy_(new.seq_lens)
        static.batch_idx.copy_(new.batch_idx)
        static.cu_seqlens.copy_(new.cu_seqlens)
        out.fill_(torch.nan)
        graph.replay()
        assert_right(found, new)
        again = run(prefill_attention, new)
        assert torch.equal(found[0], again[0])
        assert torch.equal(found[1], again[1])


# -- large --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 70_000])
@pytest.mark.parametrize("heads", [(1, 1), (8, 8)], ids=str)
def test_more_queries_and_heads_than_a_grid_has_rows(heads: tuple[int, int], requests: int, gpu: str) -> None:
    queries, length = 70_000, 77
    inputs = make(Case(heads, width=64, lens=(length,), queries=(1,), dtype=BF16), gpu)
    starts = torch.tensor([0, queries], dtype=torch.int32, device=gpu)
    whole = replace(inputs, q=torch.randn(queries, heads[0], 64, device=gpu).to(BF16), cu_seqlens=starts)
    whole.options["causal"] = False
    many = whole
    if requests > 1:
        lens = torch.full((requests,), length, dtype=torch.int32, device=gpu)
        starts = torch.arange(requests + 1, dtype=torch.int32, device=gpu)
        many = replace(whole, seq_lens=lens, batch_idx=torch.zeros_like(lens), cu_seqlens=starts)
    assert_right(run(prefill_attention, many), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [(), ("window",)], ids="+".join)
def test_70000_tokens_in_a_slice_of_32_layers(features: tuple[str, ...], gpu: str) -> None:
    # A token is 65,536 elements wide: offsets pass 2^31 at half of it.
    length, window, queries = 70_000, 1000, 300
    rows = torch.empty(1, length + 1, 32, 2, 8, 128, dtype=BF16, device=gpu)
    k, v = rows[:, :, 31, 0], rows[:, :, 31, 1]
    for part in (k, v):
        part[:, :length].normal_()
        part[:, length:] = torch.nan
    lens = torch.tensor([length], dtype=torch.int32, device=gpu)
    starts = torch.tensor([0, queries], dtype=torch.int32, device=gpu)
    q = torch.randn(queries, 8, 128, dtype=BF16, device=gpu)
    inputs = Inputs(q, k, v, lens, None, starts, {"window": window} if features else {})
    assert_right(run(prefill_attention, inputs), inputs)


def test_offsets_beyond_32_bits_on_the_host() -> None:
    length, window, queries = 70_000, 40, 9
    rows = sparse(1, length + 1, 32, 2, 8, 128, dtype=FP16)
    k, v = rows[:, :, 31, 0], rows[:, :, 31, 1]
    for part in (k, v):
        part[:, length - window - queries + 1 : length].normal_()
        part[:, length:] = torch.nan
    inputs = Inputs(
        torch.randn(queries, 8, 128, dtype=FP16),
        k,
        v,
        torch.tensor([length], dtype=torch.int32),
        None,
        torch.tensor([0, queries], dtype=torch.int32),
        {"window": window},
    )
    assert_right(run(prefill_attention, inputs), inputs)


# -- a real cache -------------------------------------------------------------------------------------------------

REAL = """
import torch
import vtensor as vt
from tests.kernels.attention_cases import Inputs, assert_right, run
from vtensor.triton_kernels.attention import prefill_attention

device, dtype, width = {device!r}, {dtype}, {width}
layers = tuple(vt.LayerSpec(2, width, dtype=dtype, window=window) for window in (None, None, 24))
config = vt.KVCacheConfig(layers=layers, max_batch_size=5, max_context_tokens={most}, layout={layout!r})
nothing_ahead = dict(lookahead_tokens=0, eager_slot=False, low_watermark=0.0, high_watermark=0.0)
with vt.KVCacheManager(config, device, **nothing_ahead) as cache:
    for _ in range(4):
        cache.alloc_reqid()
    cache.free_reqid(1)
    for lens in {lens}:
        before = [row.seq_len for row in cache.residency()]
        cache.step([length if slot != 1 else 0 for slot, length in enumerate((*lens, 0))])
        for layer, spec in enumerate(layers):
            k, v = cache.layer(layer, plain=True)
            for part in (k, v):
                for slot in (0, 2, 3):
                    part[slot, before[slot] : lens[slot]].normal_()
            for slots in ((0, 2, 3), (3, -1, 0, 2)):
                # All tokens of this step are queries, as of a chunk.
                counts = [lens[slot] - before[slot] if slot >= 0 else 7 for slot in slots]
                numbers = [lens[slot] if slot >= 0 else 7 for slot in slots]
                starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
                inputs = Inputs(
                    torch.randn(sum(counts), 4, width, device=device).to(dtype), k, v,
                    torch.tensor(numbers, dtype=torch.int32, device=device),
                    torch.tensor(slots, dtype=torch.int32, device=device), starts,
                    {{"window": spec.window}} if spec.window else {{}},
                )
                assert_right(run(prefill_attention, inputs), inputs)
print("right")
"""


@pytest.mark.parametrize(("layout", "width"), [("per_layer", 64), ("sliced", 80)])
def test_pages_behind_the_last_token_are_not_there(
    layout: str, width: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a process of its own, since reading one row too many ends it; and on the host as a user would have it run.
    lens, most = [(4096, 0, 2048, 1), (8192, 0, 4096, 4097)], 16384
    if device == "cpu":
        lens, most = [(32, 0, 16, 1), (64, 0, 48, 32)], 256
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = in_interpreter(
        REAL.format(device=device, dtype="torch.float16", width=width, layout=layout, lens=lens, most=most)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("right")
