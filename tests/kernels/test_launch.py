"""Launches: what Triton compiled is kept, by where tensors lie; counters are zero, and shared with nobody."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.threads import in_threads
from vtensor.triton_kernels import append_kv, decode_attention, launch, prefill_attention, prepared, workspace
from vtensor.triton_kernels import attention as calls
from vtensor.triton_kernels.arguments import check_attention
from vtensor.triton_kernels.launch import Launch, split_width
from vtensor.triton_kernels.reference import attend
from vtensor.triton_kernels.signatures import attention_key


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
def test_counters_that_were_outgrown_stay() -> None:
    device = torch.device("cuda:0")
    with torch.cuda.stream(torch.cuda.Stream()):
        first = workspace.counters(device, 10)
        at, size = first.data_ptr(), 4 * first.numel()
        del first
        workspace.counters(device, 1 << 20)
    others = [torch.ones(size, dtype=torch.int8, device=device) for _ in range(200)]
    torch.cuda.synchronize()
    assert not any(at <= one.data_ptr() < at + size for one in others)


def test_workspaces_are_made_by_a_thread_whose_errors_are_told() -> None:
    made = workspace._aside(lambda: torch.full((3,), threading.get_ident()))
    assert made[0] != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        workspace._aside(lambda: torch.zeros(1 // 0))


class Driver:
    """In place of cuda-python's: a function with parameters of some sizes."""

    def __init__(self, sizes: list[int] | None) -> None:
        self.sizes = sizes

    def cuFuncGetParamInfo(self, function: Any, index: int) -> tuple[int, int, int]:
        if self.sizes is None:
            raise RuntimeError('Function "cuFuncGetParamInfo" not found')
        return (0, 0, self.sizes[index]) if index < len(self.sizes) else (1, 0, 0)


def test_parameters_that_the_driver_does_not_tell_of() -> None:
    assert prepared._parameter_sizes(Driver([8, 4, 128]), None) == [8, 4, 128]
    with pytest.raises(LookupError):  # then Triton launches
        prepared._parameter_sizes(Driver(None), None)


def test_what_keys_tell_apart() -> None:
    q, k, v = torch.zeros(2, 4, 16), torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16)
    lens, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, 16)

    def key(**changes: Any) -> Any:
        given = {"q": q, "k": k, "v": v, "seq_lens": lens, "out": out, "causal": True, "options": (None,) * 7}
        given = {"batch_idx": None, "cu_seqlens": None, "return_lse": False, **given, **changes}
        return attention_key(**given)

    same = key(q=q.clone(), out=out.clone())
    assert same == key()
    others = [
        key(out=out.clone().requires_grad_()),
        key(out=None),
        key(seq_lens=lens.long()),
        key(k=k.transpose(0, 1).contiguous().transpose(0, 1)),
        key(v=k),
        key(options=(None, 3, *(None,) * 5)),
        key(options=(1, *(None,) * 6)),
        key(options=(1.0, *(None,) * 6)),
        key(return_lse=True),
    ]
    assert len({same, *others}) == 10
    assert key(q=q.clone().requires_grad_()) != same
    with torch.no_grad():
        assert key(q=q.clone().requires_grad_()) == same
    ends = torch.zeros(3, dtype=torch.int32)
    ragged = [
        key(q=torch.zeros(count, 4, 16), out=torch.zeros(count, 4, width), cu_seqlens=ends)
        for count, width in ((3, 16), (70, 16), (3, 32))
    ]
    assert ragged[0] == ragged[1] != ragged[2]  # T does not count, nor in `out`
    assert key(causal=1) is None
    assert key(k=None) is None
    assert key(options=([], *(None,) * 6)) is None


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
        assert counters.tolist() == [1] * counters.numel()


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


def inputs_of(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, batch, length, 2, 64, device="cuda:0", dtype=torch.float16)
    return (
        torch.randn(batch, 8, 64, device="cuda:0", dtype=torch.float16),
        k,
        v,
        torch.full((batch,), length, dtype=torch.int32, device="cuda:0"),
    )


def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    return attend(check_attention(q, k, v, lens))[0][:, 0]


CLOSE = {"atol": 2e-3, "rtol": 2e-2}


