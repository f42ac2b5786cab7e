"""Pluggable: torch's own allocations on page groups, by tag; their memory taken away and put back.

A **tag** names allocations that belong together: weights, activations. On each device it has an `Arena`, whose
callbacks serve torch's `MemPool`s. torch caches what tensors leave in such a pool, and gives nothing back as long as
the pool lives, not even when memory is short; so `trim` drops the pools, and later allocations come from new ones. All
that touches torch's private functions is in this file.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vtensor.allocator.arena import Arena, MemoryStats, Offload, check_offload
from vtensor.allocator.driver import get_driver
from vtensor.allocator.page_pool import PagePool
from vtensor.devices import device_name, resolve_device
from vtensor.errors import DriverError, VTensorError
from vtensor.units import TIB, format_bytes, round_up

__all__ = ["memory_stats", "sleep", "trim", "use_allocator", "wake", "why_not_supported"]

_MARK = "vtensor: "  # begins what is added to torch's message
_ADDRESSES = 16  # times the memory of the device: address space is free, and a segment needs a gap of its size


_Function = TypeVar("_Function", bound=Callable[..., Any])


class _NotAsked(VTensorError):
    """torch does not ask the allocator of its pool."""


class _Source:
    """Where a tag's allocations on one device come from."""

    def __init__(self, tag: str, index: int) -> None:
        name = f"cuda:{index}"
        total = get_driver(name).memory_info()[1]
        self.tag, self.device = tag, torch.device("cuda", index)
        self.arena = Arena(_page_pool(index), round_up(_ADDRESSES * total, TIB))
        make: Callable[[int, int], Any] = torch._C._cuda_customAllocator
        self._allocator = make(self.arena.allocate_callback, self.arena.free_callback)
        # MemPools, each for one thread at a time: that nobody is using, and that somebody is.
        self._idle: list[Any] = []
        self._busy: list[Any] = []
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"tag {self.tag!r} on {self.device}"

    def probe(self) -> None:
        """See that torch asks us, and nobody else.

        Raises
        ------
        _NotAsked
            It does not.
        """
        mem_pool = self.take()
        try:
            with _real(), torch.cuda.use_mem_pool(mem_pool, self.device):
                torch.empty(1, device=self.device)
            if not self.arena.stats().num_segments:
                raise _NotAsked(
                    f"torch {torch.__version__} takes memory past the allocator of its pool. Where expandable_segments "
                    "are on, start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
                )
        finally:
            self.give_back(mem_pool)

    def take(self) -> Any:
        """A MemPool for one thread."""
        with self._lock:
            if self.arena.is_asleep:
                raise VTensorError(f"{self} is asleep, and nothing can be allocated there: vt.wake({self.tag!r}) first")
            try:
                mem_pool = self._idle.pop()
            except IndexError:
                with torch.cuda.device(self.device):
                    mem_pool = torch.cuda.MemPool(self._allocator)
            self._busy.append(mem_pool)
            return mem_pool

    def give_back(self, mem_pool: Any) -> None:
        """The end of `take`."""
        with self._lock:
            self._busy.remove(mem_pool)
            self._idle.append(mem_pool)

    def trim(self) -> None:
        """Drop all pools that nobody is using: `torch.cuda.empty_cache` gives back what no tensor uses of them.

        They are dropped as torch drops a graph's pool. The end of the object would do more, and abort the process if
        any thread on the device allocates from some pool or captures a graph at that moment: so it never comes.
        """
        with self._lock:
            dropped, self._idle = self._idle, []
            for mem_pool in dropped:
                _keep_forever(mem_pool)
                torch._C._cuda_releasePool(self.device.index, mem_pool.id)
        self.arena.sweep()

    def sleep(self, offload: Offload) -> int:
        """Take all memory away, unless somebody allocates."""
        with self._lock:
            if self._busy:
                raise VTensorError(f"{self} is in use: leave `with vt.use_allocator(...)` before vt.sleep()")
            return self.arena.sleep(offload)

    def keep_forever(self) -> None:
        """Have the interpreter's end leave the pools alone: torch would give back what kernels may be using."""
        for mem_pool in (*self._idle, *self._busy):
            _keep_forever(mem_pool)


