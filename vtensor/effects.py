"""Effects: what an operator does to the memory of its arguments, from its schema."""

from __future__ import annotations

import re
from enum import Enum
from functools import cache
from typing import Any

import torch

__all__ = [
    "Effect",
    "effect_of",
    "fills_with_zeros",
    "is_written",
    "is_zero",
    "out_names",
    "stays_within",
    "written_arguments",
]


class Effect(Enum):
    """What an operator does to the memory of its arguments."""

    COMPOSITE = "is made of other operators"
    VIEW = "returns views, reads nothing"
    RESHAPE = "makes its first argument another view, reads nothing"
    METADATA = "reads and writes nothing"
    ACCESS = "reads or writes its arguments"
    FILL = "writes one value to all of its first argument"
    COPY = "writes its second argument to its first"
    REFUSED = "would move the tensor away from its addresses"


_METADATA_OPERATORS = {
    "aten::empty_like",
    "aten::full_like",
    "aten::is_pinned",
    "aten::is_same_size",
    "aten::is_set_to",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::new_full",
    "aten::new_ones",
    "aten::new_zeros",
    "aten::ones_like",
    "aten::rand_like",
    "aten::randint_like",
    "aten::randn_like",
    "aten::zeros_like",
}
_VIEW_OPERATORS = {"aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::_unsafe_view"}  # not in their schemas
_KEEPERS = re.compile(r"aten::_?sparse_\w*tensor")  # these make a sparse tensor of what they are given
_WRITTEN_UNSAID = {"running_mean", "running_var"}  # of batch norm, by operators whose schemas do not say so
_REFUSED_OPERATORS = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::record_stream"}


@cache
def effect_of(func: Any) -> Effect:
    """What an operator does to the memory of its arguments, from its schema."""
    name = func._schema.name
    if name in _REFUSED_OPERATORS:
        return Effect.REFUSED
    if func._can_decompose():
        return Effect.COMPOSITE  # inference mode leaves them whole, and reshape, to, contiguous may view or may copy
    if name in _METADATA_OPERATORS:
        return Effect.METADATA
    if name in ("aten::zero_", "aten::fill_"):
        return Effect.FILL
    if name == "aten::copy_":
        return Effect.COPY
    if torch.Tag.inplace_view in func.tags:
        return Effect.RESHAPE
    if name in _VIEW_OPERATORS:
        return Effect.VIEW
    aliases = [value.alias_info for value in func._schema.returns]
    if aliases and all(alias is not None and not alias.is_write for alias in aliases):
        return Effect.VIEW
    return Effect.ACCESS


@cache
def stays_within(func: Any) -> bool:
    """Whether the views that an operator returns show nothing that its first argument does not show."""
    return func.namespace == "aten" and func._schema.name not in ("aten::as_strided", "aten::_reshape_alias")


@cache
def written_arguments(func: Any) -> tuple[frozenset[int], frozenset[str]]:
    """The arguments that an operator may write to: their positions, and their names.

    As its schema says, which torch's own operators keep to, but for running statistics, and for sparse tensors, which
    keep the memory that they are made of. Of operators from elsewhere one cannot be sure: they may write to all.
    """
    is_torchs = func.namespace in ("aten", "prims") and not _KEEPERS.match(func._schema.name)
    written = [
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if not is_torchs or is_written(argument)
    ]
    return frozenset(index for index, _ in written), frozenset(name for _, name in written)


def is_written(argument: Any) -> bool:
    """Whether an operator of torch's own writes to an argument of its schema."""
    return argument.name in _WRITTEN_UNSAID or (argument.alias_info is not None and argument.alias_info.is_write)


def is_zero(fill_value: complex) -> bool:
    """Whether a fill value is all zero bits, which -0.0 is not."""
    return fill_value == 0 and "-" not in str(fill_value)


def fills_with_zeros(args: tuple[Any, ...]) -> bool:
    """Whether the arguments of a `FILL` say that nothing but zero bits are written, as far as that is known at once."""
    if len(args) < 2:
        return True
    value = args[1]
    if type(value) is torch.Tensor:
        return value.device.type == "cpu" and value.dim() == 0 and is_zero(value.item())
    return isinstance(value, bool | int | float | complex) and is_zero(value)


@cache
def out_names(func: Any) -> tuple[str, ...]:
    """The ``out=`` arguments of an operator."""
    return tuple(argument.name for argument in func._schema.arguments if argument.is_out)
