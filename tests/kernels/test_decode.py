"""Decode: a few queries of each request against its slot of the cache."""

from __future__ import annotations

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
from vtensor.triton_kernels.attention import decode_attention
from vtensor.triton_kernels.decode import DecodePlan
from vtensor.triton_kernels.reference import attend
from vtensor.triton_kernels.tuning import DecodeTuning

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
MLA = Case((4, 1), width=576, value_width=512, layout="latent")
QUERIES = (1, 2, 5)


def check(case: Case, device: str, **options: Any) -> None:
    inputs = make(case, device)
    assert_right(run(decode_attention, inputs, **options), inputs)


# -- shapes -------------------------------------------------------------------------------------------------------


@on_devices(
    cpu=[Case(heads, 16, lens=(19,), queries=QUERIES[i % 3]) for i, heads in enumerate(HEADS)],
    gpu=[
        Case(
            heads, width, lens=LENGTHS, queries=QUERIES[(i + j) % 3], dtype=BF16, layout=("per_layer", "sliced")[i % 2]
        )
        for i, heads in enumerate(HEADS)
        for j, width in enumerate(WIDTHS)
    ],
)
def test_heads(device: str, case: Case) -> None:
    check(case, device)


@on_devices(
    cpu=[
        Case((2, 1), width, lens=(1, 0, 40), dtype=dtype, layout="sliced")
        for width in (16, *WIDTHS)
        for dtype in (FP16, FP32)
    ],
    gpu=[
        Case((8, 2), width, lens=LENGTHS, queries=queries, dtype=dtype, layout="sliced")
        for width in (16, *WIDTHS, 512)
        for dtype, queries in ((FP16, 1), (FP32, 1), (FP32, 3))
    ],
)
def test_widths_and_dtypes(device: str, case: Case) -> None:
    check(case, device)


@on_devices(
    cpu=[
        *(Case((2, 1), width, value_width, lens=(1, 40)) for width, value_width in VALUE_WIDTHS),
        *(replace(MLA, lens=(9, 0, 20), dtype=dtype) for dtype in (FP16, FP32)),
        replace(MLA, lens=(9, 20), queries=2, features=("fp8",)),
        replace(MLA, width=64, value_width=32, features=("window",)),
        replace(MLA, width=80, value_width=64, features=("sinks", "softcap")),
    ],
    gpu=[
        *(
            Case((8, 2), width, value_width, lens=LENGTHS, dtype=BF16, layout=layout)
            for width, value_width in VALUE_WIDTHS
            for layout in ("per_layer", "sliced")
        ),
        *(
            replace(MLA, heads=(heads, 1), lens=LENGTHS, queries=queries, dtype=BF16)
            for heads in (16, 40, 128)
            for queries in (1, 2)
        ),
        replace(MLA, heads=(16, 1), lens=LENGTHS, dtype=FP16),
        replace(MLA, heads=(16, 1), lens=LENGTHS, dtype=FP32),
        *(
            replace(MLA, heads=(16, 1), lens=LENGTHS, dtype=BF16, features=features)
            for features in (("fp8",), ("fp8 of one scale", "window"), ("window",), ("sinks", "softcap"), ("alibi",))
        ),
        replace(MLA, width=80, value_width=64, lens=LENGTHS, dtype=BF16),
        replace(MLA, width=64, value_width=32, lens=LENGTHS, dtype=BF16),
        replace(MLA, heads=(8, 4), width=96, value_width=80, lens=LENGTHS, dtype=BF16),
    ],
)
def test_values_of_another_width(device: str, case: Case) -> None:
    check(case, device)


@on_devices(
    cpu=[Case((2, 1), lens=(length,), queries=queries) for length in LENGTHS[:-2] for queries in (1, 3)]
    + [Case((2, 1), lens=(1000,)), Case((2, 1), width=16, lens=(4097,))],
    gpu=[
        Case((8, 2), 128, lens=(length,) * requests, queries=queries, dtype=BF16, layout=layout)
        for length in LENGTHS
        for requests in (1, 3)
        for queries in (1, 5)
        for layout in ("per_layer", "sliced")
    ],
)
def test_equal_lengths(device: str, case: Case) -> None:
    check(case, device)