@contextmanager
def _real() -> Iterator[None]:
    """Within it, no mode has tensors be something else."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _keep_forever(value: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


_sources: dict[tuple[str, int], _Source] = {}
_of_torch: set[str] = set()  # tags that went on with torch's own memory
_page_pools: dict[str, PagePool] = {}
_unproven: dict[tuple[str, int], _Source] = {}  # made, and not yet seen to be asked
_refusals: dict[int, str] = {}  # by device: why it cannot serve
_lock = threading.RLock()


def _forget() -> None:
    """In a forked child: all of it is the parent's, and so is a lock that another of its threads held."""
    global _inherited, _sources, _page_pools, _lock
    _inherited = (_sources, _page_pools)
    _sources, _page_pools, _lock = {}, {}, threading.RLock()


_inherited: tuple[Any, ...] = ()  # kept alive in a child, where they can serve nobody
os.register_at_fork(after_in_child=_forget)


def _page_pool(index: int) -> PagePool:
    """The pool of all tags on a device; other GPUs reach its memory, as they reach torch's."""
    with _lock:
        name = f"cuda:{index}"
        if name not in _page_pools:
            others = (other for other in range(torch.cuda.device_count()) if other != index)
            peers = [f"cuda:{other}" for other in others if torch.cuda.can_device_access_peer(other, index)]
            _page_pools[name] = PagePool(name, peer_devices=peers)
        return _page_pools[name]


class _Unsupported(VTensorError):
    """torch cannot be given an allocator here, or not on this device."""


def _source(tag: str, index: int) -> _Source:
    with _lock:
        key = (tag, index)
        if key in _sources:
            return _sources[key]
        if index in _refusals:
            raise _Unsupported(_refusals[index])
        try:
            get_driver(f"cuda:{index}")
            if key not in _unproven:
                _unproven[key] = _Source(tag, index)
                _keep_forever(_unproven[key])  # torch may call back as long as the process lives
            _unproven[key].probe()
        except (_NotAsked, DriverError) as error:
            _refusals[index] = f"cuda:{index} cannot have its memory mapped by vtensor: {error}"
            raise _Unsupported(_refusals[index]) from error
        _sources[key] = _unproven.pop(key)
        return _sources[key]


@atexit.register
def _leave_all() -> None:
    for source in _sources.values():
        source.keep_forever()


def _sources_of(tag: str | None) -> list[_Source]:
    if tag is not None and not isinstance(tag, str):
        raise ValueError(f"tag={tag!r} must be a string, as given to vt.use_allocator")
    with _lock:
        found = [source for (name, _), source in _sources.items() if tag in (None, name)]
        tags = sorted({name for name, _ in _sources})
    if tag is not None and not found and tag not in _of_torch:
        raise ValueError(f"tag={tag!r} is unknown: vt.use_allocator was never entered with it (tags: {tags})")
    return found


# -- what torch allocates -------------------------------------------------------------------------------------------


