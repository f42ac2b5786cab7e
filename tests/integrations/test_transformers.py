"""VirtualCache against DynamicCache: the same tokens, from memory that grows page group by page group."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from tests.helpers.hf_models import SMALL, generate, make_inputs, make_model  # noqa: E402
from vtensor.errors import ClosedError, OutOfPagesError, RequestError  # noqa: E402
from vtensor.integrations.transformers import VirtualCache  # noqa: E402
from vtensor.units import ceil_div  # noqa: E402


def page_group_bytes(device: str) -> int:
    return 4096 if device == "cpu" else 2 << 20


def large_model(**changes: Any) -> Any:
    """A Llama of 8 layers on the GPU."""
    return make_model(
        device="cuda",
        num_hidden_layers=8,
        hidden_size=1024,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32_000,
        max_position_embeddings=131_072,
        **changes,
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
class TestTokens:
    @pytest.mark.parametrize("layout", ["sliced", "per_layer"])
    @pytest.mark.parametrize("family", ["llama", "gpt-neox", "gemma3, windows"])
    def test_greedy_with_left_padding_and_again_after_reset(self, family: str, layout: str, device: str) -> None:
        model, inputs = make_model(family, device), make_inputs(device)
        expected = generate(model, inputs)
        with VirtualCache.for_model(model, layout=layout, page_group_bytes=page_group_bytes(device)) as cache:
            assert torch.equal(generate(model, inputs, cache), expected)
            cache.manager.check_integrity()
            calls = cache.manager.stats().num_driver_calls
            cache.reset()
            assert torch.equal(generate(model, inputs, cache), expected)
            if "windows" not in family:
                again = cache.manager.stats().num_driver_calls
                assert again == calls, "the second generation reuses the first one's pages"
            cache.manager.check_integrity()

    @pytest.mark.parametrize(
        "options",
        [
            {"num_beams": 3},
            {"num_beams": 4, "num_return_sequences": 2},
            {"num_return_sequences": 3, "do_sample": True, "top_k": 5},
            {"do_sample": True},
        ],
        ids=str,
    )
    def test_beams_and_samples(self, options: dict[str, Any]) -> None:
        model, inputs = make_model(), make_inputs()
        torch.manual_seed(3)
        expected = generate(model, inputs, **options)
        with VirtualCache.for_model(model, max_batch_size=8, page_group_bytes=4096) as cache:
            torch.manual_seed(3)
            assert torch.equal(generate(model, inputs, cache, **options), expected)
            cache.manager.check_integrity()

    def test_prompt_lookup_and_assistant_crop_the_cache(self) -> None:
        model, inputs = make_model(), make_inputs(batch=1)
        assistant = make_model(num_hidden_layers=1)
        for kind in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
            options = {"eos_token_id": 2, **kind}  # prompt lookup needs one in the first releases of transformers 5
            expected = generate(model, inputs, **options)
            with VirtualCache.for_model(model, page_group_bytes=4096) as cache:
                assert torch.equal(generate(model, inputs, cache, **options), expected)
                cache.manager.check_integrity()

    def test_a_conversation_goes_on_in_the_same_cache(self) -> None:
        model, inputs = make_model(), make_inputs(batch=1)
        with VirtualCache.for_model(model, page_group_bytes=4096) as cache:
            first = generate(model, inputs, cache)
            more = torch.cat([first, make_inputs(batch=1, length=5)["input_ids"]], dim=1)
            turn = {"input_ids": more, "attention_mask": torch.ones_like(more)}
            assert torch.equal(generate(model, turn, cache), generate(model, turn))

    @pytest.mark.gpu
    @pytest.mark.parametrize("layout", ["sliced", "per_layer"])
    @pytest.mark.parametrize(("dtype", "attention"), [(torch.float32, "sdpa"), (torch.bfloat16, "eager")], ids=str)
    def test_llama_of_8_layers_on_a_gpu(self, dtype: torch.dtype, attention: str, layout: str) -> None:
        """Where DynamicCache repeats itself: with SDPA's default kernel for bf16, of cuDNN, it does not."""
        model = large_model(attention=attention).to(dtype)
        inputs = make_inputs("cuda", batch=4, length=1500)
        expected = generate(model, inputs, max_new_tokens=200)
        with VirtualCache.for_model(model, layout=layout) as cache:
            assert torch.equal(generate(model, inputs, cache, max_new_tokens=200), expected)
            cache.manager.check_integrity()


