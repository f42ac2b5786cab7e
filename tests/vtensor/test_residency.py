"""The strips that show what a cache holds."""

import dataclasses

import pytest
from rich.console import Console

from vtensor.kvcache import KVCacheConfig, KVCacheManager, SlotResidency, SlotState
from vtensor.observe.residency import cell_page_groups, render_residency, strip

PAGE_GROUP = 100


def slot(used: int, committed: int, reserved: int = 100_000, reqid: int = 0) -> SlotResidency:
    state = SlotState.ACTIVE if used else SlotState.DEFERRED if committed else SlotState.FREE
    return SlotResidency(reqid, state, used, committed, 1 << 20, used, committed, reserved)


def text_of(*arguments, width: int = 100, **options) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_residency(*arguments, **options))
    return console.export_text()


@pytest.mark.parametrize(
    ("used", "committed", "expected"),
    [
        (0, 0, "··········"),
        (1, 100, "█·········"),  # anything used is seen
        (0, 300, "▒▒▒·······"),
        (149, 300, "█▒▒·······"),
        (150, 300, "██▒·······"),
        (300, 300, "███·······"),
        (5_000, 5_000, "██████████"),  # longer than the strip
    ],
)
def test_strip(used: int, committed: int, expected: str) -> None:
    assert strip(slot(used, committed), cell_bytes=100, num_cells=10) == expected


def test_strip_ends_with_its_slot() -> None:
    assert strip(slot(100, 200, reserved=300), cell_bytes=100, num_cells=10) == "█▒·"


@pytest.mark.parametrize(("committed", "scale"), [(0, 1), (100, 1), (3_000, 1), (3_100, 2), (48_000, 16)])
def test_scale_leaves_room_for_what_is_only_reserved(committed: int, scale: int) -> None:
    slots = [slot(0, 0), slot(committed, committed, reserved=1 << 30)]
    assert cell_page_groups(slots, PAGE_GROUP, num_cells=40) == scale
    assert strip(slots[1], scale * PAGE_GROUP, 40).count("·") >= 10


def test_rendered_with_labels_and_what_lies_beyond() -> None:
    slots = [slot(250, 300, reqid=0), slot(0, 200, reqid=1), slot(0, 0, reqid=2)]
    lines = text_of(slots, PAGE_GROUP, num_cells=10).splitlines()
    assert "slot 0" in lines[0]
    assert "███·······" in lines[0]
    assert "250 tokens" in lines[0]
    assert "+ 990" in lines[0]
    assert "slot 1 (deferred)" in lines[1]
    assert "▒▒········" in lines[1]
    assert "slot 2 (free)" in lines[2]
    assert "█ holds tokens" in lines[3]
    assert "one character: 1 page group, 100 B" in lines[4]
    assert "only one" in text_of(slots[:1], PAGE_GROUP, labels=["only one"])


def test_fits_a_terminal_of_80_columns() -> None:
    huge = dataclasses.replace(slot(1 << 30, 1 << 30, reserved=1 << 40), seq_len=1 << 20)
    lines = text_of([huge], 1 << 16, labels=["request 12"], width=80).splitlines()
    assert len(lines) == 3
    assert "…" not in "".join(lines)


def test_no_slots() -> None:
    assert "holds tokens" in text_of([], PAGE_GROUP)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="num_cells=0"):
        render_residency([slot(1, 100)], PAGE_GROUP, num_cells=0)
    with pytest.raises(ValueError, match="2 labels for 1 slots"):
        render_residency([slot(1, 100)], PAGE_GROUP, labels=["a", "b"])


def test_of_a_cache(device: str) -> None:
    config = KVCacheConfig(num_layers=4, num_kv_heads=2, head_dim=64, max_batch_size=3, max_context_tokens=1 << 20)
    with KVCacheManager(config, device=device, lookahead_tokens=0, eager_slot=False) as cache:
        for _ in range(2):
            cache.alloc_reqid()
        assert cache.step([1000, 10, 0])
        cache.free_reqid(1)
        lines = text_of(cache.residency(), cache.pool.page_group_bytes).splitlines()
    assert lines[0].count("█") > 0
    assert "slot 1 (deferred)" in lines[1]
    assert "█" not in lines[1]
    assert lines[1].count("▒") > 0
    assert "slot 2 (free)" in lines[2]
    assert "▒" not in lines[2]
