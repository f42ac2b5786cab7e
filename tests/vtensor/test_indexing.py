"""Operators with index tensors touch what the indices say, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.threads import in_threads
from vtensor.allocator.driver import get_driver

NUM_ROWS = 12


def page(device: str) -> int:
    return int(get_driver(device).default_page_group_bytes)


def rows_of_a_page_group(device: str, **options: Any) -> vt.VirtualTensor:
    """Rows of one page group each: [12, 2, page group / 8]."""
    return vt.empty(NUM_ROWS, 2, page(device) // 8, device=device, **options)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def mask(*rows: int) -> torch.Tensor:
    return torch.tensor([row in rows for row in range(NUM_ROWS)])


Operation = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], object]

# What is done to a tensor, `on` moving an index to its device.
WRITES: dict[str, Operation] = {
    "rows": lambda x, on: x.__setitem__(on(ints(3, -1, 3)), 2.0),
    "rows and columns": lambda x, on: x.__setitem__((on(ints(3, 5)), on(ints(1, 0)), on(ints(7, 8))), 2.0),
    "columns only": lambda x, on: x[4:7].__setitem__((slice(None), on(ints(1))), 2.0),
    "rows and the last dimension": lambda x, on: x.__setitem__((on(ints(2, 9)), slice(None), on(ints(0, 3))), 2.0),
    "broadcast": lambda x, on: x.__setitem__((on(ints(2, 9))[:, None], on(ints(0, 1))), 2.0),
    "mask": lambda x, on: x.__setitem__(on(mask(0, 7)), 2.0),
    "mask of two dimensions": lambda x, on: x.__setitem__(on(mask(1, 10)[:, None].expand(-1, 2)), 2.0),
    "nothing": lambda x, on: x.__setitem__(on(torch.tensor([], dtype=torch.int64)), 2.0),
    "empty mask": lambda x, on: x.__setitem__(on(mask()), 2.0),
    "accumulate": lambda x, on: x.index_put_((on(ints(4, 4)),), x.new_ones(()), accumulate=True),
    "of a view": lambda x, on: x[2:].__setitem__(on(ints(1, 2)), 2.0),
    "of steps": lambda x, on: x[::3].__setitem__(on(ints(1, 3)), 2.0),
    "transposed": lambda x, on: x.transpose(0, 1).__setitem__((slice(None), on(ints(6))), 2.0),
    "index_copy_": lambda x, on: x.index_copy_(0, on(ints(5, 1)), x.new_ones(2, *x.shape[1:])),
    "index_copy_ by columns": lambda x, on: x[8:9].index_copy_(1, on(ints(1)), x.new_ones(1, 1, x.shape[2])),
    "index_add_": lambda x, on: x.index_add_(0, on(ints(11)), x.new_ones(1, *x.shape[1:])),
    "index_fill_": lambda x, on: x.index_fill_(-3, on(ints(-2, 2)), 3.0),
    "index_reduce_": lambda x, on: x.index_reduce_(0, on(ints(6)), x.new_ones(1, *x.shape[1:]), "amax"),
    "scatter_": lambda x, on: x.scatter_(0, on(torch.full((1, 2, 3), 7)), 4.0),
    "scatter_ by columns": lambda x, on: x[3:].scatter_(2, on(torch.arange(12).view(3, 2, 2)), 4.0),
    "scatter_add_": lambda x, on: x.scatter_add_(0, on(ints(2, 8, 2).view(3, 1, 1)), x.new_ones(3, 1, 1)),
    "scatter_reduce_": lambda x, on: x.scatter_reduce_(0, on(ints(1).view(1, 1, 1)), x.new_ones(1, 1, 1), "sum"),
    "put_": lambda x, on: x.put_(on(ints(0, -1)), x.new_ones(2)),
    "put_ transposed": lambda x, on: x.transpose(0, 2).put_(on(ints(5)), x.new_ones(1)),
    "int32": lambda x, on: x.__setitem__(on(ints(3).int()), 2.0),
    "a token of a cache": lambda x, on: x.permute(1, 0, 2).__setitem__((slice(None), on(ints(4, 5))), 2.0),
    "index_copy_ transposed": lambda x, on: x.transpose(0, 1).index_copy_(
        1, on(ints(5, 1)), x.new_ones(2, 2, x.shape[2])
    ),
    "index_add_ of steps": lambda x, on: x[1::2].index_add_(0, on(ints(4, 4)), x.new_ones(2, *x.shape[1:])),
    "index_fill_ transposed": lambda x, on: x.transpose(0, 2).index_fill_(2, on(ints(8)), 3.0),
    "index_reduce_ of steps": lambda x, on: x[::2].index_reduce_(0, on(ints(3)), x.new_ones(1, *x.shape[1:]), "amax"),
    "scatter_ of steps": lambda x, on: x[::5].scatter_(0, on(torch.full((1, 2, 3), 1)), 4.0),
    "scatter_add_ transposed": lambda x, on: x.transpose(0, 1).scatter_add_(
        1, on(ints(2, 8).view(1, 2, 1)), x.new_ones(1, 2, 1)
    ),
}
# Whose kernels work on a contiguous copy of everything, or fill by a mask of everything.
WHOLE_ON_GPUS = {"mask", "mask of two dimensions", "empty mask", "accumulate"}
READS: dict[str, Operation] = {
    "rows": lambda x, on: x[on(ints(3, -1, 0))],
    "elements": lambda x, on: x[on(ints(3, 5)), on(ints(1, 0)), on(ints(7, 8))],
    "mask": lambda x, on: x[on(mask(0, 7))],
    "index_select": lambda x, on: x.index_select(0, on(ints(5, 1))),
    "gather": lambda x, on: x.gather(0, on(ints(2, 8, 2).view(3, 1, 1))),
    "take": lambda x, on: x.take(on(ints(9, -3))),
    "take_along_dim": lambda x, on: x.take_along_dim(on(ints(3).view(1, 1, 1)), 0),
    "embedding": lambda x, on: torch.nn.functional.embedding(on(ints(2, 4)), x.flatten(1)),
    "embedding_bag": lambda x, on: torch.nn.functional.embedding_bag(on(ints(2, 4)[None]), x.flatten(1)),
    "rows of steps": lambda x, on: x[1::2][on(ints(3, -1, 0))],
    "by the last dimension": lambda x, on: x.transpose(0, 2)[:, :, on(ints(3, 9))],
    "index_select of columns": lambda x, on: x[:, :, 5:90].index_select(0, on(ints(5, 1))),
    "gather of steps": lambda x, on: x[1::2].gather(0, on(ints(2, 0, 2).view(3, 1, 1))),
    "take transposed": lambda x, on: x.transpose(0, 2).take(on(ints(8, -3))),
    "embedding of columns": lambda x, on: torch.nn.functional.embedding(on(ints(2, 4)), x.flatten(1)[:, 3:77]),
}
# Whose kernels on a host make a contiguous copy of everything, for a tensor that they could read there.
WHOLE_ON_HOSTS = {"by the last dimension", "index_select of columns", "take transposed", "embedding of columns"}


def on(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda index: index.to(x.device)


@pytest.mark.parametrize("name", WRITES)
def test_what_indices_name_is_committed(name: str, device: str) -> None:
    x, dense = rows_of_a_page_group(device), torch.zeros(NUM_ROWS, 2, page(device) // 8, device=device)
    for tensor in (x, dense):
        WRITES[name](tensor, on(tensor))
    written = dense.flatten(1).any(1).tolist()
    if device != "cpu" and name in WHOLE_ON_GPUS:
        assert (x.residency() >= written).all()
    else:
        assert x.residency().tolist() == written
    assert torch.equal(x, dense)
    if name not in ("nothing", "empty mask"):
        assert any(written)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["index_add_", "scatter_", "scatter_ by columns", "scatter_add_", "scatter_reduce_"])
def test_sixteen_bits(name: str, dtype: torch.dtype, device: str) -> None:
    shape = (NUM_ROWS, 2, page(device) // 4)
    x, dense = vt.empty(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    for tensor in (x, dense):
        WRITES[name](tensor, on(tensor))
    written = dense.flatten(1).any(1).tolist()
    assert (x.residency() >= written).all()  # a host's kernels copy all of it back
    assert device == "cpu" or x.residency().tolist() == written
    assert torch.equal(x, dense)


@pytest.mark.parametrize("operation", ["scatter_reduce_", "index_reduce_"])
def test_a_mean_divides_everything(operation: str, device: str) -> None:
    x, dense = rows_of_a_page_group(device), torch.zeros(NUM_ROWS, 2, page(device) // 8, device=device)
    for tensor in (x, dense):
        index, ones = on(tensor)(ints(3)), tensor.new_ones(1, *tensor.shape[1:])
        if operation == "index_reduce_":
            tensor.index_reduce_(0, index, ones, "mean")
        else:
            tensor.scatter_reduce_(0, index.view(1, 1, 1).expand(ones.shape), ones, reduce="mean")
    assert torch.equal(x, dense)
    assert x[3].unique().tolist() == [0.5]


@pytest.mark.parametrize("name", READS)
def test_what_indices_name_is_read(name: str, device: str) -> None:
    # By a tensor that refuses what is not there: reading anything else would be refused.
    x, dense = (
        rows_of_a_page_group(device, on_touch="raise"),
        torch.zeros(NUM_ROWS, 2, page(device) // 8, device=device),
    )
    with pytest.raises(vt.UnmappedAccessError):
        READS[name](x, on(x))
    unread = [] if device == "cpu" and name in WHOLE_ON_HOSTS else [6, 10]
    rows = [row for row in range(NUM_ROWS) if row not in unread]
    for row in rows:
        x.commit(slice(row, row + 1))
        x[row] = dense[row] = row + 1
    assert torch.equal(torch.as_tensor(READS[name](x, on(x))), torch.as_tensor(READS[name](dense, on(dense))))
    assert [row for row in range(NUM_ROWS) if not x.residency()[row]] == unread


BAD: dict[str, Operation] = {
    "too large": lambda x, on: x.__setitem__(on(ints(0, NUM_ROWS)), 2.0),
    "too small": lambda x, on: x.__setitem__(on(ints(-NUM_ROWS - 1)), 2.0),
    "index_copy_": lambda x, on: x.index_copy_(0, on(ints(1, 99)), x.new_ones(2, *x.shape[1:])),
    "scatter_": lambda x, on: x.scatter_(0, on(ints(2, 99).view(2, 1, 1)), 4.0),
    "put_": lambda x, on: x.put_(on(ints(1 << 40)), x.new_ones(1)),
    "select": lambda x, on: x.index_select(0, on(ints(99))),
    "gather": lambda x, on: x.gather(0, on(ints(-1).view(1, 1, 1))),
    "index_copy_ from the end": lambda x, on: x.index_copy_(0, on(ints(-1)), x.new_ones(1, *x.shape[1:])),
    "index_reduce_ from the end": lambda x, on: x.index_reduce_(
        0, on(ints(-1)), x.new_ones(1, *x.shape[1:]), "prod", include_self=False
    ),
    "index_add_ from the end": lambda x, on: x.index_add_(0, on(ints(-2)), x.new_ones(1, *x.shape[1:])),
    "select from the end": lambda x, on: x.index_select(0, on(ints(-1))),
    "scatter_ from the end": lambda x, on: x.scatter_(0, on(ints(-1).view(1, 1, 1)), 4.0),
    "embedding from the end": lambda x, on: torch.nn.functional.embedding(on(ints(-1)), x.flatten(1)),
    "fill": lambda x, on: x.index_fill_(0, on(ints(-NUM_ROWS - 1)), 1.0),
    "take": lambda x, on: x.take(on(ints(1 << 40))),
    "embedding": lambda x, on: torch.nn.functional.embedding(on(ints(99)), x.flatten(1)),
    "no such dimension": lambda x, on: x.index_fill_(3, on(ints(0)), 1.0),
    "no such shape": lambda x, on: x.__setitem__((on(ints(0, 1)), on(ints(0, 1, 0))), 1.0),
    "too many": lambda x, on: x.__setitem__((on(ints(0)),) * 4, 1.0),
    "wide index": lambda x, on: x[:2].scatter_(1, on(torch.zeros(3, 1, 1, dtype=torch.int64)), 1.0),
    "no index": lambda x, on: x.index_put_((), x.new_ones(())),
    "float": lambda x, on: x.__setitem__(on(torch.tensor([1.0])), 2.0),
    "mask of another shape": lambda x, on: x.__setitem__(on(torch.ones(5, dtype=torch.bool)), 2.0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_indices_are_the_errors_of_torch(name: str, device: str) -> None:
    dense = torch.zeros(NUM_ROWS, 2, page("cpu") // 8)
    x = rows_of_a_page_group(device)
    with pytest.raises((IndexError, RuntimeError)) as expected:
        BAD[name](dense, on(dense))
    with pytest.raises((IndexError, RuntimeError)) as found:
        BAD[name](x, on(x))
    if device == "cpu":
        assert type(found.value) is type(expected.value)
        assert str(found.value) == str(expected.value)
    assert not isinstance(found.value, vt.OutOfPagesError)
    x[4, 1, 5] = 3  # and the device goes on
    assert x[4].sum() == 3


def test_rows_of_a_table_of_terabytes(device: str) -> None:
    table = vt.empty(1 << 24, 1 << 16, dtype=torch.uint8, device=device)
    rows = torch.tensor([5, 1 << 23, (1 << 24) - 1], device=device)
    table[rows] = torch.full((3, 1 << 16), 7, dtype=torch.uint8, device=device)
    assert table[rows].float().mean(1).tolist() == [7, 7, 7]
    table.index_add_(0, rows[:1], table[rows[1:2]])
    assert table[rows, 9].tolist() == [14, 7, 7]
    assert table[rows + (rows < 9), 0].tolist() == [0, 7, 7]
    assert table.resident_bytes == 3 * page(device)


def test_virtual_indices_are_only_read() -> None:
    x, index = rows_of_a_page_group("cpu"), vt.zeros(4, dtype=torch.int64, device="cpu")
    x[index] = 3.0
    assert (x.residency().sum(), index.resident_bytes) == (1, 0)


def test_who_raises_raises_for_all_that_a_kernel_reads(device: str) -> None:
    weight = rows_of_a_page_group(device, on_touch="raise").flatten(1).commit(slice(2, 4))[:, :100]
    indices = on(weight)(ints(2, 3)[None])
    with pytest.raises(vt.UnmappedAccessError):  # the kernel makes a contiguous copy of all rows
        torch.nn.functional.embedding_bag(indices, weight)
    assert torch.nn.functional.embedding_bag(indices - 2, weight[2:4]).shape == (1, 100)
    strict = rows_of_a_page_group(device, on_touch="raise").commit(slice(2, 4))
    assert strict[on(strict)(ints(2, 3))].shape[0] == 2


# -- sparse gradients -----------------------------------------------------------------------------------------------


def sparse_rows(device: str, *rows: int, dense_dims: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A sparse tensor with ones in some rows, not coalesced."""
    shape = (NUM_ROWS, 2, page(device) // 8)
    if dense_dims == 2:
        return torch.sparse_coo_tensor(
            torch.tensor([rows]), torch.ones(len(rows), *shape[1:], dtype=dtype), shape, device=device
        )
    places = torch.tensor([rows, [1] * len(rows), [5] * len(rows)])
    return torch.sparse_coo_tensor(places, torch.ones(len(rows), dtype=dtype), shape, device=device)


@pytest.mark.parametrize("dense_dims", [2, 0])
def test_a_sparse_tensor_is_added_to_what_it_has_values_for(dense_dims: int, device: str) -> None:
    x, dense = rows_of_a_page_group(device), torch.zeros(NUM_ROWS, 2, page(device) // 8, device=device)
    for tensor in (x, dense):
        assert tensor.add_(sparse_rows(device, 3, 9, 3, dense_dims=dense_dims), alpha=-2) is tensor
    assert torch.equal(x.clone(), dense)
    assert x.residency().nonzero()[0].tolist() == [3, 9]
    x.add_(sparse_rows(device, dense_dims=2))
    assert x.residency().sum() == 2


@pytest.mark.parametrize("dense_dims", [2, 0])
def test_a_sparse_tensor_is_added_to_a_view(dense_dims: int, device: str) -> None:
    x = rows_of_a_page_group(device)
    sparse = sparse_rows(device, 1, 3, 1, dense_dims=dense_dims)
    shorter = sparse.coalesce().narrow_copy(0, 0, NUM_ROWS - 2)
    x[2:].add_(shorter)
    assert torch.equal(x[2:].clone(), shorter.to_dense())
    assert not x[:2].any()
    assert x.residency().nonzero()[0].tolist() == [3, 5]


@pytest.mark.parametrize("bad", [NUM_ROWS, -1, 1 << 40])
def test_a_sparse_tensor_that_was_not_checked_writes_nowhere_else(bad: int, device: str) -> None:
    x = rows_of_a_page_group(device)
    values = torch.ones(2, *x.shape[1:], device=device)
    indices = torch.tensor([[3, bad]], device=device)
    sparse = torch.sparse_coo_tensor(indices, values, x.shape, check_invariants=False)
    with pytest.raises(IndexError, match=rf"\(12, 2, .* at \[{bad}\]"):
        x.add_(sparse)
    assert x.resident_bytes == 0


def test_other_additions_are_as_ever(device: str) -> None:
    x = rows_of_a_page_group(device)
    x[2:4].add_(1)
    x[5].add_(torch.ones(2, 1, device=device))
    assert x.residency().nonzero()[0].tolist() == [2, 3, 5]
    torch.ops.aten.add_.Scalar(x[8], 1)
    x[8].zero_()
    x[8:9].decommit()
    with pytest.raises(RuntimeError):
        x[1:].add_(sparse_rows(device, 3))  # of another shape
    x.add_(sparse_rows(device, 7, dtype=torch.float64))  # works on a copy, all of which is copied back
    assert x[7].sum().item() == x[7].numel()
    if device != "cpu":
        return  # a GPU's kernel takes no transposed tensors, of anybody's
    y = rows_of_a_page_group(device)
    y.transpose(1, 2).add_(sparse_rows(device, 3, dense_dims=0).transpose(1, 2))
    assert (y[3].sum().item(), y[3, 1, 5].item()) == (1, 1)


def test_a_sparse_gradient_trains_the_rows_it_names(device: str) -> None:
    weight = rows_of_a_page_group(device).flatten(1).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    rows = on(weight)(ints(3, 7, 3))
    torch.nn.functional.embedding(rows, weight, sparse=True).sum().backward()
    optimizer.step()
    assert weight.detach()[:, 0].tolist() == [
        -0.5 * [0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0][row] for row in range(NUM_ROWS)
    ]
    assert weight.residency().nonzero()[0].tolist() == [3, 7]


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_optimizers_of_sparse_gradients_keep_to_the_rows(optimizer: Any, device: str) -> None:
    def train(weight: torch.Tensor) -> Any:
        made = optimizer([weight], lr=0.5)
        for rows in ((3, 7, 3), (7, 9)):
            made.zero_grad()
            torch.nn.functional.embedding(on(weight)(ints(*rows)), weight, sparse=True).square().sum().backward()
            made.step()
        return weight, made.state[weight]

    with vt.virtual(min_bytes=1 << 19):
        weight = rows_of_a_page_group(device).flatten(1)
        weight[[3, 7, 9]] = 1
        dense, _ = train(weight.clone().requires_grad_())
        virtual, state = train(weight.requires_grad_())
    torch.testing.assert_close(virtual.detach().clone(), dense.detach())
    assert virtual.residency().nonzero()[0].tolist() == [3, 7, 9]
    for value in state.values():
        if isinstance(value, vt.VirtualTensor):
            assert value.residency().nonzero()[0].tolist() == [3, 7, 9]


def test_what_reads_beside_sparse_tensors_commits_nothing(device: str) -> None:
    x, mask = rows_of_a_page_group(device), sparse_rows(device, 3, 9)
    assert x.sparse_mask(mask.coalesce()).to_dense().sum().item() == 0
    flat = x.flatten(1)
    assert not torch.sparse.mm(torch.eye(NUM_ROWS, device=device).to_sparse(), flat).any()
    assert x.resident_bytes == 0
    strict = rows_of_a_page_group(device, on_touch="raise").commit(slice(3, 4))
    assert strict.sparse_mask(sparse_rows(device, 3).coalesce())._nnz() == 1
    with pytest.raises(vt.UnmappedAccessError):
        strict.sparse_mask(mask.coalesce())


# -- indices that are not read --------------------------------------------------------------------------------------


def test_unread_indices_commit_the_view(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dense = rows_of_a_page_group(device), torch.zeros(NUM_ROWS, 2, page(device) // 8, device=device)
    index = on(x)(ints(1, 3))
    with vt.unread_indices():
        monkeypatch.setattr("vtensor.indexing._as_numpy", None)
        for tensor in (x, dense):
            tensor[4:8][index] = 2
            with vt.unread_indices():
                assert tensor[9:][index[:1] - 1].sum().item() == 0
            tensor[4:6].index_add_(0, index[:1], tensor.new_ones(1, *tensor.shape[1:]))
        y = rows_of_a_page_group(device)
        y.add_(sparse_rows(device, 3))
    monkeypatch.undo()
    assert torch.equal(x.clone(), dense)
    assert x.residency().nonzero()[0].tolist() == [4, 5, 6, 7]
    assert y.residency().all()
    x[on(x)(ints(0))] = 1
    assert x.residency().nonzero()[0].tolist() == [0, 4, 5, 6, 7]


def test_unread_indices_are_of_one_thread(device: str) -> None:
    x = rows_of_a_page_group(device)

    @vt.unread_indices()
    def write(index: torch.Tensor) -> None:
        in_threads(lambda: x.__setitem__(on(x)(ints(0)), 1))
        assert x.residency().sum() == 1
        x[8:][index] = 2

    write(on(x)(ints(3)))
    with suppress(ZeroDivisionError), vt.unread_indices():
        raise ZeroDivisionError
    x[on(x)(ints(5))] = 1
    assert x.residency().nonzero()[0].tolist() == [0, 5, 8, 9, 10, 11]


def test_what_was_committed_whole_is_not_read_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows_of_a_page_group(device).commit()
    index = on(x)(ints(1, 3))
    monkeypatch.setattr("vtensor.indexing._as_numpy", None)
    x[index] = 1
    x[2:9][index] = 2
    assert x.transpose(0, 1)[:, index].sum().item() == (1 + 2) * x[0].numel()