def test_pointers_stay_and_memory_grows_page_group_by_page_group(device: str) -> None:
    model = make_model(device=device)
    size = page_group_bytes(device)
    row_bytes = 2 * 3 * 2 * 16 * 4  # K and V, 3 layers in one slice, 2 heads of 16 fp32
    pointers, committed = set(), []
    tokens = make_inputs(device, batch=1, length=60)["input_ids"]
    with torch.no_grad(), VirtualCache.for_model(model, page_group_bytes=size, lookahead_tokens=0) as cache:
        for position in range(tokens.shape[1]):
            model(input_ids=tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
            pointers.add(tuple((layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers))
            committed.append(cache.manager.stats().committed_bytes)
            assert cache.layers[0].keys.shape == (1, 2, position + 1, 16)
    assert len(pointers) == 1
    assert committed == [ceil_div((position + 1) * row_bytes, size) * size for position in range(tokens.shape[1])]
    if device == "cpu":
        steps = np.diff(committed)
        assert set(steps) == {0, size}, "it grew, and never by more than one page group"


def test_a_step_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtensor.kvcache import KVCacheManager

    steps = []
    step = KVCacheManager.step
    monkeypatch.setattr(
        KVCacheManager, "step", lambda self, lengths: steps.append(list(lengths)) or step(self, lengths)
    )
    model = make_model()
    with torch.no_grad(), VirtualCache.for_model(model) as cache:
        model(**make_inputs(), past_key_values=cache)
        model(input_ids=torch.tensor([[5], [6]]), past_key_values=cache)
    assert steps == [[9, 9], [10, 10]]


def test_the_models_maximum_costs_nothing() -> None:
    model = make_model(max_position_embeddings=1 << 20)
    with torch.no_grad(), VirtualCache.for_model(model, max_batch_size=64, lookahead_tokens=0) as cache:
        model(**make_inputs(), past_key_values=cache)
        stats = cache.manager.stats()
        assert stats.reserved_bytes == 64 * (1 << 20) * cache.manager.config.bytes_per_token
        assert stats.committed_bytes == 2 * cache.manager.pool.page_group_bytes


class TestRearranging:
    def filled(self, batch: int, max_batch_size: int, **options: Any) -> VirtualCache:
        cache = VirtualCache(
            make_model().config,
            max_cache_len=64,
            max_batch_size=max_batch_size,
            page_group_bytes=4096,
            lookahead_tokens=0,
            **options,
        )
        for layer in range(3):
            states = torch.arange(batch * 2 * 5 * 16, dtype=torch.float32).view(batch, 2, 5, 16) + 1000 * layer
            cache.update(states, -states, layer)
        return cache

    @pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 1, 1]])
    def test_reorder(self, order: list[int]) -> None:
        with self.filled(3, 3) as cache:
            before = [layer.keys.clone() for layer in cache.layers]
            cache.reorder_cache(torch.tensor(order))
            for layer, keys in zip(cache.layers, before, strict=True):
                assert torch.equal(layer.keys, keys[order])
                assert torch.equal(layer.values, -keys[order])
            cache.manager.check_integrity()

    def test_select_then_repeat(self) -> None:
        with self.filled(4, 6) as cache:
            keys = cache.layers[2].keys.clone()
            cache.batch_select_indices(torch.tensor([3, 1]))
            assert torch.equal(cache.layers[2].keys, keys[[3, 1]])
            assert cache.manager.stats().num_active_slots == 2
            cache.batch_repeat_interleave(3)
            assert torch.equal(cache.layers[2].keys, keys[[3, 3, 3, 1, 1, 1]])
            assert cache.manager.stats().num_active_slots == 6
            cache.manager.check_integrity()

    def test_more_than_the_slots_is_refused_and_changes_nothing(self) -> None:
        with self.filled(4, 6) as cache:
            keys = cache.layers[0].keys.clone()
            with pytest.raises(RequestError, match=r"12 sequences exceeds max_batch_size=6"):
                cache.batch_repeat_interleave(3)
            assert torch.equal(cache.layers[0].keys, keys)
            cache.manager.check_integrity()

    @pytest.mark.parametrize("repeats", [3, 4])
    def test_more_than_the_memory_is_refused_and_changes_nothing(self, repeats: int) -> None:
        # A sequence of 5 tokens takes 1 page group, one of 6 takes 2.
        with self.filled(2, 8, capacity_bytes=4 * 4096) as cache:
            before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
            with pytest.raises(OutOfPagesError, match="more page groups"):
                cache.batch_repeat_interleave(repeats)
            assert cache.get_seq_length() == 5
            assert cache.manager.stats().num_active_slots == 2
            assert cache.manager.stats().mapped_page_groups == 2
            cache.manager.check_integrity()
            for index, (layer, (keys, values)) in enumerate(zip(cache.layers, before, strict=True)):
                assert torch.equal(layer.keys, keys)
                assert torch.equal(layer.values, values)
                new = torch.full((2, 2, 1, 16), 7.0 + index)
                all_keys, all_values = cache.update(new, -new, index)
                assert torch.equal(all_keys, torch.cat([keys, new], dim=2))
                assert torch.equal(all_values, torch.cat([values, -new], dim=2))
            cache.manager.check_integrity()

    def test_after_a_refusal_a_smaller_growth_works(self) -> None:
        with self.filled(2, 8, capacity_bytes=4 * 4096) as cache:
            keys = cache.layers[2].keys.clone()
            with pytest.raises(OutOfPagesError):
                cache.batch_repeat_interleave(3)
            cache.batch_repeat_interleave(2)
            assert torch.equal(cache.layers[2].keys, keys[[0, 0, 1, 1]])
            cache.manager.check_integrity()

    @pytest.mark.parametrize(("argument", "left"), [(-2, 3), (0, 5), (3, 3), (99, 5), (-99, 0)])
    def test_crop_in_both_meanings(self, argument: int, left: int) -> None:
        with self.filled(2, 2) as cache:
            pointer = cache.layers[0].keys.data_ptr()
            cache.crop(argument)
            assert cache.get_seq_length() == left
            assert cache.layers[1].keys.shape[2] == left
            states = torch.full((2, 2, 4, 16), 7.0)
            for layer in range(3):
                keys, _ = cache.update(states, states, layer)
                assert keys.shape[2] == left + 4
                assert (keys[:, :, left:] == 7).all()
            assert cache.layers[0].keys.data_ptr() == pointer
            cache.manager.check_integrity()


