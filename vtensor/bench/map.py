"""What it costs to put memory below addresses: `vtensor bench map`.

**One by one.** `AddressSpace.commit` of many of the smallest page groups, one handle each, in one call: at places that
are scattered (every second one) and in one run; of memory that is created for it (*fresh*: created, and zeroed on the
device's own time) and that the pool had left (*recycled*); alone, and while another Python thread spins and never gives
the GIL up of its own accord (*GIL contended*). And the same recycled memory through the mapper's thread
(`AddressSpace.commit_ahead`). The ceiling is the driver: map and set_access (and create) of the same handles, called
from compiled code that keeps no books. The rival makes these calls from Python, as a library without native code would.

**In bulk.** Commit of a large range with ever larger handles (`max_size_class_bytes`): GB/s until the call returns, of
fresh and of recycled memory. The ceiling is again the driver, with handles of just that size.

Predicted for an H200, from earlier measurements: map and set_access took 22 to 31 us a handle, whatever its size up to
32 MiB, and create 10 more:

- recycled 27 us a page group, scattered or not, through the mapper or not; fresh 38, and 5 more where each place is
  zeroed by a call of its own. GIL contended the same, but for the 5 ms that it takes to get the GIL back, about three
  times a commit: 4 us a page group. Calls from Python 33, and 10,293 with the GIL contended (measured before).
- in bulk the handle's size / 38 us fresh (2 MiB: 55 GB/s, 32 MiB: 883, 64 MiB: 1,766), and / 27 us recycled.

Targets: 30 us a recycled page group; 500 GB/s fresh at the largest handles.
"""

from __future__ import annotations

from vtensor.allocator.driver import Driver, get_driver
from vtensor.bench.frame import Benchmark, Metric
from vtensor.bench.map_bulk import in_bulk
from vtensor.bench.map_one_by_one import NUM_FROM_PYTHON, one_by_one
from vtensor.devices import device_name, resolve_device
from vtensor.units import GIB, MIB, format_bytes

__all__ = ["benchmark"]

_METRICS = {
    "page group": Metric("us"),
    "fresh": Metric("GB/s", higher_is_better=True),
    "recycled": Metric("GB/s", higher_is_better=True),
}


def benchmark(device: str, *, small: bool = False, rounds: int | None = None) -> Benchmark:
    """The benchmark for a device. `small`: a first look, in a few seconds."""
    device = device_name(resolve_device(device))
    on_gpu = device != "cpu"
    driver = get_driver(device)
    number, total_bytes = (64, 16 * MIB) if small else _sizes(driver) if on_gpu else (512, 256 * MIB)
    return Benchmark(
        name="map",
        title="Page groups put below addresses",
        device=device,
        metrics=_METRICS,
        variants=[*one_by_one(device, number), *in_bulk(device, total_bytes)],
        rounds=(2 if small else 5) if rounds is None else rounds,
        parameters={
            "small": small,
            "num_page_groups": number,
            "num_from_python": NUM_FROM_PYTHON,
            "page_group_bytes": driver.granularity_bytes,
            "bulk_bytes": total_bytes,
            "bulk_page_group_bytes": driver.default_page_group_bytes,
        },
        notes=f"one by one: {number:,} page groups of {format_bytes(driver.granularity_bytes)}; "
        f"in bulk: {format_bytes(total_bytes)}",
        is_predicted=on_gpu,
    )


def _sizes(driver: Driver) -> tuple[int, int]:
    """Page groups for one by one, which ten variants hold at a time, and bytes for bulk, of which one holds all."""
    free_bytes, _ = driver.memory_info()
    number = min(4_096, free_bytes // 16 // driver.granularity_bytes)
    return number, min(24 * GIB, free_bytes // 4 // GIB * GIB)
