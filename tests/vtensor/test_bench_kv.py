"""`vtensor bench`, all but `api`: that they run, check what they time, and record it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from vtensor.bench import batch, map_bulk, overlap, reclaim, step
from vtensor.bench import map as map_bench
from vtensor.bench.frame import Benchmark, CheckFailed, measure
from vtensor.cli import BENCHMARKS, app
from vtensor.errors import VTensorError
from vtensor.kvcache import KVCacheConfig, KVCacheManager, StepResult
from vtensor.units import KIB

METRICS = {
    "step": {
        "nothing to map": {"step"},
        "growing, looked ahead": {"step", "beyond no-op", "waited", "mapped ahead"},
        "growing, not looked ahead": {"step", "beyond no-op", "waited", "mapped ahead"},
    },
    "overlap": {
        "look-ahead": {"iteration", "step", "slowest of a round", "slow in a round", "mapped ahead"},
        "no look-ahead": {"iteration", "step", "slowest of a round", "slow in a round", "mapped ahead"},
        "no growth": {"iteration", "step", "slowest of a round", "slow in a round"},
    },
    "reclaim": {
        f"{kind}, {tokens} tokens": {"alloc_reqid + step", "mapped by the caller"}
        for kind in ("cold", "deferred slot", "no deferral", "eager slot")
        for tokens in (64, 256)
    },
    "tensor": {
        **{
            operation + part: {"virtual", "torch", "plain()", "virtual over torch", "plain() over torch"}
            for operation in ("x[3:7]", "x[3:7].add_(1)", "x[3:7] = 2", "x[3:7].zero_()", "index_put", "x[3] + 1")
            for part in ("", ", of 1 TiB")
        },
        "x.add_(1)": {"virtual", "torch", "plain()", "virtual over torch", "plain() over torch"},
        "vt.empty, 1 TiB": {"creation", "deletion"},
        "torch.empty, 4 KiB": {"creation", "deletion"},
        "first touches": {"mapped fresh", "mapped recycled", "touched again"},
        "driver alone": {"mapped fresh", "mapped recycled"},
        **{
            f"{way}, {size}": {"grown", "peak, computed"}
            for way in ("append_, fresh", "append_, recycled", "torch.cat each", "list, one torch.cat", "preallocated")
            for size in ("512 KiB", "4 MiB", "64 MiB")
        },
        "sum of vt.empty": {"first read", "second read"},
        "sum of torch.zeros": {"second read"},
    },
    "sleep": {
        "offload": {"sleep", "wake", "first sleep", "out", "back"},
        "discard": {"sleep", "wake", "both"},
        "link": {"out", "back"},
    },
    "kernels": {
        **{
            f"{case}: {contender}": {"layer", "bandwidth"}
            for case, contenders in (
                ("decode 2 x 128, Hkv 2, per_layer", ("ours", "ours, paged 16", "ours, paged 64", "sdpa-flash")),
                ("decode 2 x 128, Hkv 2, sliced 2", ("ours", "sdpa-flash")),
                ("ragged 3 x 8..128, Hkv 2, equal", ("ours", "ours, paged 16", "sdpa-flash")),
                ("ragged 3 x 8..128, Hkv 2, log-uniform", ("ours", "ours, paged 16", "sdpa-flash, no graph")),
            )
            for contender in contenders
        },
        **{
            f"prefill {case}, Hkv 2, per_layer: {contender}": {"layer", "rate"}
            for case in ("128", "chunk 32 of 128")
            for contender in ("ours", "ours, paged 16", "ours, paged 128", "sdpa-flash")
        },
        **{
            f"append 4, 2 layers: {way}": {"append", "of its bytes"}
            for way in (
                "one launch, sliced",
                "one launch, per_layer",
                "a launch a layer, sliced",
                "a launch a layer, per_layer",
                "index_put, all layers, sliced",
                "index_put, a layer each, per_layer",
            )
        },
        **{
            f"overhead: {name}": {"call"}
            for name in ("decode_attention", "prefill_attention", "append_kv", "vtensor.attention")
        },
    },
    "alloc": {
        variant: {"miss", "hit", "step", "reserved", "allocated", "reserved / allocated", "largest batch"}
        for variant in ("torch", "expandable", "stitched", "stitched, trimmed")
    },
}


def metrics_of(name: str, device: str) -> dict[str, set[str]]:
    """What a benchmark reports on a device."""
    metrics = METRICS[name]
    if name == "tensor":
        absent = (", 4 MiB", ", 64 MiB") if device == "cpu" else (", 512 KiB",)
        return {variant: names for variant, names in metrics.items() if not variant.endswith(absent)}
    if name == "alloc" and device == "cpu":
        return {variant: {"step"} for variant in metrics}
    return metrics


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["bench", *map(str, arguments)])


def lines_of(name: str, device: str, folder: Path) -> dict[str, dict]:
    """Run a benchmark at its smallest; its lines of JSON by variant."""
    output = folder / f"{name}.jsonl"
    done = run(name, "--small", "--rounds", 1, "--device", device, "--output", output)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert f"{len(lines)} lines appended" in done.stdout
    for line in lines:
        assert line["benchmark"] == name
        assert line["device"] == device
        assert line["parameters"]["small"] is True
        assert line["parameters"]["rounds"] == 1
        assert line["parameters"]["seed"] > 0
        assert {"date", "commit", "hardware", "versions"} <= set(line)
        assert line["variant"] in done.stdout
        has_predictions = any("predicted" in metric for metric in line["metrics"].values())
        assert not has_predictions or device != "cpu"
        for metric in line["metrics"].values():
            assert metric["count"] >= 1
            assert metric["p10"] <= metric["median"] <= metric["p90"] <= metric["p99"]
    return {line["variant"]: line for line in lines}


@pytest.fixture
def strict(request: pytest.FixtureRequest) -> None:
    """Nothing left behind on the host; CUDA opens files and starts threads when it likes."""
    if "cuda:0" not in request.node.name:
        request.getfixturevalue("nothing_left_behind")


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("name", METRICS)
def test_records(name: str, device: str, tmp_path: Path) -> None:
    lines = lines_of(name, device, tmp_path)
    metrics = {variant: set(line["metrics"]) for variant, line in lines.items()}
    if name == "kernels" and device != "cpu":  # others' kernels, of which every machine has its own
        metrics = {variant: names for variant, names in metrics.items() if variant in METRICS[name]}
    assert metrics == metrics_of(name, device)


@pytest.mark.usefixtures("strict")
def test_map(device: str, tmp_path: Path) -> None:
    lines = lines_of("map", device, tmp_path)
    for memory in ("fresh", "recycled"):
        for places in ("scattered", "one run"):
            ceiling = f"driver alone, {places}, {memory}"
            assert "of_ceiling" not in lines[ceiling]["metrics"]["page group"]
            for beside in ("", ", GIL contended"):
                line = lines[f"commit, {places}, {memory}{beside}"]
                assert line["ceiling"] == ceiling
                assert line["metrics"]["page group"]["of_ceiling"] > 0
    for beside in ("", ", GIL contended"):
        for who in ("mapper", "calls from Python"):
            assert lines[f"{who}, scattered, recycled{beside}"]["metrics"]["page group"]["median"] > 0
    bulk = [line for variant, line in lines.items() if variant.startswith("bulk")]
    assert len(bulk) >= 4
    sizes = [line["variant_parameters"]["max_size_class_bytes"] for line in bulk]
    assert sizes == [sizes[0] << number for number in range(len(sizes))]
    for line in bulk:
        for memory in ("fresh", "recycled"):
            assert line["metrics"][memory]["unit"] == "GB/s"
            assert line["metrics"][memory]["of_ceiling"] > 0


def test_the_series_of_overlap_is_recorded(tmp_path: Path) -> None:
    for line in lines_of("overlap", "cpu", tmp_path).values():
        (iterations,) = line["details"]["iteration_us"]
        (steps,) = line["details"]["step_us"]
        assert len(iterations) == len(steps) == line["parameters"]["num_iterations"]
        assert line["metrics"]["iteration"]["count"] == len(iterations)
        assert max(iterations) == round(line["metrics"]["slowest of a round"]["median"])


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize(
    ("options", "reason"),
    [(["--rounds", "0"], "rounds=0"), (["--device", "tpu"], "'tpu'"), (["--device", "cuda:99"], "cuda:99")],
)
def test_bad_options(name: str, options: list[str], reason: str) -> None:
    done = run(name, "--small", *options)
    assert done.exit_code == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


# -- nothing is timed that is not right ---------------------------------------------------------------------------


def small(name: str) -> Benchmark:
    module = {"step": step, "overlap": overlap, "reclaim": reclaim}[name]
    return module.benchmark("cpu", small=True, rounds=1)


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("name", ["step", "overlap", "reclaim"])
def test_a_step_that_maps_nothing_is_not_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "step", lambda self, lengths: StepResult())
    with pytest.raises(CheckFailed, match="nothing was timed"):
        measure(small(name))


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_shortage_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "step", lambda self, lengths: StepResult(shortfall_page_groups=7))
    done = run("step", "--small")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith(
        "vtensor: 'nothing to map' failed its check, so nothing was timed: 7 "
    )


def test_memory_that_reads_differently_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "eq", lambda one, other: torch.zeros(1, dtype=torch.bool))
    with pytest.raises(CheckFailed, match="does not read as it was written"):
        measure(small("step"))


def test_a_deferred_slot_must_make_no_driver_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reclaim._Deferred.options, "deferred_reclamation", False)
    with pytest.raises(CheckFailed, match=r"'deferred slot, 64 tokens' failed its check.*cuMemMap"):
        measure(small("reclaim"))


def test_handles_must_be_as_large_as_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool_and_space = map_bulk.pool_and_space
    monkeypatch.setattr(
        map_bulk, "pool_and_space", lambda *arguments: pool_and_space(*arguments[:-1], max_size_class_bytes=64 * KIB)
    )
    given = map_bench.benchmark("cpu", small=True, rounds=1)
    bulk = [variant for variant in given.variants if "KiB" in variant.name]
    with pytest.raises(CheckFailed, match=r"'bulk, 128 KiB' failed its check.*256 handles were created, where 128"):
        measure(replace(given, variants=bulk))


# -- the workloads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_page_group", [1, 16, 32])
def test_decode_lengths(tokens_per_page_group: int) -> None:
    batch_size, num_iterations = 64, 121
    series = overlap.decode_lengths(num_iterations, batch_size, tokens_per_page_group)
    assert series.shape == (num_iterations, batch_size)
    page_groups = -(-series // tokens_per_page_group)
    crossing = np.diff(page_groups, axis=0)
    assert (np.diff(series, axis=0) >= 0).all()
    assert crossing.max() == 1
    assert (crossing == 1).all(axis=1).sum() >= 3  # once a period, all
    assert (-(-(series[:-1] + 1) // tokens_per_page_group) >= page_groups[1:]).all()  # all known one token ahead
    if tokens_per_page_group > 1:
        ordinary = crossing[: overlap._PERIOD - 3].sum(axis=1)
        assert set(ordinary.tolist()) == {batch_size // tokens_per_page_group}


@pytest.mark.usefixtures("strict")
def test_a_full_batch_starts_over(device: str) -> None:
    config = KVCacheConfig(num_layers=3, num_kv_heads=2, head_dim=64, max_batch_size=5, max_context_tokens=4_000)
    full = batch.FullBatch(config, device, most_tokens=3_000)
    for longest in (3_000, 10, 3_000):
        lengths = np.linspace(1, longest, 5).astype(np.int64)
        full.restart(lengths)
        batch.check_tokens(full.cache, lengths)
        assert full.cache.stats().num_active_slots == 5
        assert full.cache.stats().used_bytes == int(lengths.sum()) * config.bytes_per_token
    for reqid in range(5):
        full.cache.free_reqid(reqid)
    batch.settle(full.cache)
    assert full.cache.stats().committed_bytes == 0
    full.cache.close()


def test_what_never_settles_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = KVCacheConfig(num_layers=1, num_kv_heads=2, head_dim=64, max_batch_size=1, max_context_tokens=100)
    monkeypatch.setattr(batch, "_PATIENCE_S", 0.01)
    with KVCacheManager(config, "cpu") as cache:
        cache.step([cache.alloc_reqid() + 10])
        with pytest.raises(VTensorError, match="still holds"):
            batch.settle(cache)
