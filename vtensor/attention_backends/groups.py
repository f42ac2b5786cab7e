"""Groups: kernels that know one length only, on views of the cache, without a copy of it.

slot 3  | t t t t . . . |     Requests in neighbouring slots, of one length and one number of queries, are one view:
slot 4  | t t t t . . . |     k[3:5, :4]. Those in other slots are further groups, of one request at least.
slot 6  | t t . . . . . |     k[6:7, :2]
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from vtensor.attention_backends.backend import Backend, CannotRunError, Result
from vtensor.triton_kernels.arguments import AttentionArguments

__all__ = ["Group", "GroupBackend", "plan_groups"]


@dataclass
class Group:
    """Requests in neighbouring slots whose lengths and numbers of queries are equal."""

    first_slot: int
    num_slots: int
    num_tokens: int
    first_row: int  # of q as [T, Hq, D]
    num_queries: int  # of each request

    def begin(self, window: int) -> int:
        """The first token that any query sees. Those before it may have no memory."""
        return max(0, self.num_tokens - self.num_queries - window + 1) if window else 0

    def num_blind(self, causal: bool) -> int:
        """Queries at the beginning of each request that see nothing."""
        return max(0, self.num_queries - self.num_tokens) if causal else 0

    def rows_of(self, rows: torch.Tensor, causal: bool) -> torch.Tensor:
        """Their part of [T, ...] as [slots, queries, ...], without those that see nothing."""
        end = self.first_row + self.num_slots * self.num_queries
        requests = rows[self.first_row : end].view(self.num_slots, self.num_queries, *rows.shape[1:])
        return requests[:, self.num_blind(causal) :]

    def tokens_of(self, cache: torch.Tensor, window: int) -> torch.Tensor:
        """Their part of a cache, as a view [slots, tokens, Hkv, D]."""
        return cache[self.first_slot : self.first_slot + self.num_slots, self.begin(window) : self.num_tokens]


def plan_groups(call: AttentionArguments) -> list[Group]:
    """Read the lengths of a call (which waits for the device) and put its requests into groups.

    Padding, and requests without tokens or queries, are in none.

    Raises
    ------
    ValueError
        A length or a slot that the cache does not have.
    """
    batch, (num_slots, longest) = call.batch_size, call.k.shape[:2]
    parts = [call.seq_lens, *(x for x in (call.batch_idx, call.cu_seqlens) if x is not None)]
    values = torch.cat(parts).tolist()  # one wait, not three
    lens = values[:batch]
    slots = values[batch : 2 * batch] if call.batch_idx is not None else list(range(batch))
    rows = values[-batch - 1 :] if call.cu_seqlens is not None else [call.q.shape[1] * b for b in range(batch + 1)]
    groups: list[Group] = []
    for b, (slot, length) in enumerate(zip(slots, lens, strict=True)):
        if length > longest or slot >= num_slots:
            raise ValueError(
                f"request {b} has seq_lens {length} and slot {slot}: k has {num_slots} slots of {longest} tokens"
            )
        first_row, count = rows[b], rows[b + 1] - rows[b]
        if slot < 0 or length <= 0 or count <= 0:
            continue
        last = groups[-1] if groups else None
        if (
            last
            and (last.num_tokens, last.num_queries) == (length, count)
            and last.first_slot + last.num_slots == slot
            and last.first_row + last.num_slots * count == first_row
        ):
            last.num_slots += 1
        else:
            groups.append(Group(slot, 1, length, first_row, count))
    return groups


class GroupBackend(Backend):
    """A kernel without lengths of its own, called for each group."""

    def run(self, call: AttentionArguments, *, return_lse: bool) -> Result:
        """Run the groups one after another; see `Backend.run`."""
        groups = plan_groups(call)
        for group in groups:
            if reason := self.why_not_group(call, group):
                raise CannotRunError(reason)
        q = call.q.reshape(-1, *call.q.shape[-2:])
        out = q.new_zeros(*q.shape[:2], call.v.shape[3])
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32) if return_lse else None
        for group in groups:
            found, sums = self.run_group(
                call,
                group.rows_of(q, call.causal),
                group.tokens_of(call.k, call.window),
                group.tokens_of(call.v, call.window),
                return_lse=return_lse,
            )
            group.rows_of(out, call.causal).copy_(found)
            if lse is not None and sums is not None:
                group.rows_of(lse, call.causal).copy_(sums)
        shape = call.q.shape[:-1]
        return out.reshape(*shape, call.v.shape[3]), None if lse is None else lse.reshape(shape)

    def why_not_group(self, call: AttentionArguments, group: Group) -> str | None:
        """Say why a group cannot be done, or None."""
        return None

    @abstractmethod
    def run_group(
        self, call: AttentionArguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool
    ) -> Result:
        """Attention of q [g, n, Hq, D] over k [g, tokens, Hkv, D] and v, the last query at the last token.

        Where it is causal there are at most as many queries as tokens. Returns [g, n, Hq, Dv] and [g, n, Hq].
        """
