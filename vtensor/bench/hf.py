"""Decode and prefill of transformers models over its caches and over ours: `vtensor bench hf`.

Models of known shapes with random weights, in bfloat16. Every contender's logits are compared with DynamicCache's
before anything is timed, of the prompts and of the steps behind them. What is not right, or does not run (it needs more
memory than there is, or cannot be compiled), is not timed, and the reason is reported; if it is ours, the run ends as
failed. Each case is a table of its own, and is recorded when it is done.

- **token**: time of a forward of one token for each sequence and of the choice of the most likely one, of several such
  steps in a row, behind `context` tokens or a few more.
- **prefill**: of all prompts, into an empty cache, that being made included.
- **cache**: what the cache takes after four steps; for ours the target is the bytes of the tokens, and a page group of
  each slice and request.
- **peak, decode**, **peak, prefill**: the most beyond the weights that torch had allocated, with what our pool has
  mapped, which is none of torch's.
- **device**: by how much the device's free memory went down until then, the same for all.

*VirtualCache, sdpa* and *vtensor* name the model's attention. *DecodeStep* is one CUDA graph that is captured once;
on a CPU, where it is none, nothing is compiled either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from vtensor.bench.frame import Benchmark, CheckFailed, Measurement
from vtensor.bench.hf_summary import summary
from vtensor.bench.kernels_variant import KernelVariant
from vtensor.bench.report import run_and_report
from vtensor.devices import device_name, resolve_device
from vtensor.units import KIB, format_bytes

if TYPE_CHECKING:
    from vtensor.bench.hf_model import Model

__all__ = ["MODELS", "ModelName", "benchmarks", "case_names", "run"]

ModelName = Literal["8b", "0.6b"]
MODELS: tuple[ModelName, ...] = get_args(ModelName)

_Figures = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class _Sizes:
    """A case.

    Attributes
    ----------
    static_lens, compiled_lens, long_lens : tuple of int
        `max_cache_len` of transformers' StaticCache: eager, compiled, and compiled where that is asked for.
    """

    name: str
    batch: int
    context: int
    static_lens: tuple[int, ...]
    compiled_lens: tuple[int, ...]
    long_lens: tuple[int, ...] = ()


_MAX_LEN = 128 * KIB
_FULL = (
    _Sizes("1x512", 1, 512, (_MAX_LEN,), (KIB, _MAX_LEN), (16 * KIB,)),
    _Sizes("8x8k", 8, 8 * KIB, (16 * KIB, _MAX_LEN), (_MAX_LEN,), (16 * KIB,)),
    _Sizes("1x64k", 1, 64 * KIB, (_MAX_LEN,), (_MAX_LEN,)),
)
_SMALL_LEN = 256
_SMALL = (
    _Sizes("1x24", 1, 24, (64, _SMALL_LEN), (_SMALL_LEN,)),
    _Sizes("3x40", 3, 40, (_SMALL_LEN,), (_SMALL_LEN,)),
)

# Of the 8B shape on an H200, ms a token. Theirs: seen by scripts, at 64k guessed. Ours: all weights in 4.5 ms, K and V
# at 4.1 TB/s, and 1 ms for all else where that is compiled, 2.5 ms where it is not.
_DYNAMIC, _STATIC, _STEP = "DynamicCache", f"StaticCache {_MAX_LEN:,}", "DecodeStep"
_PREDICTED: Mapping[str, Mapping[str, float]] = {
    "1x512": {
        _DYNAMIC: 54.8,
        _STATIC: 107.0,
        f"StaticCache {KIB:,}, compiled": 6.56,
        f"StaticCache {16 * KIB:,}, compiled": 11.6,
        f"{_STATIC}, compiled": 54.0,
        _STEP: 7.0,
        f"{_STEP}, compiled": 5.6,
    },
    "8x8k": {
        _DYNAMIC: 55.9,
        f"StaticCache {16 * KIB:,}": 95.9,
        f"StaticCache {16 * KIB:,}, compiled": 44.1,
        _STEP: 9.4,
        f"{_STEP}, compiled": 7.9,
    },
    "1x64k": {_DYNAMIC: 57.0, _STATIC: 107.0, f"{_STATIC}, compiled": 54.0, _STEP: 9.2, f"{_STEP}, compiled": 7.8},
}
_TARGETS = {"1x512": 6.0, "8x8k": 8.4, "1x64k": 8.5}


def case_names(*, small: bool = False) -> tuple[str, ...]:
    """Names of the cases: requests, and tokens of each."""
    return tuple(sizes.name for sizes in (_SMALL if small else _FULL))


def benchmarks(
    device: str,
    *,
    small: bool = False,
    rounds: int | None = None,
    model: ModelName | Literal["all"] = "8b",
    only: Sequence[str] = (),
    compile: bool = True,
    long: bool = False,
) -> list[Benchmark]:
    """A benchmark for each model and case.

    Parameters
    ----------
    device : str
    small : bool
        Tiny models, in a few seconds; on a CPU they are never larger.
    rounds : int, optional
    model : {"8b", "0.6b", "all"}
        Whose shape: Llama-3-8B's, Qwen3-0.6B's, or both.
    only : sequence of str
        Names of cases. Default: all.
    compile : bool
        Whether to have contenders that are compiled, which takes minutes.
    long : bool
        StaticCache compiled for a `max_cache_len` of 16,384 as well.

    Raises
    ------
    ValueError
        There is no such device, model or case, or no round.
    ImportError
        transformers is not installed.
    """
    device = device_name(resolve_device(device))
    if model not in (*MODELS, "all"):
        raise ValueError(f"model={model!r} must be one of {', '.join(MODELS)}, all")
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds={rounds!r} must be at least 1")
    is_full = device != "cpu" and not small
    names = case_names(small=not is_full)
    if unknown := [name for name in only if name not in names]:
        raise ValueError(f"only={unknown[0]!r} must be one of {', '.join(names)}")
    _check_transformers()
    from vtensor.bench.hf_model import SHAPES, SMALL_SHAPES, Model

    shapes, max_len = (SHAPES, _MAX_LEN) if is_full else (SMALL_SHAPES, _SMALL_LEN)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    found = []
    for name in MODELS if model == "all" else (model,):
        made = Model(name if is_full else f"{name}, tiny", shapes[name], device, dtype, max_len)
        for sizes in _FULL if is_full else _SMALL:
            if not only or sizes.name in only:
                figures = _figures(sizes.name) if is_full and name == "8b" else {}
                lens = sizes.compiled_lens + (sizes.long_lens if long else ())
                options = {"small": small, "compile": compile, "long": long}
                found.append(_part(made, sizes, lens, figures, rounds, options, is_full=is_full))
    return found


def run(parts: Sequence[Benchmark], output: Path | None = None) -> list[Measurement]:
    """Run them one after the other, and print a line a case below the last table.

    Raises
    ------
    CheckFailed
        Something of ours does not do what it should. The rest was measured, and is recorded.
    """
    measurements = [each for part in parts for each in run_and_report(part, output)]
    for line in summary(measurements):
        print(line)
    variants = [variant for part in parts for variant in part.variants]
    failed = [each for each in variants if isinstance(each, KernelVariant) and each.is_ours and each.failed]
    if failed:
        names = ", ".join(repr(each.name) for each in failed)
        raise CheckFailed(f"{len(failed)} of our contenders failed and were not timed: {names}")
    return measurements


def _part(
    model: Model,
    sizes: _Sizes,
    compiled_lens: tuple[int, ...],
    figures: _Figures,
    rounds: int | None,
    options: Mapping[str, Any],
    *,
    is_full: bool,
) -> Benchmark:
    from vtensor.bench.hf_case import Case
    from vtensor.bench.hf_contender import METRICS, Turn
    from vtensor.bench.hf_contenders import contenders

    is_compiled = options["compile"] and model.device != "cpu"
    case = Case(model=model, name=sizes.name, batch=sizes.batch, context=sizes.context, is_compiled=is_compiled)
    turn = Turn(samples=3, tokens=8) if is_full else Turn(samples=2, tokens=2)
    variants = contenders(
        case,
        turn,
        max_cache_len=model.max_tokens,
        static_lens=sizes.static_lens,
        compiled_lens=compiled_lens,
        figures=figures,
    )
    dtype = str(model.dtype).removeprefix("torch.")
    return Benchmark(
        name="hf",
        title=f"Decode and prefill of a transformers model: {model.name}, {sizes.name}",
        device=model.device,
        metrics=METRICS,
        variants=variants,
        rounds=(5 if is_full else 2) if rounds is None else rounds,
        parameters={
            **options,
            "model": model.name,
            "family": model.shape.family,
            "shape": dict(model.shape.options),
            "dtype": dtype,
            "case": asdict(sizes),
            "max_cache_len": model.max_tokens,
            "turn": asdict(turn),
        },
        notes=f"{model.shape.family}, random weights, {dtype}; max_cache_len {model.max_tokens:,}, the tokens take "
        f"{format_bytes(case.token_bytes)}",
        is_predicted=is_full,
    )


def _figures(case: str) -> _Figures:
    """By contender, its `predicted` and `targets`, in ms a token."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, ms in _PREDICTED[case].items():
        figures[name] = {"predicted": {"token": ms}}
        if name.startswith(_STEP):
            figures[name]["targets"] = {"token": _TARGETS[case]}
    return figures


def _check_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(f"vtensor bench hf needs transformers 5: pip install 'vtensor[hf]' ({error})") from error
