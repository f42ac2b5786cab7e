"""`vtensor bench api`, and what every benchmark records."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vtensor
from vtensor.allocator.driver import get_driver
from vtensor.bench import api, record, round_trip
from vtensor.bench.stats import summarize
from vtensor.cli import app
from vtensor.errors import VTensorError
from vtensor.units import KIB, MIB

FIELDS = {"benchmark", "device", "date", "commit", "hardware", "versions", "parameters"}


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env={"COLUMNS": "120"})


@pytest.mark.parametrize(
    ("sample", "median", "p10", "p90", "spread"),
    [([7.0], 7, 7, 7, 0), ([0.0, 0.0], 0, 0, 0, 0), ([3.0, 1.0, 2.0], 2, 1.2, 2.8, 0.8)],
)
def test_summary(sample: list[float], median: float, p10: float, p90: float, spread: float) -> None:
    summary = summarize(sample)
    assert (summary.count, summary.median, summary.p10, summary.p90, summary.spread) == (
        len(sample),
        median,
        p10,
        p90,
        spread,
    )


def test_summary_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        summarize([])


def test_every_call_is_measured_at_every_size(device: str) -> None:
    told = []
    results = api.measure(device, rounds=2, on_round=lambda done, total: told.append((done, total)))
    assert [result.handle_bytes for result in results] == list(api.handle_sizes(get_driver(device)))
    for result in results:
        assert list(result.calls) == list(api.ORDER)
        assert all(summary.count == 2 for summary in result.calls.values())
        assert all(summary.median > 0 for summary in result.calls.values())
        assert set(result.python_us) == set(api.ORDER)
        assert all(0 < value < 1000 for value in result.python_us.values())
    assert told[-1] == (5 * len(results), 5 * len(results))


def test_sizes_follow_the_granularity() -> None:
    driver = get_driver("cpu")
    assert all(size % driver.granularity_bytes == 0 for size in api.handle_sizes(driver))
    assert {64 * KIB, 2 * MIB} < set(api.handle_sizes(driver))


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("call", ["create", "map", "set_access"])
def test_a_failing_call_leaves_nothing_behind(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: int) -> None:
        raise VTensorError("no")

    monkeypatch.setattr(get_driver("cpu"), call, fail)
    with pytest.raises(VTensorError, match="no"):
        api.measure("cpu", rounds=1)


@pytest.mark.usefixtures("nothing_left_behind")
def test_memory_that_reads_differently_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trip, "_read", lambda driver, address, size_bytes: bytes(size_bytes))
    with pytest.raises(VTensorError, match="read differently"):
        api.measure("cpu", rounds=1)


@pytest.mark.usefixtures("nothing_left_behind")
def test_command_appends_json_lines(runner: CliRunner, tmp_path: Path) -> None:
    output = tmp_path / "results" / "api.jsonl"
    for number in (1, 2):
        done = runner.invoke(app, ["bench", "api", "--small", "--rounds", "2", "--output", str(output)])
        assert done.exit_code == 0, done.output
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(lines) == number * len(api.HOST_SIZES)
    for line in lines:
        assert set(line) >= FIELDS
        assert line["benchmark"] == "api"
        assert line["parameters"] == {"rounds": 2}
        assert line["hardware"]["cpu"]
        assert line["hardware"]["cores"] >= 1
        assert line["hardware"]["gpu"] is None
        assert line["versions"]["torch"]
        assert set(line["calls"]) == {"reserve", "create", "map", "set_access", "unmap", "release", "free"}
        assert set(line["calls"]["map"]) == {"count", "median", "p10", "p90", "p99", "spread", "python"}
    for word in ("set_access", "32 MiB", "Python", "median"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [(["--rounds", "0"], "rounds=0"), (["--device", "tpu"], "'tpu'"), (["--device", "cuda:99"], "cu")],
)
def test_bad_options(runner: CliRunner, options: list[str], reason: str) -> None:
    done = runner.invoke(app, ["bench", "api", *options])
    assert done.exit_code == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_commit_is_the_running_source_s() -> None:
    commit = record.commit()  # None where the sources were unpacked without git
    assert commit is None or re.fullmatch("[0-9a-f]{40,64}(-dirty)?", commit)


def test_no_commit_for_a_copy_that_git_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "__init__.py"
    copy.touch()
    monkeypatch.setattr(vtensor, "__file__", str(copy))
    assert record.commit() is None


def test_driver_version_is_read_from_what_the_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version:  gcc 12.2.0"
    )
    monkeypatch.setattr(Path, "read_text", lambda path: said)
    assert record.nvidia_driver_version() == "580.159.04"


@pytest.mark.gpu
def test_record_names_the_gpu() -> None:
    hardware = record.new_record("api", "cuda:0", {})["hardware"]
    assert hardware["gpu"].isprintable()  # a name comes in a longer buffer
    assert hardware["gpu"] == hardware["gpu"].strip() != ""
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", hardware["nvidia_driver"])
