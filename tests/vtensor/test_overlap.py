"""``out=`` on memory that is also read: what torch refuses or computes in place, and never garbage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import vtensor as vt

CASES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gather": lambda x, out: torch.gather(x, 1, torch.tensor([[3, 2, 1, 0]] * 4), out=out),
    "index_select": lambda x, out: torch.index_select(x, 0, torch.tensor([3, 2, 1, 0]), out=out),
    "mul of the transpose": lambda x, out: torch.mul(x.t(), 1, out=out),
    "cumprod of the transpose": lambda x, out: torch.cumprod(x.t(), 0, out=out),
    "add in place": lambda x, out: torch.add(x, 1, out=out),
    "cat": lambda x, out: torch.cat([x[2:], x[:2]], out=out),
}


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_separate_memory(case: str) -> None:
    values = torch.arange(16.0).view(4, 4) + 1
    expected = CASES[case](values.clone(), torch.empty(4, 4))
    x = vt.empty(4, 4, device="cpu")
    x.copy_(values)
    CASES[case](x, x)
    assert torch.equal(x.plain(), expected)
