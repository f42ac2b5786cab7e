"""`vtensor bench kernels`: its arithmetic, its options, and that what is wrong is told and not timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from vtensor.bench import (
    kernels,
    kernels_append,
    kernels_attention,
    kernels_case,
    kernels_contenders,
    kernels_overhead,
    kernels_timing,
)
from vtensor.bench.frame import Benchmark, measure
from vtensor.bench.kernels_case import Case, Heads, Memory
from vtensor.bench.kernels_summary import summary
from vtensor.bench.kernels_variant import KernelVariant
from vtensor.bench.stats import summarize
from vtensor.cli import app
from vtensor.units import GIB, KIB


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "kernels", *map(str, arguments)])


def case(**changes: Any) -> Case:
    given: dict[str, Any] = {
        "kind": "decode",
        "name": "a case",
        "memory": Memory("cpu", torch.bfloat16),
        "heads": Heads(32, 8, 128),
        "lens": (KIB,) * 256,
        "slot_tokens": KIB,
        "queries": 1,
        "slice_layers": 0,
        "least_bytes": 2 * GIB,
    }
    return Case(**{**given, **changes})


def small_case(**changes: Any) -> Case:
    given: dict[str, Any] = {
        "memory": Memory("cpu", torch.float32),
        "heads": Heads(4, 2, 16),
        "lens": (20, 32),
        "slot_tokens": 32,
        "least_bytes": 0,
    }
    made = case(**{**given, **changes})
    made.claim()
    return made


# -- arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "num_layers"),
    [
        ({}, 2),
        ({"slice_layers": 32}, 32),
        ({"lens": (16 * KIB,), "slot_tokens": 16 * KIB}, 32),
        ({"lens": (16 * KIB,), "slot_tokens": 16 * KIB, "slice_layers": 12}, 36),  # whole slices
        ({"least_bytes": 0}, 2),
    ],
)
def test_caches_are_larger_than_the_l2_cache(changes: dict[str, Any], num_layers: int) -> None:
    made = case(**changes)
    assert made.num_layers == num_layers
    assert made.cache_bytes >= made.least_bytes


def test_bytes_and_flops() -> None:
    assert case().bytes_read == GIB  # 256 x 1k tokens of 8 heads of 128, K and V, of 2 bytes
    assert case(lens=(100, 28), queries=1).flops == 4 * 32 * 128 * 128
    whole = case(kind="prefill", lens=(8,), queries=8)
    assert whole.flops == 4 * 32 * 128 * (8 * 9 // 2)
    chunk = case(kind="prefill", lens=(100,), queries=3)
    assert chunk.flops == 4 * 32 * 128 * (98 + 99 + 100)


def test_layers_do_not_overlap() -> None:
    for slice_layers in (0, 3):
        made = small_case(slice_layers=slice_layers)
        layers = made.layers()
        assert len(layers) == made.num_layers == max(2, slice_layers)
        made.memory.flat.zero_()
        for number, layer in enumerate(layers):
            assert layer.k.shape == layer.v.shape == (2, 32, 2, 16)
            layer.k.fill_(2 * number + 1)
            layer.v.fill_(2 * number + 2)
        for number, layer in enumerate(layers):
            assert (layer.k == 2 * number + 1).all()
            assert (layer.v == 2 * number + 2).all()


@pytest.mark.parametrize("page_tokens", [4, 16])
def test_pages_hold_the_layer(page_tokens: int) -> None:
    made = small_case()
    layer = made.layers()[1]
    cache = made.pages(layer, page_tokens)
    assert cache.k.data_ptr() == layer.k.data_ptr()
    assert sorted(cache.table.flatten().tolist()) == list(range(2 * 32 // page_tokens))
    k, _ = cache.contiguous()
    assert k.shape == layer.k.shape
    assert not torch.equal(k, layer.k)  # they lie in another order
    assert torch.equal(k.flatten().sort().values, layer.k.flatten().sort().values)


def test_what_is_wrong_is_seen() -> None:
    for changes in ({}, {"kind": "prefill", "lens": (32, 32), "queries": 20}):
        made = small_case(**changes)
        layer = made.layers()[-1]
        for contender in kernels_contenders.contenders(made, (4,)):
            out = contender.make(made, layer)()
            assert made.why_wrong(out, layer, contender.page_tokens) is None
            assert "off by nan" in str(made.why_wrong(out * torch.nan, layer, contender.page_tokens))
            assert "off by" in str(made.why_wrong(out * 1.1, layer, contender.page_tokens))
            assert "shape" in str(made.why_wrong(out[..., :1], layer, contender.page_tokens))


def test_ragged_lengths_hold_as_many_tokens() -> None:
    sizes = kernels._FULL
    equal, ragged = [*kernels_attention.ragged_cases(Memory("cpu", torch.bfloat16), sizes)][:2]
    assert equal.is_equal
    assert not ragged.is_equal
    assert sum(equal.lens) == pytest.approx(sum(ragged.lens), rel=1e-3)
    assert min(ragged.lens) >= 100
    assert max(ragged.lens) <= 64 * KIB
    assert sum(length < 2560 for length in ragged.lens) in range(20, 45)  # about half: 2,560 is the geometric mean


def test_the_full_benchmark_has_all_shapes() -> None:
    memory = Memory("cpu", torch.bfloat16)
    decode = [*kernels_attention.decode_cases(memory, kernels._FULL)]
    assert len(decode) == 6 * 2 * 4
    assert max(each.cache_bytes for each in decode) == 64 * GIB
    assert {name for name in kernels._BEST_DECODE_US} == {(len(each.lens), each.lens[0]) for each in decode}
    targets = {each.name: kernels._decode_target(each) for each in decode}
    assert targets["decode 64 x 4k, Hkv 8, sliced 16"] == {"layer": 250.8, "bandwidth": 4.3}
    assert targets["decode 64 x 4k, Hkv 4, sliced 16"] == {}
    prefill = {each.name: each for each in kernels_attention.prefill_cases(memory, kernels._FULL)}
    assert kernels._prefill_target(prefill["prefill 8k, Hkv 8, per_layer"]) == {"rate": 629.1}
    assert kernels._prefill_target(prefill["prefill chunk 2k of 128k, Hkv 8, per_layer"]) == {}


def test_a_case_that_is_too_large_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_most_bytes", lambda device: 1000)
    made = kernels.benchmark("cpu", only="decode")
    assert not made.variants
    assert "too large for this device's memory: decode 2 x 128" in made.notes
    assert len(made.parameters["left_out"]) == 2


# -- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", kernels.PARTS)
def test_only_a_part(part: kernels.Part, tmp_path: Path) -> None:
    output = tmp_path / "kernels.jsonl"
    done = run("--device", "cpu", "--only", part, "--rounds", 1, "--output", output)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert {line["variant_parameters"]["kind"] for line in lines} == {part}
    assert {line["parameters"]["only"] for line in lines} == {part}
    assert all("cudnn" in line["parameters"]["absent"] for line in lines)
    summaries = [line for line in done.stdout.splitlines() if ": " in line and " us" in line and "metric" not in line]
    cases = {line["variant_parameters"]["case"] for line in lines}
    for name in cases:
        assert any(line.startswith(f"{name}: ") for line in summaries)


def test_no_such_part() -> None:
    assert run("--only", "sleep").exit_code == 2
    with pytest.raises(ValueError, match="only='sleep' must be one of decode, ragged"):
        kernels.benchmark("cpu", only="sleep")  # type: ignore[arg-type]


def test_ragged_is_compared_with_equal() -> None:
    made = kernels.benchmark("cpu", only="ragged")
    ceilings = {variant.name.rpartition("2, ")[2]: variant.ceiling for variant in made.variants}
    assert ceilings["log-uniform: ours"] == "ragged 3 x 8..128, Hkv 2, equal: ours"
    assert ceilings["equal: ours"] is None
    assert ceilings["log-uniform: sdpa-flash, no graph"] is None  # another way to call it


# -- nothing is timed that is not right ---------------------------------------------------------------------------


def failures(made: Benchmark) -> dict[str, str]:
    """What failed in a run, and why."""
    return {
        result.variant.name: result.variant.details["failed"]
        for result in measure(made)
        if "failed" in result.variant.details
    }


def off(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments, **options: function(*arguments, **options) + 1


def test_a_wrong_rival_is_told_and_the_rest_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend = kernels_contenders.BACKENDS["sdpa-flash"]
    monkeypatch.setattr(type(backend), "run_group", lambda self, call, q, k, v, return_lse: (torch.zeros_like(q), None))
    output = tmp_path / "kernels.jsonl"
    done = run("--device", "cpu", "--only", "decode", "--rounds", 1, "--output", output)
    assert done.exit_code == 0, done.output
    assert "failed: decode 2 x 128, Hkv 2, per_layer: sdpa-flash: it is off by" in done.stdout
    lines = {line["variant"]: line for line in map(json.loads, output.read_text().splitlines())}
    wrong = lines["decode 2 x 128, Hkv 2, per_layer: sdpa-flash"]
    assert not wrong["metrics"]
    assert "off by" in wrong["details"]["failed"]
    assert lines["decode 2 x 128, Hkv 2, per_layer: ours"]["metrics"]


@pytest.mark.parametrize(
    ("part", "module", "function", "count"),
    [
        ("decode", kernels_contenders, "decode_attention", 2),
        ("decode", kernels_contenders, "paged_decode", 2),
        ("prefill", kernels_contenders, "prefill_attention", 2),
        ("prefill", kernels_contenders, "paged_prefill", 4),
        ("overhead", kernels_overhead, "decode_attention", 1),
    ],
)
def test_ours_that_are_wrong_end_the_run_as_failed(
    part: kernels.Part, module: Any, function: str, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, function, off(getattr(module, function)))
    output = tmp_path / "kernels.jsonl"
    done = run("--device", "cpu", "--only", part, "--rounds", 1, "--output", output)
    assert done.exit_code == 2
    assert f"{count} of our kernels failed and were not timed" in done.stderr
    assert len([line for line in output.read_text().splitlines() if '"failed"' in line]) == count


def test_what_takes_long_to_fail_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def run_group(self: object, *arguments: object, **options: object) -> None:
        tries.append(1)
        raise RuntimeError("nvcc not found")

    backend = kernels_contenders.BACKENDS["sdpa-flash"]
    monkeypatch.setattr(type(backend), "run_group", run_group)
    monkeypatch.setattr(kernels_attention, "_PATIENCE_S", 0.0)
    failed = failures(kernels.benchmark("cpu", only="decode", rounds=1))
    assert len(tries) == 1
    assert [*failed.values()] == [
        "nvcc not found",
        "as decode 2 x 128, Hkv 2, per_layer: sdpa-flash: nvcc not found",
    ]


def test_rows_that_are_not_appended_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_append, "append_kv", lambda *arguments: None)
    failed = failures(kernels.benchmark("cpu", only="append", rounds=1))
    assert len(failed) == 4
    assert {*failed.values()} == {"the cache does not hold the new rows"}


def test_all_is_given_back() -> None:
    made = kernels.benchmark("cpu", rounds=1)
    measure(made)
    for variant in made.variants:
        assert isinstance(variant, KernelVariant)
        for name in ("calls", "layers"):
            assert not getattr(variant, name, None) or callable(getattr(variant, name))
        if isinstance(variant, kernels_attention._Attention):
            assert variant.case.memory._flat is None
            assert not variant.case._tensors


@pytest.mark.parametrize("waits", [False, True])
def test_a_rival_that_no_graph_can_hold_is_timed_without(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pretended:
        def __init__(self, calls: Any, device: str, *, in_graph: bool, **options: Any) -> None:
            self.is_graph = in_graph

        def prepare(self) -> None:
            if waits and self.is_graph:
                raise RuntimeError("operation not permitted\nwhen stream is capturing")

        def us(self) -> float:
            return 2.0

    monkeypatch.setattr(kernels_attention, "Repeated", Pretended)
    variants = {
        variant.name.partition(": ")[2]: variant
        for variant in kernels.benchmark("cpu", only="decode").variants
        if "per_layer" in variant.name
    }
    rival, ours = variants["sdpa-flash"], variants["ours"]
    with ExitStack() as resources:
        for variant in (rival, ours):
            variant.set_up(resources)
            variant.check()
            variant.warm_up()
        assert rival.measure()["layer"] == [2.0]
        reason = {"no_graph": "operation not permitted when stream is capturing"} if waits else {}
        assert rival.details == {"in_graph": not waits, **reason}
        assert bool(ours.measure()) is not waits  # ours must be fit for graphs
        assert ("failed" in ours.details) is waits


# -- the device's time --------------------------------------------------------------------------------------------


def test_calls_take_turns() -> None:
    seen: list[int] = []
    calls = [lambda number=number: seen.append(number) for number in range(3)]
    repeated = kernels_timing.Repeated(calls, "cpu", about_us=1.0)
    repeated.prepare()
    assert seen == [0, 1, 2]
    assert repeated.us() > 0
    assert seen == [0, 1, 2] * 2
    assert not repeated.is_graph


@pytest.mark.gpu
def test_a_graph_holds_as_many_calls_as_take_a_while() -> None:
    x = torch.zeros(4, device="cuda:0")
    calls = [lambda i=i: x[i].add_(1) for i in range(4)]
    repeated = kernels_timing.Repeated(calls, "cuda:0", about_us=100.0)
    repeated.prepare()
    assert repeated.is_graph
    assert repeated.num_calls == 20
    before = x.clone()
    assert 0 < repeated.us() < 1000
    assert torch.equal(x - before, torch.full_like(x, 10))  # twice: one is not timed


@pytest.mark.gpu
def test_a_call_that_waits_is_in_no_graph() -> None:
    x = torch.zeros(4, device="cuda:0")
    with pytest.raises(RuntimeError):
        kernels_timing.Repeated([lambda: x.tolist()], "cuda:0", about_us=100.0).prepare()
    after = kernels_timing.Repeated([lambda: x.add_(1)], "cuda:0", about_us=100.0)
    after.prepare()
    assert after.is_graph
    torch.randn(4, device="cuda:0")  # torch's own state is as it was


# -- summary ------------------------------------------------------------------------------------------------------


def test_summary() -> None:
    def of(contender: str, details: dict[str, str] | None = None, **metrics: float) -> Any:
        parameters = {"case": "a case", "contender": contender}
        variant = SimpleNamespace(name=f"a case: {contender}", parameters=parameters, details=details or {})
        return SimpleNamespace(variant=variant, summaries={name: summarize([value]) for name, value in metrics.items()})

    lines: Iterator[str] = summary(
        [
            of("ours", layer=30.0, bandwidth=4.0),
            of("cudnn", layer=24.0, bandwidth=5.0),
            of("slow", {"no_graph": "it waits"}, layer=3000.0),
            of("broken", {"failed": "no kernel image"}),
        ]
    )
    assert [*lines] == [
        "a case: ours 30.0 us (4.00); cudnn 24.0 us (5.00) 1.25; slow 3,000 us 0.01",
        "no graph: a case: slow: it waits",
        "failed: a case: broken: no kernel image",
    ]


@pytest.mark.parametrize(("tokens", "name"), [(128, "128"), (1024, "1k"), (131_072, "128k"), (1500, "1500")])
def test_names_of_lengths(tokens: int, name: str) -> None:
    assert kernels_case.tokens_name(tokens) == name
