"""A cache against a model in plain Python: random requests, lengths, options, neighbours and failing drivers.

The model knows what every request must find: its length, a number for each of its tokens, and which of them a window
still shows; and how many page groups all requests need at least. The cache may do what it likes in the background, as
long as nobody can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import vtensor as vt
from tests.helpers.faults import BROKEN, fail
from tests.vtensor.caches import ACTIVE, Pattern, close, lengths, make, page, spec, states
from vtensor.allocator import graveyard
from vtensor.allocator.driver import Call, get_driver

BATCH, LONGEST = 3, 24
OUT_OF_MEMORY = 2

MODELS: list[Callable[[str], list[vt.LayerSpec]]] = [
    lambda device: [spec(device, 1)],
    lambda device: [spec(device, 2), spec(device, 1.5, dtype=torch.float16)],
    lambda device: [spec(device, 1, window=4)],
    lambda device: [spec(device, 1.5, window=3), spec(device, 3), spec(device, 3, window=9, dtype=torch.float32)],
    lambda device: [vt.LayerSpec(1, page(device) // 4, page(device) // 5, is_latent=True), spec(device, 2, window=1)],
]

OPTIONS = st.fixed_dictionaries(
    {
        "lookahead_tokens": st.sampled_from([0, 1, 3]),
        "eager_slot": st.booleans(),
        "deferred_reclamation": st.booleans(),
        "scrub": st.booleans(),
        "overread_tokens": st.sampled_from([0, 0, 2]),
        "layout": st.sampled_from(["sliced", "per_layer"]),
        "watermarks": st.sampled_from([(0.0, 0.0), (0.1, 0.2), (0.5, 0.9)]),
    }
)
FAULTS = st.none() | st.tuples(
    st.sampled_from([Call.CREATE, Call.MAP, Call.SET_ACCESS, Call.UNMAP, Call.RELEASE, Call.ZERO]),
    st.integers(1, 5),
    st.sampled_from([BROKEN, BROKEN, OUT_OF_MEMORY]),
)
Fault = tuple[Call, int, int] | None
# What a slot does in a step: so many tokens more, or fewer; None sits it out.
GROWTH = st.lists(st.none() | st.sampled_from([0, 1, 1, 1, 2, 5, 20, -1, -2, -7]), min_size=BATCH, max_size=BATCH)
OPERATIONS = st.one_of(
    st.tuples(st.just("alloc"), st.none() | st.integers(0, LONGEST), FAULTS),
    st.tuples(st.just("step"), GROWTH, FAULTS),
    st.tuples(st.just("step"), GROWTH, FAULTS),
    st.tuples(st.just("free"), st.integers(0, BATCH - 1), FAULTS),
    st.tuples(st.just("look"), st.just(0), FAULTS),
)


@dataclass
class Request:
    """What a request must find in its slot."""

    salt: int
    length: int = 0
    computed: int = 0  # tokens that it had before the iteration that is under way
    low: dict[int, int] = field(default_factory=dict)  # places that windows have passed, by buffer


class Machine(RuleBasedStateMachine):
    """Every operation is made twice, on the cache and on the model."""

    device: str

    @initialize(
        capacity=st.integers(24, 150), size_classes=st.sampled_from([1, 1, 3]), options=OPTIONS, model=st.data()
    )
    def start(self, capacity: int, size_classes: int, options: dict[str, Any], model: st.DataObject) -> None:
        size = page(self.device)
        self.driver = get_driver(self.device)
        self.capacity, self.size_classes = capacity, size_classes
        self.pool = vt.PagePool(
            self.device,
            capacity_bytes=capacity * size,
            page_group_bytes=size,
            max_size_class_bytes=size << size_classes - 1,
        )
        self.stolen: list[Any] = []
        self.num_requests = 0
        self.open(options, model.draw(st.sampled_from(MODELS)))

    def open(self, options: dict[str, Any], model: Callable[[str], list[vt.LayerSpec]]) -> None:
        low, high = options["watermarks"]
        given = {name: value for name, value in options.items() if name != "watermarks"}
        self.cache = make(
            self.device,
            *model(self.device),
            pool=self.pool,
            max_batch_size=BATCH,
            max_context_tokens=LONGEST,
            low_watermark=low,
            high_watermark=high,
            **given,
        )
        self.options = options
        self.pattern = Pattern(self.cache)
        self.requests: dict[int, Request] = {}

    @property
    def num_stolen(self) -> int:
        """Page groups that a neighbour holds."""
        return sum(int(one.nbytes) for one in self.stolen) // page(self.device)

    # -- the model ----------------------------------------------------------------------------------------------------

    def places(self, tokens: int, row_bytes: int) -> int:
        return -(-(tokens + self.options["overread_tokens"]) * row_bytes // page(self.device)) if tokens else 0

    def needed(self, counts: dict[int, int]) -> int:
        """Page groups that all requests need, if these are to have these lengths: more than they have, or as many."""
        total = 0
        for slot, request in self.requests.items():
            tokens = max(counts.get(slot, 0), request.length)
            for number, buffer in enumerate(self.cache.config.buffers):
                total += self.places(tokens, buffer.row_bytes) - request.low.get(number, 0)
        return total

    def is_refused(self, counts: dict[int, int]) -> bool:
        """Whether what a shorter sequence sees is gone."""
        size = page(self.device)
        for slot, tokens in counts.items():
            request = self.requests[slot]
            for number, buffer in enumerate(self.cache.config.buffers):
                if 0 < tokens < request.length and buffer.spec.window is not None:
                    first = max(0, tokens - buffer.spec.window - self.options["overread_tokens"])
                    if first * buffer.row_bytes < request.low.get(number, 0) * size:
                        return True
        return False

    def apply(self, counts: dict[int, int]) -> None:
        """Take over the lengths; write what is new, and read all that a new token sees."""
        margin, size = self.options["lookahead_tokens"] + self.options["overread_tokens"], page(self.device)
        for slot, tokens in counts.items():
            request = self.requests[slot]
            if tokens == 0:
                continue
            before = request.length
            request.computed = before if tokens > before else min(request.computed, tokens - 1)
            for number, buffer in enumerate(self.cache.config.buffers):
                if buffer.spec.window is not None:
                    first = max(0, request.computed - buffer.spec.window + 1 - margin)
                    request.low[number] = max(request.low.get(number, 0), first * buffer.row_bytes // size)
            if tokens > before:
                self.check_new(slot, before, tokens)
                self.pattern.write(slot, before, tokens, request.salt)
            request.length = tokens
            self.pattern.check(slot, tokens, request.computed, request.salt)

    def check_new(self, slot: int, before: int, tokens: int) -> None:
        """Memory that is new holds nothing of others: no NaN of a neighbour's, and with `scrub` nothing at all."""
        for layer in range(self.cache.config.num_layers):
            for is_value in (0, 1):
                rows = self.pattern.rows(layer, is_value, slot, before, tokens).float()
                assert rows.isfinite().all()
                if self.options["scrub"] and before == 0:
                    assert not rows.any()

    # -- operations ---------------------------------------------------------------------------------------------------

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        if fault is None:
            yield
        else:
            with fail(self.driver, fault[0], fault[1], fault[2]):
                yield

    def tried(self, fault: Fault, call: Callable[[], Any]) -> Any:
        """What a call returns, or None where it fails for the reason that was given it."""
        if fault is None:
            return call()
        try:
            return call()
        except vt.DriverError as error:
            failed = error.call
        assert failed == fault[0].symbol
        return None

    def alloc(self, prompt: int | None, fault: Fault) -> None:
        idle = [slot for slot in range(BATCH) if slot not in self.requests]
        with self.failing(fault):
            slot = self.tried(fault, lambda: self.cache.alloc_reqid(prompt)) if idle else None
        if slot is None:
            if not idle:
                with pytest.raises(vt.OutOfSlotsError):
                    self.cache.alloc_reqid(prompt)
            return
        assert slot in idle
        if not prompt:
            assert slot == idle[0]
        self.num_requests += 1
        self.requests[slot] = Request(self.num_requests)

    def free(self, number: int, fault: Fault) -> None:
        slot = sorted(self.requests)[number % len(self.requests)] if self.requests else number
        with self.failing(fault):
            if slot in self.requests:
                self.cache.free_reqid(slot)
                del self.requests[slot]
            else:
                with pytest.raises(vt.RequestError, match="not active"):
                    self.cache.free_reqid(slot)

    def step(self, growth: list[int | None], fault: Fault) -> None:
        counts = {}
        for slot, request in self.requests.items():
            grown = growth[slot]
            counts[slot] = 0 if grown is None else min(max(1, request.length + grown), LONGEST)
        if self.is_refused(counts):
            with pytest.raises(vt.RequestError, match="shorten by fewer tokens"):
                self.cache.step(lengths(self.cache, counts))
            return
        with self.failing(fault):
            result = self.tried(fault, lambda: self.cache.step(lengths(self.cache, counts)))
        if result is None or (not result and fault and fault[::2] == (Call.CREATE, OUT_OF_MEMORY)):
            self.unchanged()
            result = self.cache.step(lengths(self.cache, counts))  # the same again, without the fault
        missing = self.needed(counts) - (self.capacity - self.num_stolen)
        if self.size_classes == 1:
            assert result.shortfall_page_groups == max(0, missing)
        elif missing > 0:  # large handles are taken away whole, or not at all
            assert result.shortfall_page_groups >= missing
        elif self.needed(dict.fromkeys(self.requests, LONGEST)) <= self.capacity - self.num_stolen:
            assert result
        if result:
            self.apply(counts)
        else:
            self.unchanged()

    def look(self, _: int, fault: Fault) -> None:
        with self.failing(fault):
            found, slots = self.cache.stats(), self.cache.residency()
        assert found.num_active_slots == len(self.requests)
        if fault is None and self.device == "cpu":
            assert found.num_reclaiming_slots == 0  # what was given up is given back, if need be the next time
        assert found.mapped_page_groups + self.num_stolen <= self.capacity
        assert found.mapped_page_groups - found.ahead_page_groups >= self.needed({})
        assert found.total_page_groups == self.pool.stats().total_page_groups <= self.capacity
        assert found.free_page_groups + found.mapped_page_groups + self.num_stolen == found.total_page_groups
        for slot in slots:
            request = self.requests.get(slot.reqid)
            assert slot.seq_len == (request.length if request else 0) <= slot.committed_tokens

    def unchanged(self) -> None:
        """A call that failed has changed nothing."""
        assert [slot for slot in range(BATCH) if states(self.cache)[slot] == ACTIVE] == sorted(self.requests)
        for slot, request in self.requests.items():
            assert self.cache._slots.arrays.seq_lens[slot] == request.length
            if request.length:
                self.pattern.check(slot, request.length, salt=request.salt)
        self.cache.check_integrity()

    # -- rules --------------------------------------------------------------------------------------------------------

    @rule(operation=OPERATIONS)
    def one(self, operation: tuple[str, Any, Fault]) -> None:
        getattr(self, operation[0])(*operation[1:])

    @rule(operations=st.lists(OPERATIONS, min_size=2, max_size=6))
    def several(self, operations: list[tuple[str, Any, Fault]]) -> None:
        """One right after the other, while the mapper is still at what the first has left to it."""
        for name, *arguments in operations:
            getattr(self, name)(*arguments)

    @rule(count=st.integers(1, 10), fault=FAULTS)
    def decode(self, count: int, fault: Fault) -> None:
        for _ in range(count):
            self.step([1] * BATCH, fault)
            fault = None

    @rule(count=st.integers(1, 40))
    def steal(self, count: int) -> None:
        """A neighbour takes so many page groups, and leaves NaN in them."""
        can = self.needed({}) + self.num_stolen + count <= self.capacity
        loot = vt.empty(count * page(self.device), dtype=torch.uint8, device=self.device, pool=self.pool)
        try:
            loot.fill_(255)
        except vt.OutOfPagesError:
            assert not can or self.size_classes > 1
        else:
            assert can
            self.stolen.append(loot)

    @rule()
    def give_back(self) -> None:
        """What it had is free again."""
        self.stolen.clear()
        graveyard.drain()

    @rule(options=OPTIONS, model=st.sampled_from(MODELS))
    def close_and_reopen(self, options: dict[str, Any], model: Callable[[str], list[vt.LayerSpec]]) -> None:
        self.cache.close()
        self.cache.close()
        self.open(options, model)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "cache"):
            self.unchanged()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
            self.stolen.clear()
            close(self.pool)


def test_random_sequences(device: str) -> None:
    machine = type("Machine", (Machine,), {"device": device})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=100 if device == "cpu" else 30,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
