"""Softmax: what the kernels of attention share, from logits to outputs."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LOG2E", "finish", "logits", "row_offsets", "soften"]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def row_offsets(rows, sees, stride_row, stride_page, table_ptr, PAGE: tl.constexpr):
    """Offsets of rows of a cache, in elements: of a slot, or of pages that a block table names.

    int64 before they are multiplied: a token of a slice of many layers is some 64k elements wide.
    """
    if PAGE == 0:
        offsets = rows.to(tl.int64) * stride_row
    else:
        page = tl.load(table_ptr + rows // PAGE, mask=sees, other=0)
        offsets = page.to(tl.int64) * stride_page + (rows % PAGE).to(tl.int64) * stride_row
    return offsets


@triton.jit
def logits(scores, scale, softcap, slopes, distance, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Logits for base 2 of raw scores. `distance`: of the keys, from the queries; `slopes`: [M, 1]."""
    if SOFTCAP:
        # tanh x = 1 - 2 / (exp(2x) + 1), which is right at both ends; where it is small that cancels, and a series does
        x = scores * (scale / softcap)
        x2 = x * x
        small = x * (1.0 + x2 * (-0.33333333 + x2 * (0.13333333 + x2 * (-0.053968254 + x2 * 0.021869488))))
        large = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
        found = (softcap * LOG2E) * tl.where(x2 < 0.0625, small, large)
    else:
        found = scores * (scale * LOG2E)
    if ALIBI:
        found += (slopes * LOG2E) * distance
    return found


@triton.jit
def soften(found, m, l, acc):
    """One step of the online softmax: the weights of a tile, and the running maximum, sum and output put to it."""
    m_new = tl.maximum(m, tl.max(found, 1))
    m_used = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet: no -inf less -inf
    weights = tl.exp2(found - m_used[:, None])
    alpha = tl.exp2(m - m_used)
    l = l * alpha + tl.sum(weights, 1)
    acc = acc * alpha[:, None]
    return weights, m_new, l, acc


@triton.jit
def finish(acc, m, l, sinks, SINKS: tl.constexpr):
    """Outputs and natural log-sum-exp of rows, from unnormalised sums; 0 and -inf where a row has seen nothing.

    A maximum passes over NaN, a sum does not: what is NaN stays so.
    """
    sees_any = (m > float("-inf")) | (l != l)
    if SINKS:
        top = tl.where(sees_any, tl.maximum(m, sinks * LOG2E), 0.0)
        l = l * tl.exp2(m - top) + tl.exp2(sinks * LOG2E - top)
        acc = acc * tl.exp2(m - top)[:, None]
    else:
        top = m
    l = tl.where(sees_any, l, 1.0)
    out = tl.where(sees_any[:, None], acc / l[:, None], 0.0)
    lse = tl.where(sees_any, (top + tl.log2(l)) * LN2, float("-inf"))
    return out, lse
