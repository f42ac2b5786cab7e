"""torch's own allocations by tag: where they lie, asleep and awake, in threads and graphs, to the process's end."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.child import in_interpreter
from tests.helpers.threads import in_threads
from vtensor.allocator import pluggable
from vtensor.allocator.driver import get_driver

MIB = 1 << 20


def lies_in(tag: str, tensor: torch.Tensor) -> bool:
    space = pluggable._sources[tag, tensor.device.index].arena.space
    return bool(space.base <= tensor.data_ptr() < space.base + space.size_bytes)


@pytest.fixture
def tag(request: pytest.FixtureRequest) -> Iterator[str]:
    """A tag of the test's own, awake and audited at the end."""
    yield request.node.name
    gc.collect()
    for (name, _), source in list(pluggable._sources.items()):
        if name.startswith(request.node.name):
            source.arena.wake()
            vt.trim(name)
            source.arena.check_integrity()
            assert source.arena.stats().committed_bytes == 0


def large(value: float = 1.0, mib: int = 32) -> torch.Tensor:
    return torch.full((mib * MIB // 4,), value, device="cuda:0")


# -- without a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tag": ""}, "tag='' must be a string that is not empty"),
        ({"tag": 3}, "tag=3 must be a string"),
        ({"mode": "virtual"}, "mode='virtual' must be 'stitched'"),
        ({"threads": "some"}, "threads='some' must be 'current' or 'all'"),
        ({"on_unsupported": "ignore"}, "on_unsupported='ignore' must be 'raise' or 'torch'"),
        ({"device": "nonsense"}, "device='nonsense' is no device that torch knows"),
        ({"device": object()}, "is no device that torch knows"),
        ({"device": "cpu"}, "device='cpu' must be a CUDA device"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vt.use_allocator(**options)


def test_unknown_tags_and_offloads() -> None:
    for tag in (None, [], 3):
        for use in (vt.sleep, vt.wake):
            with pytest.raises(ValueError, match=r"must be a string, as given to vt.use_allocator"):
                use(tag)  # type: ignore[arg-type]
    for use in (vt.sleep, vt.wake, vt.trim, vt.memory_stats):
        with pytest.raises(ValueError, match=r"tag='nobody' is unknown: vt.use_allocator was never entered with it"):
            use("nobody")
    with pytest.raises(ValueError, match="offload='disk' must be 'cpu' or 'discard'"):
        vt.sleep("nobody", offload="disk")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_one_sentence_says_why_and_code_can_go_on() -> None:
    with pytest.raises(vt.VTensorError, match=r"needs a CUDA build|sees no CUDA device"), vt.use_allocator("w"):
        pass
    with vt.use_allocator("without cuda", on_unsupported="torch"):
        x = torch.ones(3)
    assert (vt.sleep("without cuda"), vt.wake("without cuda"), vt.trim("without cuda")) == (0, 0, 0)
    assert vt.memory_stats("without cuda") == vt.MemoryStats()
    assert x.sum() == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_one_object_in_threads_and_in_itself() -> None:
    context = vt.use_allocator("without cuda", on_unsupported="torch")
    meet = threading.Barrier(2, timeout=20)

    def work() -> None:
        for _ in range(3):
            with context, context:
                meet.wait()

    in_threads(work, work)
    assert not context._entered.stack


def test_what_works_later_is_refused() -> None:
    def generate() -> Iterator[int]:
        yield 1

    async def fetch() -> None:
        pass

    for function in (generate, fetch):
        with pytest.raises(TypeError, match="does its work after the call has ended"):
            vt.use_allocator("w")(function)


def test_statistics_add_up() -> None:
    one = vt.MemoryStats(1, 2, 3, 4, 5, 6, 7)
    assert one + one == vt.MemoryStats(2, 4, 6, 8, 10, 12, 14)


# -- the books, without a GPU: what is called of torch, on the host's pages -------------------------------------------


class Pools:
    """What torch would do with its pools, as far as it calls us: allocate in the innermost pool of a thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.entered = threading.local()
        self.made: list[Any] = []
        self.released: list[Any] = []
        pools = self

        class MemPool:
            def __init__(self, allocator: tuple[int, int]) -> None:
                self.allocator, self.id = allocator, (0, len(pools.made))
                pools.made.append(self)

        @contextmanager
        def use_mem_pool(pool: Any, device: object = None) -> Iterator[None]:
            self.stack.append(pool)
            try:
                yield
            finally:
                assert self.stack.pop() is pool

        def page_pool(index: int) -> vt.PagePool:
            return pluggable._page_pools.setdefault(f"cuda:{index}", vt.PagePool("cpu"))

        for name, value in (
            ("torch.cuda.MemPool", MemPool),
            ("torch.cuda.use_mem_pool", use_mem_pool),
            ("torch.cuda.device", lambda device: nullcontext()),
            ("torch.cuda.empty_cache", lambda: None),
            ("torch._C._cuda_customAllocator", lambda allocate, free: (allocate, free)),
            ("torch._C._cuda_releasePool", lambda index, number: self.released.append(number)),
        ):
            patch.setattr(name, value, raising=False)
        patch.setattr(pluggable, "why_not_supported", lambda: "")
        patch.setattr(pluggable, "_index_of", lambda device: 0)
        patch.setattr(pluggable, "_page_pool", page_pool)
        patch.setattr(pluggable, "get_driver", lambda name: get_driver("cpu"))
        patch.setattr(pluggable, "_settle_libraries", lambda device: None)
        patch.setattr(pluggable._Source, "probe", lambda source: None)
        patch.setattr(pluggable, "_ADDRESSES", 1)
        for books in ("_sources", "_unproven", "_page_pools", "_refusals"):
            patch.setattr(pluggable, books, {})

    @property
    def stack(self) -> list[Any]:
        """Pools that this thread is in."""
        if not hasattr(self.entered, "stack"):
            self.entered.stack = []
        return self.entered.stack  # type: ignore[no-any-return]

    def allocate(self, size_bytes: int = 1) -> int:
        """As torch would, for a segment."""
        call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)
        return int(call(self.stack[-1].allocator[0])(size_bytes, 0, 0))


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pools]:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and the real thing below")
    made = Pools(monkeypatch)
    yield made
    for source in pluggable._sources.values():
        source.arena.check_integrity()


def tag_of(address: int) -> str:
    for (tag, _), source in pluggable._sources.items():
        if source.arena.space.base <= address < source.arena.space.base + source.arena.space.size_bytes:
            return tag
    raise AssertionError(f"{address:#x} is nobody's")


def test_who_is_innermost_allocates(pools: Pools) -> None:
    with vt.use_allocator("a"):
        with vt.use_allocator("a"):
            assert tag_of(pools.allocate()) == "a"
            assert len(pools.stack) == 1  # it is this thread's already
        with vt.use_allocator("b"):
            assert tag_of(pools.allocate()) == "b"
            with vt.use_allocator("a"):
                assert tag_of(pools.allocate()) == "a"
            assert tag_of(pools.allocate()) == "b"
        assert tag_of(pools.allocate()) == "a"
    assert not pools.stack
    assert len(pools.made) == 3
    with vt.use_allocator("a"):
        pass
    assert len(pools.made) == 3  # those that are idle serve again


def test_threads_have_pools_of_their_own(pools: Pools) -> None:
    context, meet = vt.use_allocator("a"), threading.Barrier(3, timeout=20)

    def work() -> None:
        for _ in range(3):
            with context:
                meet.wait()
                assert tag_of(pools.allocate()) == "a"
                assert len(pluggable._sources["a", 0]._busy) == 3
                meet.wait()

    in_threads(work, work, work)
    assert len(pools.made) == 3
    assert vt.memory_stats("a").num_segments == 9


def test_sleep_and_trim_keep_to_idle_pools(pools: Pools) -> None:
    with vt.use_allocator("a"):
        pools.allocate(1 << 20)
        with pytest.raises(vt.VTensorError, match=r"tag 'a' on cuda:0 is in use: leave"):
            vt.sleep("a")
        assert vt.trim("a") == 0
        assert not pools.released
    assert vt.sleep("a") == 1 << 20
    assert [pool.id for pool in pools.made] == pools.released
    assert (vt.memory_stats("a").asleep_bytes, vt.memory_stats().committed_bytes) == (1 << 20, 0)
    with pytest.raises(vt.VTensorError, match=r"is asleep, and nothing can be allocated there: vt.wake\('a'\) first"):
        vt.use_allocator("a", on_unsupported="torch").__enter__()
    assert vt.sleep("a") == 0
    assert vt.wake("a") == 1 << 20
    with vt.use_allocator("a"):
        assert len(pools.made) == 2
        assert pools.allocate()


def test_running_out_adds_our_figures_once(pools: Pools) -> None:
    def ask_for_too_much() -> None:
        assert pools.allocate(1 << 50) == 0
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError) as caught, vt.use_allocator("a"), vt.use_allocator("b"):
        ask_for_too_much()
    message = str(caught.value)
    assert message.startswith("no more (vtensor: tag 'b' on cuda:0 has 0 segments of 0 B, was last refused 1024 TiB")
    assert message.count("vtensor: ") == 1


def test_a_device_that_cannot_serve_is_asked_once(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(source: object) -> None:
        raise pluggable._NotAsked("torch asks nobody")

    monkeypatch.setattr(pluggable._Source, "probe", probe)
    for _ in range(2):
        with pytest.raises(vt.VTensorError, match="cuda:0 cannot have its memory mapped by vtensor: torch asks nobody"):
            vt.use_allocator("a").__enter__()
    assert not pluggable._sources
    with vt.use_allocator("a", on_unsupported="torch"):
        pass
    assert vt.sleep("a") == 0


def test_a_passing_failure_is_no_refusal(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(source: object) -> None:
        raise torch.OutOfMemoryError("for now")

    with monkeypatch.context() as patch:
        patch.setattr(pluggable._Source, "probe", probe)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                vt.use_allocator("a", on_unsupported="torch").__enter__()
        assert len(pluggable._unproven) == 1
    with vt.use_allocator("a"):
        assert tag_of(pools.allocate()) == "a"
    pluggable._refusals[0] = "another tag's trouble"
    vt.sleep("a")
    with pytest.raises(vt.VTensorError, match="is asleep"):
        vt.use_allocator("a", on_unsupported="torch").__enter__()


# -- where allocations lie ------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_what_is_allocated_within_lies_there(tag: str) -> None:
    before = torch.cuda.memory_reserved()
    with vt.use_allocator(tag):
        x, small = large(), torch.ones(3, device="cuda")
    outside = large()
    assert lies_in(tag, x)
    assert lies_in(tag, small)
    assert not lies_in(tag, outside)
    stats = vt.memory_stats(tag)
    assert stats.reserved_bytes == stats.committed_bytes >= 34 * MIB
    assert torch.cuda.memory_reserved() - before >= stats.reserved_bytes
    addresses = {segment["address"] for segment in torch.cuda.memory_snapshot()}
    assert x.data_ptr() in addresses
    assert (x.sum().item(), small.sum().item()) == (8 * MIB, 3)


@pytest.mark.gpu
def test_a_backward_within_allocates_there(tag: str) -> None:
    model = torch.nn.Linear(1024, 1024, device="cuda")
    is_multithreaded = torch._C._is_multithreading_enabled()
    with vt.use_allocator(tag):
        model(torch.ones(4, 1024, device="cuda")).sum().backward()
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled() == is_multithreaded
    assert lies_in(tag, model.weight.grad)  # type: ignore[arg-type]
    assert not lies_in(tag, model.weight)
    model.weight.grad = None


@pytest.mark.gpu
def test_other_threads_are_asked(tag: str) -> None:
    for threads in ("current", "all"):
        made: list[torch.Tensor] = []
        with vt.use_allocator(tag, threads=threads):  # type: ignore[arg-type]
            in_threads(lambda made=made: made.append(large()))  # type: ignore[misc]
        assert lies_in(tag, made[0]) == (threads == "all")


@pytest.mark.gpu
def test_the_innermost_tag_counts(tag: str) -> None:
    other = f"{tag} other"
    with vt.use_allocator(tag):
        with vt.use_allocator(other):
            b = large()
            with vt.use_allocator(other):
                c = large()
            d = large()
            with vt.use_allocator(tag):
                e = large()
        a = large()
    assert [lies_in(tag, x) for x in (a, b, c, d, e)] == [True, False, False, False, True]
    assert all(lies_in(other, x) for x in (b, c, d))


@pytest.mark.gpu
def test_as_a_decorator_of_what_calls_itself(tag: str) -> None:
    @vt.use_allocator(tag)
    def make(depth: int) -> list[torch.Tensor]:
        return [large(mib=4), *(make(depth - 1) if depth else [])]

    assert all(lies_in(tag, x) for x in make(3))
    assert not lies_in(tag, large(mib=4))


@pytest.mark.gpu
def test_an_error_within_ends_it(tag: str) -> None:
    with pytest.raises(ZeroDivisionError), vt.use_allocator(tag):
        large().fill_(1 / 0)
    assert not lies_in(tag, large())
    vt.sleep(tag)
    with pytest.raises(vt.VTensorError, match="is asleep"), vt.use_allocator(tag):
        pass
    assert not lies_in(tag, large())


@pytest.mark.gpu
def test_bad_devices() -> None:
    with pytest.raises(ValueError, match="device"), vt.use_allocator("bad", device="cuda:99"):
        pass
    with pytest.raises(RuntimeError, match="left before it was entered"):
        vt.use_allocator("bad").__exit__(None, None, None)


@pytest.mark.gpu
def test_two_threads_at_once(tag: str) -> None:
    meet = threading.Barrier(2, timeout=20)
    with vt.use_allocator(tag):
        pass

    def work() -> None:
        with vt.use_allocator(tag):
            meet.wait()
            x = large()
            assert len(pluggable._sources[tag, 0]._busy) == 2
            meet.wait()
        assert lies_in(tag, x)

    in_threads(work, work)
    assert not pluggable._sources[tag, 0]._busy


# -- asleep -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["cpu", "discard"])
def test_asleep_and_awake_again(offload: Any, tag: str) -> None:
    with vt.use_allocator(tag):
        x, y = large(3.0, mib=300), large(4.0, mib=100)
    addresses = x.data_ptr(), y.data_ptr()
    free = torch.cuda.mem_get_info()[0]
    freed = vt.sleep(tag, offload=offload)
    assert freed >= 400 * MIB
    assert torch.cuda.mem_get_info()[0] - free >= freed - 8 * MIB
    assert vt.memory_stats(tag).asleep_bytes == freed
    assert vt.sleep(tag) == 0
    borrowed = torch.full((200 * MIB,), 9, dtype=torch.uint8, device="cuda")
    assert vt.wake(tag) == freed
    assert vt.wake(tag) == 0
    assert (x.data_ptr(), y.data_ptr()) == addresses
    expected = (3.0, 4.0) if offload == "cpu" else (0.0, 0.0)
    assert (x.unique().tolist(), y.unique().tolist()) == ([expected[0]], [expected[1]])
    assert (borrowed == 9).all()


@pytest.mark.gpu
def test_a_graph_replays_after_sleep_and_wake(tag: str) -> None:
    with vt.use_allocator(tag):
        weight, out = torch.eye(512, device="cuda") * 2, torch.zeros(512, device="cuda")
    x = torch.arange(512.0, device="cuda")
    out.copy_(weight @ x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(weight @ x)
    for _ in range(3):
        out.zero_()
        vt.sleep(tag)
        filler = large(7.0, mib=64)
        vt.wake(tag)
        graph.replay()
        assert torch.equal(out, x * 2)
        del filler


@pytest.mark.gpu
def test_nobody_sleeps_who_is_in_use(tag: str) -> None:
    with vt.use_allocator(tag):
        x = large()
        with pytest.raises(vt.VTensorError, match="is in use: leave"):
            vt.sleep(tag)
    assert (x == 1).all()


@pytest.mark.gpu
def test_free_while_asleep(tag: str) -> None:
    with vt.use_allocator(tag):
        x, y = large(5.0), large(6.0)
    vt.sleep(tag)
    del x
    assert vt.trim(tag) == 0
    vt.wake(tag)
    assert (y == 6).all()
    with vt.use_allocator(tag):
        z = large(7.0)
    assert (y == 6).all()
    assert (z == 7).all()


@pytest.mark.gpu
def test_memory_freed_by_one_tag_serves_another(tag: str) -> None:
    other = f"{tag} other"
    with vt.use_allocator(tag):
        x = large(1.0)
    del x
    vt.trim(tag)
    with vt.use_allocator(other):
        y = large(2.0)
    with vt.use_allocator(tag):
        z = large(3.0)
    vt.sleep(tag)
    assert (y == 2).all()
    vt.wake(tag)
    assert (z == 3).all()


@pytest.mark.gpu
def test_what_libraries_keep_does_not_sleep(tag: str) -> None:
    torch._C._cuda_clearCublasWorkspaces()
    with vt.use_allocator(tag):
        a = torch.eye(1024, device="cuda")
        b = a @ a  # cuBLAS takes a workspace, and keeps it
    vt.sleep(tag)
    c = torch.ones(1024, 1024, device="cuda")
    assert ((c @ c) == 1024).all()
    vt.wake(tag)
    assert torch.equal(a, b)


@pytest.mark.gpu
def test_trimmed_while_others_allocate_and_capture(tag: str) -> None:
    other, x = f"{tag} other", torch.ones(8, device="cuda")
    with vt.use_allocator(tag):
        y = large()
    del y
    with vt.use_allocator(other):
        assert vt.trim(tag) >= 32 * MIB
        z = large(2.0)
    graph = torch.cuda.CUDAGraph()
    with vt.use_allocator(tag):
        y = large()
    del y
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        in_threads(lambda: vt.trim(tag))
        x.mul_(2)
    graph.replay()
    assert (x == 2).all()
    assert (z == 2).all()


@pytest.mark.gpu
def test_a_model_and_its_training(tag: str) -> None:
    def train(steps: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(steps):
            torch.manual_seed(step)
            x = torch.randn(64, 256, device="cuda")
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda()
        return model, torch.optim.AdamW(model.parameters())

    expected = train(6, *make())
    with vt.use_allocator(tag):
        model, optimizer = make()
        losses = train(3, model, optimizer)
    vt.sleep(tag)
    vt.wake(tag)
    later = []
    for step in range(3, 6):
        torch.manual_seed(step)
        x = torch.randn(64, 256, device="cuda")
        with vt.use_allocator(tag):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
        later.append(loss.item())
    assert losses + later == pytest.approx(expected, rel=1e-6)


@pytest.mark.gpu
def test_two_models_in_turns(tag: str) -> None:
    transformers = pytest.importorskip("transformers")

    def load(seed: int) -> Any:
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=1000
        )
        return transformers.LlamaForCausalLM(config).cuda().eval()

    def generate(model: Any) -> list[int]:
        prompt = torch.arange(1, 9, device="cuda")[None]
        return list(model.generate(prompt, max_new_tokens=24, do_sample=False)[0].tolist())

    with vt.use_allocator(tag):
        first = load(1)
    expected = generate(first)
    freed = vt.sleep(tag)
    other = f"{tag} other"
    with vt.use_allocator(other):
        second = load(2)
    others = generate(second)
    assert others != expected
    assert vt.sleep(other) >= freed // 2
    vt.wake(tag)
    assert generate(first) == expected
    vt.sleep(tag)
    vt.wake(other)
    assert generate(second) == others


# -- giving back ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_trim_gives_back_what_no_tensor_uses(tag: str) -> None:
    with vt.use_allocator(tag):
        x, y = large(mib=200), large(2.0, mib=64)
    del x
    assert vt.memory_stats(tag).committed_bytes >= 264 * MIB
    assert vt.trim(tag) >= 200 * MIB
    assert (y == 2).all()
    with vt.use_allocator(tag):
        z = large(3.0, mib=64)  # from a new pool
    assert (y == 2).all()
    del y
    torch.cuda.empty_cache()  # the old pool has no owner any more
    assert vt.memory_stats(tag).committed_bytes < 100 * MIB
    assert (z == 3).all()


@pytest.mark.gpu
def test_memory_goes_back_only_once_kernels_are_done_with_it(tag: str) -> None:
    result = torch.zeros(8 * MIB, device="cuda")
    for value in (2.0, 3.0, 4.0):
        with vt.use_allocator(tag):
            x = large(value)
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        result.copy_(x)
        del x
        vt.trim(tag)
        with vt.use_allocator(tag):
            other = large(-1.0)
        assert (result == value).all()
        del other


@pytest.mark.gpu
def test_out_of_memory_names_both_sides(tag: str) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, vt.use_allocator(tag):
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    message = str(caught.value)
    assert "Tried to allocate 32768.00 GiB" in message
    assert f"vtensor: tag '{tag}' on cuda:0 has 1 segments of 2 MiB" in message
    assert "was last refused 32 TiB" in message
    assert "vt.trim(" in message
    assert vt.memory_stats(tag).num_failed >= 1
    with vt.use_allocator(tag):
        assert (large() == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_threads_streams_and_frees_by_others(seconds: float, tag: str) -> None:
    shelf: list[tuple[torch.Tensor, int]] = []
    lock = threading.Lock()
    end = time.monotonic() + seconds

    def work(seed: int) -> None:
        chance, stream = random.Random(seed), torch.cuda.Stream()
        while time.monotonic() < end:
            with vt.use_allocator(tag), torch.cuda.stream(stream):
                value = chance.randrange(1, 100)
                x = torch.full((chance.randrange(1, 12 * MIB),), value, dtype=torch.uint8, device="cuda")
                event = stream.record_event()
            with lock:
                shelf.append((x, value))
                other, expected = shelf.pop(chance.randrange(len(shelf))) if len(shelf) > 12 else (x, value)
            torch.cuda.current_stream().wait_event(event)
            if other is not x:
                torch.cuda.synchronize()
            else:
                other.record_stream(torch.cuda.current_stream())
            assert (other == expected).all()
            if chance.random() < 0.02:
                vt.trim(tag)

    in_threads(*(lambda seed=seed: work(seed) for seed in range(4)))  # type: ignore[misc]
    torch.cuda.synchronize()
    for x, value in shelf:
        assert (x == value).all()
    shelf.clear()


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("is_asleep", [False, True])
def test_the_process_ends_well_with_everything_alive(is_asleep: bool) -> None:
    ended = in_interpreter(f"""
        import torch, vtensor as vt
        with vt.use_allocator("w"):
            weights = torch.ones(1 << 24, device="cuda")
            gone = torch.ones(1 << 22, device="cuda")
        del gone
        if {is_asleep}:
            vt.sleep("w")
        context = vt.use_allocator("v")
        context.__enter__()
        more = torch.ones(1 << 24, device="cuda")
        print("done")
        """)
    assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr


@pytest.mark.gpu
def test_expandable_segments_serve_or_are_refused() -> None:
    ended = in_interpreter("""
        import os
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        import torch, vtensor as vt
        torch.ones(1 << 24, device="cuda")
        try:
            with vt.use_allocator("w"):
                x = torch.ones(1 << 24, device="cuda")
        except vt.VTensorError as error:
            assert "expandable_segments" in str(error)
        else:
            vt.sleep("w")
            vt.wake("w")
            assert (x == 1).all()
        print("done")
        """)
    assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr
