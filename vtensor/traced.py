"""Traced: virtual tensors in graphs of torch.compile, where one opaque operator does what they do when called."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils import _pytree as pytree

from vtensor.effects import Effect, effect_of, is_written
from vtensor.errors import ClosedError
from vtensor.region import Region
from vtensor.tensor import VirtualTensor
from vtensor.watched import NotForGraphs, OnTouch

__all__ = ["StandIn"]

# dtype, device and on_touch of a virtual tensor, and whether it begins where its storage does.
_Context = tuple[torch.dtype, torch.device, OnTouch, bool]


class StandIn(NamedTuple):
    """What a tensor has in place of memory while a graph is made.

    Compiled code may move, fuse and repeat what it does to a tensor's memory, and copies a whole tensor where it cannot
    write in place. So the graph holds no memory of virtual tensors, only their *keys*: int64 tensors of shape [3], a
    region's number, an offset in bytes, and the tensor's own number. Views change nothing but numbers. What reads or
    writes becomes a call of ``torch.ops.vtensor.run``, which does it as it is done without a graph, to real virtual
    tensors, in the order of the program.
    """

    key: torch.Tensor  # of the tensor outside of the graph that this is a view of
    byte_offset: int | torch.SymInt  # from there to the first element
    context: _Context


def _stand_in(
    key: torch.Tensor, byte_offset: int | torch.SymInt, size: Any, stride: Any, context: _Context, offset: Any = 0
) -> VirtualTensor:
    dtype, device, on_touch, *_ = context
    tensor: VirtualTensor = torch.Tensor._make_wrapper_subclass(
        VirtualTensor, size, stride, offset, dtype=dtype, device=device
    )
    tensor._on_touch, tensor._stand_in = on_touch, StandIn(key, byte_offset, context)
    # Used only where the graph returns this tensor.
    is_same = isinstance(byte_offset, int) and byte_offset == 0
    tensor._own_key = key if is_same else torch.ops.vtensor.moved(key, byte_offset)
    return tensor


class _Hooks:
    """What `VirtualTensor`, which does not know of this module, asks it for."""

    def key(self, tensor: VirtualTensor) -> torch.Tensor:
        """What names a tensor in graphs."""
        number = next(_numbers)
        _named[number] = tensor
        return _key(tensor._region, int(torch.Tensor.storage_offset(tensor)) * tensor.element_size(), number)

    def is_named(self, tensor: VirtualTensor, key: torch.Tensor) -> bool:
        """Whether this is what names a tensor now."""
        number = 0 if tensor._region is None else tensor._region.number
        with torch._C._DisableTorchDispatch():
            offset = int(torch.Tensor.storage_offset(tensor)) * tensor.element_size()
            return bool(key[:2].tolist() == [number, offset] and _named.get(int(key[2])) is tensor)

    def unflatten(self, inner: dict[str, torch.Tensor], context: _Context, size: Any, stride: Any) -> VirtualTensor:
        """A stand-in while a graph is made; when it runs, the tensor that a key names."""
        key = inner["_key"]
        if type(key) is torch.Tensor and not torch._is_functional_tensor(key):
            return _tensor_of(key, size, stride, context)
        return _stand_in(key, 0, size, stride, context)

    def put_in_graph(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put an operator on stand-ins into the graph that is being made."""
        match effect_of(func):
            case Effect.COMPOSITE:
                return func.decompose(*args, **kwargs)
            case Effect.REFUSED | Effect.RESHAPE:
                raise NotForGraphs(f"{func} on a virtual tensor is not for graphs; use a view, or a copy (.clone())")
            case Effect.VIEW:
                return _view(func, args, kwargs)
        return _put(func, args, kwargs)


VirtualTensor.graph_hooks = _Hooks()


# -- keys -------------------------------------------------------------------------------------------------------------


_numbers = itertools.count(1)
_named: weakref.WeakValueDictionary[int, VirtualTensor] = weakref.WeakValueDictionary()


class _KeyArray(np.ndarray[Any, np.dtype[np.int64]]):
    """Numbers that keep the memory which they name: a graph may save a key for its backward."""

    storage: object


def _key(region: Region | None, byte_offset: int, number: int) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        if region is None:
            return torch.tensor([0, byte_offset, number], device="cpu")
        array = np.array([region.number, byte_offset, number]).view(_KeyArray)
        array.storage = region.storage()
        return torch.from_numpy(array)