@on_devices(
    cpu=[
        Case((6, 2), lens=(30, 3, 0, 64), queries=1, keeps_dim=True),
        Case((6, 2), lens=(30, 3, 0, 64), queries=2),
        Case((6, 2), lens=(30, 3, 0, 64), queries=5, features=("window",)),
        Case((2, 1), lens=(70, 3), queries=64),
        Case((1, 1), width=16, lens=(40,), queries=300, features=("window", "alibi")),
    ],
    gpu=[
        Case(heads, 128, lens=LENGTHS, queries=queries, dtype=BF16, layout="sliced", features=features, keeps_dim=True)
        for heads, features in (((32, 8), ()), ((12, 2), ("window",)))
        for queries in (1, 2, 5, 64, 300, 2048)
    ],
)
def test_numbers_of_queries(device: str, case: Case) -> None:
    # The first rows of requests with more queries than tokens see nothing.
    check(case, device)


RAGGED = (130_000, *(500,) * 14, 0, 1, 60_000)


@on_devices(
    cpu=[Case((4, 2), width=16, lens=(700, 1, 30, 0, 2, 31), dtype=FP32)],
    gpu=[
        Case((8, 2), 128, lens=RAGGED, dtype=BF16),
        Case((8, 2), 64, lens=RAGGED, dtype=FP32),
        Case((8, 2), 128, lens=RAGGED, dtype=BF16, queries=3, layout="sliced", features=("sinks", "softcap")),
        Case((8, 1), 128, lens=RAGGED, dtype=BF16, features=("window",), window=4096),
    ],
)
def test_one_long_request_beside_short_ones(device: str, case: Case) -> None:
    check(case, device)


# -- features -----------------------------------------------------------------------------------------------------


@on_devices(
    cpu=[
        Case((4, 2), 32, lens=(3, 0, 40), queries=1 + i % 2, features=features, layout=("sliced", "per_layer")[i % 2])
        for i, features in enumerate(feature_sets())
    ],
    gpu=[
        Case((6, 2), 64, lens=LENGTHS, queries=1 + i % 3, dtype=BF16, features=features, layout="sliced", window=100)
        for i, features in enumerate(feature_sets())
    ],
)
def test_features_and_their_pairs(device: str, case: Case) -> None:
    check(case, device)


@on_devices(
    cpu=[
        *(Case(lens=(70, 5), queries=2, features=("window",), window=window) for window in (1, 2, 16, 64, 69, 1000)),
        Case(lens=(70, 5), queries=4, features=("window",), window=3),
    ],
    gpu=[
        Case((8, 2), 128, lens=LENGTHS, queries=queries, dtype=BF16, features=("window",), window=window)
        for window in (1, 2, 15, 16, 17, 63, 64, 65, 128, 500, 4096, 4097, 100_000)
        for queries in (1, 2, 5)
    ],
)
def test_windows(device: str, case: Case) -> None:
    check(case, device)


@by_device("dtype", cpu=[FP16, FP32], gpu=[FP16, FP32, BF16])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_logits_of_1e4(softcap: float | None, dtype: torch.dtype, device: str) -> None:
    inputs = make(Case(lens=(1, 17, 80), dtype=dtype), device)
    inputs.options.update(scale=1e4 / 8.0, **({} if softcap is None else {"softcap": softcap}))
    out, lse = run(decode_attention, inputs)
    assert torch.isfinite(out).all()
    right, right_lse = attend(inputs.call()._replace(q=inputs.call().q.double()), torch.float64)
    torch.testing.assert_close(lse.flatten(), right_lse.flatten(), atol=1e-4, rtol=1e-5)
    if dtype == FP32 and softcap is not None:
        torch.testing.assert_close(out.double().flatten(), right.flatten(), atol=1e-3, rtol=1e-3)


def test_a_window_of_one_shows_the_last_value(device: str) -> None:
    inputs = make(Case((4, 2), lens=(7, 40), features=("window",), window=1), device)
    out, _ = run(decode_attention, inputs)
    last = torch.stack([inputs.v[0, 6], inputs.v[1, 39]]).repeat_interleave(2, dim=1)
    assert torch.equal(out, last)


# -- slots --------------------------------------------------------------------------------------------------------

SLOTS = [(3, 1, 0, 2), (5, 5, 5, 5), (-1, 4, -1, 4), (0, -1, 7, 0), (-1, -1, -1, -1), (3, 3, -1, 0)]


