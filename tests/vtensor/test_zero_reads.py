"""Reads of what was never written give zeros, and cost no memory."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.faults import BROKEN, fail
from tests.helpers.threads import Background
from vtensor import pools
from vtensor.allocator.driver import Call, Driver, get_driver
from vtensor.allocator.driver.host import HostDriver

NUM_ROWS = 8


def page(device: str) -> int:
    return int(get_driver(device).default_page_group_bytes)


@pytest.fixture(params=["readable holes", "aliases of zeros"])
def way(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How zeros are shown: the host has both ways, a GPU has aliases only."""
    if request.param == "aliases of zeros":
        monkeypatch.setattr(HostDriver, "has_readable_holes", False)
    elif device != "cpu":
        pytest.skip("a GPU has no readable holes")
    yield request.param
    gc.collect()
    for pool in pools._pools.values():
        pool.trim()  # of the zeros


@pytest.fixture
def pool(device: str, way: str) -> Iterator[vt.PagePool]:
    """Four page groups, each a handle of its own; full of ones."""
    size = page(device)
    pool = vt.PagePool(device, capacity_bytes=4 * size, page_group_bytes=size, max_size_class_bytes=size)
    vt.empty(4 * size, dtype=torch.uint8, device=device, pool=pool).fill_(1)
    yield pool
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
    pool.check_integrity()
    pool.close()


def rows(pool: vt.PagePool, **options: Any) -> vt.VirtualTensor:
    """Rows of one page group each."""
    size = pool.page_group_bytes
    return vt.empty(NUM_ROWS, size, dtype=torch.uint8, device=pool.driver.device, pool=pool, **options)


READS: dict[str, Callable[[vt.VirtualTensor], object]] = {
    "sum": lambda x: x.sum(),
    "clone": lambda x: x.clone(),
    "any": lambda x: x.any(),
    "equal": lambda x: torch.equal(x, torch.zeros_like(x)),
    "arithmetic": lambda x: x + 1,
    "cat": lambda x: torch.cat([x, x]),
    "source of a copy": lambda x: torch.ones(x.shape, device=x.device).copy_(x),
    "index": lambda x: x[torch.tensor([1, 3], device=x.device)],
    "tolist": lambda x: x[:, :3].tolist(),
    "item": lambda x: x[3, 3].item(),
    "bool": lambda x: bool(x[3, 3]),
    "int": lambda x: int(x[3, 3]),
    "format": lambda x: int(f"{x[3, 3]:d}"),
    "cpu": lambda x: x.cpu().max(),
    "to": lambda x: x.to(torch.float32),
    "deepcopy": lambda x: copy.deepcopy(x),
    "save": lambda x: torch.save(x[:2], io.BytesIO()),
    "transposed": lambda x: x.t().contiguous(),
    "repr": lambda x: repr(x),
}


@pytest.mark.parametrize("name", READS)
def test_reading_costs_nothing(name: str, pool: vt.PagePool) -> None:
    x, dense = rows(pool), torch.zeros(NUM_ROWS, pool.page_group_bytes, dtype=torch.uint8, device=pool.driver.device)
    found, expected = READS[name](x), READS[name](dense)
    if name not in ("save", "repr"):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    assert (x.resident_bytes, x.residency().any()) == (0, False)
    assert pool.stats().mapped_page_groups == 0
    pool.check_integrity()


def test_in_the_pool_of_all(device: str, way: str) -> None:
    # Which keeps no free page groups, and yet those zeros that are shown.
    for _ in range(2):
        x: Any = vt.empty(4, page(device), dtype=torch.uint8, device=device)
        assert not x.any()
        x[1] = 3
        assert x.sum(1).tolist() == [0, 3 * page(device), 0, 0]
        assert x.resident_bytes == page(device)
        del x
        gc.collect()


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_sparse_tensors_keep_what_they_are_made_of(device: str, way: str) -> None:
    values, index = vt.zeros(4, 4, device="cpu"), vt.zeros(1, 1, dtype=torch.int64, device="cpu")
    sparse = torch.sparse_coo_tensor(torch.arange(4)[None], values, is_coalesced=True)
    sparse._values().add_(1)
    assert values.sum() == 16
    sparse = torch.sparse_coo_tensor(index, torch.ones(1), (4,), is_coalesced=True)
    sparse._indices().add_(1)
    assert sparse.to_dense().tolist() == [0, 1, 0, 0]


