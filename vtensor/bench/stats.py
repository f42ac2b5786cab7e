"""The numbers that stand for a sample of timings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Summary", "summarize"]


@dataclass(frozen=True)
class Summary:
    """A sample in a few numbers, all in the sample's unit.

    Attributes
    ----------
    count : int
    median, p10, p90, p99 : float
        Percentiles, interpolated linearly.
    spread : float
        (p90 - p10) / median: how far apart ordinary runs lie. 0 where the median is 0.
    """

    count: int
    median: float
    p10: float
    p90: float
    p99: float
    spread: float


def summarize(sample: Sequence[float]) -> Summary:
    """Summarize a sample.

    Raises
    ------
    ValueError
        The sample is empty.

    >>> summarize([1.0, 2.0, 3.0, 4.0, 5.0])
    Summary(count=5, median=3.0, p10=1.4, p90=4.6, p99=4.96, spread=1.0667)
    """
    if not len(sample):
        raise ValueError("a summary needs at least one value")
    p10, median, p90, p99 = (round(float(value), 4) for value in np.percentile(sample, [10, 50, 90, 99]))
    return Summary(len(sample), median, p10, p90, p99, spread=round((p90 - p10) / median, 4) if median else 0.0)
