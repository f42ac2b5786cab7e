"""`vtensor bench hf`: what it records, and that what is wrong is told and not timed."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from vtensor.bench import hf, hf_case, hf_contenders
from vtensor.bench.frame import measure
from vtensor.bench.hf_case import Case
from vtensor.bench.hf_contender import METRICS, Contender, Turn
from vtensor.bench.hf_contenders import contenders
from vtensor.bench.hf_model import SMALL_SHAPES, Model, in_float32
from vtensor.bench.hf_summary import summary
from vtensor.bench.stats import summarize
from vtensor.cli import app
from vtensor.integrations.transformers import VirtualCache

EAGER = {"token", "prefill", "cache"}
KEPT = {"token", "cache"}
PEAKS = {"peak, decode", "device"}


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "hf", *map(str, arguments)])


def records(output: Path) -> dict[str, dict[str, Any]]:
    return {line["variant"]: line for line in map(json.loads, output.read_text().splitlines())}


def small_case(*, dtype: torch.dtype = torch.float32, is_compiled: bool = False) -> Case:
    model = Model("tiny", SMALL_SHAPES["8b"], "cpu", dtype, 128)
    return Case(model=model, name="2x12", batch=2, context=12, is_compiled=is_compiled)


def made_for(case: Case, **options: Any) -> dict[str, Contender]:
    given: dict[str, Any] = {"static_lens": (64,), "compiled_lens": (64,), "figures": {}, **options}
    found = contenders(case, Turn(samples=1, tokens=2), max_cache_len=128, **given)
    return {str(each.parameters["contender"]): each for each in found}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, dict[str, Any]]]:
    output = tmp_path_factory.mktemp("hf") / "hf.jsonl"
    done = run("--small", "--rounds", 1, "--model", "all", "--device", "cpu", "--output", output)
    assert done.exit_code == 0, done.output
    return done, records(output)


def test_records(recorded: tuple[Result, dict[str, dict[str, Any]]]) -> None:
    _, lines = recorded
    expected = {
        "DynamicCache": EAGER,
        "StaticCache 256": EAGER,
        "VirtualCache, sdpa": EAGER,
        "VirtualCache, vtensor": EAGER,
        "DecodeStep": KEPT,
    }
    assert {variant: set(line["metrics"]) for variant, line in lines.items()} == {
        f"{model}, tiny, {case}: {contender}": metrics
        for model in ("8b", "0.6b")
        for case in ("1x24", "3x40")
        for contender, metrics in (expected if case == "3x40" else {**expected, "StaticCache 64": EAGER}).items()
    }
    for line in lines.values():
        assert line["benchmark"] == "hf"
        assert line["parameters"]["small"] is True
        assert line["parameters"]["rounds"] == 1
        assert line["versions"]["transformers"]
        batch, context = line["variant_parameters"]["batch"], line["variant_parameters"]["context"]
        assert line["variant_parameters"]["token_bytes"] == batch * context * 2 * 2 * 2 * 32 * 4
        assert line["metrics"]["token"]["unit"] == "ms"
        assert line["metrics"]["token"]["count"] == 2
        assert line["metrics"]["cache"]["median"] > 0
        assert not any({"target", "predicted"} & set(metric) for metric in line["metrics"].values())
        assert line["details"]["off"] <= line["details"]["tolerance"]
        assert line["details"]["equal_tokens"] == f"{4 * batch} of {4 * batch}"


def test_the_summary_is_printed(recorded: tuple[Result, dict[str, dict[str, Any]]]) -> None:
    done, _ = recorded
    for model in ("8b", "0.6b"):
        for case, count in (("1x24", 6), ("3x40", 5)):
            assert f"{model}, tiny, {case}, ms a token (MiB): DynamicCache " in done.stdout
            assert done.stdout.count(f"{model}, tiny, {case}: ") == count
    assert "6 lines appended" in done.stdout
    assert "failed" not in done.stdout


@pytest.mark.gpu
@pytest.mark.slow
def test_records_of_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "hf.jsonl"
    done = run("--small", "--rounds", 2, "--only", "3x40", "--device", "cuda:0", "--output", output)
    assert done.exit_code == 0, done.output
    metrics = {variant.partition(": ")[2]: set(line["metrics"]) for variant, line in records(output).items()}
    assert metrics == {
        **{
            name: EAGER | PEAKS | {"peak, prefill"}
            for name in ("DynamicCache", "StaticCache 256", "VirtualCache, sdpa", "VirtualCache, vtensor")
        },
        **{name: KEPT | PEAKS for name in ("DecodeStep", "StaticCache 256, compiled", "DecodeStep, compiled")},
    }


# -- options ------------------------------------------------------------------------------------------------------


def test_only_some_cases(tmp_path: Path) -> None:
    output = tmp_path / "hf.jsonl"
    done = run("--small", "--rounds", 1, "--device", "cpu", "--only", "3x40", "--output", output)
    assert done.exit_code == 0, done.output
    assert {line["variant_parameters"]["case"] for line in records(output).values()} == {"8b, tiny, 3x40"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--only", "8x8k"], "only='8x8k' must be one of 1x24, 3x40"),
        (["--only", "3x40", "--only", "nothing"], "only='nothing'"),
        (["--rounds", "0"], "rounds=0"),
    ],
)
def test_bad_options(options: list[str], reason: str) -> None:
    done = run("--small", "--device", "cpu", *options)
    assert done.exit_code == 2
    assert reason in done.stderr


def test_no_such_model() -> None:
    assert run("--model", "70b").exit_code == 2
    with pytest.raises(ValueError, match=r"model='70b' must be one of 8b, 0\.6b, all"):
        hf.benchmarks("cpu", model="70b")  # type: ignore[arg-type]


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run("--small", "--device", "cpu")
    assert done.exit_code == 2
    assert "vtensor bench hf needs transformers 5: pip install 'vtensor[hf]'" in done.stderr


def test_the_full_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "resolve_device", lambda device: torch.device("cuda", 0))
    parts = hf.benchmarks("cuda:0", model="all", long=True)
    assert [part.title.partition(": ")[2] for part in parts] == [
        f"{model}, {case}" for model in ("8b", "0.6b") for case in ("1x512", "8x8k", "1x64k")
    ]
    assert [name.name for name in hf._FULL] == list(hf._PREDICTED) == list(hf._TARGETS)
    for part, predicted in zip(parts, hf._PREDICTED.values(), strict=False):
        variants = {variant.parameters["contender"]: variant for variant in part.variants}
        assert predicted.keys() <= variants.keys()
        assert variants["DecodeStep, compiled"].targets == variants["DecodeStep"].targets != {}
    assert not any(variant.predicted or variant.targets for part in parts[3:] for variant in part.variants)
    assert parts[1].variants[0].parameters["token_bytes"] == 8 << 30
    without = hf.benchmarks("cuda:0", compile=False)
    assert not any("compiled" in variant.name for part in without for variant in part.variants)


# -- what is right ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_float32_between_weights_in_bfloat16() -> None:
    case = small_case(dtype=torch.bfloat16)
    model = case.model.with_attention("sdpa")
    embed = model.get_input_embeddings()
    before = model(input_ids=case.prompt, use_cache=False).logits
    with in_float32(model):
        found = model(inputs_embeds=embed(case.prompt).float(), use_cache=False).logits
    assert torch.equal(model(input_ids=case.prompt, use_cache=False).logits, before)
    expected = model.float()(input_ids=case.prompt, use_cache=False).logits
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(before.float(), expected, atol=1e-5)


def test_what_is_compiled_may_round_less() -> None:
    case = small_case(dtype=torch.bfloat16, is_compiled=True)
    case.claim()
    reference = case.reference
    assert 0 < reference.tolerance < 0.1
    assert reference.tolerance <= reference.compiled_tolerance < 0.1
    case.close()


@torch.no_grad()
@pytest.mark.parametrize("name", ["DecodeStep", "StaticCache 64, compiled", "DecodeStep, compiled"])
def test_what_is_kept_begins_each_turn_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = small_case(is_compiled=True)
    contender = made_for(case)[name]
    with ExitStack() as resources:
        resources.callback(contender.drop)
        tokens = case.reference.tokens
        turns = []
        for _ in range(3):
            contender.open()
            turns.append([contender.logits(each).clone() for each in tokens])
            cache = contender.cache
        contender.open()
        assert contender.cache is cache
        assert contender.cache.layers[0].keys.data_ptr() == cache.layers[0].keys.data_ptr()
        for turn in turns:
            for found, expected in zip(turn, case.reference.logits, strict=True):
                assert torch.allclose(found, expected, atol=1e-5)


# -- nothing is timed that is not right ---------------------------------------------------------------------------


def outcome(case: Case, **options: Any) -> dict[str, tuple[set[str], str | None]]:
    """Of each contender the metrics, and why it was not timed."""
    variants = list(made_for(case, **options).values())
    part = hf.Benchmark(name="hf", title="", device="cpu", metrics=METRICS, variants=variants, rounds=1)
    return {
        str(result.variant.parameters["contender"]): (set(result.summaries), result.variant.details.get("failed"))
        for result in measure(part)
    }


def test_a_wrong_rival_is_told_and_the_rest_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Forgetful(hf_contenders.StaticCache):  # type: ignore[misc]
        def update(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = super().update(*arguments, **options)
            return keys, values * 0

    monkeypatch.setattr(hf_contenders, "StaticCache", Forgetful)
    output = tmp_path / "hf.jsonl"
    done = run("--small", "--rounds", 1, "--device", "cpu", "--only", "3x40", "--output", output)
    assert done.exit_code == 0, done.output
    assert "failed: 8b, tiny, 3x40: StaticCache 256: logits of the prompt are off by" in done.stdout
    lines = records(output)
    wrong = lines.pop("8b, tiny, 3x40: StaticCache 256")
    assert not wrong["metrics"]
    assert "are off by" in wrong["details"]["failed"]
    assert all(line["metrics"] for line in lines.values())


def off_by(number: float) -> Callable[..., Callable[..., torch.Tensor]]:
    return lambda function: lambda *arguments: function(*arguments) + number


@pytest.mark.parametrize("number", [1.0, float("nan")])
def test_ours_that_is_wrong_ends_the_run_as_failed(
    number: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = hf_contenders.DecodeStep
    monkeypatch.setattr(step, "__call__", off_by(number)(step.__call__))
    output = tmp_path / "hf.jsonl"
    done = run("--small", "--rounds", 1, "--device", "cpu", "--only", "1x24", "--output", output)
    assert done.exit_code == 2
    assert "1 of our contenders failed and were not timed: '8b, tiny, 1x24: DecodeStep'" in done.stderr
    lines = records(output)
    assert [variant for variant, line in lines.items() if not line["metrics"]] == ["8b, tiny, 1x24: DecodeStep"]
    assert "logits of step 1 are off by" in lines["8b, tiny, 1x24: DecodeStep"]["details"]["failed"]


def test_what_does_not_compile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(function: Any, **options: Any) -> Any:
        def call(*arguments: Any, **others: Any) -> Any:
            raise RuntimeError("no compiler\nfound")

        return call if options.get("fullgraph") else function

    monkeypatch.setattr(torch, "compile", compile)
    found = outcome(small_case(is_compiled=True))
    assert found["StaticCache 64, compiled"] == (set(), "no compiler found")
    assert found["DecodeStep, compiled"] == (KEPT, None)


def test_a_cache_that_is_too_short_is_told() -> None:
    found = outcome(small_case(), static_lens=(8, 64))
    metrics, reason = found["StaticCache 8"]
    assert not metrics
    assert reason
    assert found["StaticCache 64"] == (EAGER, None)


def test_what_fails_in_a_round_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = VirtualCache.__init__
    calls = []

    def init(self: VirtualCache, *arguments: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) > 6:  # two in each check of those that are eager, one in the other
            raise torch.OutOfMemoryError("CUDA out of memory")
        made(self, *arguments, **options)

    monkeypatch.setattr(VirtualCache, "__init__", init)
    found = outcome(small_case())
    assert found["DynamicCache"] == (EAGER, None)
    assert found["DecodeStep"][1] is None
    failed = {reason for _, reason in (found["VirtualCache, sdpa"], found["VirtualCache, vtensor"])}
    assert "CUDA out of memory" in failed


def test_nothing_to_compare_with_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def forward(self: Case, *arguments: Any) -> torch.Tensor:
        tries.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(hf_case.Case, "forward", forward)
    case = small_case()
    case.claim()
    for _ in range(2):
        with pytest.raises(hf_case.VTensorError, match="there is nothing to compare with: CUDA out of memory"):
            _ = case.reference
    assert len(tries) == 1


@pytest.mark.usefixtures("nothing_left_behind")
def test_all_is_given_back() -> None:
    case = small_case()
    variants = made_for(case)
    model = weakref.ref(case.model.with_attention("sdpa"))
    part = hf.Benchmark(name="hf", title="", device="cpu", metrics=METRICS, variants=[*variants.values()], rounds=1)
    measure(part)
    gc.collect()
    assert model() is None
    assert case._reference is None
    assert all(variant.cache is None for variant in variants.values())


# -- summary ------------------------------------------------------------------------------------------------------


def test_summary() -> None:
    def of(contender: str, details: dict[str, str] | None = None, **metrics: float) -> Any:
        parameters = {"case": "8b, 1x512", "contender": contender}
        variant = SimpleNamespace(name=f"8b, 1x512: {contender}", parameters=parameters, details=details or {})
        names = {name.replace("_", ", "): summarize([value]) for name, value in metrics.items()}
        return SimpleNamespace(variant=variant, summaries=names)

    lines = summary(
        [
            of("DynamicCache", token=50.0, cache=64.0, peak_decode=99.0),
            of("StaticCache 131,072", {"failed": "CUDA out of memory"}),
            of("DecodeStep", token=5.0, cache=66.0, peak_decode=70.0),
        ]
    )
    assert [*lines] == [
        "8b, 1x512, ms a token (MiB): DynamicCache 50.0 (64.0, 99.0); DecodeStep 5.00 (66.0, 70.0) 10.0x",
        "failed: 8b, 1x512: StaticCache 131,072: CUDA out of memory",
    ]
