"""Footprints, against an enumeration of every element's bytes."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vtensor.footprint import covered, footprint


def brute_force(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], element_bytes: int, page_group_bytes: int
) -> list[list[int]]:
    """The page groups of every byte of every element, as maximal runs."""
    touched: set[int] = set()
    for index in itertools.product(*map(range, shape)):
        element = offset + sum(step * stride for step, stride in zip(index, strides, strict=True))
        first = element * element_bytes
        touched.update(byte // page_group_bytes for byte in (first, first + element_bytes - 1))
    runs: list[list[int]] = []
    for page_group in sorted(touched):
        if runs and sum(runs[-1]) == page_group:
            runs[-1][1] += 1
        else:
            runs.append([page_group, 1])
    return runs


@st.composite
def views(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...], int, int]:
    element_bytes = draw(st.sampled_from([1, 2, 4, 8, 16]))
    page_group_bytes = draw(st.sampled_from([16, 32, 64, 256, 48]))  # one no power of two
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    strides = tuple(draw(st.lists(st.integers(0, 150), min_size=len(shape), max_size=len(shape))))
    return draw(st.integers(0, 300)), shape, strides, element_bytes, page_group_bytes


@settings(max_examples=600, deadline=None)
@given(views())
@example((0, (), (), 4, 64))  # a scalar
@example((17, (3,), (0,), 4, 64))  # one element, three times
@example((0, (2, 3), (32, 16), 4, 64))  # the inner block ends where the outer one begins
@example((0, (4, 4), (1, 1), 8, 16))  # overlapping windows, as unfold makes them
@example((0, (3, 3), (40, 47), 1, 16))  # the outer stride lies within the inner extent
@example((0, (2, 2, 2), (16, 17, 100), 1, 16))
@example((3, (2,), (12,), 16, 48))  # elements that straddle page groups
def test_exactly_the_page_groups_of_every_byte(view: tuple[int, tuple[int, ...], tuple[int, ...], int, int]) -> None:
    assert footprint(*view).tolist() == brute_force(*view)


@settings(max_examples=200, deadline=None)
@given(views())
def test_runs_are_ascending_and_apart(view: tuple[int, tuple[int, ...], tuple[int, ...], int, int]) -> None:
    rows = footprint(*view)
    assert rows.dtype == np.int64
    assert rows.ndim == 2
    assert rows.shape[1] == 2
    assert (rows[:, 1] > 0).all()
    assert (rows[1:, 0] > rows[:-1].sum(axis=1)).all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 1 << 40), (1 << 40, 0, 7)])
def test_a_view_of_nothing_touches_nothing(shape: tuple[int, ...]) -> None:
    assert footprint(5, shape, (1,) * len(shape), 4, 64).tolist() == []


def test_a_gap_of_just_a_page_group_is_left_out() -> None:
    # Blocks of one byte; the gap between them holds a whole page group only from 2 * 64 - 1 bytes on, or aligned.
    assert footprint(0, (2,), (64,), 1, 64).tolist() == [[0, 2]]
    assert footprint(0, (2,), (127,), 1, 64).tolist() == [[0, 2]]
    assert footprint(0, (2,), (128,), 1, 64).tolist() == [[0, 1], [2, 1]]
    assert footprint(63, (2,), (65,), 1, 64).tolist() == [[0, 1], [2, 1]]


def test_columns_of_a_large_matrix() -> None:
    # One column of [65,536, 1 MiB]: a page group a row, and not the hull of 64 GiB.
    rows = footprint(5, (65_536, 1), (1 << 20, 1), 1, 65_536)
    assert rows.tolist() == [[16 * row, 1] for row in range(65_536)]


def test_a_dense_view_of_100_tib_is_one_run() -> None:
    assert footprint(0, (100 << 20, 1 << 20), (1 << 20, 1), 1, 65_536).tolist() == [[0, (100 << 40) // 65_536]]


def test_offsets_beyond_32_bits() -> None:
    assert footprint(1 << 40, (2,), (1 << 42,), 8, 1 << 21).tolist() == [[1 << 22, 1], [(1 << 22) + (1 << 24), 1]]


def test_windows_over_large_strides_cost_no_more_than_their_base() -> None:
    # unfold gives two dimensions of one stride; taken one after the other they would be 50 million places
    runs = footprint(0, (12_289, 4_096), (32_768, 32_768), 4, 65_536)
    assert runs.tolist() == footprint(0, (16_384,), (32_768,), 4, 65_536).tolist()


# -- what a view holds as a whole -------------------------------------------------------------------------------------


def held_as_a_whole(
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    element_bytes: int,
    page_group_bytes: int,
    end_bytes: int,
) -> set[int]:
    """The page groups of which every byte before the end is one of the view's."""
    held: set[int] = set()
    for index in itertools.product(*map(range, shape)):
        first = (offset + sum(step * stride for step, stride in zip(index, strides, strict=True))) * element_bytes
        held.update(range(first, first + element_bytes))
    starts = {byte // page_group_bytes * page_group_bytes for byte in held}
    return {
        start // page_group_bytes
        for start in starts
        if held.issuperset(range(start, min(start + page_group_bytes, end_bytes)))
    }


def page_groups(rows: np.ndarray) -> set[int]:
    return {page_group for first, number in rows.tolist() for page_group in range(first, first + number)}


@settings(max_examples=400, deadline=None)
@given(views())
@example((0, (2, 3), (32, 16), 4, 64))
@example((0, (4, 64), (1, 4), 4, 256))
def test_nothing_is_covered_of_which_a_byte_is_anothers(
    view: tuple[int, tuple[int, ...], tuple[int, ...], int, int],
) -> None:
    offset, shape, strides, element_bytes, _ = view
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    for end_bytes in ((last + 1) * element_bytes, 1 << 20):
        rows = covered(*view, end_bytes)
        assert page_groups(rows) <= held_as_a_whole(*view, end_bytes)
        assert (rows[1:, 0] > rows[:-1].sum(axis=1)).all()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_slices_cover_all_that_they_hold(data: st.DataObject) -> None:
    # A matrix of rows, whole or cut, in any order of dimensions: as `x[a:b]`, `x[:, a:b]`, `x[::2]`, `x.T`.
    num_rows, width, page_group_bytes = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 64)), 32
    start, stop = sorted((data.draw(st.integers(0, num_rows)), data.draw(st.integers(0, num_rows))))
    left, right = sorted((data.draw(st.integers(0, width)), data.draw(st.integers(0, width))))
    step, end_bytes = data.draw(st.integers(1, 2)), num_rows * width * 2
    view = np.arange(num_rows * width, dtype=np.int16).reshape(num_rows, width)[start:stop:step, left:right]
    if data.draw(st.booleans()):
        view = view.T
    offset = start * width + left
    rows = covered(offset, view.shape, tuple(stride // 2 for stride in view.strides), 2, page_group_bytes, end_bytes)
    expected = held_as_a_whole(
        offset, view.shape, tuple(stride // 2 for stride in view.strides), 2, page_group_bytes, end_bytes
    )
    if (right - left) * 2 < page_group_bytes:  # of many small blocks, one may lie at the very end, and be missed
        expected -= {(end_bytes - 1) // page_group_bytes} - page_groups(rows)
    assert page_groups(rows) == expected


@pytest.mark.parametrize("shape", [(0,), (3, 0), (1 << 40, 0, 7)])
def test_a_view_of_nothing_covers_nothing(shape: tuple[int, ...]) -> None:
    assert covered(5, shape, (1,) * len(shape), 4, 64, 1 << 50).tolist() == []


def test_what_is_covered_is_found_in_no_time() -> None:
    assert covered(5, (65_536, 1), (1 << 20, 1), 1, 65_536, 1 << 36).tolist() == []
    assert covered(0, (100 << 20, 1 << 20), (1 << 20, 1), 1, 65_536, 100 << 40).tolist() == [[0, (100 << 40) // 65_536]]
    assert covered(0, (12_289, 4_096), (32_768, 32_768), 4, 65_536, 1 << 40).tolist() == []
    assert covered(1, (3, 1 << 17), (1 << 18, 1), 1, 65_536, 1 << 40).tolist() == [[1, 1], [5, 1], [9, 1]]
