"""Virtual tensors in compiled code: as without, with memory where it is written, and never a crash."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import vtensor as vt
from tests.helpers.faults import BROKEN, fail
from vtensor.allocator.driver import Call, Driver, get_driver

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def page(device: str) -> int:
    return int(get_driver(device).default_page_group_bytes)


def rows(device: str, number: int = 64, **options: Any) -> vt.VirtualTensor:
    """Rows of one page group each."""
    return vt.empty(number, page(device) // 4, device=device, **options)


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, fullgraph=True, backend=backend, **options)
    return made


def values(result: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), result)


def write_slices(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[3] = y
    x[5:7].add_(1)
    x[0:64:9].mul_(2)
    return x[3:8].sum(), x[5], x[-1] + 1


def write_by_index(x: torch.Tensor, y: torch.Tensor) -> Any:
    index = torch.tensor([3, 50], device=x.device)
    x[index] = y
    x.index_add_(0, index + 1, y.expand(2, -1))
    return x[index].sum(), x.index_select(0, index + 2)


def write_both(x: torch.Tensor, y: torch.Tensor) -> Any:
    # What is read of x must be read after it was written, and what is written to y is plain.
    y.copy_(x[3])
    x[4].copy_(y + 1)
    y.add_(x[4])
    return y * 2, torch.where(x[4] > 0, x[4], y)


def write_views(x: torch.Tensor, y: torch.Tensor) -> Any:
    bits = x[10:20].view(torch.int32).t()
    bits[0] = 7
    first, second = x[10:12].unbind(0)
    first.mul_(2)
    second.copy_(y)
    corner = x.as_strided((2, 4), (x.stride(0), 1), 10 * x.stride(0))
    return bits[:2], corner + 1, x.transpose(0, 1)[:3, 10:12], second, x


def write_with_out(x: torch.Tensor, y: torch.Tensor) -> Any:
    torch.add(y, 1, out=x[2])
    torch.mul(x[2:4], 3, out=x[6:8])
    return x[6:8].max(dim=1), x.new_zeros(3), torch.ones_like(x[1])


def sort_and_split(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[1] = y
    values, indices = x[:3].sort(dim=0)
    return values, indices, [part + 1 for part in x[:4].chunk(2)], torch.cat([x[:2], y[None]])


def masked(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[2].masked_fill_(y > 0, 4.0)
    return torch.nn.functional.layer_norm(x[2:4], x.shape[1:]), x[2].to(torch.bfloat16), x[:2].bool().any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "function",
    [
        write_slices,
        write_by_index,
        write_both,
        write_views,
        write_with_out,
        sort_and_split,
        masked,
    ],
)
def test_as_without(function: Callable[..., Any], backend: str, device: str) -> None:
    torch.manual_seed(0)
    y = torch.randn(page(device) // 4, device=device)
    theirs, ours, eager = torch.zeros(64, len(y), device=device), rows(device), rows(device)
    expected = values(function(theirs, y.clone()))
    function(eager, y.clone())
    run = compiled(function, backend)
    for _ in range(2):
        ours.zero_()
        ours.decommit()
        torch.testing.assert_close(values(run(ours, y.clone())), expected, rtol=1e-6, atol=1e-6)
        assert ours.residency().tolist() == eager.residency().tolist()
        torch.testing.assert_close(ours.clone(), theirs)


def test_what_comes_back(device: str) -> None:
    def give(x: torch.Tensor) -> Any:
        return x, x[3:], x[4] * 2, x[5:5]

    x = rows(device)
    same, view, result, nothing = compiled(give)(x)
    assert [type(tensor).__name__ for tensor in (same, view, result)] == ["VirtualTensor", "VirtualTensor", "Tensor"]
    assert view.data_ptr() == x[3:].data_ptr()
    assert nothing.shape == (0, *x.shape[1:])
    view[0, 0] = 3
    assert x[3, :2].tolist() == [3, 0]
    assert x.resident_bytes == page(device)


def test_as_many_graphs_as_for_plain_tensors(device: str) -> None:
    def write(x: torch.Tensor, row: int, value: float) -> Any:
        x[row] = value
        x[row : row + 2] += 2
        return x[: row + 1, 0].sum()

    x, plain = rows(device), torch.zeros(64, page(device) // 4, device=device)
    results, num_graphs = [], []
    for tensor in (x, plain):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        run = torch.compile(write, fullgraph=True, backend=counter)
        results.append([run(tensor, row, row / 2).item() for row in (3, 5, 7, 9, 20)])
        num_graphs.append(counter.frame_count)
    assert results[0] == results[1]
    assert num_graphs[0] == num_graphs[1]
    assert x.residency().sum() == 10
    torch.testing.assert_close(x.clone(), plain)


VIEWS: dict[str, Callable[[Any, int], Any]] = {
    "rows": lambda x, n: x[n : n + 2],
    "more and more": lambda x, n: x[n : 2 * n],
    "narrow": lambda x, n: x.narrow(0, n, 2 * n),
    "transposed": lambda x, n: x[n:-n].t(),
    "steps": lambda x, n: x[::n],
    "square": lambda x, n: x.view(-1)[: n * n].view(n, n),
    "unfold": lambda x, n: x[n, :64].unfold(0, n, n),
    "detached": lambda x, n: x[n:].detach(),
    "as_virtual": lambda x, n: vt.as_virtual(x[n:].plain()),
    "of a graph": lambda x, n: torch.compile(lambda x: x[3:], backend="aot_eager")(x),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_as_arguments(name: str, device: str) -> None:
    def write(view: torch.Tensor) -> Any:
        view += 1
        return view[1:], view.sum()

    x, plain = rows(device, 16), torch.zeros(16, page(device) // 4, device=device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(write, fullgraph=True, backend=counter)
    for number in range(1, 5):
        expected = VIEWS[name](x, number)[1:]
        view, _ = run(VIEWS[name](x, number))
        if name in ("as_virtual", "of a graph"):
            plain[3 if name == "of a graph" else number :] += 1
        else:
            write(VIEWS[name](plain, number))
        torch.testing.assert_close(x.clone(), plain)
        if view.numel():
            assert view.data_ptr() == expected.data_ptr()
    assert counter.frame_count <= 3  # the first is for its own sizes; one more, where a size of 1 is met


def test_values_that_are_asked_for(device: str) -> None:
    x = rows(device)
    run = torch.compile(lambda x: x[3].add_(1) if bool(x[3, 3] == 0) else x[4].add_(1), backend="aot_eager")
    run(x)
    run(x)
    assert x.residency().nonzero()[0].tolist() == [3, 4]


def test_many_arguments(device: str) -> None:
    module = nn.Module()
    for number in range(40):
        module.register_buffer(f"b{number}", rows(device, 2))

    def write(module: nn.Module) -> Any:
        return sum(buffer[1].add_(1).sum() for buffer in module.buffers())

    run = compiled(write)
    for number in range(1, 4):
        assert run(module).item() == 40 * number * page(device) // 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_arguments_of_one_memory(backend: str, device: str) -> None:
    def write(a: torch.Tensor, b: torch.Tensor) -> Any:
        a[0] = 1
        before = b.sum()
        b.add_(2)
        return a.sum(), before

    x = rows(device)
    total, before = compiled(write, backend)(x[:2], x[0:1])
    assert (total.item(), before.item()) == (3 * x.shape[1], x.shape[1])


class Attention(nn.Module):
    """Allocates for the longest context, as decoders that are compiled do."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192, device=device)
        self.register_buffer("keys", torch.zeros(1, 2, 65_536, 32, device=device))
        self.register_buffer("values", torch.zeros(1, 2, 65_536, 32, device=device))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).view(1, -1, 3, 2, 32).permute(2, 0, 3, 1, 4)
        self.keys[:, :, position] = key
        self.values[:, :, position] = value
        mask = torch.arange(256, device=x.device) <= position[:, None]
        return F.scaled_dot_product_attention(query, self.keys[:, :, :256], self.values[:, :, :256], attn_mask=mask)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_module_with_a_virtual_cache(backend: str, mode: Callable[..., Any], device: str) -> None:
    torch.manual_seed(0)
    plain = Attention(device)
    with vt.virtual(min_bytes=1 << 20):
        virtual = Attention(device)
    virtual.qkv.load_state_dict(plain.qkv.state_dict())
    run = compiled(virtual, backend)
    with mode():
        for number in range(4):
            x, position = torch.randn(1, 1, 64, device=device), torch.tensor([number], device=device)
            torch.testing.assert_close(run(x, position), plain(x, position))
    assert virtual.keys.resident_bytes == 2 * page(device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend: str, device: str) -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x[3] * y).sum() + x[4].exp().sum()

    y = torch.randn(page(device) // 4, device=device, requires_grad=True)
    x = rows(device, 8, requires_grad=True)
    compiled(loss, backend)(x, y).backward()
    assert type(x.grad) is torch.Tensor
    torch.testing.assert_close(x.grad[3], y.detach())
    assert x.grad[4].unique().tolist() == [1]
    assert y.grad is not None
    assert not y.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_keeps_what_its_backward_needs(backend: str, device: str) -> None:
    pool = vt.PagePool(device, capacity_bytes=8 * page(device))
    x, y = rows(device, 8, pool=pool), torch.ones((), device=device, requires_grad=True)
    x[3] = 5
    loss = compiled(lambda x, y: (x[3:][0] * y).sum(), backend)(x, y)
    del x
    gc.collect()
    assert pool.stats().mapped_page_groups > 0
    loss.backward()
    assert y.grad is not None
    assert y.grad.item() == 5 * page(device) // 4
    del loss
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        vt.empty(1, device=device)
    assert pool.stats().mapped_page_groups == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[3].fill_(100),
        lambda x: compiled(lambda x: x[3].mul_(2))(x),
        lambda x: x.plain()[3].fill_(100),
        lambda x: x.decommit(),
        lambda x: compiled(lambda x: x[3:])(x)[0].fill_(100),
        lambda x: x.zero_(),
    ],
)
def test_what_a_backward_needs_must_not_be_written_to(write: Callable[[Any], Any], device: str) -> None:
    x, y = rows(device, 8), torch.ones((), device=device, requires_grad=True)
    run = compiled(lambda x, y: (x[3] * y).sum())
    x[3] = 5
    loss = run(x, y)
    rows(device, 8)[3] = 7  # another tensor
    assert x[3, 0].item() == 5
    loss.backward()
    loss = run(x, y)
    write(x)
    with pytest.raises(RuntimeError, match="needed for gradient computation was written to"):
        loss.backward()


