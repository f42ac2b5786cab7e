"""Attention kernels over the contiguous cache, ours and others': `vtensor bench kernels`.

bfloat16, 32 heads of queries, 8 and 4 of keys, D 128. Every contender reads the same tensors. What comes out is
compared with the reference before anything is timed. What is not right, or does not run, is not timed, and the reason
is reported; if it is ours, the run ends as failed.

- **decode**: one new token of each of B requests of L tokens; *per_layer*, and *sliced* with 8, 16 and 32 layers. A
  variant is a CUDA graph of calls that go over the caches of several layers, of 2 GiB or more together, or over all of
  a slice, so that the L2 cache holds none of them when its turn comes. *layer* is the time of a call; *bandwidth* what
  it reads of K and V, by that. *ours, paged n* are our kernels through a block table whose pages lie anywhere; in
  prefill that is *ours, plain*, the kernel for any GPU.
- **ragged**: 64 requests of log-uniform lengths from 100 to 64k, and of equal ones with as many tokens in all. The
  ceiling of the former is the latter, by the same contender. *no graph*: it reads the lengths on the host, and waits.
- **prefill**: a prompt of one request, and a chunk of 2,048 tokens that ends a request of 131,072. *rate* counts what
  the mask leaves: 4 Hq D operations for each query and key. *dense*: all requests have as many queries, and the host
  knows it.
- **append**: a new row of each of 256 requests, for 32 layers. *of its bytes*: time over what they take at 4.2 TB/s.
- **overhead**: the caller's time of a call outside of graphs.

cuDNN, SDPA's flash and FlashInfer know one length only, and are called with it: their kernels alone. cuDNN is the
ceiling of decode, the fastest known.

Targets for an H200 are figures of that machine: in decode 1.03 times cuDNN's, in prefill 0.9 times the rate of dense
FlashAttention 3. Predicted for ours: decode at 4.4 TB/s and 7 us a call, prefill 640 TFLOP/s (plain 450).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args

import torch

from vtensor.bench import kernels_append, kernels_attention, kernels_overhead
from vtensor.bench.frame import Benchmark, CheckFailed, Measurement, Variant
from vtensor.bench.kernels_attention import Sizes, decode_cases, prefill_cases, ragged_cases, variants_of
from vtensor.bench.kernels_case import Case, Heads, Memory
from vtensor.bench.kernels_contenders import Contender, absent_rivals, why_absent
from vtensor.bench.kernels_summary import summary
from vtensor.bench.kernels_variant import KernelVariant
from vtensor.bench.report import run_and_report
from vtensor.devices import device_name, resolve_device
from vtensor.units import GIB, KIB, format_bytes

__all__ = ["PARTS", "Part", "benchmark", "run"]

Part = Literal["decode", "ragged", "prefill", "append", "overhead"]
PARTS: tuple[Part, ...] = get_args(Part)

_FULL = Sizes(
    heads=(Heads(32, 8, 128), Heads(32, 4, 128)),
    decode=((1, 16 * KIB), (1, 128 * KIB), (16, 16 * KIB), (32, 16 * KIB), (64, 4 * KIB), (256, KIB)),
    ragged=(64, 100, 64 * KIB),
    prefill=((2 * KIB, 2 * KIB), (8 * KIB, 8 * KIB), (16 * KIB, 16 * KIB), (2 * KIB, 128 * KIB)),
    slices=(0, 8, 16, 32),
    prefill_slices=(0, 16),
    decode_pages=(16, 64),
    prefill_pages=(16, 128),
    least_bytes=2 * GIB,
)
_LONG = ((32 * KIB, 32 * KIB), (128 * KIB, 128 * KIB))
_SMALL = Sizes(
    heads=(Heads(4, 2, 64),),
    decode=((2, 128),),
    ragged=(3, 8, 128),
    prefill=((128, 128), (32, 128)),
    slices=(0, 2),
    prefill_slices=(0,),
    decode_pages=(16, 64),
    prefill_pages=(16, 128),
    least_bytes=0,
)
_MOST_OF_MEMORY = 0.6

# Of an H200 with Hkv 8, by requests and tokens: cuDNN's us. By tokens of a prompt: dense FlashAttention 3's TFLOP/s.
_BEST_DECODE_US = {
    (1, 16 * KIB): 23.0,
    (1, 128 * KIB): 125.6,
    (16, 16 * KIB): 235.2,
    (32, 16 * KIB): 470.4,
    (64, 4 * KIB): 243.5,
    (256, KIB): 242.3,
}
_BEST_PREFILL = {8 * KIB: 699.0, 16 * KIB: 646.0, 128 * KIB: 661.0}


def benchmark(
    device: str,
    *,
    small: bool = False,
    rounds: int | None = None,
    only: Part | None = None,
    long: bool = False,
) -> Benchmark:
    """The benchmark for a device.

    Parameters
    ----------
    device : str
    small : bool
        A first look, in a few seconds; on a CPU it is never more.
    rounds : int, optional
    only : {"decode", "ragged", "prefill", "append", "overhead"}, optional
        One part of it.
    long : bool
        Prompts of 32k and 128k tokens as well.

    Raises
    ------
    ValueError
        There is no such device or part.
    """
    device = device_name(resolve_device(device))
    if only is not None and only not in PARTS:
        raise ValueError(f"only={only!r} must be one of {', '.join(PARTS)}")
    parts = PARTS if only is None else (only,)
    is_full = device != "cpu" and not small
    sizes = _FULL if is_full else _SMALL
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    if is_full and long:
        sizes = Sizes(**{**vars(sizes), "prefill": (*sizes.prefill, *_LONG)})
    left_out: list[str] = []
    variants = [*_attention(device, dtype, sizes, parts, left_out)]
    heads = sizes.heads[0]
    if "append" in parts:
        shape = (256, 32, 128) if is_full else (4, 2, 16)
        sized = dict(zip(("batch_size", "num_layers", "slot_tokens"), shape, strict=True))
        variants += kernels_append.append_variants(device, dtype, heads, **sized)
    if "overhead" in parts:
        num_calls = 200 if is_full else 3
        variants += kernels_overhead.overhead_variants(device, dtype, heads, num_calls=num_calls)
    absent = absent_rivals(device)
    notes = [f"{heads.q} heads of {heads.dim}, {str(dtype).removeprefix('torch.')}"]
    if device == "cpu":
        from vtensor.triton_kernels.launch import is_interpreted

        how = "in Triton's interpreter" if is_interpreted() else "plain torch, no kernel of ours"
        notes.append(f"ours: {how}")
    notes += [f"not there: {', '.join(f'{name} ({reason})' for name, reason in absent.items())}"] if absent else []
    notes += [f"too large for this device's memory: {', '.join(left_out)}"] if left_out else []
    return Benchmark(
        name="kernels",
        title="Attention kernels over the contiguous cache",
        device=device,
        metrics={**kernels_attention.METRICS, **kernels_append.METRICS, **kernels_overhead.METRICS},
        variants=variants,
        rounds=(2 if not is_full else 7) if rounds is None else rounds,
        parameters={
            "small": small,
            "only": only,
            "long": long,
            "dtype": str(dtype).removeprefix("torch."),
            "sizes": asdict(sizes),
            "absent": absent,
            "left_out": left_out,
        },
        notes="; ".join(notes),
        is_predicted=is_full,
    )


def run(bench: Benchmark, output: Path | None = None) -> list[Measurement]:
    """Run it, and print a line a case below the table.

    Raises
    ------
    CheckFailed
        Something of ours does not do what it should. The rest was measured, and is recorded.
    """
    measurements = run_and_report(bench, output)
    for line in summary(measurements):
        print(line)
    failed = [each for each in bench.variants if isinstance(each, KernelVariant) and each.is_ours and each.failed]
    if failed:
        names = ", ".join(repr(each.name) for each in failed)
        raise CheckFailed(f"{len(failed)} of our kernels failed and were not timed: {names}")
    return measurements


def _attention(
    device: str, dtype: torch.dtype, sizes: Sizes, parts: Sequence[Part], left_out: list[str]
) -> Iterator[Variant]:
    memory = Memory(device, dtype)
    most_bytes = _most_bytes(device)
    hopeless: dict[str, str] = {}

    def fitting(cases: Iterator[Case]) -> Iterator[Case]:
        for case in cases:
            if case.cache_bytes <= most_bytes:
                yield case
            else:
                left_out.append(f"{case.name} ({format_bytes(case.cache_bytes)})")

    has_cudnn = why_absent("cudnn", device) is None
    if "decode" in parts:
        for case in fitting(decode_cases(memory, sizes)):
            best = f"{case.name}: cudnn"

            def ceiling(contender: Contender, best: str = best) -> str | None:
                return best if has_cudnn and contender.name != "cudnn" else None

            yield from variants_of(
                case, sizes.decode_pages, hopeless, ceiling=ceiling, predicted=_predicted_decode, targets=_decode_target
            )
    if "ragged" in parts:
        equal: set[str] = set()
        for case in fitting(ragged_cases(memory, sizes)):
            prefix = case.name.rpartition(", ")[0]

            def same(contender: Contender, is_equal: bool = case.is_equal, prefix: str = prefix) -> str | None:
                name = f"{prefix}, equal: {contender.name}"
                return name if not is_equal and name in equal else None

            for variant in variants_of(
                case, sizes.decode_pages[:1], hopeless, ceiling=same, predicted=_predicted_decode
            ):
                equal.add(variant.name)
                yield variant
    if "prefill" in parts:
        for case in fitting(prefill_cases(memory, sizes)):
            pages = sizes.prefill_pages if case.heads == sizes.heads[0] else ()
            yield from variants_of(case, pages, hopeless, predicted=_predicted_prefill, targets=_prefill_target)


def _most_bytes(device: str) -> int:
    if device == "cpu":
        return GIB
    return int(_MOST_OF_MEMORY * torch.cuda.get_device_properties(device).total_memory)


def _predicted_decode(case: Case) -> Mapping[str, float]:
    return {"layer": round(case.bytes_read / 4.4e6 + 7, 1)}


def _decode_target(case: Case) -> Mapping[str, float]:
    best_us = _BEST_DECODE_US.get((len(case.lens), case.lens[0]))
    if best_us is None or case.heads.kv != 8:
        return {}
    is_large = case.lens in ((16 * KIB,) * 16, (4 * KIB,) * 64)
    return {"layer": round(1.03 * best_us, 1), **({"bandwidth": 4.3} if is_large else {})}


def _predicted_prefill(case: Case) -> Mapping[str, float]:
    return {"rate": 640.0}


def _prefill_target(case: Case) -> Mapping[str, float]:
    best = _BEST_PREFILL.get(case.queries) if case.queries == case.lens[0] else None
    return {"rate": round(0.9 * best, 1)} if best is not None and case.heads.kv == 8 else {}
