"""`vtensor doctor`, on this machine and on others that are played to it."""

import json
from collections.abc import Callable

import pytest
import torch
from typer.testing import CliRunner

from vtensor import doctor
from vtensor.allocator.driver import cuda
from vtensor.attention_backends.choose import BACKENDS
from vtensor.cli import app
from vtensor.doctor import Check
from vtensor.errors import DriverError, VTensorError
from vtensor.integrations import hub


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env={"COLUMNS": "120"})


def fail(error: Exception) -> Callable[..., None]:
    def raising(*arguments: object, **options: object) -> None:
        raise error

    return raising


def find(checks: list[Check], area: str, name: str) -> Check:
    (found,) = (check for check in checks if (check.area, check.name) == (area, name))
    return found


def test_this_machine(nothing_left_behind: None) -> None:
    checks = doctor.collect()
    assert doctor.host_works(checks)
    for check in checks:
        assert check.status in ("ok", "limited", "missing")
        assert check.value
        assert check.status == "ok" or check.consequence, check  # what is wrong comes with what follows
    for name in ("page", "overcommit_memory", "max_map_count", "memory"):
        assert find(checks, "host", name)
    assert "1 TiB" in find(checks, "host", "round trip").value
    assert find(checks, "software", "numba").status == "ok"


def test_command(runner: CliRunner) -> None:
    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    for word in ("host", "round trip", "software", "torch", "nvidia", "attention", "demo weights"):
        assert word in done.stdout


def test_json(runner: CliRunner) -> None:
    done = runner.invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["host_works"] is True
    assert all(set(check) == {"area", "name", "status", "value", "consequence"} for check in told["checks"])


def test_exit_code_1_where_the_host_backend_fails(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "round_trip", fail(VTensorError("no addresses\nat all")))
    done = runner.invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert told["host_works"] is False
    (check,) = (check for check in told["checks"] if (check["area"], check["name"]) == ("host", "round trip"))
    assert (check["status"], check["value"]) == ("missing", "no addresses")


def test_a_broken_backend_is_reported_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "get_driver", fail(AttributeError("module 'os' has no attribute 'memfd_create'")))
    checks = doctor.collect()
    assert not doctor.host_works(checks)
    assert "memfd_create" in find(checks, "host", "round trip").value


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "driver_cuda_version", fail(DriverError("cuInit", "no driver", "none could be loaded")))
    checks = doctor.collect()
    driver = find(checks, "nvidia", "driver")
    assert (driver.status, driver.value) == ("missing", "none")
    assert "device='cpu'" in driver.consequence
    assert not [check for check in checks if check.area.startswith("cuda")]
    assert doctor.host_works(checks)


def play_gpu(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    facts = {
        "name": "Some GPU",
        "compute_capability": (9, 0),
        "has_virtual_memory": True,
        "has_file_descriptors": True,
        "granularity_bytes": {"device": 2 << 20, "host NUMA": 2 << 20},
    }
    monkeypatch.setattr(cuda, "driver_cuda_version", lambda: (13, 0))
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "describe_device", lambda index: cuda.DeviceFacts(**{**facts, **changes}))


def test_gpu_without_virtual_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu(monkeypatch, has_virtual_memory=False, granularity_bytes={})
    checks = doctor.collect()
    assert "CUDA 13.0" in find(checks, "nvidia", "driver").value
    assert "Some GPU" in find(checks, "cuda:0", "device").value
    assert find(checks, "cuda:0", "virtual memory").status == "missing"


