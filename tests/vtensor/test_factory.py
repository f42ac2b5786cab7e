"""Creation of virtual tensors beyond `empty`: the same shapes, strides, dtypes and exceptions as torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.vtensor.caches import close

TEBI = 1 << 40
Make = Callable[[Any, str], torch.Tensor]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """All but the memory is the same; torch's values, where they are defined, are compared by the caller."""
    assert type(ours) is vt.VirtualTensor
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.stride() == theirs.stride()
    assert ours.storage_offset() == 0


MAKERS: dict[str, Make] = {
    "empty": lambda lib, device: lib.empty(2, 3, dtype=torch.float16, device=device),
    "empty, of a list": lambda lib, device: lib.empty([4, 0, 2], device=device),
    "empty, channels last": lambda lib, device: lib.empty(2, 3, 4, 5, device=device, memory_format=torch.channels_last),
    "empty, that learns": lambda lib, device: lib.empty(3, device=device, requires_grad=True),
    "empty, a scalar": lambda lib, device: lib.empty((), device=device, layout=torch.strided, pin_memory=False),
    "zeros": lambda lib, device: lib.zeros(2, 3, dtype=torch.int32, device=device),
    "zeros, that learn": lambda lib, device: lib.zeros((2, 3), device=device, requires_grad=True),
    "full of an int": lambda lib, device: lib.full((2, 3), 7, device=device),
    "full of a float": lambda lib, device: lib.full((2,), 0.5, device=device),
    "full of truth": lambda lib, device: lib.full((2,), True, device=device),
    "full of a complex": lambda lib, device: lib.full((2,), 1j, device=device),
    "full, of a dtype": lambda lib, device: lib.full([2, 3], 3, dtype=torch.float64, device=device),
    "full, that learns": lambda lib, device: lib.full((2,), 3.0, device=device, requires_grad=True),
    "empty_strided": lambda lib, device: lib.empty_strided((2, 3), (1, 7), device=device),
    "empty_strided, expanded": lambda lib, device: lib.empty_strided((4, 3), (0, 1), device=device),
    "empty_strided, of nothing": lambda lib, device: lib.empty_strided((0, 3), (1, 7), device=device),
    "like": lambda lib, device: lib.empty_like(torch.ones(2, 3, dtype=torch.bfloat16, device=device)),
    "like a transposed one": lambda lib, device: lib.empty_like(torch.ones(2, 3, device=device).T),
    "like an expanded one": lambda lib, device: lib.empty_like(torch.ones(3, device=device).expand(2, 3)),
    "like every second column": lambda lib, device: lib.empty_like(torch.ones(4, 6, device=device)[:, ::2]),
    "like one, contiguous": lambda lib, device: lib.empty_like(
        torch.ones(2, 3, device=device).T, memory_format=torch.contiguous_format
    ),
    "like one, of another dtype": lambda lib, device: lib.zeros_like(torch.ones(2, 3, device=device), dtype=torch.bool),
    "like one that learns": lambda lib, device: lib.zeros_like(torch.ones(2, 3, device=device, requires_grad=True)),
    "like one, to learn": lambda lib, device: lib.zeros_like(torch.ones(2, device=device), requires_grad=True),
}


@pytest.mark.parametrize("case", MAKERS)
def test_all_but_the_memory_is_as_torch_makes_it(case: str, device: str) -> None:
    same(MAKERS[case](vt, device), MAKERS[case](torch, device))


@pytest.mark.parametrize("case", [case for case in MAKERS if "zeros" in case or "full" in case])
def test_values_are_torchs(case: str, device: str) -> None:
    assert torch.equal(MAKERS[case](vt, device).cpu(), MAKERS[case](torch, device).cpu())


