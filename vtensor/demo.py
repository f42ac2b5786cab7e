"""`vtensor demo`: a real model answers over a virtual KV cache, and what is claimed about the cache is checked."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vtensor.devices import fastest_device, resolve_device
from vtensor.integrations.hub import check_memory, find_model, load_model
from vtensor.kvcache import KVCacheConfig, KVCacheManager, KVCacheStats, SlotState
from vtensor.kvcache.config import Layout
from vtensor.observe.comparison import count_dynamic, render_bytes
from vtensor.observe.residency import render_residency
from vtensor.units import ceil_div, format_bytes

__all__ = ["PROMPTS", "run"]

PROMPTS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Write a short poem about a library at night.",
    "Summarize this in one sentence: A computer's operating system gives every program its own range of addresses. "
    "Only when the program touches a page of that range does the system put physical memory behind it, so a program "
    "can reserve far more than the machine has and pay only for what it uses.",
)
_DTYPE = torch.float32  # the proof compares tokens, and in 16 bits two of them can tie


@dataclass(frozen=True)
class _Answers:
    """What a generation left behind.

    Attributes
    ----------
    tokens : list of list of int
        By request, without the prompt and without what follows the end of the answer.
    seconds : float
    """

    tokens: list[list[int]]
    seconds: float


@dataclass(frozen=True)
class _Proof:
    """A claim, whether it holds, and what was compared."""

    claim: str
    holds: bool
    detail: str


# -- generation ----------------------------------------------------------------------------------------------------


class _Streamer:
    """What `generate` tells about new tokens: the prompts first, then a token a request."""

    def __init__(self, on_tokens: Callable[[list[int]], None]) -> None:
        self._on_tokens = on_tokens
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the next tokens, [B]; at the first call the prompts, [B, n]."""
        if not self._is_prompt:
            self._on_tokens(value.tolist())
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is kept back."""


def _generate(
    model: Any, tokenizer: Any, batch: Any, cache: Any, max_new_tokens: int, on_tokens: Callable[[list[int]], None]
) -> _Answers:
    """Answer greedily with a given cache."""
    # transformers renames past_key_values to cache; releases before 5.24 know only the old name.
    new_name = "cache" in inspect.signature(model.forward).parameters
    start = time.perf_counter()
    output = model.generate(
        **batch,
        **{"cache" if new_name else "past_key_values": cache},
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        streamer=_Streamer(on_tokens),
    )
    seconds = time.perf_counter() - start
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    rows = output[:, batch["input_ids"].shape[1] :].tolist()
    return _Answers([_until(row, ends) for row in rows], seconds)


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    """The tokens up to and with the first of `ends`."""
    length = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:length]


@contextlib.contextmanager
def _fastest_num_threads(model: Any, device: torch.device) -> Iterator[None]:
    """Run with all threads or with one, whichever decodes a token faster here.

    Several threads meet after each small matrix product, and on a busy machine they wait for the slowest: 790 ms
    instead of 55 ms a token was seen.
    """
    before = torch.get_num_threads()
    if device.type == "cpu" and before > 1:
        seconds = {}
        token = torch.zeros(1, 1, dtype=torch.long)
        with torch.inference_mode():
            for num_threads in (before, 1):
                torch.set_num_threads(num_threads)
                model(token, use_cache=False)
                start = time.perf_counter()
                model(token, use_cache=False)
                seconds[num_threads] = time.perf_counter() - start
        torch.set_num_threads(min(seconds, key=lambda num_threads: seconds[num_threads]))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _encode(tokenizer: Any, prompts: Sequence[str], device: torch.device) -> Any:
    """The prompts as one batch, padded on the left."""
    if tokenizer.chat_template:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            for prompt in prompts
        ]
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=not tokenizer.chat_template)
    return {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


# -- what is shown -------------------------------------------------------------------------------------------------


class _Screen:
    """Prompts and growing answers, below a progress bar and the cache's residency."""

    def __init__(self, prompts: Sequence[str], tokenizer: Any, cache: Any, max_new_tokens: int) -> None:
        self._prompts, self._tokenizer, self._cache = prompts, tokenizer, cache
        self._max_new_tokens = max_new_tokens
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self.is_finished = False

    def add(self, tokens: list[int]) -> None:
        """Take the next token of each request."""
        for held, token in zip(self._tokens, tokens, strict=True):
            held.append(token)

    def __rich__(self) -> RenderableType:
        done = len(self._tokens[0])
        bar = Table.grid(padding=(0, 1))
        total = done if self.is_finished else self._max_new_tokens
        bar.add_row(
            "answered " if self.is_finished else "answering",
            ProgressBar(total, done, width=32),
            f"{done} tokens a request",
        )
        answers = []
        for number, (prompt, tokens) in enumerate(zip(self._prompts, self._tokens, strict=True), 1):
            answer = self._tokenizer.decode(tokens, skip_special_tokens=True).strip()
            answers += [Text(f"\n{number}  {prompt}", "bold", overflow="ellipsis", no_wrap=True), Text(answer)]
        strips = [Text(), render_strips(self._cache.manager)] if done else []
        return Group(bar, *strips, *answers)


