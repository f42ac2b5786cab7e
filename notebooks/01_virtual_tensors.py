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
# # Virtual tensors
#
# What a virtual tensor does when it is made, written, read, viewed, saved, shrunk and grown, with pictures of where it
# has memory. What it says of memory and values is asserted in the same cell; times are measured where it runs. It runs
# on a CPU; with a GPU, set `device = "cuda"` and the same cells run there.

# %%
import copy
import io
import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import vtensor as vt

device = "cpu"

# %% [markdown]
# Memory comes in *page groups*: 64 KiB on the host, 2 MiB on a GPU. A tensor knows how many it spans, which gives
# their size. Sizes below are in rows of one page group, so that a picture has one field a row.

# %%
tiny = vt.empty(1, device=device)
page = tiny.reserved_bytes // len(tiny.residency())  # bytes
row = page // 4  # so many float32
print(f"a page group has {page // 1024:,} KiB")


def show(tensor, title="", lines=1):
    """Draw which page groups of a tensor have memory, in ascending order of addresses."""
    residency = tensor.residency().reshape(lines, -1)
    axis = plt.figure(figsize=(6, 0.5 if lines == 1 else 1.6)).subplots()
    axis.imshow(residency, aspect="auto", cmap="Greens", vmin=0, vmax=1.4)
    axis.set(yticks=[], title=f"{title}: {residency.sum()} of {residency.size} page groups have memory")
    axis.title.set_fontsize(9)
    axis.tick_params(labelsize=7)
    plt.show()