@pytest.mark.parametrize("case", [case for case in MAKERS if "empty" in case or "like" in case])
def test_what_is_called_empty_reads_as_zeros(case: str, device: str) -> None:
    assert not MAKERS[case](vt, device).cpu().any()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda lib: lib.empty_strided((2, 3), (1,), device="cpu"), RuntimeError),
        (lambda lib: lib.empty(2, 3, device="cpu", memory_format=torch.channels_last), RuntimeError),
        (lambda lib: lib.zeros(2, device="cpu", requires_grad=True, dtype=torch.int32), RuntimeError),
        (lambda lib: lib.full((2,), "x", device="cpu"), TypeError),
        (lambda lib: lib.full((2.5,), 1, device="cpu"), TypeError),
    ],
)
def test_exceptions_are_torchs(make: Callable[[Any], torch.Tensor], error: type[Exception]) -> None:
    for lib in (torch, vt):
        with pytest.raises(error):
            make(lib)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vt.empty(2, device="cpu", layout=torch.sparse_coo), r"layout=torch.sparse_coo must be torch.strided"),
        (lambda: vt.empty(2, device="cpu", pin_memory=True), "pin_memory=True must be False"),
        (lambda: vt.empty_like(torch.ones(2).to_sparse()), "layout=torch.sparse_coo must be torch.strided"),
        (lambda: vt.empty_like([1, 2]), r"input=\[1, 2\] must be a tensor"),
        (lambda: vt.empty_strided((2, 3), (3, 1), device="cpu", pin_memory=True), "pin_memory=True must be False"),
        (lambda: vt.empty_strided((2, 3), (-3, 1), device="cpu"), r"stride=\(-3, 1\): none may be negative"),
        (lambda: vt.full((-1,), 3, device="cpu"), "every dimension must be zero or more"),
        (lambda: vt.zeros_like(torch.ones(2), on_touch="no"), "on_touch='no' must be one of"),
        (lambda: vt.empty_like(torch.ones(2, device="meta")), "virtual tensors live on 'cpu' or 'cuda'"),
    ],
)
def test_what_cannot_be_virtual_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.filterwarnings("ignore")  # torch's own, of quantized tensors
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2])
def test_quantized_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"dtype={dtype} has a scale besides its values"):
        vt.empty(3, dtype=dtype, device="cpu")


def test_a_tebibyte_of_each_costs_nothing(device: str) -> None:
    wide = torch.empty(1, device=device).expand(TEBI)
    for x in (
        vt.zeros(TEBI, dtype=torch.uint8, device=device),
        vt.full((TEBI,), 0, dtype=torch.uint8, device=device),
        vt.full((TEBI,), False, device=device),
        vt.empty_strided((2, 1 << 20), (TEBI // 2, 1), dtype=torch.uint8, device=device),
        vt.zeros_like(vt.empty(TEBI, dtype=torch.int8, device=device)),
        vt.zeros_like(wide, dtype=torch.uint8),
    ):
        assert x.resident_bytes == 0
        x[-1] = 1
        assert 0 < x.resident_bytes <= 2 << 20
        del x


def test_negative_zero_is_a_value(device: str) -> None:
    assert vt.full((2,), -0.0, device=device).signbit().all()


def test_full_has_memory_for_all_of_it_or_fails(device: str) -> None:
    size = vt.PagePool(device).page_group_bytes
    pool = vt.PagePool(device, capacity_bytes=2 * size)
    x = vt.full((2 * size,), 3, dtype=torch.uint8, device=device, pool=pool)
    assert x.resident_bytes == 2 * size
    assert (x.cpu() == 3).all()
    del x
    with pytest.raises(vt.OutOfPagesError):
        vt.full((2 * size + 1,), 3, dtype=torch.uint8, device=device, pool=pool)
    close(pool)


def test_a_like_of_a_virtual_tensor_has_its_own_memory(device: str) -> None:
    x = vt.empty(3, 5, device=device, on_touch="raise")
    x.commit()
    x.fill_(2)
    y = vt.zeros_like(x)
    assert not y.any()  # and on_touch is not taken over
    y += 1
    assert (x == 2).all()