def test_what_requires_grad_is_not_written_in_a_graph(device: str) -> None:
    def write(x: torch.Tensor, weight: torch.Tensor) -> None:
        x[0] = weight * 2

    weight = torch.ones(page(device) // 4, device=device, requires_grad=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="requires grad"):
        compiled(write)(rows(device, 8), weight)
    x = rows(device, 8)
    torch.compile(write, backend="aot_eager")(x, weight)  # the graph ends there
    (x.sum() + weight.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.unique().tolist() == [3]
    with torch.no_grad():
        compiled(write)(rows(device, 8), weight)


def test_writes_of_a_graph_are_known_outside(device: str) -> None:
    x, y = rows(device, 8), torch.ones((), device=device, requires_grad=True)
    loss = (x[3] * y).sum()
    version = x._version
    compiled(lambda x: x.sum())(x)
    assert x._version == version
    compiled(lambda x: x.add_(1))(x)
    assert x._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_write_before_what_is_saved_is_none_after_it(device: str) -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[3] = 5
        return (x[3] * y).sum() + x[4].sum()

    y = torch.ones((), device=device, requires_grad=True)
    compiled(loss)(rows(device, 8), y).backward()
    assert y.grad is not None
    assert y.grad.item() == 5 * page(device) // 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_conjugates_are_refused_rather_than_lost(backend: str, device: str) -> None:
    x = vt.empty(4, 4, dtype=torch.complex64, device=device)
    x[0] = 1 + 2j
    for function in (lambda x: x.conj()[0] * 1, lambda x: x.mH + 0, lambda x: x[0].mul_(1j).conj() + 1):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="conjugates of virtual tensors are not for graphs"):
            compiled(function, backend)(x)
    with pytest.raises(Exception, match="conjugate of a virtual tensor cannot come into a graph"):
        compiled(lambda x: x + 1, backend)(x.conj())
    for function in (lambda x: x[0] * 2j + x[1].real, lambda x: x.clone().conj()[0] * 1, lambda x: x[0].imag + 1):
        assert torch.equal(compiled(function, backend)(x), function(x))


def test_a_view_of_a_graph_counts_versions_with_its_tensor(device: str) -> None:
    x, y = rows(device, 8), torch.ones((), device=device, requires_grad=True)
    for write in (
        lambda x: compiled(lambda x: x[1:])(x)[2].add_(1),
        lambda x: compiled(lambda view: view.add_(1))(compiled(lambda x: x[1:])(x)),
        lambda x: x.decommit(),
    ):
        x[3] = 2
        loss = (x[3] * y).sum()
        write(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_tensor_that_has_moved_to_plain_memory(device: str) -> None:
    x = vt.empty(4, 8, device=device)
    x.data = torch.ones(4, 8, device=device)
    run = compiled(lambda x: x[1:].add_(5).sum())
    assert run(x).item() == 3 * 8 * 6
    assert x.sum().item() == 8 + 3 * 8 * 6
    for copied in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, x)
    module = nn.Linear(8, 4, bias=False, device=device)
    module.weight = nn.Parameter(vt.empty(4, 8, device=device).add_(1))
    module = module.half()
    assert copy.deepcopy(module).weight.sum().item() == 32
    assert compiled(module)(torch.ones(1, 8, device=device, dtype=torch.float16)).tolist() == [[8] * 4]


def test_eager_code_while_a_graph_is_made(device: str) -> None:
    x, index = rows(device, 16), torch.tensor([3], device=device)

    def backend(graph: Any, examples: Any) -> Any:
        x[8:][index] = 1.0
        x[4:].index_add_(0, index, torch.ones(1, x.shape[1], device=device))
        return graph.forward

    torch.compile(lambda a: a * 2, backend=backend)(torch.ones(2, device=device))
    assert x.residency().nonzero()[0].tolist() == [7, 11]


def test_an_empty_view_keeps_where_it_is(device: str) -> None:
    x = rows(device, 8)
    x[2] = 5
    assert compiled(lambda view: view.as_strided((2,), (1,)) + 1)(x[2:2]).tolist() == [6, 6]


def test_a_mode_around_a_graph(device: str) -> None:
    with vt.virtual(min_bytes=1):
        x = torch.zeros(8, page(device) // 4, device=device)
        result = compiled(lambda x: x[3].add_(1) + torch.zeros(5, 1, device=x.device))(x)
    assert type(result) is torch.Tensor
    assert result.shape == (5, x.shape[1])
    assert isinstance(x, vt.VirtualTensor)


def test_plain_code_after_virtual_code(device: str) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x.add_(x)

    run = compiled(double)
    for tensor in (rows(device).add_(1), torch.ones(64, page(device) // 4, device=device), rows(device).add_(1)):
        result = run(tensor)
        assert type(result) is type(tensor)
        assert result.data_ptr() == tensor.data_ptr()
        assert (result == 2).all()


def test_a_call_keeps_nothing() -> None:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[3] = y
        return x[3:5].sum()

    x, y = rows("cpu"), torch.ones(page("cpu") // 4)
    run = compiled(write)
    run(x, y)
    gc.collect()
    gc.disable()
    try:
        run(x, y)
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert storage.expired()
    finally:
        gc.enable()


def test_inductor_leaves_calls_out_of_cuda_graphs() -> None:
    inductor: Any = importlib.import_module("torch._inductor.utils")
    compiled(lambda x: x[3].add_(1).sum(), backend="inductor")(rows("cpu"))
    graph = torch.fx.Graph()
    call = graph.call_function(torch.ops.higher_order.with_effects, (None, torch.ops.vtensor.run.default))
    assert inductor.is_cudagraph_unsafe_fx_node(call)
    assert not inductor.is_cudagraph_unsafe_fx_node(graph.call_function(torch.ops.aten.add.Tensor, (1, 2)))


@pytest.mark.gpu
def test_cuda_graphs_leave_virtual_tensors_alone() -> None:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[3] = y.exp()
        return x[3:5].sum() + y.sin().sum()

    run = torch.compile(write, fullgraph=True, mode="reduce-overhead")
    y = torch.zeros(page("cuda:0") // 4, device="cuda")
    for number in range(6):
        x = rows("cuda:0", 8)
        assert run(x, y + number).item() == pytest.approx(write(torch.zeros_like(x), y + number).item(), rel=1e-4)
        assert x.residency().nonzero()[0].tolist() == [3]


def test_a_layer_of_a_cache(device: str) -> None:
    def append(keys: torch.Tensor, position: int) -> Any:
        keys[0, position] = 1.0
        return keys[0, :4].float().sum()

    config = vt.KVCacheConfig(num_layers=2, num_kv_heads=2, head_dim=64, max_batch_size=2, max_context_tokens=1 << 16)
    with vt.KVCacheManager(config, device=device) as cache:
        cache.alloc_reqid()
        assert cache.step([4, 0])
        keys, _ = cache.layer(0)
        run = compiled(append)
        assert run(keys, 2).item() == 128
        with pytest.raises(vt.UnmappedAccessError, match="touches 1 page groups"):
            run(keys, 60_000)
        assert run(keys, 3).item() == 256
        del keys


def test_errors_reach_the_caller_and_change_nothing(device: str, driver: Driver) -> None:
    def write(x: torch.Tensor) -> Any:
        x[3] = 1
        return x[3].sum()

    x, run = rows(device), compiled(write)
    with fail(driver, Call.MAP, 1, BROKEN), pytest.raises(vt.DriverError):
        run(x)
    assert x.resident_bytes == 0
    assert run(x).item() == x.shape[1]


def test_a_limit_of_zeros() -> None:
    x = vt.empty(1 << 42, device="cpu")
    with pytest.raises(vt.UnmappedAccessError, match="read"):
        compiled(lambda x: x.sum())(x)
    assert x.resident_bytes == 0


def python_methods() -> dict[str, Callable[[Any], Any]]:
    def commit(x: Any) -> Any:
        x.commit(2)
        return x[:2].sum()

    def plain(x: Any) -> Any:
        x[3] = 1
        return x.commit(4).plain()[3] + 1

    def make(x: Any) -> Any:
        y = vt.zeros(4, 1 << 16, device=x.device)
        y[1] = 2
        return y[:2].sum() + x[0, 0]

    def item(x: Any) -> Any:
        x[2] = 5
        return x[2, 0].item() + x[1]

    def array(x: Any) -> Any:
        return x[2, :3].cpu().numpy().sum() + x[1]

    def transpose(x: Any) -> Any:
        return x[:].t_().sum()

    def copied(x: Any) -> Any:
        return copy.deepcopy(x[2]) + 1

    def give_back(x: Any) -> Any:
        x[5] = 1
        x.decommit(slice(5, 6))
        return x[5].sum()

    return {
        function.__name__: function for function in (commit, plain, make, item, array, transpose, copied, give_back)
    }


@pytest.mark.parametrize("name", python_methods())
def test_what_no_graph_can_do_ends_it(name: str, device: str) -> None:
    function = python_methods()[name]
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(rows(device)), function(rows(device)))


@pytest.mark.parametrize("name", ["commit", "plain", "make"])
def test_where_no_graph_may_end_it_is_an_error(name: str, device: str) -> None:
    x = rows(device)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="not for graphs"):
        compiled(python_methods()[name])(x)
    x[3] = 1
    assert x.resident_bytes == page(device)


def test_a_tensor_that_grows(device: str) -> None:
    def step(x: torch.Tensor, new: torch.Tensor) -> Any:
        x.append_(new)  # type: ignore[attr-defined]
        return x.sum()

    x = vt.empty(0, 64, device=device, max_rows=1000)
    run = torch.compile(step, backend="aot_eager")
    for number in range(1, 5):
        assert run(x, torch.ones(2, 64, device=device)).item() == 128 * number
    assert x.shape == (8, 64)


def test_a_graph_keeps_no_memory(device: str) -> None:
    pool = vt.PagePool(device, capacity_bytes=16 * page(device))
    x = rows(device, 8, pool=pool)
    run = compiled(lambda x: x.add_(1).sum())
    assert run(x).item() == x.numel()
    del x
    gc.collect()
    assert pool.stats().mapped_page_groups == 0
    assert run(rows(device, 8, pool=pool)).item() == 8 * page(device) // 4
    gc.collect()


def test_a_plain_tensor_of_virtual_memory_is_plain(device: str) -> None:
    x = rows(device).commit(4)
    y = x[:4].plain()
    torch.testing.assert_close(compiled(lambda y: y.add_(1).sum(), "inductor")(y).item(), float(y.numel()))
    assert x[3, :2].tolist() == [1, 1]