@on_devices(
    cpu=[Case(slots=slots, width=32, lens=(5, 30, 0, 17), queries=1 + i % 2) for i, slots in enumerate(SLOTS)],
    gpu=[
        Case((8, 2), 128, slots=slots, lens=lens, queries=queries, dtype=BF16, layout=layout, features=features)
        for slots in SLOTS
        for lens in ((5, 1000, 0, 129), (64, 63, 4097, 1))
        for queries in (1, 4)
        for layout in ("per_layer", "sliced")
        for features in ((), ("window",))
    ],
)
def test_slots(device: str, case: Case) -> None:
    check(case, device)


def test_padding_reads_and_writes_nothing_but_zeros(device: str) -> None:
    # Lengths of padding may be anything that fits, and its slot's rows may be anything.
    inputs = make(Case(lens=(9, 20, 20), slots=(2, -1, 0)), device)
    out, lse = run(decode_attention, inputs)
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()
    assert out[0].any()
    assert out[2].any()
    assert_right((out, lse), inputs)


def test_a_batch_of_none(device: str) -> None:
    inputs = make(Case(lens=()), device)
    out, lse = run(decode_attention, inputs)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_more_requests_than_one_program_adds_up(
    queries: int, padded: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beyond 1,024 of them the lengths are added up beforehand; so many would take the interpreter minutes.
    count = 3000
    if device == "cpu":
        monkeypatch.setattr("vtensor.triton_kernels.shapes.MOST_LENGTHS", 4)
        monkeypatch.setattr("vtensor.triton_kernels.decode.MOST_LENGTHS", 4)
        count = 11
    lens = tuple((7 * i) % 40 if i % 5 else 0 for i in range(count))
    slots = tuple(-1 if padded and i % 3 == 0 else i % 7 for i in range(count))
    check(Case((2, 1), width=16, lens=lens, slots=slots, queries=queries, dtype=FP32), device)


# -- how it is split ----------------------------------------------------------------------------------------------


TILES = DecodeTuning(block_n=16, num_warps=4, num_stages=2, programs=1)  # small, so that there are many


def in_parts(inputs: Inputs, num_programs: int, tuning: DecodeTuning) -> tuple[torch.Tensor, torch.Tensor]:
    """Have so many programs do it, instead of as many as suit the device."""
    call = inputs.call()
    out = torch.full((*call.q.shape[:-1], call.v.shape[3]), torch.nan, dtype=call.q.dtype, device=call.q.device)
    lse = torch.full(call.q.shape[:-1], torch.nan, device=call.q.device)
    plan = DecodePlan(call, has_lse=True, out_strides=out.stride(), num_programs=num_programs, tuning=tuning)
    plan.run(call, out, lse)
    return out, lse


def cuts(device: str) -> list[DecodeTuning]:
    """Whatever may change how parts are made and merged."""
    if device == "cpu":
        return [TILES]
    large = replace(TILES, block_n=64)
    return [TILES, *(replace(x, merges_apart=True) for x in (TILES, large))]


@by_device("num_programs", cpu=[1, 3, 8, 64], gpu=[1, 2, 3, 5, 7, 8, 13, 64, 133, 500])
@pytest.mark.parametrize("queries", [1, 3])
def test_lengths_1_to_65_in_any_number_of_parts(num_programs: int, queries: int, device: str) -> None:
    lens = tuple(range(1, 66)) if device != "cpu" else (1, 7, 16, 33, 50, 64, 65)
    inputs = make(Case((4, 2), width=16, lens=lens, queries=queries, dtype=FP32), device)
    for tuning in cuts(device):
        assert_right(in_parts(inputs, num_programs, tuning), inputs)


@by_device("num_programs", cpu=[1, 3, 16], gpu=[1, 2, 3, 7, 16, 33, 264, 1000])
@pytest.mark.parametrize("features", [(), ("sinks", "softcap"), ("window", "alibi")], ids="+".join)
def test_long_requests_in_any_number_of_parts(num_programs: int, features: tuple[str, ...], device: str) -> None:
    lens = (300, 0, 129, 1) if device == "cpu" else (4097, 0, 129, 1, 20_000)
    inputs = make(Case((3, 1), width=16, lens=lens, dtype=FP32, features=features, window=150), device)
    for tuning in cuts(device):
        assert_right(in_parts(inputs, num_programs, tuning), inputs)


@pytest.mark.parametrize("num_programs", [40, 64])
@pytest.mark.parametrize("features", [(), ("window", "alibi", "sinks")], ids="+".join)
def test_more_parts_than_are_merged_at_once(features: tuple[str, ...], num_programs: int, device: str) -> None:
    case = Case((2, 1), width=16, lens=(700, 0, 3), dtype=FP32, features=features, window=690, layout="sliced")
    inputs = make(case, device)
    for tuning in cuts(device):
        # What a thread adds up at a time decides how many parts are merged at once.
        for merged in (1, tuning.merged):
            assert_right(in_parts(inputs, num_programs, replace(tuning, merged=merged)), inputs)


@by_device("capacity", cpu=[65, 300, 50_000], gpu=[65, 66, 128, 300, 4096, 50_000])
def test_capacity_makes_no_difference(capacity: int, device: str) -> None:
    lens = (65, 1, 0, 64) if device == "cpu" else tuple(range(66))
    case = Case((2, 1), width=16, lens=lens, slots=tuple(i % 4 for i in range(len(lens))), dtype=FP32)
    inputs = make(replace(case, capacity=capacity), device)
    assert_right(run(decode_attention, inputs), inputs)


@on_devices(
    cpu=[Case(lens=(70, 33), queries=2, features=("window", "sinks"))],
    gpu=[
        Case((8, 2), 128, lens=LENGTHS, queries=queries, dtype=dtype, layout="sliced", features=features)
        for queries in (1, 5)
        for dtype in (BF16, FP32)
        for features in ((), ("window", "sinks"), ("fp8",))
    ],
)
def test_repeats_are_the_same_to_the_bit(device: str, case: Case) -> None:
    inputs = make(case, device)
    first, first_lse = run(decode_attention, inputs)
    for _ in range(2 if device == "cpu" else 20):
        again, again_lse = run(decode_attention, inputs)
        assert torch.equal(first, again)
        assert torch.equal(first_lse, again_lse)


@on_devices(
    cpu=[Case(lens=(70, 33, 0), slots=(1, 4, 2), features=("window",)), Case(lens=(16, 64), queries=2)],
    gpu=[
        Case((8, 2), 128, lens=LENGTHS, queries=queries, dtype=BF16, layout=layout, features=features)
        for queries in (1, 5)
        for layout in ("per_layer", "sliced")
        for features in ((), ("window",), ("fp8",))
    ],
)
def test_what_is_not_seen_makes_no_difference(device: str, case: Case) -> None:
    inputs = make(case, device)
    out, lse = run(decode_attention, inputs)
    for part in (inputs.k, inputs.v):
        unseen = part.float().isnan()
        part.copy_(torch.where(unseen, torch.full_like(unseen, 3.0, dtype=torch.float32), part.float()).to(part.dtype))
    again, again_lse = run(decode_attention, inputs)
    assert torch.equal(out, again)
    assert torch.equal(lse, again_lse)


# -- outputs, and how it is called --------------------------------------------------------------------------------


def test_outputs_are_made_where_none_is_given(device: str) -> None:
    inputs = make(Case(value_width=32, queries=2), device)
    out, lse = run(decode_attention, inputs)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.seq_lens)
    alone = decode_attention(*arguments)
    assert isinstance(alone, torch.Tensor)
    assert (alone.shape, alone.dtype) == (out.shape, out.dtype)
    assert torch.equal(alone, out)
    both = decode_attention(*arguments, return_lse=True)
    assert torch.equal(both[0], out)
    assert torch.equal(both[1], lse)


