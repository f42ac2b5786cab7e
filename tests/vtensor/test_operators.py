"""torch's own samples of its operators: on a virtual tensor each does what it does on a dense, zero-filled copy.

Every strided input becomes a virtual tensor whose rows lie a page group apart; half of the rows are never written. The
reference is a plain tensor of the same strides with zeros in those rows. Values and exceptions must be the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import vtensor as vt
from vtensor.allocator.driver import get_driver
from vtensor.allocator.driver.host import HostDriver

pytest.importorskip("expecttest", reason="torch's samples of operators need it")
opinfo: Any = pytest.importorskip("torch.testing._internal.common_methods_invocations")

NUM_SAMPLES = 5
REASONS = {
    "resize_": "refused: the storage never moves",
    "resize_as_": "refused: the storage never moves",
    "empty": "has no values",
    "empty_like": "has no values",
    "empty_permuted": "has no values",
    "empty_strided": "has no values",
    "new_empty": "has no values",
    "new_empty_strided": "has no values",
    "native_group_norm": "leaves some of its results unwritten where a sample is empty",
}
READS_UNSEEN = {"tensor_split call"}  # an index tensor, by C++ code that no dispatcher sees (see ARCHITECTURE.md)
CASES = {
    f"{op.name} {op.variant_test_name} {variant}".replace("  ", " "): (op, variant)
    for op in opinfo.op_db
    for variant in ("call", "in place")
    if op.name not in REASONS and (variant == "call" or op.get_inplace() is not None)
}


def with_gaps(value: torch.Tensor, make: Callable[..., torch.Tensor]) -> torch.Tensor:
    """A copy of which every second row is left as `make` makes it: zeros, or no memory at all."""
    value = value.detach()
    if value.dim() == 0 or value.numel() == 0:
        return make(value.shape, value.stride(), value.dtype).copy_(value)
    width = get_driver("cpu").default_page_group_bytes // value.element_size()
    inner = torch.empty(value.shape[1:], device="meta").stride()
    copied = make(value.shape, (max(width, value[0].numel()), *inner), value.dtype)
    copied[::2].copy_(value[::2])
    return copied


def dense(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    return torch.zeros(last + 1, dtype=dtype).as_strided(shape, strides)  # zeros also between the rows


def virtual(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return vt.empty_strided(shape, strides, dtype=dtype, device="cpu")


def outcome(function: Callable[..., Any], sample: Any, make: Callable[..., torch.Tensor]) -> tuple[Any, Any]:
    """The result and what became of the first argument, or the exception's type."""
    copies: dict[int, torch.Tensor] = {}

    def convert(value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return value
        return copies.setdefault(id(value), with_gaps(value, make))

    first, args, kwargs = pytree.tree_map(convert, (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(0)
    try:
        return function(first, *args, **kwargs), first
    except Exception as error:
        return type(error), None


def equal(found: Any, expected: Any) -> bool:
    """Whether all that was returned is the same, NaN for NaN."""
    if not isinstance(expected, torch.Tensor):
        if isinstance(expected, list | tuple):
            return len(found) == len(expected) and all(map(equal, found, expected))
        return type(found) is type(expected) and (found == expected or expected != expected)
    if (found.shape, found.dtype, found.layout) != (expected.shape, expected.dtype, expected.layout):
        return False
    if found.layout != torch.strided:
        found, expected = found.to_dense(), expected.to_dense()
    # A close one is the same: which vector code adds up a row depends on how it is aligned.
    return torch.allclose(
        found.detach().clone().to(torch.complex128),
        expected.detach().to(torch.complex128),
        rtol=1e-4,
        atol=1e-4,
        equal_nan=True,
    )


def is_as_on_a_dense_copy(op: Any, variant: str) -> bool:
    """Try all samples; True as well where torch has none for the CPU."""
    function = op.get_op() if variant == "call" else op.get_inplace()
    dtype = torch.float32 if torch.float32 in op.dtypes else next(iter(op.dtypes), None)
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False) if dtype else (), NUM_SAMPLES):
        expected, expected_first = outcome(function, sample, dense)
        found, first = outcome(function, sample, virtual)
        if not (equal(found, expected) and equal(first, expected_first)):
            return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("letter", sorted({case[0].lower() for case in CASES}))
@pytest.mark.parametrize("way", ["readable holes", "aliases of zeros"])
def test_operators_do_what_they_do_on_a_dense_copy(way: str, letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in CASES if case[0].lower() == letter]
    if way == "aliases of zeros":  # as on a GPU: a kernel that reads what nobody knew of ends the process
        monkeypatch.setattr(HostDriver, "has_readable_holes", False)
        cases = [case for case in cases if case not in READS_UNSEEN]
    assert [case for case in cases if not is_as_on_a_dense_copy(*CASES[case])] == []


def test_enough_operators_are_tried() -> None:
    assert len({op.name for op, _ in CASES.values()}) >= 150
