"""Driver calls that fail on request, and a list of the calls made. The same for every backend.

Numba shims take the places of a driver's entry points, so that compiled code meets them as well, without the GIL. They
count calls of each kind, note them, and answer some with an error code instead of passing them on::

    with fail(driver, Call.MAP, nth=2, code=999):
        space.commit(...)                              # its second map fails, once
    with record(driver) as calls:
        space.commit(...)
    assert calls.count(Call.MAP) == 1
    with hold(driver, Call.MAP) as held:               # its first map waits, in whatever thread
        job = space.commit_ahead(...)
        held.wait_until_begun()
        ...
        held.release()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cfunc, njit, types

from vtensor.allocator.driver import Call, Driver
from vtensor.allocator.driver.base import SUCCESS
from vtensor.allocator.native import call, int64_at, lock, unlock

__all__ = ["BROKEN", "Calls", "Held", "Made", "delay", "fail", "hold", "num_begun", "record"]

BROKEN = 999  # CUDA_ERROR_UNKNOWN: an error that is no shortage and that nobody expects

# Words of the state: a mutex (eight), the number of calls noted, then a row for each kind of call.
_NUM_NOTED, _ROWS = 8, 16
_REAL, _COUNT, _FAIL_FROM, _FAIL_TO, _CODE, _DELAY_US, _HELD, _ROW_WORDS = 0, 1, 2, 3, 4, 5, 6, 8
_usleep = types.ExternalFunction("usleep", types.int32(types.int32))
_state = np.zeros(_ROWS + len(Call) * _ROW_WORDS, np.int64)
_MAX_NOTED, _NOTE_WORDS = 1 << 16, 8
_notes = np.zeros((_MAX_NOTED, _NOTE_WORDS), np.int64)  # kind, result, arguments
# Plain integers, which numba freezes into the shims: they cannot be cached, and need not be.
_STATE_ADDRESS, _STATE_WORDS = int(_state.ctypes.data), len(_state)
_NOTES_ADDRESS = int(_notes.ctypes.data)


class Made(NamedTuple):
    """One call made: which, with what, and the result."""

    call: Call
    arguments: tuple[int, ...]
    code: int


class Calls:
    """The calls made since a moment."""

    def __init__(self) -> None:
        self._start = int(_state[_NUM_NOTED])
        self._end: int | None = None

    def stop(self) -> None:
        """Note no further calls."""
        self._end = int(_state[_NUM_NOTED])

    def __iter__(self) -> Iterator[Made]:
        end = int(_state[_NUM_NOTED]) if self._end is None else self._end
        if end > _MAX_NOTED:
            raise RuntimeError(f"{end} calls were made under one shim, room is for {_MAX_NOTED}")
        for row in _notes[self._start : end].tolist():
            kind = Call(row[0])
            yield Made(kind, tuple(row[2 : 2 + kind.num_arguments]), row[1])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<Calls {[f'{made.call.name}={made.code}' for made in self]}>"

    def count(self, which: Call) -> int:
        """Number of calls of one kind, those that failed included."""
        return sum(made.call is which for made in self)


@njit(nogil=True, error_model="numpy")
def _forward(kind, arguments):  # type: ignore[no-untyped-def]
    state = int64_at(_STATE_ADDRESS, _STATE_WORDS)
    row = state[_ROWS + kind * _ROW_WORDS : _ROWS + (kind + 1) * _ROW_WORDS]
    lock(_STATE_ADDRESS)
    row[_COUNT] += 1
    number = row[_COUNT]
    code = row[_CODE] if row[_FAIL_FROM] <= row[_COUNT] < row[_FAIL_TO] else SUCCESS
    index = state[_NUM_NOTED]
    state[_NUM_NOTED] += 1
    unlock(_STATE_ADDRESS)
    if row[_DELAY_US] > 0:
        _usleep(row[_DELAY_US])
    while row[_HELD] == number:
        _usleep(500)
    if code == SUCCESS:
        code = call(row[_REAL], arguments)
    if index < _MAX_NOTED:
        note = int64_at(_NOTES_ADDRESS + index * _NOTE_WORDS * 8, _NOTE_WORDS)
        note[0], note[1] = kind, code
        for position in range(len(arguments)):
            note[2 + position] = arguments[position]
    return code


def _shim_of(which: Call) -> Any:
    kind, count = int(which), which.num_arguments

    def one(a):  # type: ignore[no-untyped-def]
        return _forward(kind, (a,))

    def two(a, b):  # type: ignore[no-untyped-def]
        return _forward(kind, (a, b))

    def four(a, b, c, d):  # type: ignore[no-untyped-def]
        return _forward(kind, (a, b, c, d))

    def five(a, b, c, d, e):  # type: ignore[no-untyped-def]
        return _forward(kind, (a, b, c, d, e))

    function: Callable[..., Any] = {1: one, 2: two, 4: four, 5: five}[count]
    return cfunc(types.int32(*[types.int64] * count))(function)


@cache
def _shims() -> tuple[Any, ...]:
    """Compiled once a session (a second or two), and kept: their addresses live as long as they do."""
    return tuple(_shim_of(which) for which in Call)


_installed: list[Driver] = []  # one entry a context that is entered


@contextmanager
def _shimmed(driver: Driver) -> Iterator[None]:
    if not _installed:
        shims = _shims()
        for which in Call:
            _row(which)[_REAL] = driver.entry_points[which]  # not 0 in between: another thread may still be in a shim
            _row(which)[_COUNT:] = 0
        _state[_NUM_NOTED] = 0
        driver.entry_points[:] = [shim.address for shim in shims]
    elif _installed[-1] is not driver:
        raise RuntimeError("one driver at a time")
    _installed.append(driver)
    try:
        yield
    finally:
        _installed.pop()
        if not _installed:
            driver.entry_points[:] = [_row(which)[_REAL] for which in Call]


def _row(which: Call) -> np.ndarray[Any, np.dtype[np.int64]]:
    start = _ROWS + int(which) * _ROW_WORDS
    return _state[start : start + _ROW_WORDS]


@contextmanager
def fail(driver: Driver, which: Call, nth: int, code: int = BROKEN, times: int = 1) -> Iterator[Calls]:
    """Answer the `nth` call of a kind made in this context (1: the first), and `times - 1` after it, with a code.

    They do not reach the driver. Contexts for different kinds can be nested. Yields the calls made.
    """
    with _shimmed(driver):
        row = _row(which)
        if row[_FAIL_TO] > row[_COUNT] + 1:
            raise RuntimeError(f"{which.symbol} is to fail already")
        first = row[_COUNT] + nth
        row[_FAIL_FROM], row[_FAIL_TO], row[_CODE] = first, first + times, code
        calls = Calls()
        try:
            yield calls
        finally:
            row[_FAIL_FROM] = row[_FAIL_TO] = 0
            calls.stop()


@contextmanager
def delay(driver: Driver, which: Call, microseconds: int) -> Iterator[Calls]:
    """Let every call of a kind made in this context take so much longer."""
    with _shimmed(driver):
        _row(which)[_DELAY_US] = microseconds
        calls = Calls()
        try:
            yield calls
        finally:
            _row(which)[_DELAY_US] = 0
            calls.stop()


class Held:
    """A call that waits."""

    def __init__(self, which: Call, nth: int) -> None:
        self._row = _row(which)
        self._number = int(self._row[_COUNT]) + nth
        self._row[_HELD] = self._number

    def wait_until_begun(self, timeout_s: float = 30) -> None:
        """Wait until somebody makes the call."""
        deadline = time.monotonic() + timeout_s
        while int(self._row[_COUNT]) < self._number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"call {self._number} of this kind has not begun after {timeout_s} s")
            time.sleep(0.001)

    def release(self) -> None:
        """Let it go on."""
        self._row[_HELD] = 0


@contextmanager
def hold(driver: Driver, which: Call, nth: int = 1) -> Iterator[Held]:
    """Let the `nth` call of a kind made in this context wait until it is released, at the latest when this ends."""
    with _shimmed(driver):
        held = Held(which, nth)
        try:
            yield held
        finally:
            held.release()


def num_begun(which: Call) -> int:
    """Calls of a kind that have begun since the outermost context was entered, those under way included."""
    return int(_row(which)[_COUNT])


@contextmanager
def record(driver: Driver) -> Iterator[Calls]:
    """List the calls made in this context; it grows while the context lasts."""
    with _shimmed(driver):
        calls = Calls()
        try:
            yield calls
        finally:
            calls.stop()
