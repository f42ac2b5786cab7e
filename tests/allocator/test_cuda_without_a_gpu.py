"""Of the CUDA backend, what needs no GPU: results unwrapped, and the capture mode put back."""

from __future__ import annotations

from typing import Any

import pytest
from cuda.bindings import driver as cu

from vtensor.allocator.driver import cuda
from vtensor.errors import DriverError

MODE = cu.CUstreamCaptureMode


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modes that a thread goes through; a driver that only knows this call."""
    passed = [MODE.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL]

    def exchange(mode: Any) -> tuple[Any, Any]:
        assert isinstance(mode, MODE)  # cuda-python takes nothing else
        passed.append(mode)
        return cu.CUresult.CUDA_SUCCESS, passed[-2]

    monkeypatch.setattr(cuda.cu, "cuThreadExchangeStreamCaptureMode", exchange)
    return passed


def test_the_capture_mode_is_put_back(modes: list[Any]) -> None:
    with pytest.raises(ZeroDivisionError), cuda.relaxed_capture_mode():
        1 / modes.count(MODE.CU_STREAM_CAPTURE_MODE_GLOBAL)
    own, relaxed = MODE.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, MODE.CU_STREAM_CAPTURE_MODE_RELAXED
    assert modes == [own, relaxed, own]


def test_results_are_unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    success, failure = cu.CUresult.CUDA_SUCCESS, cu.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(cuda.cu, "cuGetErrorName", lambda result: (success, b"CUDA_ERROR_INVALID_VALUE"))
    monkeypatch.setattr(cuda.cu, "cuGetErrorString", lambda result: (success, b"invalid argument"))
    assert cuda._unwrap("f", (success, 7)) == 7
    assert cuda._unwrap("f", (success, 7, 8)) == [7, 8]
    with pytest.raises(DriverError, match="f failed with CUDA_ERROR_INVALID_VALUE: invalid argument"):
        cuda._unwrap("f", (failure,))