def test_inputs_are_left_as_they_are(device: str) -> None:
    inputs = make(Case(slots=(3, 0, 1, -1), features=("window", "sinks", "alibi", "fp8")), device)
    tensors = [x for x in (*vars(inputs).values(), *inputs.options.values()) if isinstance(x, torch.Tensor)]
    before = [x.clone().view(torch.uint8) if x.element_size() == 1 else x.clone() for x in tensors]
    run(decode_attention, inputs)
    for x, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(
            x.view(torch.uint8) if x.element_size() == 1 else x, old, rtol=0, atol=0, equal_nan=True
        )


@by_device("shift", cpu=[(1, 0), (8, 3)], gpu=[(0, 8), (0, 1), (1, 0), (2, 2), (4, 4), (8, 0), (3, 5)])
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_rows_at_any_address(dtype: torch.dtype, shift: tuple[int, int], device: str) -> None:
    # After rows at round addresses, so that whatever is kept from that call must not be taken for these.
    inputs = make(Case((4, 2), 64, lens=(70, 0, 33), dtype=dtype), device)
    right, right_lse = run(decode_attention, inputs)
    for names in (("q",), ("k",), ("v",), ("q", "k", "v")):
        changed = {name: moved(getattr(inputs, name), *shift) for name in names}
        out, lse = run(decode_attention, replace(inputs, **changed))
        torch.testing.assert_close(out, right, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(lse, right_lse, atol=1e-5, rtol=1e-5)
        out = moved(torch.full_like(right, torch.nan), *shift)
        out, lse = run(decode_attention, inputs, out=out)
        torch.testing.assert_close(out, right, atol=1e-3, rtol=1e-3)


def test_calls_of_other_options_one_after_another(device: str) -> None:
    inputs = make(Case((4, 2), 64, lens=(70, 0, 33), dtype=FP32), device)
    options: list[dict[str, Any]] = [{}, {"window": 16}, {"window": 17}, {"window": 1}, {"scale": 1.0}, {"scale": 0.3}]
    options += [{"softcap": 1.0}, {"softcap": 2.5}, {"window": 32, "softcap": 1.0}, {}]
    for some in options:
        changed = replace(inputs, options=some)
        assert_right(run(decode_attention, changed), changed)


@pytest.mark.parametrize("latent_first", [True, False])
def test_values_that_only_look_like_a_part_of_the_keys(latent_first: bool, device: str) -> None:
    # The same shapes and strides as those of a latent, but other memory.
    latent = make(replace(MLA, width=80, value_width=64, lens=(9, 20)), device)
    memory = torch.empty_strided(latent.k.shape, latent.k.stride(), dtype=FP16, device=device)
    other = replace(latent, v=memory.copy_(-latent.k)[..., :64])
    assert other.v.stride() == latent.v.stride()
    for inputs in (latent, other) if latent_first else (other, latent):
        assert_right(run(decode_attention, inputs), inputs)


@pytest.mark.gpu
def test_streams_side_by_side(gpu: str) -> None:
    cases = [
        Case((8, 2), 128, lens=(4097, 1, 129 + i, 0, 20_000), dtype=BF16, features=(("sinks",), ())[i % 2])
        for i in range(4)
    ]
    all_inputs = [make(case, gpu, seed=i) for i, case in enumerate(cases)]
    right = [run(decode_attention, inputs) for inputs in all_inputs]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in cases]
    for _ in range(30):
        for stream, inputs, results in zip(streams, all_inputs, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(decode_attention, inputs))
    torch.cuda.synchronize()
    for results, (out, lse) in zip(found, right, strict=True):
        assert all(torch.equal(x, out) and torch.equal(y, lse) for x, y in results)


