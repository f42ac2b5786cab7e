"""Operations on a virtual tensor, and its creation: the variants (see `vtensor.bench.tensor`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import repeat

import torch

from vtensor.allocator import graveyard
from vtensor.bench.batch import finish
from vtensor.bench.frame import SEED, Variant, timed_us
from vtensor.errors import VTensorError
from vtensor.factory import empty
from vtensor.units import KIB, TIB, format_bytes

__all__ = ["creation", "differences", "operations"]

Operation = Callable[[torch.Tensor], object]

_SHAPE = 16, 256
_OVER_TORCH_US, _PLAIN_OVER_TORCH_US, _CREATION_US = 10.0, 0.5, 100.0


def differences(spent_us: Mapping[str, float]) -> dict[str, float]:
    """What the virtual tensor and its `plain()` take beyond torch's own in one turn.

    >>> differences({"virtual": 9.0, "torch": 2.0, "plain()": 2.5})
    {'virtual over torch': 7.0, 'plain() over torch': 0.5}
    """
    return {f"{kind} over torch": spent_us[kind] - spent_us["torch"] for kind in ("virtual", "plain()")}


@dataclass(kw_only=True)
class _Operation(Variant):
    """One operation, on tensors of three kinds in turns."""

    device: str
    num_batches: int
    num_calls: int
    operation: Operation
    num_rows: int  # of the virtual tensor, of which those of _SHAPE have memory
    tensors: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    order: random.Random = field(default_factory=lambda: random.Random(SEED), init=False)

    def set_up(self, resources: ExitStack) -> None:
        x = empty(self.num_rows, _SHAPE[1], dtype=torch.float32, device=self.device).commit(_SHAPE[0])
        self.tensors.update({"virtual": x, "torch": torch.zeros(_SHAPE, device=self.device), "plain()": x.plain()})
        resources.callback(self.tensors.clear)

    def check(self) -> None:
        values = torch.arange(_SHAPE[0] * _SHAPE[1], dtype=torch.float32, device=self.device).view(_SHAPE)
        outcomes = {}
        for kind, tensor in self.tensors.items():
            # A virtual tensor remembers that it was written to as a whole: not the one timed.
            view = tensor.detach()[: _SHAPE[0]]
            view.copy_(values)
            result = self.operation(view)
            outcomes[kind] = [view.clone(), result.clone()] if isinstance(result, torch.Tensor) else [view.clone()]
        for kind in ("virtual", "plain()"):
            if not all(torch.equal(*pair) for pair in zip(outcomes[kind], outcomes["torch"], strict=True)):
                raise VTensorError(f"on the {kind} tensor the outcome is not that of torch's own")

    def measure(self) -> Mapping[str, Sequence[float]]:
        samples: dict[str, list[float]] = {kind: [] for kind in self.tensors}
        for _ in range(self.num_batches):
            spent_us = {}
            for kind in self.order.sample(list(self.tensors), len(self.tensors)):
                spent_us[kind] = timed_us(self.call_all, self.tensors[kind])[1] / self.num_calls
                finish(torch.device(self.device))
            for name, value in {**spent_us, **differences(spent_us)}.items():
                samples.setdefault(name, []).append(value)
        return samples

    def call_all(self, tensor: torch.Tensor) -> None:
        """One batch."""
        operation = self.operation
        for _ in repeat(None, self.num_calls):
            operation(tensor)


def operations(device: str, num_batches: int, num_calls: int) -> Iterator[Variant]:
    """Views, writes and reads, so many batches of each in a round."""
    whole, part = _SHAPE[0], TIB // (4 * _SHAPE[1])
    for name, operation, num_rows in [
        *((name, operation, whole) for name, operation in _operations().items()),
        *((f"{name}, of 1 TiB", operation, part) for name, operation in _operations().items() if name != "x.add_(1)"),
    ]:
        yield _Operation(
            name=name,
            num_rows=num_rows,
            parameters={"shape": [num_rows, _SHAPE[1]], "dtype": "float32"},
            targets={"virtual over torch": _OVER_TORCH_US, "plain() over torch": _PLAIN_OVER_TORCH_US},
            device=device,
            num_batches=num_batches,
            num_calls=num_calls,
            operation=operation,
        )


def _operations() -> dict[str, Operation]:
    index = torch.tensor([3, 5], device="cpu")

    def assign(x: torch.Tensor) -> None:
        x[3:7] = 2

    def put(x: torch.Tensor) -> None:
        x[index] = 2

    return {
        "x[3:7]": lambda x: x[3:7],
        "x[3:7].add_(1)": lambda x: x[3:7].add_(1),
        "x[3:7] = 2": assign,
        "x[3:7].zero_()": lambda x: x[3:7].zero_(),
        "x.add_(1)": lambda x: x.add_(1),
        "index_put": put,
        "x[3] + 1": lambda x: x[3] + 1,
    }


@dataclass(kw_only=True)
class _Creation(Variant):
    """Tensors that are made and dropped, one at a time."""

    device: str
    size_bytes: int
    number: int
    is_virtual: bool

    def set_up(self, resources: ExitStack) -> None:
        pass

    def check(self) -> None:
        x = self.make()
        x[-1] = 7
        if x.nbytes != self.size_bytes or x[-1].item() != 7:
            raise VTensorError(f"{x.nbytes:,} bytes were made, of which the last reads as {x[-1].item()}")
        if self.is_virtual and x[0].item() != 0:
            raise VTensorError(f"what was never written reads as {x[0].item()}")

    def measure(self) -> Mapping[str, Sequence[float]]:
        created, deleted = [], []
        for _ in range(self.number):
            x, spent_us = timed_us(self.make)
            created.append(spent_us)
            last = [x]
            del x
            deleted.append(timed_us(self.drop, last)[1])
        return {"creation": created, "deletion": deleted}

    def make(self) -> torch.Tensor:
        if self.is_virtual:
            return empty(self.size_bytes, dtype=torch.uint8, device=self.device)
        return torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device)

    def drop(self, last: list[torch.Tensor]) -> None:
        """Give up the last reference, and wait until the addresses are free."""
        last.clear()
        finish(torch.device(self.device))
        graveyard.drain()


def creation(device: str, number: int) -> Iterator[Variant]:
    """So many tensors of 1 TiB in a round, and small ones of torch's own."""
    ceiling = f"torch.empty, {format_bytes(4 * KIB)}"
    for name, size_bytes in ((f"vt.empty, {format_bytes(TIB)}", TIB), (ceiling, 4 * KIB)):
        is_ours = name != ceiling
        yield _Creation(
            name=name,
            parameters={"size_bytes": size_bytes},
            ceiling=ceiling if is_ours else None,
            targets={"creation": _CREATION_US} if is_ours else {},
            device=device,
            size_bytes=size_bytes,
            number=number,
            is_virtual=is_ours,
        )
