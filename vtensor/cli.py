"""The command ``vtensor``: doctor, demo, bench. What a command needs is imported when it runs."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

__all__ = ["app", "main"]

# Plain tracebacks: a bug should look like one. Everything expected is caught in `_sentence_on_error`.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True)
app.add_typer(bench_app, name="bench")

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
DEVICE_HELP = "cpu, cuda or cuda:<index>."
Device = Annotated[str | None, typer.Option("--device", help=f"{DEVICE_HELP} Default: the first GPU, else cpu.")]
Small = Annotated[bool, typer.Option("--small", help="Little of everything, for a first look (a few seconds).")]
Rounds = Annotated[int | None, typer.Option(help="Rounds. Default: the benchmark's own number.")]
Output = Annotated[Path | None, typer.Option(help="Append the results to this file, as JSON lines.")]

# Each is a module of vtensor.bench with a function `benchmark`.
BENCHMARKS = {
    "step": "KVCacheManager.step: with nothing to map, and with every slot growing, looked ahead and not.",
    "map": "Page groups put below addresses: one by one, in bulk, beside Python code that holds the GIL.",
    "overlap": "Iterations of a decode loop whose memory grows, with look-ahead and without (the paper's figure 12).",
    "reclaim": "Admission of a request: onto a cold cache, a deferred slot, an eager one (the paper's figure 13).",
    "sleep": "Memory of torch's allocator that is put to sleep and woken, beside the link's bandwidth.",
    "alloc": "torch's allocations on our pages beside its own allocators: one by one, and in training.",
    "tensor": "Virtual tensors beside torch's own: operations, creation, first touches, growth, reads of zeros.",
    "kernels": "Attention kernels over the contiguous cache beside other libraries': decode, prefill, appending.",
    "hf": "Decode and prefill of transformers models over its caches and over ours: eager, compiled, in CUDA graphs.",
}


def main() -> None:
    """Run the command line."""
    app(prog_name="vtensor")


def _sentence_on_error(command: Callable[..., None]) -> Callable[..., None]:
    """End an expected error as one sentence on stderr and exit code 2; with --debug, as itself."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except Exception as error:
            if options.get("debug") or not _is_expected(error):
                raise
            text = " ".join(str(error).split()) or type(error).__name__
            print(f"vtensor: {text}", file=sys.stderr)
            raise typer.Exit(2) from None

    return run


def _is_expected(error: Exception) -> bool:
    """Whether an error is about what was asked or what the machine has, and not a bug."""
    import torch

    from vtensor.errors import VTensorError

    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch's, for the CPU
        return True
    return isinstance(error, VTensorError | ValueError | ImportError | OSError | MemoryError | torch.OutOfMemoryError)


def _print_version(wanted: bool) -> None:
    if wanted:
        from vtensor.bench.record import package_version

        version = package_version("vtensor")
        typer.echo(f"vtensor {version}" if version else "vtensor, not installed (run from its sources)")
        raise typer.Exit


