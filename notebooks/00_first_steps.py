# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # First steps
#
# A virtual tensor has all of its addresses from the start and memory only where it was touched. This notebook reserves
# one, commits a little of it, looks at what happened, and then lets a language model keep its KV cache that way.
# It runs on a CPU; with a GPU, set `device = "cuda"` and the same cells run there.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import vtensor as vt

device = "cpu"

# %% [markdown]
# ## Reserve
#
# One tebibyte of addresses. Nothing is allocated, so it takes no time, and no memory.

# %%
x = vt.empty(1 << 20, 1 << 18, dtype=torch.float32, device=device)
x

# %% [markdown]
# ## Commit
#
# An operation that touches a place first gets memory for it, in whole *page groups* (64 KiB on the host, 2 MiB on a
# GPU).
# What was never written reads as zero.

# %%
x[1000, :8] = torch.arange(8.0)
x[-1, -4:] = 7
print(x[1000, :10].tolist())
print(f"{x.resident_bytes:,} of {x.reserved_bytes:,} bytes have memory")

# %% [markdown]
# A view is virtual too; the result of arithmetic is a plain tensor. Reading a view never reaches what has no memory.

# %%
row = x[1000, :8]
print(type(row).__name__, type(row + 1).__name__)
print((row + 1).tolist())

# %% [markdown]
# With `on_touch="raise"` nothing is committed behind your back: an access without memory is an error, not a crash.

# %%
strict = vt.empty(1 << 30, device=device, on_touch="raise")
try:
    strict[5] = 1
except vt.UnmappedAccessError as error:
    print(error)
strict.commit(1024)  # the first 1024 elements
strict[5] = 1
print(strict[:8].tolist())

# %% [markdown]
# ## Look
#
# Which page groups have memory? Write every third row of a small tensor and look.

# %%
small = vt.empty(48, 16_384, dtype=torch.float32, device=device)  # a row is 64 KiB
small[::3] = 1
residency = small.residency()

fig, axis = plt.subplots(figsize=(9, 1.2))
axis.imshow(residency[None, :], aspect="auto", cmap="Greens", vmin=0, vmax=1.4)
axis.set(yticks=[], xlabel="page group", title=f"{int(residency.sum())} of {len(residency)} page groups have memory")
plt.show()

# %% [markdown]
# ## A KV cache
#
# A cache is one such reservation: slots x tokens of addresses, with memory below the tokens held. The contract
# is the paper's: `alloc_reqid`, `step`, `free_reqid`.

# %%
config = vt.KVCacheConfig(
    num_layers=32, num_kv_heads=8, head_dim=128, max_batch_size=4, max_context_tokens=131_072, dtype=torch.bfloat16
)
with vt.KVCacheManager(config, device=device) as cache:
    reqid = cache.alloc_reqid(prompt_tokens=100)
    seq_lens = np.zeros(config.max_batch_size, np.int64)
    held, committed = [], []
    for tokens in range(100, 160):
        seq_lens[reqid] = tokens
        assert cache.step(seq_lens)
        held.append(tokens)
        committed.append(cache.stats().committed_bytes / 2**20)
    key, value = cache.layer(0)
    print(f"K of layer 0: {tuple(key.shape)}, strides {key.stride()}")
    print(f"reserved {cache.stats().reserved_bytes / 2**30:.0f} GiB, committed {committed[-1]:.1f} MiB")
    cache.free_reqid(reqid)

fig, axis = plt.subplots(figsize=(9, 3))
axis.step(held, committed, where="post", label="committed")
axis.plot(held, [tokens * config.bytes_per_token / 2**20 for tokens in held], "--", label="used by tokens")
axis.set(xlabel="tokens held", ylabel="MiB", title="Memory follows the tokens, one page group a slice at a time")
axis.legend()
plt.show()

# %% [markdown]
# ## Generate
#
# `VirtualCache` is such a cache for any Hugging Face decoder. Here a tiny model with random weights, so that nothing is
# downloaded: the tokens mean nothing, but they must equal those of transformers' own cache, from addresses that never
# move. `vtensor demo` does the same with a real model and real prompts.

# %%
from transformers import LlamaConfig, LlamaForCausalLM

from vtensor.integrations.transformers import VirtualCache

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=65_536,
    )
)
model = model.eval().to(device)
prompt = torch.randint(3, 256, (2, 20), device=device)
options = dict(max_new_tokens=60, do_sample=False, pad_token_id=0, eos_token_id=None, attention_mask=prompt != 0)

with VirtualCache.for_model(model) as cache:
    ours = model.generate(prompt, past_key_values=cache, **options)
    stats = cache.manager.stats()
    print(f"reserved {stats.reserved_bytes / 2**20:,.0f} MiB, committed {stats.committed_bytes / 2**20:.3f} MiB")

theirs = model.generate(prompt, **options)
assert torch.equal(ours, theirs)
print("the same tokens as DynamicCache:", ours[0, 20:32].tolist(), "...")
