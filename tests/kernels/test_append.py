"""append_kv: rows go where they should, as they should, and nothing else of the cache changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.child import in_interpreter
from tests.vtensor.caches import lengths, make, page
from vtensor.triton_kernels import append, append_checks
from vtensor.triton_kernels.append import append_kv, append_reference
from vtensor.triton_kernels.launch import is_interpreted

FP8 = torch.float8_e4m3fn
Append = Callable[..., None]


@dataclass
class Case:
    """A call: how many new rows each request has, and where they go."""

    counts: list[int]  # all alike: dense
    lens: list[int]
    slots: list[int] | None = None  # None: no batch_idx
    num_slots: int = 5
    slot_tokens: int = 40
    heads: int = 2
    width: int = 64
    value_width: int | None = 64  # None: no V
    ragged: bool = False
    spare_rows: int = 0  # of k, behind those of the last request
    layers: int | None = None
    layout: str = "per_layer"
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype | None = None
    rotated: int = 0
    interleaved: bool = False
    angle_dtype: torch.dtype = torch.float32
    q_heads: int = 0
    scales: str | None = None  # one, head, layer
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        default = Case([], [])
        return "-".join(str(value) for name, value in vars(self).items() if value != getattr(default, name))


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor of NaN, in any dtype."""
    size = math.prod(shape) * dtype.itemsize
    return torch.full((size,), 0xFF, dtype=torch.uint8, device=device).view(dtype).view(shape)


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return x.contiguous().view(torch.uint8)


