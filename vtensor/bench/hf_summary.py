"""Summary of `vtensor bench hf`: a line a case, all contenders beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vtensor.bench.frame import Measurement

__all__ = ["summary"]


def summary(measurements: Sequence[Measurement]) -> Iterator[str]:
    """Lines such as ``8b, 1x512, ms a token (MiB): DynamicCache 50.0 (64.0, 99.0); DecodeStep 5.0 (66.0, 70.0) 10x``.

    In brackets the cache, and the peak of decode. The last number is the time of DynamicCache, which is first, over
    that of this one: above 1 it is faster. At the end, what failed and why.
    """
    cases: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        cases.setdefault(str(measurement.variant.parameters["case"]), []).append(measurement)
    for case, those in cases.items():
        first = _median(those[0], "token")
        found = []
        for measurement in those:
            time = _median(measurement, "token")
            if time is None:
                continue
            memory = [_median(measurement, name) for name in ("cache", "peak, decode")]
            sizes = ", ".join(_number(size) for size in memory if size is not None)
            text = f"{measurement.variant.parameters['contender']} {_number(time)} ({sizes})"
            text += f" {_number(first / time)}x" if first is not None and measurement is not those[0] else ""
            found.append(text)
        yield f"{case}, ms a token (MiB): {'; '.join(found) or 'nothing was timed'}"
    for measurement in measurements:
        if reason := measurement.variant.details.get("failed"):
            yield f"failed: {measurement.variant.name}: {reason}"


def _median(measurement: Measurement, name: str) -> float | None:
    return measurement.summaries[name].median if name in measurement.summaries else None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
