"""Virtual tensors: created as torch creates tensors, committed where they are touched, and never a way to crash."""

import contextlib
import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import vtensor as vt
from tests.helpers.child import in_child
from tests.helpers.faults import BROKEN, fail, record
from vtensor import pools
from vtensor.allocator import graveyard
from vtensor.allocator.driver import Call, Driver, get_driver, registry

TIB = 1 << 40
ROW = 1 << 18  # elements of a row of `huge`: 1 MiB, whole page groups on the host


def page(device: str) -> int:
    """Bytes of a page group where nobody says otherwise."""
    return int(get_driver(device).default_page_group_bytes)


def huge(device: str = "cpu", **kwargs: Any) -> vt.VirtualTensor:
    """1 TiB: [1,048,576 rows, 1 MiB each]."""
    return vt.empty(1 << 20, ROW, device=device, **kwargs)


def small_pool(device: str, num_page_groups: int) -> vt.PagePool:
    return vt.PagePool(device, capacity_bytes=num_page_groups * page(device))


def is_plain(value: torch.Tensor) -> bool:
    return type(value) is torch.Tensor


def committed(tensor: vt.VirtualTensor) -> list[int]:
    """Which page groups of a tensor have memory."""
    return [int(place) for place in np.flatnonzero(tensor.residency())]


@pytest.fixture
def live_bytes() -> Callable[[], int]:
    """Memory of the host driver beyond what it held when the test began."""
    gc.collect()
    driver: Any = get_driver("cpu")
    before = driver.live_bytes
    return lambda: driver.live_bytes - before


# -- creation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [(), (0,), (3,), (3, 4), ((3, 4),), ([3, 4],), (torch.Size([3, 4]),), ((),), (2, 0, 5), (np.int64(3), 2)],
)
def test_sizes_as_torch_takes_them(size: tuple[Any, ...], device: str) -> None:
    x = vt.empty(*size, device=device)
    expected = torch.empty(*size) if size else torch.empty(())
    assert x.shape == expected.shape
    assert x.stride() == expected.stride()
    assert x.is_contiguous()
    assert x.storage_offset() == 0
    assert type(x) is vt.VirtualTensor
    assert x.device == torch.device(device)
    assert torch.equal(x.cpu(), torch.zeros(x.shape))


def test_a_numpy_integer_alone_is_a_size() -> None:
    assert vt.empty(np.int64(3), device="cpu").shape == (3,)


@pytest.mark.parametrize(
    ("size", "error"),
    [
        ((-1,), ValueError),
        ((3, -2), ValueError),
        ((2.0, 3), TypeError),
        (([2.5],), TypeError),
        (("12",), TypeError),
        ((None,), TypeError),
        ((1 << 63,), vt.ReservationError),
        (((1 << 64) + 4096,), vt.ReservationError),  # as 64 bits it would be 4096
        ((1 << 62, 1 << 62), vt.ReservationError),
        ((1 << 48,), vt.ReservationError),
    ],
)
def test_bad_sizes(size: tuple[Any, ...], error: type[Exception], device: str) -> None:
    with pytest.raises(error):
        vt.empty(*size, dtype=torch.uint8, device=device)


def test_a_size_that_cannot_be_reserved_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="TiB"):
        vt.empty(1 << 62, device="cpu")


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex128]
)
def test_dtypes(dtype: torch.dtype, device: str) -> None:
    x = vt.empty(3, 5, dtype=dtype, device=device)
    assert x.dtype == dtype
    x[1] = 1
    expected = torch.zeros(3, 5, dtype=dtype)
    expected[1] = 1
    assert torch.equal(x.cpu(), expected)


def test_the_default_dtype_is_torchs() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert vt.empty(1, device="cpu").dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert vt.empty(1, device="cpu").dtype == torch.float32


def test_the_default_device_is_torchs() -> None:
    assert vt.empty(1).device == torch.device("cpu")
    with torch.device("meta"), pytest.raises(ValueError, match="meta"):
        vt.empty(1)
    torch.set_default_device("meta")
    try:
        with pytest.raises(ValueError, match="meta"):
            vt.empty(1)
        with torch.device("cpu"):
            assert vt.empty(1).device == torch.device("cpu")
        assert vt.empty(1, device="cpu").device == torch.device("cpu")
    finally:
        torch.set_default_device(None)