@pytest.mark.gpu
def test_graphs_replayed_side_by_side(gpu: str) -> None:
    all_inputs = [
        make(Case((8, 2), 128, lens=(4097, 1, 129 + i, 0, 20_000), dtype=BF16), gpu, seed=i) for i in range(3)
    ]
    right = [run(decode_attention, inputs) for inputs in all_inputs]
    graphs, found, streams = [], [], [torch.cuda.Stream() for _ in all_inputs]
    for inputs in all_inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append([run(decode_attention, inputs) for _ in range(3)])
        graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = run(decode_attention, all_inputs[0])  # in a stream of its own
        assert torch.equal(eager[0], right[0][0])
    torch.cuda.synchronize()
    for results, (out, lse) in zip(found, right, strict=True):
        assert all(torch.equal(x, out) and torch.equal(y, lse) for x, y in results)


@pytest.mark.gpu
def test_threads_side_by_side(gpu: str) -> None:
    all_inputs = [
        make(Case((8, 2), 128, lens=(4097, 1, 129 + i, 0, 20_000), dtype=BF16), gpu, seed=i) for i in range(4)
    ]

    def repeat(inputs: Inputs) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [run(decode_attention, inputs) for _ in range(30)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(x, results[0][0]) and torch.equal(y, results[0][1]) for x, y in results)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(repeat, all_inputs))


