"""What nobody would pass on purpose: nothing, one memory twice, not-a-number, strides and windows without end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vtensor as vt
from vtensor.attention_backends.backend import with_sinks
from vtensor.triton_kernels import append_kv, decode_attention, prefill_attention, workspace
from vtensor.triton_kernels.arguments import check_attention
from vtensor.triton_kernels.reference import attend


def ints(*values: int, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def cache(*shape: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape, device=device), torch.randn(*shape, device=device)


def close(found: Any, right: Any) -> None:
    torch.testing.assert_close(found, right, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 4, 64), (0, 3, 4, 64), (2, 0, 4, 64)])
def test_no_queries(shape: tuple[int, ...], device: str) -> None:
    q, (k, v) = torch.randn(shape, device=device), cache(3, 20, 2, 64, device=device)
    lens = ints(*[5] * shape[0], device=device)
    out, lse = decode_attention(q, k, v, lens, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert vt.attention(q, k, v, lens).shape == q.shape


def test_rows_of_no_request(device: str) -> None:
    q, (k, v) = torch.randn(5, 4, 64, device=device), cache(3, 20, 2, 64, device=device)
    empty = ints(device=device)
    out = torch.full_like(q, torch.nan)
    _, lse = prefill_attention(q, k, v, ints(0, device=device), empty, return_lse=True, out=out)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("window", [(1 << 31) - 1, 1 << 31, 1 << 40, 25])
def test_a_window_that_hides_nothing(window: int, device: str) -> None:
    q, (k, v) = torch.randn(3, 5, 4, 64, device=device), cache(3, 24, 2, 64, device=device)
    lens = ints(0, 10, 20, device=device)
    close(decode_attention(q, k, v, lens, window=window), decode_attention(q, k, v, lens))
    starts = ints(0, 5, 10, 15, device=device)
    rows = q.flatten(0, 1)
    close(prefill_attention(rows, k, v, starts, lens, window=window), prefill_attention(rows, k, v, starts, lens))


def test_heads_far_apart(device: str) -> None:
    # [slots, heads, L, D], transposed: from head 16 on a head begins 2^31 elements into its slot
    slots, heads, tokens, width, length = 1, 18, 1 << 20, 128, 9
    spread = vt.empty(2, slots, heads, tokens, width, dtype=torch.float16, device=device)
    spread[:, :, :, :length].normal_()
    k, v = (one.transpose(1, 2) for one in spread.plain())
    q = torch.randn(1, heads, width, dtype=torch.float16, device=device)
    lens = ints(length, device=device)
    right = attend(check_attention(q, k, v, lens))[0][:, 0]
    torch.testing.assert_close(decode_attention(q, k, v, lens), right, atol=2e-3, rtol=2e-2)
    starts = ints(0, 1, device=device)
    torch.testing.assert_close(prefill_attention(q, k, v, starts, lens), right, atol=2e-3, rtol=2e-2)
    rows = torch.randn(1, heads, width, dtype=torch.float16, device=device)
    append_kv(rows, rows, k, v, lens)
    assert torch.equal(k[0, length - 1], rows[0])
    assert torch.equal(v[0, length - 1], rows[0])


@pytest.mark.parametrize("ragged", [False, True])
def test_what_is_no_number_stays_so(ragged: bool, device: str) -> None:
    q, (k, v) = torch.randn(3, 4, 64, device=device), cache(3, 20, 2, 64, device=device)
    lens = ints(1, 7, 20, device=device)
    q[1, 2] = torch.nan
    k[0, 0] = torch.nan
    call = check_attention(q, k, v, lens)
    right, right_lse = (one[:, 0] for one in attend(call))
    starts = ints(0, 1, 2, 3, device=device)
    if ragged:
        found = prefill_attention(q, k, v, starts, lens, return_lse=True)
    else:
        found = decode_attention(q, k, v, lens, return_lse=True)
    close(found, (right, right_lse))


@pytest.mark.parametrize("softcap", [30.0, 1e4, 1e6])
def test_a_cap_of_any_height(softcap: float, device: str) -> None:
    q, (k, v) = 3 * torch.randn(3, 4, 64, device=device), cache(3, 20, 2, 64, device=device)
    lens = ints(1, 7, 20, device=device)
    found = decode_attention(q, k, v, lens, softcap=softcap, return_lse=True)
    close(found, tuple(one[:, 0] for one in attend(check_attention(q, k, v, lens, softcap=softcap))))


def test_more_queries_than_keys_are_split_for(device: str) -> None:
    q, (k, v) = torch.randn(2, 130, 2, 16, device=device), cache(2, 140, 1, 16, device=device)
    lens = ints(131, 140, device=device)
    right = decode_attention(q, k, v, lens)
    wide = torch.full((2, 300, 2, 16), torch.nan, device=device)
    out = wide[:, :130]
    assert decode_attention(q, k, v, lens, out=out) is out
    assert torch.equal(out, right)
    assert wide[:, 130:].isnan().all()
    for bad in (torch.empty(130, 2, 2, 16, device=device), 3):
        with pytest.raises(ValueError, match="out "):
            decode_attention(q, k, v, lens, out=bad)  # type: ignore[arg-type]


def test_elements_that_overlap_are_not_written(device: str) -> None:
    q, (k, v) = torch.randn(3, 4, 64, device=device), cache(3, 20, 2, 64, device=device)
    lens = ints(1, 7, 20, device=device)
    with pytest.raises(ValueError, match=r"out has strides .* overlap"):
        decode_attention(q, k, v, lens, out=torch.empty(1, 4, 64, device=device).expand(3, 4, 64))
    rows = torch.randn(3, 2, 64, device=device)
    with pytest.raises(ValueError, match=r"k_cache has strides .* overlap"):
        append_kv(rows, rows, k[:1].expand(3, 20, 2, 64), v, lens)


def test_no_gradients_are_lost(device: str) -> None:
    q, (k, v) = torch.randn(3, 4, 64, device=device, requires_grad=True), cache(3, 20, 2, 64, device=device)
    lens = ints(1, 7, 20, device=device)
    rows = torch.randn(3, 2, 64, device=device, requires_grad=True)
    for call in (
        lambda: decode_attention(q, k, v, lens),
        lambda: prefill_attention(q, k, v, ints(0, 1, 2, 3, device=device), lens),
        lambda: append_kv(rows, rows, k, v, lens),
    ):
        with pytest.raises(ValueError, match="requires grad"):
            call()
        with torch.no_grad():
            call()
    found = vt.attention(q, k, v, lens, backend="reference")
    assert isinstance(found, torch.Tensor)
    found.sum().backward()
    assert q.grad is not None


def test_virtual_views_are_refused_or_watched(device: str) -> None:
    both = vt.empty(2, 3, 1 << 20, 2, 64, device=device, on_touch="raise")
    both[:, :, :64].commit()
    both[:, :, :64].normal_()
    k, v = both
    q, lens = torch.randn(3, 4, 64, device=device), ints(1, 7, 20, device=device)
    resident = both.resident_bytes
    for call in (
        lambda: decode_attention(q, k, v, lens),
        lambda: vt.attention(q, k, v, lens, backend="triton"),
        lambda: append_kv(q[:, :2], q[:, :2], k, v, lens),
    ):
        with pytest.raises(ValueError, match=r"k(_cache)? is a virtual tensor.*plain|interpreter"):
            call()
    close(vt.attention(q, k, v, lens), vt.attention(q, k.plain(), v.plain(), lens, backend="reference"))
    with pytest.raises(vt.UnmappedAccessError):
        vt.attention(q, k, v, ints(1, 7, 1 << 20, device=device))
    assert both.resident_bytes == resident


def test_a_sink_of_nothing() -> None:
    out, lse = torch.zeros(2, 3, 8), torch.tensor([[-torch.inf, 1.0, -torch.inf]] * 2)
    found, sums = with_sinks(out, lse, torch.tensor([-torch.inf, -torch.inf, 2.0]))
    assert not found.any()
    assert torch.equal(sums, lse)


def test_numbers_that_change_in_a_compiled_graph(device: str) -> None:
    q, (k, v) = torch.randn(3, 4, 64, device=device), cache(3, 20, 2, 64, device=device)
    lens = ints(1, 7, 20, device=device)

    def step(scale: float, softcap: float) -> Any:
        return vt.attention(q, k, v, lens, scale=scale, softcap=softcap)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for scale, softcap in ((0.1, 5.0), (0.2, 6.0), (0.3, 7.0)):
        close(compiled(scale, softcap), step(scale, softcap))


def test_appending_in_a_compiled_graph(device: str) -> None:
    k, v = cache(3, 20, 2, 64, device=device)
    lens, rows = ints(1, 7, 20, device=device), torch.randn(3, 2, 64, device=device)

    def step(k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
        append_kv(rows, 2 * rows, k, v, lens)

    right = k.clone(), v.clone()
    step(*right, rows)
    torch.compile(step, fullgraph=True, backend="aot_eager")(k, v, rows)
    assert torch.equal(k, right[0])
    assert torch.equal(v, right[1])


def test_reserves_of_counters_live_as_long_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    for name, value in (("_reserves", {}), ("_of_captures", {}), ("_kept", []), ("_RESERVE", 1 << 10)):
        monkeypatch.setattr(workspace, name, value)
    seen: list[tuple[int, int]] = []
    for capture in range(1, 50):
        if capture % 3 == 1:
            workspace._refill(device)  # a call outside of captures
        found = workspace._cut(device, capture, 7, 96)
        assert found is not None
        assert workspace._cut(device, capture, 7, 64) is found
        seen.append((found.data_ptr(), found.data_ptr() + 4 * found.numel()))
        del found
    assert all(before[1] <= after[0] for before, after in zip(sorted(seen), sorted(seen)[1:], strict=False))
    held = [(one.data_ptr(), one.data_ptr() + 4 * one.numel()) for one in workspace._kept]
    assert all(any(begin <= first and last <= end for begin, end in held) for first, last in seen)
    workspace._reserves.clear()
    assert workspace._cut(device, 99, 7, 96) is None


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 100, 500])
@pytest.mark.parametrize("length", [8192, 8191, 8100, 8065])
@pytest.mark.parametrize("queries", [1, 60, 200])
def test_prefill_where_only_what_is_seen_has_memory(window: int | None, length: int, queries: int) -> None:
    # For each row out of a tensor the tensor memory accelerator looks up the tensor's first address.
    device, rows = "cuda:0", 2048  # of a page
    cache = vt.empty(3, 1 << 16, 2, 2, 128, dtype=torch.float16, device=device)
    first = 0 if window is None else (length - queries - window + 1) // rows * rows
    cache[1, first:8192].normal_()
    k, v = cache.plain().unbind(2)
    q = torch.randn(queries, 4, 128, device=device, dtype=torch.float16)
    rows_of, lens, slots = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, queries], [length], [1]))
    found = prefill_attention(q, k, v, rows_of, lens, slots, window=window)
    torch.cuda.synchronize()
    whole = torch.zeros(2, 1, 8192, 2, 128, device=device, dtype=torch.float16)
    whole[0, 0, first:], whole[1, 0, first:] = k[1, first:8192], v[1, first:8192]
    expected, _ = attend(check_attention(q, *whole, lens, None, rows_of, window=window))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-2)
