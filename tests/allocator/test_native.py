"""The cache of compiled code: it must not outlive any source that is compiled into it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from vtensor.allocator import native, plan
from vtensor.allocator.driver import host_native
from vtensor.kvcache import plan as kvcache_plan

ROOT = Path(native.__file__).resolve().parent


def test_the_stamp_covers_every_source() -> None:
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(ROOT.rglob("*.py"))))
    assert digest.hexdigest() == native.SOURCES_STAMP
    assert {"native.py", "plan.py", "base.py", "host_native.py"} <= {path.name for path in ROOT.rglob("*.py")}


FUNCTIONS: list[Any] = [plan.commit, plan.decommit, kvcache_plan.step, *host_native.FUNCTIONS]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_an_entry_of_another_stamp_is_not_taken(function: Any) -> None:
    cache_file = function._cache._cache_file
    assert native.SOURCES_STAMP in cache_file._source_stamp
    cache_file.save("key", "code")
    try:
        assert cache_file.load("key") == "code"
        ours, cache_file._source_stamp = cache_file._source_stamp, ("another", *cache_file._source_stamp[1:])
        assert cache_file.load("key") is None
        cache_file._source_stamp = ours
    finally:
        overloads = cache_file._load_index()
        overloads.pop("key", None)
        cache_file._save_index(overloads)


def test_code_is_compiled_where_it_cannot_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("numba.core.dispatcher.Dispatcher.enable_caching", refuse)
    monkeypatch.setattr("numba.core.ccallback.CFunc.enable_caching", refuse)

    def double(value: int) -> int:
        return 2 * value

    assert native.compiled(double)(21) == 42
    assert native.callback("int32(int64)")(double).ctypes(21) == 42
