"""KVCache and TorchtuneKVCache: a plain PyTorch model generates what it generates with dense caches."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import vtensor as vt
from tests.helpers.plain_model import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    VOCABULARY,
    DenseAppending,
    DenseCache,
    dense,
    generate,
    make_decoder,
)
from vtensor.allocator.page_pool import PagePool
from vtensor.integrations.module import KVCache, TorchtuneKVCache

LENGTH = 192
SHAPE = (NUM_KV_HEADS, HEAD_DIM)
KINDS = [KVCache, TorchtuneKVCache]
BYTES_PER_TOKEN = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4

Cache = KVCache | TorchtuneKVCache
Make = Callable[..., list[Any]]


@pytest.fixture
def make(make_pool: Callable[..., PagePool]) -> Iterator[Make]:
    """Make caches for the layers of the plain model, in a pool of the smallest page groups; closed at the end."""
    made: list[Any] = []

    def make_caches(
        kind: type[Cache] = KVCache,
        num_layers: int = NUM_LAYERS,
        max_batch_size: int = 4,
        num_page_groups: int | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> list[Any]:
        options.setdefault("pool", make_pool(num_page_groups))
        caches = kind.for_layers(num_layers, max_batch_size, LENGTH, *SHAPE, dtype, **options)
        made.append(caches[0])
        return caches

    yield make_caches
    for cache in made:
        cache.close()


def states(num_tokens: int, batch: int = 2, device: str = "cpu") -> torch.Tensor:
    return torch.randn(batch, NUM_KV_HEADS, num_tokens, HEAD_DIM).to(device)


def append(cache: Cache, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Update by either call."""
    if isinstance(cache, TorchtuneKVCache):
        return cache.update(k, v)
    return cache.update(torch.arange(cache.size, cache.size + k.shape[2], device=k.device), k, v)


def prompts(batch: int, num_tokens: int, device: str) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, num_tokens), generator=torch.Generator().manual_seed(1)).to(device)


# -- what a model generates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("returns", ["full", "held"])
@pytest.mark.parametrize("batch", [1, 3])
def test_generates_what_it_does_with_a_dense_cache(
    make: Make, device: str, kind: type[Cache], returns: str, batch: int
) -> None:
    model, prompt, appends = make_decoder(LENGTH, device), prompts(batch, 9, device), kind is TorchtuneKVCache
    plain = DenseAppending if appends else DenseCache
    expected = generate(model.use(dense(plain, batch, LENGTH, device), appends=appends), prompt, 100)
    assert len(expected[0].unique()) > 8  # or else this would not say much
    caches = make(kind, returns=returns)
    assert torch.equal(generate(model.use(caches, appends=appends), prompt, 100), expected)
    assert [cache.size for cache in caches] == [108] * NUM_LAYERS


@pytest.mark.parametrize("returns", ["full", "held"])
def test_attention_of_ours_gives_the_same_logits(make: Make, device: str, returns: str) -> None:
    model, prompt = make_decoder(LENGTH, device), prompts(3, 9, device)
    tokens = generate(model.use(dense(DenseCache, 3, LENGTH, device)), prompt, 40)
    places = torch.arange(tokens.shape[1], device=device)
    with torch.no_grad():
        expected = model.use(dense(DenseCache, 3, LENGTH, device))(tokens, places)
        model.use(make(returns=returns), attends=True)
        chunks = [slice(0, 9), slice(9, 20), *(slice(i, i + 1) for i in range(20, tokens.shape[1]))]
        found = torch.cat([model(tokens[:, chunk], places[chunk]) for chunk in chunks], dim=1)
    tolerance = 1e-4 if device == "cpu" else 2e-2  # a GPU's matrix units take fewer bits of float32
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("returns", ["full", "held"])
def test_reset_and_reuse_with_other_prompts_and_batches(
    make: Make, device: str, kind: type[Cache], returns: str
) -> None:
    model, appends = make_decoder(LENGTH, device), kind is TorchtuneKVCache
    caches = make(kind, returns=returns)
    for batch, num_tokens in ((3, 30), (2, 5), (4, 12), (1, 1)):
        prompt = prompts(batch, num_tokens, device)
        expected = generate(model.use(dense(DenseCache, batch, LENGTH, device)), prompt, 40)
        assert torch.equal(generate(model.use(caches, appends=appends), prompt, 40), expected)
        for cache in caches:  # as torchtune does; the first does it for all
            cache.reset()
        assert {cache.size for cache in caches} == {0}


