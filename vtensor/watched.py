"""Watched: a tensor over a region that knows which page groups it touches, and sees that they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch

from vtensor.errors import UnmappedAccessError, VTensorError
from vtensor.footprint import covered, dense_blocks, footprint
from vtensor.region import READ_LIMIT_BYTES, Region

__all__ = ["Named", "NotForGraphs", "OnTouch", "Select", "Watched", "offset_of"]

OnTouch = Literal["commit", "raise"]
# From the size of a page group, and whether holes can be read, to ranges of page groups, or None for all of a view.
Select = Callable[[int, bool], npt.NDArray[np.int64] | None] | None

offset_of: Callable[[torch.Tensor], int] = torch.Tensor.storage_offset  # type: ignore[assignment]
"""Elements before the first one, whatever `VirtualTensor.storage_offset` tells a graph."""

# Where Dynamo meets this, a graph ends; a torch without it takes what is not for graphs as an error.
_GraphBreak: Any = getattr(torch._subclasses, "UnsupportedFakeTensorException", RuntimeError)


class NotForGraphs(VTensorError, _GraphBreak):  # type: ignore[misc]
    """What is asked for needs a tensor's memory, and a graph is being made, where it has none: the graph ends there."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.reason = message  # as Dynamo shows it


class Watched(torch.Tensor):
    """What operations on a virtual tensor ask of it before they touch its memory."""

    _region: Region | None = None
    _on_touch: OnTouch = "commit"
    _seen_epoch: int = -1
    _max_rows: int | None = None  # of a tensor that grows in place
    # In a graph of torch.compile that is being made: what stands for the memory, and what a view is named by.
    _stand_in: Any = None
    _own_key: torch.Tensor | None = None

    def _memory(self, operation: Any) -> Region | None:
        """The region, or None of an empty tensor."""
        if self._region is None and self._stand_in is not None:
            raise NotForGraphs(f"{operation} of a virtual tensor is not for graphs: it needs the tensor's own memory")
        return self._region

    def _is_seen(self, region: Region) -> bool:
        """Whether all of this view was seen to have memory since anything was taken away, or that is plain to see."""
        epoch = region.decommit_epoch
        if self._seen_epoch != epoch and region.space.is_full:
            self._seen_epoch = epoch
        return self._seen_epoch == epoch

    def _begin_reading(self, operation: Any, select: Select = None) -> bool:
        """Make sure that this view can be read; whether that holds until `Region.end_reading` only.

        `select` says which page groups are enough, for an operation that does not read everything.
        """
        region = self._region
        if region is None:
            self._memory(operation)
            return False
        if self._on_touch == "raise":
            self._touch(operation, select)
            return False
        region.check_process()
        if region.space.has_readable_holes:
            if region.data_bytes > READ_LIMIT_BYTES and (
                self.numel() * self.element_size() > READ_LIMIT_BYTES or not self.is_contiguous()
            ):
                region.check_read(self._footprint(select), Named(operation, self))
            return False
        has_shown = False
        epoch = region.decommit_epoch
        if not self._is_seen(region):
            has_shown = region.begin_reading(self._footprint(select), Named(operation, self))
            if not has_shown and select is None:
                self._seen_epoch = epoch
        region.use()
        return has_shown

    @contextmanager
    def _reading(self, operation: Any) -> Iterator[None]:
        """The time in which this view is read, otherwise than by an operator."""
        has_shown = self._begin_reading(operation)
        try:
            yield
        finally:
            if has_shown:
                Region.end_reading()

    def _touch(self, operation: Any, select: Select = None) -> None:
        """Make sure that this view has memory behind it, which may be written to."""
        region = self._region
        if region is None:
            self._memory(operation)
            return
        region.check_process()
        epoch = region.decommit_epoch
        if not self._is_seen(region):
            ranges = self._footprint(select)
            missing = region.space.count_missing(ranges)
            if missing:
                if self._on_touch == "raise":
                    raise self._unmapped(operation, ranges, missing)
                region.commit(ranges, Named(operation, self))
            if select is None:
                self._seen_epoch = epoch
        region.use()  # after the check: whoever committed what is there now has noted when it is zeroed

    def _begin_writing(self, operation: Any, select: Select = None) -> None:
        """Make sure that this view can be written to."""
        self._touch(operation, select)
        if self._region is not None:
            self._region.num_writes += 1

    def _note_loss(self) -> None:
        """Let autograd know that what this view showed is gone, and may have been saved for a backward."""
        if self._region is not None:
            self._region.num_writes += 1
        if not self.is_inference():
            torch.autograd.graph.increment_version(self)

    def _unmapped(self, operation: Any, ranges: npt.NDArray[np.int64], missing: int) -> UnmappedAccessError:
        region = cast(Region, self._region)
        first = next(
            int(start + (~region.space.have_memory(start, start + count)).argmax())
            for start, count in ranges.tolist()
            if not region.space.have_memory(start, start + count).all()
        )
        size = region.space.page_group_bytes
        address = region.space.base + first * size
        return UnmappedAccessError(
            f"{Named(operation, self)} touches {missing} page groups without "
            f"memory, the first at bytes {first * size:,}..{(first + 1) * size:,} ({address:#x}) of its reservation; "
            "commit them first (.commit(), or step() of a cache), or use on_touch='commit'"
        )

    def _footprint(self, select: Select = None) -> npt.NDArray[np.int64]:
        region = cast(Region, self._region)
        if select is not None:
            ranges = select(region.space.page_group_bytes, region.space.has_readable_holes)
            if ranges is not None:
                return ranges
        if self.is_contiguous() and (number := self.numel()):
            size, element_bytes = region.space.page_group_bytes, self.element_size()
            first = offset_of(self) * element_bytes
            end = first + number * element_bytes - 1
            return np.array([[first // size, end // size - first // size + 1]])
        return footprint(offset_of(self), self.shape, self.stride(), self.element_size(), region.space.page_group_bytes)

    def _covered(self) -> npt.NDArray[np.int64]:
        region = cast(Region, self._region)
        return covered(
            offset_of(self),
            self.shape,
            self.stride(),
            self.element_size(),
            region.space.page_group_bytes,
            region.data_bytes,
        )

    def _zero_held(self, most_blocks: int) -> bool:
        """Zero what has memory of this view. False, and nothing done, where it consists of more blocks."""
        region = self._region
        if region is None:
            return True
        blocks = dense_blocks(offset_of(self), self.shape, self.stride(), self.element_size(), most_blocks)
        if blocks is None:
            return False
        for start, number in region.held_bytes(blocks).tolist():
            region.bytes_of(start, number).zero_()
        region.num_writes += 1
        return True

    def _plain(self) -> torch.Tensor:
        self._memory("plain")
        with torch._C._DisableTorchDispatch():
            # Not a view where it need not be: views cost more, and torch.compile looks at what they are of.
            return self.as_subclass(torch.Tensor) if self.requires_grad else self.detach()


class Named:
    """What was to be done, for an error."""

    __slots__ = ("operation", "tensor")

    def __init__(self, operation: object, tensor: torch.Tensor) -> None:
        self.operation, self.tensor = operation, tensor

    def __str__(self) -> str:
        return f"{self.operation} on a virtual tensor of shape {tuple(self.tensor.shape)}"
