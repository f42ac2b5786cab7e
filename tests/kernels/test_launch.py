"""Launches: what Triton compiled is kept, by where tensors lie; counters are zero, and shared with nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import vtensor as vt
from vtensor.triton_kernels import decode_attention, launch, workspace
from vtensor.triton_kernels.arguments import check_attention
from vtensor.triton_kernels.launch import Launch, split_width
from vtensor.triton_kernels.reference import attend


class Kernel:
    """In place of Triton's: notes how it is launched."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.arg_names = ["a_ptr", "b_ptr", "count", "first", "second"]

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        self.log.append(("compiled", *options.items()))
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, stream: self.log.append((grid, *args, stream))


def test_what_was_compiled_is_launched_with_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    kernel = Kernel()
    run = Launch(kernel, {"second": 2, "first": 1}, num_warps=4)
    wide = torch.zeros(64)
    even, odd = wide[4:], wide[1:]
    for tensor in (even, odd, even, odd):
        run(3, (tensor, None), 7)
    calls = [line for line in kernel.log if line[0] != "compiled"]
    assert calls == [((3, 1, 1), tensor.data_ptr(), None, 7, 1, 2, 5) for tensor in (even, odd, even, odd)]
    assert kernel.log.count(("compiled", ("num_warps", 4))) == 2


@pytest.mark.parametrize(
    ("width", "parts"),
    [(64, (64, 0)), (80, (64, 16)), (96, (64, 32)), (112, (64, 64)), (192, (128, 64)), (576, (512, 64))],
)
def test_widths_are_split(width: int, parts: tuple[int, int]) -> None:
    assert split_width(width) == parts


@pytest.mark.gpu
def test_counters_are_shared_by_what_follows_one_another() -> None:
    device = torch.device("cuda:0")
    first, more = workspace.counters(device, 10), workspace.counters(device, 100)
    assert first.data_ptr() == more.data_ptr()
    with torch.cuda.stream(torch.cuda.Stream()):
        other = workspace.counters(device, 10)
    assert other.data_ptr() != first.data_ptr()
    assert not first.any()
    found = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append([workspace.counters(device, 10).data_ptr() for _ in range(2)])
    assert found[0][0] == found[0][1]
    assert found[1][0] == found[1][1]
    assert len({found[0][0], found[1][0], first.data_ptr(), other.data_ptr()}) == 4


@pytest.mark.gpu
def test_a_graph_without_a_reserve_zeroes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_reserves", {})
    monkeypatch.setattr(workspace, "_of_captures", {})
    device = torch.device("cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counters = workspace.counters(device, 10)
        counters += 1
    for _ in range(2):
        graph.replay()
        assert counters.tolist() == [1] * 10


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 6, 40])
def test_a_cache_without_memory_where_it_begins(batch: int) -> None:
    # Triton asks the driver where a tensor is, which does not know of addresses without memory
    device = "cuda:0"
    q = torch.randn(batch, 8, 64, device=device, dtype=torch.float16)
    cache = vt.empty(batch + 1, 1 << 16, 2, 2, 64, dtype=torch.float16, device=device)
    lens = torch.randint(1, 500, (batch,), dtype=torch.int32, device=device)
    for slot, length in enumerate(lens.tolist(), 1):
        cache[slot, :length].normal_()
    k, v = cache.plain().unbind(2)
    slots = torch.arange(1, batch + 1, dtype=torch.int32, device=device)
    call = check_attention(q, k, v, lens, slots)
    torch.testing.assert_close(decode_attention(q, k, v, lens, slots), attend(call)[0][:, 0], atol=2e-3, rtol=2e-2)
    cache[0].commit()
