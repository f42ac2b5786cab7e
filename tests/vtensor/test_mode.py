"""`vt.virtual()`, under which torch's own functions make virtual tensors, and `vt.as_virtual`."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import vtensor as vt
from vtensor.allocator.driver import get_driver
from vtensor.region import _owned, _viewed

SIZE = 1 << 16  # bytes from which on tensors are virtual here
LARGE = (4, SIZE)


def page(device: str) -> int:
    return int(get_driver(device).default_page_group_bytes)


VIRTUAL: dict[str, Callable[[str], torch.Tensor]] = {
    "empty": lambda device: torch.empty(*LARGE, device=device),
    "zeros": lambda device: torch.zeros(LARGE, device=device),
    "by keyword": lambda device: torch.zeros(size=LARGE, dtype=torch.float16, device=torch.device(device)),
    "full of zeros": lambda device: torch.full(LARGE, 0, device=device),
    "full of falsehood": lambda device: torch.full(LARGE, False, device=device),
    "empty_strided": lambda device: torch.empty_strided(LARGE, (1, 8), device=device),
    "empty_like": lambda device: torch.empty_like(torch.ones(LARGE, device=device).t()),
    "zeros_like": lambda device: torch.zeros_like(torch.ones(LARGE, device=device), dtype=torch.int32),
    "full_like": lambda device: torch.full_like(torch.ones(LARGE, device=device), 0),
    "new_zeros": lambda device: torch.ones(1, device=device).new_zeros(LARGE),
    "new_empty": lambda device: torch.ones(1, dtype=torch.uint8, device=device).new_empty(*LARGE),
    "new_full": lambda device: torch.ones(1, device=device).new_full(LARGE, 0.0),
    "that learns": lambda device: torch.zeros(LARGE, device=device, requires_grad=True),
}
PLAIN: dict[str, Callable[[str], torch.Tensor]] = {
    "small": lambda device: torch.zeros(SIZE // 8, device=device),
    "full of ones": lambda device: torch.full(LARGE, 1, device=device),
    "full of minus zeros": lambda device: torch.full(LARGE, -0.0, device=device),
    "ones": lambda device: torch.ones(LARGE, device=device),
    "random": lambda device: torch.randn(LARGE, device=device),
    "meta": lambda device: torch.zeros(LARGE, device="meta"),
    "sparse": lambda device: torch.zeros(LARGE, layout=torch.sparse_coo, device=device),
    "out": lambda device: torch.zeros(LARGE, out=torch.empty(1, device=device)),
    "arithmetic": lambda device: torch.ones(LARGE, device=device) + 1,
}


@pytest.mark.parametrize("name", VIRTUAL)
def test_large_tensors_are_virtual(name: str, device: str) -> None:
    with vt.virtual(SIZE):
        x = VIRTUAL[name](device)
    plain = VIRTUAL[name](device)
    assert type(x) is vt.VirtualTensor
    assert (x.shape, x.stride(), x.dtype, x.device) == (plain.shape, plain.stride(), plain.dtype, plain.device)
    assert (x.requires_grad, x.resident_bytes) == (plain.requires_grad, 0)
    assert not x.detach().any()


@pytest.mark.parametrize("name", PLAIN)
def test_others_remain_torchs(name: str, device: str) -> None:
    with vt.virtual(SIZE):
        x = PLAIN[name](device)
    assert type(x) is torch.Tensor
    if name == "full of minus zeros":
        assert torch.signbit(x).all()


def test_code_that_names_no_device(device: str) -> None:
    with torch.device(device), vt.virtual(SIZE):
        assert torch.zeros(LARGE).device == torch.device(device)
    with vt.virtual(SIZE), torch.device(device):
        x = torch.zeros(LARGE)
    assert (type(x), x.device) == (vt.VirtualTensor, torch.device(device))
    assert type(torch.zeros(LARGE)) is torch.Tensor


def test_modes_may_be_nested_and_end_with_an_error() -> None:
    with vt.virtual(1 << 40), vt.virtual(SIZE):
        assert type(torch.zeros(LARGE)) is vt.VirtualTensor
    with pytest.raises(RuntimeError), vt.virtual(SIZE):
        torch.zeros(2, -1)
    assert type(torch.zeros(LARGE)) is torch.Tensor


def test_other_threads_are_not_concerned() -> None:
    found: list[Any] = []
    with vt.virtual(SIZE):
        thread = threading.Thread(target=lambda: found.append(type(torch.zeros(LARGE))))
        thread.start()
        thread.join()
    assert found == [torch.Tensor]


@pytest.mark.parametrize("options", [{"min_bytes": 0}, {"min_bytes": 1.5}, {"on_touch": "both"}, {"pool": "cpu"}])
def test_bad_options(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        vt.virtual(**options)


def test_a_pool_and_what_is_missing_raises(device: str) -> None:
    pool = vt.PagePool(device, capacity_bytes=16 * page(device))
    with vt.virtual(SIZE, pool=pool, on_touch="raise"):
        x: Any = torch.zeros(LARGE, device=device)
    with pytest.raises(vt.UnmappedAccessError):
        x.sum()
    x.commit()
    assert pool.stats().mapped_page_groups == x.reserved_bytes // page(device)


class Cache(torch.nn.Module):
    """As gpt-fast keeps its cache: buffers for the longest context."""

    def __init__(self, batch: int, length: int, heads: int, dim: int, device: str) -> None:
        super().__init__()
        shape = (batch, heads, length, dim)
        self.register_buffer("k_cache", torch.zeros(shape, device=device))
        self.register_buffer("v_cache", torch.zeros(shape, device=device))

    def update(self, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.k_cache[:, :, positions] = k
        self.v_cache[:, :, positions] = v
        return self.k_cache, self.v_cache


def test_a_model_that_allocates_for_the_longest_context(device: str) -> None:
    batch, length, heads, dim = 2, 64 * page(device) // 1024, 2, 64
    with vt.virtual(SIZE):
        virtual = Cache(batch, length, heads, dim, device)
    plain = Cache(batch, length, heads, dim, device)
    for start, number in ((0, 10), (10, 1), (11, 1)):
        positions = torch.arange(start, start + number, device=device)
        q, k, v = torch.randn(3, batch, heads, number, dim, device=device).unbind()
        mask = torch.arange(length, device=device)[None] <= positions[:, None]
        found, expected = (
            torch.nn.functional.scaled_dot_product_attention(q, *cache.update(positions, k, v), attn_mask=mask)
            for cache in (virtual, plain)
        )
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected)
    cache: Any = virtual.k_cache
    assert cache.resident_bytes == batch * heads * page(device)
    assert list(virtual.state_dict()) == ["k_cache", "v_cache"]


# -- as_virtual -------------------------------------------------------------------------------------------------------


def test_a_plain_view_is_watched_again(device: str) -> None:
    x = vt.empty(8, page(device) // 4, device=device)
    y = vt.as_virtual(x[2:].plain().t())
    assert (y.shape, y.stride(), y.data_ptr()) == (x[2:].t().shape, x[2:].t().stride(), x[2:].data_ptr())
    y[:, 3].fill_(2)
    assert x.residency().tolist() == [row == 5 for row in range(8)]
    assert x[5].unique().tolist() == [2]
    assert vt.as_virtual(x[1], on_touch="raise").reserved_bytes == page(device)
    with pytest.raises(vt.UnmappedAccessError):
        vt.as_virtual(x[1], on_touch="raise").sum()


def test_it_keeps_the_memory() -> None:
    pool = vt.PagePool("cpu", capacity_bytes=1 << 20)
    x: Any = vt.empty(8, 1024, device="cpu", pool=pool)
    x[0] = 3
    plain = x.plain()
    del x
    gc.collect()
    y: Any = vt.as_virtual(plain)
    del plain
    gc.collect()
    assert y[0].unique().tolist() == [3]
    z = vt.as_virtual(torch.from_dlpack(y[:1]))
    del y
    gc.collect()
    assert z.sum() == 3 * 1024
    del z
    gc.collect()
    pool.close()


def test_nothing_is_remembered_of_the_dead() -> None:
    gc.collect()
    before = len(_viewed), len(_owned)
    for _ in range(50):
        x: Any = vt.empty(8, 1024, device="cpu")
        with vt.KVCacheManager(vt.KVCacheConfig(1, 1, 8, 2, 64, torch.float32), "cpu") as cache:
            keys, _ = cache.layer(0)
        del x, keys, _, cache
        gc.collect()
    assert (len(_viewed), len(_owned)) == before


def test_layers_of_a_cache() -> None:
    with vt.KVCacheManager(vt.KVCacheConfig(1, 1, 8, 2, 64, torch.float32), "cpu") as cache:
        keys, values = cache.layer(0, plain=True)
        reqid = cache.alloc_reqid()
        assert cache.step([5, 0])
        assert vt.as_virtual(keys)[reqid, :5].sum() == 0
        with pytest.raises(vt.UnmappedAccessError):
            vt.as_virtual(values)[1].sum()
        with pytest.raises(ValueError, match="on_touch='commit' must be one of"):
            vt.as_virtual(keys, on_touch="commit")
        del keys, values


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(0), torch.zeros(2, 2).to_sparse(), "x", None])
def test_other_memory(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"memory that is not vtensor's|no strided tensor"):
        vt.as_virtual(bad)
    with pytest.raises(ValueError, match="on_touch='never'"):
        vt.as_virtual(vt.empty(3, device="cpu"), on_touch="never")  # type: ignore[arg-type]