class Call:
    """A case's tensors on a device, the same ones each time that it is made."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self._random = torch.Generator().manual_seed(7)
        n, heads = case.layers or 1, case.heads
        self.storage = self._storage()
        caches = self._views(self.storage)
        rows = (sum(case.counts) + case.spare_rows,) if case.ragged else (len(case.counts), case.counts[0])
        self.k, self.v = self._rows(n, rows, heads, case.width), None
        if case.value_width is not None:
            self.v = self._rows(n, rows, heads, case.value_width)
        self.q = self._rows(n, rows, case.q_heads, case.width) if case.q_heads else None
        self.k_cache, self.v_cache = caches
        self.options: dict[str, Any] = {}
        if case.rotated:
            angles = torch.rand(case.slot_tokens + 3, case.rotated // 2, generator=self._random) * 40 - 20
            both = torch.cat([angles.cos(), angles.sin()], -1).to(case.angle_dtype).to(device)
            self.cos, self.sin = both.chunk(2, -1)  # strided, as engines keep them
            self.options |= {"cos": self.cos, "sin": self.sin, "interleaved": case.interleaved}
        if case.scales:
            shape = {"one": (), "head": (heads,), "layer": (n, heads)}[case.scales]
            for name in ("k_scale", "v_scale"):
                scale = torch.rand(shape, generator=self._random) * 0.05 + 0.001
                self.options[name] = scale.to(device)
        if case.ragged:
            ends = torch.tensor([0, *case.counts]).cumsum(0)
            self.options["cu_seqlens"] = ends.to(device, torch.int32)
        if case.slots is not None:
            self.options["batch_idx"] = torch.tensor(case.slots, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(case.lens, dtype=torch.int32, device=device)

    def _rows(self, layers: int, rows: tuple[int, ...], heads: int, width: int) -> torch.Tensor:
        """Rows [N, T..., H, width], a part of something wider, as of a projection of q, k and v together."""
        size = (layers, *rows, heads * width + 16)
        wide = (torch.randn(size, generator=self._random) * 4).to(self.case.dtype).to(self.device)
        return wide[..., 16:].unflatten(-1, (heads, width))

    def _storage(self) -> torch.Tensor:
        case = self.case
        n, dtype = case.layers or 1, case.cache_dtype or case.dtype
        row = case.heads * (case.width + (case.value_width or 0))
        return poisoned((case.num_slots * case.slot_tokens * n * row,), dtype, self.device)

    def _views(self, storage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K and V [N, slots, L, H, D]; sliced: a token's layers side by side, per_layer: everything apart."""
        case = self.case
        n, slots, tokens, heads = case.layers or 1, case.num_slots, case.slot_tokens, case.heads
        k_row, v_row = heads * case.width, heads * (case.value_width or 0)
        found: list[torch.Tensor | None] = []
        for width, own, begin in ((case.width, k_row, 0), (case.value_width, v_row, k_row)):
            if width is None:
                found.append(None)
            elif case.layout == "sliced":
                row = k_row + v_row
                strides = (row, tokens * n * row, n * row, width, 1)
                found.append(storage.as_strided((n, slots, tokens, heads, width), strides, begin))
            else:
                strides = (slots * tokens * own, tokens * own, own, width, 1)
                first = n * slots * tokens * begin
                found.append(storage.as_strided((n, slots, tokens, heads, width), strides, first))
        assert found[0] is not None
        return found[0], found[1]

    def run(self, function: Append) -> None:
        """Call it."""

        def shaped(x: torch.Tensor | None, is_row: bool = True) -> torch.Tensor | None:
            if x is None:
                return None
            if is_row and not self.case.ragged and self.case.counts[0] == 1:
                x = x.squeeze(-3)
            return x if self.case.layers else x[0]

        options = {**self.options, "q": shaped(self.q), **self.case.options}
        caches = (shaped(self.k_cache, False), shaped(self.v_cache, False))
        function(shaped(self.k), shaped(self.v), *caches, self.seq_lens, **options)

    def check(self) -> None:
        """Compare with a formula of its own, a row at a time: in complex numbers and float64, on the host."""
        case = self.case
        fresh = Call(case, "cpu")
        expected, written = fresh.storage, torch.zeros(fresh.storage.shape, dtype=torch.uint8)
        k_cache, v_cache = fresh._views(expected)
        k_written, v_written = fresh._views(written)
        starts = [sum(case.counts[:b]) for b in range(len(case.counts))]
        turned = None if fresh.q is None else fresh.q.clone()
        for b, (count, length) in enumerate(zip(case.counts, case.lens, strict=True)):
            slot = b if case.slots is None else case.slots[b]
            for i in range(count if slot >= 0 else 0):
                at: Any = (slice(None), starts[b] + i) if case.ragged else (slice(None), b, i)
                to: Any = (slice(None), slot, length - count + i)
                k_cache[to] = self._kept(fresh.turn(fresh.k[at], to[2]), fresh.options.get("k_scale"))
                k_written[to] = 1
                if v_cache is not None and fresh.v is not None:
                    v_cache[to] = self._kept(fresh.v[at].double(), fresh.options.get("v_scale"))
                    v_written[to] = 1
                if turned is not None and fresh.q is not None:
                    turned[at] = fresh.turn(fresh.q[at], to[2]).to(case.dtype)
        found = self.storage.cpu()
        size = found.element_size()
        untouched = (written == 0).repeat_interleave(size)
        assert torch.equal(raw(found)[untouched], raw(expected)[untouched])  # still NaN, each byte
        inside = written == 1
        self._assert_close(found[inside], expected[inside])
        if self.q is not None and turned is not None:
            self._assert_close(self.q.cpu(), turned)
            rest = (slice(None),) * (self.q.dim() - 1) + (slice(case.rotated, None),)
            assert torch.equal(raw(self.q[rest].cpu()), raw(turned[rest]))

    def turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Rotate a row [N, H, D] at a position."""
        case, half = self.case, self.case.rotated // 2
        x = x.double()
        if not half:
            return x
        angle = torch.complex(self.cos[position].double(), self.sin[position].double())
        pairs = [(2 * j, 2 * j + 1) if case.interleaved else (j, j + half) for j in range(half)]
        first, second = (list(part) for part in zip(*pairs, strict=True))
        product = torch.complex(x[..., first], x[..., second]) * angle
        result = x.clone()
        result[..., first], result[..., second] = product.real, product.imag
        return result

    def _kept(self, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        dtype = self.case.cache_dtype or self.case.dtype
        if dtype != FP8:
            return x.to(dtype)
        x = x if scale is None else x / scale.double().reshape(-1 if scale.dim() else 1, *scale.shape[1:], 1)
        return x.clamp(-448, 448).float().to(FP8)

    def _assert_close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        if not self.case.rotated and found.dtype != FP8:
            assert torch.equal(raw(found), raw(expected))
            return
        found, expected, epsilon = found.float(), expected.float(), torch.finfo(found.dtype).eps
        # float64 and float32 may round to neighbours, and products of 20 may cancel out
        torch.testing.assert_close(found, expected, rtol=epsilon, atol=1e-5 if epsilon < 0.1 else 2**-9)


RAGGED = Case([3, 0, 7, 0, 0, 1, 12, 0], [3, 0, 40, 9, 11, 1, 30, 2], [4, 0, 2, 1, 1, 3, 0, 2], ragged=True)
CASES = [
    Case([1] * 5, [1, 2, 40, 17, 16]),
    Case([1] * 5, [40, 2, 3, 17, 16], [4, 2, 0, 1, 3], layout="sliced"),
    Case([1] * 4, [7, 99, 8, -5], [3, -1, 0, -1], dtype=torch.bfloat16),
    Case([3] * 3, [3, 40, 20], [2, 0, 4], heads=1, dtype=torch.float32),
    Case([4, 4], [4, 21], [1, 1], heads=3, width=80, value_width=48),
    RAGGED,
    Case([5, 2, 3], [5, 9, 3], [1, -1, 0], ragged=True, spare_rows=6),
    Case([0, 0], [3, 0], ragged=True, spare_rows=2),
    Case([1], [1], width=576, value_width=None, heads=1),
    Case([2], [9], width=1024, value_width=16, heads=2),
    Case([1], [1], width=1, value_width=3, heads=1, num_slots=1, slot_tokens=1),
    Case([1] * 3, [4, 1, 30], [2, 1, 4], layers=3, layout="sliced", dtype=torch.bfloat16),
    Case([2] * 2, [40, 2], layers=2, heads=5, width=96, value_width=32),
    Case([4, 0, 2], [9, 1, 2], [2, 1, 0], ragged=True, layers=2, layout="sliced", spare_rows=1),
    # RoPE
    Case([1] * 3, [1, 40, 9], rotated=64),
    Case([1] * 3, [1, 40, 9], [4, -1, 2], rotated=64, q_heads=6, layout="sliced"),
    Case([1] * 3, [1, 40, 9], [4, -1, 2], rotated=64, q_heads=7, interleaved=True, dtype=torch.bfloat16),
    Case([5] * 2, [5, 33], width=80, rotated=32, q_heads=4, angle_dtype=torch.float16),
    Case([5] * 2, [5, 33], width=80, rotated=32, interleaved=True, dtype=torch.float32),
    Case([3] * 2, [5, 33], width=72, rotated=6, q_heads=3, dtype=torch.bfloat16, angle_dtype=torch.bfloat16),
    Case([3] * 2, [5, 33], width=96, value_width=None, rotated=96, interleaved=True, q_heads=2),
    Case([4, 0, 2], [9, 1, 2], [2, -1, 0], ragged=True, spare_rows=3, rotated=64, q_heads=4),
    Case([4, 0, 2], [9, 1, 2], ragged=True, layers=2, rotated=20, q_heads=3, interleaved=True, layout="sliced"),
    # fp8
    Case([1] * 3, [1, 40, 9], cache_dtype=FP8),
    Case([1] * 3, [1, 40, 9], cache_dtype=FP8, scales="one", dtype=torch.bfloat16),
    Case([2] * 3, [2, 40, 9], [2, 0, -1], cache_dtype=FP8, scales="head", layout="sliced", width=80),
    Case([2] * 3, [2, 40, 9], layers=2, cache_dtype=FP8, scales="head", dtype=torch.float32),
    Case([3, 0, 1], [3, 4, 9], ragged=True, layers=3, heads=3, cache_dtype=FP8, scales="layer", layout="sliced"),
    Case([1] * 2, [1, 9], cache_dtype=FP8, scales="head", rotated=64, q_heads=4),
    Case([1] * 2, [1, 9], cache_dtype=FP8, scales="head", rotated=32, interleaved=True, dtype=torch.bfloat16),
]


@pytest.fixture(params=[append_kv, append_reference], ids=["kernel", "reference"])
def function(request: pytest.FixtureRequest) -> Append:
    found: Append = request.param
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_where_and_what_they_should_be(case: Case, device: str, function: Append) -> None:
    call = Call(case, device)
    call.run(function)
    call.check()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_is_to_the_bit_the_reference(case: Case, device: str) -> None:
    calls = [Call(case, device) for _ in range(3)]
    for call, function in zip(calls, (append_reference, append_kv, append_kv), strict=True):
        call.run(function)
    for call in calls[1:]:
        assert torch.equal(raw(call.storage), raw(calls[0].storage))
        if call.q is not None and calls[0].q is not None:
            assert torch.equal(raw(call.q), raw(calls[0].q))


def test_a_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "is_interpreted", lambda: False)
    for case in CASES:
        call = Call(case, "cpu")
        call.run(append_kv)
        call.check()


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_whichever_way_triton_is_told(interpret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    done = in_interpreter(f"""
        import tests.kernels.test_append as mine
        assert mine.is_interpreted() == bool({interpret})
        for case in mine.CASES[5::6]:
            call = mine.Call(case, "cpu")
            call.run(mine.append_kv)
            call.check()
        print("done")
    """)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fp8_is_held_within_its_range(dtype: torch.dtype, device: str, function: Append) -> None:
    values = [
        0.0,
        447.0,
        448.0,
        449.0,
        480.0,
        1e4,
        -1e4,
        math.inf,
        -math.inf,
        math.nan,
        2**-9,
        2**-10,
        3 * 2**-11,
        17.0,
    ]
    k = torch.tensor(values, dtype=dtype, device=device).view(1, 1, -1)
    cache = poisoned((1, 1, 1, len(values)), FP8, device)
    function(k, None, cache, None, torch.ones(1, dtype=torch.int32, device=device))
    expected = [0, 448, 448, 448, 448, 448, -448, 448, -448, math.nan, 2**-9, 0, 2**-9, 16]
    torch.testing.assert_close(
        cache.float().flatten().cpu(), torch.tensor(expected).float(), rtol=0, atol=0, equal_nan=True
    )


def test_copies_keep_every_bit(device: str, function: Append) -> None:
    # all 65,536 patterns of two bytes, NaN with payloads among them
    patterns = torch.arange(65_536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        k = patterns.view(dtype).view(32, 2, 1024).to(device)
        cache = torch.zeros(32, 1, 2, 1024, dtype=dtype, device=device)
        function(k, None, cache, None, torch.ones(32, dtype=torch.int32, device=device))
        assert torch.equal(cache.view(torch.int16).flatten().cpu(), patterns)


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
def test_a_real_cache_of_which_no_page_behind_the_rows_is_committed(layout: str, device: str, function: Append) -> None:
    # a page group holds 4 tokens of a layer (per_layer: 8 of its K), so after 4, 8, ... the next has no memory
    heads = page(device) // (4 * 2 * 2 * 64)
    layers = [vt.LayerSpec(num_kv_heads=heads, head_dim=64)] * 2
    cache = make(device, *layers, layout=layout)
    views = [cache.layer(layer, plain=True) for layer in (0, 1)]
    heads, width = views[0][0].shape[2:]
    step = views[1][0].data_ptr() - views[0][0].data_ptr()
    in_one = [
        view.as_strided((2, *view.shape), (step // view.element_size(), *view.stride())) for view in views[0]
    ]  # K and V of both layers
    slots = [cache.alloc_reqid() for _ in range(2)]
    kept: dict[int, list[torch.Tensor]] = {slot: [] for slot in slots}
    done = dict.fromkeys(slots, 0)
    for counts in ((7, 3), (1, 1), (0, 4), (8, 8), (1, 0)):
        for slot, count in zip(slots, counts, strict=True):
            done[slot] += count
        assert cache.step(lengths(cache, done))
        rows = torch.randn(2, 2, sum(counts), heads, width).to(torch.bfloat16)
        cu_seqlens = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=device)
        lens = torch.tensor([done[slot] for slot in slots], dtype=torch.int32, device=device)
        batch_idx = torch.tensor(slots, dtype=torch.int32, device=device)
        k, v = rows.to(device)
        function(k, v, *in_one, lens, batch_idx, cu_seqlens)
        for slot, part in zip(slots, rows.split(counts, dim=2), strict=True):
            kept[slot].append(part)
    for slot in slots:
        expected = torch.cat(kept[slot], dim=2)
        for layer, pair in enumerate(views):
            for is_value, view in enumerate(pair):
                found = view[slot, : done[slot]].cpu()
                assert torch.equal(found, expected[is_value, layer])
    del view, pair, views, in_one
    cache.close()


def test_offsets_beyond_32_bits(device: str, function: Append) -> None:
    # 70,000 tokens of 32 layers of 8 heads of 128: the last lies 4.6e9 elements into its slot
    cache = vt.empty(2, 70_000, 32, 2, 8, 128, dtype=torch.bfloat16, device=device)
    for slot in (0, 1):
        cache[slot, 69_998:].commit()
    resident = cache.resident_bytes
    k_cache, v_cache = (cache.plain()[:, :, :, kind].permute(2, 0, 1, 3, 4) for kind in (0, 1))
    rows = torch.randn(2, 32, 2, 2, 8, 128).to(torch.bfloat16)
    k, v = rows.to(device)
    function(k, v, k_cache, v_cache, torch.full((2,), 70_000, dtype=torch.int32, device=device))
    for slot in (0, 1):
        found = cache.plain()[slot, 69_998:].cpu()  # [2, 32, 2, 8, 128]
        assert torch.equal(found, rows[:, :, slot].permute(2, 1, 0, 3, 4))
    assert cache.resident_bytes == resident


OUT_OF_RANGE: list[tuple[str, list[int], list[int], list[int]]] = [
    # requests' new rows, lengths, slots
    ("past the end", [3, 2], [41, 9], [0, 1]),
    ("all past the end", [2, 2], [60, 9], [0, 1]),
    ("before the start", [3, 2], [2, 9], [0, 1]),
    ("no length", [1, 2], [0, 9], [0, 1]),
    ("below no length", [1, 2], [-(2**31), 9], [0, 1]),
    ("far too long", [1, 2], [2**31 - 1, 9], [0, 1]),
    ("no such slot", [1, 2], [5, 9], [5, 1]),
    ("a slot below -1", [1, 2], [5, 9], [-2, 1]),
]


@pytest.mark.parametrize(
    ("counts", "lens", "slots"), [case[1:] for case in OUT_OF_RANGE], ids=[c[0] for c in OUT_OF_RANGE]
)
@pytest.mark.parametrize("rotated", [0, 64])
def test_the_kernel_itself_writes_nothing_out_of_range(
    counts: list[int], lens: list[int], slots: list[int], rotated: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        if not is_interpreted():
            pytest.skip("no kernel runs on a CPU without TRITON_INTERPRET")
        monkeypatch.setattr(append, "destinations", lambda *args, **options: [])  # what a GPU does not look at
    q_heads = 3 if rotated else 0
    case = Case(counts, lens, slots, ragged=True, rotated=rotated, q_heads=q_heads)
    call = Call(case, device)
    call.run(append_kv)
    # what must remain of it: row after row, those that fit
    q = Call(case, "cpu").q
    fitting = [
        (b, i, lens[b] - counts[b] + i)
        for b in range(2)
        for i in range(counts[b])
        if 0 <= lens[b] - counts[b] + i < case.slot_tokens and 0 <= slots[b] < case.num_slots
    ]
    written = (~call.k_cache[0].isnan().all(-1).all(-1)).nonzero().tolist()
    assert sorted(map(tuple, written)) == sorted((slots[b], position) for b, _, position in fitting)
    fresh = Call(case, "cpu")
    for b, i, position in fitting:
        row = sum(counts[:b]) + i
        torch.testing.assert_close(
            call.k_cache[0, slots[b], position].cpu(),
            fresh.turn(fresh.k[:, row], position)[0].half(),
            rtol=2e-3,
            atol=1e-3,
        )
    if q is not None and call.q is not None:
        still = [row for row in range(sum(counts)) if row not in {sum(counts[:b]) + i for b, i, _ in fitting}]
        assert torch.equal(call.q[0, still].cpu(), q[0, still])


# -- errors ---------------------------------------------------------------------------------------------------------


def arguments(device: str) -> dict[str, Any]:
    """A call that is right, with everything."""
    of = {"dtype": torch.float16, "device": device}
    numbers = {"dtype": torch.int32, "device": device}
    return {
        "k": torch.zeros(3, 2, 64, **of),
        "v": torch.zeros(3, 2, 32, **of),
        "k_cache": torch.zeros(4, 20, 2, 64, **of),
        "v_cache": torch.zeros(4, 20, 2, 32, **of),
        "seq_lens": torch.tensor([1, 2, 20], **numbers),
        "batch_idx": torch.tensor([3, 0, -1], **numbers),
        "cu_seqlens": None,
        "cos": torch.ones(20, 16, device=device),
        "sin": torch.ones(20, 16, device=device),
        "q": torch.zeros(3, 6, 64, **of),
        "k_scale": None,
        "v_scale": None,
    }


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def ints(*values: int) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.tensor(values, dtype=torch.int32, device=device)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"k": [1.0]}, "k is a list"),
    ({"k": None}, "k is a NoneType"),
    ({"k": zeros(3, 64)}, r"k has shape \[3, 64\]"),
    ({"k": zeros(3, 2, 64, dtype=torch.float64)}, "k has dtype torch.float64"),
    ({"k": zeros(3, 2, 0), "k_cache": zeros(4, 20, 2, 0)}, "k has rows of 0 elements"),
    ({"k": zeros(3, 2, 1025), "k_cache": zeros(4, 20, 2, 1025), "q": None}, "1025 elements"),
    (
        {"k": zeros(3, 0, 64), "v": zeros(3, 0, 32), "k_cache": zeros(4, 20, 0, 64), "v_cache": zeros(4, 20, 0, 32)},
        "head",
    ),
    ({"k": lambda device: torch.zeros(3, 2, 128, device=device).half()[..., ::2]}, "k has a stride of 2"),
    ({"k": lambda device: torch.zeros(3, 2, 64, device="meta").half()}, "k is on meta"),
    ({"v": zeros(3, 3, 32)}, r"v has shape \[3, 3, 32\]"),
    ({"v": zeros(3, 2, 32, dtype=torch.bfloat16)}, "v has dtype torch.bfloat16"),
    ({"v": None}, "v is None: v and v_cache"),
    ({"v_cache": None}, "v_cache is None: v and v_cache"),
    ({"v": 3}, "v is a int"),
    ({"k_cache": zeros(4, 20, 2, 32)}, "k_cache has shape"),
    ({"k_cache": zeros(20, 2, 64)}, r"k_cache has shape \[20, 2, 64\]"),
    ({"k_cache": zeros(1, 4, 20, 2, 64)}, "k has shape"),
    ({"k_cache": zeros(4, 20, 2, 64, dtype=torch.bfloat16)}, "k_cache has dtype torch.bfloat16"),
    ({"k_cache": zeros(4, 20, 2, 64, dtype=FP8)}, "v_cache has dtype torch.float16"),
    (
        {"k_cache": lambda device: torch.zeros(4, 20, 2, 128, device=device).half()[..., ::2]},
        "k_cache has a stride of 2",
    ),
    ({"v_cache": zeros(4, 21, 2, 32)}, "v_cache has shape"),
    ({"seq_lens": zeros(3, dtype=torch.int64)}, "seq_lens has dtype torch.int64"),
    ({"seq_lens": ints(1, 2)}, r"seq_lens has shape \[2\]"),
    ({"seq_lens": lambda device: torch.zeros(6, device=device).int()[::2]}, "seq_lens has strides"),
    ({"seq_lens": None}, "seq_lens is a NoneType"),
    ({"seq_lens": lambda device: torch.zeros(3, device="meta").int()}, "seq_lens is on meta"),
    ({"batch_idx": ints(0, 1)}, r"batch_idx has shape \[2\]"),
    (
        {"batch_idx": None, "k_cache": zeros(2, 20, 2, 64), "v_cache": zeros(2, 20, 2, 32)},
        "3 requests and k_cache 2 slots",
    ),
    ({"cu_seqlens": ints(0, 1, 2)}, r"cu_seqlens has shape \[3\]"),
    ({"cos": None}, "cos is None: cos and sin"),
    ({"sin": None}, "sin is None: cos and sin"),
    ({"cos": None, "sin": None}, "q is given and cos is None"),
    ({"cos": zeros(20, 33), "sin": zeros(20, 33)}, "cos has 33 columns"),
    ({"cos": zeros(20, 0), "sin": zeros(20, 0)}, "cos has 0 columns"),
    ({"cos": zeros(20, 16, dtype=torch.bfloat16)}, "cos has dtype torch.bfloat16"),
    ({"sin": zeros(20, 16)}, "sin has dtype torch.float16"),
    ({"sin": zeros(21, 16, dtype=torch.float32)}, "sin has shape"),
    ({"sin": lambda device: torch.ones(20, 32, device=device)[:, :16]}, "sin has strides"),
    ({"q": zeros(2, 6, 64)}, "q has shape"),
    ({"q": zeros(3, 6, 32)}, "q has shape"),
    ({"q": zeros(3, 6, 64, dtype=torch.float32)}, "q has dtype torch.float32"),
    ({"k_scale": zeros(1, dtype=torch.float32)}, "k_scale is for a cache of torch.float8_e4m3fn"),
    ({"v_scale": 1.0}, "v_scale is a float"),
]
TO_FP8 = {"k_cache": zeros(4, 20, 2, 64, dtype=FP8), "v_cache": zeros(4, 20, 2, 32, dtype=FP8)}
WRONG += [
    ({**TO_FP8, "k_scale": zeros(3, dtype=torch.float32)}, r"k_scale has shape \[3\]"),
    ({**TO_FP8, "v_scale": zeros(1, 2, dtype=torch.float32)}, r"v_scale has shape \[1, 2\]"),
    ({**TO_FP8, "v_scale": zeros(2)}, "v_scale has dtype torch.float16"),
]
WRONG_ON_A_CPU: list[tuple[dict[str, Any], str]] = [
    ({"seq_lens": ints(1, 0, 1)}, r"seq_lens\[1\]=0 must be of 1, the new rows, to 20, the length of k_cache"),
    ({"seq_lens": ints(21, 1, 1)}, r"seq_lens\[0\]=21"),
    ({"cos": zeros(9, 16), "sin": zeros(9, 16), "seq_lens": ints(9, 10, 1)}, r"seq_lens\[1\]=10 .* 9, the rows of cos"),
    ({"batch_idx": ints(0, 4, 1)}, r"batch_idx=\[0, 4, 1\] must be of 0 to 3"),
    ({"batch_idx": ints(0, 1, -2)}, r"batch_idx=\[0, 1, -2\]"),
    ({"cu_seqlens": ints(1, 2, 3, 3)}, r"cu_seqlens=\[1, 2, 3, 3\] must begin with 0"),
    ({"cu_seqlens": ints(0, 2, 1, 3)}, "cu_seqlens"),
    ({"cu_seqlens": ints(0, 1, 2, 4)}, "cu_seqlens.* end at most at 3, k's rows"),
]


def check_refusal(changes: dict[str, Any], message: str, device: str) -> None:
    call = arguments(device)
    for name, value in changes.items():
        call[name] = value(device) if callable(value) else value
    before = {name: value.clone() for name, value in call.items() if isinstance(value, torch.Tensor)}
    for function in (append_kv, append_reference):
        with pytest.raises(ValueError, match=message):
            function(**call)
    for name, value in before.items():
        assert value.device.type == "meta" or torch.equal(raw(call[name]), raw(value)), name


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str, device: str) -> None:
    check_refusal(changes, message, device)


@pytest.mark.parametrize(("changes", "message"), WRONG_ON_A_CPU, ids=[message for _, message in WRONG_ON_A_CPU])
def test_indices_on_a_cpu_are_looked_at(changes: dict[str, Any], message: str) -> None:
    check_refusal(changes, message, "cpu")


def test_padding_may_have_any_length(device: str, function: Append) -> None:
    call = arguments(device)
    call["seq_lens"][2] = 1 << 30
    function(**call)


def test_too_many_rows_for_one_launch(device: str) -> None:
    row = torch.zeros(1, 2, 64, dtype=torch.float16, device=device)
    cache = torch.zeros(1, 4, 2, 64, dtype=torch.float16, device=device)
    one, two = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([1], [0, 1]))
    with pytest.raises(ValueError, match=r"1073741824 rows of 2 heads: together they must be below 2\^31"):
        append_kv(row.expand(1 << 30, 2, 64), None, cache, None, one, None, two)
    with pytest.raises(ValueError, match="k has 65536 layers"):
        append_kv(row.expand(1 << 16, 1, 2, 64), None, cache.expand(1 << 16, 1, 4, 2, 64), None, one)


@pytest.mark.gpu
def test_a_gpu_needs_an_angle_for_each_position_of_the_cache(gpu: str) -> None:
    changes = {"cos": zeros(19, 16), "sin": zeros(19, 16)}
    check_refusal(changes, "cos has 19 rows and k_cache has slots of 20 tokens", gpu)


@pytest.mark.parametrize("counts", [(0, 0), (0,), ()])
def test_nothing_to_append(counts: tuple[int, ...], device: str, function: Append) -> None:
    cache = poisoned((3, 8, 2, 64), torch.float16, device)
    k = torch.zeros(0, 2, 64, dtype=torch.float16, device=device)
    cu_seqlens = torch.zeros(len(counts) + 1, dtype=torch.int32, device=device)
    function(k, k, cache, cache, cu_seqlens[1:].clone(), None, cu_seqlens)
    function(k, k, cache, cache, cu_seqlens[:0].clone())
    function(k.view(0, 5, 2, 64), None, cache, None, cu_seqlens[:0].clone())
    function(k.view(0, 1, 0, 2, 64), None, cache.expand(0, 3, 8, 2, 64), None, cu_seqlens[:1].clone(), None, None)
    assert cache.isnan().all()


# -- launches ---------------------------------------------------------------------------------------------------------


def test_ragged_rows_are_checked_once_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, device: str, function: Append
) -> None:
    monkeypatch.setattr(append_checks, "_launches", {})
    for counts in ([3, 1, 2], [40, 0, 17], [2, 0, 0], [7, 7, 7]):
        call = Call(Case(counts, [40, 30, 20], ragged=True, q_heads=4, rotated=16), device)
        call.run(function)
        call.check()
    assert len(append_checks._launches) == 1
    one = Call(Case([1, 0, 0], [40, 30, 20], ragged=True, q_heads=4, rotated=16), device)
    assert one.q is not None
    one.q = one.q.as_strided(one.q.shape, (*one.q.stride()[:1], 0, *one.q.stride()[2:]))  # of one row, as if expanded
    one.run(function)
    many = Call(Case([3, 1, 2], [40, 30, 20], ragged=True, q_heads=4, rotated=16), device)
    assert many.q is not None
    many.q = many.q[:, :1].expand(-1, 6, -1, -1)
    with pytest.raises(ValueError, match="q has strides"):
        many.run(function)
    call = Call(Case([3, 1, 2], [40, 30, 20], ragged=True, q_heads=4, rotated=16), device)
    assert call.v is not None
    call.v = call.v[:, :5]
    with pytest.raises(ValueError, match=r"v has shape \[5"):
        call.run(function)


def test_launches_are_remembered_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_checks, "_MOST_LAUNCHES", 2)
    monkeypatch.setattr(append_checks, "_launches", {})
    for count in (1, 2, 3, 4, 4):
        case = Case([count], [count])
        call = Call(case, "cpu")
        call.run(append_reference)
        call.check()
        assert 1 <= len(append_checks._launches) <= 2


@pytest.mark.gpu
def test_more_programs_than_65535(gpu: str) -> None:
    rows, dtype = 150_000, torch.float16
    k = torch.randn(rows, 1, 1024, device=gpu).to(dtype)
    cache = torch.zeros(1, rows, 1, 1024, dtype=dtype, device=gpu)
    cu_seqlens = torch.tensor([0, rows], dtype=torch.int32, device=gpu)
    append_kv(k, None, cache, None, cu_seqlens[1:].clone(), None, cu_seqlens)
    assert torch.equal(cache[0], k)


@pytest.mark.gpu
def test_a_graph_captured_short_and_replayed_long(gpu: str) -> None:
    case = Case([1] * 4, [1, 2, 3, 4], [0, 1, 2, -1], rotated=64, q_heads=6, slot_tokens=500)
    warm, call = Call(case, gpu), Call(case, gpu)
    warm.run(append_kv)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run(append_kv)
    later = Case([1] * 4, [500, 77, 3, 400], [3, -1, 0, 1], rotated=64, q_heads=6, slot_tokens=500)
    call.seq_lens.copy_(torch.tensor(later.lens))
    call.options["batch_idx"].copy_(torch.tensor(later.slots))
    graph.replay()
    torch.cuda.synchronize()
    call.case = later
    call.check()
