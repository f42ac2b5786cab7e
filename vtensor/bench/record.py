"""What every measurement records beside its numbers: machine, versions, commit and date, as JSON lines."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import vtensor
from vtensor.units import KIB

__all__ = ["commit", "cpu_name", "hardware", "new_record", "nvidia_driver_version", "package_version", "write_records"]

_PACKAGES = ("vtensor", "torch", "triton", "numba", "numpy", "cuda-bindings", "transformers")


def new_record(benchmark: str, device: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What is true of a whole run; merge each measurement into a copy of it.

    Parameters
    ----------
    benchmark : str
        Name of the benchmark, e.g. ``"api"``.
    device : str
        ``"cpu"`` or ``"cuda:<index>"``.
    parameters : mapping
        All that is needed to repeat the run.

    Returns
    -------
    dict
        Keys ``benchmark``, ``device``, ``date``, ``commit``, ``hardware``, ``versions``, ``parameters``.
    """
    return {
        "benchmark": benchmark,
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(device),
        "versions": {"python": platform.python_version(), **{name: package_version(name) for name in _PACKAGES}},
        "parameters": dict(parameters),
    }


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a file, one line of JSON each. The file's folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def hardware(device: str) -> dict[str, Any]:
    """CPU, cores, memory and operating system; GPU and its driver's version where `device` is one."""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "gpu": None,
        "nvidia_driver": None,
    }
    if device.startswith("cuda"):
        from vtensor.allocator.driver import cuda

        facts["gpu"] = cuda.describe_device(int(device.partition(":")[2])).name
        facts["nvidia_driver"] = nvidia_driver_version()
    return facts


def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        found = re.search(r"^MemTotal:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * KIB if found else None


def nvidia_driver_version() -> str | None:
    """Version of the NVIDIA driver, e.g. ``"580.159.04"``; None where it does not say."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:  # containers often hide it
        text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def package_version(name: str) -> str | None:
    """An installed package's version, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the source tree that is running, ``-dirty`` where its code differs; None outside a git checkout.

    A copy of the sources that came without their history can be told with the environment variable VTENSOR_COMMIT.
    """
    if "VTENSOR_COMMIT" in os.environ:
        return os.environ["VTENSOR_COMMIT"]
    source = Path(vtensor.__file__).resolve()
    folder = str(source.parent)
    # A copy inside somebody else's checkout (a .venv, say) must not be taken for that checkout.
    if _output("git", "-C", folder, "ls-files", "--error-unmatch", source.name) is None:
        return None
    revision = _output("git", "-C", folder, "rev-parse", "HEAD")
    changes = _output("git", "-C", folder, "status", "--porcelain", "--", ":/*.py")
    return revision if revision is None or changes == "" else f"{revision}-dirty"


def _output(*command: str) -> str | None:
    """What a command prints, or None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
