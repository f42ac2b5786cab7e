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
# # Two models in turns
#
# A GPU that holds one model at a time, and two that take turns: the one that is not needed sleeps. Its memory goes to
# the host, its tensors keep their addresses, and when it wakes it answers as before, token for token. What it says is
# asserted in the same cell.
#
# torch has memory pools on CUDA only. On a CPU the same cells run with torch's own memory (`on_unsupported="torch"`),
# and the memory that they show is none.

# %%
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vtensor as vt

device = "cuda" if torch.cuda.is_available() else "cpu"
MIB = 1 << 20


def load(seed):
    """A small model with random weights, in the place of one that would be read from a disk."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=2000,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(device).eval()


def answer(model):
    """Twenty tokens."""
    prompt = torch.arange(1, 9, device=device)[None]
    return model.generate(prompt, max_new_tokens=20, do_sample=False)[0].tolist()


def show(*tags):
    """Memory by tag."""
    for tag in tags:
        stats = vt.memory_stats(tag)
        print(
            f"{tag}: {stats.reserved_bytes / MIB:.0f} MiB in {stats.num_segments} segments, "
            f"{stats.committed_bytes / MIB:.0f} of device memory, {stats.offloaded_bytes / MIB:.0f} on the host"
        )


# %% [markdown]
# What is allocated in the block belongs to the tag: the weights. What the model makes later when it answers does not,
# as that is outside.

# %%
with vt.use_allocator(tag="translator", on_unsupported="torch"):
    translator = load(1)
translation = answer(translator)
addresses = [parameter.data_ptr() for parameter in translator.parameters()]
show("translator")

# %% [markdown]
# Asleep, the weights take no memory of the device. Nothing may use them now; another model can be loaded where they
# were.

# %%
freed = vt.sleep("translator")
with vt.use_allocator(tag="writer", on_unsupported="torch"):
    writer = load(2)
text = answer(writer)
show("translator", "writer")
assert text != translation
assert vt.memory_stats("translator").committed_bytes == 0

# %% [markdown]
# The other way round. The addresses are the ones they were, so whatever knows them goes on: optimizers, captured CUDA
# graphs, kernels that were given pointers.

# %%
vt.sleep("writer")
assert vt.wake("translator") == freed
assert [parameter.data_ptr() for parameter in translator.parameters()] == addresses
assert answer(translator) == translation
show("translator", "writer")

# %% [markdown]
# Weights that can be had again need no copy: `offload="discard"` drops them, and they are zeros when they wake.

# %%
vt.sleep("translator", offload="discard")
vt.wake("translator")
if device == "cuda":
    assert not any(parameter.any() for parameter in translator.parameters())
vt.wake("writer")
assert answer(writer) == text

# %% [markdown]
# What is freed goes to torch's cache first, and back to the device with `vt.trim`.

# %%
del translator
print(f"{vt.trim('translator') / MIB:.0f} MiB went back")
show("translator")