@pytest.mark.parametrize("returns", ["full", "held"])
def test_in_inference_mode_and_out_of_it(make: Make, returns: str) -> None:
    model, prompt = make_decoder(LENGTH), prompts(2, 9, "cpu")
    expected = generate(model.use(dense(DenseCache, 2, LENGTH)), prompt, 20)
    model.use(make(returns=returns))
    with torch.inference_mode():
        logits = model(prompt, torch.arange(9))
    with torch.no_grad():
        for place in range(9, 12):
            assert torch.equal(logits[:, -1].argmax(-1), expected[:, place])
            logits = model(expected[:, place : place + 1], torch.tensor([place]))


@pytest.mark.parametrize("returns", ["full", "held"])
def test_compiled(make: Make, returns: str) -> None:
    model, prompt = make_decoder(LENGTH), prompts(2, 9, "cpu")
    expected = generate(model.use(dense(DenseCache, 2, LENGTH)), prompt, 6)
    compiled = torch.compile(model.use(make(returns=returns)), backend="eager")
    assert torch.equal(generate(compiled, prompt, 6), expected)
    torch._dynamo.reset()


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("returns", ["full", "held"])
def test_memory_follows_the_tokens(make: Make, make_pool: Callable[..., PagePool], device: str, returns: str) -> None:
    model, prompt, pool = make_decoder(LENGTH, device), prompts(3, 9, device), make_pool(None)
    caches, seen = make(returns=returns, pool=pool), []
    assert caches[0].committed_bytes == 0
    slack = 2 * 3 * pool.page_group_bytes  # of each sequence the rest of a page group, and one mapped ahead

    def look() -> None:
        used, committed = caches[0].used_bytes, caches[0].committed_bytes
        assert used == 3 * caches[0].size * BYTES_PER_TOKEN
        assert used <= committed <= used + slack
        seen.append(committed)

    generate(model.use(caches), prompt, 100, look)
    assert seen == sorted(seen)
    caches[1].close()
    assert caches[0].committed_bytes == 0
    if device == "cpu":  # page groups of a GPU are larger than all of it, and go back after what it is at
        assert len(set(seen)) > 5  # it grew in steps
        assert pool.stats().free_page_groups == pool.stats().total_page_groups


def test_a_million_tokens_cost_addresses_only() -> None:
    caches = KVCache.for_layers(4, 64, 1 << 20, 8, 128)
    k = v = torch.randn(2, 8, 5, 128, dtype=torch.bfloat16)
    for cache in caches:
        full, _ = cache.update(torch.arange(5), k, v)
    assert full.shape == (2, 8, 1 << 20, 128)
    assert torch.equal(full[:, :, :5], k)
    assert not full[:, :, 1 << 19].any()
    assert caches[0].committed_bytes <= 4 << 16
    caches[0].close()


def test_the_first_layer_commits_for_all(make: Make) -> None:
    caches = make(returns="held")
    append(caches[0], states(50), states(50))
    committed = caches[0].committed_bytes
    for cache in caches[1:]:
        append(cache, states(50), states(50))
    assert caches[0].committed_bytes == committed


def test_full_returns_read_zeros_behind_the_tokens(make: Make, device: str) -> None:
    cache = make(num_layers=1, returns="full")[0]
    k = states(20, device=device)
    append(cache, k, torch.full_like(k, torch.nan))
    cache.crop(3)
    full, values = append(cache, k[:, :, 3:5], k[:, :, 3:5])
    assert torch.equal(full[:, :, :5], k[:, :, :5])
    assert not full[:, :, 5:].any()
    assert not values[:, :, 5:].any()
    cache.reset()
    assert cache.committed_bytes == 0
    assert not append(cache, k[:, :, :1], k[:, :, :1])[1][:, :, 1:].any()


@pytest.mark.parametrize("returns", ["full", "held"])
def test_shortage_changes_nothing(make: Make, returns: str) -> None:
    caches = make(returns=returns, num_page_groups=12)
    k = states(10)
    for cache in caches:
        append(cache, k, k)
    with pytest.raises(vt.OutOfPagesError):
        append(caches[0], states(LENGTH - 10), states(LENGTH - 10))
    assert [cache.size for cache in caches] == [10] * NUM_LAYERS
    found, _ = append(caches[0], k[:, :, :1], k[:, :, :1])
    assert torch.equal(found[:, :, :11], torch.cat([k, k[:, :, :1]], dim=2))


