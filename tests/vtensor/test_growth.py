"""Virtual tensors that give memory back, and that grow in place: `decommit`, `append_`, `resize_rows_`."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

import vtensor as vt
from tests.helpers.faults import BROKEN, fail, record
from tests.vtensor.caches import close
from vtensor.allocator.driver import Call, Driver, get_driver


def page(device: str) -> int:
    return int(get_driver(device).default_page_group_bytes)


def small_pool(device: str, num_page_groups: int, **options: Any) -> vt.PagePool:
    size = page(device)
    return vt.PagePool(device, capacity_bytes=num_page_groups * size, page_group_bytes=size, **options)


def single(device: str, num_page_groups: int = 64) -> vt.PagePool:
    """A pool whose page groups come and go one by one."""
    return small_pool(device, num_page_groups, max_size_class_bytes=page(device))


# -- decommit -------------------------------------------------------------------------------------------------------


def test_what_was_given_back_reads_as_zeros(device: str) -> None:
    pool, size = single(device), page(device)
    x = vt.full((8 * size,), 7, dtype=torch.uint8, device=device, pool=pool)
    assert x.decommit(slice(size // 2, 4 * size)) == 3 * size  # of the first page group it has half
    assert x.residency().tolist() == [True, False, False, False, True, True, True, True]
    assert pool.stats().free_page_groups == 3
    assert (x[:size] == 7).all()
    assert not x[size : 4 * size].any()
    assert (x[4 * size :] == 7).all()
    assert x.decommit() == 5 * size
    assert x.resident_bytes == 0
    assert x.decommit() == 0
    assert not x.any()
    del x
    close(pool)


def test_the_last_page_group_belongs_to_the_tensor_whole(device: str) -> None:
    pool = single(device)
    x = vt.full((page(device) + 5,), 7, dtype=torch.uint8, device=device, pool=pool)
    assert x[1:].decommit() == page(device)
    assert x[0] == 7
    assert x.decommit() == page(device)
    del x
    close(pool)


def test_a_view_gives_back_what_it_covers(device: str) -> None:
    pool, size = single(device), page(device)
    x = vt.full((6, 2 * size), 3, dtype=torch.uint8, device=device, pool=pool)
    assert x[:, size:].decommit() == 6 * size  # the right half of each row
    assert x[:, :size].sum(dtype=torch.int64) == 6 * size * 3
    assert x[::2].decommit() == 3 * size
    assert (x[1::2, :size] == 3).all()
    assert x.T[:size].decommit() == 3 * size
    assert x.resident_bytes == 0
    y = vt.full((6, 2 * size), 3, dtype=torch.uint8, device=device, pool=pool)
    assert y[:, 1::2].decommit() == 0
    assert y.decommit((slice(2), slice(size))) == 2 * size
    assert (y[2:] == 3).all()
    del x, y
    close(pool)


def test_a_handle_goes_back_as_a_whole(device: str) -> None:
    # Eight page groups that came as one handle: a part of it cannot go, and keeps its data.
    size = page(device)
    pool = small_pool(device, 8, max_size_class_bytes=8 * size)
    x = vt.full((8 * size,), 7, dtype=torch.uint8, device=device, pool=pool)
    assert x.decommit(slice(0, 4 * size)) == 0
    assert (x == 7).all()
    assert x.decommit() == 8 * size
    del x
    close(pool)


def test_other_views_see_at_once_what_was_given_back(device: str) -> None:
    pool = single(device)
    x = vt.full((4 * page(device),), 7, dtype=torch.uint8, device=device, pool=pool)
    view, strict = x[: page(device)], vt.VirtualTensor.wrap(x.plain(), x._region, "raise")
    assert (view == 7).all()
    assert (strict == 7).all()
    x.decommit()
    with pytest.raises(vt.UnmappedAccessError):
        strict.sum()
    assert not view.any()
    del x, view, strict
    close(pool)


@pytest.mark.gpu
def test_memory_goes_back_after_the_kernels_that_use_it() -> None:
    pool = single("cuda:0")
    x = vt.full((4 << 20,), 7, dtype=torch.uint8, device="cuda:0", pool=pool)
    side = torch.cuda.Stream()
    x.record_stream(side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        total = x.plain().sum(dtype=torch.int64)
    assert x.decommit() == 4 << 20
    assert total.item() == 7 * (4 << 20)
    del x
    close(pool)


@pytest.mark.gpu
def test_not_during_a_capture() -> None:
    x = vt.full((4 << 20,), 7, dtype=torch.uint8, device="cuda:0")
    g = vt.empty(4, 8, device="cuda:0", max_rows=100)
    y = torch.zeros(1, device="cuda:0")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        y += 1
        with pytest.raises(vt.VTensorError, match="capture"):
            x.decommit()
        with pytest.raises(vt.VTensorError, match="capture"):
            g.resize_rows_(2)
        with pytest.raises(vt.VTensorError, match="capture"):
            g.append_(torch.ones(8, device="cuda:0"))
    assert g.shape == (4, 8)
    assert (x == 7).all()


def test_a_driver_that_refuses_changes_nothing(device: str, driver: Driver) -> None:
    pool, size = single(device), page(device)
    x = vt.full((4 * size,), 7, dtype=torch.uint8, device=device, pool=pool)
    g = vt.empty(4, size, dtype=torch.uint8, device=device, pool=pool, max_rows=8).fill_(5)
    with fail(driver, Call.UNMAP, 1, BROKEN, times=2):
        with pytest.raises(vt.DriverError):
            x.decommit()
        with pytest.raises(vt.DriverError):
            g.resize_rows_(1)
    assert (x == 7).all()
    assert g.shape == (4, size)
    assert (g == 5).all()
    assert x.decommit() == 4 * size
    g.resize_rows_(1)
    assert g.resident_bytes == size
    del x, g
    close(pool)


def test_bad_ways_to_give_back(device: str) -> None:
    x = vt.full((4, 8), 7, device=device)
    with pytest.raises(ValueError, match="no basic index"):
        x.decommit(torch.tensor([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 0 to the number of rows"):
        x.decommit(5)
    assert vt.empty(0, device=device).decommit() == 0
    config = vt.KVCacheConfig(num_layers=1, num_kv_heads=1, head_dim=64, max_batch_size=1, max_context_tokens=64)
    with vt.KVCacheManager(config, device) as cache:
        cache.alloc_reqid()
        assert cache.step([8])
        key, value = cache.layer(0)
        with pytest.raises(vt.VTensorError, match="belongs to a KVCacheManager"):
            key.decommit()
        del key, value


def test_values_go_with_autograd_as_any_write_would_not(device: str) -> None:
    # It is no operator: what autograd has saved is gone, as after a write through `.data`.
    x = vt.full((4,), 2.0, device=device, requires_grad=True)
    x.decommit()
    assert x.grad_fn is None
    assert not x.any()


# -- growth -----------------------------------------------------------------------------------------------------------


def test_rows_are_added_in_place(device: str) -> None:
    g = vt.empty(0, 64, device=device, max_rows=1 << 24)
    pointer, parts = g.untyped_storage().data_ptr(), []
    assert g.shape == (0, 64)
    assert g.max_rows == 1 << 24
    assert g.resident_bytes == 0
    for number in (1, 5, 1000, 0, 3):
        parts.append(torch.randn(number, 64, device=device))
        assert g.append_(parts[-1]) is g
        assert g.untyped_storage().data_ptr() == pointer
        assert g.is_contiguous()
        assert torch.equal(g.plain(), torch.cat(parts))
    g.append_(torch.ones(64, device=device))
    assert g.shape == (1010, 64)
    assert (g[-1] == 1).all()
    assert g.resident_bytes <= -(-1010 * 256 // page(device)) * page(device)


def test_memory_comes_with_rows_and_goes_with_them(device: str, driver: Driver) -> None:
    pool, size = single(device), page(device)
    g = vt.empty(0, size, dtype=torch.uint8, device=device, pool=pool, max_rows=40)
    with record(driver) as calls:
        for number in range(40):
            g.append_(torch.full((size,), number + 1, dtype=torch.uint8, device=device))
            assert g.resident_bytes == (number + 1) * size
    assert calls.count(Call.MAP) == 40
    view = g[10:12]
    g.resize_rows_(11)
    assert g.resident_bytes == 11 * size
    assert pool.stats().free_page_groups == 29
    assert (g[:, 5].cpu() == torch.arange(1, 12)).all()
    assert view[:, 0].tolist() == [11, 0]
    g.resize_rows_(0)
    assert pool.stats().free_page_groups == 40 - (device != "cpu")  # of which one has become the zeros that were read
    del g, view
    close(pool)


@pytest.mark.parametrize("row", [3, 100, 4096])
@pytest.mark.parametrize("size_classes", [1, 4])
def test_rows_that_come_are_zero_whatever_was_there(size_classes: int, row: int, device: str) -> None:
    # Against a list of rows, through random growth and shrinking; handles large and small.
    pool = small_pool(device, 1 << 10, max_size_class_bytes=page(device) << size_classes - 1)
    random_ = random.Random(f"{row} {size_classes}")
    g = vt.empty(2, row, dtype=torch.int32, device=device, pool=pool, max_rows=2_000)
    model, pointer = torch.zeros(2, row, dtype=torch.int32), g.untyped_storage().data_ptr()
    for number in range(1, 60):
        if random_.random() < 0.5:
            rows = torch.full((random_.choice([0, 1, 7, 200]), row), number, dtype=torch.int32)
            if len(model) + len(rows) <= 2_000:
                g.append_(rows.to(device))
                model = torch.cat([model, rows])
        else:
            length = random_.choice([0, len(model) // 2, max(0, len(model) - 1), min(2_000, len(model) + 9)])
            assert g.resize_rows_(length) is g
            more = torch.zeros(max(0, length - len(model)), row, dtype=torch.int32)
            model = torch.cat([model, more])[:length]
        assert torch.equal(g.cpu(), model)
        assert g.untyped_storage().data_ptr() == pointer
    del g
    close(pool)


def test_rows_of_another_kind_are_converted(device: str) -> None:
    g = vt.empty(0, 3, dtype=torch.float16, device=device, max_rows=10)
    g.append_(torch.tensor([1, 2, 3]))
    g.append_(torch.ones(2, 3, dtype=torch.float64))
    g.append_(g[:2])
    g.append_(vt.full((1, 3), 9, device=device))
    g.append_(torch.ones(3, requires_grad=True))
    assert g[:, 0].tolist() == [1, 1, 1, 1, 1, 9, 1]
    assert not g.requires_grad


def test_rows_of_one_number(device: str) -> None:
    g = vt.empty(0, dtype=torch.int64, device=device, max_rows=5)
    g.append_(torch.tensor(3)).append_(torch.tensor([4, 5]))
    assert g.tolist() == [3, 4, 5]
    nothing = vt.empty(1, 0, device=device, max_rows=5)
    nothing.append_(torch.empty(3, 0)).resize_rows_(2)
    assert nothing.shape == (2, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.ones(2, 4), r"rows=<tensor of shape \(2, 4\)> must be a tensor of shape \[n, 3\], or \[3\]"),
        (torch.ones(1, 2, 3), "must be a tensor of shape"),
        (torch.ones(()), "must be a tensor of shape"),
        ([1, 2, 3], r"rows=\[1, 2, 3\] must be a tensor of shape"),
        (torch.ones(9, 3), "9 rows more than 2 are beyond max_rows=10"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: Any, message: str, device: str) -> None:
    g = vt.empty(2, 3, device=device, max_rows=10)
    with pytest.raises(ValueError, match=message):
        g.append_(rows)
    assert g.shape == (2, 3)


@pytest.mark.parametrize("num_rows", [-1, 11, True, 2.0, None])
def test_numbers_of_rows_that_are_refused(num_rows: Any, device: str) -> None:
    g = vt.empty(2, 3, device=device, max_rows=10)
    with pytest.raises(ValueError, match="must be 0 to max_rows=10"):
        g.resize_rows_(num_rows)
    assert g.resize_rows_(np.int64(10)).shape == (10, 3)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        ((), {"max_rows": 3}, "needs a dimension to grow"),
        ((4, 2), {"max_rows": 3}, r"max_rows=3 must be an integer of at least size\[0\]=4"),
        ((0, 2), {"max_rows": 0}, "and of 1"),
        ((1, 2), {"max_rows": True}, "must be an integer"),
        ((1, 2), {"max_rows": 2.5}, "must be an integer"),
        ((1, 2, 3, 4), {"max_rows": 9, "memory_format": torch.channels_last}, "where max_rows is given"),
    ],
)
def test_maxima_that_are_refused(size: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vt.empty(*size, device="cpu", **options)


def test_only_what_was_made_to_grow_grows(device: str) -> None:
    g = vt.empty(2, 3, device=device, max_rows=10)
    reshaped = vt.empty(2, 3, device=device, max_rows=10)
    reshaped.t_()
    for x in (vt.empty(2, 3, device=device), g[:1], g.detach(), g.T, copy.copy(g), reshaped):
        with pytest.raises(vt.VTensorError, match="grow in place"):
            x.append_(torch.ones(1, x.shape[1]))
        with pytest.raises(vt.VTensorError, match="grow in place"):
            x.resize_rows_(1)
    learning = vt.empty(2, 3, device=device, max_rows=10, requires_grad=True)
    with pytest.raises(vt.VTensorError, match="cannot require grad"):
        learning.append_(torch.ones(1, 3))


def test_too_little_memory_changes_nothing(device: str) -> None:
    pool, size = single(device, 4), page(device)
    g = vt.empty(0, size, dtype=torch.uint8, device=device, pool=pool, max_rows=100)
    g.append_(torch.ones(3, size, dtype=torch.uint8))
    with pytest.raises(vt.OutOfPagesError):
        g.append_(torch.ones(2, size, dtype=torch.uint8))
    assert g.shape == (3, size)
    assert pool.stats().free_page_groups + pool.stats().mapped_page_groups <= 4
    assert (g == 1).all()
    assert g.append_(torch.ones(1, size, dtype=torch.uint8)).shape == (4, size)
    del g
    close(pool)


def test_rows_that_fail_halfway_leave_zeros(device: str) -> None:
    class Breaks(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_:
                args[0].commit().plain().fill_(9)
                raise RuntimeError("halfway")
            return super().__torch_function__(func, types, args, kwargs or {})

    g = vt.empty(1, 3, device=device, max_rows=10)
    with pytest.raises(RuntimeError, match="halfway"):
        g.append_(torch.ones(2, 3).as_subclass(Breaks))
    assert g.shape == (1, 3)
    assert not g.resize_rows_(5).any()


def test_growing_goes_with_inference_mode(device: str) -> None:
    g = vt.empty(0, 3, device=device, max_rows=10)
    with torch.inference_mode():
        g.append_(torch.ones(2, 3))
        inside = vt.empty(0, 3, device=device, max_rows=10).append_(torch.ones(4, 3))
    g.append_(torch.ones(2, 3))
    assert g.sum() == 12
    assert inside.resize_rows_(2).sum() == 6


def test_copies_hold_the_rows_that_are_there(device: str) -> None:
    g = vt.empty(0, 3, device=device, max_rows=1 << 30)
    g.append_(torch.ones(2, 3))
    for copied in (copy.deepcopy(g[:]), g.clone(), pickle.loads(pickle.dumps(g[:]))):
        assert copied.shape == (2, 3)
        num_bytes = copied.untyped_storage().nbytes()
        assert num_bytes == 24
