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
# # Attention kernels
#
# A virtual KV cache is a tensor [slots, tokens, heads, elements] with strides, and memory below the tokens held. So a
# kernel for it is a kernel for any tensor: it gets pointers and strides, and knows nothing of pages. This notebook runs
# ours, then those of others, then some of its own. What it says is asserted in the same cell.
#
# Without a GPU Triton's interpreter runs the kernels, which shows what they compute and not how fast. It is told before
# Triton is imported. With a GPU the same cells run there.

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import difflib
import inspect

import matplotlib.pyplot as plt
import numpy as np
import triton
import triton.language as tl

import vtensor as vt
from vtensor.triton_kernels import append_kv, decode_attention, prefill_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
Q_HEADS, KV_HEADS, D = 4, 2, 64
torch.manual_seed(0)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float16, device=device)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def attend(q, k, v, seq_lens, slots):
    """One token of each request, in plain torch and float32: what the kernels must agree with."""
    out = torch.zeros_like(q)
    for b, (length, slot) in enumerate(zip(seq_lens.tolist(), slots.tolist(), strict=True)):
        keys, values = (x[slot, :length].float().repeat_interleave(Q_HEADS // KV_HEADS, 1) for x in (k, v))
        weights = torch.einsum("hd,thd->ht", q[b].float(), keys).mul(D**-0.5).softmax(-1)
        out[b] = torch.einsum("ht,thd->hd", weights, values)
    return out


def check(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


# %% [markdown]
# ## A cache, and what is in it
#
# Four slots, each with addresses for 65,536 tokens. Kernels take the *plain* views of a layer. Look-ahead and the spare
# slot, which map memory in the background, are off, so that what follows shows what was asked for and no more.

# %%
config = vt.KVCacheConfig(
    num_layers=2,
    num_kv_heads=KV_HEADS,
    head_dim=D,
    max_batch_size=4,
    max_context_tokens=65_536,
    dtype=torch.float16,
)
cache = vt.KVCacheManager(config, device=device, lookahead_tokens=0, eager_slot=False)
k, v = cache.layer(0, plain=True)
page_group = cache.config.tokens_per_page_group
print(f"K of layer 0: {list(k.shape)}, strides {k.stride()}; {page_group:,} tokens in a page group")
assert k.stride() == v.stride()

# %% [markdown]
# Three requests with prompts of different lengths, the first of exactly one page group. `step` commits memory for them,
# `append_kv` puts their keys and values where they go, all in one launch: rows `starts[b]` to `starts[b + 1]` are the
# last ones of the `seq_lens[b]` tokens in slot `slots[b]`.

# %%
prompts = [page_group, page_group // 2 + 3, 3 * page_group - 4]
lengths = np.zeros(config.max_batch_size, np.int64)  # by slot, for `step`
requests = [cache.alloc_reqid(prompt_tokens=tokens) for tokens in prompts]
lengths[requests] = prompts
assert cache.step(lengths)

starts = int32(np.cumsum([0, *prompts]).tolist())
seq_lens, slots = int32(prompts), int32(requests)
new_k, new_v = random(sum(prompts), KV_HEADS, D), random(sum(prompts), KV_HEADS, D)
append_kv(new_k, new_v, k, v, seq_lens, slots, starts)
for b, slot in enumerate(requests):
    assert torch.equal(k[slot, : prompts[b]], new_k[starts[b] : starts[b + 1]])


def show_residency():
    """Draw which page groups of the first five of each slot have memory."""
    residency = cache.layer(0)[0].residency()
    per_slot = k.stride(0) * k.element_size() // cache.pool.page_group_bytes
    field = [residency[slot * per_slot :][:5] for slot in range(config.max_batch_size)]
    axis = plt.figure(figsize=(6, 1.6)).subplots()
    axis.imshow(field, aspect="auto", cmap="Greens", vmin=0, vmax=1.4, extent=(0, 5 * page_group, 3.5, -0.5))
    for slot, tokens in enumerate(lengths):
        axis.plot([tokens] * 2, [slot - 0.5, slot + 0.5], color="black")
    axis.set(xlabel="token", ylabel="slot", title=f"memory (green) and length (line), of {per_slot} page groups a slot")
    axis.title.set_fontsize(9)
    plt.show()
    return np.sum(field, axis=1).tolist()


assert show_residency() == [1, 1, 3, 0]

# %% [markdown]
# Decode: one query a request.

# %%
q = random(3, Q_HEADS, D)
out = decode_attention(q, k, v, seq_lens, slots)
check(out, attend(q, k, v, seq_lens, slots))

# %% [markdown]
# The requests may be in any slots, in any order. A slot of -1 is padding, as in a batch that a CUDA graph has rounded
# up: nothing is read, and the output is 0.

# %%
order = [2, 0, 1]
mixed = decode_attention(random(4, Q_HEADS, D), k, v, int32([1, *prompts]), int32([-1, *requests]))
assert not mixed[0].any()
turned = decode_attention(q[order], k, v, seq_lens[order], slots[order])
check(turned, out[order])

# %% [markdown]
# Prefill takes the queries of all prompts, one after another, as `append_kv` takes the keys. The last token of a prompt
# sees all of it, as in decode.

# %%
prompt_q = random(sum(prompts), Q_HEADS, D)
last = (starts[1:] - 1).long()
prompt_q[last] = q
check(prefill_attention(prompt_q, k, v, starts, seq_lens, slots)[last], out)

# %% [markdown]
# ## What is read
#
# The tokens of a request, and nothing behind them. Behind the first request, whose tokens fill its page group, no
# memory is mapped. The *virtual* view of the layer says so in an error; a kernel, which has the plain view, would end
# the process there. It has just run.

# %%
virtual_k, _ = cache.layer(0)
try:
    virtual_k[requests[0], prompts[0]].sum()
except vt.UnmappedAccessError as error:
    print(error)
else:
    raise AssertionError("there must be no memory behind the first request")

# %% [markdown]
# The page groups of the others have room for more tokens. What is there does not matter, even if it is not a number.

# %%
for x in (k, v):
    x[requests[1], prompts[1] : page_group] = torch.nan
    x[requests[2], prompts[2] : 3 * page_group] = torch.nan
assert torch.equal(decode_attention(q, k, v, seq_lens, slots), out)

# %% [markdown]
# ## Growing
#
# From step to step the lengths change, and nothing else does: same tensors, same addresses, same arguments. That is
# what a captured CUDA graph needs. Six tokens take the first and the third request into a new page group.

# %%
arguments = (q, k, v, seq_lens, slots)
addresses = [x.data_ptr() for x in arguments]
before = cache.stats().committed_bytes
for _ in range(6):
    lengths[requests] += 1
    assert cache.step(lengths)
    seq_lens += 1  # in place
    q.copy_(random(3, Q_HEADS, D))
    append_kv(random(3, KV_HEADS, D), random(3, KV_HEADS, D), k, v, seq_lens, slots)
    out = decode_attention(*arguments)
    check(out, attend(*arguments))
assert [x.data_ptr() for x in arguments] == addresses
assert cache.stats().committed_bytes > before
assert show_residency() == [2, 1, 4, 0]

# %% [markdown]
# ## Any kernel
#
# `vt.attention` is one call for every kernel that is there. The cache is the same, and nothing is copied or gathered. A
# kernel that is not there, or cannot do what is asked, is an error that says why, and which can.
#
# (`"flash-attn-3"` is left out here: it reads whole tiles, up to 192 tokens behind a sequence. A cache for it is made
# with `KVCacheConfig(overread_tokens=192)`, and then there is memory. `"auto"` takes it only if told so.)

# %%
backends = ("triton", "sdpa-flash", "cudnn", "flash-attn-2", "flashinfer", "flex", "reference")
ran = []
for backend in backends:
    try:
        theirs = vt.attention(*arguments, backend=backend)
    except ValueError as error:
        print(f"{backend:13}{error}")
        continue
    check(theirs, out)
    ran.append(backend)
    print(f"{backend:13}differs from ours by {(theirs - out).abs().max():.1e} at most")
assert {"triton", "sdpa-flash", "reference"} <= set(ran)

# %% [markdown]
# Some kernels can do a plain call and not every option.

# %%
try:
    vt.attention(*arguments, softcap=20.0, backend="sdpa-flash")
except ValueError as error:
    print(error)
else:
    raise AssertionError("it has no softcap")
options = dict(softcap=20.0, window=50, sinks=random(Q_HEADS))
check(vt.attention(*arguments, **options), vt.attention(*arguments, **options, backend="reference"))

# %% [markdown]
# ## Your own kernel
#
# Decode in 25 lines. A program has one head of one request, and goes through its tokens with a running softmax. Of the
# cache it knows where it begins and three strides.


# %%
@triton.jit
def contiguous_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, seq_lens_ptr, slots_ptr,
    stride_slot, stride_token, stride_head, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    length = tl.load(seq_lens_ptr + request)
    dim = tl.arange(0, D)
    q = tl.load(q_ptr + (request * num_heads + head) * D + dim).to(tl.float32) * scale
    start = tl.load(slots_ptr + request).to(tl.int64) * stride_slot + head // GROUP * stride_head
    top, total, acc = -float("inf"), 0.0, tl.zeros([D], tl.float32)
    for first in range(0, length, BLOCK):
        token = first + tl.arange(0, BLOCK)
        is_token = token < length
        row = start + token.to(tl.int64) * stride_token
        keys = tl.load(k_ptr + row[:, None] + dim, mask=is_token[:, None], other=0).to(tl.float32)
        values = tl.load(v_ptr + row[:, None] + dim, mask=is_token[:, None], other=0).to(tl.float32)
        scores = tl.where(is_token, tl.sum(keys * q, 1), -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        weights, shrink = tl.exp(scores - new_top), tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
        top = new_top
    tl.store(out_ptr + (request * num_heads + head) * D + dim, acc / total)


mine = torch.full_like(q, torch.nan)
contiguous_kernel[3, Q_HEADS](
    q, k, v, mine, seq_lens, slots, *k.stride()[:3], D**-0.5, GROUP=Q_HEADS // KV_HEADS, D=D, BLOCK=32
)
check(mine, out)

# %% [markdown]
# It is for requests with a token at least, and a program goes through all tokens of its head by itself, once for each
# query head; ours does better at both. (`token` becomes an int64 before it is multiplied: a token's row in a slice of
# many layers is so long that 65,536 of them pass 2^31.)
#
# ## The same with pages
#
# A paged cache has the tokens in pages of 16, anywhere, and a table that says where. To compare, the same tokens are
# put into such pages in a random order.

# %%
PAGE = 16
counts = [-(-length // PAGE) for length in seq_lens.tolist()]  # pages of each request
places = torch.randperm(sum(counts)).tolist()
table = torch.full((3, max(counts)), -1, dtype=torch.int32)
k_pages, v_pages = (torch.full((sum(counts), PAGE, KV_HEADS, D), torch.nan).to(q) for _ in range(2))
for b, (slot, length) in enumerate(zip(requests, seq_lens.tolist(), strict=True)):
    for number in range(counts[b]):
        table[b, number] = place = places.pop()
        end = min((number + 1) * PAGE, length)
        for pages, x in ((k_pages, k), (v_pages, v)):
            pages[place, : end - number * PAGE] = x[slot, number * PAGE : end]
table = table.to(device)


@triton.jit
def paged_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, seq_lens_ptr, table_ptr, stride_table,
    stride_page, stride_token, stride_head, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    request, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    length = tl.load(seq_lens_ptr + request)
    dim = tl.arange(0, D)
    q = tl.load(q_ptr + (request * num_heads + head) * D + dim).to(tl.float32) * scale
    table_row = table_ptr + request.to(tl.int64) * stride_table
    top, total, acc = -float("inf"), 0.0, tl.zeros([D], tl.float32)
    for first in range(0, length, BLOCK):
        token = first + tl.arange(0, BLOCK)
        is_token = token < length
        page = tl.load(table_row + token // PAGE, mask=is_token, other=0).to(tl.int64)
        row = page * stride_page + token % PAGE * stride_token + head // GROUP * stride_head
        keys = tl.load(k_ptr + row[:, None] + dim, mask=is_token[:, None], other=0).to(tl.float32)
        values = tl.load(v_ptr + row[:, None] + dim, mask=is_token[:, None], other=0).to(tl.float32)
        scores = tl.where(is_token, tl.sum(keys * q, 1), -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        weights, shrink = tl.exp(scores - new_top), tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
        top = new_top
    tl.store(out_ptr + (request * num_heads + head) * D + dim, acc / total)


paged = torch.full_like(q, torch.nan)
paged_kernel[3, Q_HEADS](
    q, k_pages, v_pages, paged, seq_lens, table, table.stride(0), *k_pages.stride()[:3], D**-0.5,
    GROUP=Q_HEADS // KV_HEADS, D=D, BLOCK=32, PAGE=PAGE,
)  # fmt: skip
check(paged, mine)

# %% [markdown]
# What that adds to the kernel: the table and its stride, the size of a page as a constant to compile for, and in the
# inner loop a load on which the loads of keys and values depend, a division and a remainder.

# %%
lines = [inspect.getsource(kernel.fn).splitlines() for kernel in (contiguous_kernel, paged_kernel)]
for line in difflib.unified_diff(*lines, n=0, lineterm=""):
    if not line.startswith(("---", "+++", "@@", "-def", "+def")):
        print(line)

# %% [markdown]
# Outside of the kernel it adds the table itself, which the host must extend when a request comes to a new page, and
# bring to the device. A kernel that was written without a table, as torch's own, cannot read such a cache at all.
#
# ## A kernel that no library has
#
# Attention kernels do not give the weights. With the log-sum-exp values that ours returns, a small kernel can: here, of
# each block of 8 tokens the sum, which says where a head looks. (Methods that keep or fetch only the tokens that matter
# begin with such a score.)


# %%
@triton.jit
def block_weights_kernel(
    q_ptr, k_ptr, lse_ptr, sums_ptr, seq_lens_ptr, slots_ptr, stride_slot, stride_token, stride_head, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = request * tl.num_programs(1) + head
    dim, token = tl.arange(0, D), block * BLOCK + tl.arange(0, BLOCK)
    is_token = token < tl.load(seq_lens_ptr + request)
    start = tl.load(slots_ptr + request).to(tl.int64) * stride_slot + head // GROUP * stride_head
    row = start + token.to(tl.int64) * stride_token
    keys = tl.load(k_ptr + row[:, None] + dim, mask=is_token[:, None], other=0).to(tl.float32)
    q = tl.load(q_ptr + line * D + dim).to(tl.float32) * scale
    weights = tl.exp(tl.sum(keys * q, 1) - tl.load(lse_ptr + line))
    tl.store(sums_ptr + line * tl.num_programs(2) + block, tl.sum(tl.where(is_token, weights, 0.0), 0))


BLOCK = 8
num_blocks = -(-int(lengths.max()) // BLOCK)
_, lse = decode_attention(*arguments, return_lse=True)
sums = torch.full((3, Q_HEADS, num_blocks), torch.nan, device=device)
block_weights_kernel[3, Q_HEADS, num_blocks](
    q, k, lse, sums, seq_lens, slots, *k.stride()[:3], D**-0.5, GROUP=Q_HEADS // KV_HEADS, D=D, BLOCK=BLOCK
)
check(sums.sum(-1), torch.ones(3, Q_HEADS, device=device))

fig, axis = plt.subplots(figsize=(8, 2.6))
field = axis.imshow(sums.flatten(0, 1).cpu(), aspect="auto", cmap="Greens", extent=(0, num_blocks * BLOCK, 11.5, -0.5))
for b in range(3):
    axis.plot([int(seq_lens[b])] * 2, [4 * b - 0.5, 4 * b + 3.5], color="black")
axis.set(xlabel="token", ylabel="head of a request", yticks=range(0, 12, 4), title="where each head looks")
fig.colorbar(field, label="weight of 8 tokens")
plt.show()

# %% [markdown]
# ## How decode splits its work
#
# The kernel above gives each head of each request to one program, so a long request is the work of few. Ours cuts the
# tokens into tiles, lays the tiles of all requests one after another, and gives each program an equal part, wherever it
# begins and ends; what is in several programs is merged. The parts follow from the lengths, which each program reads on
# the device, so no argument of the launch changes. Here for one head, by that rule; tiles are counted, not timed.

# %%
TILE, PROGRAMS = 64, 8
ragged = [6400, 100, 1400, 500, 2000, 64, 700, 300]  # tokens
tiles = [-(-length // TILE) for length in ragged]
ends = np.cumsum(tiles)
total = int(ends[-1])
bounds = [total * program // PROGRAMS for program in range(PROGRAMS + 1)]  # program i: tiles bounds[i] to bounds[i + 1]

fig, axes = plt.subplots(1, 2, figsize=(9, 2.8), sharex=True, sharey=True, layout="constrained")
for request, (end, count) in enumerate(zip(ends.tolist(), tiles, strict=True)):
    color = plt.cm.tab10(request)
    axes[0].barh(request, count, color=color, edgecolor="white")
    for program in range(PROGRAMS):
        first, last = max(end - count, bounds[program]), min(end, bounds[program + 1])
        if first < last:
            axes[1].barh(program, last - first, left=first - bounds[program], color=color, edgecolor="white")
axes[0].set(title="a program for each request", xlabel="tiles", ylabel="program")
axes[1].set(title="equal parts (a color is a request)", xlabel="tiles")
axes[0].invert_yaxis()
plt.show()
most = int(np.diff(bounds).max())
print(f"{total} tiles: the longest program has {max(tiles)} on the left and {most} on the right")
assert most == -(-total // PROGRAMS)

# %%
cache.close()
