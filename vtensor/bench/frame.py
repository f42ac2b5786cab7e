"""The frame of a benchmark: variants that must be right before they are timed, and take turns while they are.

A benchmark declares its variants: ours, rivals, baselines and ceilings alike. The frame

1. sets all of them up,
2. checks all of them; one that fails ends the run before anything is timed,
3. warms each up with a round that does not count,
4. measures: every round has one turn of each variant, in an order that is shuffled anew (from a fixed seed), so that
   whatever drifts (clock, heat, neighbours) drifts for all of them; Python's garbage collector is off meanwhile,
5. sums up: medians with their spread, and what share of its ceiling, measured in the same rounds, a variant reaches.

`vtensor.bench.report` shows and records the results.
"""

from __future__ import annotations

import gc
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from vtensor.bench.stats import Summary, summarize
from vtensor.errors import VTensorError

__all__ = ["SEED", "Benchmark", "CheckFailed", "Measurement", "Metric", "Variant", "measure", "timed_us"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

SEED = 20_25


class CheckFailed(VTensorError):
    """A variant does not do what it should, so that its time means nothing. Nothing was timed."""


@dataclass(frozen=True)
class Metric:
    """What a figure is: its unit, and which way is better."""

    unit: str
    higher_is_better: bool = False


@dataclass(kw_only=True)
class Variant(ABC):
    """One contender of a benchmark. Its methods are called in the order in which they stand here.

    Parameters
    ----------
    name : str
    parameters : mapping
        What tells it from the other variants, for the record.
    ceiling : str, optional
        Name of the variant that shows the most, or the least, that the machine can do.
    predicted : mapping of str to float
        By metric, the median that was expected before it was measured.
    targets : mapping of str to float
        By metric, the median that it is to reach.

    Attributes
    ----------
    details : dict
        What else belongs in the record; `measure` fills it, and it is emptied after the warm-up.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ceiling: str | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    targets: Mapping[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict, init=False)

    @abstractmethod
    def set_up(self, resources: ExitStack) -> None:
        """Take what all rounds need. What must be given back goes on `resources`, which unwinds after the last round.

        All variants are set up at the same time: what is too large for that is taken in each round.
        """

    @abstractmethod
    def check(self) -> None:
        """Prove that the work is done, and done right; any exception is a failure."""

    def warm_up(self) -> None:
        """Pay what is paid once. By itself: a round that does not count."""
        self.measure()

    @abstractmethod
    def measure(self) -> Mapping[str, Sequence[float]]:
        """Do the work of one round; the samples of each metric. What must not count is done outside of the clock."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Variants that are measured together.

    Parameters
    ----------
    name : str
        As in ``vtensor bench NAME``.
    title : str
        One line: what is measured.
    device : str
        ``"cpu"`` or ``"cuda:<index>"``.
    metrics : mapping of str to Metric
        All that the variants may report.
    variants : sequence of Variant
    rounds : int
        Turns of each variant.
    parameters : mapping
        All else that is needed to repeat the run.
    notes : str
        What a reader of the table must know.
    is_predicted : bool
        Whether the variants' predictions and targets are for this machine. If not, they are left out of the results.

    Raises
    ------
    ValueError
        No round, two variants of one name, a ceiling that is no variant, or a figure for a metric that is not there.
    """

    name: str
    title: str
    device: str
    metrics: Mapping[str, Metric]
    variants: Sequence[Variant]
    rounds: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    notes: str = ""
    is_predicted: bool = True

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds!r} must be at least 1")
        names = [variant.name for variant in self.variants]
        for variant in self.variants:
            if names.count(variant.name) > 1:
                raise ValueError(f"two variants are named {variant.name!r}")
            if variant.ceiling is not None and variant.ceiling not in names:
                raise ValueError(f"{variant.name!r} has the ceiling {variant.ceiling!r}, which is no variant")
            if unknown := {*variant.predicted, *variant.targets} - {*self.metrics}:
                raise ValueError(f"{variant.name!r} has figures for {sorted(unknown)}, which are no metrics")


@dataclass(frozen=True)
class Measurement:
    """What came out for one variant.

    Attributes
    ----------
    variant : Variant
    summaries : dict of str to Summary
        By metric, all samples of all rounds in a few numbers.
    of_ceiling : dict of str to float
        By metric, the share of its ceiling that the median reaches: 1 is all there is.
    predicted, targets : mapping of str to float
        The variant's, where they are for this machine.
    """

    variant: Variant
    summaries: dict[str, Summary]
    of_ceiling: dict[str, float]
    predicted: Mapping[str, float]
    targets: Mapping[str, float]


def measure(
    benchmark: Benchmark,
    *,
    seed: int = SEED,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Measurement]:
    """Set up, check, warm up and measure all variants. What they took is given back at the end, also after an error.

    Parameters
    ----------
    benchmark : Benchmark
    seed : int
        Of the order of turns.
    on_progress : callable
        Told (what comes next, steps done, steps in all), outside of what is timed.

    Raises
    ------
    CheckFailed
        The message names the variant and what is wrong with it.
    """
    variants = list(benchmark.variants)
    total, done = len(variants) * (3 + benchmark.rounds), 0

    def turns(what: str, order: Sequence[Variant]) -> Iterator[Variant]:
        nonlocal done
        for variant in order:
            on_progress(f"{what} {variant.name}", done, total)
            yield variant
            done += 1

    samples: dict[str, dict[str, list[float]]] = {variant.name: {} for variant in variants}
    shuffle = random.Random(seed).shuffle
    with ExitStack() as resources:
        for variant in turns("setting up", variants):
            variant.set_up(resources)
        for variant in turns("checking", variants):
            _check(variant)
        for variant in turns("warming up", variants):
            variant.warm_up()
            variant.details.clear()
        with _no_garbage_collection():
            for number in range(benchmark.rounds):
                order = variants.copy()
                shuffle(order)
                for variant in turns(f"round {number + 1} of {benchmark.rounds}:", order):
                    for metric, values in variant.measure().items():
                        samples[variant.name].setdefault(metric, []).extend(values)
    on_progress("done", total, total)
    return _sum_up(benchmark, samples)


def timed_us(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
) -> tuple[Result, float]:
    """Call a function; its result, and how long it took in us."""
    start = time.perf_counter_ns()
    result = function(*arguments, **options)
    return result, (time.perf_counter_ns() - start) / 1000


def _check(variant: Variant) -> None:
    try:
        variant.check()
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise CheckFailed(f"{variant.name!r} failed its check, so nothing was timed: {reason}") from error


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect now, and not in the middle of a round: with torch loaded, a collection takes 0.1 s."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _sum_up(benchmark: Benchmark, samples: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Measurement]:
    summaries = {
        name: {metric: summarize(values) for metric, values in by_metric.items()} for name, by_metric in samples.items()
    }
    measurements = []
    for variant in benchmark.variants:
        ours, ceiling, shares = summaries[variant.name], summaries.get(variant.ceiling or "", {}), {}
        for metric in ours.keys() & ceiling.keys():
            better, worse = ours[metric].median, ceiling[metric].median
            if not benchmark.metrics[metric].higher_is_better:
                better, worse = worse, better
            if worse:
                shares[metric] = round(better / worse, 4)
        predicted, targets = (variant.predicted, variant.targets) if benchmark.is_predicted else ({}, {})
        measurements.append(Measurement(variant, ours, shares, predicted, targets))
    return measurements