def render_strips(manager: KVCacheManager) -> RenderableType:
    """Residency of the active requests, numbered as the prompts are."""
    active = [slot for slot in manager.residency() if slot.state == SlotState.ACTIVE]
    labels = [f"request {slot.reqid + 1}" for slot in active]
    return render_residency(active, manager.pool.page_group_bytes, labels=labels)


def _render_proofs(proofs: Sequence[_Proof]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for proof in proofs:
        mark = "[bold green]holds" if proof.holds else "[bold red]FAILS"
        table.add_row(mark, Text(proof.claim), f"[dim]{proof.detail}")
    return table


# -- the proofs ----------------------------------------------------------------------------------------------------


def _compare(virtual: _Answers, dynamic: _Answers) -> _Proof:
    pairs = list(zip(virtual.tokens, dynamic.tokens, strict=True))
    equal = [ours == theirs for ours, theirs in pairs]
    detail = f"{sum(len(ours) for ours, _ in pairs)} tokens of {len(pairs)} requests compared"
    if not all(equal):
        number = equal.index(False)
        ours, theirs = pairs[number]
        place = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        detail = f"request {number + 1} differs from token {place + 1} on; {sum(equal)} of {len(equal)} are equal"
    return _Proof("the same tokens as DynamicCache", all(equal), detail)


def _check_bytes(stats: KVCacheStats, config: KVCacheConfig, dynamic: Any, dynamic_held: int) -> _Proof:
    is_sliding = any(layer.is_sliding for layer in dynamic.layers)  # DynamicCache forgets what we keep
    if config.layout == "per_layer":
        num_buffers = 2 * config.num_layers
    else:
        num_buffers = ceil_div(config.num_layers, config.resolved_layers_per_slice)
    # A request's last page group in each buffer may be nearly empty, and one token may be mapped ahead.
    limit = config.max_batch_size * (num_buffers * config.resolved_page_group_bytes + config.bytes_per_token)
    unused = stats.committed_bytes - stats.used_bytes
    holds = 0 <= unused <= limit and (is_sliding or stats.used_bytes == dynamic_held)
    same = "" if is_sliding else ", as many as in DynamicCache"
    detail = (
        f"{stats.used_bytes:,} bytes hold tokens{same}; {format_bytes(unused)} unused of at most {format_bytes(limit)}"
    )
    return _Proof("only the last page groups are part empty", holds, detail)


def _check_close(cache: Any) -> _Proof:
    pool = cache.manager.pool
    cache.close()
    left = pool.stats().total_page_groups
    return _Proof("all of it given back at the end", left == 0, f"{left} page groups left")


# -- all of it -----------------------------------------------------------------------------------------------------


def run(
    *,
    model: str | None = None,
    device: str | None = None,
    layout: Layout = "sliced",
    prompts: Sequence[str] | None = None,
    max_new_tokens: int = 48,
    max_cache_len: int | None = None,
    console: Console | None = None,
) -> bool:
    """Answer prompts in one batch, with a `VirtualCache` and then with transformers' `DynamicCache`, and compare.

    Parameters
    ----------
    model : str, optional
        Folder, GGUF file or hub id. Default: SmolLM2-135M-Instruct, from its package if installed, else from the hub.
    device : str, optional
        Default: the first GPU, else the CPU.
    layout : {"sliced", "per_layer"}
    prompts : sequence of str, optional
    max_new_tokens, max_cache_len : int
        Tokens of an answer, and tokens that a request may hold (default: what the model was made for).
    console : rich.console.Console, optional

    Returns
    -------
    bool
        Whether all proofs hold.

    Raises
    ------
    ValueError
        A bad option.
    VTensorError
        The model is not there, or memory is short.
    """
    console = console or Console(highlight=False)
    prompts = PROMPTS if prompts is None else prompts
    for option, value in (("--max-new-tokens", max_new_tokens), ("--max-cache-len", max_cache_len)):
        if value is not None and value < 1:
            raise ValueError(f"{option} {value} must be at least 1")
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise ValueError("--prompt must not be empty")
    place = resolve_device(device or fastest_device())
    source = find_model(model)
    check_memory(source, place, _DTYPE)
    hint = " (unpacking a GGUF file takes a while)" if source.gguf_file else ""
    with console.status(f"loading {source.name}{hint}"):
        tokenizer, loaded = load_model(source, place, _DTYPE)
    batch = _encode(tokenizer, prompts, place)
    needed = batch["input_ids"].shape[1] + max_new_tokens
    limit = max_cache_len or getattr(loaded.config.get_text_config(decoder=True), "max_position_embeddings", needed)
    if limit < needed:
        raise ValueError(
            f"--max-cache-len {limit} is too short: the longest prompt and {max_new_tokens} new tokens need {needed}"
        )
    console.print(
        f"[bold]{source.name}[/bold] on {place}, {layout} layout, {len(prompts)} requests of up to {limit:,} tokens\n"
    )
    with _fastest_num_threads(loaded, place):
        return _answer_and_prove(console, tokenizer, loaded, batch, prompts, layout, max_new_tokens, limit)


def _answer_and_prove(
    console: Console,
    tokenizer: Any,
    model: Any,
    batch: Any,
    prompts: Sequence[str],
    layout: Layout,
    max_new_tokens: int,
    max_cache_len: int,
) -> bool:
    from transformers import DynamicCache

    from vtensor.integrations.transformers import VirtualCache

    with VirtualCache.for_model(
        model, max_cache_len=max_cache_len, max_batch_size=len(prompts), layout=layout
    ) as cache:
        screen = _Screen(prompts, tokenizer, cache, max_new_tokens)
        with Live(screen, console=console, refresh_per_second=8):
            virtual = _generate(model, tokenizer, batch, cache, max_new_tokens, screen.add)
            screen.is_finished = True
        cache.manager.check_integrity()
        stats, config = cache.manager.stats(), cache.manager.config

        dynamic_cache = DynamicCache(config=model.config)
        with console.status("the same again with DynamicCache"):
            dynamic = _generate(model, tokenizer, batch, dynamic_cache, max_new_tokens, lambda tokens: None)
        dynamic_bytes = count_dynamic(dynamic_cache, batch["input_ids"].shape[1])
        num_tokens = sum(map(len, virtual.tokens))
        console.print(
            f"\n{num_tokens} tokens in {virtual.seconds:.1f} s. "
            "A batch is padded to its longest prompt, so all requests hold equally many.\n"
        )
        static_bytes = len(prompts) * max_cache_len * config.bytes_per_token
        console.print(render_bytes(stats, static_bytes, dynamic_bytes, f"{len(prompts)} x {max_cache_len:,} tokens"))
        proofs = [
            _compare(virtual, dynamic),
            _check_bytes(stats, config, dynamic_cache, dynamic_bytes.held),
            _check_close(cache),
        ]
    console.print(_render_proofs(proofs))
    return all(proof.holds for proof in proofs)
