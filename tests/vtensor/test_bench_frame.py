"""The frame of the benchmarks: checks before times, shuffled turns, what is summed up, shown and recorded."""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from vtensor.allocator.driver import get_driver
from vtensor.bench import report
from vtensor.bench.frame import SEED, Benchmark, CheckFailed, Metric, Variant, measure, timed_us
from vtensor.bench.raw_calls import RawHandles
from vtensor.bench.record import new_record
from vtensor.bench.round_trip import check_memory
from vtensor.errors import VTensorError


@dataclass(kw_only=True)
class Fake(Variant):
    """Notes in a diary what is done to it; its samples are 1, 2, 3, ... times its speed."""

    diary: list[str]
    speed: float = 1.0
    problem: Exception | None = None
    num_measured: int = field(default=0, init=False)

    def set_up(self, resources: ExitStack) -> None:
        self.diary.append(f"set up {self.name}")
        resources.callback(self.diary.append, f"give back {self.name}")

    def check(self) -> None:
        self.diary.append(f"check {self.name}")
        if self.problem:
            raise self.problem

    def measure(self) -> Mapping[str, Sequence[float]]:
        self.diary.append(f"measure {self.name}")
        self.num_measured += 1
        self.details.setdefault("series", []).append(self.num_measured)
        return {"time": [self.num_measured * self.speed], "rate": [self.speed, self.speed]}


METRICS = {"time": Metric("us"), "rate": Metric("GB/s", higher_is_better=True)}


def fakes(diary: list[str], **problems: Exception) -> list[Fake]:
    return [Fake(name=name, diary=diary, problem=problems.get(name)) for name in "abc"]


def benchmark(variants: Sequence[Variant], rounds: int = 3, **options: object) -> Benchmark:
    given = {"name": "fake", "title": "Fakes", "device": "cpu", "metrics": METRICS, **options}
    return Benchmark(variants=variants, rounds=rounds, **given)


def turns(diary: list[str]) -> list[str]:
    """Who was measured, in order, the warm-up included."""
    return [line.removeprefix("measure ") for line in diary if line.startswith("measure")]


# -- what comes when ----------------------------------------------------------------------------------------------


def test_all_are_checked_before_any_is_timed() -> None:
    diary: list[str] = []
    measure(benchmark(fakes(diary)))
    phases = [f"{phase} {name}" for phase in ("set up", "check", "measure") for name in "abc"]
    assert diary[: len(phases)] == phases
    assert diary[-3:] == ["give back c", "give back b", "give back a"]


@pytest.mark.parametrize("problem", [VTensorError("wrong result"), AssertionError("wrong result"), ValueError()])
def test_a_failed_check_ends_the_run(problem: Exception) -> None:
    diary: list[str] = []
    with pytest.raises(CheckFailed, match="'b' failed its check, so nothing was timed: ") as raised:
        measure(benchmark(fakes(diary, b=problem)))
    assert raised.value.__cause__ is problem
    assert (str(problem) or "ValueError") in str(raised.value)
    assert not turns(diary)
    assert diary[-3:] == ["give back c", "give back b", "give back a"]


def test_what_was_set_up_is_given_back_after_an_error() -> None:
    diary: list[str] = []
    broken = fakes(diary)
    broken[2].set_up = lambda resources: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        measure(benchmark(broken))
    assert diary == ["set up a", "set up b", "give back b", "give back a"]


def test_every_round_has_each_variant_once_in_an_order_of_its_own() -> None:
    rounds = 20
    diaries: list[list[str]] = [[], [], []]
    for diary, seed in zip(diaries, (SEED, SEED, SEED + 1), strict=True):
        measure(benchmark(fakes(diary), rounds), seed=seed)
    first, again, other = (turns(diary)[3:] for diary in diaries)
    orders = ["".join(first[start : start + 3]) for start in range(0, len(first), 3)]
    assert len(orders) == rounds
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(set(orders)) > 1
    assert first == again != other


