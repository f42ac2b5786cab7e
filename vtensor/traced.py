"""Traced: virtual tensors in graphs of torch.compile, where one opaque operator does what they do when called."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.utils import _pytree as pytree

from vtensor.effects import Effect, effect_of, is_written
from vtensor.region import Region
from vtensor.tensor import NotForGraphs, OnTouch, VirtualTensor

__all__ = ["StandIn"]

# dtype, device and on_touch of a virtual tensor, and whether it begins where its storage does.
_Context = tuple[torch.dtype, torch.device, OnTouch, bool]


class StandIn:
    """What a tensor has in place of memory while a graph is made.

    Compiled code may move, fuse and repeat what it does to a tensor's memory, and copies a whole tensor where it cannot
    write in place. So the graph holds no memory of virtual tensors, only their *handles*: int64 tensors of shape [2],
    a region's number and an offset in bytes. Views change nothing but numbers. What reads or writes becomes a call of
    ``torch.ops.vtensor.run``, which does it as it is done without a graph, to real virtual tensors, in the order of
    the program.

    Parameters
    ----------
    handle : Tensor
        Of a tensor outside of the graph.
    shift : int or SymInt
        Bytes from there to the first element.
    context : tuple
        As `VirtualTensor.__tensor_flatten__` gives it.
    """

    def __init__(self, handle: torch.Tensor, shift: int | torch.SymInt, context: _Context) -> None:
        self.handle, self.shift, self.context = handle, shift, context


def _stand_in(
    handle: torch.Tensor, shift: int | torch.SymInt, size: Any, stride: Any, context: _Context, offset: Any = 0
) -> VirtualTensor:
    dtype, device, on_touch, _ = context
    tensor: VirtualTensor = torch.Tensor._make_wrapper_subclass(
        VirtualTensor, size, stride, offset, dtype=dtype, device=device
    )
    tensor._on_touch, tensor._stand_in = on_touch, StandIn(handle, shift, context)
    # Used only where the graph returns this tensor.
    tensor._own_handle = handle if _is_zero(shift) else torch.ops.vtensor.shifted(handle, shift)
    return tensor


def _is_zero(shift: int | torch.SymInt) -> bool:
    return isinstance(shift, int) and shift == 0


def put_in_graph(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put an operator on stand-ins into the graph that is being made."""
    match effect_of(func):
        case Effect.COMPOSITE:
            return func.decompose(*args, **kwargs)
        case Effect.REFUSED | Effect.RESHAPE:
            raise NotForGraphs(f"{func} on a virtual tensor is not for graphs; use a view, or a copy (.clone())")
        case Effect.VIEW:
            return _view(func, args, kwargs)
    return _put(func, args, kwargs)


def _unflatten(inner: dict[str, torch.Tensor], context: _Context, size: Any, stride: Any) -> VirtualTensor:
    """A stand-in while a graph is made; when it runs, the tensor that a handle names."""
    handle = inner["_handle"]
    if type(handle) is torch.Tensor and not torch._is_functional_tensor(handle):
        return _tensor_of(handle, size, stride, context[:3])
    return _stand_in(handle, 0, size, stride, context)


VirtualTensor.unflatten, VirtualTensor.put_in_graph = _unflatten, put_in_graph