def test_writing_takes_the_place_of_zeros(pool: vt.PagePool) -> None:
    x = rows(pool)
    for written in range(4):  # the pool has no more
        assert not x[written:].any()
        x[written, 5:9].fill_(7)
        assert x.residency().tolist() == [row <= written for row in range(NUM_ROWS)]
        assert x.sum(1).tolist() == [28 if row <= written else 0 for row in range(NUM_ROWS)]
        pool.check_integrity()
    with pytest.raises(vt.OutOfPagesError, match="needs 1 more page groups"):
        x[4].fill_(7)
    assert x.sum(1).tolist() == [28] * 4 + [0] * 4
    assert x.decommit() == 4 * pool.page_group_bytes
    assert not x.any()
    x[7] = 2
    assert x.sum().item() == 2 * pool.page_group_bytes
    stats = pool.stats()
    assert (stats.capacity_page_groups, stats.mapped_page_groups) == (4, 1)


def test_reading_and_writing_in_one_operation(pool: vt.PagePool) -> None:
    x = rows(pool)
    x[0].add_(x[1]).add_(1)
    x[2].copy_(x[5])
    torch.add(x[0], x[6], out=x[3])
    size = pool.page_group_bytes
    half = x.view(-1)[size // 2 : size // 2 + size]  # over rows 0 and 1, of which 1 shows zeros
    half.add_(x[7])
    assert x.residency().tolist() == [True, True, True, True, False, False, False, False]
    assert x[:, 0].tolist() == [1, 0, 0, 1, 0, 0, 0, 0]


def test_zeros_shown_are_not_given_back(pool: vt.PagePool) -> None:
    x = rows(pool)
    x[:2] = 3
    assert x[:, -1].tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    assert x[1:6].decommit() == pool.page_group_bytes
    assert x[:, -1].tolist() == [3, 0, 0, 0, 0, 0, 0, 0]


def test_a_growing_tensor(pool: vt.PagePool) -> None:
    size = pool.page_group_bytes
    x: Any = vt.empty(3, size, dtype=torch.uint8, device=pool.driver.device, pool=pool, max_rows=9)
    assert not x.any()
    x.append_(torch.full((size,), 5, dtype=torch.uint8))
    assert x[:, 1].tolist() == [0, 0, 0, 5]
    x.resize_rows_(2).resize_rows_(6)
    assert x[:, 1].tolist() == [0] * 6
    assert pool.stats().mapped_page_groups == 0


def test_who_raises_raises_for_reads_too(pool: vt.PagePool) -> None:
    x = rows(pool, on_touch="raise")
    for operation in (x.sum, x.tolist, lambda: x + 1, lambda: bool(x[0, 0])):
        with pytest.raises(vt.UnmappedAccessError):
            operation()
    assert not x.commit(1)[0].any()


def test_hand_over_commits(pool: vt.PagePool) -> None:
    x = rows(pool)
    if x.device.type == "cpu":
        assert not x[1].numpy().any()
    else:
        x[1].__cuda_array_interface__  # noqa: B018
    assert not torch.from_dlpack(x[2]).any()
    assert x.residency().tolist() == [False, True, True, *[False] * 5]


def test_an_operator_from_elsewhere_may_write_to_all(pool: vt.PagePool) -> None:
    with torch.library._scoped_library("vtensor_test", "FRAGMENT") as library:
        library.define("fill_in_secret(Tensor x, Tensor y) -> Tensor")
        library.impl("fill_in_secret", lambda x, y: x.fill_(9) + y, "CompositeExplicitAutograd")
        x = rows(pool)
        assert torch.ops.vtensor_test.fill_in_secret(x[1], x[2]).sum() == 9 * pool.page_group_bytes
        assert x.residency().tolist() == [False, True, True, *[False] * 5]


def test_running_statistics_are_written_unsaid(device: str, way: str) -> None:
    layer = torch.nn.BatchNorm1d(4, device=device)
    layer.running_mean, layer.running_var = vt.zeros(4, device=device), vt.zeros(4, device=device)
    expected = torch.nn.BatchNorm1d(4, device=device)
    expected.running_var.zero_()  # type: ignore[union-attr]
    data = torch.arange(12.0, device=device).view(3, 4)
    for module in (layer, expected):
        module(data)
    assert torch.equal(layer.running_mean.cpu(), expected.running_mean.cpu())  # type: ignore[union-attr]
    assert torch.equal(layer.running_var.cpu(), expected.running_var.cpu())  # type: ignore[union-attr]


def test_a_limit_of_zeros(pool: vt.PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtensor.region.READ_LIMIT_BYTES", 4 * pool.page_group_bytes)
    monkeypatch.setattr("vtensor.watched.READ_LIMIT_BYTES", 4 * pool.page_group_bytes)
    x = rows(pool)
    with pytest.raises(vt.UnmappedAccessError, match=r"would read .* of zeros.* Read a part of it"):
        x.sum()
    assert x[:4].sum() == 0
    with pytest.raises(vt.UnmappedAccessError, match="would read"):
        x[:, :1].sum()  # few bytes, but so many page groups
    x[:4] = 1
    assert x[:, 0].sum() == 4
    assert (x[2:] + 0).sum() == 2 * pool.page_group_bytes


def test_zeros_end_with_the_pool(device: str, way: str) -> None:
    pool = vt.PagePool(device, capacity_bytes=8 * page(device))
    x = rows(pool)
    assert not x.any()
    x[0] = 1
    with pytest.raises(vt.VTensorError, match=r"still has \d+ mapped page groups"):
        pool.close()
    assert pool.stats().capacity_page_groups == 8
    assert x[:, 0].tolist() == [1] + [0] * 7
    del x
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        vt.empty(1, device=device)  # sweeps
    pool.trim()
    assert pool.stats().num_handles == {}
    y = rows(pool)
    assert not y.any()
    del y
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        vt.empty(1, device=device)
    pool.close()


@pytest.mark.parametrize("nth", range(1, 4))
@pytest.mark.parametrize("call", [Call.CREATE, Call.MAP, Call.SET_ACCESS, Call.RESERVE])
def test_zeros_that_cannot_be_shown(call: Call, nth: int, device: str, driver: Driver, pool: vt.PagePool) -> None:
    x = rows(pool)
    x[3] = 5
    pool.trim()
    with fail(driver, call, nth) as calls, suppress(vt.DriverError, vt.ReservationError):
        assert x[:, 7].tolist() == [0, 0, 0, 5, 0, 0, 0, 0]
        assert calls.count(call) < nth
    assert x[:, 7].tolist() == [0, 0, 0, 5, 0, 0, 0, 0]
    assert x.residency().tolist() == [row == 3 for row in range(NUM_ROWS)]
    assert pool.stats().capacity_page_groups == 4


def test_zeros_that_cannot_be_taken_away(driver: Driver, pool: vt.PagePool) -> None:
    x = rows(pool)
    assert not x.any()
    with fail(driver, Call.UNMAP, 1, BROKEN) as calls:
        try:
            x[2] = 1
            assert calls.count(Call.UNMAP) == 0
        except vt.DriverError:
            assert not x.any()
    x[2] = 1
    assert x[:, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_reader_beside_a_writer_meets_zeros_only(device: str) -> None:
    # Neighbours in a page group: one thread reads its part, while another writes to its own and gives memory back.
    pool = vt.PagePool("cpu", capacity_bytes=16 * page(device), page_group_bytes=page(device))
    other = vt.empty(16 * page(device), dtype=torch.uint8, device="cpu", pool=pool)
    x = vt.empty(NUM_ROWS, page(device), dtype=torch.uint8, device="cpu", pool=pool)
    mine, theirs = x[:, : page(device) // 2], x[:, page(device) // 2 :]
    ended = threading.Event()
    found: list[int] = []

    def read() -> None:
        data: Any = mine.plain().numpy()
        while not ended.is_set():
            found.append(int(data.max()))
            found.append(int(mine.max()))

    reader = Background(read)
    for _ in range(100):
        other.fill_(66)
        other.decommit()
        theirs.fill_(7)
        x.decommit()
    ended.set()
    reader.join()
    assert len(found) > 20
    assert set(found) == {0}


def test_several_threads_read_and_write(pool: vt.PagePool) -> None:
    # Whoever reads zeros keeps them until its operation is under way.
    x = rows(pool)

    def work(row: int) -> None:
        for turn in range(20):
            assert int(x[4:, 3].sum()) == 0
            x[row, turn] = 1
            assert int(x[row].sum()) == turn + 1

    threads = [Background(lambda row=row: work(row)) for row in range(4)]
    for thread in threads:
        thread.join()
    assert x.sum(1).tolist() == [20] * 4 + [0] * 4


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_write_waits_for_readers_on_other_streams(gpu: str) -> None:
    size = page(gpu)
    x = vt.empty(4, size, dtype=torch.uint8, device=gpu)
    side, sums = torch.cuda.Stream(gpu), []
    for row in range(3):
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
            sums.append(x.sum())  # still to come when the row is written
        x[row] = 1
        assert int(x[row].sum()) == size
    torch.cuda.synchronize()
    assert [int(value) for value in sums] == [row * size for row in range(3)]


@pytest.mark.gpu
def test_zeros_are_no_good_for_a_graph(gpu: str) -> None:
    x = vt.empty(4, page(gpu), dtype=torch.uint8, device=gpu)
    assert not x.any()
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.empty((), dtype=torch.int64, device=gpu)
    with torch.cuda.graph(graph):
        with pytest.raises(vt.VTensorError, match="capture"):
            x.sum()
        out.zero_()
    x.commit()
    x[2] = 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.sum(x, (0, 1), out=out)
    graph.replay()
    assert int(out) == page(gpu)


def test_the_lock_is_free_after_an_error(pool: vt.PagePool) -> None:
    x = rows(pool)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
        with pytest.raises(RuntimeError):
            torch.cat([x, x[0]])
    other = Background(lambda: x[1].fill_(1))
    other.join()
    assert x[1].any()


ZEROING: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(0),
    "of rows": lambda x: x[1:5].zero_(),
    "of a column": lambda x: x[:, 5:9].fill_(False),
    "of many small pieces": lambda x: x.view(-1, 4)[:, 1:3].zero_(),
    "transposed": lambda x: x.t()[3:].zero_(),
    "by an index": lambda x: x.__setitem__((slice(2, 7), slice(100)), 0),
    "of every other row": lambda x: x[::2].zero_(),
    "of one element": lambda x: x[3, 3].zero_(),
    "of nothing": lambda x: x[3:3].zero_(),
}


@pytest.mark.parametrize("name", ZEROING)
def test_zeros_are_written_to_memory_only(name: str, pool: vt.PagePool) -> None:
    x = rows(pool)
    dense = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
    for tensor in (x, dense):
        tensor[3] = 7
        tensor[6, 5:] = 9
    if name == "of many small pieces":  # which no loop goes through: these are written in one operation
        with pytest.raises(vt.OutOfPagesError):
            ZEROING[name](x)
        return
    ZEROING[name](x)
    ZEROING[name](dense)
    assert torch.equal(x.clone(), dense)
    assert x.residency().tolist() == [False] * 3 + [True] + [False] * 2 + [True] + [False]


def test_zeros_are_written_to_what_was_shown(pool: vt.PagePool) -> None:
    x = rows(pool)
    x[3] = 7
    assert x.sum().item() == 7 * x.shape[1]  # on a GPU, all of it is mapped now
    assert x.zero_() is x
    assert not x.any()
    assert x.resident_bytes == pool.page_group_bytes
    x[:4].fill_(-0.0)  # an integer, so no other bits than 0
    assert not x.any()


def test_negative_zero_is_written(pool: vt.PagePool) -> None:
    x = rows(pool).view(torch.float32)
    x[3].fill_(-0.0)
    assert x[3].signbit().all()
    assert x.resident_bytes == pool.page_group_bytes


def test_who_raises_raises_for_zeros_too(pool: vt.PagePool) -> None:
    x = rows(pool, on_touch="raise").commit(2)
    with pytest.raises(vt.UnmappedAccessError):
        x.zero_()
    x[:2].zero_()


def test_a_resize_to_the_same_shape_is_none(pool: vt.PagePool) -> None:
    x = rows(pool).view(torch.float32)
    shape = (2, x.shape[1])
    torch.manual_seed(5)
    assert torch.randn(*shape, out=x[2:4]).shape == shape
    torch.manual_seed(5)
    assert torch.equal(x[2:4].clone(), torch.randn(*shape, device=x.device))
    assert x.resize_(x.shape) is x
    assert x.resize_as_(torch.empty(x.shape)) is x
    for size in ((2, 2), (x.numel(),)):
        with pytest.raises(vt.VTensorError, match="resize_"):
            x.resize_(size)


def test_what_is_all_there_is_zeroed_in_one_operation(pool: vt.PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(pool)
    x[:4] = 1
    monkeypatch.setattr(vt.VirtualTensor, "_zero_held", None)
    x[:4, 5:9].zero_()
    x[1:3].fill_(0)
    assert x.sum().item() == 2 * (x.shape[1] - 4)


def test_zeros_over_a_huge_range_are_quick(device: str) -> None:
    x = vt.empty(1 << 44, dtype=torch.uint8, device=device)  # 16 TiB: 2^28 places
    x[1 << 43] = 5
    for _ in range(100):  # minutes, if all places were looked at
        x.zero_()
    assert x[1 << 43].item() == 0
    assert x.resident_bytes == page(device)


def test_raising_over_zeros_that_are_shown_names_them(pool: vt.PagePool) -> None:
    x = rows(pool)
    x[0] = 1
    x.sum()
    with pytest.raises(vt.UnmappedAccessError, match=f"touches 7 page groups .* at bytes {pool.page_group_bytes:,}"):
        vt.as_virtual(x, on_touch="raise").sum()