def test_the_warm_up_does_not_count() -> None:
    variants = fakes([])
    results = measure(benchmark(variants, rounds=2))
    assert variants[0].num_measured == 3
    assert results[0].variant.details == {"series": [2, 3]}
    assert results[0].summaries["time"].count == 2
    assert results[0].summaries["time"].median == 2.5
    assert results[0].summaries["rate"].count == 4


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_meanwhile(is_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Fake, "measure", lambda self: seen.append(gc.isenabled()) or {"time": [1.0]})
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        measure(benchmark(fakes([]), rounds=1))
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert seen[3:] == [False] * 3


def test_progress() -> None:
    told: list[tuple[str, int, int]] = []
    measure(benchmark(fakes([]), rounds=2), on_progress=lambda *arguments: told.append(arguments))
    assert [done for _, done, _ in told] == list(range(16))
    assert {total for *_, total in told} == {15}
    assert [what for what, *_ in told[:9:3]] == ["setting up a", "checking a", "warming up a"]
    assert told[-2][0].startswith("round 2 of 2: ")
    assert told[-1][0] == "done"


def test_timed_us() -> None:
    result, spent_us = timed_us(sorted, [2, 1], reverse=False)
    assert result == [1, 2]
    assert spent_us > 0


# -- what comes out -----------------------------------------------------------------------------------------------


def with_ceiling(diary: list[str]) -> list[Fake]:
    """Ours takes twice the time of its ceiling, at twice the rate."""
    ours = Fake(
        name="ours",
        parameters={"size": 7},
        ceiling="most",
        predicted={"time": 10.0},
        targets={"time": 4.0, "rate": 4.0},
        diary=diary,
        speed=2.0,
    )
    return [ours, Fake(name="most", diary=diary)]


def test_share_of_the_ceiling() -> None:
    ours, ceiling = measure(benchmark(with_ceiling([]), rounds=2))
    assert ours.of_ceiling == {"time": 0.5, "rate": 2.0}
    assert ceiling.of_ceiling == {}


def test_records() -> None:
    fake = benchmark(with_ceiling([]), rounds=3, parameters={"small": True})
    record = new_record(fake.name, fake.device, report.parameters(fake))
    lines = [json.loads(json.dumps(line)) for line in report.records(fake, measure(fake), record)]
    assert [line["variant"] for line in lines] == ["ours", "most"]
    for line in lines:
        assert line["benchmark"] == "fake"
        assert line["parameters"] == {"rounds": 3, "seed": SEED, "small": True}
        assert {"date", "commit", "hardware", "versions", "device"} <= set(line)
        assert line["details"] == {"series": [2, 3, 4]}
    ours = lines[0]
    assert ours["variant_parameters"] == {"size": 7}
    assert ours["ceiling"] == "most"
    summary = {"unit", "count", "median", "p10", "p90", "p99", "spread"}
    assert set(ours["metrics"]["time"]) == summary | {"predicted", "of_predicted", "target", "target_met", "of_ceiling"}
    assert ours["metrics"]["time"]["unit"] == "us"
    assert ours["metrics"]["time"]["median"] == 6.0
    assert ours["metrics"]["time"]["of_predicted"] == 0.6
    assert ours["metrics"]["time"]["target_met"] is False
    assert set(ours["metrics"]["rate"]) == summary | {"target", "target_met", "of_ceiling"}
    assert set(lines[1]["metrics"]["time"]) == summary


@pytest.mark.parametrize(
    ("metric", "target", "is_met"),
    [("time", 6.0, True), ("time", 5.9, False), ("rate", 2.0, True), ("rate", 2.1, False)],
)
def test_targets(metric: str, target: float, is_met: bool) -> None:
    variants = with_ceiling([])
    variants[0].targets = {metric: target}
    fake = benchmark(variants)
    (line, _) = report.records(fake, measure(fake), {})
    assert line["metrics"][metric]["target_met"] is is_met


def test_predictions_for_another_machine_are_left_out() -> None:
    fake = benchmark(with_ceiling([]), is_predicted=False)
    measurements = measure(fake)
    assert not measurements[0].predicted
    assert "predicted" not in json.dumps(report.records(fake, measurements, {}))
    assert "target" not in text(report.render(fake, measurements, "a machine"))


