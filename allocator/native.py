"""Building blocks of the code that runs without the GIL: compilation, calls by address, raw memory, a native mutex.

Everything compiled in this project goes through `compiled` (numba, `nogil`, cached on disk), takes every address as an
argument (numba cannot cache a function that closes over a pointer) and raises nothing: errors are returned as codes,
since a raising path would bring the GIL back.

This module is imported on first use only, never by ``import vtensor``: numba takes 0.3 s to load.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from llvmlite import binding as llvm
from llvmlite import ir
from numba import carray, njit, types
from numba.core import sigutils
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

__all__ = [
    "SOURCES_STAMP",
    "bound",
    "call",
    "callback",
    "compiled",
    "int8_at",
    "int32_at",
    "int64_at",
    "lock",
    "packed",
    "sparse_array",
    "symbol_address",
    "unlock",
]

Function = TypeVar("Function", bound=Callable[..., Any])
_WORD = ir.IntType(64)
_MAP_NORESERVE = 0x4000  # Linux; in the mmap module from Python 3.13 on


def _sources_stamp() -> str:
    """A digest of all sources that compiled code is made of."""
    root = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCES_STAMP = _sources_stamp()


def _enable_caching(function: Any) -> None:
    """Cache a function on disk, where there is a place for it, until any source of this package changes.

    By itself it looks at the file that the function is written in only, while constants (numbers of calls, say) and
    functions of other files are compiled into it: after an upgrade, one driver call could be taken for another.
    """
    try:
        function.enable_caching()
    except RuntimeError:  # nowhere to write to: compile in each process
        return
    cache_file = function._cache._cache_file
    cache_file._source_stamp = (SOURCES_STAMP, cache_file._source_stamp)


def compiled(function: Function) -> Function:
    """Compile `function` for use from any thread without the GIL."""
    dispatcher = njit(nogil=True, error_model="numpy")(function)
    _enable_caching(dispatcher)
    return cast(Function, dispatcher)


def callback(signature: str) -> Callable[[Callable[..., int | None]], Any]:
    """Compile a function to a C function of that signature: numba's `cfunc`, with the cache of `compiled`."""

    def compile_it(function: Callable[..., int | None]) -> Any:
        made = CFunc(function, sigutils.normalize_signature(signature), locals={}, options={})
        _enable_caching(made)
        made.compile()
        return made

    return compile_it


def bound(address: int, word: int, signature: str) -> int:
    """Address of a C function that passes on its arguments to the one at `address`, after a word of its own.

    So a callback whose signature has no room for a context is compiled once, and still serves many. The code stays in
    memory until the process has ended: whoever was given it may call it at any time.

    Parameters
    ----------
    address : int
        Of a C function of type ``result(int64, *arguments)``.
    word : int
        Its first argument.
    signature : str
        ``"result(*arguments)"`` in numba's words, of integers.
    """
    arguments, result = sigutils.normalize_signature(signature)

    def ir_type(kind: Any) -> Any:
        return ir.VoidType() if kind == types.void else ir.IntType(kind.bitwidth)

    module = ir.Module()
    module.triple = llvm.get_process_triple()
    kinds = [ir_type(kind) for kind in arguments]
    function = ir.Function(module, ir.FunctionType(ir_type(result), kinds), f"bound_{address:x}_{word:x}")
    builder = ir.IRBuilder(function.append_basic_block())
    target = ir.FunctionType(ir_type(result), [_WORD, *kinds])
    pointer = builder.inttoptr(ir.Constant(_WORD, address), target.as_pointer())
    value = builder.call(pointer, [ir.Constant(_WORD, word), *function.args])
    if result == types.void:
        builder.ret_void()
    else:
        builder.ret(value)
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))  # or the end of the interpreter would unload it
    return int(engine.get_function_address(function.name))


@intrinsic
def call(typing_context: Any, address: Any, arguments: Any) -> Any:
    """`int32 f(int64, ...)` at `address`, called with a tuple of integers; the result widened to int64.

    Every call of the driver table has this shape: addresses, sizes, handles and flags are all 64 bits wide.
    """
    if not isinstance(arguments, types.BaseTuple) or not all(isinstance(kind, types.Integer) for kind in arguments):
        return None

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        words = [
            context.cast(builder, builder.extract_value(values[1], index), kind, types.int64)
            for index, kind in enumerate(arguments)
        ]
        kind = ir.FunctionType(ir.IntType(32), [_WORD] * len(words))
        return builder.sext(builder.call(builder.inttoptr(values[0], kind.as_pointer()), words), _WORD)

    return types.int64(types.int64, arguments), generate


@intrinsic
def symbol_address(typing_context: Any, name: Any) -> Any:
    """Address of the symbol `name` (a literal), as given to LLVM with `add_symbol` before the caller was loaded.

    This is how a C callback, whose signature has no room for a context, finds its state, and still can be cached.
    """
    if not isinstance(name, types.StringLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        module, symbol = builder.module, name.literal_value
        variable = module.globals.get(symbol) or ir.GlobalVariable(module, _WORD, symbol)
        return builder.ptrtoint(variable, _WORD)

    return types.int64(name), generate


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@compiled
def int64_at(address: int, length: int) -> npt.NDArray[np.int64]:
    """View of `length` int64 at `address`."""
    return carray(_pointer(address), (length,), np.int64)  # type: ignore[no-any-return]


@compiled
def int32_at(address: int, length: int) -> npt.NDArray[np.int32]:
    """View of `length` int32 at `address`."""
    return carray(_pointer(address), (length,), np.int32)  # type: ignore[no-any-return]


@compiled
def int8_at(address: int, length: int) -> npt.NDArray[np.int8]:
    """View of `length` int8 at `address`."""
    return carray(_pointer(address), (length,), np.int8)  # type: ignore[no-any-return]


def packed(values: Iterable[npt.NDArray[Any] | int]) -> npt.NDArray[np.int64]:
    """What compiled code finds arrays again by: address and length of each, in one array, with numbers as they are.

    To hand over this one takes a fraction of what numba takes to unwrap a tuple of arrays in every call.
    """
    words: list[int] = []
    for value in values:
        assert isinstance(value, int) or value.flags.c_contiguous, "compiled code takes it to be in C's order"
        words += [value] if isinstance(value, int) else [value.ctypes.data, value.size]
    return np.array(words, np.int64)


# A zeroed pthread_mutex_t (40 bytes on Linux) is an unlocked one.
lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.int64))
unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.int64))


def sparse_array(length: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A zero-filled array of any length that costs memory only where it was written.

    Tables indexed by page group are as long as the address range they describe, and mostly empty.
    """
    element = np.dtype(dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, max(length, 1) * element.itemsize, flags=flags), dtype=element)[:length]