@pytest.mark.parametrize("returns", ["full", "held"])
@pytest.mark.parametrize("kind", KINDS)
def test_crop_takes_back_a_draft(make: Make, kind: type[Cache], returns: str) -> None:
    caches = make(kind, returns=returns)
    k = states(30)
    for cache in caches:
        append(cache, k, k)
    append(caches[0], states(4), states(4))  # a forward that went no further
    caches[2].crop(25)
    assert [cache.size for cache in caches] == [25] * NUM_LAYERS
    for cache in caches:
        found, _ = append(cache, k[:, :, :2], k[:, :, :2])
        assert torch.equal(found[:, :, :27], torch.cat([k[:, :, :25], k[:, :, :2]], dim=2))
    caches[0].crop(1000)
    assert caches[0].size == 27


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("returns", ["full", "held"])
def test_other_dtypes(make: Make, dtype: torch.dtype, returns: str) -> None:
    cache = make(num_layers=1, returns=returns, dtype=dtype)[0]
    k = states(7).to(dtype)
    keys, values = append(cache, k, k)
    for found in (keys, values):
        assert found.dtype == dtype
        assert torch.equal(found[:, :, :7].float(), k.float())


# -- as a module ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("returns", ["full", "held"])
def test_state_dict_and_moves_leave_it_as_it_is(make: Make, returns: str) -> None:
    model = make_decoder(LENGTH)
    names = set(model.state_dict())
    model.use(make(returns=returns))
    generate(model, prompts(2, 9, "cpu"), 3)
    assert set(model.state_dict()) == names
    model.load_state_dict(model.state_dict())
    cache = model.blocks[0].attention.cache
    assert [*cache.parameters(), *cache.buffers()] == []
    model.to(torch.float64).eval()
    assert cache.size == 11
    assert cache.k_cache.dtype == torch.float32
    assert "11 tokens of 2 sequences" in repr(model)


@pytest.mark.parametrize("returns", ["full", "held"])
@pytest.mark.parametrize("kind", KINDS)
def test_deepcopy_goes_on_by_itself(make: Make, kind: type[Cache], returns: str) -> None:
    model, prompt = make_decoder(LENGTH), prompts(2, 9, "cpu")
    model.use(make(kind, returns=returns), appends=kind is TorchtuneKVCache)
    with torch.no_grad():
        model(prompt, torch.arange(9))
        twin = copy.deepcopy(model)
        caches, twins = ([block.attention.cache for block in of.blocks] for of in (model, twin))
        assert [cache.size for cache in twins] == [9] * NUM_LAYERS
        assert len({id(cache._layers) for cache in twins}) == 1  # they share memory again
        next_tokens, place = torch.tensor([[3], [4]]), torch.tensor([9])
        expected = model(next_tokens, place)
        model(torch.tensor([[5], [6]]), torch.tensor([10]))
        assert torch.equal(twin(next_tokens, place), expected)
        assert (caches[0].size, twins[0].size) == (11, 10)
    twins[0].close()
    assert caches[0].size == 11


def test_deepcopy_of_an_empty_and_of_a_closed_one(make: Make) -> None:
    cache = make(num_layers=1)[0]
    twin = copy.deepcopy(cache)
    append(twin, states(2), states(2))
    assert (cache.size, twin.size) == (0, 2)
    twin.close()
    with pytest.raises(vt.ClosedError):
        append(copy.deepcopy(twin), states(2), states(2))


def test_pickled_when_empty_only() -> None:
    cache = KVCache(2, LENGTH, *SHAPE, torch.float32)
    append(cache, states(2), states(2))
    with pytest.raises(vt.VTensorError, match=r"reset\(\) it first"):
        pickle.dumps(cache)
    cache.reset()
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    append(again, states(3), states(3))
    assert (cache.size, again.size) == (0, 3)
    cache.close()
    again.close()


def test_attributes_of_torchtunes(make: Make) -> None:
    cache = make(TorchtuneKVCache, num_layers=1)[0]
    k, v = states(6), states(6)
    append(cache, k, v)
    assert (cache.size, cache.batch_size) == (6, 4)
    assert cache.cache_pos[0] == 6
    assert len(cache.cache_pos) == LENGTH
    assert torch.equal(cache.k_cache[:, :, :6], k)
    assert torch.equal(cache.v_cache[:, :, :6], v)
    named = TorchtuneKVCache(batch_size=2, max_seq_len=8, num_kv_heads=1, head_dim=4, dtype=torch.float32)
    assert named.k_cache.shape == (2, 1, 8, 4)
    named.close()


@pytest.mark.gpu
@pytest.mark.parametrize("returns", ["full", "held"])
def test_goes_to_another_device_when_it_is_empty(make_pool: Callable[..., PagePool], gpu: str, returns: str) -> None:
    cache = KVCache(2, LENGTH, *SHAPE, torch.float32, returns=returns)
    append(cache, states(2), states(2))
    with pytest.raises(vt.RequestError, match="k lies on cuda:0"):
        append(cache, states(2, device=gpu), states(2, device=gpu))
    cache.reset()
    keys, _ = append(cache, states(2, device=gpu), states(2, device=gpu))
    assert keys.device == torch.device(gpu)
    del keys
    cache.close()