def microseconds(function, rounds=50):
    """The median time of a call, with the work that it gives to a GPU."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


# %% [markdown]
# ## Creation
#
# The functions are torch's, and so are their arguments. None takes memory, except `full` with a value other than zero.

# %%
x = vt.empty(16, row, device=device)
zeros = vt.zeros(1 << 20, 1 << 18, dtype=torch.bfloat16, device=device)
halves = vt.full((16, row), 0.5, device=device)
like = vt.empty_like(torch.ones(3, 5).t(), device=device)
apart = vt.empty_strided((4, row), (2 * row, 1), device=device)  # every second page group belongs to nobody
print(zeros)
assert x.resident_bytes == zeros.resident_bytes == like.resident_bytes == apart.resident_bytes == 0
assert halves.resident_bytes == halves.nbytes
assert like.stride() == torch.empty_like(torch.ones(3, 5).t()).stride()

# %% [markdown]
# An `out=` is filled in place, whether it is the tensor or a view of it.

# %%
torch.randn(2, row, out=x[2:4])
torch.mul(torch.ones(row, device=device), 3, out=x[8])
show(x, "rows 2, 3 and 8 were an out=")
assert np.flatnonzero(x.residency()).tolist() == [2, 3, 8]

# %% [markdown]
# `plain()` is the same memory as an ordinary tensor, which nobody watches. `as_virtual` watches it again.

# %%
plain = x[10:].plain()
again = vt.as_virtual(plain)
again[2] = 1  # row 12 of x
show(x, "and row 12, by as_virtual")
assert type(plain) is torch.Tensor
assert again.data_ptr() == x[10].data_ptr()
assert x[12, 0] == 1

# %% [markdown]
# ## Touch
#
# A write commits the page groups that it touches, and no others. What has no memory reads as zeros, and reading it
# commits nothing, however much it is: on a CPU it takes only the time of the reading, on a GPU also a mapping of
# zeros, once.

# %%
hole = vt.zeros(4096, row, device=device)
hole[7, :3] = 2
before = hole.resident_bytes
print(f"the sum over {hole.nbytes >> 20:,} MiB is {hole.sum():.0f}; {hole.resident_bytes:,} bytes have memory")
assert hole.resident_bytes == before == page

# %% [markdown]
# Strides, views and index tensors commit exactly what they name. Here a line has 24 page groups.

# %%
grid = vt.empty(16, 24 * row, device=device)
grid[::3, : 4 * row] = 1  # every third line, a block
grid[:, 8 * row] = 1  # one element of each line
grid.t()[10 * row : 14 * row, 7] = 1  # a view of a view
lines, columns = torch.tensor([1, 5, 13], device=device), torch.tensor([16, 19, 22], device=device) * row
grid[lines, columns] = 1  # three elements
mask = torch.zeros(16, dtype=torch.bool, device=device)
mask[14:] = True
grid[:, 18 * row : 20 * row][mask] = 1
show(grid, "a grid", lines=16)
assert grid.resident_bytes == (6 * 4 + 16 + 4 + 3 + 2 * 2) * page

# %% [markdown]
# (On a GPU an index tensor is read for that, which waits for the device. `with vt.unread_indices():` commits the whole
# view instead; and of memory that was committed whole nothing needs to be read.)
#
# An operation whose reach depends on values in another way may write anywhere in its view, so all of that view is
# committed: `masked_fill_` is one. Give it the part that is meant.

# %%
filled = vt.empty(16, row, device=device)
filled[:4].masked_fill_(mask[12:, None], 1)  # writes two rows
assert filled.residency().tolist() == [True] * 4 + [False] * 12

# %% [markdown]
# With `on_touch="raise"` neither a write nor a read goes where no memory is; `commit` says where it shall be.

# %%
strict = vt.empty(16, row, device=device, on_touch="raise")
strict.commit(slice(2, 5))
strict[2:5] = 1
for access in (lambda: strict[5].fill_(1), lambda: strict[4:6].sum()):
    try:
        access()
    except vt.UnmappedAccessError as error:
        print(error)
    else:
        raise AssertionError("an access without memory must be an error")
show(strict, "committed by hand")

# %% [markdown]
# Zeros are not read for ever: of one tensor an operation may read 1 TiB of them. The error says how to go on, which is
# to read the part that was written.

# %%
huge = vt.empty((2 << 40) // page, row, device=device)  # 2 TiB
huge[123_456] = 1
huge[-1, :10] = 2
try:
    huge.sum()
except vt.UnmappedAccessError as error:
    print(error)
else:
    raise AssertionError("2 TiB of zeros must not be read")

held = torch.from_numpy(np.flatnonzero(huge.residency())).to(device)  # a row is a page group
print(f"rows {held.tolist()} have memory; their sum is {huge[held].sum():.0f}")
assert huge[held].sum() == row + 20
del huge

# %% [markdown]
# ## As any tensor
#
# A view is virtual, the result of arithmetic is plain. A `repr` shows values only where all of them have memory, so
# that looking at a tensor never changes it.

# %%
x = vt.zeros(16, row, device=device)
x[3, :4] = torch.arange(4.0)
print(x)
print(x[3, :4])
assert all(type(view) is vt.VirtualTensor for view in (x[3], x.t(), x.view(-1), x.detach(), *x.split(8)))
assert all(type(result) is torch.Tensor for result in (x[3] + 1, x.sum(), x.clone(), x.to(torch.float16), x[[3, 4]]))
assert x.resident_bytes == page

# %% [markdown]
# NumPy and DLPack share the memory. Who takes a view that way may write to it unwatched, so all of the view is
# committed; take the part that is meant. (NumPy is for the host.)

# %%
exchanged = torch.from_dlpack(x[5:7])
exchanged[1] = 9
assert exchanged.data_ptr() == x[5].data_ptr()
assert np.flatnonzero(x.residency()).tolist() == [3, 5, 6]

host = vt.zeros(1 << 40, dtype=torch.uint8, device="cpu")
array = host[:100].numpy()
array[5] = 1
assert host[:10].sum() == 1
show(x, "rows 5 and 6, by DLPack")

# %% [markdown]
# A copy of a view is a plain tensor of that view's data, also in a file, where torch saves the whole storage below a
# plain one. `deepcopy`, `pickle` and `torch.save` of a *whole* virtual tensor give a virtual tensor: what has memory is
# copied, the rest stays a hole.

# %%
buffer = io.BytesIO()
torch.save({"a part": host[:10], "all": host}, buffer)
print(f"{buffer.getbuffer().nbytes:,} bytes saved, of a tensor of {host.nbytes:,}")
buffer.seek(0)
loaded = torch.load(buffer)
assert type(loaded["a part"]) is torch.Tensor
assert torch.equal(loaded["a part"], host[:10].clone())
assert type(loaded["all"]) is vt.VirtualTensor
assert loaded["all"].shape == host.shape
assert loaded["all"].resident_bytes == host.resident_bytes
assert copy.deepcopy(x).resident_bytes == x.resident_bytes

# %% [markdown]
# Autograd goes through a virtual leaf. The forward pass reads zeros, which cost nothing; the gradient is a plain tensor
# of the leaf's full size, so `backward` does need that memory, and an optimiser's step then writes to all of the leaf.
# Sparse gradients name rows, and only these are written.

# %%
weight = vt.zeros(64, row, device=device, requires_grad=True)
loss = (weight[[3, 40]] - 1).square().mean()
loss.backward()
assert weight.resident_bytes == 0
assert type(weight.grad) is torch.Tensor
assert weight.grad.shape == weight.shape
assert weight.grad.any(1).nonzero().flatten().tolist() == [3, 40]

weight.grad = None
optimizer = torch.optim.SGD([weight], lr=0.1)
F.embedding(torch.tensor([3, 40], device=device), weight, sparse=True).sum().backward()
optimizer.step()
show(weight, "learnt")
assert np.flatnonzero(weight.residency()).tolist() == [3, 40]

# %% [markdown]
# It can be a parameter of a module.

# %%
embedding = nn.Embedding(64, row, _weight=vt.zeros(64, row, device=device))
tokens = torch.tensor([5, 6], device=device)
assert isinstance(embedding.weight, nn.Parameter)
assert isinstance(embedding.weight, vt.VirtualTensor)
assert not embedding(tokens).any()
assert embedding.weight.resident_bytes == 0

# %% [markdown]
# `torch.compile` takes it, in one graph. Compiled code may move, repeat and copy what it does to a tensor's memory, so
# the graph has only the tensor's name in it: what reads or writes a virtual tensor is a call of one operator, which
# does what would be done without a graph, in the same order. Everything else is compiled and fused as ever. (Code that
# shall be fused with its reads and writes gets a `plain()` tensor, of memory that was committed.)

# %%
compiled_into = vt.zeros(16, row, device=device)


@torch.compile(fullgraph=True, backend="aot_eager")  # the default backend works as well, and takes a compiler
def write(x, row, value):
    x[row] = value.exp() * 2 + 1
    x[row + 1 : row + 3] += 1
    return x[row : row + 3].sum()


write(compiled_into, 4, torch.zeros((), device=device))
write(compiled_into, 9, torch.zeros((), device=device))
show(compiled_into, "rows 4 and 9, and two after each")
assert np.flatnonzero(compiled_into.residency()).tolist() == [4, 5, 6, 9, 10, 11]
assert compiled_into.sum() == 2 * (3 + 1 + 1) * row

# %% [markdown]
# What it cannot do, it says. Other processes, for instance, do not have these addresses.

# %%
try:
    x.share_memory_()
except vt.VTensorError as error:
    print(error)
else:
    raise AssertionError("other processes do not see these addresses")

# %% [markdown]
# ## Give back
#
# `decommit` gives memory back. What was there reads as zeros. (`zero_()` keeps the memory that is there, and commits
# none: where there is none, all is zero already.)

# %%
x = vt.empty(32, row, device=device)
for index in range(32):
    x[index] = 1
given_back = x.decommit(slice(8, 24))
show(x, "rows 8 to 23 given back")
assert given_back == 16 * page
assert x.sum() == 16 * row

x.zero_()
assert not x.any()
assert x.resident_bytes == 16 * page
x.decommit()
assert x.resident_bytes == 0

# %% [markdown]
# Memory goes back as it was committed. Rows written one by one go one by one; rows that came at once came in large
# pieces, which are faster to map, and a piece of which anything else is in use stays, with its data. A pool with
# `max_size_class_bytes` has smaller pieces.

# %%
at_once = vt.full((32, row), 1, dtype=torch.float32, device=device)
fine = vt.PagePool(device, max_size_class_bytes=page)
in_pages = vt.full((32, row), 1, dtype=torch.float32, device=device, pool=fine)
for name, tensor in (("at once", at_once), ("in page groups", in_pages)):
    part = tensor.decommit(slice(8, 24))
    print(f"committed {name}: {part // page} page groups of a part went back, then {tensor.decommit() // page} more")
assert at_once.resident_bytes == in_pages.resident_bytes == 0

# %% [markdown]
# Memory is not taken away before the device has finished with it. The streams of operations on virtual tensors are
# known. Of work on a `plain()` tensor or a pointer nobody knows, so on a GPU declare its stream with `record_stream`;
# on a CPU there is nothing to declare.

# %%
x.fill_(1)
if device != "cpu":
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x.record_stream(side)
    with torch.cuda.stream(side):
        total = x.plain().sum()
else:
    total = x.plain().sum()
x.decommit()  # on a GPU, once the sum is done
assert total == 32 * row
assert x.resident_bytes == 0

# %% [markdown]
# Each operation on a virtual tensor passes through Python, to see what it touches. A loop over memory that is there
# need not pay for that: `commit`, then use `plain()`. The address is the same, and so is the memory. What was not
# committed must not be written through it, and on a GPU not be read either: that ends the process.

# %%
x.commit(4)
watched, plain = x[:4, :256], x[:4, :256].plain()
print(f"add_ of 1,024 elements: {microseconds(lambda: watched.add_(1)):.1f} us watched,", end=" ")
print(f"{microseconds(lambda: plain.add_(1)):.1f} us plain")
assert torch.equal(watched, plain)
assert x.resident_bytes == 4 * page

# %% [markdown]
# ## Grow in place
#
# With `max_rows` a tensor has addresses for so many rows, and as many as it was made with. `append_` adds some,
# `resize_rows_` changes their number. Nothing that was there is copied or moves, so views of it stay good.

# %%
g = vt.empty(0, 64, max_rows=1 << 24, device=device)
g.append_(torch.ones(3, 64)).append_(torch.full((64,), 2.0))
first, address = g[:3], g.data_ptr()
g.resize_rows_(4 * page // 256)  # a row has 256 bytes: four page groups, of which one has memory
assert g.data_ptr() == address
assert first.eq(1).all()
assert g.sum() == (3 + 2) * 64
assert g.resident_bytes == page

g.resize_rows_(2)
assert torch.equal(g, torch.ones(2, 64, device=device))
print(g.shape, f"of at most {g.max_rows:,} rows")

# %% [markdown]
# Against `torch.cat` in a loop: 512 times 64 rows of 256 bytes. Bytes are counted, by what each call has to write:
# `cat` all rows, `append_` the new ones. Times are measured, of each call by itself, where this runs;
# those of `cat` include allocating the result, those of `append_` committing page groups. The times vary, the counts
# do not.

# %%
g, catenated = g.resize_rows_(0), torch.empty(0, 64, device=device)
new = torch.randn(64, 64, device=device)
copied_bytes, times = {"cat": [], "append_": []}, {"cat": [], "append_": []}
for _ in range(512):
    start = time.perf_counter()
    catenated = torch.cat([catenated, new])
    if device != "cpu":
        torch.cuda.synchronize()
    middle = time.perf_counter()
    g.append_(new)
    if device != "cpu":
        torch.cuda.synchronize()
    end = time.perf_counter()
    copied_bytes["cat"].append(catenated.nbytes)
    copied_bytes["append_"].append(new.nbytes)
    times["cat"].append(middle - start)
    times["append_"].append(end - middle)
assert torch.equal(g, catenated)

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
for name in times:
    left.plot(np.cumsum(copied_bytes[name]) / 2**20, label=name)
    right.plot(range(0, 512, 16), np.median(np.reshape(times[name], (32, 16)), axis=1) * 1e6, label=name)
left.set(xlabel="calls", ylabel="MiB", title="copied in all, counted", yscale="log")
right.set(xlabel="calls", ylabel="us", title="of a call, median of 16, measured", ylim=0)
left.legend()
plt.show()

# %% [markdown]
# A call of `append_` copies as much at the end as at the start. It passes through Python, so while a tensor is small
# `cat` is the faster of the two.
#
# ## Code that knows nothing of this
#
# Within `with vt.virtual():` torch's own `zeros`, `empty` and their like make large tensors virtual, from 16 MiB on
# (`min_bytes`). Below is attention in the manner of gpt-fast, whose cache is allocated for the longest context. (There,
# a square mask of that length is kept too. It is not zeros, so no mode makes it small; here a mask comes from the
# positions.)

# %%
BATCH, HEADS, HEAD_DIM = 2, 4, 64
TOKENS_PER_PAGE_GROUP = page // (HEAD_DIM * 4)  # of one head
MAX_LENGTH = 32 * TOKENS_PER_PAGE_GROUP


class KVCache(nn.Module):
    def __init__(self, batch, length, heads, dim):
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(batch, heads, length, dim))
        self.register_buffer("v_cache", torch.zeros(batch, heads, length, dim))

    def update(self, positions, k, v):
        self.k_cache[:, :, positions] = k
        self.v_cache[:, :, positions] = v
        return self.k_cache, self.v_cache


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM, bias=False)

    def setup_caches(self, batch, length):
        self.kv_cache = KVCache(batch, length, HEADS, HEAD_DIM)

    def forward(self, hidden, positions):
        parts = self.qkv(hidden).unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        k, v = self.kv_cache.update(positions, k, v)
        mask = torch.arange(k.shape[2], device=k.device) <= positions[:, None]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


torch.manual_seed(0)
with torch.device(device):
    attention = Attention().requires_grad_(False)
    reference = copy.deepcopy(attention)
    reference.setup_caches(BATCH, MAX_LENGTH)
    with vt.virtual():
        attention.setup_caches(BATCH, MAX_LENGTH)
k_cache = attention.kv_cache.k_cache
k_cache

# %% [markdown]
# Memory follows the tokens. Each request's heads lie apart, `MAX_LENGTH` tokens from one to the next, so all of them
# come to a new page group at the same token.

# %%
held, resident = [0], [0]
chunk = TOKENS_PER_PAGE_GROUP // 16
for start in range(0, 3 * TOKENS_PER_PAGE_GROUP - chunk, chunk):
    hidden = torch.randn(BATCH, chunk, HEADS * HEAD_DIM, device=device)
    positions = torch.arange(start, start + chunk, device=device)
    found = attention(hidden, positions)
    if start % (16 * chunk) == 0:  # the reference must have all tokens, to be compared now and then
        reference.kv_cache.k_cache.copy_(k_cache)
        reference.kv_cache.v_cache.copy_(attention.kv_cache.v_cache)
        torch.testing.assert_close(found, reference(hidden, positions))
    held.append(start + chunk)
    resident.append(k_cache.resident_bytes)
assert resident[-1] == BATCH * HEADS * 3 * page
assert reference.kv_cache.k_cache.nbytes == 32 * BATCH * HEADS * page

show(k_cache, "K: a line is a head of a request", lines=BATCH * HEADS)
fig, axis = plt.subplots(figsize=(6, 2.4))
axis.step(held, np.array(resident) / 2**20, where="pre", label="resident")
axis.plot(held, np.array(held) * BATCH * HEADS * HEAD_DIM * 4 / 2**20, "--", label="used by tokens")
axis.axhline(k_cache.nbytes / 2**20, color="grey", linestyle=":", label="what torch.zeros takes")
axis.set(xlabel="tokens held", ylabel="MiB of K")
axis.legend()
plt.show()

# %% [markdown]
# What it does not save is time: attention with a mask reads the cache to its full length, zeros included, as it does
# with torch's own tensor. (The zeros are the same few pages again and again, which caches serve well, so the times of
# the two may differ.) Where the code may be changed, a view of the tokens held avoids that, and needs no copy.

# %%
length = held[-1]
query = torch.randn(BATCH, HEADS, 1, HEAD_DIM, device=device)
v_cache = attention.kv_cache.v_cache
mask = (torch.arange(MAX_LENGTH, device=device) < length)[None]


def attend_to_all(k, v):
    return F.scaled_dot_product_attention(query, k, v, attn_mask=mask)


def attend_to_held(k, v):
    return F.scaled_dot_product_attention(query, k[:, :, :length], v[:, :, :length])


whole, plain_whole = (k_cache, v_cache), (reference.kv_cache.k_cache, reference.kv_cache.v_cache)
print(f"all {MAX_LENGTH:,} tokens, virtual: {microseconds(lambda: attend_to_all(*whole)):,.0f} us")
print(f"all {MAX_LENGTH:,} tokens, torch.zeros: {microseconds(lambda: attend_to_all(*plain_whole)):,.0f} us")
print(f"the {length:,} held, virtual: {microseconds(lambda: attend_to_held(*whole)):,.0f} us")
torch.testing.assert_close(attend_to_all(*whole), attend_to_held(*whole))
assert k_cache.resident_bytes == resident[-1]

# %% [markdown]
# The same with transformers' `StaticCache`, which allocates on first use, hence `generate` within the mode as well. The
# model is tiny and its weights are random, so that nothing is downloaded. For growth without a mask over the full
# length there is `VirtualCache`: see the notebook of first steps.

# %%
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).eval().to(device)
prompt = torch.randint(3, 256, (2, 20), device=device)
options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None, attention_mask=prompt != 0)

length = 16 * page // 128  # a token of a head has 32 elements, 128 bytes
with vt.virtual(min_bytes=1 << 20):
    cache = StaticCache(config=config, max_cache_len=length)
    ours = model.generate(prompt, past_key_values=cache, disable_compile=True, **options)
keys = cache.layers[0].keys
show(keys, "keys of layer 0", lines=4)
assert torch.equal(ours, model.generate(prompt, **options))
assert type(keys) is vt.VirtualTensor
assert keys.resident_bytes == keys.nbytes // 16
cache.reset()  # zeroes it
assert keys.resident_bytes == keys.nbytes // 16