class use_allocator(ContextDecorator):
    """Within it, what torch allocates on a CUDA device lies on page groups that can be taken away and put back.

    Each of torch's segments is stitched together from page groups at neighbouring addresses. What is allocated within
    lives on after it, as tensors do. torch's statistics count it as ever. Other processes cannot map it (CUDA IPC).

    torch takes the time in which any thread is within for a graph's capture: on that device, `torch.cuda.empty_cache`
    then gives back nothing that is cached outside, and tensors with `record_stream` wait for the end of the block to be
    used again. So put each step of a training into a block, not the whole of it. And what a library allocates within
    and keeps, sleeps with the rest: cuBLAS's workspace for this thread's current stream is made before, so that it does
    not; others' are not (with `torch.cuda.stream(...)` within, or in other threads).

    Parameters
    ----------
    tag : str
        The name by which `sleep`, `wake`, `trim` and `memory_stats` find it again.
    mode : {"stitched"}
        How memory comes below the addresses: all of it, when torch asks for a segment. (For memory that comes on demand
        see `virtual`.)
    device : torch.device, str, int, optional
        A CUDA device; by default the current one.
    threads : {"current", "all"}
        Whose allocations: those of this thread, and of the backward that it runs within (which autograd otherwise has
        other threads do: within, `torch.autograd.set_multithreading_enabled` is off); or of all threads on the device.
    on_unsupported : {"raise", "torch"}
        Where there is no such allocator: raise, or go on with torch's own memory, which `sleep` then leaves alone.

    Raises
    ------
    VTensorError
        torch cannot be given an allocator here, and the message says why; or the tag is asleep.
    torch.OutOfMemoryError
        From the code within, with what the tag takes added to torch's message.
    """

    def __init__(
        self,
        tag: str = "default",
        mode: Literal["stitched"] = "stitched",
        *,
        device: torch.device | str | int | None = None,
        threads: Literal["current", "all"] = "current",
        on_unsupported: Literal["raise", "torch"] = "raise",
    ) -> None:
        if not isinstance(tag, str) or not tag:
            raise ValueError(f"tag={tag!r} must be a string that is not empty")
        for name, value, values in (
            ("mode", mode, ("stitched",)),
            ("threads", threads, ("current", "all")),
            ("on_unsupported", on_unsupported, ("raise", "torch")),
        ):
            if value not in values:
                raise ValueError(f"{name}={value!r} must be {' or '.join(map(repr, values))}")
        try:
            kind = "cuda" if device is None or isinstance(device, int) else torch.device(device).type
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device={device!r} is no device that torch knows: use 'cuda:<index>'") from error
        if kind != "cuda":
            raise ValueError(f"device={device!r} must be a CUDA device: torch has no memory pools on others")
        self._tag, self._device, self._threads = tag, device, threads
        self._on_unsupported = on_unsupported
        self._entered = _OfThread()

    def __call__(self, function: _Function) -> _Function:
        """As a decorator of a function that does its work when it is called."""
        for is_kind in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction):
            if is_kind(function):
                raise TypeError(
                    f"{function!r} does its work after the call has ended: put `with vt.use_allocator(...)` into it"
                )
        return super().__call__(function)

    def _recreate_cm(self) -> use_allocator:
        """As a decorator: one of its own for each call, so that a function may call itself, in any thread."""
        return use_allocator(self._tag, device=self._device, threads=self._threads, on_unsupported=self._on_unsupported)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            source = None
            try:
                source = self._enter(stack)
            except _Unsupported as error:
                if self._on_unsupported == "raise":
                    raise VTensorError(f"{error}; on_unsupported='torch' goes on with torch's own memory") from error
                _of_torch.add(self._tag)
            self._entered.stack.append((source, stack.pop_all()))

    def _enter(self, stack: ExitStack) -> _Source:
        if why := why_not_supported():
            raise _Unsupported(why)
        index = _index_of(self._device)
        source = _source(self._tag, index)
        mine = [key for key in _entered_by_thread.stack if key[0].device.index == index]
        if mine and mine[-1] == (source, self._threads):
            return source  # its pool is this thread's already
        mem_pool = source.take()
        stack.callback(source.give_back, mem_pool)
        _settle_libraries(source.device)
        if self._threads == "all":
            stack.enter_context(_all_threads(mem_pool, index))
        else:
            multithreading: Callable[[bool], AbstractContextManager[None]] = torch.autograd.set_multithreading_enabled
            stack.enter_context(torch.cuda.use_mem_pool(mem_pool, source.device))
            stack.enter_context(multithreading(False))
        stack.enter_context(_noted((source, self._threads)))
        return source

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._entered.stack:
            raise RuntimeError("vt.use_allocator was left before it was entered in this thread")
        source, stack = self._entered.stack.pop()
        stack.close()
        if source is not None and isinstance(error, torch.OutOfMemoryError) and error.args:
            message = str(error.args[0])
            if _MARK not in message:
                with suppress(DriverError):  # the context may be gone; the message is worth more than our figures
                    error.args = (f"{message} ({_MARK}{_figures(source)})", *error.args[1:])


class _OfThread(threading.local):
    """A stack for each thread."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


_entered_by_thread = _OfThread()  # sources, and for which threads


@contextmanager
def _noted(key: tuple[_Source, str]) -> Iterator[None]:
    """The time in which a thread's allocations come from there."""
    _entered_by_thread.stack.append(key)
    try:
        yield
    finally:
        _entered_by_thread.stack.remove(key)