@pytest.mark.gpu
def test_the_default_device_may_be_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    with torch.device("cuda"):
        assert vt.empty(1).device == torch.device("cuda", torch.cuda.current_device())
    assert vt.empty(1, device="cuda").device.index == torch.cuda.current_device()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"device": "meta"}, "meta"),
        ({"on_touch": "zero"}, r"on_touch='zero' must be one of"),
        ({"on_touch": None}, r"on_touch=None must be one of"),
    ],
)
def test_bad_options(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vt.empty(3, **{"device": "cpu", **kwargs})


def test_a_closed_pool_is_refused(device: str) -> None:
    pool = small_pool(device, 2)
    pool.close()
    with pytest.raises(vt.ClosedError):
        vt.empty(3, device=device, pool=pool)


@pytest.mark.gpu
def test_a_pool_of_another_device_is_refused() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    with pytest.raises(ValueError, match="pool of cpu cannot hold a tensor on cuda:0"):
        vt.empty(3, device="cuda:0", pool=vt.PagePool("cpu"))


def test_there_is_no_constructor() -> None:
    with pytest.raises(TypeError, match=r"vtensor\.empty"):
        vt.VirtualTensor(3)


@pytest.mark.parametrize("size", [(0,), (3, 0), (0, 1 << 50)])
def test_nothing_costs_no_driver_call(size: tuple[int, ...], device: str, driver: Driver) -> None:
    with record(driver) as calls:
        x = vt.empty(*size, device=device)
        x += 1
        repr(x), x.cpu(), x.clone(), x.commit()
        del x
    assert len(calls) == 0


@pytest.mark.parametrize("tebibytes", [1, 100])
def test_terabytes_cost_nothing_until_they_are_touched(tebibytes: int, device: str, driver: Driver) -> None:
    try:
        with record(driver) as calls:
            x = vt.empty(tebibytes * TIB, dtype=torch.uint8, device=device)
    except vt.ReservationError:
        assert tebibytes > 64
        pytest.skip("this system has no free range of addresses of 100 TiB (sandboxes have less than Linux)")
    assert calls.count(Call.RESERVE) == 1
    assert len(calls) == 1
    assert x.reserved_bytes == tebibytes * TIB
    assert x.resident_bytes == 0
    x[-1] = 7
    x[tebibytes * TIB // 2] = 8
    assert [int(x[place]) for place in (-1, -2, tebibytes * TIB // 2)] == [7, 0, 8]
    assert x.resident_bytes == 2 * page(device)


# -- touching -----------------------------------------------------------------------------------------------------


def test_reads_as_zeros(device: str) -> None:
    x = huge(device)
    assert x[17].sum().item() == 0
    assert not x[1 << 19, ::7].any()
    assert torch.equal(x[5:7, :3].cpu(), torch.zeros(2, 3))


WRITES: dict[str, tuple[Callable[[torch.Tensor], object], list[int]]] = {
    # by rows of one page group: what is done, and which rows have memory afterwards: those that were written
    "row": (lambda x: x[3].fill_(1), [3]),
    "element": (lambda x: x[3, 5].fill_(1), [3]),
    "assignment": (lambda x: x.__setitem__(3, 1.0), [3]),
    "slice": (lambda x: x[2:5].fill_(1), [2, 3, 4]),
    "steps": (lambda x: x[1:8:3].fill_(1), [1, 4, 7]),
    "column": (lambda x: x[:, 3].fill_(1), list(range(10))),
    "part of a column": (lambda x: x[4:6, 3].fill_(1), [4, 5]),
    "transposed": (lambda x: x.t()[:, 6:8].fill_(1), [6, 7]),
    "permuted": (lambda x: x.view(2, 5, -1).permute(1, 2, 0)[2].fill_(1), [2, 7]),
    "diagonal": (lambda x: x.diagonal()[2:4].fill_(1), [2, 3]),
    "across rows": (lambda x: x.view(-1)[x.shape[1] - 1 : x.shape[1] + 1].fill_(1), [0, 1]),
    "as_strided": (lambda x: x.as_strided((2, 3), (4 * x.shape[1], 1), x.shape[1]).fill_(1), [1, 5]),
    "unfold": (lambda x: x.unfold(0, 2, 4)[1].fill_(1), [4, 5]),
    "narrow": (lambda x: x.narrow(0, 8, 2).fill_(1), [8, 9]),
    "select": (lambda x: x.select(0, -1).fill_(1), [9]),
    "chunk": (lambda x: x.chunk(5)[4].fill_(1), [8, 9]),
    "split": (lambda x: x.split([3, 7])[0].fill_(1), [0, 1, 2]),
    "unsafe_split": (lambda x: x.unsafe_split(5)[1][0].fill_(1), [5]),
    "unbind": (lambda x: x.unbind()[6].fill_(1), [6]),
    "iteration": (lambda x: [row.fill_(1) for number, row in enumerate(x) if number == 2], [2]),
    "expand": (lambda x: x[4].expand(3, -1).sum(), []),
    "other dtype": (lambda x: x.view(torch.int32)[7].fill_(1), [7]),
    "as bytes": (lambda x: x.view(torch.uint8)[3, 9:10].fill_(1), [3]),
    "detached": (lambda x: x.detach()[5].fill_(1), [5]),
    "data": (lambda x: x.data[5].fill_(1), [5]),
    "in place": (lambda x: x[1].add_(1).mul_(3), [1]),
    "operator": (lambda x: x[2].__iadd__(1), [2]),
    "copy_": (lambda x: x[3].copy_(torch.ones(x.shape[1], device=x.device)), [3]),
    "copy within": (lambda x: x[3].copy_(x[8]), [3]),
    "out": (lambda x: torch.add(x[1], 1, out=x[9]), [9]),
    "out, two": (lambda x: torch.frexp(x[1, :4], out=(x[2, :4], x.view(torch.int32)[3, :4])), [2, 3]),
    "out, strided": (lambda x: torch.add(x[1, :4], 1, out=x[2, :8:2]), [2]),
    "list": (lambda x: torch._foreach_add_([x[2], x[4]], 1.0), [2, 4]),
    "cat": (lambda x: torch.cat([x[0:1], x[5:6]]), []),
    "cat, out": (lambda x: torch.cat([x[0:1], x[5:6]], out=x[2:4]), [2, 3]),
    "stack": (lambda x: torch.stack((x[3], x[6])), []),
    "keyword": (lambda x: torch.where(condition=x[1] > 0, input=x[2], other=x[3]), []),
    "aten by keyword": (lambda x: torch.ops.aten.add.Tensor(self=x[1], other=x[2]), []),
    "random": (lambda x: x[7].normal_(), [7]),
    "in-place view": (lambda x: x[3].unsqueeze_(0).t_().fill_(1), [3]),
    "masked": (lambda x: x[4].masked_fill_(torch.ones(x.shape[1], dtype=torch.bool, device=x.device), 2.0), [4]),
    "index": (lambda x: x[4:6][torch.tensor([0, 1], device=x.device)], []),
    "index_put": (lambda x: x[4:6].__setitem__((torch.tensor([1], device=x.device), 0), 3.0), [5]),
    "gather": (lambda x: x[4:6].gather(0, torch.zeros(1, 3, dtype=torch.int64, device=x.device)), []),
    "scatter": (lambda x: x[6:7].scatter_(1, torch.zeros(1, 3, dtype=torch.int64, device=x.device), 1.0), [6]),
    "embedding": (lambda x: torch.nn.functional.embedding(torch.tensor([1], device=x.device), x[:2]), []),
    "linear": (lambda x: torch.nn.functional.linear(x[1, :8], x[2:4, :8]), []),
    "shape alone": (lambda x: (x.shape, x.t().size(), x.view(-1).stride(), x.data_ptr()), []),
    "like": (lambda x: (torch.empty_like(x[3]), torch.zeros_like(x[4]), x[5].new_zeros(3), torch.rand_like(x[2])), []),
    "questions": (lambda x: (x.is_contiguous(), x.is_pinned(), x.numel(), x.is_floating_point(), len(x)), []),
}


@pytest.mark.parametrize("name", WRITES)
def test_exactly_what_is_touched_is_committed(name: str, device: str) -> None:
    operation, rows = WRITES[name]
    x = vt.empty(10, page(device) // 4, device=device)
    operation(x)
    assert committed(x) == rows
    assert x.resident_bytes == len(rows) * page(device)


def test_views_touch_nothing(device: str) -> None:
    x = huge(device)
    views = (x[5], x[:, 3:], x.t(), x.view(-1), x.view(torch.uint8), x.unsqueeze(0).expand(3, -1, -1), x.diagonal())
    assert all(type(view) is vt.VirtualTensor for view in (*views, x.detach(), x.data, *x.chunk(4), x.T, x.mT))
    x.detach().unsqueeze_(0).transpose_(1, 2).squeeze_(0)
    assert x.resident_bytes == 0


def test_results_are_plain(device: str) -> None:
    x = huge(device)[:2, :4]
    results = (x + 1, x @ x.t(), x.sum(), x.clone(), x.to(torch.float64), x.t().contiguous(), x.t().reshape(-1))
    assert all(is_plain(result) for result in results)
    assert all(is_plain(result) for result in (*torch.max(x, 1), *torch._foreach_add([x], 1)))
    assert is_plain(1 - x)
    assert is_plain(torch.ones(2, 4, device=device) + x)
    assert is_plain(torch.cat([x, x]))


def test_what_was_written_stays(device: str) -> None:
    x = huge(device)
    x[::100_000, 0] = torch.arange(11, device=device, dtype=torch.float32)
    assert x[::100_000, 0].tolist() == list(range(11))
    assert x[::100_000, 1].tolist() == [0] * 11
    assert x[99_999:100_002, 0].tolist() == [0, 1, 0]
    address = x.data_ptr()
    x[:2, :] = 3
    assert x.data_ptr() == address
    assert x[:2].unique().tolist() == [3]


def test_in_place_operations_return_the_tensor_itself() -> None:
    x = vt.empty(3, device="cpu")
    assert x.add_(1) is x
    assert torch.add(x, 1, out=x) is x
    y, z = vt.empty(3, device="cpu"), vt.empty(3, dtype=torch.int32, device="cpu")
    result = torch.frexp(x, out=(y, z))
    assert result[0] is y
    assert result[1] is z


@pytest.mark.parametrize(
    ("out", "result"),
    [
        (lambda x: x[0, :10], 1 << 17),  # larger: torch would grow it, over what has no memory
        (lambda x: x[0, :0], 1 << 17),
        (lambda x: x[:10, 0], 20),
        (lambda x: x[0, :10], 5),
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_is_never_resized(out: Callable[..., torch.Tensor], result: int, device: str) -> None:
    x = huge(device)
    target = out(x)
    shape = target.shape
    with pytest.raises(vt.VTensorError, match="never resized"):
        torch.add(torch.ones(result, device=device), 1, out=target)
    assert target.shape == shape
    assert x.resident_bytes <= 10 * page(device)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_two_outs_of_which_one_fits() -> None:
    x, indices = huge(), vt.empty(1 << 40, dtype=torch.int64, device="cpu")
    with pytest.raises(vt.VTensorError, match="never resized"):
        torch.max(torch.ones(1 << 16, 3), 1, out=(x[0, :4], indices[:4]))
    torch.max(torch.ones(4, 3), 1, out=(x[0, :4], indices[:4]))
    assert x[0, :5].tolist() == [1, 1, 1, 1, 0]


def test_an_in_place_view_is_looked_at_anew() -> None:
    x = huge()
    y = x[0, :10]
    y.add_(0)
    assert committed(x[0]) == [0]
    y.as_strided_((10,), (1,), 500 * ROW)
    assert y.sum() == 0
    y.add_(0)
    assert committed(x[500]) == [0]


# -- on_touch="raise" ---------------------------------------------------------------------------------------------


def test_raise_names_shape_bytes_and_page_groups(device: str) -> None:
    x = vt.empty(8, page(device) // 4, device=device, on_touch="raise")
    x.commit(2)
    first = 2 * page(device)
    message = rf"shape \(3, {page(device) // 4}\) touches 2 page groups.*bytes {first:,}\.\.{first + page(device):,} "
    for operation in (lambda: x[1:4].sum(), lambda: x[1:4].fill_(1), lambda: torch.ones_like(x[1:4]).add_(x[1:4])):
        with pytest.raises(vt.UnmappedAccessError, match=message) as caught:
            operation()
        assert isinstance(caught.value, IndexError)
        assert hex(x.data_ptr() + first) in str(caught.value)
    assert committed(x) == [0, 1]
    x[:2] = 4
    assert x[:2].unique().tolist() == [4]


def test_raise_changes_nothing_and_later_works(device: str) -> None:
    x = vt.empty(4, page(device) // 4, device=device, on_touch="raise")
    view, target = x[1], torch.ones(page(device) // 4, device=device)
    with pytest.raises(vt.UnmappedAccessError):
        torch.add(view, 1, out=target)
    assert target.unique().tolist() == [1]
    x.commit((1,))
    torch.add(view, 1, out=target)
    assert target.unique().tolist() == [1]
    view.fill_(5)
    assert x[1, 0].item() == 5


@pytest.mark.parametrize(
    "leave",
    [
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: x.item() if x.numel() == 1 else x[0].item(),
        lambda x: np.asarray(x),
        lambda x: np.add(x, 1),
        lambda x: x.__dlpack__(),
        lambda x: torch.from_dlpack(x),
        lambda x: np.from_dlpack(x),
        lambda x: copy.deepcopy(x[:2]),
        lambda x: pickle.dumps(x[:2]),
        lambda x: torch.save(x[:2], io.BytesIO()),
        lambda x: bool(x[0]),
        lambda x: float(x[0]),
        lambda x: int(x[0]),
        lambda x: f"{x[0]:.3f}",
        lambda x: torch.tensor([x[0], x[1]]),
        lambda x: 1.0 in x,
    ],
)
def test_raise_holds_at_every_exit(leave: Callable[[torch.Tensor], object]) -> None:
    x = vt.empty(4, device="cpu", on_touch="raise")
    with pytest.raises((vt.UnmappedAccessError, TypeError), match="touches 1 page groups"):
        leave(x)
    assert x.resident_bytes == 0
    x.commit()
    leave(x)


# -- commit and residency -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (None, range(6)),
        (0, []),
        (1, [0]),
        (4, range(4)),
        (6, range(6)),
        (np.int64(2), [0, 1]),
        (slice(2, 4), [2, 3]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(-2, None), [4, 5]),
        (slice(3, 3), []),
        (slice(0, 100), range(6)),
        (..., range(6)),
        ((3,), [3]),
        ((-1,), [5]),
        ((slice(1, 3), 0), [1, 2]),
        ((slice(1, 3), slice(5, 5)), []),
        ((..., 7), range(6)),
        ((), range(6)),
    ],
)
def test_commit(rows: Any, expected: Any, device: str) -> None:
    x = vt.empty(6, page(device) // 4, device=device)
    assert x.commit(rows) is x
    assert committed(x) == list(expected)
    x.commit(rows)  # again: nothing new
    assert committed(x) == list(expected)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (-1, ValueError),
        (7, ValueError),
        (True, ValueError),
        (1.5, ValueError),
        ("all", ValueError),
        ([1, 2], ValueError),
        ((1, [2]), ValueError),
        (np.array([1, 2]), ValueError),
        (torch.tensor([1]), ValueError),
        (torch.tensor(1), ValueError),
        ((None, 1), ValueError),
        ((6,), IndexError),
        ((-7,), IndexError),
        ((0, 0, 0), IndexError),
    ],
)
def test_commit_of_what_is_no_basic_index(rows: Any, error: type[Exception], device: str) -> None:
    x = vt.empty(6, page(device) // 4, device=device)
    with pytest.raises(error):
        x.commit(rows)
    assert x.resident_bytes == 0


def test_commit_keeps_what_is_there(device: str) -> None:
    x = vt.empty(4, page(device) // 4, device=device)
    x[1] = 7
    x.commit()
    assert x[:, 0].tolist() == [0, 7, 0, 0]


def test_commit_of_a_leaf_and_of_a_scalar(device: str) -> None:
    assert vt.empty(3, device=device, requires_grad=True).commit(2).resident_bytes == page(device)
    assert vt.empty((), device=device).commit().resident_bytes == page(device)
    with pytest.raises(ValueError, match="number of rows"):
        vt.empty((), device=device).commit(1)


def test_residency_of_views(device: str) -> None:
    size = page(device)
    x = vt.empty(6, size // 4, device=device)
    x[1:4] = 1
    assert x.residency().tolist() == [False, True, True, True, False, False]
    assert (x.resident_bytes, x.reserved_bytes) == (3 * size, 6 * size)
    assert x[::2].residency().tolist() == [False, True, False]
    assert (x[::2].resident_bytes, x[::2].reserved_bytes) == (size, 3 * size)
    assert x.t().residency().tolist() == x.residency().tolist()
    assert x[5].resident_bytes == 0
    assert (x[:0].resident_bytes, x[:0].reserved_bytes) == (0, 0)
    assert x[3, 5].reserved_bytes == size
    odd = vt.empty(3, size // 4 + 1, device=device)
    assert odd.reserved_bytes == 4 * size
    assert odd[1].reserved_bytes == 2 * size


# -- out of pages ---------------------------------------------------------------------------------------------------


def test_out_of_pages_is_torchs_own_error_and_changes_nothing(device: str) -> None:
    pool = small_pool(device, 4)
    x = vt.empty(10, page(device) // 4, device=device, pool=pool)
    x[:3] = 5
    for operation in (lambda: x.mul_(2), lambda: x.fill_(1), lambda: x.commit(), lambda: x[2:5].add_(1)):
        with pytest.raises(torch.OutOfMemoryError, match=r"needs \d+ more page groups") as caught:
            operation()
        assert isinstance(caught.value, vt.OutOfPagesError)
        assert committed(x) == [0, 1, 2]
        assert x[:3].unique().tolist() == [5]
        assert (x[:, 0] + 1).tolist() == [6, 6, 6, *[1] * 7]
    x[9] = 1  # the last page group
    assert pool.stats().free_page_groups == 0
    assert pool.stats().mapped_page_groups == 4


def test_the_message_says_how_many_are_missing(device: str) -> None:
    x = vt.empty(10, page(device) // 4, device=device, pool=small_pool(device, 4))
    x[:2] = 1
    with pytest.raises(vt.OutOfPagesError, match=r"needs 6 more page groups .* 2 are mapped"):
        x.commit()


def test_huge_reads_end_in_a_typed_error() -> None:
    x = vt.empty(TIB // ROW, 2 * ROW, dtype=torch.uint8, device="cpu")
    x[3] = 1
    for operation in (
        x.sum,
        x.tolist,
        x.clone,
        x.unique,
        lambda: pickle.dumps(x[:-1]),
        lambda: x.expand(3, -1, -1).max(),
    ):
        with pytest.raises(
            vt.UnmappedAccessError, match=r"would read 2 TiB of zeros.* limit is 1 TiB\. Read a part of it"
        ):
            operation()
    with pytest.raises(vt.OutOfPagesError):
        x.numpy()  # it may be written to
    assert x[torch.tensor([2, 3])].sum(1).tolist() == [0, 2 * ROW]
    assert x[::1024, :9].sum() == 0
    assert x[0, :1].expand(4 * TIB).shape == (4 * TIB,)  # not much is there to be read
    assert x[0, :1].expand(1 << 20).sum() == 0
    assert x.resident_bytes == 2 * ROW


def test_a_pool_serves_several_tensors(device: str) -> None:
    pool = small_pool(device, 4)
    x, y = (vt.empty(4, page(device) // 4, device=device, pool=pool) for _ in range(2))
    x[:3], y[:1] = 1, 2
    with pytest.raises(vt.OutOfPagesError):
        y.commit()
    assert pool.stats().mapped_page_groups == 4
    del x
    gc.collect()
    y.commit()  # waits for x's memory, on a GPU
    assert y[:, 0].tolist() == [2, 0, 0, 0]  # and none of x's ones
    assert pool.stats().total_page_groups == 4


class _Waiting:
    """An event that passes once somebody waits for it."""

    is_passed = False

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        self.is_passed = True


def test_a_shortage_waits_for_dying_memory(device: str) -> None:
    pool = small_pool(device, 2)
    dying, x = (vt.empty(2, page(device) // 4, device=device, pool=pool) for _ in range(2))
    space = dying.commit()._region.space  # type: ignore[union-attr]
    if device != "cpu":
        torch.cuda.synchronize()  # of the zeroing: an event that only says that it waits is no event
    graveyard.bury([_Waiting()], lambda: space.decommit(np.array([[0, 2]], np.int64), forget_content=False))
    x.commit()
    assert (x.resident_bytes, dying.resident_bytes) == (2 * page(device), 0)


def test_a_pool_that_is_closed_waits_for_dying_memory(device: str) -> None:
    pool = small_pool(device, 2)
    dying = vt.empty(2, page(device) // 4, device=device, pool=pool).commit()
    space = dying._region.space  # type: ignore[union-attr]
    if device != "cpu":
        torch.cuda.synchronize()
    graveyard.bury([_Waiting()], space.close)
    pool.close()
    assert pool.closed


@pytest.mark.gpu
def test_a_pool_may_be_closed_under_a_running_kernel() -> None:
    pool = small_pool("cuda:0", 2)
    x = vt.empty(2, page("cuda:0") // 4, device="cuda:0", pool=pool)
    torch.cuda._sleep(200_000_000)
    x.fill_(1)
    with pytest.raises(vt.VTensorError, match="still has 2 mapped"):
        pool.close()
    del x
    gc.collect()
    pool.close()
    torch.cuda.synchronize()


def test_recycled_memory_reads_as_zero(device: str) -> None:
    pool = small_pool(device, 2)
    for _ in range(4):
        x = vt.empty(2, page(device) // 4, device=device, pool=pool)
        assert not x.any()
        x.fill_(float("nan"))
        del x
    assert pool.stats().total_page_groups == 2


@pytest.mark.parametrize("call", [Call.CREATE, Call.MAP, Call.SET_ACCESS])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failing_driver_changes_nothing(call: Call, nth: int, device: str, driver: Driver) -> None:
    pool = small_pool(device, 8)
    x = vt.empty(6, page(device) // 4, device=device, pool=pool)
    x[1] = x[3] = 7  # so that the rest is three runs
    before = x.residency()
    with fail(driver, call, nth, BROKEN), pytest.raises(vt.DriverError, match="nothing was changed"):
        x.add_(1)
    assert (x.residency() == before).all()
    assert x[1::2][:2].unique().tolist() == [7]
    pool.check_integrity()
    x.add_(1)
    assert x[:, 0].tolist() == [1, 8, 1, 8, 1, 1]


# -- display --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("show", [repr, str, lambda x: f"{x}", lambda x: f"{x!r:>20}", lambda x: f"{[x]}"])
def test_display_never_touches(show: Callable[[object], str], device: str) -> None:
    x = huge(device)
    x[5, 0] = 1
    before = x.resident_bytes
    for view in (x, x[5], x[6], x[7, 0], x.t(), x[:, :1000], x[:0], x.view(torch.uint8), x.detach()):
        text = show(view)
        assert "VirtualTensor(shape=" in text
        assert "dtype=torch." in text
    assert x.resident_bytes == before
    assert "reserved=1 TiB, resident=" in show(x)


def test_print_options_make_no_difference() -> None:
    x = huge()
    torch.set_printoptions(profile="full")
    try:
        assert len(repr(x)) < 200
    finally:
        torch.set_printoptions(profile="default")
    assert x.resident_bytes == 0


def test_display_shows_values_where_all_of_them_have_memory(device: str) -> None:
    x = vt.empty(3, device=device)
    assert "tensor(" not in repr(x)
    x.fill_(2)
    assert "tensor([2., 2., 2.]" in repr(x)
    assert "2." in repr(vt.empty(2, device=device, requires_grad=True).detach().fill_(2))


def test_a_format_asks_for_the_value() -> None:
    x = huge()
    x[0, 0] = 1.2345
    assert f"{x[0, 0]:.2f}" == "1.23"
    assert f"{x[9, 9]:5.1f}" == "  0.0"
    with pytest.raises(TypeError):
        f"{x[0]:.2f}"


def test_display_after_the_memory_is_gone() -> None:
    x = vt.empty(3, device="cpu")
    x.fill_(1)
    x.data = torch.ones(2, 2)
    assert "shape=(2, 2)" in repr(x)


# -- exits to Python and other libraries ----------------------------------------------------------------------------


def test_iteration_item_and_truth(device: str) -> None:
    x = vt.empty(3, 2, device=device)
    x[1] = 5
    assert [row.tolist() for row in x] == [[0, 0], [5, 5], [0, 0]]
    assert x[1, 0].item() == 5
    assert bool(x[1, 1])
    assert not bool(x[0, 0])
    assert 5.0 in x
    assert float(x[1, 0]) == 5.0
    assert int(x[1, 0]) == 5
    assert complex(x[1, 0]) == 5
    assert [10, 11, 12][vt.empty((), dtype=torch.int64, device=device)] == 10
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(x)


def test_iteration_over_a_million_rows_commits_none() -> None:
    x = huge()
    rows = iter(x[:20_000])
    next(rows).fill_(1)
    assert sum(type(row) is vt.VirtualTensor for row in rows) == 19_999
    assert x.resident_bytes == ROW * 4


def test_numpy_shares_the_memory() -> None:
    x = huge()
    array = x[3, :4].numpy()
    array[:] = [1, 2, 3, 4]
    assert x[3, :5].tolist() == [1, 2, 3, 4, 0]
    assert np.asarray(x[3, :4]).sum() == 10
    assert np.array(x[3, :4], dtype=np.int32).tolist() == [1, 2, 3, 4]
    assert np.shares_memory(np.asarray(x[3, :2]), array)
    assert x[7].numpy().sum() == 0
    leaf = vt.empty(3, device="cpu", requires_grad=True)
    with pytest.raises(RuntimeError, match="requires grad"):
        leaf.numpy()
    assert leaf.numpy(force=True).tolist() == [0, 0, 0]


def test_dlpack_shares_the_memory(device: str) -> None:
    x = huge(device)
    y = torch.from_dlpack(x[3, :4])
    assert is_plain(y)
    y.fill_(6)
    assert x[3, :5].tolist() == [6, 6, 6, 6, 0]
    assert x[3].__dlpack_device__()[1] == (0 if device == "cpu" else torch.device(device).index)


def test_the_dlpack_exchange_table_is_hidden() -> None:
    # Consumers that find it read the address without asking __dlpack__.
    assert not hasattr(vt.VirtualTensor, "__dlpack_c_exchange_api__")
    assert not hasattr(vt.empty(1, device="cpu"), "__dlpack_c_exchange_api__")


def test_the_cuda_array_interface(device: str) -> None:
    x = huge(device)
    if device == "cpu":
        assert not hasattr(x, "__cuda_array_interface__")
        assert x.resident_bytes == 0
    else:
        assert x[3, :4].__cuda_array_interface__["data"][0] == x[3].data_ptr()
        assert committed(x[3]) == [0]


COPIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": lambda x: torch.load(saved(x)),
    "torch.save, old format": lambda x: torch.load(saved(x, _use_new_zipfile_serialization=False)),
    "nested": lambda x: copy.deepcopy({"a": [x]})["a"][0],
    "clone": lambda x: x.clone(),
    "torch.tensor": lambda x: torch.tensor(x.detach()),
    "new_tensor": lambda x: x.new_tensor(x.detach()),
}


def saved(x: torch.Tensor, **kwargs: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(x, file, **kwargs)
    assert len(file.getvalue()) < 10_000
    file.seek(0)
    return file


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_small_view_copies_the_view(name: str, device: str) -> None:
    x = huge(device)
    x[3, :4] = torch.arange(4, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.tensor(tensor) is not what torch recommends
        y = COPIES[name](x[3, 1:4])
    assert is_plain(y)
    assert y.untyped_storage().nbytes() < 1000
    assert y.tolist() == [1, 2, 3]
    assert y.device == x.device
    y.fill_(0)
    assert x[3, :4].tolist() == [0, 1, 2, 3]
    assert x.resident_bytes == page(device)


def test_copies_of_strided_views() -> None:
    x = vt.empty(4, 4, device="cpu")
    x.copy_(torch.arange(16).view(4, 4))
    for copied in (copy.deepcopy(x.t()[1:]), pickle.loads(pickle.dumps(x.t()[1:]))):
        assert torch.equal(copied, torch.arange(16.0).view(4, 4).t()[1:])


def test_copies_keep_what_torch_keeps() -> None:
    x = vt.empty(3, device="cpu", requires_grad=True)
    (x * 2).sum().backward()
    copied = copy.deepcopy([x, x])
    assert copied[0] is copied[1]
    assert copied[0].requires_grad
    assert copied[0].grad.tolist() == [2, 2, 2]
    assert copied[0].grad is not x.grad
    assert pickle.loads(pickle.dumps(x)).requires_grad


def test_a_shallow_copy_shares_the_memory() -> None:
    x = huge()
    y = copy.copy(x)
    assert y is not x
    y[3] = 1
    assert x[3, 0].item() == 1
    assert copy.copy(vt.empty(1, device="cpu", requires_grad=True)).requires_grad


def test_torch_tensor_of_elements() -> None:
    x = huge()
    x[5, 5] = 2
    assert torch.tensor([x[5, 5], x[1000, 0]]).tolist() == [2, 0]
    numbers = vt.empty(1 << 30, dtype=torch.int64, device="cpu")
    assert torch.tensor([numbers[7], numbers[1 << 29]]).tolist() == [0, 0]
    flags = vt.empty(1 << 30, dtype=torch.bool, device="cpu")
    assert torch.tensor([flags[7], flags[1 << 29]]).tolist() == [False, False]


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.share_memory_(),
        lambda x: x.resize_(5),
        lambda x: x.resize_(0),
        lambda x: x.resize_as_(torch.ones(3)),
        lambda x: x.set_(torch.ones(3)),
        lambda x: x.set_(),
        lambda x: torch.empty(0).set_(x),
    ],
)
def test_refused_operations_leave_the_tensor_as_it_was(operation: Callable[[Any], object]) -> None:
    x = vt.empty(4, device="cpu")
    x.fill_(3)
    address = x.data_ptr()
    with pytest.raises(vt.VTensorError, match="virtual tensor"):
        operation(x)
    assert (x.shape, x.data_ptr(), x.tolist()) == ((4,), address, [3, 3, 3, 3])


# -- autograd, modules, inference -----------------------------------------------------------------------------------


def test_autograd_through_a_leaf(device: str) -> None:
    x = vt.empty(4, 3, device=device, requires_grad=True)
    assert x.requires_grad
    assert x.is_leaf
    assert x.resident_bytes == 0
    with torch.no_grad():
        x.copy_(torch.arange(12.0).view(4, 3))
    loss = (x[1:3] ** 2).sum() + (x.t() @ x).trace()
    loss.backward()
    values = torch.arange(12.0).view(4, 3)
    expected = 2 * values
    expected[1:3] += 2 * values[1:3]
    assert is_plain(x.grad)
    assert torch.equal(x.grad.cpu(), expected)
    assert torch.equal(torch.autograd.grad((x * x).sum(), x)[0].cpu(), 2 * values)
    with pytest.raises(RuntimeError, match="leaf"):
        x.add_(1)


def test_requires_grad_is_for_floating_point() -> None:
    with pytest.raises(RuntimeError, match="floating point"):
        vt.empty(3, dtype=torch.int64, device="cpu", requires_grad=True)


def test_saved_tensors_are_virtual_and_counted() -> None:
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value)
            return value * value

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (value,) = ctx.saved_tensors
            seen.append(type(value))
            return 2 * value * grad

    x = vt.empty(3, device="cpu", requires_grad=True)
    Square.apply(x).sum().backward()
    assert seen == [vt.VirtualTensor]
    assert x.grad.tolist() == [0, 0, 0]
    y = vt.empty(3, device="cpu", requires_grad=True)
    loss = (y * y).sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_matmul_and_attention(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    plain = torch.randn(3, 2, 16, 64, dtype=dtype, device=device)
    cache = vt.empty(3, 1 << 30, 64, dtype=dtype, device=device)  # 3 heads, a billion tokens
    cache[:, :16] = plain[:, 0]
    q, k, v = plain[:, 1][None], cache[:, :16][None], cache[:, :16][None]
    attention = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attention(q, k, v), attention(q, k.clone(), v.clone()))
    assert is_plain(attention(q, k, v))
    assert torch.equal(plain[0, 1] @ cache[0, :16].t(), plain[0, 1] @ plain[0, 0].t())
    assert torch.equal(torch.bmm(cache[:, :16], plain[:, 1].mT), torch.bmm(plain[:, 0], plain[:, 1].mT))


def test_indexing_agrees_with_torch(device: str) -> None:
    torch.manual_seed(0)
    plain = torch.randn(20, 5, device=device)
    x = vt.empty(20, 5, device=device)
    x.copy_(plain)
    index = torch.tensor([3, 0, 19, 3], device=device)
    assert torch.equal(x[index], plain[index])
    assert torch.equal(x[plain > 0], plain[plain > 0])
    assert torch.equal(x.gather(0, index[:, None]), plain.gather(0, index[:, None]))
    assert torch.equal(torch.nn.functional.embedding(index, x), plain[index])
    assert torch.equal(x.index_select(1, index[1:2]), plain.index_select(1, index[1:2]))
    x[index[:3], 2] = plain[index[:3], 2] = 9.0
    x.index_put_((index,), torch.ones(4, 5, device=device), accumulate=True)
    plain.index_put_((index,), torch.ones(4, 5, device=device), accumulate=True)
    assert torch.equal(x.plain(), plain)
    assert torch.equal(torch.sort(x, 0).values, torch.sort(plain, 0).values)


def test_complex_views() -> None:
    x = vt.empty(1 << 30, dtype=torch.complex64, device="cpu")
    x[:2] = 1 + 2j
    conjugate = x[:2].conj()
    assert type(conjugate) is vt.VirtualTensor
    assert conjugate.tolist() == [1 - 2j] * 2
    assert conjugate.imag.tolist() == [-2, -2]
    assert conjugate.resolve_conj().tolist() == [1 - 2j] * 2
    assert x[:2].real.tolist() == [1, 1]
    assert torch.view_as_real(x)[1].tolist() == [1, 2]
    torch.add(torch.ones(2, dtype=torch.complex64), 1j, out=x[4:6].conj())
    assert x[4:6].tolist() == [1 - 1j] * 2
    assert x.resident_bytes == page("cpu")


INFERENCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # Inference mode hands these to __torch_dispatch__ as they are; some view, some read and copy.
    "to": lambda x: x[:3].t().to(torch.float64),
    "float": lambda x: x[:3].float(),
    "double": lambda x: x[:3].double(),
    "reshape": lambda x: x[:3].t().reshape(-1),
    "contiguous": lambda x: x[:3].t().contiguous(),
    "flatten": lambda x: x[:3].t().flatten(),
    "matmul": lambda x: x[:3, :8] @ torch.ones(8, 2),
    "linear": lambda x: torch.nn.functional.linear(x[:3, :8], x[5:7, :8]),
    "view_as": lambda x: torch.ones(4, 4).view_as(x[:4, :4]) - 1,
    "expand_as": lambda x: torch.ones(1).expand_as(x[0, :4]) - 1,
    "type_as": lambda x: torch.zeros(3, dtype=torch.int32).type_as(x),
    "chunk": lambda x: x[:4].chunk(2)[1],
    "einsum": lambda x: torch.einsum("ij,kj->ik", x[:2, :4], x[:3, :4]),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x[:4, :8].view(1, 1, 4, 8)] * 3),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_inference_mode(name: str) -> None:
    def body() -> object:
        torch.set_num_threads(1)
        with torch.inference_mode():
            for x in (huge(), outside):
                result = INFERENCE[name](x)
                assert result.sum().item() == 0
                if isinstance(result, vt.VirtualTensor):
                    assert result.data_ptr() >= x.data_ptr()
                    assert result.reserved_bytes <= 1 << 24
        return "done"

    with torch.inference_mode(False):
        outside: Any = None

    def with_outside() -> object:
        nonlocal outside
        outside = huge()
        return body()

    assert in_child(with_outside) == (0, "done")


def test_made_in_inference_mode(device: str) -> None:
    with torch.inference_mode():
        x = huge(device)
        x[3].add_(1)
        assert x[3].t().reshape(2, -1).sum().item() == ROW
        assert x.resident_bytes == max(ROW * 4, page(device))
    assert x[3, 0].item() == 1


def test_modules(device: str) -> None:
    table = torch.nn.Embedding(100, 10, device="meta")
    table.weight = torch.nn.Parameter(vt.empty(100, 10, device=device))
    assert isinstance(table.weight, torch.nn.Parameter)
    assert isinstance(table.weight, vt.VirtualTensor)
    table.register_buffer("mask", vt.empty(1 << 40, dtype=torch.bool, device=device))
    repr(table), table.train(), table.state_dict(), list(table.parameters())
    assert table.mask.resident_bytes == table.weight.resident_bytes == 0
    del table.mask
    table.load_state_dict({"weight": torch.ones(100, 10)})
    index = torch.tensor([3, 5], device=device)
    table(index).sum().backward()
    torch.optim.SGD(table.parameters(), lr=0.5).step()
    assert table(index).unique().tolist() == [0.5]
    assert table(index - 1).unique().tolist() == [1.0]
    twin = copy.deepcopy(table)
    assert isinstance(twin.weight, torch.nn.Parameter)
    assert [name for name, _ in twin.named_parameters()] == ["weight"]
    again = torch.load(saved_module(table), weights_only=False)
    assert isinstance(again.weight, torch.nn.Parameter)
    table.half()  # sets .data to what is no longer virtual memory
    assert table.weight.dtype == torch.float16
    assert table(index).unique().tolist() == [0.5]


def saved_module(module: torch.nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {}])
def test_optimizers(options: dict[str, bool]) -> None:
    x = torch.nn.Parameter(vt.empty(8, 8, device="cpu"))
    optimizer = torch.optim.AdamW([x], lr=0.1, **options)
    (x + 1).sum().backward()
    optimizer.step()
    assert x.detach().unique().tolist() == pytest.approx([-0.1], abs=1e-6)


def test_data_moves_the_tensor() -> None:
    x, y = huge(), vt.empty(4, device="cpu")
    y.fill_(1)
    y.data = x[5:10]
    assert y.sum().item() == 0
    y.fill_(2)
    assert committed(x[5:10]) == list(range(5 * ROW * 4 // page("cpu")))
    y.data = torch.full((3,), 4.0)
    assert (y + 1).tolist() == [5, 5, 5]
    assert y.reserved_bytes == 0


def test_a_plain_tensor_cast_to_the_class_stays_usable() -> None:
    x = torch.ones(3).as_subclass(vt.VirtualTensor)
    assert x.add_(1).tolist() == [2, 2, 2]
    assert (x.resident_bytes, x.reserved_bytes) == (0, 0)
    assert "shape=(3,)" in repr(x)
    x.commit()


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: torch.vmap(lambda row: row.sum())(x[:4]),
        lambda x: torch.vmap(lambda row: (row * x[5]).sum())(torch.ones(3, 1)),
        lambda x: torch.func.grad(lambda row: (row * row).sum())(x[:4]),
        lambda x: torch.func.jvp(lambda row: (row * row).sum(), (torch.ones(2, ROW),), (x[:2],))[1],
        lambda x: torch.compile(lambda row: row[:2] + 0, backend="eager")(x),
        lambda x: torch.utils.checkpoint.checkpoint(lambda row: row * 2, x[:2], use_reentrant=False),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_transforms(transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert transform(huge()).sum().item() == 0


# -- threads --------------------------------------------------------------------------------------------------------


def test_threads_touch_different_rows() -> None:
    x = huge()
    num_rows = 200

    def write(row: int) -> None:
        x[row * 1000].fill_(row + 1)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(num_rows)))
    assert x[: num_rows * 1000 : 1000, 5].tolist() == list(range(1, num_rows + 1))
    assert x.resident_bytes == num_rows * ROW * 4


def test_threads_touch_the_same_page_groups() -> None:
    x = vt.empty(64, 1024, device="cpu", pool=vt.PagePool("cpu", page_group_bytes=4096))
    barrier = threading.Barrier(8)

    def write(part: int) -> None:
        barrier.wait()
        x[:, part * 128 : (part + 1) * 128].add_(1)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    assert x.unique().tolist() == [1]


def test_a_dataset_in_worker_threads() -> None:
    class Rows(torch.utils.data.Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.rows = huge()
            self.rows[:64, 0] = torch.arange(64)

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.rows[index, :8]

    rows = Rows()
    batches = torch.utils.data.DataLoader(rows, batch_size=16)
    with ThreadPoolExecutor(4) as threads:
        sums = list(threads.map(lambda _: [batch[:, 0].sum().item() for batch in batches], range(4)))
    assert sums == [[120, 376, 632, 888]] * 4
    assert is_plain(next(iter(batches)))


# -- lifetime -------------------------------------------------------------------------------------------------------

KEEPERS: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x[1],
    "view of a view": lambda x: x.t()[:, 1:][2],
    "detached": lambda x: x.detach(),
    "plain": lambda x: x.plain(),
    "plain view": lambda x: x.plain()[1],
    "array": lambda x: x.numpy(),
    "array of a view": lambda x: np.asarray(x[1, 1:])[1:],
    "dlpack": torch.from_dlpack,
    "shallow copy": copy.copy,
    "storage": lambda x: x.untyped_storage(),
    "parameter": lambda x: torch.nn.Parameter(x),
    "other dtype": lambda x: x.view(torch.int32),
    "iterator": iter,
}


@pytest.mark.parametrize("name", KEEPERS)
@pytest.mark.parametrize("mode", ["plain", "no_grad", "inference"])
def test_whatever_shows_the_memory_keeps_it(name: str, mode: str, live_bytes: Callable[[], int]) -> None:
    context = {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with context():
        x = vt.empty(4, page("cpu") // 4, device="cpu")
        x.fill_(3)
        kept = KEEPERS[name](x)
    del x
    gc.collect()
    assert live_bytes() == 4 * page("cpu")
    if isinstance(kept, torch.Tensor | np.ndarray):
        assert (np.asarray(kept if isinstance(kept, np.ndarray) else kept.detach().view(torch.float32)) == 3).all()
    del kept
    gc.collect()
    assert live_bytes() == 0


def test_memory_goes_back_when_the_last_view_dies(device: str) -> None:
    pool = vt.PagePool(device)
    x = vt.empty(4, page(device) // 4, device=device, pool=pool)
    y = x.fill_(3)[1:]
    del x
    gc.collect()
    assert pool.stats().mapped_page_groups == 4
    assert y.unique().tolist() == [3]
    del y
    gc.collect()
    graveyard.drain()
    assert pool.stats().total_page_groups == 0
    pool.close()


def test_the_default_pool_keeps_nothing(live_bytes: Callable[[], int]) -> None:
    tensors = [vt.empty(1000, device="cpu").fill_(1) for _ in range(50)]
    assert live_bytes() == 50 * page("cpu")
    del tensors[10:40]
    assert live_bytes() == 20 * page("cpu")
    tensors.clear()
    assert live_bytes() == 0


def test_a_pool_of_fixed_capacity_keeps_its_memory_for_the_next(live_bytes: Callable[[], int]) -> None:
    pool = small_pool("cpu", 4)
    vt.empty(4, page("cpu") // 4, device="cpu", pool=pool).fill_(1)
    assert pool.stats().free_page_groups == 4
    assert live_bytes() == 4 * page("cpu")
    pool.trim()
    assert live_bytes() == 0


def test_cycles(live_bytes: Callable[[], int]) -> None:
    for _ in range(3):
        x = vt.empty(1000, device="cpu").fill_(1)
        x.myself = [x]
        pair = {"tensor": x[1:]}
        pair["pair"] = pair
        del x, pair
    assert live_bytes() == 3 * page("cpu")
    gc.collect()
    gc.collect()  # torch keeps a view's base where the first pass does not see it
    assert live_bytes() == 0


def test_a_tensor_outlives_its_pool_and_dies_in_any_order(live_bytes: Callable[[], int]) -> None:
    pool = small_pool("cpu", 4)
    x = vt.empty(1000, device="cpu", pool=pool)
    alive = weakref.ref(pool)
    del pool
    gc.collect()
    assert x.fill_(4).sum().item() == 4000
    with pytest.raises(vt.VTensorError, match="still has 1 mapped"):
        alive().close()
    del x
    gc.collect()
    assert alive() is None
    assert live_bytes() == 0


def test_a_failed_creation_leaves_nothing(driver: Driver, device: str) -> None:
    before = len(vt.PagePool(device)._spaces)
    with fail(driver, Call.RESERVE, 1), pytest.raises(vt.ReservationError):
        vt.empty(3, device=device)
    with record(driver) as calls:
        with pytest.raises(RuntimeError):
            vt.empty(3, dtype=torch.int64, device=device, requires_grad=True)
        gc.collect()
        graveyard.drain()
    assert calls.count(Call.RESERVE) == calls.count(Call.FREE) == 1
    assert before == 0


def test_many_tensors_one_after_another(live_bytes: Callable[[], int]) -> None:
    for number in range(200):
        x = vt.empty(1000, ROW, device="cpu")
        x[number, 0] = number
        assert x[number].sum().item() == number
    del x
    assert live_bytes() == 0


EXIT = """
import gc, sys, torch, vtensor as vt
device = sys.argv[1]
x = vt.empty(1 << 20, 1 << 18, device=device)
y = x[3].fill_(1)
p = x.plain()
z = vt.empty(3, device=device, requires_grad=True)
(z * 2).sum().backward()
cycle = [x]; cycle.append(cycle)
cache = vt.KVCacheManager(vt.KVCacheConfig(2, 2, 64, 4, 4096), device)
r = cache.alloc_reqid(); cache.step([100, 0, 0, 0]); k, v = cache.layer(1)
class AtExit:
    tensor = x
    def __del__(self):
        self.tensor = None
keep = AtExit()
import builtins; builtins.kept = [y, k, keep]
if len(sys.argv) > 2: raise SystemExit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("arguments", [[], ["7"]])
def test_exit_with_live_tensors(arguments: list[str], device: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT, device, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == int((arguments or ["0"])[0])
    assert done.stderr == ""


# -- fork -----------------------------------------------------------------------------------------------------------


def test_a_child_is_told_and_harms_nobody() -> None:
    x, strict = huge(), vt.empty(4, device="cpu", on_touch="raise")
    x[3] = 1
    strict.commit().fill_(2)

    def body() -> object:
        for use in (
            lambda: x.commit(2),
            lambda: x[3].sum(),
            lambda: x[3].fill_(9),
            lambda: x[900].fill_(9),
            lambda: x[3].tolist(),
            lambda: x[3, :2].numpy(),
            lambda: strict.add_(1),
            lambda: copy.deepcopy(strict),
        ):
            try:
                use()
            except vt.ForkedError:
                continue
            return "not told"
        assert "reserved=1 TiB" in repr(x)
        assert "tensor(" not in repr(strict)  # the values cannot be had here
        return "told"

    assert in_child(body) == (0, "told")
    assert x[3].unique().tolist() == [1]
    assert strict.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "lock", [(pools, "_lock"), (registry, "_lock"), (graveyard, "_digging")], ids=["pools", "registry", "graveyard"]
)
def test_a_child_does_not_wait_for_a_lock_of_the_parents_threads(lock: tuple[Any, str]) -> None:
    vt.empty(4, device="cpu").fill_(1)
    let_go = threading.Event()
    is_held = threading.Event()

    def hold() -> None:
        with getattr(*lock):
            is_held.set()
            let_go.wait(60)

    def use() -> object:
        pool = small_pool("cpu", 1)
        with contextlib.suppress(vt.OutOfPagesError):
            vt.empty(2 * page("cpu"), dtype=torch.uint8, device="cpu", pool=pool).commit()  # a shortage drains
        return vt.empty(4, device="cpu").fill_(2).sum().item()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert is_held.wait(10)
        outcome = in_child(use, timeout_s=10)
    finally:
        let_go.set()
        thread.join()
    assert outcome == (0, "8.0")


def test_finalizers_in_a_child_touch_nothing_of_the_parents(live_bytes: Callable[[], int]) -> None:
    tensors = [vt.empty(1000, device="cpu").fill_(number) for number in range(4)]
    pool = small_pool("cpu", 2)
    vt.empty(3, device="cpu", pool=pool).fill_(1)
    before = live_bytes()

    def body() -> object:
        nonlocal pool
        unraisable: list[object] = []
        sys.unraisablehook = unraisable.append
        tensors.clear()
        pool = None  # type: ignore[assignment]
        gc.collect()
        mine = vt.empty(1000, device="cpu").fill_(5)  # and memory of its own works
        return mine.sum().item(), len(unraisable)

    assert in_child(body) == (0, "(5000.0, 0)")
    assert [tensor[7].item() for tensor in tensors] == [0, 1, 2, 3]
    assert live_bytes() == before
    pool.close()


def test_a_child_that_ends_in_the_usual_way(tmp_path: Path) -> None:
    code = (
        "import os, sys, vtensor as vt\n"
        "x = vt.empty(1000, device='cpu').fill_(1)\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(x.sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "3 1000\n"), done.stderr


# -- streams --------------------------------------------------------------------------------------------------------


def test_record_stream_takes_streams_of_the_device(device: str) -> None:
    x = vt.empty(3, device=device)
    x.record_stream(None if device == "cpu" else torch.cuda.Stream(device))
    vt.empty(0, device=device).record_stream(None)


@pytest.mark.gpu
def test_a_dead_tensor_waits_for_its_streams() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    pool, side = small_pool("cuda:0", 1), torch.cuda.Stream()
    x = vt.empty(1000, device="cuda:0", pool=pool).fill_(3)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        result = x + 1  # known by its use; nothing was declared
    del x
    assert pool.stats().mapped_page_groups == 1
    y = vt.empty(1000, device="cuda:0", pool=pool).fill_(7)  # has to wait for the memory
    assert result.unique().tolist() == [4]
    assert y.unique().tolist() == [7]


@pytest.mark.gpu
def test_zeroing_does_not_undo_what_another_stream_wrote() -> None:
    # One stream commits a page group, and zeroes it when its turn comes; another writes to a neighbouring row at once.
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    pool = small_pool("cuda:0", 2)
    vt.empty(2000, 512, device="cuda:0", pool=pool).fill_(3)  # so that there is something to zero
    gc.collect()
    graveyard.drain()
    x, one, other = vt.empty(2048, 512, device="cuda:0", pool=pool), torch.cuda.Stream(), torch.cuda.Stream()
    for row in (0, 1024):  # at first one stream alone is known, then both
        with torch.cuda.stream(one):
            torch.cuda._sleep(400_000_000)
            x[row].fill_(1)
        with torch.cuda.stream(other):
            x[row + 500].fill_(7)
            x[row + 501].fill_(8)
    torch.cuda.synchronize()
    for row in (0, 1024):
        rows = (x[row], x[row + 1], x[row + 500], x[row + 501])
        assert [values.unique().tolist() for values in rows] == [[1], [0], [7], [8]]


@pytest.mark.gpu
def test_touching_during_a_capture() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    x, graph = huge("cuda:0"), torch.cuda.CUDAGraph()
    x.commit(1)
    with torch.cuda.graph(graph):
        x[0].add_(1)
        with pytest.raises(vt.VTensorError, match="capture"):
            x[100].add_(1)
        dying = x[0] + 1
        del dying
    assert x[0, 0].item() == 0
    graph.replay()
    graph.replay()
    assert x[0].unique().tolist() == [2]
