"""The kernel of prefill for Hopper: when it is used, and that it is right wherever it is."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.child import in_interpreter
from tests.kernels.attention_cases import HEADS, Case, Inputs, assert_right, make, moved, run
from vtensor.triton_kernels import hopper, prefill
from vtensor.triton_kernels.attention import prefill_attention
from vtensor.triton_kernels.hopper import HopperPlan
from vtensor.triton_kernels.prefill import PrefillPlan

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
RAGGED: dict[str, Any] = {
    "queries": (64, 300, 1, 129, 0, 5, 65, 200, 2, 128, 127, 33),
    "lens": (64, 1000, 4097, 100, 63, 0, 129, 200, 1, 2049, 128, 33),
}


COMPILE = """
    import os
    os.environ.pop("TRITON_INTERPRET", None)  # which tests set
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout
    from vtensor.triton_kernels.hopper_kernel import hopper_prefill_kernel as kernel

    def tile(*shape):
        return f"tensordesc<{dtype}{list(shape)},{NVMMASharedLayout(128, 16, len(shape))!r}>"

    numbers = dict(
        STRIDE_TOKEN=8 * width, STRIDE_HEAD=width, NUM_HEADS=8, GROUP=4, D=width, BLOCK_N=128, BLOCK_B=64, STAGES=2,
        CAUSAL=causal, INDEXED=causal, LSE=causal,
    )
    types = dict(q_desc=tile(64, 1, width), lse_ptr="*fp32", scale_log2="fp32", stride_k_slot="i64")
    types |= dict.fromkeys(("k_desc", "v_desc"), tile(1, 128, 1, width))
    types |= dict.fromkeys(("k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    names = kernel.arg_names
    kinds = {name: types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in names}
    kinds |= dict.fromkeys(numbers, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")}
    source = GluonASTSource(kernel, kinds, numbers, aligned)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= 232_448, "more bytes than a program may have"
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor.4d", "setmaxnreg.inc", "tensormap.replace"):
        assert instruction in compiled.asm["ptx"], instruction
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there is no Triton elsewhere")
@pytest.mark.parametrize(
    "kind", ["width, dtype, causal = 128, 'bf16', True", "width, dtype, causal = 64, 'fp16', False"]
)
def test_it_compiles_without_a_gpu(kind: str) -> None:
    result = in_interpreter(f"width, dtype, causal = {kind}\n{textwrap.dedent(COMPILE)}")
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.fixture
def hopper_gpu(gpu: str) -> str:
    if torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    return gpu


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the kernel did each call that came to it; all that suit come, however few queries they have."""
    found: list[bool] = []
    real = HopperPlan.run

    def noting(self: HopperPlan, *args: Any) -> bool:
        found.append(real(self, *args))
        return found[-1]

    monkeypatch.setattr(HopperPlan, "run", noting)
    monkeypatch.setattr(prefill, "_HOPPER_QUERIES", 0)
    return found


def check(inputs: Inputs, launches: list[bool], *, is_used: bool = True) -> None:
    launches.clear()
    assert_right(run(prefill_attention, inputs), inputs)
    assert launches == [True] if is_used else True not in launches


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["per_layer", "sliced"])
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads: tuple[int, int], layout: Any, hopper_gpu: str, launches: list[bool]) -> None:
    check(make(Case(heads, 128, dtype=BF16, layout=layout, **RAGGED), hopper_gpu), launches)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("features", [(), ("scale",)])
def test_kinds(
    width: int, dtype: torch.dtype, causal: bool, features: tuple[str, ...], hopper_gpu: str, launches: list[bool]
) -> None:
    slots = tuple(-1 if i == 3 else (i * 5) % 12 for i in range(12))
    for some in (None, slots):
        case = Case((8, 2), width, dtype=dtype, causal=causal, features=features, slots=some, **RAGGED)
        check(make(case, hopper_gpu), launches)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 128, 129, 257])
def test_wherever_the_diagonal_meets_a_tile(count: int, hopper_gpu: str, launches: list[bool]) -> None:
    case = Case((2, 1), 128, queries=(count,) * 260, lens=tuple(i + count for i in range(260)), dtype=BF16)
    check(make(case, hopper_gpu), launches)


@pytest.mark.gpu
def test_what_it_cannot_do_the_plain_kernel_does(hopper_gpu: str, launches: list[bool]) -> None:
    case = Case((4, 2), 128, dtype=BF16, **RAGGED)
    for other in (
        replace(case, width=96),
        replace(case, dtype=FP32),
        replace(case, features=("window",)),
        replace(case, features=("softcap",)),
        replace(case, features=("sinks",)),
        replace(case, features=("alibi",)),
        replace(case, features=("fp8",)),
        replace(case, width=128, value_width=64),
    ):
        check(make(other, hopper_gpu), launches, is_used=False)
    inputs = make(case, hopper_gpu)
    check(inputs, launches)
    check(replace(inputs, q=moved(inputs.q, 1, 8)), launches, is_used=False)  # not at a multiple of 16 bytes


@pytest.mark.gpu
def test_one_plan_for_all_numbers_of_queries(hopper_gpu: str, launches: list[bool]) -> None:
    case = Case((8, 2), 128, dtype=BF16, queries=(700, 300), lens=(700, 1000))
    inputs = make(case, hopper_gpu)
    call = inputs.call()
    out = torch.full_like(inputs.q, torch.nan)
    plan = PrefillPlan(call, has_lse=False, out_strides=out.stride())
    for queries in ((700, 300), (1, 2), (128, 0), (257, 290), (700, 300)):
        ends = torch.tensor([0, queries[0], sum(queries)], dtype=torch.int32, device=hopper_gpu)
        some = replace(inputs, q=inputs.q[: sum(queries)], cu_seqlens=ends)
        plan.run(some.call(), out[: sum(queries)], None)
        expected, _ = run(prefill_attention, some)
        assert torch.equal(out[: sum(queries)], expected)
        assert_right(run(prefill_attention, some), some)
    assert all(launches)


@pytest.mark.gpu
def test_a_graph_captured_short_and_replayed_long(hopper_gpu: str, launches: list[bool]) -> None:
    inputs = make(Case((8, 2), 128, dtype=BF16, queries=(300, 212), lens=(300, 212), capacity=3000), hopper_gpu)
    inputs.k.normal_(), inputs.v.normal_()
    assert inputs.cu_seqlens is not None
    run(prefill_attention, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill_attention(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.seq_lens, inputs.batch_idx)
    for lens, ends in (((300, 212), (0, 300, 512)), ((3000, 2999), (0, 100, 512)), ((0, 500), (0, 512, 512))):
        inputs.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        inputs.cu_seqlens.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        expected, _ = run(prefill_attention, inputs)
        assert torch.equal(out, expected)
        assert_right(run(prefill_attention, inputs), inputs)


@pytest.mark.gpu
def test_no_memory_behind_and_none_in_other_slots(hopper_gpu: str, launches: list[bool]) -> None:
    cache = vt.empty(3, 1 << 17, 2, 2, 128, dtype=FP16, device=hopper_gpu)
    page = 2 << 20  # bytes; a row has 1 KiB
    rows = page // 1024
    cache[1, :rows].normal_()  # to the end of a page, and not a row more
    cache[2, 5 * rows : 6 * rows].normal_()
    k, v = cache.plain().unbind(2)
    q = torch.randn(300, 4, 128, dtype=FP16, device=hopper_gpu)
    ends, lens, slots = (
        torch.tensor(x, dtype=torch.int32, device=hopper_gpu) for x in ([0, 300, 300], [rows, 0], [1, 0])
    )
    launches.clear()
    found = prefill_attention(q, k, v, ends, lens, slots)
    copy = torch.randn(2, 1, rows, 2, 128, dtype=FP16, device=hopper_gpu)
    copy[0, 0], copy[1, 0] = k[1, :rows], v[1, :rows]
    assert launches == [True]
    torch.cuda.synchronize()
    expected = prefill_attention(q, *copy, ends[:2].clone(), lens[:1])
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_no_gluon(hopper_gpu: str, launches: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "prepare", lambda *args: None)
    inputs = make(Case((4, 2), 128, dtype=BF16, **RAGGED), hopper_gpu)
    plan = PrefillPlan(inputs.call(), has_lse=False, out_strides=inputs.q.stride())
    for _ in range(2):
        out = torch.full_like(inputs.q, torch.nan)
        plan.run(inputs.call(), out, None)
    assert launches == [False, False]
    assert torch.isfinite(out).all()
    monkeypatch.setattr(hopper, "_PROVEN", ("0.0",))
    assert not HopperPlan.suits(inputs.call())