def _settle_libraries(device: torch.device) -> None:
    """Have cuBLAS allocate now what it keeps for the current stream, and not within: it would be put to sleep."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return
        make_handle: Callable[[], object] = torch.cuda.current_blas_handle
        make_handle()
        with _real(), torch.no_grad():
            for dtype in (torch.float32, torch.bfloat16):  # with a bias: cuBLASLt, which has a workspace of its own
                x = torch.zeros(16, 16, dtype=dtype, device=device)
                torch.addmm(x[0], x, x)


@contextmanager
def _all_threads(mem_pool: Any, index: int) -> Iterator[None]:
    """As `torch.cuda.use_mem_pool`, for the allocations of all threads."""
    torch._C._cuda_beginAllocateToPool(index, mem_pool.id)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(index, mem_pool.id)
        torch._C._cuda_releasePool(index, mem_pool.id)


def _figures(source: _Source) -> str:
    stats = source.arena.stats()
    free = get_driver(device_name(source.device)).memory_info()[0]
    return (
        f"{source} has {stats.num_segments} segments of {format_bytes(stats.reserved_bytes)}, was last "
        f"refused {format_bytes(source.arena.last_failed_bytes)}, and {format_bytes(free)} of the device are free. "
        f"vt.trim({source.tag!r}) and torch.cuda.empty_cache(), outside of the block, give back what no tensor uses."
    )


def why_not_supported() -> str:
    """Why torch cannot be given an allocator here, in one sentence; empty where it can."""
    if not hasattr(torch._C, "_cuda_customAllocator"):
        return "this build of torch has no CUDA, and so no memory pools: vt.use_allocator needs a CUDA build"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device, and vt.use_allocator works on those only"
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return f"torch's allocator {backend!r} has no memory pools: start with PYTORCH_CUDA_ALLOC_CONF=backend:native"
    return ""


def _index_of(device: torch.device | str | int | None) -> int:
    return int(resolve_device("cuda" if device is None else torch.device(device)).index)


# -- by tag -----------------------------------------------------------------------------------------------------------


def sleep(tag: str, offload: Offload = "cpu") -> int:
    """Take the memory below a tag's allocations away. Addresses stay, and so do tensors.

    Waits for the device, and has torch empty its caches (`torch.cuda.empty_cache`). Until `wake`, nothing may be
    allocated under the tag (that is an error), and nothing may read or write its tensors (that no one can check: a
    kernel that does ends the process's CUDA context). They may be freed.

    Parameters
    ----------
    tag : str
        As given to `use_allocator`.
    offload : {"cpu", "discard"}
        Keep what the tensors hold in pinned host memory, or drop it: they are zeros after `wake`.

    Returns
    -------
    int
        Bytes of device memory that went back, on all devices. 0 where the tag was asleep already.

    Raises
    ------
    ValueError
        A tag that was never used.
    VTensorError
        Somebody allocates under the tag, or there is no host memory; nothing was changed on that device.
    """
    check_offload(offload)
    sources = _sources_of(_named(tag))
    _give_back_unused(sources)  # it need not be copied
    return sum(source.sleep(offload) for source in sources)


def wake(tag: str) -> int:
    """Put memory back below a tag's allocations, with what they held (zeros, where that was dropped).

    Returns
    -------
    int
        Bytes of device memory that were committed, on all devices. 0 where the tag was awake already.

    Raises
    ------
    ValueError
        A tag that was never used.
    OutOfPagesError
        Not enough memory; the tag sleeps on (on that device), and nothing is lost.
    """
    return sum(source.arena.wake() for source in _sources_of(_named(tag)))


def _named(tag: str) -> str:
    """A tag, where all of them would be too many."""
    if tag is None:
        raise ValueError("tag=None must be a string, as given to vt.use_allocator")
    return tag


def trim(tag: str | None = None) -> int:
    """Give back whole segments that torch has cached of a tag's memory (of all tags'), and no tensor uses.

    Also has torch empty its other caches (`torch.cuda.empty_cache`), as far as nobody is within `use_allocator` or
    captures a graph. A segment that any tensor uses stays, and new tensors do not get what is left of it.

    Returns
    -------
    int
        Bytes of the tag's memory that went back to the device.
    """
    sources = _sources_of(tag)
    before = sum(source.arena.stats().committed_bytes for source in sources)
    _give_back_unused(sources)
    return before - sum(source.arena.stats().committed_bytes for source in sources)


def _give_back_unused(sources: list[_Source]) -> None:
    for source in sources:
        source.trim()
    if sources:
        torch.cuda.empty_cache()


def memory_stats(tag: str | None = None) -> MemoryStats:
    """Memory of a tag's allocations (of all tags'), on all devices."""
    return sum((source.arena.stats() for source in _sources_of(tag)), MemoryStats())
