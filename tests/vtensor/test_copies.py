"""Copies and files of whole virtual tensors: of what has memory, and nothing else."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.faults import BROKEN, fail
from vtensor import copies
from vtensor.allocator.driver import Call, Driver, get_driver


def page(device: str) -> int:
    return int(get_driver(device).default_page_group_bytes)


def saved(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": lambda x: torch.load(saved(x)),
    "torch.save, all globals": lambda x: torch.load(saved(x), weights_only=False),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_whole_tensor_is_copied_as_one(name: str, device: str) -> None:
    x = vt.empty(1 << 20, 1 << 18, device=device)
    x[3, :4] = torch.arange(4.0)
    x[-1, -1] = 5
    x[1 << 19] = 6
    y = COPIES[name](x)
    assert isinstance(y, vt.VirtualTensor)
    assert (y.shape, y.stride(), y.dtype, y.device) == (x.shape, x.stride(), x.dtype, x.device)
    assert y.resident_bytes == x.resident_bytes
    assert y.residency().nonzero()[0].tolist() == x.residency().nonzero()[0].tolist()
    for row in (0, 3, 1 << 19, -1):
        assert torch.equal(y[row].clone(), x[row].clone())
    y[3, 0] = 9
    assert x[3, 0].item() == 0


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize(
    "make",
    [
        lambda device: vt.empty(5, 6, 7, dtype=torch.bfloat16, device=device).permute(2, 0, 1),
        lambda device: vt.empty_strided((3, 4), (1, 3), dtype=torch.complex64, device=device),
        lambda device: vt.empty((), dtype=torch.bool, device=device),
        lambda device: vt.empty(2, 3, 4, 4, device=device, memory_format=torch.channels_last),
    ],
)
def test_any_shape_and_strides(make: Callable[[str], Any], name: str, device: str) -> None:
    x = make(device)
    assert not COPIES[name](x).any()
    x.copy_(torch.arange(x.numel()).view(x.shape))
    y = COPIES[name](x)
    assert isinstance(y, vt.VirtualTensor)
    assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    assert torch.equal(y.clone(), x.clone())


@pytest.mark.parametrize("name", COPIES)
def test_a_tensor_that_grows_goes_on_growing(name: str, device: str) -> None:
    x = vt.empty(0, 64, device=device, max_rows=1 << 24)
    empty = COPIES[name](x)
    x.append_(torch.arange(64.0))
    y = COPIES[name](x)
    for tensor, before in ((empty, 0), (y, 1)):
        assert tensor.shape == (before, 64)
        assert tensor.max_rows == 1 << 24
        tensor.append_(torch.ones(2, 64, device=device))
        assert tensor.sum().item() == 128 + before * 63 * 32
    assert x.shape == (1, 64)


@pytest.mark.parametrize("name", COPIES)
def test_modules_keep_their_parameters(name: str, device: str) -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(vt.zeros(1 << 20, 256, device=device))
    module.frozen = torch.nn.Parameter(vt.zeros(1 << 20, 256, device=device), requires_grad=False)
    module.register_buffer("buffer", vt.zeros(1 << 30, device=device, on_touch="raise"))
    with torch.no_grad():
        module.weight[5] = 1
    state = COPIES[name](module.state_dict())
    assert all(isinstance(value, vt.VirtualTensor) for value in state.values())
    assert state["weight"][5].sum().item() == 256
    assert sum(value.resident_bytes for value in state.values()) == page(device)
    with pytest.raises(vt.UnmappedAccessError):
        state["buffer"].sum()
    if name != "deepcopy":  # a state dict has parameters no more
        return
    other = copy.deepcopy(module)
    assert isinstance(other.weight, torch.nn.Parameter)
    assert [parameter.requires_grad for parameter in other.parameters()] == [True, False]
    assert other.weight.resident_bytes == page(device)


def test_conjugates_are_copied_as_what_they_show(device: str) -> None:
    x = vt.empty(4, 4, dtype=torch.complex64, device=device).fill_(1 + 2j)
    for function in COPIES.values():
        assert function(x.conj())[0, 0].item() == 1 - 2j
        assert function(torch._neg_view(x))[0, 0].item() == -1 - 2j


def test_a_file_may_be_looked_at_without_its_data(device: str) -> None:
    x = torch.nn.Parameter(vt.empty(4, 4, device=device), requires_grad=False)
    y = torch.load(saved({"x": x, "g": vt.empty(2, 4, max_rows=8, device=device)}), map_location="meta")
    assert (y["x"].device.type, y["x"].shape, y["x"].requires_grad) == ("meta", (4, 4), False)
    assert isinstance(y["x"], torch.nn.Parameter)
    assert y["g"].shape == (2, 4)


def test_a_state_dict_is_loaded_as_it_was_saved(device: str) -> None:
    def table() -> torch.nn.Embedding:
        return torch.nn.Embedding(1 << 30, 64, _weight=vt.zeros(1 << 30, 64, device=device))

    saved_from, loaded = table(), table()
    with torch.no_grad():
        saved_from.weight[[5, 1 << 29]] = 3
        loaded.weight[[5, 77_777_777]] = 9  # the second of which is to be zero
    state = torch.load(saved(saved_from.state_dict()))
    loaded.load_state_dict(state)
    assert loaded.weight[[5, 1 << 29, 77_777_777], 0].tolist() == [3, 3, 0]
    assert loaded.weight.resident_bytes == 3 * page(device)
    assert isinstance(loaded.weight, torch.nn.Parameter)


def test_copies_between_virtual_tensors(device: str) -> None:
    size = page(device)
    x, y = (vt.empty(8, size, dtype=torch.uint8, device=device) for _ in range(2))
    x[3], y[5, 7:] = 1, 2
    for target, source, there in (
        (y[2:6], x[1:5], [4, 5]),  # row 3 of x comes to row 4, and what was in 5 is gone
        (y.view(-1)[size // 2 : 3 * size], x.view(-1)[3 * size + 5 : 5 * size + size // 2 + 5], [0, 1, 4, 5]),
        (y.t(), x.t(), [0, 1, 3, 4, 5]),
        (y, torch.ones_like(x), list(range(8))),
    ):
        before, version = target.clone(), target._version
        assert not torch.equal(before, source.clone())
        assert target.copy_(source) is target
        assert target._version > version
        assert torch.equal(target.clone(), source.clone())
        assert y.residency().nonzero()[0].tolist() == there
    x.copy_(y)
    assert x.residency().all()
    w = vt.empty(8, size, dtype=torch.uint8, device=device)
    w[3] = 1
    w.copy_(w)
    assert w.resident_bytes == size
    with pytest.raises(RuntimeError, match="single memory location"):
        w[:1].expand(3, -1).copy_(vt.empty(1, size, dtype=torch.uint8, device=device).expand(3, -1))
    before = w.resident_bytes
    with pytest.raises(vt.UnmappedAccessError):
        w.copy_(vt.empty(8, size, dtype=torch.uint8, device=device, on_touch="raise"))
    assert w.resident_bytes == before
    z = vt.empty(8, size, dtype=torch.uint8, device=device, on_touch="raise")
    with pytest.raises(vt.UnmappedAccessError):
        z.copy_(vt.empty_like(x))
    with pytest.raises(RuntimeError):
        y.copy_(vt.empty(7, 2, device=device))


def test_a_copy_that_is_short_of_memory_changes_nothing(device: str) -> None:
    size = page(device)
    pool = vt.PagePool(device, capacity_bytes=2 * size, page_group_bytes=size, max_size_class_bytes=size)
    x = vt.empty(8, size, dtype=torch.uint8, device=device)
    y = vt.empty(8, size, dtype=torch.uint8, device=device, pool=pool)
    x[2:6], y[0] = 1, 5
    with pytest.raises(vt.OutOfPagesError, match=r"copy_ on a virtual tensor .* needs 3 more"):
        y.copy_(x)
    assert (y[0] == 5).all()
    assert y.resident_bytes == size
    del y
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
    pool.close()


def test_views_are_copied_as_plain_tensors(device: str) -> None:
    x = vt.empty(64, page(device), dtype=torch.uint8, device=device)
    x[3] = 1
    for view in (x[1:], x[:, :-1], x[::2], x.view(torch.int32)[:-1], x[None].expand(2, -1, -1)):
        for function in COPIES.values():
            copied = function(view)
            assert type(copied) is torch.Tensor
            assert torch.equal(copied, view.clone())
    for view in (x[:], x.view(-1), x.t(), x.detach(), x.view(torch.int32)):  # these show all of it
        assert isinstance(copy.deepcopy(view), vt.VirtualTensor)


def test_an_empty_tensor_is_copied_as_one(device: str) -> None:
    for function in COPIES.values():
        y = function(vt.empty(0, 4, device=device))
        assert isinstance(y, vt.VirtualTensor)
        assert y.shape == (0, 4)


def test_a_deep_copy_keeps_attributes_and_is_of_leaves(device: str) -> None:
    x = vt.empty(4, 4, device=device, requires_grad=True)
    x.note = ["mine"]  # type: ignore[attr-defined]
    y = copy.deepcopy(x)
    assert y.note == ["mine"]  # type: ignore[attr-defined]
    assert y.note is not x.note  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(x[1:])


def test_many_scattered_page_groups_are_committed_at_once(device: str, driver: Driver) -> None:
    x = vt.empty(512, page(device), dtype=torch.uint8, device=device)
    x[::2] = 3
    data = pickle.dumps(x)
    before = x._region.num_writes  # type: ignore[union-attr]
    with fail(driver, Call.MAP, 200, BROKEN), pytest.raises(vt.DriverError):
        pickle.loads(data)
    y = pickle.loads(data)
    assert torch.equal(y[::2].clone(), x[::2].clone())
    assert y.resident_bytes == x.resident_bytes
    assert x._region.num_writes == before  # type: ignore[union-attr]


def test_a_layer_of_a_cache_is_copied_as_a_plain_tensor(device: str) -> None:
    config = vt.KVCacheConfig(num_layers=1, num_kv_heads=1, head_dim=64, max_batch_size=1, max_context_tokens=1 << 18)
    with vt.KVCacheManager(config, device=device, capacity_bytes=64 << 20) as cache:
        cache.alloc_reqid()
        assert cache.step([16])
        keys, _ = cache.layer(0)
        assert type(copy.deepcopy(keys[:, :16])) is torch.Tensor
        with pytest.raises(vt.UnmappedAccessError):
            copy.deepcopy(keys)
        del keys


def test_a_copy_has_the_same_pool(device: str) -> None:
    size = page(device)
    pool = vt.PagePool(device, capacity_bytes=5 * size, page_group_bytes=size, max_size_class_bytes=size)
    x = vt.full((3, size), 7, dtype=torch.uint8, device=device, pool=pool)
    with pytest.raises(vt.OutOfPagesError):
        copy.deepcopy(x)
    gc.collect()
    x[1:2].decommit()
    y = copy.deepcopy(x)
    assert pool.stats().mapped_page_groups == 4
    assert torch.equal(x.clone(), y.clone())
    del x, y
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
    pool.close()


def test_a_copy_that_fails_leaves_nothing(device: str, driver: Driver) -> None:
    pool = vt.PagePool(device, capacity_bytes=64 * page(device))
    x = vt.full((8, page(device)), 7, dtype=torch.uint8, device=device, pool=pool)
    before = pool.stats().mapped_page_groups
    with fail(driver, Call.MAP, 1, BROKEN), pytest.raises(vt.DriverError):
        copy.deepcopy(x)
    gc.collect()
    assert pool.stats().mapped_page_groups == before


def test_what_cannot_have_been_saved_is_refused() -> None:
    data = torch.zeros(8, dtype=torch.uint8)
    how = ("commit", None, False, False)
    good = ((4, 4), (4, 1), torch.float32, how, [(0, 8)], data)
    assert copies.restore(vt.VirtualTensor.reserve, *good).shape == (4, 4)
    for spans in ([(-8, 8)], [(60, 8)], [(1 << 40, 8)], [(0, 8), (8, 0)], [((1 << 63) - 4, 8)]):
        with pytest.raises(ValueError, match="outside"):
            copies.restore(vt.VirtualTensor.reserve, *good[:4], spans, data)
    wide = ((4, 4), (0, 0), torch.float32, how, [(0, 8)], data)  # one element, shown 16 times
    with pytest.raises(ValueError, match="outside"):
        copies.restore(vt.VirtualTensor.reserve, *wide)
    assert (
        copies.restore(
            vt.VirtualTensor.reserve, *good[:4], [(4, 4), (0, 4), (2, 4)], torch.zeros(12, dtype=torch.uint8)
        ).sum()
        == 0
    )
    for other in (data[:7], data.float(), data.view(2, 4)):
        with pytest.raises(ValueError, match="is not what"):
            copies.restore(vt.VirtualTensor.reserve, *good[:5], other)


def test_a_file_is_read_by_another_process(tmp_path: Path) -> None:
    x = vt.empty(1 << 40, dtype=torch.uint8, device="cpu")
    x[5], x[-1] = 3, 4
    torch.save({"x": x}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 1 << 18
    script = (
        "import sys, torch, vtensor\n"
        "x = torch.load(sys.argv[1])['x']\n"
        "print(type(x).__name__, x[5].item(), x[-1].item(), x.resident_bytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x.pt")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["VirtualTensor", "3", "4", str(x.resident_bytes)]


def test_the_old_format_holds_all_of_a_tensor(device: str) -> None:
    x = vt.empty(4, 4, device=device)
    x[3] = 5
    y = torch.load(saved(x, _use_new_zipfile_serialization=False))
    assert type(y) is torch.Tensor
    assert torch.equal(y, x.clone())
    with pytest.raises(vt.VTensorError):
        saved(vt.empty(1 << 45, device="cpu"), _use_new_zipfile_serialization=False)


def _describe(arguments: list[Any], results: Any) -> None:
    results.put([(type(tensor).__name__, float(tensor.detach().sum())) for tensor in arguments])


def test_other_processes_get_copies() -> None:
    processes = torch.multiprocessing.get_context("spawn")
    x = vt.empty(0, 64, max_rows=1 << 24, device="cpu").append_(torch.ones(3, 64))
    y = vt.empty(1 << 30, dtype=torch.uint8, device="cpu")
    y[7] = 3
    results = processes.Queue()
    child = processes.Process(target=_describe, args=([x, x[1:], torch.nn.Parameter(y[5:9].float()), y], results))
    child.start()
    try:
        found = results.get(timeout=60)
    finally:
        child.kill()
        child.join()
    assert found == [("VirtualTensor", 192), ("Tensor", 128), ("Parameter", 3), ("VirtualTensor", 3)]


def test_a_loader_with_workers() -> None:
    x = vt.empty(0, 64, max_rows=1 << 24, device="cpu").append_(torch.arange(64.0)[:, None].expand(-1, 64))
    y = vt.empty(0, max_rows=1 << 24, device="cpu").append_(torch.arange(64.0))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y),
        batch_size=16,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="spawn",
        timeout=60,
    )
    seen = [(rows[:, 5].clone(), labels.clone()) for rows, labels in loader]
    assert all(torch.equal(rows, labels) for rows, labels in seen)
    assert torch.cat([labels for _, labels in seen]).sort().values.tolist() == list(range(64))


@pytest.mark.gpu
def test_a_file_is_read_on_another_device() -> None:
    x = vt.empty(1 << 30, device="cuda")
    x[5] = 3
    y = torch.load(saved(x), map_location="cpu")
    assert (type(y), y.device.type, y[5].item()) == (vt.VirtualTensor, "cpu", 3)
