"""`vtensor.attention`: what back-ends say that they can do, which is chosen, and that each is called as it wants."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import vtensor as vt
from tests.kernels.attention_cases import Case, Inputs, assert_right, make
from vtensor.attention_backends import backend as backend_module
from vtensor.attention_backends import dispatch, flash_attention3, table
from vtensor.attention_backends.backend import Backend, why_no_module, with_sinks
from vtensor.attention_backends.choose import BACKENDS, FAMILIES, choose
from vtensor.attention_backends.groups import Group, GroupBackend, plan_groups
from vtensor.attention_backends.support import Support, needed_features
from vtensor.triton_kernels import prefill_attention
from vtensor.triton_kernels.arguments import AttentionArguments, check_attention
from vtensor.triton_kernels.reference import attend

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

DECODE = [
    Case(),
    Case(lens=(5, 5, 5, 1), heads=(9, 3), layout="sliced", keeps_dim=True),
    Case(lens=(3, 9, 30, 2), queries=5, slots=(5, -1, 0, 5)),
    Case(lens=(30, 17, 0), features=("window",)),
    Case(lens=(30, 17, 0), features=("sinks", "scale"), dtype=torch.bfloat16),
]
RAGGED = [
    Case(lens=(7, 12, 5, 0, 30), queries=(7, 3, 0, 2, 30), dtype=torch.bfloat16),
    Case(lens=(7, 12, 5, 2, 4), queries=(3, 3, 1, 5, 9), slots=(2, -1, 7, 2, 0)),
    Case(lens=(20, 20, 20), queries=(6, 6, 6), layout="sliced", features=("sinks",)),
    Case(lens=(20, 7), queries=(6, 7), causal=False),
    Case(lens=(40, 30), queries=(6, 30), features=("window",)),
]
FLEXIBLE = [
    Case(lens=(9, 30), features=("softcap",)),
    Case(lens=(9, 30), queries=(4, 30), features=("alibi", "softcap", "window")),
    Case(lens=(9, 30), queries=(4, 30), value_width=32, layout="latent"),
]
NUMBERS = (torch.float32, torch.float16, torch.bfloat16)


def run(inputs: Inputs, backend: str = "auto", **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = vt.attention(
        inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.batch_idx, inputs.cu_seqlens, **inputs.options,
        return_lse=True, backend=backend, **options,
    )  # fmt: skip
    assert isinstance(found, tuple)
    assert found[0].shape == (*inputs.q.shape[:-1], inputs.v.shape[3])
    assert found[0].dtype == inputs.q.dtype
    assert found[1].shape == inputs.q.shape[:-1]
    return found


def assert_near(found: tuple[torch.Tensor, torch.Tensor], inputs: Inputs) -> None:
    """Assert that outputs are right, and log-sum-exp values as good as others make them: not as exact as ours."""
    right = attend(inputs.call())[1].reshape(found[1].shape)
    torch.testing.assert_close(found[1], right, atol=1e-3, rtol=1e-4)
    assert_right((found[0], right), inputs)


# -- really, on the host ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", DECODE + RAGGED, ids=str)
@pytest.mark.parametrize("name", ["sdpa-flash", "flex", "reference"])
def test_right_on_the_host(name: str, case: Case) -> None:
    inputs = make(case, "cpu")
    assert_near(run(inputs, name), inputs)


@pytest.mark.parametrize("case", FLEXIBLE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_flex_on_the_host(case: Case, dtype: torch.dtype) -> None:
    inputs = make(replace(case, dtype=dtype), "cpu")
    assert_right(run(inputs, "flex"), inputs)


@pytest.mark.parametrize(
    "case", [DECODE[2], Case(lens=(40, 30), queries=(6, 3), features=("window", "sinks"))], ids=str
)
def test_triton_in_the_interpreter(case: Case) -> None:
    inputs = make(case, "cpu")
    assert choose("auto", inputs.call()).name == "triton"
    assert_right(run(inputs), inputs)


def test_triton_of_many_queries_is_prefill() -> None:
    inputs = make(Case(lens=(40, 30), queries=17, heads=(2, 1)), "cpu")
    assert_right(run(inputs, "triton"), inputs)
    inputs = make(Case(lens=(40, 30), queries=3, heads=(2, 1), causal=False), "cpu")
    assert_right(run(inputs, "triton"), inputs)


def test_without_lse_it_is_the_same() -> None:
    inputs = make(DECODE[0], "cpu")
    alone = vt.attention(inputs.q, inputs.k, inputs.v, inputs.seq_lens, backend="sdpa-flash")
    assert torch.equal(alone, run(inputs, "sdpa-flash")[0])


@pytest.mark.parametrize("window", [0, 100])
def test_nothing_is_read_where_there_is_no_memory(window: int) -> None:
    layers = [vt.LayerSpec(num_kv_heads=2, head_dim=64, window=window or None)]
    config = vt.KVCacheConfig(layers=layers, max_batch_size=2, max_context_tokens=4096, dtype=torch.float32)
    with vt.KVCacheManager(config, device="cpu") as cache:
        lens = [0, 0]
        for length in (1024, 512):  # whole page groups: the next token has no memory
            lens[cache.alloc_reqid()] = length
        assert cache.step(lens)
        k, v = cache.layer(0, plain=True)  # which ends the process where there is none
        for slot, length in enumerate(lens):
            for part in (k, v):
                first = length - window if window else 0
                part[slot, first:length] = torch.randn(length - first, 2, 64)
        q, seq_lens = torch.randn(2, 4, 64), torch.tensor(lens, dtype=torch.int32)
        read = [
            vt.attention(q, k, v, seq_lens, window=window or None, backend=name)
            for name in ("sdpa-flash", "flex", "reference")
        ]
    for out in read[:-1]:  # what pytest prints of a failure must not be the cache itself
        torch.testing.assert_close(out, read[-1], atol=1e-5, rtol=1e-5)


# -- groups -------------------------------------------------------------------------------------------------------


def test_groups_are_views_of_neighbours() -> None:
    case = Case(lens=(4, 4, 4, 2, 4, 9), queries=(2, 2, 2, 2, 2, 0), slots=(3, 4, 6, 7, -1, 1))
    assert plan_groups(make(case, "cpu").call()) == [Group(3, 2, 4, 0, 2), Group(6, 1, 4, 4, 2), Group(7, 1, 2, 6, 2)]


@pytest.mark.parametrize("window", [0, 3])
def test_a_group_sees_the_cache_and_no_copy(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run_group(self: Any, call: Any, q: Any, k: torch.Tensor, v: Any, *, return_lse: bool) -> Any:
        seen.append(k)
        return q, None

    monkeypatch.setattr(type(BACKENDS["sdpa-flash"]), "run_group", run_group)
    inputs = make(Case(lens=(9, 9, 5), layout="sliced", features=("window",) if window else (), window=3), "cpu")
    vt.attention(
        inputs.q, inputs.k, inputs.v, inputs.seq_lens, window=inputs.options.get("window"), backend="sdpa-flash"
    )
    assert [tuple(k.shape[:2]) for k in seen] == ([(2, 3), (1, 3)] if window else [(2, 9), (1, 5)])
    assert seen[0].data_ptr() == inputs.k[0, 6 if window else 0].data_ptr()
    assert seen[1].data_ptr() == inputs.k[2, 2 if window else 0].data_ptr()
    assert all(k.stride() == inputs.k.stride() for k in seen)


def test_lengths_that_the_cache_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make(Case(lens=(4, 4)), "cpu").call()
    call.seq_lens[1] = 99  # as on a GPU, where they are not looked at before
    with pytest.raises(ValueError, match="request 1 has seq_lens 99"):
        plan_groups(call)


def test_sinks_afterwards() -> None:
    inputs = make(Case(lens=(9, 0), features=("sinks",), dtype=torch.float32), "cpu")
    call = inputs.call()
    out, lse = with_sinks(*attend(call._replace(sinks=None)), call.sinks)
    assert_right((out, lse), inputs)


# -- choice, on a GPU that is played ------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def play(monkeypatch: pytest.MonkeyPatch, *present: str) -> None:
    for name, backend in BACKENDS.items():
        monkeypatch.setattr(
            type(backend), "why_absent", lambda self, here=name in present: None if here else "not here"
        )


def call_on_gpu(
    rows: int = 0, dtype: torch.dtype = torch.bfloat16, width: int = 128, **options: Any
) -> AttentionArguments:
    with FakeTensorMode():
        q = torch.empty(*((rows,) if rows else (4,)), 8, width, dtype=dtype, device="cuda:0")
        k, v = torch.empty(2, 6, 4096, 2, width, dtype=dtype, device="cuda:0")
        lens = torch.empty(4, dtype=torch.int32, device="cuda:0")
        cu_seqlens = torch.empty(5, dtype=torch.int32, device="cuda:0") if rows else None
        return check_attention(q, k, v, lens, None, cu_seqlens, **options)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("present", "rows", "overread", "options", "chosen"),
    [
        (("triton", "fa3-upstream"), 0, 512, {}, "triton"),  # decode
        (("triton", "fa3-upstream", "fa3-fwd"), 4096, 512, {}, "fa3-upstream"),
        (("triton", "fa3-upstream", "fa3-fwd"), 4096, 175, {}, "triton"),  # no room behind the sequences
        (("triton", "fa3-fwd"), 4096, 176, {}, "fa3-fwd"),
        (("triton", "fa3-fwd"), 4096, 512, {"window": 100}, "triton"),
        (("triton", "fa3-upstream"), 4096, 512, {"width": 64}, "triton"),  # nothing measured
        (("fa3-vllm", "flash-attn-2"), 0, 512, {}, "fa3-vllm"),
        (("fa3-vllm", "flash-attn-2"), 0, 0, {}, "flash-attn-2"),
        (("flash-attn-2",), 0, 0, {"window": 5}, "reference"),  # whole tiles before the window
        (("cudnn", "sdpa-flash", "flex", "flashinfer"), 0, 0, {}, "reference"),  # the others wait for the device too
    ],
)
def test_auto(
    present: tuple[str, ...],
    rows: int,
    overread: int,
    options: dict[str, Any],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(monkeypatch, "reference", *present)
    assert choose("auto", call_on_gpu(rows, **options), overread_tokens=overread).name == chosen


@pytest.mark.usefixtures("hopper")
def test_during_capture_lengths_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, *BACKENDS)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = call_on_gpu()
    able = {name for name, backend in BACKENDS.items() if backend.why_not(call) is None}
    assert able == {"triton", "flash-attn-2", "fa3-upstream", "fa3-fwd", "fa3-vllm"}
    for name in set(BACKENDS) - able:
        with pytest.raises(ValueError, match=rf"{name}.*CUDA graph; these can: triton, flash-attn-2, fa3-upstream"):
            choose(name, call)
    with pytest.raises(ValueError, match=r"flash-attn-2.*CUDA graph"):
        choose("flash-attn-2", call_on_gpu(64))


@pytest.mark.usefixtures("hopper")
def test_a_family_is_the_first_build_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "fa3-fwd", "fa3-vllm", "reference")
    assert choose("flash-attn-3", call_on_gpu()).name == "fa3-fwd"
    assert choose("flash-attn-3", call_on_gpu(window=8)).name == "fa3-vllm"
    with pytest.raises(ValueError, match=r"fa3-upstream: .*float16 or.*fa3-vllm: .*these can: reference$"):
        choose("flash-attn-3", call_on_gpu(dtype=torch.float32))


@pytest.mark.usefixtures("hopper")
def test_who_can(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "triton", "reference", "cudnn")
    with pytest.raises(
        ValueError, match=r"backend='flex' cannot be used: not here; these can: triton, cudnn, reference"
    ):
        choose("flex", call_on_gpu())
    with pytest.raises(
        ValueError, match=r"backend='cudnn' cannot be used: it cannot do softcap; these can: triton, ref"
    ):
        choose("cudnn", call_on_gpu(softcap=1.0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    with pytest.raises(ValueError, match=r"not for GPUs of compute capability 12\.0"):
        choose("fa3-fwd", call_on_gpu())


def test_unknown_names_and_overread() -> None:
    inputs = make(Case(), "cpu")
    with pytest.raises(ValueError, match=r"backend='flash' must be one of auto, triton, .*flash-attn-3"):
        run(inputs, "flash")
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="overread_tokens="):
            run(inputs, overread_tokens=wrong)


def test_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make(Case(), "cpu").call()
    assert choose("auto", make(Case(dtype=torch.bfloat16), "cpu").call()).name == "reference"
    with pytest.raises(ValueError, match=r"fa3-vllm.*it is for tensors on cuda, not cpu"):
        choose("fa3-vllm", call)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert choose("auto", call).name == "reference"
    with pytest.raises(ValueError, match=r"'triton'.*TRITON_INTERPRET=1.*these can: sdpa-flash, flex, reference"):
        choose("triton", call)


def test_the_table_names_back_ends() -> None:
    for names in (*table._WINNERS.values(), table._ELSE, *FAMILIES.values()):
        assert set(names) <= set(BACKENDS)


def test_support_is_checked() -> None:
    with pytest.raises(ValueError, match=r"features=.*windows"):
        Support((torch.float16,), frozenset({"windows"}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overread_tokens=-1"):
        Support((torch.float16,), frozenset(), overread_tokens=-1)


def test_features_of_a_call() -> None:
    inputs = make(
        Case(
            lens=(4,), queries=(2,), slots=(0,), value_width=32, features=("window", "softcap", "sinks", "alibi", "fp8")
        ),
        "cpu",
    )
    assert list(needed_features(inputs.call(), return_lse=True)) == [
        "batch_idx", "cu_seqlens", "window", "softcap", "sinks", "alibi_slopes", "fp8", "return_lse", "Dv",
    ]  # fmt: skip
    assert list(needed_features(make(Case(causal=False), "cpu").call(), return_lse=False)) == []


def test_a_package_that_does_not_load(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_one.py").write_text("raise OSError('undefined symbol: _ZN3c10\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    assert why_no_module("broken_one") == "broken_one does not load: undefined symbol: _ZN3c10"
    assert why_no_module("no_such_module_anywhere") == "no_such_module_anywhere is not installed"


# -- how others are called: stand-ins with their signatures, which compute by the reference ------------------------


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def put(name: str, **functions: Callable[..., Any]) -> None:
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    why_no_module.cache_clear()
    yield put
    why_no_module.cache_clear()


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: Any, slots: Any, rows: Any, **options: Any
) -> Any:
    """As FlashAttention has it: log-sum-exp values [B, Hq, Sq] or [Hq, T], windows (before, after), no softcap 0."""
    assert k.stride(-1) == v.stride(-1) == 1
    assert slots is not None or k.shape[0] == lens.shape[0]  # as many slots as requests
    assert slots is None or bool((slots >= 0).all())  # it knows no padding
    before, after = options.pop("window_size", (-1, -1))
    assert (before >= 0) == (after == 0)
    window = before + 1 if before >= 0 else None
    call = check_attention(
        q, k, v, lens, slots, rows, window=window, softcap=options.pop("softcap", 0.0) or None, **options
    )
    out, lse = attend(call)
    return out, lse.transpose(-1, -2)


def check_stand_in(name: str, case: Case) -> None:
    inputs = make(case, "cpu")
    backend = BACKENDS[name]
    assert backend.why_absent() is None
    assert backend.support.why_not(inputs.call(), return_lse=True) is None
    out, lse = backend.attend(inputs.call(), return_lse=True)
    assert lse is not None
    assert_right((out, lse), inputs)
    alone, nothing = backend.attend(inputs.call(), return_lse=False)
    assert nothing is None
    assert torch.equal(alone, out)


FLASH = [*DECODE, *RAGGED, Case(lens=(9, 30), features=("softcap",))]


@pytest.mark.parametrize("case", [*FLASH, Case(lens=(9, 30), features=("alibi",))], ids=str)
def test_flash_attention_2(case: Case, stand_in: Callable[..., None]) -> None:
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        assert q.dim() == 4
        assert k is v is None
        if isinstance(cache_seqlens, int):
            cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32)
        out, lse = reference(
            q, k_cache, v_cache, cache_seqlens, cache_batch_idx, None, scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
        )  # fmt: skip
        lse = torch.where(lse == -torch.inf, torch.inf, lse)
        return (out, lse) if return_softmax_lse else out

    stand_in("flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache)
    check_stand_in("flash-attn-2", case)


def poisoned(out: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    if rows is not None:
        out[int(rows[-1]) :] = torch.nan
    return out


@pytest.mark.parametrize("case", FLASH, ids=str)
def test_flash_attention_3_of_upstream(case: Case, stand_in: Callable[..., None]) -> None:
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        assert (cu_seqlens_q is None) == (max_seqlen_q is None)
        assert cu_seqlens_q is None or max_seqlen_q >= int(cu_seqlens_q.diff().max())
        out, lse = reference(
            q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cu_seqlens_q, scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap,
        )  # fmt: skip
        return (poisoned(out, cu_seqlens_q), lse, None, None) if return_softmax_lse else out

    stand_in("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)
    check_stand_in("fa3-upstream", case)


def test_rows_of_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fwd(q, k, v, *, cu_seqlens_q, seqused_k, max_seqlen_q, kv_batch_idx, softmax_scale, is_causal, softcap):
        out, lse = reference(q, k, v, seqused_k, kv_batch_idx, cu_seqlens_q, scale=softmax_scale, causal=is_causal)
        lse[:, int(cu_seqlens_q[-1]) :] = torch.nan
        return poisoned(out, cu_seqlens_q), lse, None, None

    monkeypatch.setattr(torch.ops, "fa3_fwd", SimpleNamespace(fwd=fwd), raising=False)
    inputs = make(Case(lens=(7, 12), queries=(7, 3), dtype=torch.bfloat16), "cpu")
    inputs = replace(inputs, q=torch.cat([inputs.q, inputs.q[:2]]))
    out, lse = BACKENDS["fa3-fwd"].run(inputs.call(), return_lse=True)
    assert not out[10:].any()
    assert lse is not None
    assert bool((lse[10:] == -torch.inf).all())
    assert_right((out, lse), inputs)


FA3_FWD_CASES = [case for case in FLASH if "window" not in case.features]


@pytest.mark.parametrize("case", FA3_FWD_CASES, ids=str)
def test_fa3_fwd(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def fwd(
        q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, is_causal=False, window_size_left=-1,
        window_size_right=-1, attention_chunk=0, softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None,
        num_splits=0, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        found, lse = reference(
            q, k, v, seqused_k, kv_batch_idx, cu_seqlens_q, scale=softmax_scale, causal=is_causal, softcap=softcap
        )
        return found, lse, None, None

    monkeypatch.setattr(torch.ops, "fa3_fwd", SimpleNamespace(fwd=fwd), raising=False)
    check_stand_in("fa3-fwd", replace(case, dtype=torch.bfloat16))


VLLM = [
    "q", "k", "v", "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
    "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos",
    "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "softmax_scale", "is_causal",
    "window_left", "window_right", "softcap", "is_rotary_interleaved", "scheduler_metadata", "num_splits",
    "pack_gqa", "sm_margin", "s_aux", "cp_world_size", "cp_rank", "cp_tot_seqused_k",
]  # fmt: skip


@pytest.mark.parametrize("case", FLASH, ids=str)
def test_fa3_of_vllm(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def fwd(*arguments: Any) -> Any:
        given = SimpleNamespace(**dict(zip(VLLM, arguments, strict=True)))
        assert given.q.dim() == 3
        assert given.max_seqlen_q >= int(given.cu_seqlens_q.diff().max())
        assert (given.is_rotary_interleaved, given.num_splits, given.sm_margin) == (True, 0, 0)
        assert (given.cp_world_size, given.cp_rank) == (1, 0)
        used = {"q", "k", "v", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "kv_batch_idx", *VLLM[23:29], *VLLM[30:35]}
        assert all(value is None for name, value in vars(given).items() if name not in used | {"cp_rank"})
        out, lse = reference(
            given.q, given.k, given.v, given.seqused_k, given.kv_batch_idx, given.cu_seqlens_q,
            scale=given.softmax_scale, causal=given.is_causal, window_size=(given.window_left, given.window_right),
            softcap=given.softcap,
        )  # fmt: skip
        return out, lse, None, None

    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=fwd), raising=False)
    check_stand_in("fa3-vllm", case)


def test_the_library_inside_vllm_is_loaded_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    (tmp_path / "vllm/vllm_flash_attn").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('not to be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    flash_attention3._why_no_library.cache_clear()
    assert BACKENDS["fa3-vllm"].why_absent() == "vllm has no vllm_flash_attn/_vllm_fa3_C"
    library = tmp_path / "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
    library.write_text("")
    flash_attention3._why_no_library.cache_clear()
    assert BACKENDS["fa3-vllm"].why_absent() is None
    assert loaded == [str(library)]
    flash_attention3._why_no_library.cache_clear()


@pytest.mark.parametrize("case", FLASH, ids=str)
def test_flashinfer(case: Case, stand_in: Callable[..., None]) -> None:
    def single_prefill_with_kv_cache(
        q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None,
        causal=False, kv_layout="NHD", pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None,
        window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, backend="auto", return_lse=False,
    ):  # fmt: skip
        assert kv_layout == "NHD"
        lens = torch.tensor([k.shape[0]], dtype=torch.int32)
        window = (window_left, 0 if window_left >= 0 else -1)
        is_causal = causal or window_left >= 0
        out, lse = reference(
            q[None], k[None], v[None], lens, None, None, scale=sm_scale, causal=is_causal, window_size=window,
            softcap=logits_soft_cap or 0.0,
        )  # fmt: skip
        return (out[0], lse[0].T / math.log(2)) if return_lse else out[0]

    stand_in("flashinfer", single_prefill_with_kv_cache=single_prefill_with_kv_cache)
    check_stand_in("flashinfer", case)


CUDNN_CASES = [*DECODE[:2], *DECODE[3:], Case(lens=(7, 5, 0), queries=(7, 9, 2)), RAGGED[3]]


def play_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def cudnn(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
        assert attn_bias is None
        assert q.shape[2] == k.shape[2] or not is_causal  # from the first token on
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        lens = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32)
        out, lse = reference(q, k, v, lens, None, None, scale=scale, causal=is_causal)
        return out.transpose(1, 2), lse[..., None] if compute_log_sumexp else lse[..., :0]

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


@pytest.mark.parametrize("case", CUDNN_CASES, ids=str)
def test_cudnn(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    play_cudnn(monkeypatch)
    check_stand_in("cudnn", case)


def test_cudnn_refuses_what_it_finds_by_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    play_cudnn(monkeypatch)
    monkeypatch.setattr(backend_module.Backend, "why_not_on", lambda self, device: None)
    inputs = make(Case(lens=(7, 12), queries=(7, 3)), "cpu")
    with pytest.raises(ValueError, match=r"3 new tokens behind 9 cached ones.*these can: .*reference") as found:
        run(inputs, "cudnn")
    assert "cudnn" not in str(found.value).partition("these can")[2]


def test_windows_of_several_queries_are_not_for_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("cudnn", "sdpa-flash"):
        assert BACKENDS[name].why_not(call_on_gpu(window=4)) is None
        reason = BACKENDS[name].why_not(call_on_gpu(64, window=4))
        assert reason is not None
        assert "window" in reason


# -- on a GPU, whatever is there ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*DECODE, *RAGGED, *FLEXIBLE, Case(heads=(32, 8), width=128, lens=(500, 77, 1))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BACKENDS)
def test_right_on_a_gpu(name: str, dtype: torch.dtype, case: Case, gpu: str) -> None:
    inputs = make(replace(case, dtype=dtype), gpu)
    backend: Backend = BACKENDS[name]
    call = inputs.call()
    if reason := backend.why_not(call, return_lse=True) or backend.why_absent():
        pytest.skip(reason)
    groups = plan_groups(call) if isinstance(backend, GroupBackend) else []
    if reason := next(filter(None, (backend.why_not_group(call, group) for group in groups)), None):
        pytest.skip(reason)
    if backend.overread_tokens(call):  # what it reads beside a sequence must hold numbers
        inputs = replace(inputs, k=inputs.k.nan_to_num(), v=inputs.v.nan_to_num())
    assert_near(run(inputs, name), inputs)


@pytest.mark.gpu
def test_a_choice_is_made_once_for_calls_of_a_kind(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def noting(name: str, call: AttentionArguments, **options: Any) -> Backend:
        made.append(call.q.shape[0])
        return choose(name, call, **options)

    monkeypatch.setattr(dispatch, "choose", noting)
    monkeypatch.setattr(dispatch, "_kinds", {})
    inputs = make(Case((8, 2), 128, lens=(500, 600), queries=(400, 400), dtype=torch.bfloat16), gpu)
    for counts in ((1, 1), (2, 1), (400, 400), (300, 400), (1, 1)):
        ends = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=gpu)
        some = replace(inputs, q=inputs.q[: sum(counts)], cu_seqlens=ends)
        out = vt.attention(some.q, some.k, some.v, some.seq_lens, some.batch_idx, ends)
        assert isinstance(out, torch.Tensor)
        expected = prefill_attention(some.q, some.k, some.v, ends, some.seq_lens, some.batch_idx)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    assert made == [2, 800]  # the table tells a few queries from many
    with pytest.raises(ValueError, match="window"):
        vt.attention(inputs.q, inputs.k, inputs.v, inputs.seq_lens, None, inputs.cu_seqlens, window=0)
