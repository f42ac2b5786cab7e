"""KVCacheManager: the paper's contract (alloc_reqid, step, free_reqid) over one reservation."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vtensor.allocator.mapper import get_mapper
from vtensor.allocator.page_pool import PagePool
from vtensor.devices import device_name, resolve_device
from vtensor.errors import ClosedError, OutOfSlotsError, RequestError, VTensorError
from vtensor.interrupts import interrupts_held
from vtensor.kvcache.config import KVCacheConfig
from vtensor.kvcache.layout import CacheLayout
from vtensor.kvcache.lookahead import LookAhead
from vtensor.kvcache.reclaim import SlotMemory
from vtensor.kvcache.slots import SlotState, SlotTable
from vtensor.kvcache.stats import KVCacheStats, SlotResidency, StepResult
from vtensor.kvcache.turn import Turn
from vtensor.region import Region
from vtensor.streams import check_not_capturing
from vtensor.tensor import VirtualTensor
from vtensor.unpicklable import Unpicklable

__all__ = ["KVCacheManager"]

SeqLens = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor


_NOTHING_NEEDED = StepResult()
_MOST_TOKENS = 1 << 31  # of which sums do not overflow


class KVCacheManager(Unpicklable):
    """A KV cache of max_batch_size x max_context_tokens addresses, with memory only below the tokens it holds.

    Per iteration of an engine: ``step`` with the length of every slot, then run the model over ``layer(i)``. The K and
    V of a layer are views of fixed address and shape, for any kernel; a slot's number is the kernel's ``batch_idx``.

    Calls may come from any thread. None of them may be made while a CUDA graph is captured.

    Parameters
    ----------
    config : KVCacheConfig
    device : torch.device or str, optional
        A CPU or a CUDA device; None is torch's default device.
    pool : PagePool, optional
        A pool to share with others: when one is short of memory, the others give up what they can do without, unless
        another thread is working with them at that moment. None: the cache has its own.
    capacity_bytes : int, optional
        The most memory that the cache's own pool may hold. None: as much as the device gives.
    deferred_reclamation : bool
        Whether the slot of a freed request keeps its page groups until they are needed (the paper's section 6.1.2).
        False: they go back to the pool as soon as the device has finished with them.
    lookahead_tokens : int
        After each step, memory for so many tokens more is mapped in the background below each request that took part,
        so that the next step finds it ready. With speculative decoding: the tokens of a draft. 0: no look-ahead.
    low_watermark, high_watermark : float
        Parts of the pool's capacity, or of the memory that the device has free and the pool holds. When less than the
        low one is left, deferred slots are unmapped in the background, oldest first, up to the high one. 0, 0: never.
    eager_slot : bool
        Keep one spare slot mapped in the background for a prompt as long as the median of the last ones, unless that
        goes below the high watermark.
    scrub : bool
        Zero a request's memory before another request gets it.

    Raises
    ------
    ValueError
        A bad option or configuration; the message names the value and the rule.
    ReservationError
        The addresses cannot be had.
    DriverError
        The device is not there, or cannot map pages.

    Examples
    --------
    >>> config = KVCacheConfig(num_layers=4, num_kv_heads=2, head_dim=64, max_batch_size=8, max_context_tokens=32_768)
    >>> with KVCacheManager(config, device="cpu") as cache:
    ...     reqid = cache.alloc_reqid(prompt_tokens=100)
    ...     seq_lens = [0] * 8
    ...     seq_lens[reqid] = 100
    ...     bool(cache.step(seq_lens)), cache.residency()[reqid].committed_bytes
    (True, 262144)
    """

    def __init__(
        self,
        config: KVCacheConfig,
        device: torch.device | str | None = None,
        *,
        pool: PagePool | None = None,
        capacity_bytes: int | None = None,
        lookahead_tokens: int = 1,
        low_watermark: float = 0.10,
        high_watermark: float = 0.15,
        deferred_reclamation: bool = True,
        eager_slot: bool = True,
        scrub: bool = False,
    ) -> None:
        if isinstance(lookahead_tokens, bool) or not isinstance(lookahead_tokens, int) or lookahead_tokens < 0:
            raise ValueError(f"lookahead_tokens={lookahead_tokens!r} must be an integer of 0 or more")
        if lookahead_tokens > _MOST_TOKENS:
            raise ValueError(f"lookahead_tokens={lookahead_tokens} must be at most {_MOST_TOKENS:,}")
        numbers = all(isinstance(mark, int | float) for mark in (low_watermark, high_watermark))
        if not numbers or not 0 <= low_watermark <= high_watermark <= 1:
            raise ValueError(
                f"low_watermark={low_watermark!r}, high_watermark={high_watermark!r} must satisfy 0 <= low <= high <= 1"
            )
        if not isinstance(config, KVCacheConfig) or not isinstance(pool, PagePool | None):
            raise ValueError(f"config={config!r}, pool={pool!r} must be a KVCacheConfig and a PagePool or None")
        self.device = resolve_device(device)
        self._owns_pool = pool is None
        if pool is None:
            pool = PagePool(
                device_name(self.device),
                capacity_bytes=capacity_bytes,
                page_group_bytes=config.page_group_bytes,
                max_size_class_bytes=config.max_size_class_bytes,
            )
        else:
            _check_pool(pool, self.device, config, capacity_bytes)
        self.pool = pool
        self.config = replace(
            config, page_group_bytes=pool.page_group_bytes, max_size_class_bytes=pool.max_size_class_bytes
        )
        self._layout = CacheLayout.of(self.config, pool.page_group_bytes)
        size_bytes = self._layout.num_places * pool.page_group_bytes
        self._region = Region(pool, self.device, size_bytes, owner="KVCacheManager")
        self._slots = SlotTable(self._layout, pool, lookahead_tokens)
        get_mapper(pool.driver)  # its thread and its code are there before the first step
        self._lock = threading.RLock()
        self._turn = Turn()
        self._memory = SlotMemory(
            self._region,
            self._slots,
            self._lock,
            self._turn,
            deferred_reclamation=deferred_reclamation,
            scrub=scrub,
            low_watermark=low_watermark,
            high_watermark=high_watermark,
        )
        pool.add_holder(self._memory)
        self._lookahead = LookAhead(self._region, self._slots, eager_slot=eager_slot, high_watermark=high_watermark)
        self._views: dict[tuple[int, bool], tuple[torch.Tensor, torch.Tensor]] = {}
        self._answer = np.zeros(self._slots.plan.ANSWER_WORDS, np.int64)
        self.closed = False

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._slots.in_state(SlotState.ACTIVE))} active"
        config = self.config
        return (
            f"<KVCacheManager {self.device} {config.layout} {config.num_layers} layers, "
            f"{config.max_batch_size} slots x {config.max_context_tokens:,} tokens, {state}>"
        )

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- requests -------------------------------------------------------------------------------------------------

    def alloc_reqid(self, prompt_tokens: int | None = None) -> int:
        """Take a slot for a new request.

        Parameters
        ----------
        prompt_tokens : int, optional
            Length of the prompt, if known: the slot is then the deferred one that fits best.

        A slot that another request has left is in the order of the current stream behind that one's kernels: kernels
        on other streams that write to it must come after.

        Returns
        -------
        int
            The request id, which is the slot's number and the kernels' ``batch_idx``.

        Raises
        ------
        OutOfSlotsError
            Every slot is active.
        RequestError
            `prompt_tokens` is negative or longer than a slot.
        """
        self._check_process()
        with self._lock, interrupts_held(), self._taken("alloc_reqid"):
            self._check_usable("alloc_reqid")
            if prompt_tokens is not None and not _is_index(prompt_tokens, self.config.max_context_tokens + 1):
                raise RequestError(
                    f"prompt_tokens={prompt_tokens!r} must be 0 to "
                    f"max_context_tokens={self.config.max_context_tokens:,}"
                )
            self._memory.sweep()
            self._lookahead.collect()
            slot = self._slots.choose(prompt_tokens)
            if slot is None:
                raise OutOfSlotsError(
                    f"all {self.config.max_batch_size} slots hold active requests; free_reqid one first, "
                    "or make the cache with a larger max_batch_size (it costs addresses only)"
                )
            self._memory.hand_over(slot)
            self._lookahead.look_for_spare()
            return slot

    def step(self, seq_lens: SeqLens) -> StepResult:
        """Make sure that every active request has memory for its tokens, the coming iteration's included.

        Parameters
        ----------
        seq_lens : sequence of int, ndarray of integers or CPU tensor, shape [max_batch_size]
            For every slot the tokens it will hold after the iteration. 0: the slot is idle, or its request sits
            this iteration out and keeps what it has. A smaller number than before drops the tokens beyond it; their
            page groups are surplus, which a later step may use. With sliding windows, a larger number says that the
            iteration before has run.

        Returns
        -------
        StepResult
            False, with `shortfall_page_groups`, where memory is short even when deferred slots and surplus give
            theirs; the lengths are then as before, and no request lost anything. New memory is zeroed in the order of
            the current stream: kernels on other streams must come after it.

        Raises
        ------
        RequestError
            A list of another length, a length below 0 or above `max_context_tokens`, a length for a slot that is not
            active, or one so short that what a sliding window would see of it is gone. Nothing was changed.
        """
        self._check_process()
        turn = self._turn
        with self._lock:
            self._check_usable("step")
            turn.check("step")
            lengths = self._as_lengths(seq_lens)
            try:
                turn.is_taken = True  # here and below without a call, which an interrupt could cut off
                self._memory.sweep()
                self._region.streams.current()
                if not self._slots.has_windows:
                    return self._step(lengths)
                with interrupts_held():  # windows move in any step
                    return self._step(lengths)
            finally:
                turn.is_taken = False
                if turn.has_later:
                    with interrupts_held():
                        turn.do_later()

    def _step(self, lengths: npt.NDArray[np.int64]) -> StepResult:
        plan, answer, lookahead, memory = self._slots.plan, self._answer, self._lookahead, self._memory
        start = time.perf_counter()
        code = plan.step(
            self._slots.words, lookahead.job_words, lookahead.queue, self._region.zero_calls, lengths, answer
        )
        if code == plan.NOTHING:
            return _NOTHING_NEEDED
        if code == plan.BAD_LENGTH:
            slot = int(answer[plan.SLOT])
            raise self._bad_length(int(answer[plan.PROBLEM]), slot, int(lengths[slot]))
        if code == plan.TO_COMMIT:
            with interrupts_held():
                return self._commit(lengths, start)
        result = _NOTHING_NEEDED
        if number := int(answer[plan.NUM_SERVED]):
            result = StepResult(0, (time.perf_counter() - start) * 1e6, number, number)
            memory.note_mapped(number)
        has_more = answer[plan.WANTS_AHEAD] or answer[plan.HAS_PASSED]
        if has_more or lookahead.is_spare_due or memory.is_check_due():
            with interrupts_held():
                self._follow_up(lengths)
        return result

    def _commit(self, lengths: npt.NDArray[np.int64], start: float) -> StepResult:
        """Bring into service what the lengths need, whatever it takes."""
        plan, slots = self._slots.plan, self._slots.arrays
        num_mapped, num_ready, shortfall = self._memory.commit(plan.needed_ranges(slots, lengths), lengths)
        if not shortfall:
            plan.apply_step(slots, lengths, self._answer)
        result = StepResult(shortfall, (time.perf_counter() - start) * 1e6, num_mapped, num_ready)
        if not shortfall:
            self._memory.note_mapped(num_mapped)
            self._follow_up(lengths)
        return result

    def _follow_up(self, lengths: npt.NDArray[np.int64]) -> None:
        """After a step: see to what windows have passed, and to what later steps may need."""
        plan, answer = self._slots.plan, self._answer
        if answer[plan.HAS_PASSED]:
            self._memory.pass_windows()
        if answer[plan.WANTS_AHEAD]:
            self._lookahead.ask(lengths)
        self._lookahead.keep_spare()
        self._memory.keep_watermark()

    def free_reqid(self, reqid: int) -> None:
        """End a request. Its slot can be taken at once; its memory waits until the device has finished with it.

        A finalizer may call it at any time: in the middle of another call, it takes effect after that.

        Raises
        ------
        RequestError
            `reqid` is not an active request.
        """
        self._check_process()
        with self._lock, interrupts_held():
            self._check_usable("free_reqid")
            self._check_active(reqid)
            if self._turn.is_taken:
                self._turn.later(lambda: self._free_later(int(reqid)))
                return
            with self._turn:
                self._free(int(reqid))

    def _free(self, slot: int) -> None:
        self._memory.defer(slot)
        self._memory.sweep()
        self._lookahead.look_for_spare()

    def _free_later(self, slot: int) -> None:
        if not self.closed and self._slots.arrays.state[slot] == SlotState.ACTIVE:  # it may have been asked for twice
            with self._turn:
                self._free(slot)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Declare that a stream, which must outlive the cache, uses it.

        Memory is taken away or handed on only after that stream has finished with it. The streams that are current in
        `step` and `free_reqid` are known without this.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            self._region.streams.add(stream)

    # -- tensors --------------------------------------------------------------------------------------------------

    def layer(self, index: int, *, plain: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer: strided views, each [max_batch_size, max_context_tokens, num_kv_heads, head_dim].

        They have the same addresses for the cache's whole life, and the last two dimensions are contiguous. Each call
        returns the same two objects: who wants them in another shape makes a view, and leaves these as they are.

        Parameters
        ----------
        index : int
            0 to num_layers - 1.
        plain : bool
            False: virtual tensors, which raise `UnmappedAccessError` where an operation would reach what no `step` has
            committed. True: plain tensors, for the hot path, which end the process there.

        Raises
        ------
        RequestError
            No such layer.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            if not _is_index(index, self.config.num_layers):
                raise RequestError(f"layer {index!r} must be 0 to {self.config.num_layers - 1}")
            if (index, plain) not in self._views:
                layouts = (self._layout.layer_view(index, is_value) for is_value in (False, True))
                key, value = (self._region.view(view.dtype, view.offset, view.shape, view.strides) for view in layouts)
                if not plain:
                    key, value = (VirtualTensor.wrap(view, self._region, "raise") for view in (key, value))
                self._views[index, plain] = key, value
            return self._views[index, plain]

    # -- books ----------------------------------------------------------------------------------------------------

    def stats(self) -> KVCacheStats:
        """The cache's memory and slots, now. Waits for what the mapper is at."""
        self._check_process()
        with self._lock, interrupts_held(), self._taken("stats"):
            self._check_open()
            self._settle()
            pool = self.pool.stats()
            groups, num_places = np.unique(self._region.space.mapped_page_groups(), return_counts=True)
            return KVCacheStats(
                total_page_groups=pool.total_page_groups,
                free_page_groups=pool.free_page_groups,
                mapped_page_groups=len(groups),
                shared_page_groups=int((num_places > 1).sum()),
                reserved_bytes=self._region.space.size_bytes,
                committed_bytes=self._region.space.committed_bytes,
                used_bytes=int(self._used_bytes().sum()),
                ahead_page_groups=self._region.space.num_ahead,
                swapped_bytes=0,
                num_active_slots=len(self._slots.in_state(SlotState.ACTIVE)),
                num_deferred_slots=len(self._slots.in_state(SlotState.DEFERRED)),
                num_reclaiming_slots=len(self._slots.in_state(SlotState.RECLAIMING)),
                num_mapped_ahead=self._lookahead.num_mapped,
                num_dropped_ahead=self._lookahead.num_dropped,
                num_reclaimed=self._memory.num_reclaimed,
                num_trimmed=self._memory.num_trimmed,
                num_passed=self._memory.num_passed,
                num_failed_releases=self._memory.num_failed,
                num_driver_calls=pool.num_driver_calls,
            )

    def residency(self) -> list[SlotResidency]:
        """What every slot holds, now. Waits for what the mapper is at."""
        self._check_process()
        with self._lock, interrupts_held(), self._taken("residency"):
            self._check_open()
            self._settle()
            slots, page_group_bytes = self._slots.arrays, self.pool.page_group_bytes
            plan = self._slots.plan
            num_buffers, row_bytes = slots.groups[:, plan.NUM_BUFFERS], slots.groups[:, plan.ROW_BYTES]
            reserved = int((num_buffers * slots.groups[:, plan.SLOT_PLACES]).sum()) * page_group_bytes
            held = ((slots.high - slots.low) * num_buffers[:, None]).sum(axis=0) * page_group_bytes
            used = self._used_bytes()
            tokens = (slots.high * page_group_bytes // row_bytes[:, None]).min(axis=0) - self.config.overread_tokens
            limit = self.config.max_context_tokens
            return [
                SlotResidency(
                    reqid=slot,
                    state=SlotState(int(slots.state[slot])),
                    seq_len=int(slots.seq_lens[slot]),
                    committed_tokens=max(0, min(int(tokens[slot]), limit)),
                    max_context_tokens=limit,
                    used_bytes=int(used[slot]),
                    committed_bytes=int(held[slot]),
                    reserved_bytes=reserved,
                )
                for slot in range(self.config.max_batch_size)
            ]

    def check_integrity(self) -> None:
        """Compare what the slots claim to hold with what is mapped, then the books below.

        While no other thread uses the cache or its pool: otherwise it may find fault with what is under way.

        Raises
        ------
        VTensorError
            They differ; the message says where.
        """
        self._check_process()
        with self._lock, interrupts_held(), self._taken("check_integrity"):
            if self.closed:
                self.pool.check_integrity()
                return
            slots, space = self._slots.arrays, self._region.space
            space.settle()
            all_slots = np.arange(self.config.max_batch_size)
            if slots.high[:, np.isin(slots.state, (SlotState.FREE, SlotState.RECLAIMING))].any():
                raise VTensorError(f"{self!r}: a free slot holds page groups")
            if slots.extent[:, slots.state == SlotState.FREE].any() or (slots.high > slots.extent).any():
                raise VTensorError(f"{self!r}: a slot's extent is wrong")
            claimed = self._slots.ranges(all_slots, in_service=True)
            if space.count_missing(claimed):
                raise VTensorError(f"{self!r}: a slot claims page groups that are not mapped")
            in_service = space.num_mapped - space.num_ahead
            if int(claimed[:, 1].sum()) != in_service:
                raise VTensorError(
                    f"{self!r}: {in_service} page groups are in service, the slots claim {int(claimed[:, 1].sum())}"
                )
            table = space.arrays.table
            held = sum(np.count_nonzero(table[row[0] : row[0] + row[1]]) for row in self._slots.ranges(all_slots))
            if held != space.num_mapped:
                raise VTensorError(f"{self!r}: {space.num_mapped} page groups are mapped, {held} of them within slots")
            space.check_integrity()

    def close(self) -> None:
        """Give back memory and addresses. Waits for the device. A second call does nothing.

        Views of layers that are still in use keep the memory until they are gone (with a `ResourceWarning`).
        """
        if not self.closed:
            self._check_process()
        with self._lock, interrupts_held():
            if self.closed:
                return
            if self._turn.is_taken:
                self._turn.later(self.close)
                return
            check_not_capturing(self.device, "close")
            self._region.streams.finish()
            self._region.space.settle(cancel=True)
            self.pool.remove_holder(self._memory)
            self.closed = True
            self._views.clear()
            self._region.drop()
            if self._owns_pool and not self.pool.closed:
                self.pool.retire()
            if self._region.is_viewed:
                warnings.warn(
                    "a KVCacheManager was closed while views of its layers are in use; its memory goes back when the "
                    "last of them is gone",
                    ResourceWarning,
                    stacklevel=2,
                )

    def _taken(self, what: str) -> Turn:
        self._turn.check(what)
        return self._turn

    def _settle(self) -> None:
        """Have done what the mapper can do now."""
        for _ in range(2):
            self._region.space.settle()
            self._memory.sweep()

    def _used_bytes(self) -> npt.NDArray[np.int64]:
        """Of each slot: bytes that hold tokens which a later one can see."""
        slots, plan = self._slots.arrays, self._slots.plan
        windows = slots.groups[:, plan.WINDOW, None]
        tokens = np.where(windows > 0, np.minimum(slots.seq_lens, windows), slots.seq_lens)
        return np.asarray(
            (tokens * slots.groups[:, [plan.ROW_BYTES]] * slots.groups[:, [plan.NUM_BUFFERS]]).sum(axis=0)
        )

    # -- helpers --------------------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        """Before the lock is taken, which in a forked child may be held by a thread of the parent."""
        self.pool.driver.check_process()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("this KVCacheManager was closed; make a new one")

    def _check_usable(self, what: str) -> None:
        self._check_open()
        check_not_capturing(self.device, what)

    def _check_active(self, reqid: int) -> None:
        if not _is_index(reqid, self.config.max_batch_size):
            raise RequestError(f"reqid={reqid!r} must be 0 to {self.config.max_batch_size - 1}")
        if self._slots.arrays.state[reqid] != SlotState.ACTIVE:
            raise RequestError(f"reqid={reqid} is not active: it was freed, or alloc_reqid never gave it out")

    def _as_lengths(self, seq_lens: SeqLens) -> npt.NDArray[np.int64]:
        if isinstance(seq_lens, torch.Tensor):
            if seq_lens.device.type != "cpu":
                raise RequestError(
                    f"seq_lens lies on {seq_lens.device}; step needs it on the CPU (reading it would stall the device)"
                )
            if seq_lens.dtype.is_floating_point or seq_lens.dtype.is_complex:  # NumPy does not know all of them
                raise RequestError(f"seq_lens has dtype {seq_lens.dtype}; it must hold integers")
        try:
            lengths = seq_lens.numpy(force=True) if isinstance(seq_lens, torch.Tensor) else np.asarray(seq_lens)
        except (ValueError, TypeError, RuntimeError) as error:  # nested, sparse, quantized; ragged lists
            raise RequestError(f"seq_lens is no list of integers: {error}") from error
        if lengths.shape != (self.config.max_batch_size,):
            raise RequestError(
                f"seq_lens has shape {lengths.shape}; it must have one length for each of "
                f"max_batch_size={self.config.max_batch_size} slots"
            )
        if lengths.dtype.kind not in "iu":
            raise RequestError(f"seq_lens has dtype {lengths.dtype}; it must hold integers")
        if lengths.dtype == np.uint64 and len(lengths) and int(lengths.max()) >= 1 << 63:
            slot = int(lengths.argmax())
            raise RequestError(f"seq_lens[{slot}]={int(lengths[slot]):,}: no slot holds so many tokens")
        return np.array(lengths, np.int64)  # a copy: another thread may write to the caller's

    def _bad_length(self, problem: int, slot: int, length: int) -> RequestError:
        plan = self._slots.plan
        rules = {
            plan.NEGATIVE: "a length is 0 or more",
            plan.TOO_LONG: f"a slot holds at most max_context_tokens={self.config.max_context_tokens:,}",
            plan.NOT_ACTIVE: "the slot is not active; alloc_reqid first, or pass 0",
            plan.WINDOW_PASSED: "what the window of so short a sequence sees is gone; shorten by fewer tokens, or give "
            "the cache more lookahead_tokens, by which a sequence may always be shortened",
        }
        return RequestError(f"seq_lens[{slot}]={length:,}: {rules[problem]}")


def _check_pool(pool: PagePool, device: torch.device, config: KVCacheConfig, capacity_bytes: int | None) -> None:
    pool.check_open()
    if capacity_bytes is not None:
        raise ValueError(
            f"capacity_bytes={capacity_bytes!r} is for the cache's own pool; give it to the PagePool instead"
        )
    if pool.driver.device != device_name(device):
        raise ValueError(f"pool of {pool.driver.device} cannot hold a cache on {device}")
    if config.max_size_class_bytes not in (None, pool.max_size_class_bytes):
        raise ValueError(
            f"max_size_class_bytes={config.max_size_class_bytes} differs from the pool's {pool.max_size_class_bytes}; "
            "leave it out"
        )
    if config.page_group_bytes not in (None, pool.page_group_bytes):
        raise ValueError(
            f"page_group_bytes={config.page_group_bytes} differs from the pool's {pool.page_group_bytes}; leave it out"
        )


def _is_index(value: object, end: int) -> bool:
    """Whether a value is an integer, NumPy's included, from 0 to `end` - 1."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= int(value) < end
