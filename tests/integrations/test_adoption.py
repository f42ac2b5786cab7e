"""install and uninstall: every generate() of the process with virtual layers, and then as it was."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers import BartConfig, BartForConditionalGeneration, GenerationMixin, MambaConfig, MambaForCausalLM
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from tests.helpers.hf_models import HELD, expected_tokens, generate, make_inputs, make_model, shared_model
from vtensor.integrations import adoption
from vtensor.integrations.transformers import VirtualCache, install, uninstall

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

HOOK = "_prepare_cache_for_generation"


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    original = getattr(GenerationMixin, HOOK)
    yield
    uninstall()
    assert getattr(GenerationMixin, HOOK) is original


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[VirtualCache]]:
    """The caches that are made for generations."""
    found: list[weakref.ref[VirtualCache]] = []
    cache_for = adoption._cache_for

    def noting(*args: Any) -> VirtualCache | None:
        cache = cache_for(*args)
        if cache is not None:
            found.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(adoption, "_cache_for", noting)
    return found


def cache_of(model: Any, **options: Any) -> Any:
    found = generate(model, make_inputs(), max_new_tokens=2, return_dict_in_generate=True, **options)
    return found.get("past_key_values") or found.get("cache")


@pytest.mark.parametrize(
    "family", [family for family in HELD if family in ("llama", "gemma3, windows", "qwen3-next, linear attention")]
)
@pytest.mark.parametrize("attention", [None, "vtensor"])
def test_the_same_tokens(family: str, attention: str | None, made: list[Any]) -> None:
    model = shared_model(family, attention)
    install(page_group_bytes=4096)
    found = generate(model, make_inputs(), max_new_tokens=16)
    assert len(made) == 1
    uninstall()
    assert torch.equal(found, expected_tokens(family, True, 16))


def test_what_it_makes_and_for_whom() -> None:
    model = shared_model()
    assert type(cache_of(model)) is DynamicCache
    install(layout="per_layer")
    cache = cache_of(model)
    assert type(cache) is VirtualCache
    assert cache.manager.config.layout == "per_layer"
    assert cache.max_cache_len == 512
    assert type(cache_of(model, cache_implementation="static", disable_compile=True)) is StaticCache
    given = DynamicCache(config=model.config)
    assert cache_of(model, past_key_values=given) is given
    uninstall()
    assert type(cache_of(model)) is DynamicCache


def test_memory_goes_back_with_the_last_user(made: list[Any]) -> None:
    model = shared_model()
    install()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            generate(model, make_inputs(), max_new_tokens=3)
        assert len(made) == 3
        assert [cache() for cache in made] == [None] * 3, "no cycle keeps them"
    finally:
        gc.enable()


def test_longer_than_the_model_says(made: list[Any]) -> None:
    model = make_model(max_position_embeddings=16)
    expected = generate(model, make_inputs(), max_new_tokens=20)
    install()
    assert torch.equal(generate(model, make_inputs(), max_new_tokens=20), expected)
    assert len(made) == 1


def test_an_assistant_is_served_too(made: list[Any]) -> None:
    model, assistant = shared_model("gemma3, windows"), make_model("mistral, window", num_hidden_layers=1)
    assistant.generation_config.num_assistant_tokens = 45
    assistant.generation_config.assistant_confidence_threshold = 0
    inputs = make_inputs(batch=1, length=20)
    options = {"max_new_tokens": 50, "eos_token_id": 2}
    expected = generate(model, inputs, **options)
    install()
    found = generate(model, inputs, assistant_model=assistant, **options)
    assert torch.equal(found, expected)
    assert len(made) >= 1


def test_encoder_and_decoder() -> None:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=128, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    expected = generate(model, make_inputs(), max_new_tokens=12)
    given = EncoderDecoderCache(VirtualCache.for_model(model), DynamicCache(config=config))
    assert torch.equal(generate(model, make_inputs(), given, max_new_tokens=12), expected)
    install()
    assert torch.equal(generate(model, make_inputs(), max_new_tokens=12), expected)
    cache = cache_of(model)
    assert type(cache.self_attention_cache) is VirtualCache
    assert type(cache.cross_attention_cache) is DynamicCache
    model.set_attn_implementation("vtensor")
    assert torch.equal(generate(model, make_inputs(), max_new_tokens=12), expected)


def test_a_model_without_attention_is_left_alone(made: list[Any]) -> None:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=2, pad_token_id=0)
    model = MambaForCausalLM(config).eval()
    inputs = {"input_ids": make_inputs()["input_ids"]}
    expected = generate(model, inputs, max_new_tokens=4)
    install()
    assert torch.equal(generate(model, inputs, max_new_tokens=4), expected)
    assert not made


def test_without_a_cache(made: list[Any]) -> None:
    expected = generate(shared_model(), make_inputs(), max_new_tokens=4)
    install()
    assert torch.equal(generate(shared_model(), make_inputs(), max_new_tokens=4, use_cache=False), expected)
    assert not made


def test_again_and_again() -> None:
    original = getattr(GenerationMixin, HOOK)
    for _ in range(2):
        install()
        install(layout="per_layer")
        assert type(cache_of(shared_model())) is VirtualCache
        uninstall()
        uninstall()
        assert getattr(GenerationMixin, HOOK) is original


def test_what_others_put_around_it_stays() -> None:
    original = getattr(GenerationMixin, HOOK)
    install()
    ours = getattr(GenerationMixin, HOOK)

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    setattr(GenerationMixin, HOOK, theirs)
    try:
        uninstall()
        assert getattr(GenerationMixin, HOOK) is theirs
        assert type(cache_of(shared_model())) is DynamicCache
        install()
        assert type(cache_of(shared_model())) is VirtualCache
        uninstall()
    finally:
        setattr(GenerationMixin, HOOK, original)


def test_bad_options_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="no option layuot"):
        install(layuot="sliced")
    with pytest.raises(ValueError, match="rollback_tokens=-1"):
        install(rollback_tokens=-1)
    assert type(cache_of(shared_model())) is DynamicCache


def test_threads_generate_side_by_side() -> None:
    expected = [expected_tokens(family, True, 16) for family in ("llama", "gemma3, windows")]
    found: list[Any] = [None] * 4
    install()

    def run(number: int) -> None:
        model = shared_model(("llama", "gemma3, windows")[number % 2])
        found[number] = generate(model, make_inputs(), max_new_tokens=16)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[number], expected[number % 2]) for number in range(4))
