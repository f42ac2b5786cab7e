"""Growing: tensors that get and lose rows in place."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Self, cast

import numpy as np
import torch

from vtensor.eager import eager
from vtensor.errors import VTensorError
from vtensor.watched import Watched, offset_of

__all__ = ["Growing"]


class Growing(Watched):
    """Growth in place, for tensors from ``vtensor.empty(..., max_rows=...)``."""

    @property
    def max_rows(self) -> int | None:
        """Rows for which a tensor that grows in place has addresses; None for any other."""
        return self._max_rows

    @eager
    def append_(self, rows: torch.Tensor) -> Self:
        """Add rows at the end, in place: nothing is copied but the rows, and no address changes.

        Views of the rows before stay good. Made for tensors from ``vtensor.empty(..., max_rows=...)``.

        Parameters
        ----------
        rows : Tensor, shape [n, *self.shape[1:]] or self.shape[1:]
            n rows, or one; converted to this tensor's dtype and device.

        Returns
        -------
        VirtualTensor
            This tensor, n rows longer.

        Raises
        ------
        ValueError
            Rows of another shape, or more than `max_rows`. Nothing was changed.
        VTensorError
            A tensor that does not grow, or that requires grad.
        OutOfPagesError
            Not enough page groups. Nothing was changed.
        """
        max_rows = self._check_grows("append_")
        shape = tuple(self.shape)
        is_rows = isinstance(rows, torch.Tensor) and tuple(rows.shape) in (shape[1:], (*rows.shape[:1], *shape[1:]))
        if not is_rows:
            one = ", ".join(map(str, shape[1:]))
            raise ValueError(f"rows={_describe(rows)} must be a tensor of shape [n, {one}], or [{one}] for one row")
        number = 1 if rows.dim() < len(shape) else len(rows)
        if shape[0] + number > max_rows:
            raise ValueError(f"{number} rows more than {shape[0]:,} are beyond max_rows={max_rows:,}")
        new = self._rows(shape[0], shape[0] + number)
        try:
            new.copy_(rows.detach())
        except BaseException:
            with suppress(VTensorError):  # the first error is the one to tell of; what is left is beyond the last row
                new._zero_held(1)
            raise
        self._set_rows(shape[0] + number)
        return self

    @eager
    def resize_rows_(self, num_rows: int) -> Self:
        """Change the number of rows, in place: rows that come are zero, those that go give their memory back.

        Made for tensors from ``vtensor.empty(..., max_rows=...)``. Shrinking waits for the device. Views that reach
        beyond the new end read zeros there.

        Parameters
        ----------
        num_rows : int
            0 to `max_rows`.

        Returns
        -------
        VirtualTensor
            This tensor.

        Raises
        ------
        ValueError
            A number out of range. Nothing was changed.
        VTensorError
            A tensor that does not grow, or that requires grad; or during a graph capture.
        """
        max_rows = self._check_grows("resize_rows_")
        if isinstance(num_rows, bool) or not isinstance(num_rows, int | np.integer) or not 0 <= num_rows <= max_rows:
            raise ValueError(f"num_rows={num_rows!r} must be 0 to max_rows={max_rows:,}")
        num_rows = int(num_rows)
        if num_rows < len(self) and self._region is not None:
            # All that lies behind: what an append_ that failed had committed goes as well.
            self._region.give_back(self._rows(num_rows, max_rows)._covered(), "resize_rows_")
            self._rows(num_rows, len(self))._zero_held(1)
            self._note_loss()
        self._set_rows(num_rows)
        return self

    def _check_grows(self, what: str) -> int:
        self._memory(what)
        if self._max_rows is None:
            raise VTensorError(f"{what} is for tensors that grow in place: vtensor.empty(n, ..., max_rows=...)")
        if self.requires_grad:
            raise VTensorError(f"{what}: a tensor that grows in place cannot require grad; use .detach() views of it")
        if self._region is not None:
            self._region.space.check_open()
        return self._max_rows

    def _rows(self, first: int, end: int) -> Self:
        """Rows of a tensor that grows, also those that it does not have yet."""
        offset = offset_of(self) + first * self.stride(0)
        return cast(Self, self.detach().as_strided((end - first, *self.shape[1:]), self.stride(), offset))

    def _growing(self, num_rows: int) -> Self:
        self._max_rows = len(self)
        self._set_rows(num_rows)
        return self

    def _set_rows(self, num_rows: int) -> None:
        with torch._C._DisableTorchDispatch():
            self.as_strided_((num_rows, *self.shape[1:]), self.stride(), offset_of(self))
        self._seen_epoch = -1


def _describe(value: Any) -> str:
    """A tensor's shape, for an error; its values may not be there."""
    return f"<tensor of shape {tuple(value.shape)}>" if isinstance(value, torch.Tensor) else repr(value)
