"""Lengths: of which request a piece of the work is, where all requests stand in one line."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["MOST_LENGTHS", "request_at"]

MOST_LENGTHS = 1024
"""Requests whose lengths each program adds up itself; for more that is done before, in memory."""


@triton.jit
def request_at(place, ends_ptr, batch, times, LOG_B: tl.constexpr):
    """The request in which a place lies, and where that begins. `ends`: of each request, to be taken so many times."""
    low, high = tl.zeros([], tl.int32), batch + tl.zeros([], tl.int32)  # the first whose end is beyond it
    for _ in range(LOG_B):
        middle = (low + high) // 2
        is_before = tl.load(ends_ptr + tl.minimum(middle, batch - 1)) * times <= place
        low, high = tl.where(is_before & (low < high), middle + 1, low), tl.where(is_before, high, middle)
    return low, tl.load(ends_ptr + low - 1, mask=low > 0, other=0) * times