def text(table: Table) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_table() -> None:
    fake = benchmark(with_ceiling([]), notes="take care")
    shown = text(report.render(fake, measure(fake), "a machine"))
    for word in ("Fakes", "a machine", "3 rounds", "take care", "ours", "time, us", "6.00", "≤ 4.00", "≥ 4.00", "50%"):
        assert word in shown


def test_columns_without_a_figure_are_left_out() -> None:
    fake = benchmark(fakes([]))
    shown = text(report.render(fake, measure(fake), "a machine"))
    assert not {word for word in ("predicted", "target", "of ceiling") if word in shown}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda given: replace(given, rounds=0), "rounds=0 must be at least 1"),
        (lambda given: replace(given, variants=[*given.variants, given.variants[0]]), "two variants are named 'a'"),
        (lambda given: replace(given, variants=[Fake(name="x", diary=[], ceiling="y")]), "'y', which is no variant"),
        (lambda given: replace(given, variants=[Fake(name="x", diary=[], targets={"y": 1})]), r"\['y'\].* no metrics"),
        (lambda given: replace(given, variants=[Fake(name="x", diary=[], predicted={"y": 1})]), "no metrics"),
    ],
)
def test_bad_benchmarks(change: Callable[[Benchmark], Benchmark], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        change(benchmark(fakes([])))


def test_run_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "folder" / "fake.jsonl"
    for number in (1, 2):
        report.run_and_report(benchmark(fakes([])), output)
        assert len(output.read_text().splitlines()) == 3 * number
    shown = capsys.readouterr().out
    assert "Fakes" in shown
    assert "3 lines appended" in shown


def test_nothing_is_written_after_a_failed_check(tmp_path: Path) -> None:
    output = tmp_path / "fake.jsonl"
    with pytest.raises(CheckFailed):
        report.run_and_report(benchmark(fakes([], c=VTensorError("no"))), output)
    assert not output.exists()


# -- the ceiling: the driver alone --------------------------------------------------------------------------------


@pytest.fixture
def strict(request: pytest.FixtureRequest) -> None:
    """Nothing left behind on the host; CUDA opens files and starts threads when it likes."""
    if "cuda:0" not in request.node.name:
        request.getfixturevalue("nothing_left_behind")


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("is_scattered", [True, False])
def test_raw_handles(device: str, is_scattered: bool) -> None:
    driver = get_driver(device)
    size = driver.granularity_bytes
    handles = RawHandles(driver, size, 5, is_scattered=is_scattered)
    assert np.diff(handles.addresses).tolist() == [size * (1 + is_scattered)] * 4
    for _ in range(2):
        handles.map()
        check_memory(driver, handles.addresses.tolist())
        handles.unmap()
        handles.map_from_python(2)
        check_memory(driver, handles.addresses[:2].tolist())
        handles.unmap()
        handles.release()
    handles.map()
    handles.close()


@pytest.mark.usefixtures("nothing_left_behind")
def test_raw_handles_say_what_failed() -> None:
    driver = get_driver("cpu")
    size = driver.granularity_bytes
    handles = RawHandles(driver, size, 3, is_scattered=False)
    blocker = driver.create(size)
    driver.map(int(handles.addresses[1]), size, blocker)
    with pytest.raises(VTensorError, match="cuMemMap failed"):
        handles.map()
    driver.unmap(int(handles.addresses[1]), size)
    driver.release(blocker)
    handles.release()
    handles.map()
    handles.close()


@pytest.mark.usefixtures("nothing_left_behind")
def test_shared_memory_is_seen() -> None:
    driver = get_driver("cpu")
    size = driver.granularity_bytes
    base, handle = driver.reserve(2 * size), driver.create(size)
    for address in (base, base + size):
        driver.map(address, size, handle)
        driver.set_access(address, size)
    try:
        with pytest.raises(VTensorError, match="read differently"):
            check_memory(driver, [base, base + size])
    finally:
        driver.unmap(base, 2 * size)
        driver.free(base, 2 * size)
        driver.release(handle)
