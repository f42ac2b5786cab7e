"""A decoder in plain PyTorch, as people write them, with dense caches of two kinds to be replaced by others."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 97, 64, 3, 4, 2, 32


class DenseCache(nn.Module):
    """All of it allocated, written to by positions: as in gpt-fast."""

    def __init__(self, batch: int, length: int, heads: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(batch, heads, length, width, dtype=dtype), persistent=False)

    def update(self, input_pos: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.k[:, :, input_pos] = k
        self.v[:, :, input_pos] = v
        return self.k, self.v


class DenseAppending(DenseCache):
    """The same, written to behind what is there: as in torchtune."""

    size = 0

    def update(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(self.size, self.size + k.shape[2], device=k.device)
        self.size += k.shape[2]
        return super().update(positions, k, v)

    def reset(self) -> None:
        self.k.zero_()
        self.v.zero_()
        self.size = 0


class Attention(nn.Module):
    """Attention with grouped heads and rotary positions, over whatever its cache returns."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(NUM_HEADS * HEAD_DIM, WIDTH, bias=False)
        self.cache: nn.Module | None = None
        self.appends = False  # update(k, v) rather than update(input_pos, k, v)
        self.attends = False  # the cache computes attention

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, num_new, _ = x.shape
        heads = self.qkv(x).view(batch, num_new, -1, HEAD_DIM).transpose(1, 2)
        q, k, v = heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        q, k = rotated(q, positions), rotated(k, positions)
        k, v = self.cache.update(k, v) if self.appends else self.cache.update(positions, k, v)
        if self.attends:
            found = self.cache.attend(q)
        else:
            repeats = NUM_HEADS // NUM_KV_HEADS
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[..., : k.shape[2]])
        return self.out(found.transpose(1, 2).reshape(batch, num_new, -1))


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn each pair (j, j + D / 2) of a head by an angle of its position."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), positions, mask)
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """[B, S] tokens at positions [S] to logits [B, S, VOCABULARY]."""

    def __init__(self, max_seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.max_seq_len = max_seq_len

    def use(self, caches: Sequence[nn.Module], *, appends: bool = False, attends: bool = False) -> "Decoder":
        for block, cache in zip(self.blocks, caches, strict=True):
            block.attention.cache, block.attention.appends, block.attention.attends = cache, appends, attends
        return self

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mask = positions[:, None] >= torch.arange(self.max_seq_len, device=tokens.device)
        for block in self.blocks:
            x = block(x, positions, mask)
        return self.head(x)


def make_decoder(max_seq_len: int, device: str = "cpu") -> Decoder:
    """A decoder with random weights, the same each time."""
    torch.manual_seed(0)
    return Decoder(max_seq_len).to(device).eval()


def dense(
    kind: type[DenseCache], batch: int, length: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[DenseCache]:
    return [kind(batch, length, NUM_KV_HEADS, HEAD_DIM, dtype).to(device) for _ in range(NUM_LAYERS)]


@torch.no_grad()
def generate(
    model: Decoder, prompt: torch.Tensor, num_new: int, after_each: Callable[[], object] = lambda: None
) -> torch.Tensor:
    """Greedily: the prompt in one forward, then a token at a time."""
    tokens, start = prompt, 0
    for _ in range(num_new):
        positions = torch.arange(start, tokens.shape[1], device=tokens.device)
        logits = model(tokens[:, start:], positions)
        start = tokens.shape[1]
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        after_each()
    return tokens