def _tensor_of(
    handle: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    how: tuple[torch.dtype, torch.device, OnTouch],
    shift: int = 0,
) -> VirtualTensor:
    """The view that a handle names, so many bytes on."""
    dtype, device, on_touch = how
    number, offset_bytes = handle.tolist()
    if number == 0:
        return VirtualTensor.wrap(torch.empty_strided(size, stride, dtype=dtype, device=device), None, on_touch)
    region = Region.numbered(number)
    plain = region.view_again(dtype, (offset_bytes + shift) // dtype.itemsize, tuple(size), tuple(stride))
    return VirtualTensor.wrap(plain, region, on_touch)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parent = args[0]
    start, first = parent._stand_in.shift, parent.storage_offset() * parent.element_size()
    if func is torch.ops.aten.as_strided.default and (len(args) > 3 or kwargs.get("storage_offset") is not None):
        if not parent._stand_in.context[3]:
            raise NotForGraphs(
                f"{func} with an offset is not for graphs, where the tensor given does not begin its storage"
            )
        start = first = 0
    with torch.utils._python_dispatch._disable_current_modes():
        meta = torch.empty_strided(parent.shape, parent.stride(), dtype=parent.dtype, device="meta")
        views = func(meta, *args[1:], **kwargs)

    def stand_in(view: torch.Tensor) -> VirtualTensor:
        delta = view.storage_offset() * view.element_size()
        offset = (first + delta) // view.element_size()
        context = (view.dtype, *parent._stand_in.context[1:])
        return _stand_in(parent._stand_in.handle, start + delta, view.shape, view.stride(), context, offset)

    return pytree.tree_map(stand_in, views)


def _put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put into the graph what reads or writes virtual tensors."""
    schema = func._schema
    writes_virtual = writes_others = False
    for argument, value in _named_arguments(schema, args, kwargs):
        if is_written(argument):
            for leaf in pytree.tree_leaves(value):
                writes_virtual |= isinstance(leaf, VirtualTensor)
                writes_others |= isinstance(leaf, torch.Tensor) and not isinstance(leaf, VirtualTensor)
    if writes_virtual and writes_others:
        raise NotForGraphs(f"{func} writes to virtual and to other tensors at once, which is not for graphs")
    if writes_others or not _gives_tensors(schema):
        args, kwargs = pytree.tree_map(
            lambda leaf: _copied(leaf) if isinstance(leaf, VirtualTensor) else leaf, (args, kwargs)
        )
        return func(*args, **kwargs)
    trace = _trace()
    ticket, *fresh = torch.ops.vtensor.run(*_encode(func, args, kwargs), _tickets.get(trace) if trace else None)
    if trace is not None:
        _tickets[trace] = ticket
    by_alias = {
        frozenset(argument.alias_info.before_set): value
        for argument, value in _named_arguments(schema, args, kwargs)
        if argument.alias_info is not None
    }
    results = []
    for returned in schema.returns:
        if returned.alias_info is not None:
            results.append(by_alias[frozenset(returned.alias_info.before_set)])
        elif str(returned.type) == "Tensor":
            results.append(fresh.pop(0))
        else:
            results.append(fresh)
    return None if not results else results[0] if len(results) == 1 else tuple(results)


# By graph that is being made: what the last call of `run` gave, which the next one takes, so that they stay in order.
# (That `run` is registered as one with ordered effects is not enough: torch 2.13's Inductor looks for the effect before
# under a wrong name.)
_tickets: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()


def _trace() -> Any:
    """What is there once for each graph that is being made, or None."""
    keys = torch._C._TorchDispatchModeKey
    return torch._C._get_dispatch_mode(keys.FUNCTIONAL) or torch._C._get_dispatch_mode(keys.PROXY)


def _named_arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    by_name = {argument.name: argument for argument in schema.arguments}
    return [*zip(schema.arguments, args, strict=False), *((by_name[name], value) for name, value in kwargs.items())]


def _gives_tensors(schema: Any) -> bool:
    """Whether all results are tensors, none of them left out; at most one is a list."""
    types = [str(returned.type) for returned in schema.returns]
    return (
        set(types) <= {"Tensor", "List[Tensor]"}
        and types.count("List[Tensor]") <= 1
        and all(argument.name != "output_mask" for argument in schema.arguments)
    )


def _copied(tensor: VirtualTensor) -> torch.Tensor:
    return cast(torch.Tensor, _put(torch.ops.aten.clone.default, (tensor,), {}))


# -- the operator -----------------------------------------------------------------------------------------------------


def _encode(func: Any, args: Any, kwargs: Any) -> tuple[str, str, list[Any], list[Any], list[Any], list[Any]]:
    """The arguments of `run` for a call of an operator."""
    handles: list[torch.Tensor] = []
    views: list[int | torch.SymInt] = []  # of each: dimensions, shape, strides, shift
    how: list[dict[str, Any]] = []
    tensors: list[torch.Tensor] = []
    numbers: list[Any] = []

    def encode(leaf: Any) -> Any:
        if isinstance(leaf, VirtualTensor):
            handles.append(leaf._stand_in.handle)
            views.extend((leaf.dim(), *leaf.shape, *leaf.stride(), leaf._stand_in.shift))
            dtype, device, on_touch, _ = leaf._stand_in.context
            how.append({"dtype": str(dtype), "device": str(device), "on_touch": on_touch})
            return {"virtual": len(handles) - 1}
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            return {"tensor": len(tensors) - 1}
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            numbers.append(leaf)
            return {"number": len(numbers) - 1}
        if isinstance(leaf, complex):
            return {"complex": [leaf.real, leaf.imag]}
        if isinstance(leaf, torch.device):
            return {"device": str(leaf)}
        if isinstance(leaf, torch.dtype | torch.layout | torch.memory_format):
            return {"torch": str(leaf).removeprefix("torch.")}
        if leaf is None or isinstance(leaf, bool | int | float | str):
            return leaf
        raise NotForGraphs(f"{func}: {type(leaf).__name__} is no argument for a virtual tensor in a graph")

    tree = [pytree.tree_map(encode, list(args)), pytree.tree_map(encode, kwargs)]
    return func.name(), json.dumps([tree, how]), handles, views, tensors, numbers


def _decode(
    text: str,
    virtual: Callable[[int, Sequence[int], Sequence[int], int, dict[str, Any]], torch.Tensor],
    views: Sequence[int],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[Any],
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of an operator from those of `run`."""
    tree, how = json.loads(text)
    made = []
    for number, one in enumerate(how):
        dims, *rest = views
        made.append(virtual(number, rest[:dims], rest[dims : 2 * dims], rest[2 * dims], one))
        views = rest[2 * dims + 1 :]

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(one) for one in value]
        if not isinstance(value, dict):
            return value
        ((kind, one),) = value.items()
        match kind:
            case "virtual":
                return made[one]
            case "tensor":
                return tensors[one]
            case "number":
                return numbers[one]
            case "complex":
                return complex(*one)
            case "device":
                return torch.device(one)
        return getattr(torch, one)

    args, kwargs = tree
    return decode(args), {name: decode(value) for name, value in kwargs.items()}


