"""Bad input: a ValueError that names the argument and the rule, and nothing launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.attention_cases import HEADS
from vtensor.triton_kernels.arguments import FP8, AttentionArguments, check_attention

Change = Callable[[dict[str, Any]], object]


def good(device: str, *, ragged: bool) -> dict[str, Any]:
    """Arguments of two requests that fit: 4 heads over 2, 3 slots of 8 tokens."""

    def rows(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float16, device=device)

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return {
        "q": rows(5, 4, 32) if ragged else rows(2, 2, 4, 32),
        "k": rows(3, 8, 2, 32),
        "v": rows(3, 8, 2, 16),
        "seq_lens": numbers(4, 8),
        "batch_idx": numbers(2, -1),
        **({"cu_seqlens": numbers(0, 3, 5)} if ragged else {}),
    }


def change(name: str, function: Callable[[Any], Any]) -> Change:
    return lambda arguments: arguments.update({name: function(arguments[name])})


def add(**more: Any) -> Change:
    return lambda arguments: arguments.update(more)


def fp8(arguments: dict[str, Any]) -> None:
    arguments.update(k=arguments["k"].to(FP8), v=arguments["v"].to(FP8))


def fp8_and(**more: Any) -> Change:
    return lambda arguments: (fp8(arguments), arguments.update(more))


def numbers(*values: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda old: torch.tensor(values, dtype=torch.int32, device=old.device)


# Of each: what is wrong, and what the message says.
ANY: dict[str, tuple[Change, str]] = {
    "q no tensor": (add(q=[1.0]), r"q is a list.*tensor"),
    "q of two dimensions": (change("q", lambda q: q[0, 0]), r"q has shape \[.*must be"),
    "q float64": (change("q", torch.Tensor.double), r"q has dtype torch.float64.*float16"),
    "q fp8": (change("q", lambda q: q.to(FP8)), r"q has dtype torch.float8"),
    "q transposed": (change("q", lambda q: q.mT.contiguous().mT), r"q has a stride of .* last dimension.*1"),
    "k no tensor": (add(k=None), r"k is a NoneType.*tensor"),
    "k of another dtype": (change("k", torch.Tensor.float), r"k has dtype torch.float32.*float16"),
    "k of three dimensions": (change("k", lambda k: k[0]), r"k has shape \[8, 2, 32\].*slots, L, Hkv, 32"),
    "k of another width": (change("k", lambda k: k[..., :16]), r"k has shape \[3, 8, 2, 16\].*32"),
    "k transposed": (change("k", lambda k: k.mT.contiguous().mT), r"k has a stride of .* last dimension.*1"),
    "v no tensor": (add(v=3), r"v is a int.*tensor"),
    "v of another dtype": (change("v", torch.Tensor.bfloat16), r"v has dtype torch.bfloat16.*float16"),
    "v fp8 alone": (change("v", lambda v: v.to(FP8)), r"v has dtype torch.float8.*float16"),
    "v of fewer slots": (change("v", lambda v: v[:2]), r"v has shape \[2, 8, 2, 16\].*3, 8, 2"),
    "v of fewer tokens": (change("v", lambda v: v[:, :7]), r"v has shape \[3, 7, 2, 16\].*3, 8, 2"),
    "v of fewer heads": (change("v", lambda v: v[:, :, :1]), r"v has shape \[3, 8, 1, 16\].*3, 8, 2"),
    "v transposed": (change("v", lambda v: v.mT.contiguous().mT), r"v has a stride of .* last dimension.*1"),
    "v of an odd width": (change("v", lambda v: v[..., :15]), r"v: .*15.*multiple of 16"),
    "v of no width": (change("v", lambda v: v[..., :0]), r"v: .* 0 .*16"),
    "v too wide": (change("v", lambda v: v.new_zeros(3, 8, 2, 528)), r"v: .*528.*at most 512"),
    "heads that do not divide": (change("q", lambda q: q[..., :3, :]), r"q has 3 heads and k has 2.*multiple"),
    "seq_lens no tensor": (add(seq_lens=[4, 8]), r"seq_lens is a list.*tensor"),
    "seq_lens int64": (change("seq_lens", torch.Tensor.long), r"seq_lens has dtype torch.int64.*int32"),
    "seq_lens of another size": (change("seq_lens", numbers(4, 8, 1)), r"has shape \[\d\].*must be"),
    "seq_lens of two dimensions": (change("seq_lens", lambda x: x[:, None]), r"seq_lens has shape \[2, 1\]"),
    "seq_lens strided": (
        change("seq_lens", lambda x: torch.stack([x, x], 1)[:, 0]),
        r"seq_lens has strides.*contiguous",
    ),
    "batch_idx no tensor": (add(batch_idx=(2, 1)), r"batch_idx is a tuple.*tensor"),
    "batch_idx int64": (change("batch_idx", torch.Tensor.long), r"batch_idx has dtype torch.int64.*int32"),
    "batch_idx of another size": (change("batch_idx", numbers(0)), r"batch_idx has shape \[1\].*\[2\]"),
    "sinks of another size": (add(sinks=torch.zeros(2)), r"sinks has shape \[2\].*\[4\]"),
    "sinks int": (add(sinks=torch.zeros(4, dtype=torch.int32)), r"sinks has dtype torch.int32"),
    "sinks no tensor": (add(sinks=1.0), r"sinks is a float"),
    "alibi_slopes of another size": (add(alibi_slopes=torch.zeros(1)), r"alibi_slopes has shape \[1\].*\[4\]"),
    "alibi_slopes fp16": (add(alibi_slopes=torch.zeros(4).half()), r"alibi_slopes has dtype torch.float16.*float32"),
    "k_scale without fp8": (add(k_scale=torch.ones(2)), r"k_scale is for a cache of .*float8.*float16"),
    "v_scale without fp8": (add(v_scale=torch.ones(1)), r"v_scale is for a cache of .*float8.*float16"),
    "k_scale of another size": (fp8_and(k_scale=torch.ones(4)), r"k_scale has shape \[4\].*\[2\]"),
    "v_scale fp16": (fp8_and(v_scale=torch.ones(2).half()), r"v_scale has dtype torch.float16.*float32"),
    "k_scale a number": (fp8_and(k_scale=0.5), r"k_scale is a float.*tensor"),
    "window 0": (add(window=0), r"window=0 .*at least 1"),
    "window negative": (add(window=-3), r"window=-3 .*at least 1"),
    "window a fraction": (add(window=2.5), r"window=2.5 .*tokens"),
    "softcap 0": (add(softcap=0.0), r"softcap=0.0 .*above 0"),
    "softcap a word": (add(softcap="50"), r"softcap='50' .*finite"),
    "scale a word": (add(scale="1"), r"scale='1' .*finite"),
    "window a truth": (add(window=True), r"window=True .*at least 1"),
    "softcap negative": (add(softcap=-1.0), r"softcap=-1.0 .*above 0"),
    "softcap infinite": (add(softcap=float("inf")), r"softcap=inf .*finite"),
    "scale infinite": (add(scale=float("inf")), r"scale=inf .*finite"),
    "scale nan": (add(scale=float("nan")), r"scale=nan .*finite"),
}
ON_THE_HOST: dict[str, tuple[Change, str]] = {  # what indices hold is looked at where that makes nobody wait
    "seq_lens negative": (change("seq_lens", numbers(4, -1)), r"seq_lens=\[4, -1\] .*0 to 8"),
    "seq_lens too long": (change("seq_lens", numbers(9, 1)), r"seq_lens=\[9, 1\] .*0 to 8"),
    "batch_idx too high": (change("batch_idx", numbers(3, 0)), r"batch_idx=\[3, 0\] .*0 to 2"),
    "batch_idx too low": (change("batch_idx", numbers(0, -2)), r"batch_idx=\[0, -2\] .*-1 for padding"),
}
DENSE: dict[str, tuple[Change, str]] = {
    "more requests than slots": (
        lambda arguments: arguments.update(
            q=arguments["q"].new_zeros(4, 2, 4, 32), seq_lens=arguments["seq_lens"].repeat(2), batch_idx=None
        ),
        r"seq_lens has 4 requests and k has 3 slots.*batch_idx",
    ),
    "q of five dimensions": (change("q", lambda q: q[None]), r"q has shape \[1, 2, 2, 4, 32\]"),
}
RAGGED: dict[str, tuple[Change, str]] = {
    "q of four dimensions": (change("q", lambda q: q[None]), r"q has shape \[1, 5, 4, 32\].*T, Hq, D"),
    "cu_seqlens int64": (change("cu_seqlens", torch.Tensor.long), r"cu_seqlens has dtype torch.int64.*int32"),
    "cu_seqlens of another size": (change("cu_seqlens", numbers(0, 5)), r"cu_seqlens has shape \[2\].*\[3\]"),
    "cu_seqlens no tensor": (add(cu_seqlens=[0, 3, 5]), r"cu_seqlens is a list.*tensor"),
    "window without causal": (add(window=3, causal=False), r"window=3 .*causal"),
}
RAGGED_ON_THE_HOST: dict[str, tuple[Change, str]] = {
    "cu_seqlens that begins late": (change("cu_seqlens", numbers(1, 3, 5)), r"cu_seqlens=\[1, 3, 5\] .*begin with 0"),
    "cu_seqlens that falls": (change("cu_seqlens", numbers(0, 4, 3)), r"cu_seqlens=\[0, 4, 3\] .*never fall"),
    "cu_seqlens behind q": (change("cu_seqlens", numbers(0, 4, 6)), r"cu_seqlens=\[0, 4, 6\] .*at 5"),
}
OUTPUTS: dict[str, tuple[Change, str]] = {
    "out no tensor": (add(out=1), r"out is a int.*tensor"),
    "out of another dtype": (add(out=torch.float32), r"out has dtype torch.float32.*float16"),
    "out of another width": (add(out=32), r"out has shape \[.*32\].*16"),
}


def wrong(
    device: str, problems: dict[str, tuple[Change, str]], name: str, *, ragged: bool
) -> tuple[dict[str, Any], str]:
    """Arguments with one thing wrong, tensors on a device, and what the message says."""
    arguments, (apply, message) = good(device, ragged=ragged), problems[name]
    apply(arguments)
    for key, value in arguments.items():
        arguments[key] = value.to(device) if isinstance(value, torch.Tensor) else value
    return arguments, message


def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a kernel of Triton's is launched, interpreted or compiled."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        pytest.fail(f"{self} was launched")

    monkeypatch.setattr(InterpretedFunction, "run", launched)
    monkeypatch.setattr(JITFunction, "run", launched)


def everything(which: str) -> dict[str, tuple[Change, str]]:
    own = DENSE | ON_THE_HOST if which == "decode" else RAGGED | ON_THE_HOST | RAGGED_ON_THE_HOST
    return ANY | own


def refuse(function: Callable[..., Any], arguments: dict[str, Any], message: str) -> None:
    """Call with the tensors in their places, and expect a ValueError."""
    arguments = dict(arguments)
    places = [arguments.pop(name) for name in ("q", "k", "v")]
    if "cu_seqlens" in arguments and function is not check_attention:
        places.append(arguments.pop("cu_seqlens"))
    with pytest.raises(ValueError, match=message):
        function(*places, **arguments)


def kernel(which: str) -> Callable[..., Any]:
    from vtensor.triton_kernels.attention import decode_attention, prefill_attention

    return decode_attention if which == "decode" else prefill_attention


BOTH = [(which, name) for which in ("decode", "prefill") for name in everything(which)]
ON_DEVICES = [  # what indices hold on a GPU nobody looks at
    pytest.param(device, which, name, marks=pytest.mark.gpu if device != "cpu" else (), id=f"{device} {which} {name}")
    for device in ("cpu", "cuda:0")
    for which, name in BOTH
    if device == "cpu" or name not in ON_THE_HOST | RAGGED_ON_THE_HOST
]


@pytest.mark.parametrize(("which", "name"), BOTH)
def test_the_check_refuses(which: str, name: str) -> None:
    arguments, message = wrong("cpu", everything(which), name, ragged=which == "prefill")
    refuse(check_attention, arguments, message)


@pytest.mark.parametrize(("device", "which", "name"), ON_DEVICES)
def test_kernels_refuse_before_any_launch(which: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, message = wrong(device, everything(which), name, ragged=which == "prefill")
    no_launch(monkeypatch)
    refuse(kernel(which), arguments, message)


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("which", ["decode", "prefill"])
def test_an_output_that_does_not_fit_is_refused(
    which: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, message = wrong(device, OUTPUTS, name, ragged=which == "prefill")
    shape, wanted = [*arguments["q"].shape[:-1], 16], arguments["out"]
    if isinstance(wanted, torch.dtype):
        arguments["out"] = torch.zeros(shape, dtype=wanted, device=device)
    elif name == "out of another width":
        arguments["out"] = torch.zeros(*shape[:-1], wanted, dtype=torch.float16, device=device)
    no_launch(monkeypatch)
    refuse(kernel(which), arguments, message)


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["k", "v", "seq_lens", "batch_idx", "sinks", "alibi_slopes"])
def test_all_tensors_are_on_one_device(name: str, which: str, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = good(gpu, ragged=which == "prefill")
    arguments[name] = arguments[name].cpu() if name in arguments else torch.zeros(4)
    no_launch(monkeypatch)
    refuse(kernel(which), arguments, rf"{name} is on cpu, and q is on cuda:0.*one device")


@pytest.mark.gpu
def test_the_starts_are_on_the_same_device(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = good(gpu, ragged=True)
    arguments["cu_seqlens"] = arguments["cu_seqlens"].cpu()
    no_launch(monkeypatch)
    refuse(kernel("prefill"), arguments, "cu_seqlens is on cpu, and q is on cuda:0.*one device")


@pytest.mark.parametrize("heads", [(33, 2), (3, 2), (1, 2), (5, 4)])
def test_heads_must_divide(heads: tuple[int, int]) -> None:
    arguments = good("cpu", ragged=False)
    arguments["q"] = torch.zeros(2, heads[0], 32, dtype=torch.float16)
    arguments["k"], arguments["v"] = (torch.zeros(3, 8, heads[1], 32, dtype=torch.float16) for _ in range(2))
    refuse(check_attention, arguments, f"q has {heads[0]} heads and k has {heads[1]}.*multiple")


@pytest.mark.parametrize("heads", [*HEADS, (80, 4), (24, 4), (1, 1)])
def test_groups_that_divide(heads: tuple[int, int]) -> None:
    arguments = good("cpu", ragged=False)
    arguments["q"] = torch.zeros(2, heads[0], 32, dtype=torch.float16)
    arguments["k"] = arguments["v"] = torch.zeros(3, 8, heads[1], 32, dtype=torch.float16)
    assert check_attention(**arguments).group == heads[0] // heads[1]


@pytest.mark.parametrize(
    ("width", "fits"), [(16, True), (576, True), (8, False), (24, False), (592, False), (0, False)]
)
def test_widths_of_heads(width: int, fits: bool) -> None:
    arguments = good("cpu", ragged=False)
    arguments["q"] = torch.zeros(2, 4, width, dtype=torch.float16)
    arguments["k"] = torch.zeros(3, 8, 2, width, dtype=torch.float16)
    if fits:
        assert check_attention(**arguments).q.shape == (2, 1, 4, width)
    else:
        refuse(check_attention, arguments, f"q and k: .* {width} .*multiple of 16, of at most 576")


def test_what_is_left_out_is_filled_in() -> None:
    arguments = good("cpu", ragged=False)
    call = check_attention(arguments["q"], arguments["k"], arguments["v"], arguments["seq_lens"])
    assert isinstance(call, AttentionArguments)
    assert (call.batch_size, call.group) == (2, 2)
    assert call.scale == 32**-0.5
    assert (call.window, call.softcap, call.causal) == (0, 0.0, True)
    given = (call.batch_idx, call.cu_seqlens, call.sinks, call.alibi_slopes, call.k_scale, call.v_scale)
    assert given == (None,) * 6


@pytest.mark.parametrize("scale", [torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([2.0, 3.0])])
def test_scales_of_fp8_become_flat(scale: torch.Tensor) -> None:
    arguments = good("cpu", ragged=False)
    fp8(arguments)
    call = check_attention(**arguments, k_scale=scale, v_scale=scale)
    assert call.k_scale is not None
    assert call.k_scale.tolist() == scale.reshape(-1).tolist()


def test_no_request_at_all() -> None:
    arguments = good("cpu", ragged=True)
    arguments |= {name: arguments[name][:0] for name in ("q", "seq_lens", "batch_idx")}
    arguments["cu_seqlens"] = torch.zeros(1, dtype=torch.int32)
    assert check_attention(**arguments).batch_size == 0
    arguments["cu_seqlens"] += 1
    refuse(check_attention, arguments, r"cu_seqlens=\[1\] of no request")


def test_long_lists_are_cut_in_messages() -> None:
    arguments = good("cpu", ragged=True)
    arguments["seq_lens"] = torch.full((40,), 9, dtype=torch.int32)
    arguments["batch_idx"] = torch.zeros(40, dtype=torch.int32)
    arguments["cu_seqlens"] = torch.zeros(41, dtype=torch.int32)
    refuse(check_attention, arguments, r"seq_lens=\[(9, ){16}\.\.\.\] must be")