def test_gpu_that_can_less(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu(monkeypatch, has_file_descriptors=False, granularity_bytes={"device": 2 << 20})
    host = doctor.get_driver("cpu")  # the calls, played by the host: granularity, addresses and memory are real
    monkeypatch.setattr(doctor, "get_driver", lambda device: host)
    checks = doctor.collect()
    assert "2 MiB" in find(checks, "cuda:0", "virtual memory").value
    assert find(checks, "cuda:0", "host memory").status == "limited"
    assert find(checks, "cuda:0", "file descriptors").status == "limited"
    assert "TiB in one piece" in find(checks, "cuda:0", "addresses").value
    assert find(checks, "cuda:0", "round trip").status == "ok"


def test_gpu_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu(monkeypatch)
    monkeypatch.setattr(cuda, "describe_device", fail(DriverError("cuDeviceGet", "CUDA_ERROR_UNKNOWN", "unknown")))
    assert "CUDA_ERROR_UNKNOWN" in find(doctor.collect(), "cuda:0", "device").value


def test_attention_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [check for check in doctor.collect() if check.area == "attention"]
    assert [check.name for check in checks] == list(BACKENDS)
    assert find(checks, "attention", "reference").status == "ok"
    assert "cpu" in find(checks, "attention", "sdpa-flash").consequence
    monkeypatch.setattr(type(BACKENDS["flashinfer"]), "why_absent", lambda self: "flashinfer is not installed")
    monkeypatch.setattr(type(BACKENDS["fa3-fwd"]), "why_absent", lambda self: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checks = doctor.collect()
    absent = find(checks, "attention", "flashinfer")
    assert (absent.status, absent.value) == ("missing", "flashinfer is not installed")
    assert absent.consequence == "optional: pip install flashinfer-python"
    useless = find(checks, "attention", "fa3-fwd")
    assert (useless.status, useless.value.split()[0]) == ("limited", "fa3_fwd")
    assert "cuda, not cpu" in useless.consequence


@pytest.mark.parametrize(
    ("packages", "is_cached", "status"),
    [
        ({"transformers": "5.1.0", "gguf": None}, False, "limited"),  # weights that nothing can read
        ({"transformers": "5.1.0", "gguf": "0.1"}, False, "ok"),
    ],
)
def test_packaged_weights(
    packages: dict[str, str | None], is_cached: bool, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(hub, "packaged_weights", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(hub, "is_in_hub_cache", lambda model: is_cached)
    monkeypatch.setattr(doctor, "package_version", packages.get)
    assert find(doctor.collect(), "models", "demo weights").status == status


@pytest.mark.parametrize(("is_cached", "status"), [(True, "ok"), (False, "missing")])
def test_weights_of_the_hub(is_cached: bool, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "packaged_weights", lambda: None)
    monkeypatch.setattr(hub, "is_in_hub_cache", lambda model: is_cached)
    assert find(doctor.collect(), "models", "demo weights").status == status


@pytest.mark.parametrize(
    ("version", "status"), [(None, "missing"), ("4.57.1", "limited"), ("5.0.0", "ok"), ("10.2.0", "ok")]
)
def test_transformers_version(version: str | None, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "package_version", {"transformers": version}.get)
    assert find(doctor.collect(), "models", "transformers").status == status


@pytest.mark.parametrize(
    ("files", "name", "status"),
    [
        ({"/proc/sys/vm/overcommit_memory": 1}, "overcommit_memory", "ok"),
        ({"/proc/sys/vm/overcommit_memory": 2}, "overcommit_memory", "limited"),
        ({}, "overcommit_memory", "limited"),
        ({"/proc/sys/vm/max_map_count": 1_000_000}, "max_map_count", "ok"),
        ({"/proc/sys/vm/max_map_count": 1_000}, "max_map_count", "limited"),
        ({}, "max_map_count", "limited"),
    ],
)
def test_kernel_settings(files: dict[str, int], name: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_read_int", files.get)
    assert find(doctor.collect(), "host", name).status == status


@pytest.mark.gpu
def test_gpu() -> None:
    checks = [check for check in doctor.collect() if check.area == "cuda:0"]
    assert {"device", "virtual memory", "addresses", "memory", "round trip"} <= {check.name for check in checks}
    assert find(checks, "cuda:0", "round trip").status == "ok"