def _operator(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def _fresh(func: Any, result: Any) -> list[torch.Tensor]:
    """Those results that are not an argument."""
    results = (result,) if len(func._schema.returns) == 1 else result or ()
    pairs = zip(func._schema.returns, results, strict=True)
    return pytree.tree_leaves([one for returned, one in pairs if returned.alias_info is None])


def _run(
    name: str,
    text: str,
    handles: list[torch.Tensor],
    views: list[int],
    tensors: list[torch.Tensor],
    numbers: list[Any],
    after: torch.Tensor | None,
) -> list[torch.Tensor]:
    def virtual(number: int, size: Any, stride: Any, shift: int, how: dict[str, Any]) -> torch.Tensor:
        described = _dtype(how), torch.device(how["device"]), how["on_touch"]
        return _tensor_of(handles[number], size, stride, described, shift)

    func = _operator(name)
    args, kwargs = _decode(text, virtual, views, tensors, numbers)
    with torch.no_grad():
        return [torch.empty(0, device="cpu"), *_fresh(func, func(*args, **kwargs))]


def _run_fake(
    name: str,
    text: str,
    handles: list[torch.Tensor],
    views: list[int],
    tensors: list[torch.Tensor],
    numbers: list[Any],
    after: torch.Tensor | None,
) -> list[torch.Tensor]:
    def virtual(number: int, size: Any, stride: Any, shift: int, how: dict[str, Any]) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=_dtype(how), device=how["device"])

    func = _operator(name)
    args, kwargs = _decode(text, virtual, views, tensors, numbers)
    return [torch.empty(0, device="cpu"), *_fresh(func, func(*args, **kwargs))]


def _dtype(how: dict[str, Any]) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, how["dtype"].removeprefix("torch.")))


def _shifted(handle: torch.Tensor, shift: int) -> torch.Tensor:
    return handle + handle.new_tensor([0, shift])


_new_library: Any = torch.library.Library
_library = _new_library("vtensor", "DEF")
_library.define(
    "run(str operator, str arguments, Tensor[] handles, SymInt[] views, Tensor[] tensors, Scalar[] numbers, "
    "Tensor? after) -> Tensor[]"
)
_library.define("shifted(Tensor handle, SymInt shift) -> Tensor")
_library.impl("run", _run, "CompositeExplicitAutograd")
_library.impl("shifted", _shifted, "CompositeExplicitAutograd")
torch.library.register_fake("vtensor::run", _run_fake, lib=_library)
torch.library.register_fake("vtensor::shifted", lambda handle, shift: torch.empty_like(handle), lib=_library)
# Graphs keep all calls, in their order.
_register_effectful_op(torch.ops.vtensor.run.default, _EffectType.ORDERED)
