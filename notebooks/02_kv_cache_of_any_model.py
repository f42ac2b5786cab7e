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
# # The KV cache of any model
#
# A model of Hugging Face transformers keeps keys and values of all tokens so far. `DynamicCache` copies them to a
# larger place for each token; `StaticCache` takes the memory of the longest text at once. `VirtualCache` has the
# addresses of the longest text, and the memory of the tokens that are there. The three answer alike, token for token.
# What this notebook says is asserted in the same cell.

# %%
import warnings

import matplotlib.pyplot as plt
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, StaticCache

from vtensor.integrations.transformers import DecodeStep, VirtualCache, install, uninstall

warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")  # the name that all releases know
device = "cuda" if torch.cuda.is_available() else "cpu"
MIB = 1 << 20
LONGEST = 8192  # tokens that a text may have

torch.manual_seed(0)
shape = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": LONGEST,
    "eos_token_id": None,
    "pad_token_id": 0,
}
model = LlamaForCausalLM(LlamaConfig(**shape)).to(device).eval()
prompt = torch.randint(1, 1000, (2, 100), device=device)

# %% [markdown]
# ## Three caches
#
# Two texts, a prompt of 100 tokens each, and 400 more. What each cache has in memory is noted after every token.


# %%
@torch.no_grad()
def generate(cache, bytes_of, num_tokens=400):
    """The most likely tokens, and the cache's bytes after each of them."""
    logits, found, held = model(prompt, past_key_values=cache).logits, [], []
    for _ in range(num_tokens):
        held.append(bytes_of(cache) / MIB)
        found.append(logits[:, -1].argmax(-1))
        logits = model(found[-1][:, None], past_key_values=cache).logits
    return torch.stack(found, 1), held


def bytes_of_tensors(cache):
    """Of DynamicCache and StaticCache: each layer has two tensors of its own."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


memory = {}
expected, memory["DynamicCache"] = generate(DynamicCache(config=model.config), bytes_of_tensors)
static = StaticCache(config=model.config, max_cache_len=LONGEST)
found, memory["StaticCache"] = generate(static, bytes_of_tensors)
assert torch.equal(found, expected)

with VirtualCache.for_model(model, expected_context_tokens=512) as cache:
    found, memory["VirtualCache"] = generate(cache, lambda cache: cache.manager.stats().committed_bytes)
    assert torch.equal(found, expected)
    stats = cache.manager.stats()
    print(
        f"{stats.reserved_bytes / MIB:.0f} MiB of addresses, {stats.committed_bytes / MIB:.1f} MiB of memory, "
        f"of which {stats.used_bytes / MIB:.1f} MiB hold tokens"
    )
    assert stats.used_bytes <= stats.committed_bytes < memory["StaticCache"][-1] * MIB

# %%
fig, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for name, held in memory.items():
    axis.plot(range(len(held)), held, label=name)
axis.set(xlabel="new tokens", ylabel="MiB (log)", yscale="log", title="Memory of the cache")
axis.legend()
plt.show()

# %% [markdown]
# DynamicCache holds no more than it must, but it copies all of it for each token. A VirtualCache takes whole page
# groups (64 KiB here, 2 MiB on a GPU), and copies nothing:

# %%
num_new = 400
bytes_per_token = memory["DynamicCache"][0] * MIB / 100  # of both texts
copied = sum(bytes_per_token * (100 + i) for i in range(num_new))
print(f"DynamicCache copied {copied / MIB:.0f} MiB to add {bytes_per_token * num_new / MIB:.1f}")
assert copied > 100 * bytes_per_token * num_new

# %% [markdown]
# ## Our kernels as its attention
#
# One line. The kernels read exactly the tokens that are there, from the cache itself, and expand no heads. (On a CPU
# they are computed in plain torch.)

# %%
model.set_attn_implementation("vtensor")
with VirtualCache.for_model(model) as cache:
    found, _ = generate(cache, lambda cache: 0, num_tokens=50)
print((found == expected[:, :50]).float().mean().item())
assert torch.equal(found, expected[:, :50])

# %% [markdown]
# ## A step that is captured once
#
# On a GPU the forward of one token becomes one CUDA graph: the host sees to it that there is memory, and replays it.
# The same graph serves whatever length the texts grow to, as nothing in it depends on that.

# %%
with torch.no_grad(), VirtualCache.for_model(model) as cache:
    logits = model(prompt, past_key_values=cache).logits
    step, found = DecodeStep(model, cache), []
    for _ in range(50):
        found.append(logits[:, -1].argmax(-1))
        logits = step(found[-1])
    assert torch.equal(torch.stack(found, 1), expected[:, :50])
    print(f"{cache.get_seq_length()} tokens")
model.set_attn_implementation("sdpa")

# %% [markdown]
# ## Every `generate()` of the process
#
# `install()` puts a VirtualCache wherever transformers would make a DynamicCache: also in code that is not yours.

# %%
install()
outputs = model.generate(prompt, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
print(type(outputs.past_key_values).__name__)
assert isinstance(outputs.past_key_values, VirtualCache)
assert torch.equal(outputs.sequences[:, 100:], expected[:, :20])
outputs.past_key_values.close()
uninstall()

# %% [markdown]
# ## Sliding windows
#
# Layers that see only the last tokens give the memory of earlier ones back: it stops growing.

# %%
windowed = MistralForCausalLM(MistralConfig(**shape, sliding_window=64)).to(device).eval()
held = []
with torch.no_grad(), VirtualCache.for_model(windowed, rollback_tokens=0) as cache:
    logits = windowed(prompt[:1], past_key_values=cache).logits
    for _ in range(1500):
        logits = windowed(logits[:, -1:].argmax(-1), past_key_values=cache).logits
        held.append(cache.manager.stats().committed_bytes / MIB)
print(f"{held[99]:.1f} MiB after 100 tokens, {held[-1]:.1f} MiB after 1,500")
if device == "cpu":  # with page groups of 64 KiB; those of 2 MiB hold more tokens than this
    assert max(held[750:]) <= max(held[:750])
