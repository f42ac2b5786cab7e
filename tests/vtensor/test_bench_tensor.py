"""`vtensor bench tensor`: its arithmetic, and that nothing is timed that is not right."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from vtensor.bench import tensor as tensor_bench
from vtensor.bench import tensor_growth, tensor_operations, tensor_touches
from vtensor.bench.frame import Benchmark, CheckFailed, measure
from vtensor.tensor import VirtualTensor
from vtensor.units import KIB, MIB


def small(*names: str) -> Benchmark:
    """The smallest benchmark, of some of its variants."""
    given = tensor_bench.benchmark("cpu", small=True, rounds=1)
    return replace(
        given, variants=[replace(variant, ceiling=None) for variant in given.variants if variant.name in names]
    )


def test_differences() -> None:
    assert tensor_operations.differences({"plain()": 2.0, "torch": 3.0, "virtual": 10.0}) == {
        "virtual over torch": 7.0,
        "plain() over torch": -1.0,
    }


@pytest.mark.parametrize(
    ("first_us", "again_us", "expected"), [(700.0, 100.0, 60.0), (5.0, 5.0, 0.0), (1.0, 2.0, -0.1)]
)
def test_mapping_us(first_us: float, again_us: float, expected: float) -> None:
    assert tensor_touches.mapping_us(first_us, again_us, 10) == pytest.approx(expected)


@pytest.mark.usefixtures("nothing_left_behind")
def test_peaks() -> None:
    peaks = {}
    with ExitStack() as resources:
        for variant in tensor_growth.growth("cpu", num_chunks=3, chunk_bytes=24 * KIB):
            variant.set_up(resources)
            peaks[variant.name.removesuffix(", 24 KiB")] = variant.peak_bytes()
    assert peaks == {
        "append_, fresh": 128 * KIB,  # 72 KiB in page groups of 64
        "append_, recycled": 128 * KIB,
        "torch.cat each": (48 + 72) * KIB,
        "list, one torch.cat": (72 + 72) * KIB,
        "preallocated": 72 * KIB,
    }


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("touched_bytes", [0, -64 * KIB, 64 * KIB + 1])
def test_touched_bytes_are_whole_page_groups(touched_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"touched_bytes={touched_bytes} must be a positive multiple"):
        tensor_bench.benchmark("cpu", touched_bytes=touched_bytes)


def test_touched_bytes_are_recorded() -> None:
    assert tensor_bench.benchmark("cpu", touched_bytes=MIB).parameters["touched_bytes"] == MIB
    assert tensor_bench.benchmark("cpu").parameters["touched_bytes"] == 256 * MIB


# -- nothing is timed that is not right ---------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left_behind")
def test_an_operation_with_another_outcome_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def slice_or_less(x: torch.Tensor) -> torch.Tensor:
        return x[3:6] if isinstance(x, VirtualTensor) else x[3:7]

    monkeypatch.setattr(tensor_operations, "_operations", lambda: {"x[3:7]": slice_or_less})
    with pytest.raises(CheckFailed, match=r"'x.*' failed its check.*on the virtual tensor the outcome is not"):
        measure(small("x[3:7]"))


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_row_that_is_lost_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    append = VirtualTensor.append_
    monkeypatch.setattr(VirtualTensor, "append_", lambda self, rows: append(self, rows * 2))
    with pytest.raises(CheckFailed, match=r"'append_, fresh, 512 KiB' failed its check.*do not read as they came"):
        measure(small("append_, fresh, 512 KiB"))


@pytest.mark.usefixtures("nothing_left_behind")
def test_touches_that_map_more_than_they_touch_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(self: tensor_touches._Touches, x: VirtualTensor) -> None:
        x.commit()  # in handles of many page groups
        x[:, 0] = 1

    monkeypatch.setattr(tensor_touches._Touches, "touch", touch)
    with pytest.raises(CheckFailed, match=r"'first touches' failed its check.*handles were created for 64 page groups"):
        measure(small("first touches"))


@pytest.mark.usefixtures("nothing_left_behind")
def test_memory_for_what_is_only_read_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_touches._ZeroReads, "read", lambda self, x: x.fill_(1).sum())
    with pytest.raises(CheckFailed, match=r"'sum of vt.empty' failed its check.*takes 4,194,304 bytes"):
        measure(small("sum of vt.empty"))
