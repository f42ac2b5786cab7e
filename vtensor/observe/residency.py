"""A KV cache as text: one strip a slot, in which a few committed page groups are seen beside a huge reservation."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vtensor.kvcache import SlotResidency, SlotState
from vtensor.units import ceil_div, format_bytes

__all__ = ["cell_page_groups", "render_residency", "strip"]

USED, COMMITTED, RESERVED = "█", "▒", "·"
_STYLES = {USED: "green", COMMITTED: "yellow", RESERVED: "dim"}


def render_residency(
    slots: Sequence[SlotResidency], page_group_bytes: int, *, num_cells: int = 32, labels: Sequence[str] | None = None
) -> RenderableType:
    """Strips of a cache's slots, on one scale, with a legend.

    Parameters
    ----------
    slots : sequence of SlotResidency
        From ``manager.residency()``: all of them, or the ones to show.
    page_group_bytes : int
        ``manager.pool.page_group_bytes``.
    num_cells : int
        Characters of a strip. It shows the beginning of a slot; what lies beyond is told as a number.
    labels : sequence of str, optional
        What to call each slot. Default: its number and state.

    Returns
    -------
    rich renderable

    Raises
    ------
    ValueError
        `num_cells` is not positive, or `labels` are not as many as `slots`.
    """
    if num_cells < 1:
        raise ValueError(f"num_cells={num_cells!r} must be at least 1")
    if labels is None:
        labels = [_label(slot) for slot in slots]
    if len(labels) != len(slots):
        raise ValueError(f"{len(labels)} labels for {len(slots)} slots")
    scale = cell_page_groups(slots, page_group_bytes, num_cells)
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, style="dim")
    for label, slot in zip(labels, slots, strict=True):
        cells = strip(slot, scale * page_group_bytes, num_cells)
        beyond = slot.reserved_bytes // page_group_bytes - scale * len(cells)
        text = Text()
        for character in cells:
            text.append(character, _STYLES[character])
        table.add_row(Text(label), text, f"{slot.seq_len:,} tokens", f"+ {beyond:,}" if beyond > 0 else "")
    return Group(table, *_legend(scale, page_group_bytes))


def cell_page_groups(slots: Sequence[SlotResidency], page_group_bytes: int, num_cells: int) -> int:
    """Page groups that one character stands for: the least power of two that leaves a quarter of the strip free."""
    most = max((slot.committed_bytes for slot in slots), default=0)
    shown = max(1, num_cells * 3 // 4)
    scale = 1
    while ceil_div(most, scale * page_group_bytes) > shown:
        scale *= 2
    return scale


def strip(slot: SlotResidency, cell_bytes: int, num_cells: int) -> str:
    """The beginning of a slot, one character for `cell_bytes`.

    A character that is partly committed counts as committed; one counts as used from half on, and the first as soon as
    anything is used.

    >>> from vtensor.kvcache import SlotResidency, SlotState
    >>> slot = SlotResidency(reqid=0, state=SlotState.ACTIVE, seq_len=3, committed_tokens=4, max_context_tokens=1024,
    ...                      used_bytes=300, committed_bytes=450, reserved_bytes=102_400)
    >>> strip(slot, cell_bytes=100, num_cells=10)
    '███▒▒·····'
    """
    total = min(num_cells, ceil_div(slot.reserved_bytes, cell_bytes))
    committed = min(total, ceil_div(slot.committed_bytes, cell_bytes))
    used = min(committed, max(int(slot.used_bytes / cell_bytes + 0.5), int(slot.used_bytes > 0)))
    return USED * used + COMMITTED * (committed - used) + RESERVED * (total - committed)


def _label(slot: SlotResidency) -> str:
    return f"slot {slot.reqid}" + ("" if slot.state == SlotState.ACTIVE else f" ({slot.state.name.lower()})")


def _legend(scale: int, page_group_bytes: int) -> tuple[Text, Text]:
    text = Text()
    for character, meaning in ((USED, "holds tokens"), (COMMITTED, "committed"), (RESERVED, "reserved, no memory")):
        text.append(character, _STYLES[character]).append(f" {meaning}   ")
    unit = "page group" if scale == 1 else "page groups"
    size = format_bytes(scale * page_group_bytes)
    return text, Text(f"one character: {scale} {unit}, {size}   +: page groups reserved beyond", "dim")