class TestCopies:
    def test_a_copy_holds_the_same_tokens_and_goes_its_own_way(self) -> None:
        with TestRearranging().filled(2, 6, layout="per_layer") as cache:
            before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
            with copy.deepcopy(cache) as copied:
                assert (copied.get_seq_length(), copied.max_cache_len, copied.max_batch_size) == (5, 64, 6)
                assert copied.manager is not cache.manager
                assert copied.manager.config == cache.manager.config
                for one, other, (keys, values) in zip(copied.layers, cache.layers, before, strict=True):
                    assert one is not other
                    assert torch.equal(one.keys, keys)
                    assert torch.equal(one.values, values)
                new = torch.full((2, 2, 3, 16), 7.0)
                for index in range(3):
                    copied.update(new, new, index)
                    copied.layers[index].keys.fill_(9)
                copied.batch_repeat_interleave(3)
                copied.manager.check_integrity()
                cache.manager.check_integrity()
            for index, (layer, (keys, values)) in enumerate(zip(cache.layers, before, strict=True)):
                assert torch.equal(layer.keys, keys)
                assert torch.equal(layer.values, values)
                assert torch.equal(cache.update(-new, new, index)[0], torch.cat([keys, -new], dim=2))
            cache.manager.check_integrity()

    @pytest.mark.parametrize("start", ["never used", "reset"])
    def test_a_copy_of_an_empty_cache(self, start: str, device: str) -> None:
        model, inputs = make_model(device=device), make_inputs(device)
        expected = generate(model, inputs)
        with VirtualCache.for_model(model, page_group_bytes=page_group_bytes(device)) as cache:
            if start == "reset":
                generate(model, inputs, cache)
                cache.reset()
            with copy.deepcopy(cache) as copied:
                assert copied.get_seq_length() == 0
                assert torch.equal(generate(model, inputs, copied), expected)
                assert cache.get_seq_length() == 0
                assert torch.equal(generate(model, inputs, cache), expected)
                assert copied.manager is not cache.manager

    def test_a_prefix_is_computed_once_and_used_several_times(self, device: str) -> None:
        model = make_model(device=device)
        prefix = make_inputs(device, batch=1, length=7)["input_ids"]
        with VirtualCache.for_model(model, page_group_bytes=page_group_bytes(device)) as cache:
            with torch.no_grad():
                model(input_ids=prefix, past_key_values=cache, use_cache=True)
            for ending in ([5], [9, 4], [5]):
                tokens = torch.cat([prefix, torch.tensor([ending], device=device)], dim=1)
                prompt = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
                with copy.deepcopy(cache) as copied:
                    assert torch.equal(generate(model, prompt, copied), generate(model, prompt))
            assert cache.get_seq_length() == 7

    def test_a_copy_of_a_cropped_cache(self) -> None:
        with TestRearranging().filled(2, 2) as cache:
            cache.crop(-2)
            with copy.deepcopy(cache) as copied:
                assert copied.get_seq_length() == 3
                assert torch.equal(copied.layers[2].keys, cache.layers[2].keys)
                copied.manager.check_integrity()