@pytest.mark.gpu
def test_kernels_are_launched_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_checked", {})
    q, k, v, lens = inputs_of(3, 200)
    rows = torch.arange(4, dtype=torch.int32, device="cuda:0")
    for _ in range(2):
        found = decode_attention(q, k, v, lens), prefill_attention(q, k, v, rows, lens)
    decode, prefill = calls._checked.values()
    launches = decode._decode, decode._merge, prefill._prefill  # type: ignore[union-attr]
    assert all(one is None or one._aligned is not None for one in launches)
    for out in found:
        torch.testing.assert_close(out, right(q, k, v, lens), **CLOSE)
    monkeypatch.setattr(launch, "prepare", lambda *args: None)  # by Triton, where more is asked for than we know
    monkeypatch.setattr(calls, "_checked", {})
    monkeypatch.setattr("vtensor.triton_kernels.library._plans", {})
    for out in (decode_attention(q, k, v, lens), prefill_attention(q, k, v, rows, lens)):
        torch.testing.assert_close(out, right(q, k, v, lens), **CLOSE)
    assert all(one._aligned is None for one in (p._decode for p in calls._checked.values() if hasattr(p, "_decode")))


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 100])
def test_a_thread_that_has_not_used_the_gpu(queries: int) -> None:
    q, k, v, lens = inputs_of(2, 100)
    rows = torch.arange(3, dtype=torch.int32, device="cuda:0") * queries
    many = q.repeat_interleave(queries, 0)  # new addresses, for which there are no descriptors yet
    expected, found = prefill_attention(many.clone(), k, v, rows, lens), []
    in_threads(*[lambda: found.append(prefill_attention(many, k, v, rows, lens))] * 4)
    assert len(found) == 4
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 40])
def test_threads_share_a_stream(batch: int) -> None:
    # few requests: two kernels, between which other threads launch
    pairs = [inputs_of(batch, 5000) for _ in range(6)]
    expected = [decode_attention(*one) for one in pairs]

    def work(index: int) -> None:
        outs = [decode_attention(*pairs[index]) for _ in range(200)]
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected[index]) for out in outs)

    in_threads(*(functools.partial(work, index) for index in range(len(pairs))))


@pytest.mark.gpu
def test_threads_share_a_plan() -> None:
    pairs = [inputs_of(2, 300) for _ in range(6)]
    expected = [decode_attention(*one) for one in pairs]

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                out = decode_attention(*pairs[index])
            torch.cuda.current_stream().synchronize()
        assert torch.equal(out, expected[index])

    torch.cuda.synchronize()
    in_threads(*(functools.partial(work, index) for index in range(len(pairs))))


@pytest.mark.gpu
@pytest.mark.parametrize("before", ["nothing", "kernel", "memset", "copy", "join"])
@pytest.mark.parametrize("batch", [1, 40])
def test_a_graph_waits_for_what_comes_before(before: str, batch: int) -> None:
    # our kernels are launched before what they follow has ended
    q, k, v, lens = inputs_of(batch, 3000)
    new = torch.randn(2, batch, 2, 64, device="cuda:0", dtype=torch.float16)
    source, side = k.clone(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    append_kv(*new, k, v, lens)
    decode_attention(q, k, v, lens)
    with torch.cuda.graph(graph):
        if before == "kernel":
            k.mul_(2.0)
        elif before == "memset":
            k.zero_()
        elif before == "copy":
            k.copy_(source)
        elif before == "join":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                k.mul_(0.5)
            v.add_(1.0)
            torch.cuda.current_stream().wait_stream(side)
        append_kv(*new, k, v, lens)
        first = decode_attention(q, k, v, lens)
        k.mul_(0.5)
        second = decode_attention(q, k, v, lens)
        lens.sub_(7)
        third = decode_attention(q, k, v, lens)
    for _ in range(3):
        graph.replay()
        whole = lens + 7
        torch.testing.assert_close(third, right(q, k, v, lens), **CLOSE)
        torch.testing.assert_close(second, right(q, k, v, whole), **CLOSE)
        torch.testing.assert_close(first, right(q, k * 2, v, whole), **CLOSE)
        lens.add_(7)


@pytest.mark.gpu
def test_a_callers_pool_gets_nothing_that_stays() -> None:
    q, k, v, lens = inputs_of(200, 64)
    stream, pool = torch.cuda.Stream(), torch.cuda.MemPool()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
        out = decode_attention(q, k, v, lens)
    stream.synchronize()
    torch.testing.assert_close(out, right(q, k, v, lens), **CLOSE)
    key = (0, stream.cuda_stream)
    kept = [workspace._of_streams[key], workspace._scratches[*key, "parts"]]
    segments = [(one["address"], one["address"] + one["total_size"]) for one in pool.snapshot()]
    assert segments  # the output
    assert not any(begin <= one.data_ptr() < end for one in kept for begin, end in segments)
