"""What a KV cache tells about itself: the result of a step, statistics, residency."""

from __future__ import annotations

from dataclasses import dataclass

from vtensor.kvcache.slots import SlotState

__all__ = ["KVCacheStats", "SlotResidency", "StepResult"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What `KVCacheManager.step` did; true if every slot has the memory it asked for.

    Attributes
    ----------
    shortfall_page_groups : int
        Page groups that are missing; 0 on success. When not 0, nothing was changed.
    waited_us : float
        How long it took to bring page groups into service, the mapping of those that were missing included; 0 where
        none were needed. If all were ready, also what it took to hand over the next look-ahead.
    num_mapped : int
        Page groups that this step brought into service.
    num_mapped_by_mapper : int
        Of those, the ones that were mapped already: ahead of need by the mapper, as a rule.
    """

    shortfall_page_groups: int = 0
    waited_us: float = 0.0
    num_mapped: int = 0
    num_mapped_by_mapper: int = 0

    def __bool__(self) -> bool:
        return self.shortfall_page_groups == 0


@dataclass(frozen=True)
class KVCacheStats:
    """A cache at one moment.

    Attributes
    ----------
    total_page_groups, free_page_groups : int
        Of the cache's pool: all that exist, and those without a mapping.
    mapped_page_groups, shared_page_groups : int
        Of this cache: page groups in use, each once, and those of them that lie in several places.
    ahead_page_groups : int
        Of the mapped ones, those that are out of service: mapped ahead of need, or waiting to be unmapped.
    reserved_bytes, committed_bytes, used_bytes : int
        Addresses; addresses with memory behind them, in service or not; bytes that hold tokens of active requests,
        those that a sliding window has passed left out.
    swapped_bytes : int
        Bytes of requests that were swapped out. Always 0: there is no swapping so far.
    num_active_slots, num_deferred_slots, num_reclaiming_slots : int
        Slots with a request, slots that keep page groups for the next one, and slots that are being emptied.
    num_mapped_ahead, num_dropped_ahead : int
        Page groups that the mapper has mapped ahead so far, and ranges that it could not or need not map.
    num_reclaimed, num_trimmed, num_passed : int
        Page groups taken so far from slots without a request, from requests that did not need them, and from behind
        sliding windows.
    num_failed_releases : int
        Times that the mapper could not unmap something; it is tried again.
    num_driver_calls : dict of str to int
        Calls of the cache's pool so far, by the driver's name of the call.
    """

    total_page_groups: int
    free_page_groups: int
    mapped_page_groups: int
    shared_page_groups: int
    ahead_page_groups: int
    reserved_bytes: int
    committed_bytes: int
    used_bytes: int
    swapped_bytes: int
    num_active_slots: int
    num_deferred_slots: int
    num_reclaiming_slots: int
    num_mapped_ahead: int
    num_dropped_ahead: int
    num_reclaimed: int
    num_trimmed: int
    num_passed: int
    num_failed_releases: int
    num_driver_calls: dict[str, int]


@dataclass(frozen=True)
class SlotResidency:
    """What one slot holds, over all layers.

    Attributes
    ----------
    seq_len, committed_tokens, max_context_tokens : int
        Tokens held; tokens for which every layer has memory; tokens for which there are addresses.
    used_bytes, committed_bytes, reserved_bytes : int
        Bytes that hold tokens; bytes in service, without what is mapped ahead; addresses.
    """

    reqid: int
    state: SlotState
    seq_len: int
    committed_tokens: int
    max_context_tokens: int
    used_bytes: int
    committed_bytes: int
    reserved_bytes: int
