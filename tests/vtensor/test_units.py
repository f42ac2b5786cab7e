"""Rounding and display of sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtensor.units import GIB, KIB, MIB, TIB, ceil_div, format_bytes, round_up

NUMBERS = st.integers(0, 1 << 60)
DIVISORS = st.integers(1, 1 << 40)


def test_each_unit_is_1024_of_the_one_before() -> None:
    assert (KIB, MIB, GIB, TIB) == (1024, 1024**2, 1024**3, 1024**4)


@given(NUMBERS, DIVISORS)
def test_ceil_div_is_the_smallest_number_that_covers(value: int, divisor: int) -> None:
    quotient = ceil_div(value, divisor)
    assert quotient * divisor >= value > (quotient - 1) * divisor


@given(NUMBERS, DIVISORS)
def test_round_up_is_the_smallest_multiple_that_covers(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


def test_large_numbers_lose_nothing() -> None:
    # As floats these two would be the same.
    assert ceil_div((1 << 60) + 1, 2) == (1 << 59) + 1
    assert round_up((1 << 60) + 1, 4096) == (1 << 60) + 4096


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (100 << 10, "100 KiB"),
        ((1 << 20) - 1, "1024 KiB"),
        (1 << 20, "1 MiB"),
        (2 << 20, "2 MiB"),
        (10 << 30, "10 GiB"),
        (1 << 40, "1 TiB"),
        (12_288_000_000_000, "11.18 TiB"),
        (5000 << 40, "5000 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
