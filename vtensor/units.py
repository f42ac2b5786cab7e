"""Sizes: rounding and display. Every size in vtensor carries its unit in its name (`_bytes`, `_tokens`, `_us`)."""

from __future__ import annotations

__all__ = ["KIB", "MIB", "GIB", "TIB", "ceil_div", "format_bytes", "round_up"]  # noqa: RUF022 - by size

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40


def ceil_div(value: int, divisor: int) -> int:
    """Quotient rounded up.

    >>> ceil_div(7, 2), ceil_div(6, 2), ceil_div(0, 2)
    (4, 3, 0)
    """
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `value`.

    >>> round_up(6912, 4096)
    8192
    """
    return ceil_div(value, multiple) * multiple


def format_bytes(num_bytes: int) -> str:
    """Bytes for a reader, in binary units.

    >>> format_bytes(512), format_bytes(64 << 10), format_bytes(3 << 29), format_bytes(12_288_000_000_000)
    ('512 B', '64 KiB', '1.5 GiB', '11.18 TiB')
    """
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{num_bytes} B"
