"""What becomes of a benchmark's results: a table for the terminal, lines of JSON for the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vtensor.bench.frame import SEED, Benchmark, Measurement, measure
from vtensor.bench.record import new_record, write_records

__all__ = ["records", "render", "run_and_report"]


def run_and_report(benchmark: Benchmark, output: Path | None = None) -> list[Measurement]:
    """Run a benchmark: progress on stderr, the table on stdout, the records at the end of `output` if one is given.

    Raises
    ------
    CheckFailed
        A variant does not do what it should; nothing was timed or written.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(benchmark.title)
        measurements = measure(
            benchmark,
            on_progress=lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
        )
    record = new_record(benchmark.name, benchmark.device, parameters(benchmark))
    console = Console()
    machine = record["hardware"]["gpu"] or record["hardware"]["cpu"]
    console.print(render(benchmark, measurements, machine))
    if output is not None:
        write_records(output, records(benchmark, measurements, record))
        console.print(f"{len(measurements)} lines appended to {output}", highlight=False)
    return measurements


def parameters(benchmark: Benchmark) -> dict[str, Any]:
    """All that is needed to repeat a run."""
    return {"rounds": benchmark.rounds, "seed": SEED, **benchmark.parameters}


def records(
    benchmark: Benchmark, measurements: Sequence[Measurement], record: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One line of JSON a variant, each with what is true of the whole run (`record`).

    Keys ``variant``, ``variant_parameters``, ``ceiling``, ``details``, and ``metrics``: by metric a summary with
    ``unit`` and, where there are such figures, ``predicted``, ``of_predicted``, ``target``, ``target_met`` and
    ``of_ceiling``.
    """
    return [
        {
            **record,
            "variant": measurement.variant.name,
            "variant_parameters": dict(measurement.variant.parameters),
            "ceiling": measurement.variant.ceiling,
            "metrics": {metric: _metric_record(benchmark, measurement, metric) for metric in measurement.summaries},
            "details": measurement.variant.details,
        }
        for measurement in measurements
    ]


def _metric_record(benchmark: Benchmark, measurement: Measurement, metric: str) -> dict[str, Any]:
    summary = measurement.summaries[metric]
    result: dict[str, Any] = {"unit": benchmark.metrics[metric].unit, **asdict(summary)}
    if (predicted := measurement.predicted.get(metric)) is not None:
        result |= {"predicted": predicted, "of_predicted": round(summary.median / predicted, 4) if predicted else None}
    if (target := measurement.targets.get(metric)) is not None:
        result |= {"target": target, "target_met": _meets_target(benchmark, measurement, metric)}
    if metric in measurement.of_ceiling:
        result["of_ceiling"] = measurement.of_ceiling[metric]
    return result


def _meets_target(benchmark: Benchmark, measurement: Measurement, metric: str) -> bool:
    median, target = measurement.summaries[metric].median, measurement.targets[metric]
    return median >= target if benchmark.metrics[metric].higher_is_better else median <= target


def render(benchmark: Benchmark, measurements: Sequence[Measurement], machine: str) -> Table:
    """A row for each variant and metric. Columns for which no variant has a figure are left out."""
    has = {
        "predicted": any(measurement.predicted for measurement in measurements),
        "target": any(measurement.targets for measurement in measurements),
        "of ceiling": any(measurement.of_ceiling for measurement in measurements),
    }
    table = Table(
        title=f"{benchmark.title}\n{benchmark.device}: {machine}, {benchmark.rounds} rounds",
        caption=benchmark.notes or None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("variant")
    table.add_column("metric", no_wrap=True)
    for name in ("median", "p10-p90", "p99", *(name for name, is_there in has.items() if is_there)):
        table.add_column(name, justify="right", no_wrap=True)
    for measurement in measurements:
        for number, (metric, summary) in enumerate(measurement.summaries.items()):
            figures = {
                "predicted": _number(measurement.predicted.get(metric)),
                "target": _target(benchmark, measurement, metric),
                "of ceiling": f"{share:.0%}" if (share := measurement.of_ceiling.get(metric)) else "",
            }
            table.add_row(
                measurement.variant.name if number == 0 else "",
                f"{metric}, {benchmark.metrics[metric].unit}",
                _number(summary.median),
                f"[dim]{_number(summary.p10)}-{_number(summary.p90)}[/dim]",
                f"[dim]{_number(summary.p99)}[/dim]",
                *(figures[name] for name, is_there in has.items() if is_there),
                end_section=number == len(measurement.summaries) - 1,
            )
    return table


def _target(benchmark: Benchmark, measurement: Measurement, metric: str) -> str:
    if metric not in measurement.targets:
        return ""
    sign = "≥" if benchmark.metrics[metric].higher_is_better else "≤"
    colour = "green" if _meets_target(benchmark, measurement, metric) else "red"
    return f"[{colour}]{sign} {_number(measurement.targets[metric])}[/{colour}]"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
