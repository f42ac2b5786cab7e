"""The paged twin: the same kernels through a block table give the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.kernels.attention_cases import by_device
from vtensor.bench.paged import PagedCache, paged_decode, paged_prefill
from vtensor.triton_kernels.arguments import check_attention
from vtensor.triton_kernels.attention import decode_attention, prefill_attention
from vtensor.triton_kernels.hopper import HopperPlan
from vtensor.triton_kernels.reference import attend

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NO_PAGE = 1 << 28


@dataclass(frozen=True)
class Case:
    """Requests of some lengths, whose pages lie anywhere; -1: padding, whose length is that of its neighbour."""

    lens: tuple[int, ...]
    page_tokens: int
    heads: tuple[int, int] = (4, 2)
    width: int = 16
    queries: int = 1
    dtype: torch.dtype = FP16
    features: tuple[str, ...] = ()
    padding: bool = False


@dataclass(frozen=True)
class Inputs:
    """A case's tensors: the same rows in slots and in pages, NaN elsewhere."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: PagedCache
    lens: torch.Tensor
    batch_idx: torch.Tensor | None
    options: dict[str, Any]


def make(case: Case, device: str) -> Inputs:
    torch.manual_seed(0)
    (q_heads, heads), batch, page = case.heads, len(case.lens), case.page_tokens
    width = -(-max(case.lens) // page) + 1
    num_pages = batch * width + 3
    slots = [torch.full((batch, width * page, heads, case.width), torch.nan, dtype=case.dtype) for _ in range(2)]
    pages = [torch.full((num_pages, page, heads, case.width), torch.nan, dtype=case.dtype) for _ in range(2)]
    order = iter(torch.randperm(num_pages).tolist())
    table = torch.full((batch, width), NO_PAGE, dtype=torch.int32)
    for request, length in enumerate(case.lens):
        for contiguous in slots:
            contiguous[request, :length] = torch.randn(length, heads, case.width)
        for number in range(-(-length // page)):
            place = next(order)
            table[request, number] = place
            rows = slice(number * page, (number + 1) * page)
            for contiguous, paged in zip(slots, pages, strict=True):
                paged[place] = contiguous[request, rows]
    options: dict[str, Any] = {
        "window": {"window": 7},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": torch.randn(q_heads).to(device)},
        "alibi": {"alibi_slopes": torch.rand(q_heads).to(device)},
    }
    lens = torch.tensor(case.lens, dtype=torch.int32, device=device)
    batch_idx = torch.arange(batch, dtype=torch.int32, device=device)
    batch_idx[0] = -1
    return Inputs(
        torch.randn(batch, case.queries, q_heads, case.width).to(device, case.dtype),
        *(x.to(device) for x in slots),
        PagedCache(*(x.to(device) for x in pages), table.to(device)),
        lens,
        batch_idx if case.padding else None,
        {name: value for feature in case.features for name, value in options[feature].items()},
    )


ALL = ("softcap", "sinks", "alibi")


@by_device(
    "case",
    cpu=[
        Case((33, 0, 1, 80), 16),
        Case((33, 5, 70), 64, queries=3, dtype=FP32, features=("window",)),
        Case((20, 40), 4, heads=(6, 2), features=ALL, padding=True),
        Case((200,), 16, heads=(2, 1), dtype=FP32),
    ],
    gpu=[
        Case((1000, 0, 1, 4097, 63, 64, 65), page, heads, 128, queries, BF16, features, padding)
        for page in (16, 64)
        for heads, queries in (((32, 8), 1), ((32, 4), 2), ((28, 4), 5))
        for features, padding in (((), False), (("window",), True), (ALL, False))
    ],
)
def test_decode(device: str, case: Case) -> None:
    given = make(case, device)
    options = {**given.options, "return_lse": True}
    expected = decode_attention(given.q, given.k, given.v, given.lens, given.batch_idx, **options)
    found = paged_decode(given.q, given.cache, given.lens, given.batch_idx, **options)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other)
        assert not one.isnan().any()


@by_device(
    "case",
    cpu=[
        Case((33, 20, 40), 16, queries=20),
        Case((70,), 64, heads=(2, 1), queries=40, dtype=FP32, features=("window",)),
        Case((20, 40), 4, heads=(3, 1), queries=5, features=ALL, padding=True),
    ],
    gpu=[
        Case((1000, 300, 4097, 301), page, heads, 128, 300, BF16, features, padding)
        for page in (16, 128)
        for heads in ((32, 8), (32, 4), (28, 4))
        for features, padding in (((), False), (("window",), True), (ALL, False))
    ],
)
def test_prefill(device: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HopperPlan, "suits", staticmethod(lambda call: False))  # that kernel reads no pages
    monkeypatch.setattr("vtensor.triton_kernels.attention._checked", {})
    monkeypatch.setattr("vtensor.triton_kernels.library._plans", {})
    given = make(case, device)
    rows = torch.arange(len(case.lens) + 1, dtype=torch.int32, device=device) * case.queries
    q, options = given.q.flatten(0, 1), {**given.options, "return_lse": True}
    expected = prefill_attention(q, given.k, given.v, rows, given.lens, given.batch_idx, **options)
    found = paged_prefill(q, given.cache, rows, given.lens, given.batch_idx, **options)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other)
        assert not one.isnan().any()


def test_one_query_without_a_dimension_for_it() -> None:
    given = make(Case((33, 2), 16), "cpu")
    out = paged_decode(given.q[:, 0], given.cache, given.lens)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, paged_decode(given.q, given.cache, given.lens)[:, 0])


