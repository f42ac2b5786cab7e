"""Region: what one thread commits, others do not meet half done; what is asked for before memory is called short."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.faults import delay, fail, num_begun
from vtensor.allocator import graveyard
from vtensor.allocator.driver import Call, Driver, get_driver
from vtensor.region import Region

OUT_OF_MEMORY = 2


def page(device: str) -> int:
    return int(get_driver(device).default_page_group_bytes)


@pytest.mark.parametrize(("first", "on_touch"), [("touch", "commit"), ("commit", "commit"), ("commit", "raise")])
def test_a_neighbour_waits_until_recycled_memory_is_zero(
    first: str, on_touch: Any, device: str, driver: Driver
) -> None:
    pool = vt.PagePool(device, capacity_bytes=page(device))
    vt.empty(page(device), dtype=torch.uint8, device=device, pool=pool).fill_(7)  # dies, and leaves the page group
    x: Any = vt.empty(4, page(device) // 4, dtype=torch.uint8, device=device, pool=pool, on_touch=on_touch)
    errors: list[BaseException] = []
    zeroes = device != "cpu" or on_touch == "raise"  # otherwise it is zero before it is there

    def commit() -> None:
        if first == "touch":
            x[0].fill_(1)
        else:
            x.commit(slice(0, 1))

    def write() -> None:
        try:
            deadline = time.monotonic() + 10
            while num_begun(Call.ZERO) == 0 and zeroes:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            x[2].fill_(5)  # whoever does not wait has written long before all is zero
        except BaseException as error:
            errors.append(error)

    with delay(driver, Call.ZERO, 300_000) as calls:
        threads = [threading.Thread(target=commit), threading.Thread(target=write)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (errors, calls.count(Call.ZERO)) == ([], int(zeroes))
    assert [row.unique().tolist() for row in x.cpu()] == [[1] if first == "touch" else [0], [0], [5], [0]]


# -- a shortage -----------------------------------------------------------------------------------------------------


@pytest.fixture
def remedies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a shortage tried, in order; torch has something to give wherever it is asked."""
    tried: list[str] = []
    drain = graveyard.drain
    monkeypatch.setattr(graveyard, "drain", lambda: (tried.append("drain"), drain())[1])
    monkeypatch.setattr(Region, "ask_torch", lambda self: tried.append("torch") or True)
    return tried


def test_torch_is_asked_once_before_memory_is_called_short(device: str, driver: Driver, remedies: list[str]) -> None:
    pool = vt.PagePool(device, max_size_class_bytes=page(device))
    x = vt.empty(4 * page(device), dtype=torch.uint8, device=device, pool=pool)
    with (
        fail(driver, Call.CREATE, 1, OUT_OF_MEMORY, times=1 << 30) as calls,
        pytest.raises(vt.OutOfPagesError, match="as much as the device has"),
    ):
        x.commit()
    assert remedies == ["drain", "torch"]
    assert calls.count(Call.CREATE) == 3
    assert x.resident_bytes == 0


@pytest.mark.parametrize(("num_failures", "expected"), [(0, []), (1, ["drain"]), (2, ["drain", "torch"])])
def test_what_torch_gives_back_is_used(
    num_failures: int, expected: list[str], device: str, driver: Driver, remedies: list[str]
) -> None:
    pool = vt.PagePool(device, max_size_class_bytes=page(device))
    x = vt.empty(4 * page(device), dtype=torch.uint8, device=device, pool=pool)
    with fail(driver, Call.CREATE, 1, OUT_OF_MEMORY, times=num_failures):
        x.fill_(3)
    assert remedies == expected
    assert x.resident_bytes == 4 * page(device)
    assert (x == 3).all()


@pytest.mark.parametrize(
    ("kind", "capacity_bytes", "is_asked"),
    [("cuda", None, True), ("cuda", 1 << 30, False), ("cpu", None, False), ("cpu", 1 << 30, False)],
)
def test_torch_is_asked_where_we_share_the_device_with_it(
    kind: str, capacity_bytes: int | None, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(True))
    region: Any = SimpleNamespace(
        device=torch.device(kind), space=SimpleNamespace(pool=SimpleNamespace(capacity_bytes=capacity_bytes))
    )
    assert Region.ask_torch(region) is is_asked
    assert asked == [True] * is_asked
