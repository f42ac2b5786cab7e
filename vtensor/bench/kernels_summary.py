"""Summary of `vtensor bench kernels`: a line a case, all contenders beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vtensor.bench.frame import Measurement

__all__ = ["summary"]

_TIMES = ("layer", "append", "call")
_RATES = ("bandwidth", "rate")


def summary(measurements: Sequence[Measurement]) -> Iterator[str]:
    """Lines such as ``decode 1 x 16k, Hkv 8, per_layer: ours 23.1 us (2.91); cudnn 23.0 us (2.92) 1.00``.

    In brackets TB/s or TFLOP/s. The last number is the time of the first contender, which is ours, over that of this
    one: below 1 ours is faster. At the end, what failed and why.
    """
    cases: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        cases.setdefault(str(measurement.variant.parameters["case"]), []).append(measurement)
    for case, those in cases.items():
        first = _median(those[0], _TIMES)
        found = []
        for measurement in those:
            time, rate = _median(measurement, _TIMES), _median(measurement, _RATES)
            if time is None:
                continue
            text = f"{measurement.variant.parameters['contender']} {_number(time)} us"
            text += f" ({_number(rate)})" if rate is not None else ""
            if first is not None and measurement is not those[0] and case != "overhead":
                text += f" {first / time:.2f}"
            found.append(text)
        yield f"{case}: {'; '.join(found) or 'nothing was timed'}"
    for measurement in measurements:
        for what in ("failed", "no_graph"):
            if reason := measurement.variant.details.get(what):
                yield f"{what.replace('_', ' ')}: {measurement.variant.name}: {reason}"


def _median(measurement: Measurement, names: Sequence[str]) -> float | None:
    return next((measurement.summaries[name].median for name in names if name in measurement.summaries), None)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
