"""The driver table from Python: one driver a device and process, errors, forks, the system's limit of mappings."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.helpers.child import in_child
from tests.helpers.faults import BROKEN, fail, record
from vtensor.allocator.driver import Call, Driver, get_driver, host, registry
from vtensor.allocator.driver.base import INVALID_VALUE, OUT_OF_MEMORY
from vtensor.allocator.driver.host import HostDriver
from vtensor.allocator.page_pool import PagePool
from vtensor.allocator.reservation import Reservation
from vtensor.errors import DriverError, ForkedError, ReservationError, VTensorError


def test_one_driver_a_device(driver: Driver, device: str) -> None:
    assert get_driver(device) is driver
    assert driver.device == device


def test_one_driver_whoever_asks_first(device: str) -> None:
    def ask() -> bool:
        found: list[Driver] = []
        threads = [threading.Thread(target=lambda: found.append(get_driver(device))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(found) == 8 and len(set(map(id, found))) == 1

    if device == "cpu":
        assert in_child(ask) == (0, "True")  # where there is none yet
    assert ask()


@pytest.mark.parametrize("device", ["cuda", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "CPU", "mps", "meta", ""])
def test_device_of_another_kind(device: str) -> None:
    with pytest.raises(ValueError, match="use 'cpu' or 'cuda:<index>'") as caught:
        get_driver(device)
    assert repr(device) in str(caught.value)


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
def test_pool_takes_devices_as_torch_does(device: torch.device | str | None) -> None:
    pool = PagePool(device)
    assert pool.driver is get_driver("cpu")
    pool.close()


@pytest.mark.parametrize(
    "device", ["cpu:1", "tpu", "meta", "", "cpu:x", torch.device("cpu", 1), torch.device("meta")], ids=repr
)
def test_pool_of_another_device(device: torch.device | str) -> None:
    with pytest.raises(ValueError, match="'cpu' or 'cuda'") as caught:
        PagePool(device)
    assert str(device) in str(caught.value)


def test_pool_on_torchs_default_device() -> None:
    with torch.device("meta"), pytest.raises(ValueError, match="meta"):
        PagePool()
    with torch.device("meta"), torch.device("cpu"):
        PagePool().close()


def test_second_host_driver_is_refused() -> None:
    from vtensor.allocator.driver import host_native as native

    pool = PagePool("cpu")
    size = pool.driver.granularity_bytes
    address = pool.driver.reserve(size)
    before = native.STATE.tolist()
    with pytest.raises(VTensorError, match=r"one HostDriver a process: use get_driver\('cpu'\)"):
        HostDriver()
    assert native.STATE.tolist() == before
    pool.driver.free(address, size)
    pool.close()


# -- how much memory there is ---------------------------------------------------------------------------------------

MIB, GIB = 1 << 20, 1 << 30
LIMIT, USED, STAT = "memory.max", "memory.current", "memory.stat"


@pytest.mark.parametrize(
    ("group", "available", "total"),
    [
        ({}, 6 * GIB, 8 * GIB),
        ({LIMIT: "max\n", USED: f"{GIB}\n"}, 6 * GIB, 8 * GIB),
        ({LIMIT: f"{4 * GIB}\n", USED: f"{3 * GIB}\n"}, GIB, 4 * GIB),
        ({LIMIT: 4 * GIB, USED: 3 * GIB, STAT: "anon 5\n"}, GIB, 4 * GIB),
        ({LIMIT: 4 * GIB, USED: 3 * GIB, STAT: f"anon 5\nfile 9\ninactive_file {2 * GIB}\n"}, 3 * GIB, 4 * GIB),
        ({LIMIT: 4 * GIB, USED: 4 * GIB, STAT: f"inactive_file {MIB}\nactive_file 7\n"}, MIB, 4 * GIB),
        ({LIMIT: 4 * GIB, USED: 5 * GIB, STAT: f"inactive_file {MIB}\n"}, 0, 4 * GIB),
        ({LIMIT: 4 * GIB, USED: 3 * GIB, STAT: "what is this\n"}, GIB, 4 * GIB),
        ({LIMIT: 64 * GIB, USED: 2 * GIB, STAT: f"inactive_file {GIB}\n"}, 6 * GIB, 8 * GIB),
    ],
    ids=[
        "no group",
        "no limit",
        "no stat",
        "nothing inactive",
        "2 GiB inactive",
        "full but for 1 MiB",
        "over the limit",
        "bad stat",
        "limit above the machine's",
    ],
)
def test_memory_of_a_control_group(
    group: dict[str, object], available: int, total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = f"MemTotal: {8 * GIB >> 10} kB\nMemFree: 17 kB\nMemAvailable: {6 * GIB >> 10} kB\n"
    files = {"proc/meminfo": meminfo, **{f"sys/fs/cgroup/{name}": str(text) for name, text in group.items()}}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert get_driver("cpu").memory_info() == (available, total)


def test_missing_gpu_is_a_typed_error() -> None:
    with pytest.raises(DriverError, match=r"cuInit|cuda:99 was asked for"):
        get_driver("cuda:99")


def test_sizes(driver: Driver) -> None:
    assert driver.granularity_bytes > 0
    assert driver.granularity_bytes % 4096 == 0
    assert driver.default_page_group_bytes % driver.granularity_bytes == 0
    free, total = driver.memory_info()
    assert 0 < free <= total


@pytest.mark.parametrize("number", [0, 1, 255])
def test_zero(driver: Driver, device: str, number: int) -> None:
    from tests.helpers.memory import fill, value

    size = driver.granularity_bytes
    address, handle = driver.reserve(3 * size), driver.create(3 * size)
    driver.map(address, 3 * size, handle)
    driver.set_access(address, 3 * size)
    fill(device, address, 3 * size, number)
    driver.zero(address + size, size, 0)
    found = [value(device, address + place * size, size) for place in range(3)]
    driver.unmap(address, 3 * size)
    driver.release(handle)
    driver.free(address, 3 * size)
    assert found == [number, 0, number]


# -- errors -------------------------------------------------------------------------------------------------------


def test_error_says_what_was_asked(driver: Driver) -> None:
    with pytest.raises(DriverError) as caught:
        driver.create(driver.granularity_bytes + 1)
    error = caught.value
    assert (error.call, error.name) == ("cuMemCreate", "CUDA_ERROR_INVALID_VALUE")
    assert f"{driver.granularity_bytes + 1:,} bytes of memory on {driver.device}" in str(error)


@pytest.mark.parametrize("call", list(Call))
@pytest.mark.parametrize("code", [INVALID_VALUE, OUT_OF_MEMORY, BROKEN, 123456])
def test_every_call_raises_its_error(driver: Driver, call: Call, code: int) -> None:
    size = driver.granularity_bytes
    do = {
        Call.RESERVE: lambda: driver.reserve(size),
        Call.FREE: lambda: driver.free(size, size),
        Call.CREATE: lambda: driver.create(size),
        Call.MAP: lambda: driver.map(size, size, 0),
        Call.SET_ACCESS: lambda: driver.set_access(size, size),
        Call.UNMAP: lambda: driver.unmap(size, size),
        Call.RELEASE: lambda: driver.release(0),
        Call.ZERO: lambda: driver.zero(size, size, 0),
    }[call]
    with fail(driver, call, 1, code) as calls, pytest.raises(DriverError) as caught:
        do()
    assert [made.code for made in calls] == [code]
    assert caught.value.call == call.symbol
    assert caught.value.name
    assert caught.value.detail


@pytest.mark.parametrize("call", [Call.MAP, Call.SET_ACCESS, Call.UNMAP])
def test_too_many_mappings_names_the_setting(call: Call) -> None:
    limit = Path("/proc/sys/vm/max_map_count").read_text().strip()
    name, hint = get_driver("cpu").explain(call, OUT_OF_MEMORY)
    assert name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert "vm.max_map_count" in hint
    assert limit in hint


# -- reservations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, 0.5])
def test_reservation_of_no_multiple(driver: Driver, count: float) -> None:
    size = int(count * driver.granularity_bytes)
    with pytest.raises(ValueError, match="positive multiple") as caught:
        Reservation(driver, size)
    assert str(size) in str(caught.value)
    assert f"{driver.granularity_bytes:,}" in str(caught.value)


@pytest.mark.parametrize("size_bytes", [1 << 47, 1 << 62, 1 << 63, 1 << 64, (1 << 64) + (1 << 21), 1 << 90])
def test_reservation_larger_than_the_address_space(driver: Driver, size_bytes: int) -> None:
    with pytest.raises(ReservationError, match="of addresses cannot be reserved") as caught:
        Reservation(driver, size_bytes)
    assert isinstance(caught.value, MemoryError)


def test_reservation_closes_once(driver: Driver) -> None:
    reservation = Reservation(driver, 16 * driver.granularity_bytes)
    assert f"{reservation.base:#x}" in repr(reservation)
    reservation.close()
    assert "closed" in repr(reservation)
    with record(driver) as calls:
        reservation.close()
    assert len(calls) == 0


def test_reservation_whose_free_failed_can_be_closed_again(driver: Driver) -> None:
    reservation = Reservation(driver, driver.granularity_bytes)
    with fail(driver, Call.FREE, 1), pytest.raises(DriverError, match="cuMemAddressFree"):
        reservation.close()
    assert not reservation.closed
    reservation.close()
    assert reservation.closed


def test_many_reservations_in_any_order(driver: Driver) -> None:
    size = driver.granularity_bytes
    made = [Reservation(driver, (1 + index % 3) * size) for index in range(64)]
    spans = sorted((one.base, one.base + one.size_bytes) for one in made)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for one in made[::2] + made[1::2][::-1]:
        one.close()


# -- forks --------------------------------------------------------------------------------------------------------


def test_driver_of_the_parent_says_so_in_a_child(driver: Driver) -> None:
    def use() -> str:
        try:
            driver.reserve(driver.granularity_bytes)
        except ForkedError as error:
            return str(error)
        return "nothing raised"

    code, text = in_child(use)
    assert code == 0, text
    assert f"memory of process {os.getpid()} was used in its forked child" in text
    assert "'spawn'" in text


@pytest.mark.parametrize("device", ["cpu"])
def test_child_makes_its_own_driver(device: str) -> None:
    pool = PagePool(device)
    parents = pool.driver

    def make() -> bool:
        own = get_driver(device)
        address, handle = own.reserve(4096), own.create(4096)
        own.map(address, 4096, handle)
        own.set_access(address, 4096)
        own.unmap(address, 4096)
        own.release(handle)
        own.free(address, 4096)
        return own is not parents and own.live_bytes == 0  # type: ignore[attr-defined]

    assert in_child(make) == (0, "True")
    pool.close()


def test_child_does_not_wait_for_a_lock_of_the_parents_threads() -> None:
    with ThreadPoolExecutor(1) as other:
        other.submit(registry._lock.acquire).result()
        try:
            outcome = in_child(lambda: get_driver("cpu").live_bytes, timeout_s=10)  # type: ignore[attr-defined]
            again = in_child(lambda: in_child(lambda: get_driver("cpu").device, timeout_s=5), timeout_s=10)
        finally:
            registry._lock.release()
    assert outcome == (0, "0")
    assert again == (0, "(0, 'cpu')")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a child cannot use CUDA after its parent did")
def test_import_then_fork_then_use() -> None:
    code = """
        import os
        import vtensor
        if os.fork() == 0:
            from vtensor.allocator.page_pool import PagePool
            PagePool("cpu").close()
            os._exit(0)
        assert os.wait()[1] == 0
    """
    done = _run(code)
    assert done.returncode == 0, done.stderr


# -- the system's limit of mappings -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_others", [0, 1])  # a place takes two mappings: the limit is met at it or one above it
def test_process_that_runs_out_of_mappings(num_others: int) -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 200_000:
        pytest.skip(f"vm.max_map_count is {limit}: it would take gigabytes of memory and a minute to get there")
    code = """
        import ctypes, mmap, sys
        import numpy as np
        from tests.helpers.memory import access_at, fill_place, place_value, ranges
        from vtensor.allocator.address_space import AddressSpace
        from vtensor.allocator.page_pool import PagePool
        from vtensor.errors import DriverError

        def num_mappings():
            with open("/proc/self/maps") as maps:
                return sum(1 for _ in maps)

        def scattered(start, count):
            return np.stack([np.arange(count) * 2 + start, np.ones(count, np.int64)], 1)

        program = open(sys.executable, "rb")
        others = [mmap.mmap(program.fileno(), 4096, prot=mmap.PROT_READ) for _ in range(NUM_OTHERS)]
        pool = PagePool("cpu", page_group_bytes=4096)
        space = AddressSpace(pool, 8 * LIMIT * 4096)

        # Gaps of a page, which the system fills with the spaces' tables, so that the spaces themselves are neighbours
        # and one mapping to the system: to free the middle one cuts it in two.
        libc = ctypes.CDLL(None)
        long, int_ = ctypes.c_long, ctypes.c_int
        libc.mmap.restype, libc.mmap.argtypes = long, [long, long, int_, int_, int_, long]
        libc.munmap.argtypes = [ctypes.c_long] * 2
        pages = libc.mmap(0, 64 * 4096, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        for page in range(0, 64, 2):
            libc.munmap(pages + page * 4096, 4096)
        neighbours = [AddressSpace(pool, 4096 * 16) for _ in range(5)]
        space.commit(scattered(0, 1000), content=2)
        fill_place(space, 1998, 5)
        def differs(now, before):  # but for what is held in reserve, or was given up
            return min(abs(now - before), abs(now + 256 - before)) >= 20

        at_first = num_mappings()

        # All at once, then one by one up to the limit itself: each time an error, and nothing has changed.
        for attempt in range(2):
            try:
                space.commit(scattered(2000, LIMIT), content=2)
            except DriverError as error:
                assert "vm.max_map_count" in str(error), error
                assert "LIMIT" in str(error), error
                assert "nothing was changed" in str(error), error
            else:
                raise SystemExit("no error")
            assert space.num_mapped == 1000
            assert pool.stats().mapped_page_groups == 1000
            assert not differs(num_mappings(), at_first), (num_mappings(), at_first)
            assert place_value(space, 1998) == 5
            space.check_integrity()

        place = 2000
        try:
            while True:
                space.commit(ranges((place, 1)), content=2)
                place += 2
        except DriverError as error:
            assert "vm.max_map_count" in str(error), error
        assert space.num_mapped > 0.9 * LIMIT / 2
        assert space.num_mapped == place // 2
        assert place_value(space, 1998) == 5

        # The rest of the process takes what is left. The system lets the limit be passed by one.
        try:
            while True:
                others.append(mmap.mmap(program.fileno(), 4096, prot=mmap.PROT_READ))
        except OSError:
            pass

        # At the limit: taking away works, nothing is mapped without room for what must follow, all can be closed.
        for number in range(1, 4):
            space.decommit(ranges((place - 2 * number, 1)), forget_content=False)
            try:
                space.commit(ranges((place - 2 * number, 1)), content=2)
            except DriverError as error:
                assert "vm.max_map_count" in str(error), error
            else:
                raise SystemExit("no error")
        for neighbour in [neighbours[index] for index in (2, 0, 4, 1, 3)]:
            base = neighbour.base
            neighbour.close()
            assert access_at(base) == ""
        space.decommit(ranges((2000, space.num_places - 2000)), forget_content=False)
        assert space.num_mapped == 1000
        assert not differs(num_mappings(), at_first), (num_mappings(), at_first)
        space.check_integrity()
        for other in others[NUM_OTHERS:]:
            other.close()
        space.commit(scattered(2000, 1000), content=2)
        space.check_integrity()
        space.close()
        pool.close()
        assert pool.driver.live_bytes == 0
        from vtensor.allocator.driver import host_native as native
        assert native.STATE[native.NUM_RESERVATIONS] == 0
        print("done")
    """
    done = _run(code.replace("LIMIT", str(limit)).replace("NUM_OTHERS", str(num_others)))
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_memory_can_be_given_back_at_the_limit_of_mappings() -> None:
    """Compiled code allocates while it gives back, and must not end in the middle, with its locks held."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 200_000:
        pytest.skip(f"vm.max_map_count is {limit}: it would take gigabytes of memory and a minute to get there")
    done = _run("""
        import ctypes, gc, vtensor as vt
        ctypes.CDLL(None).mallopt(-3, 4096)  # M_MMAP_THRESHOLD: what is larger takes a mapping each time
        pool = vt.PagePool("cpu", page_group_bytes=4096)
        for attempt in range(2):
            x = vt.empty(200_000, 2, 4096, dtype=__import__("torch").uint8, device="cpu", pool=pool)
            try:
                for number in range(200_000):
                    x[number, 0, 0] = 1
            except vt.DriverError as error:
                assert "vm.max_map_count" in str(error), error
            assert number > 20_000
            if attempt:
                assert x[: number // 2].decommit() == number // 2 * 4096
                assert x[number - 1, 0, 0] == 1
            del x
            gc.collect()
            assert pool.stats().mapped_page_groups == 0
        pool.check_integrity()
        pool.close()
        print("done")
    """)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def _run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that finds what this one finds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