class TestMisuse:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_cache_len": 0}, "max_cache_len=0 must be a positive integer"),
            ({"max_batch_size": -1}, "max_batch_size=-1 must be a positive integer"),
            ({"layuot": "sliced"}, "no option layuot"),
            ({"rollback_tokens": -1}, "rollback_tokens=-1 must be an integer of 0 or more"),
            ({"device": ["cpu"]}, "has 1 entries; the model has 3 layers"),
        ],
    )
    def test_bad_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            VirtualCache.for_model(make_model(), **options)

    def test_a_model_of_another_kind(self) -> None:
        config = transformers.LlamaConfig(**SMALL)
        config.layer_types = ["linear_attention"] * 3
        with pytest.raises(ValueError, match=r"(?i)linear_?attention.*use the model's default cache"):
            VirtualCache(config)

    @pytest.mark.parametrize("config", [None, {"num_hidden_layers": 3}], ids=str)
    def test_no_config(self, config: Any) -> None:
        with pytest.raises(ValueError, match=r"must be the configuration of a transformers model: model\.config"):
            VirtualCache(config)

    def test_too_many_sequences_names_the_beams(self) -> None:
        model = make_model()
        with VirtualCache.for_model(model, max_batch_size=2) as cache, pytest.raises(RequestError, match="num_beams"):
            generate(model, make_inputs(), cache, num_beams=3)

    def test_too_many_tokens_loses_nothing(self) -> None:
        cache = TestRearranging().filled(2, 2)
        with cache:
            keys = cache.layers[0].keys.clone()
            states = torch.zeros(2, 2, 60, 16)
            with pytest.raises(RequestError, match="65 tokens exceed max_cache_len=64"):
                cache.update(states, states, 0)
            assert cache.get_seq_length() == 5
            assert torch.equal(cache.layers[0].keys, keys)

    def test_no_memory_loses_nothing(self) -> None:
        cache = VirtualCache(make_model().config, max_batch_size=2, page_group_bytes=4096, capacity_bytes=8192)
        with cache:
            states = torch.ones(2, 2, 5, 16)
            cache.update(states, states, 0)
            with pytest.raises(OutOfPagesError, match="more page groups"):
                cache.update(torch.zeros(2, 2, 60, 16), torch.zeros(2, 2, 60, 16), 0)
            assert torch.equal(cache.layers[0].keys, states)
            cache.manager.check_integrity()

    def test_gradients_are_refused(self) -> None:
        model = make_model()
        with VirtualCache.for_model(model) as cache, pytest.raises(RequestError, match="no_grad"):
            model(**make_inputs(), past_key_values=cache)

    def test_closed_and_not_started(self) -> None:
        model = make_model()
        cache = VirtualCache.for_model(model)
        with pytest.raises(RequestError, match="first forward"):
            _ = cache.manager
        generate(model, make_inputs(), cache)
        cache.close()
        cache.close()
        with pytest.raises(ClosedError):
            generate(model, make_inputs(), cache)

    def test_two_caches_at_once(self) -> None:
        model, inputs = make_model(), make_inputs()
        expected = generate(model, inputs)
        with VirtualCache.for_model(model) as one, VirtualCache.for_model(model, layout="per_layer") as two:
            for _ in range(2):
                assert torch.equal(generate(model, inputs, one), expected)
                assert torch.equal(generate(model, inputs, two), expected)
                one.reset()
                two.reset()
