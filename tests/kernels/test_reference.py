"""The reference itself, against others' formulas and against loops over single numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from tests.kernels.attention_cases import FEATURES, HEADS, Case, Inputs, feature_sets, make, row_slices
from vtensor.triton_kernels.arguments import FP8, AttentionArguments
from vtensor.triton_kernels.reference import attend

CASES = [
    Case(width=16, lens=(1, 0, 17, 9)),
    Case(width=16, lens=(3, 9, 0, 1), queries=4),
    Case(width=16, lens=(3, 9, 0, 1), queries=4, slots=(5, -1, 0, 5)),
    Case(width=16, lens=(7, 12, 5, 0, 30), queries=(7, 3, 0, 2, 30)),
    Case(width=16, lens=(7, 12, 5, 2, 4), queries=(3, 3, 1, 5, 9), slots=(2, -1, 7, 2, 0)),
    Case(width=32, value_width=16, lens=(7, 12), queries=(7, 3), layout="latent"),
    Case(width=16, value_width=32, lens=(7, 12), queries=(7, 3), layout="sliced"),
]


def by_loops(call: AttentionArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule as it is written down, one number after another, in Python's own floats."""
    q, k, v = call.q.double(), call.k.float().double(), call.v.float().double()
    q = q.reshape(-1, *q.shape[-2:])
    out = torch.zeros(*q.shape[:2], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for b, rows in enumerate(row_slices(call)):
        slot = b if call.batch_idx is None else int(call.batch_idx[b])
        length, count = int(call.seq_lens[b]), rows.stop - rows.start
        if slot < 0:
            continue
        for i, head in itertools.product(range(count), range(q.shape[1])):
            kv_head, p, weights = head // call.group, length - count + i, {}
            for j in range(length):
                if (call.causal and j > p) or (call.window and j <= p - call.window):
                    continue
                factor = 1.0 if call.k_scale is None else float(call.k_scale[kv_head % len(call.k_scale)])
                logit = call.scale * factor * float(q[rows.start + i, head] @ k[slot, j, kv_head])
                if call.softcap:
                    logit = call.softcap * math.tanh(logit / call.softcap)
                if call.alibi_slopes is not None:
                    logit += float(call.alibi_slopes[head]) * (j - p)
                weights[j] = math.exp(logit)
            if not weights:
                continue
            total = sum(weights.values()) + (0.0 if call.sinks is None else math.exp(float(call.sinks[head])))
            factor = 1.0 if call.v_scale is None else float(call.v_scale[kv_head % len(call.v_scale)])
            for j, weight in weights.items():
                out[rows.start + i, head] += weight / total * factor * v[slot, j, kv_head]
            lse[rows.start + i, head] = math.log(total)
    return out.reshape(*call.q.shape[:-1], -1), lse.reshape(call.q.shape[:-1])


def precise(inputs: Inputs) -> AttentionArguments:
    """The same with double queries, so that no output is rounded."""
    call = inputs.call()
    return call._replace(q=call.q.double())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("features", [(), *feature_sets()], ids="+".join)
def test_loops_find_the_same(features: tuple[str, ...], case: Case) -> None:
    call = precise(make(replace(case, features=features, window=4), "cpu"))
    out, lse = attend(call, torch.float64)
    right, right_lse = by_loops(call)
    # Weights are float32 in all dtypes.
    torch.testing.assert_close(out, right, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("features", [(), *((feature,) for feature in FEATURES if feature != "window")], ids="+".join)
def test_loops_find_the_same_where_all_is_seen(features: tuple[str, ...]) -> None:
    call = precise(
        make(Case(width=16, lens=(7, 12, 0, 2), queries=(7, 3, 2, 5), causal=False, features=features), "cpu")
    )
    out, lse = attend(call, torch.float64)
    right, right_lse = by_loops(call)
    torch.testing.assert_close(out, right, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}/{heads[1]}")
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_torch_finds_the_same(heads: tuple[int, int], window: int | None, scale: float | None) -> None:
    num_queries, lens = 6, (6, 40, 17)
    case = Case(heads, width=32, value_width=16, lens=lens, queries=num_queries, dtype=torch.float32)
    inputs = make(case, "cpu")
    inputs.options.update({} if window is None else {"window": window})
    inputs.options.update({} if scale is None else {"scale": scale})
    out, lse = attend(inputs.call())
    for b, length in enumerate(lens):
        behind = torch.arange(length - num_queries, length)[:, None] - torch.arange(length)[None, :]
        mask = (behind >= 0) & (behind < (window or length))
        q, k, v = (x.transpose(0, 1)[None] for x in (inputs.q[b], inputs.k[b, :length], inputs.v[b, :length]))
        right = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        torch.testing.assert_close(out[b], right[0].transpose(0, 1), atol=2e-6, rtol=2e-6)
        keys = k.repeat_interleave(heads[0] // heads[1], dim=1)
        logits = (q @ keys.mT)[0] * (scale or 32**-0.5)
        right_lse = logits.masked_fill(~mask, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(lse[b], right_lse.T, atol=2e-6, rtol=2e-6)


def test_decode_and_prefill_say_the_same() -> None:
    lens, num_queries = (3, 9, 0, 40), 4
    inputs = make(Case(lens=lens, queries=num_queries, slots=(4, 0, 2, -1), features=("window", "sinks")), "cpu")
    out, lse = attend(inputs.call())
    starts = torch.arange(0, 17, 4, dtype=torch.int32)
    ragged = replace(inputs, q=inputs.q.flatten(0, 1), cu_seqlens=starts)
    ragged_out, ragged_lse = attend(ragged.call())
    assert torch.equal(ragged_out, out.flatten(0, 1))
    assert torch.equal(ragged_lse, lse.flatten(0, 1))


def test_a_sink_is_a_key_of_value_0() -> None:
    case = Case((2, 2), width=16, lens=(5,), dtype=torch.float32)
    inputs = make(case, "cpu")
    sinks = torch.tensor([0.7, -30.0])
    out, lse = attend(replace(inputs, options={"sinks": sinks}).call())
    plain, plain_lse = attend(inputs.call())
    weight = plain_lse.exp() / (plain_lse.exp() + sinks.exp())
    torch.testing.assert_close(out, plain * weight[..., None])
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks))
    torch.testing.assert_close(out[0, 0, 1], plain[0, 0, 1])  # a sink that low takes nothing


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_it_returns(dtype: torch.dtype) -> None:
    inputs = make(Case(dtype=dtype, value_width=16), "cpu")
    for compute in (torch.float32, dtype):
        out, lse = attend(inputs.call(), compute)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        assert (out.shape, lse.shape) == ((4, 1, 4, 16), (4, 1, 4))
        assert torch.isfinite(out).all()
        assert not out[1].any()
        assert (lse[1] == -torch.inf).all()


def test_rows_behind_the_last_request_are_padding() -> None:
    inputs = make(Case(lens=(5, 9), queries=(3, 4)), "cpu")
    longer = replace(inputs, q=torch.cat([inputs.q, inputs.q]))
    out, lse = attend(longer.call())
    right, right_lse = attend(inputs.call())
    assert torch.equal(out[:7], right)
    assert torch.equal(lse[:7], right_lse)
    assert not out[7:].any()
    assert (lse[7:] == -torch.inf).all()


def test_scales_are_of_the_stored_numbers() -> None:
    inputs = make(Case(features=("fp8",)), "cpu")
    assert inputs.k.dtype == FP8
    k_scale, v_scale = (inputs.options[name][:, None] for name in ("k_scale", "v_scale"))
    real = replace(inputs, k=inputs.k.half(), v=inputs.v.half(), options={})
    real = replace(real, q=real.q.float(), k=real.k.float() * k_scale, v=real.v.float() * v_scale)
    right, right_lse = attend(real.call())
    out, lse = attend(inputs.call()._replace(q=real.call().q))
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse)
