"""Tests without a GPU run Triton's kernels in its interpreter, as if `TRITON_INTERPRET` had been set in time.

Triton decides when a function is decorated, and by then other tests of the process may have imported it: transformers
does. So the variable cannot be set in time for these tests alone; and set for all, it would change what others do.
Instead each test finds in the modules of the kernels what the variable would have put there, and others find nothing
changed. That the variable itself works is tested in a process of its own.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

PACKAGE = "vtensor.triton_kernels"


@functools.cache
def _kernel_modules() -> tuple[Any, ...]:
    package = importlib.import_module(PACKAGE)
    names = [PACKAGE, *(f"{PACKAGE}.{module.name}" for module in pkgutil.iter_modules(package.__path__))]
    return tuple(map(importlib.import_module, names))


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu") or sys.platform != "linux":  # there is no Triton elsewhere
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def interpreted(function: Any) -> Any:
        return _made.setdefault(function.fn, InterpretedFunction(function.fn))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return interpreted(self)(*args, **kwargs)

    def bind(self: Any, owner: Any, _: Any = None) -> Any:
        return self if owner is None else functools.partial(call, self, owner)

    modules = _kernel_modules()  # before the variable is set, which would change them for good
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # Triton's own functions, such as tl.sum, whose references are everywhere; also as methods, such as x.sum().
        patch.setattr(JITFunction, "__call__", call)
        patch.setattr(JITFunction, "__get__", bind, raising=False)
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    patch.setattr(module, name, interpreted(value))
        yield


_made: dict[Any, Any] = {}
