"""Unpicklable: for objects that own addresses or memory of this process."""

from __future__ import annotations

from typing import Any, NoReturn

from vtensor.errors import VTensorError

__all__ = ["Unpicklable"]


class Unpicklable:
    """Refuses to be copied or pickled, before its tables, which may be longer than memory, are read."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse."""
        raise VTensorError(
            f"a {type(self).__name__} owns memory of this process and cannot be copied or pickled; copy the tensors "
            "that show it (x.clone()), or make another one"
        )