def _tensor_of(
    key: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    context: _Context,
    byte_offset: int = 0,
) -> VirtualTensor:
    """The view that a key names, so many bytes on."""
    dtype, device, on_touch, _ = context
    number, start, itself = key.tolist()
    named, offset = _named.get(itself), (start + byte_offset) // dtype.itemsize
    region = Region.numbered(number) if number else None
    if region is None and 0 in size:
        return VirtualTensor.wrap(torch.empty_strided(size, stride, dtype=dtype, device=device), None, on_touch)
    if named is not None and named.dtype == dtype and not named.is_inference():
        with torch._C._DisableTorchDispatch():  # shares what counts its versions
            plain = torch.Tensor.detach(named).as_strided(size, stride, offset)
    elif region is not None:
        plain = region.view_again(dtype, offset, tuple(size), tuple(stride))
    elif named is not None:  # it has moved to plain memory
        with torch._C._DisableTorchDispatch():
            plain = torch.empty(0, dtype=dtype, device=device)
            plain.set_(torch.Tensor.untyped_storage(named), offset, tuple(size), tuple(stride))
    else:
        raise ClosedError("this memory was closed")
    return VirtualTensor.wrap(plain, region, on_touch)


def _moved(key: torch.Tensor, byte_offset: int) -> torch.Tensor:
    region, start, number = key.tolist()
    return _key(Region.numbered(region), start + byte_offset, number)


# -- making a graph ---------------------------------------------------------------------------------------------------


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parent = args[0]
    parent_key, start, parent_context = parent._stand_in
    first = parent.storage_offset() * parent.element_size()
    if func is torch.ops.aten.as_strided.default and (len(args) > 3 or kwargs.get("storage_offset") is not None):
        if not parent_context[3]:
            raise NotForGraphs(
                f"{func} with an offset is not for graphs, where the tensor given does not begin its storage"
            )
        start = first = 0
    with torch.utils._python_dispatch._disable_current_modes():
        meta = torch.empty_strided(parent.shape, parent.stride(), dtype=parent.dtype, device="meta")
        views = func(meta, *args[1:], **kwargs)

    def stand_in(view: torch.Tensor) -> VirtualTensor:
        if view.is_conj() or view.is_neg():
            raise NotForGraphs(f"{func}: conjugates of virtual tensors are not for graphs: use a copy, .clone().conj()")
        delta = view.storage_offset() * view.element_size()
        offset = (first + delta) // view.element_size()
        context = (view.dtype, *parent_context[1:])
        return _stand_in(parent_key, start + delta, view.shape, view.stride(), context, offset)

    return pytree.tree_map(stand_in, views)