@pytest.mark.gpu
def test_held_never_waits_for_the_device(gpu: str) -> None:
    caches = KVCache.for_layers(NUM_LAYERS, 4, LENGTH, *SHAPE, torch.float32, returns="held")
    k, q = states(3, device=gpu), torch.randn(2, 4, 3, HEAD_DIM, device=gpu)
    places = [torch.arange(start, start + 3, device=gpu) for start in range(0, 30, 3)]
    for cache in caches:  # compiles
        cache.update(places[0], k, k)
        cache.attend(q)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for place in places[1:]:
            for cache in caches:
                cache.update(place, k, k)
                cache.attend(q)
        caches[0].crop(10)
        caches[0].reset()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    caches[0].close()


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 8, 1, 4), "batch_size=0"),
        ((1, -1, 1, 4), "max_seq_len=-1"),
        ((1, 8, 1.5, 4), "num_kv_heads=1.5"),
        ((1, 8, 1, True), "head_dim=True"),
        ((1, 8, 1, 4, torch.int8), "dtype=torch.int8"),
    ],
)
def test_bad_options(kind: type[Cache], arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        kind(*arguments)


def test_more_bad_options() -> None:
    with pytest.raises(ValueError, match="returns='views'"):
        KVCache(1, 8, 1, 4, returns="views")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_layers=0"):
        KVCache.for_layers(0, 1, 8, 1, 4)


@pytest.mark.parametrize("returns", ["full", "held"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(make: Make, kind: type[Cache], returns: str) -> None:
    cache = make(kind, num_layers=1, returns=returns)[0]
    k = states(5)
    append(cache, k, k)
    for bad, message in [
        ((states(LENGTH), states(LENGTH)), "197 tokens exceed max_seq_len=192"),
        ((states(1, batch=5), states(1, batch=5)), "5 sequences, which must be 1 to max_batch_size=4"),
        ((states(1, batch=0), states(1, batch=0)), "0 sequences"),
        ((states(1, batch=3), states(1, batch=3)), "k is for 3 sequences, the cache holds 2"),
        ((k[:, :1], k[:, :1]), r"k has shape \[2, 1, 5, 32\].*num_kv_heads=2"),
        ((k, k[..., :8]), r"v has shape \[2, 2, 5, 8\].*head_dim=32"),
        ((k[0], k[0]), "k has shape"),
        ((k, k[:, :, :3]), r"v is \[2, 2, 3, 32\]"),
        ((k, k.half()), r"v has dtype torch.float16.*dtype=torch.float32"),
        ((k.clone().requires_grad_(), k), "k needs gradients"),
    ]:
        with pytest.raises(vt.RequestError, match=message):
            append(cache, *bad) if bad[0].dim() == 4 else cache._append(*bad)
        assert cache.size == 5
    with pytest.raises(vt.RequestError, match="num_tokens=-1"):
        cache.crop(-1)
    with pytest.raises(vt.RequestError, match="q has shape"):
        cache.attend(torch.randn(3, 4, 1, HEAD_DIM))


def test_positions_that_are_not_the_next_ones(make: Make) -> None:
    cache, k = make(num_layers=1)[0], states(3)
    with pytest.raises(vt.RequestError, match=r"input_pos has shape \[2\]; it must be \[3\]"):
        cache.update(torch.arange(2), k, k)
    cache.update(torch.arange(3, dtype=torch.int32), k, k)
    with pytest.raises(vt.RequestError, match=r"input_pos goes from 0 to 2.*at 3.*reset\(\) or crop"):
        cache.update(torch.arange(3), k, k)
    assert cache.size == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("returns", ["full", "held"])
def test_nothing_goes_on_after_close(make: Make, kind: type[Cache], returns: str) -> None:
    caches = make(kind, returns=returns)
    with pytest.raises(vt.RequestError, match="holds no tokens"):
        caches[0].attend(torch.randn(2, 4, 1, HEAD_DIM))
    append(caches[0], states(2), states(2))
    for _ in range(2):
        caches[1].close()
    assert "closed" in repr(caches[0])
    for call in (
        lambda: append(caches[0], states(2), states(2)),
        lambda: caches[0].attend(torch.randn(2, 4, 1, HEAD_DIM)),
        lambda: caches[0].reset(),
        lambda: caches[0].crop(0),
        lambda: caches[0].k_cache,
    ):
        with pytest.raises(vt.ClosedError, match="KVCache was closed"):
            call()


def test_nothing_is_left_behind(nothing_left_behind: None) -> None:
    for returns in ("full", "held"):
        for closes in (True, False):
            cache = KVCache(2, LENGTH, *SHAPE, torch.float32, returns=returns)
            append(cache, states(20), states(20))
            if closes:
                cache.close()
            del cache