@pytest.mark.parametrize("queries", [1, 2])
def test_a_compiled_graph_holds_it(queries: int, device: str) -> None:
    inputs = make(Case(queries=queries, slots=(1, 2, -1, 0), features=("window", "sinks")), device)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, slots: torch.Tensor) -> Any:
        out, lse = decode_attention(q * 2, k, v, lens, slots, **inputs.options, return_lse=True)
        return out + 1, lse * 2

    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(step, fullgraph=True, backend="aot_eager")
    arguments = (inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.batch_idx)
    for found, right in zip(compiled(*arguments), step(*arguments), strict=True):
        assert found.shape == right.shape
        assert torch.equal(found, right)


def test_a_compiled_graph_writes_to_an_output(device: str) -> None:
    inputs = make(Case(), device)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        decode_attention(q, k, v, lens, out=out)
        return out * 2

    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(step, fullgraph=True, backend="aot_eager")
    out, right = (torch.full_like(inputs.q, torch.nan) for _ in range(2))
    doubled = compiled(inputs.q, inputs.k, inputs.v, inputs.seq_lens, out)
    step(inputs.q, inputs.k, inputs.v, inputs.seq_lens, right)
    assert torch.equal(out, right)
    assert torch.equal(doubled, right * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("features", [(), ("window",), ("fp8", "sinks")], ids="+".join)
def test_a_cuda_graph_captured_short_and_replayed_long(features: tuple[str, ...], queries: int, gpu: str) -> None:
    lens = (4097, 129, 0, 20_000, 1, 64, 999, 3)
    final = make(Case((8, 2), 128, lens=lens, slots=(3, 1, 0, 7, -1, 4, 4, 2), queries=queries, dtype=BF16,
                      layout="sliced", features=features), gpu)  # fmt: skip
    assert final.batch_idx is not None
    static = replace(final, seq_lens=torch.ones_like(final.seq_lens), batch_idx=torch.full_like(final.batch_idx, -1))
    out = torch.full_like(final.q, torch.nan)
    run(decode_attention, static, out=out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(decode_attention, static, out=out)
    for some in ((2, 1, 0, 5, 1, 1, 8, 3), lens, (1, 1, 0, 1, 1, 1, 1, 1), lens[::-1]):
        numbers = torch.tensor(some, dtype=torch.int32, device=gpu)
        slots = final.batch_idx if some != lens[::-1] else final.batch_idx.flip(0)
        static.seq_lens.copy_(numbers)
        static.batch_idx.copy_(slots)
        out.fill_(torch.nan)
        graph.replay()
        now = replace(static, seq_lens=numbers, batch_idx=slots)
        again = run(decode_attention, now)
        if features != ("window",) or some in (lens, lens[::-1]):  # before the windows of the long ones all is NaN
            assert_right(found, now)
            assert torch.equal(found[0], again[0])
            assert torch.equal(found[1], again[1])


# -- large --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (32, 8)], ids=str)
def test_more_heads_of_requests_than_a_grid_has_rows(heads: tuple[int, int], gpu: str) -> None:
    batch, length = 70_000 // heads[1], 77
    inputs = make(Case(heads, width=64, lens=(length,), dtype=BF16, keeps_dim=True), gpu)
    q = torch.randn(batch, heads[0], 64, device=gpu).to(BF16)
    lens = torch.full((batch,), length, dtype=torch.int32, device=gpu)
    many = replace(inputs, q=q, seq_lens=lens, batch_idx=torch.zeros_like(lens))
    found = run(decode_attention, many)
    starts = torch.tensor([0, batch], dtype=torch.int32, device=gpu)  # one request that sees all, for the reference
    assert_right(found, replace(many, seq_lens=lens[:1], batch_idx=None, cu_seqlens=starts, options={"causal": False}))


@pytest.mark.gpu
@pytest.mark.parametrize("features", [(), ("window",)], ids="+".join)
@pytest.mark.parametrize("queries", [1, 5])
def test_70000_tokens_in_a_slice_of_32_layers(features: tuple[str, ...], queries: int, gpu: str) -> None:
    # A token is 65,536 elements wide: offsets pass 2^31 at half of it.
    length, window = 70_000, 1000
    rows = torch.empty(1, length + 1, 32, 2, 8, 128, dtype=BF16, device=gpu)
    k, v = rows[:, :, 31, 0], rows[:, :, 31, 1]
    for part in (k, v):
        part[:, :length].normal_()
        part[:, length:] = torch.nan
    q = torch.randn(1, queries, 32, 128, dtype=BF16, device=gpu)
    lens = torch.tensor([length], dtype=torch.int32, device=gpu)
    inputs = Inputs(q, k, v, lens, None, None, {"window": window} if features else {})
    assert_right(run(decode_attention, inputs), inputs)


def test_offsets_beyond_32_bits_on_the_host() -> None:
    length, window = 70_000, 40
    rows = sparse(1, length + 1, 32, 2, 8, 128, dtype=FP16)
    k, v = rows[:, :, 31, 0], rows[:, :, 31, 1]
    for part in (k, v):
        part[:, length - window : length].normal_()
        part[:, length:] = torch.nan
    inputs = Inputs(
        torch.randn(1, 8, 128, dtype=FP16),
        k,
        v,
        torch.tensor([length], dtype=torch.int32),
        None,
        None,
        {"window": window},
    )
    assert_right(run(decode_attention, inputs), inputs)


def test_slots_beyond_32_bits_on_the_host() -> None:
    slots = (0, 5)
    k, v = sparse(6, 1 << 21, 2, 128, dtype=FP16), sparse(6, 1 << 21, 2, 128, dtype=FP16)
    for part in (k, v):
        for slot in slots:
            part[slot, :30].normal_()
            part[slot, 30:40] = torch.nan
    inputs = Inputs(
        torch.randn(2, 4, 128, dtype=FP16), k, v, torch.tensor([30, 30], dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32), None, {},
    )  # fmt: skip
    assert_right(run(decode_attention, inputs), inputs)


# -- a real cache -------------------------------------------------------------------------------------------------

REAL = """
import torch
import vtensor as vt
from tests.kernels.attention_cases import Inputs, assert_right, run
from vtensor.triton_kernels.attention import decode_attention

device, dtype, width = {device!r}, {dtype}, {width}
layers = tuple(vt.LayerSpec(2, width, dtype=dtype, window=window) for window in (None, None, 24))
config = vt.KVCacheConfig(layers=layers, max_batch_size=5, max_context_tokens={most}, layout={layout!r})
nothing_ahead = dict(lookahead_tokens=0, eager_slot=False, low_watermark=0.0, high_watermark=0.0)
with vt.KVCacheManager(config, device, **nothing_ahead) as cache:
    for _ in range(4):
        cache.alloc_reqid()
    cache.free_reqid(1)
    size = cache.pool.page_group_bytes
    for lens in {lens}:
        before = [row.seq_len for row in cache.residency()]
        cache.step([length if slot != 1 else 0 for slot, length in enumerate((*lens, 0))])
        for layer, spec in enumerate(layers):
            k, v = cache.layer(layer, plain=True)
            for part in (k, v):
                for slot in (0, 2, 3):
                    part[slot, before[slot] : lens[slot]].normal_()
            for slots in ((0, 2, 3), (3, -1, 0, 2)):
                numbers = [lens[slot] if slot >= 0 else 7 for slot in slots]
                inputs = Inputs(
                    torch.randn(len(slots), 2, 4, width, device=device).to(dtype), k, v,
                    torch.tensor(numbers, dtype=torch.int32, device=device),
                    torch.tensor(slots, dtype=torch.int32, device=device), None,
                    {{"window": spec.window}} if spec.window else {{}},
                )
                assert_right(run(decode_attention, inputs), inputs)
    committed = [row.committed_tokens for row in cache.residency()]
print("right", committed)
"""


@pytest.mark.parametrize(("layout", "width"), [("per_layer", 64), ("sliced", 80)])
def test_pages_behind_the_last_token_are_not_there(
    layout: str, width: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a process of its own, since reading one row too many ends it; and on the host as a user would have it run.
    on_host = device == "cpu"
    lens = [(32, 0, 16, 1), (64, 0, 48, 32)] if on_host else [(4096, 0, 2048, 1), (8192, 0, 4096, 4097)]
    code = REAL.format(
        device=device, dtype="torch.float16", width=width, layout=layout, lens=lens, most=256 if on_host else 16384
    )
    if on_host:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = in_interpreter(code)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("right")