def _put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put into the graph what reads or writes virtual tensors."""
    if _why_no_graphs:
        raise NotForGraphs(_why_no_graphs)
    schema = func._schema
    writes_virtual = writes_others = False
    for argument, value in _named_arguments(schema, args, kwargs):
        if is_written(argument):
            for leaf in pytree.tree_leaves(value):
                writes_virtual |= isinstance(leaf, VirtualTensor)
                writes_others |= isinstance(leaf, torch.Tensor) and not isinstance(leaf, VirtualTensor)
    needs_copies = writes_others or not _gives_tensors(schema)
    if writes_virtual and needs_copies:
        raise NotForGraphs(f"{func} writes to a virtual tensor, and to others or gives other results: not for graphs")
    if (
        writes_virtual
        and torch.is_grad_enabled()
        and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs)))
    ):
        raise NotForGraphs(f"{func} writes what requires grad to a virtual tensor, which a graph has no record of")
    if needs_copies:
        args, kwargs = pytree.tree_map(
            lambda leaf: _copied(leaf) if isinstance(leaf, VirtualTensor) else leaf, (args, kwargs)
        )
        return func(*args, **kwargs)
    _keep_from_cuda_graphs()
    calls = _calls_so_far()
    calls.token, *fresh = torch.ops.vtensor.run(*_encode(func, args, kwargs, calls), calls.token)
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


class _Calls:
    """The calls of `run` in a graph that is being made.

    Each gives a *token*, which the next one takes, so that they stay in order. (That `run` is registered as one with
    ordered effects is not enough: torch 2.13's Inductor looks for the effect before under a wrong name.) A token says
    how often each of the tensors that were used had been written to by then: in a backward, what the forward saved must
    still be there.
    """

    def __init__(self) -> None:
        self.token: torch.Tensor | None = None
        self._keys: list[torch.Tensor] = []

    def row(self, key: torch.Tensor) -> int:
        """Where in a token a tensor is."""
        for row, known in enumerate(self._keys):
            if known is key:
                return row
        self._keys.append(key)
        return len(self._keys) - 1

    @property
    def num_rows(self) -> int:
        """Length of the next token."""
        return len(self._keys)


_calls: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()


def _calls_so_far() -> _Calls:
    keys = torch._C._TorchDispatchModeKey
    trace = torch._C._get_dispatch_mode(keys.FUNCTIONAL) or torch._C._get_dispatch_mode(keys.PROXY)
    return _Calls() if trace is None else _calls.setdefault(trace, _Calls())


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


def _encode(
    func: Any, args: Any, kwargs: Any, calls: _Calls
) -> tuple[str, str, list[Any], list[Any], list[Any], list[Any]]:
    """The arguments of `run` for a call of an operator."""
    keys: list[torch.Tensor] = []
    views: list[int | torch.SymInt] = []  # of each: dimensions, shape, strides, offset in bytes
    metadata: list[list[str]] = []
    tensors: list[torch.Tensor] = []
    numbers: list[Any] = []

    def encode(leaf: Any) -> Any:
        if isinstance(leaf, VirtualTensor):
            if leaf._stand_in is None:
                raise NotForGraphs(f"{func}: a virtual tensor that is no argument of the graph")
            key, byte_offset, (dtype, device, on_touch, _) = leaf._stand_in
            keys.append(key)
            views.extend((leaf.dim(), *leaf.shape, *leaf.stride(), byte_offset))
            metadata.append([str(dtype), str(device), on_touch])
            return {"virtual": len(keys) - 1}
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
    rows = [calls.row(key) for key in keys]
    is_backward = torch._C._current_autograd_node() is not None
    text = json.dumps([tree, metadata, rows, calls.num_rows, is_backward])
    return func.name(), text, keys, views, tensors, numbers


class _Call(NamedTuple):
    """What a call of `run` says of itself, which is the same each time that the graph runs."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    contexts: list[_Context]  # of the virtual tensors
    rows: list[int]  # of them in a token
    num_rows: int
    is_backward: bool


@functools.lru_cache(maxsize=4096)
def _parsed(name: str, text: str) -> _Call:
    (args, kwargs), metadata, rows, num_rows, is_backward = json.loads(text)
    contexts = [(_dtype(dtype), torch.device(device), on_touch, False) for dtype, device, on_touch in metadata]
    return _Call(_operator(name), args, kwargs, contexts, rows, num_rows, is_backward)


def _decode(
    call: _Call,
    virtual: Callable[[int, Sequence[int], Sequence[int], int, _Context], torch.Tensor],
    views: Sequence[int],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[Any],
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of an operator from those of `run`."""
    made = []
    for number, context in enumerate(call.contexts):
        dims, *rest = views
        made.append(virtual(number, rest[:dims], rest[dims : 2 * dims], rest[2 * dims], context))
        views = rest[2 * dims + 1 :]

    args = [_decoded(value, made, tensors, numbers) for value in call.args]
    return args, {name: _decoded(value, made, tensors, numbers) for name, value in call.kwargs.items()}


def _decoded(value: Any, made: Sequence[Any], tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """One argument; made of no closure that calls itself, a cycle that would keep the tensors for a while."""
    if isinstance(value, list):
        return [_decoded(one, made, tensors, numbers) for one in value]
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
    keys: list[torch.Tensor],
    views: list[int],
    tensors: list[torch.Tensor],
    numbers: list[Any],
    after: torch.Tensor | None,
) -> list[torch.Tensor]:
    regions: list[Region | None] = []

    def virtual(number: int, size: Any, stride: Any, byte_offset: int, context: _Context) -> torch.Tensor:
        tensor = _tensor_of(keys[number], size, stride, context, byte_offset)
        regions.append(tensor._region)
        return tensor

    call = _parsed(name, text)
    args, kwargs = _decode(call, virtual, views, tensors, numbers)
    known = [] if after is None else after.tolist()
    seen = known + [[-1, -1]] * (call.num_rows - len(known))
    for key, row, region in zip(keys, call.rows, regions, strict=True) if call.is_backward else ():
        pairs = zip(seen[row], _num_writes(key, region), strict=True)
        if any(-1 not in pair and pair[0] != pair[1] for pair in pairs):
            raise RuntimeError(
                f"{call.func}: a virtual tensor needed for gradient computation was written to between forward and "
                "backward; let the forward use a copy (.clone())"
            )
    before = [0 if region is None else region.num_writes for region in regions]
    with torch.no_grad():
        fresh = _fresh(call.func, call.func(*args, **kwargs))
    for key, row, region, number in zip(keys, call.rows, regions, before, strict=True):
        if region is not None and region.num_writes != number:
            _note_write(key)
        seen[row] = _num_writes(key, region)
    return [torch.tensor(seen, dtype=torch.int64, device="cpu").view(-1, 2), *fresh]


def _num_writes(key: torch.Tensor, region: Region | None) -> list[int]:
    """How often memory, and the tensor that a key names, were written to; -1 where that is not known."""
    tensor = _named.get(int(key[2]))
    is_known = tensor is not None and not tensor.is_inference()
    return [-1 if region is None else region.num_writes, cast(VirtualTensor, tensor)._version if is_known else -1]


def _note_write(key: torch.Tensor) -> None:
    """Let autograd know that a tensor outside of the graph was written to, and may be needed by a backward there."""
    tensor = _named.get(int(key[2]))
    if tensor is not None and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _run_fake(
    name: str,
    text: str,
    keys: list[torch.Tensor],
    views: list[int],
    tensors: list[torch.Tensor],
    numbers: list[Any],
    after: torch.Tensor | None,
) -> list[torch.Tensor]:
    def virtual(number: int, size: Any, stride: Any, byte_offset: int, context: _Context) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=context[0], device=context[1])

    call = _parsed(name, text)
    args, kwargs = _decode(call, virtual, views, tensors, numbers)
    fresh = _fresh(call.func, call.func(*args, **kwargs))
    return [torch.empty(call.num_rows, 2, dtype=torch.int64, device="cpu"), *fresh]


def _dtype(name: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, name.removeprefix("torch.")))


_new_library: Any = torch.library.Library
_library = _new_library("vtensor", "DEF")
# What these do depends on what a key names at the time, so a CUDA graph that replays it would be wrong.
_not_for_cuda_graphs = tuple(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None)
_library.define(
    "run(str operator, str arguments, Tensor[] keys, SymInt[] views, Tensor[] tensors, Scalar[] numbers, "
    "Tensor? after) -> Tensor[]",
    tags=_not_for_cuda_graphs,
)
_library.define("moved(Tensor key, SymInt byte_offset) -> Tensor", tags=_not_for_cuda_graphs)
_library.impl("run", _run, "CompositeExplicitAutograd")
_library.impl("moved", _moved, "CompositeExplicitAutograd")
torch.library.register_fake("vtensor::run", _run_fake, lib=_library)
torch.library.register_fake("vtensor::moved", lambda key, byte_offset: torch.empty_like(key), lib=_library)


def _keep_calls() -> str:
    """Have graphs keep all calls, in their order; why not, where this torch has no way to."""
    try:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        _register_effectful_op(torch.ops.vtensor.run.default, _EffectType.ORDERED)
    except Exception as error:  # it is not public, and who makes no graph need not know
        return f"torch {torch.__version__} has no ordered effects as this version of vtensor knows them ({error!r})"
    return ""


def _keep_from_cuda_graphs() -> None:
    """Have Inductor leave calls out of its CUDA graphs: what they are wrapped in for their effects hides their tag.

    So all operators with ordered effects are left out from then on, of whatever library; none belongs there.
    """
    inductor: Any = sys.modules.get("torch._inductor.utils")  # not there: no CUDA graphs
    left_out = getattr(inductor, "FORBIDDEN_CUDAGRAPH_OPS", None)
    if left_out is not None and "with_effects" not in left_out:
        inductor.FORBIDDEN_CUDAGRAPH_OPS = left_out | {"with_effects"}


_why_no_graphs = _keep_calls()