@app.callback()
def _vtensor(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Virtual tensors for PyTorch: reserve address space now, map memory when it is needed."""


@app.command()
@_sentence_on_error
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False, debug: Debug = False
) -> None:
    """Tell what this machine can do. Exit code 0 if at least the host backend works, else 1."""
    from dataclasses import asdict

    from rich.console import Console

    from vtensor.doctor import collect, host_works, render

    checks = collect()
    works = host_works(checks)
    if as_json:
        typer.echo(json.dumps({"host_works": works, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        Console().print(render(checks))
    raise typer.Exit(0 if works else 1)


@app.command()
@_sentence_on_error
def demo(
    model: Annotated[
        str | None, typer.Option(help="A folder or a model id of the Hugging Face hub. Default: SmolLM2-135M-Instruct.")
    ] = None,
    device: Device = None,
    layout: Annotated[Literal["sliced", "per_layer"], typer.Option(help="How the cache lies in memory.")] = "sliced",
    prompt: Annotated[list[str] | None, typer.Option(help="Ask this; may be given several times.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to answer with, at most.")] = 48,
    max_cache_len: Annotated[
        int | None, typer.Option(help="Tokens that a request may hold. Default: what the model was made for.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Let a real model answer over a virtual KV cache, and prove three things about it.

    Exit code 0 if all proofs hold, 1 if one fails, 2 if it could not be tried.
    """
    from vtensor.demo import run

    holds = run(
        model=model,
        device=device,
        layout=layout,
        prompts=prompt or None,
        max_new_tokens=max_new_tokens,
        max_cache_len=max_cache_len,
    )
    raise typer.Exit(0 if holds else 1)


@bench_app.callback()
def _bench() -> None:
    """Measure something on this machine.

    What is to be timed is checked first: where it does not do what it should, the exit code is 2 and nothing was timed.
    """


@bench_app.command()
@_sentence_on_error
def api(
    device: Device = None,
    small: Small = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds of each handle size. Default: 200, or 10.")] = None,
    output: Output = None,
    debug: Debug = False,
) -> None:
    """Latency of the virtual-memory calls, by handle size."""
    from rich.console import Console
    from rich.progress import Progress

    from vtensor.bench.api import measure, render
    from vtensor.bench.record import new_record, write_records
    from vtensor.devices import fastest_device

    rounds = (10 if small else 200) if rounds is None else rounds
    name = "cuda:0" if device == "cuda" else device or fastest_device()
    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"virtual-memory calls of {name}")
        results = measure(name, rounds, lambda done, total: progress.update(task, completed=done, total=total))
    record = new_record("api", name, {"rounds": rounds})
    hardware = record["hardware"]
    console.print(render(results, f"{name}: {hardware['gpu'] or hardware['cpu']}, {rounds} rounds"))
    if output is not None:
        write_records(output, ({**record, **result.as_record()} for result in results))
        console.print(f"{len(results)} lines appended to {output}", highlight=False)


def _add_benchmark(name: str, summary: str) -> None:
    @bench_app.command(name, help=summary)
    @_sentence_on_error
    def run(
        device: Device = None,
        small: Small = False,
        rounds: Rounds = None,
        output: Output = None,
        debug: Debug = False,
    ) -> None:
        from importlib import import_module

        from vtensor.bench.report import run_and_report
        from vtensor.devices import fastest_device

        module = import_module(f"vtensor.bench.{name}")
        benchmark = module.benchmark(device or fastest_device(), small=small, rounds=rounds)
        run_and_report(benchmark, output)


@bench_app.command(help=BENCHMARKS["kernels"])
@_sentence_on_error
def kernels(
    device: Device = None,
    small: Small = False,
    rounds: Rounds = None,
    only: Annotated[
        Literal["decode", "ragged", "prefill", "append", "overhead"] | None, typer.Option(help="One part of it.")
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Prompts of 32k and 128k tokens as well.")] = False,
    output: Output = None,
    debug: Debug = False,
) -> None:
    """Measure the kernels."""
    from vtensor.bench.kernels import benchmark, run
    from vtensor.devices import fastest_device

    run(benchmark(device or fastest_device(), small=small, rounds=rounds, only=only, long=long), output)


@bench_app.command(help=BENCHMARKS["hf"])
@_sentence_on_error
def hf(
    device: Device = None,
    small: Small = False,
    rounds: Rounds = None,
    model: Annotated[
        Literal["8b", "0.6b", "all"], typer.Option(help="Of this shape: Llama-3-8B's, Qwen3-0.6B's, both.")
    ] = "8b",
    only: Annotated[
        list[str] | None, typer.Option(help="A case: 1x512, 8x8k, 1x64k; may be given several times. Default: all.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Contenders that are compiled, which takes minutes.")
    ] = True,
    long: Annotated[bool, typer.Option("--long", help="StaticCache compiled for 16,384 tokens as well.")] = False,
    output: Output = None,
    debug: Debug = False,
) -> None:
    """Measure transformers models."""
    from vtensor.bench.hf import benchmarks, run
    from vtensor.devices import fastest_device

    device = device or fastest_device()
    run(
        benchmarks(device, small=small, rounds=rounds, model=model, only=only or (), compile=compile, long=long),
        output,
    )


_OWN_OPTIONS = {"kernels", "hf"}

for _name, _summary in BENCHMARKS.items():
    if _name not in _OWN_OPTIONS:
        _add_benchmark(_name, _summary)


if __name__ == "__main__":
    main()