@pytest.mark.parametrize("padding", [False, True])
def test_where_nothing_interprets_it_is_the_reference(padding: bool) -> None:
    given = make(Case((33, 0, 40), 16, dtype=BF16, padding=padding), "cpu")  # the interpreter has no bfloat16
    found = paged_decode(given.q, given.cache, given.lens, given.batch_idx, return_lse=True)
    expected = attend(check_attention(given.q, given.k, given.v, given.lens, given.batch_idx))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_more_requests_than_pages() -> None:
    k, v = torch.randn(2, 1, 4, 1, 16)
    cache = PagedCache(k, v, torch.zeros(3, 1, dtype=torch.int32))
    out = paged_decode(torch.randn(1, 2, 16).expand(3, -1, -1), cache, torch.full((3,), 4, dtype=torch.int32))
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], out[2])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"table": torch.zeros(2, 3)}, "table has dtype torch.float32"),
        ({"table": torch.zeros(3, dtype=torch.int32)}, r"table has shape \[3\]"),
        ({"k": torch.zeros(0, 4, 1, 16), "v": torch.zeros(0, 4, 1, 16)}, "k has 0 pages"),
        ({"k": torch.zeros(9, 3, 1, 16), "v": torch.zeros(9, 3, 1, 16)}, "pages of 3 tokens"),
        ({"v": torch.zeros(9, 8, 1, 16)}, "v has shape"),
    ],
)
def test_what_is_no_cache(changes: dict[str, torch.Tensor], reason: str) -> None:
    good = {"k": torch.zeros(9, 4, 1, 16), "v": torch.zeros(9, 4, 1, 16), "table": torch.zeros(2, 3).int()}
    with pytest.raises(ValueError, match=reason):
        PagedCache(**{**good, **changes})


def test_a_table_of_other_requests() -> None:
    given = make(Case((3, 2), 4), "cpu")
    with pytest.raises(ValueError, match=r"seq_lens has shape \[1\]"):
        paged_decode(given.q, given.cache, given.lens[:1])
    with pytest.raises(ValueError, match=r"seq_lens=\[9, 2\] must be of 0 to 8"):
        paged_decode(given.q, given.cache, given.lens + torch.tensor([6, 0]).int())
