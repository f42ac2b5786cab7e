"""Footprint: which page groups a strided view touches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["covered", "dense_blocks", "footprint", "footprint_at", "merged"]


def footprint(
    offset: int, shape: Sequence[int], strides: Sequence[int], element_bytes: int, page_group_bytes: int
) -> npt.NDArray[np.int64]:
    """The page groups that hold at least one byte of a strided view.

    Exact, not a hull: a view over every second page group names every second page group.

    Parameters
    ----------
    offset : int
        Elements before the view's first one.
    shape, strides : sequence of int
        The view's, in elements.
    element_bytes, page_group_bytes : int

    Returns
    -------
    ndarray of int64, shape [n, 2]
        Rows of (first page group, number of page groups), ascending, neither overlapping nor adjacent.

    >>> footprint(0, (2, 3), (4096, 1), 4, 4096).tolist()
    [[0, 1], [4, 1]]
    """
    if 0 in shape:
        return np.empty((0, 2), np.int64)
    # Inner dimensions fill a block without leaving out a whole page group; the others shift that block about.
    starts, block_bytes = _blocks(offset, shape, strides, element_bytes, page_group_bytes)
    if len(starts) == 1:
        start = int(starts[0])
        first = start // page_group_bytes
        return np.array([[first, (start + block_bytes - 1) // page_group_bytes + 1 - first]], np.int64)
    return _runs(starts // page_group_bytes, (starts + block_bytes - 1) // page_group_bytes + 1)


def footprint_at(
    offset: int,
    offsets: npt.NDArray[np.int64],
    shape: Sequence[int],
    strides: Sequence[int],
    element_bytes: int,
    page_group_bytes: int,
    most_blocks: int,
) -> npt.NDArray[np.int64] | None:
    """The page groups that hold at least one byte of many strided views of one shape.

    Parameters
    ----------
    offset : int
        Elements before everything.
    offsets : ndarray of int64, shape [n]
        Elements from there to the first one of each view, in any order.
    shape, strides, element_bytes, page_group_bytes
        As for `footprint`.
    most_blocks : int
        The most pieces to look at.

    Returns
    -------
    ndarray of int64, shape [m, 2], or None
        As of `footprint`; None where there are more pieces.

    >>> footprint_at(0, np.array([4096, 4100, 0]), (2,), (1,), 4, 4096, 99).tolist()
    [[0, 1], [4, 1]]
    """
    if 0 in shape or not len(offsets):
        return np.empty((0, 2), np.int64)
    starts, block_bytes = _blocks(offset, shape, strides, element_bytes, page_group_bytes)
    if len(offsets) > 1:
        offsets = np.unique(offsets)
    if len(offsets) * len(starts) > most_blocks:
        return None
    starts = (offsets[:, None] * element_bytes + starts).ravel()
    return _runs(starts // page_group_bytes, (starts + block_bytes - 1) // page_group_bytes + 1)


def covered(
    offset: int, shape: Sequence[int], strides: Sequence[int], element_bytes: int, page_group_bytes: int, end_bytes: int
) -> npt.NDArray[np.int64]:
    """The page groups of which a strided view holds every byte.

    A lower bound: a view of many blocks smaller than a page group is taken to hold none.

    Parameters
    ----------
    offset, shape, strides, element_bytes, page_group_bytes
        As for `footprint`.
    end_bytes : int
        Where the data ends of which this is a view: nobody has bytes behind it, so its last page group ends there.

    Returns
    -------
    ndarray of int64, shape [n, 2]
        Rows of (first page group, number of page groups), ascending, neither overlapping nor adjacent.

    >>> covered(100, (4096,), (1,), 4, 4096, 1 << 20).tolist()
    [[1, 3]]
    >>> covered(0, (1000,), (1,), 4, 4096, 4000).tolist()
    [[0, 1]]
    """
    nothing = np.empty((0, 2), np.int64)
    if 0 in shape:
        return nothing
    starts, block_bytes = _blocks(offset, shape, strides, element_bytes, 1, page_group_bytes)
    if not len(starts):
        return nothing
    starts.sort()
    ends = np.maximum.accumulate(starts + block_bytes)
    is_new = np.append(True, starts[1:] > ends[:-1])
    starts, ends = starts[is_new], ends[np.append(is_new[1:], True)]
    first = -(-starts // page_group_bytes)
    end = np.where(ends >= end_bytes, -(-ends // page_group_bytes), ends // page_group_bytes)
    holds_any = end > first
    return _runs(first[holds_any], end[holds_any]) if holds_any.any() else nothing


def dense_blocks(
    offset: int, shape: Sequence[int], strides: Sequence[int], element_bytes: int, most_blocks: int
) -> npt.NDArray[np.int64] | None:
    """Blocks of bytes without a gap of which a strided view consists.

    Parameters
    ----------
    offset, shape, strides, element_bytes
        As for `footprint`.
    most_blocks : int
        The most blocks to return.

    Returns
    -------
    ndarray of int64, shape [n, 2], or None
        First byte and number of bytes of each; they overlap where elements do. None where there are more.

    >>> dense_blocks(0, (2, 3), (8, 1), 4, 99).tolist()
    [[0, 12], [32, 12]]
    """
    if 0 in shape:
        return np.empty((0, 2), np.int64)
    length, number, is_dense = 1, 1, True
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        is_dense &= stride == length
        if is_dense:
            length *= size
        else:
            number *= size
    if number > most_blocks:
        return None
    starts, block_bytes = _blocks(offset, shape, strides, element_bytes, 1)
    return np.stack([starts, np.full(len(starts), block_bytes)], axis=1)


def merged(blocks: npt.NDArray[np.int64], page_group_bytes: int) -> npt.NDArray[np.int64]:
    """The page groups that hold at least one byte of some blocks, rows of (first byte, number of bytes).

    >>> merged(np.array([[9000, 10], [0, 1], [4000, 200]]), 4096).tolist()
    [[0, 3]]
    """
    if not len(blocks):
        return np.empty((0, 2), np.int64)
    return _runs(blocks[:, 0] // page_group_bytes, (blocks.sum(axis=1) - 1) // page_group_bytes + 1)


def _blocks(
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    element_bytes: int,
    gap_bytes: int,
    least_bytes: int = 0,
) -> tuple[npt.NDArray[np.int64], int]:
    """Where blocks without a gap of `gap_bytes` start, and their size; no blocks where many would be too small."""
    block_bytes = element_bytes
    starts = np.array([offset * element_bytes], np.int64)
    sizes: dict[int, int] = {}
    for stride, size in zip(strides, shape, strict=True):
        sizes[stride] = sizes.get(stride, 1) + size - 1  # dimensions of one stride (windows) reach as one
    for stride, size in sorted(sizes.items()):
        if size == 1 or stride == 0:
            continue
        stride_bytes = stride * element_bytes
        if len(starts) == 1 and stride_bytes - block_bytes < gap_bytes:
            block_bytes += (size - 1) * stride_bytes
        elif block_bytes < least_bytes:
            return starts[:0], block_bytes
        else:
            starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride_bytes).ravel()
    return starts, block_bytes


def _runs(first: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ranges from `first` to `end` as rows of (first, number), ascending; those that overlap or touch made one."""
    runs = np.empty((len(first), 2), np.int64)
    if len(first) == 1:
        runs[0] = first[0], end[0] - first[0]
        return runs
    order = np.argsort(first, kind="stable")
    first, end = first[order], np.maximum.accumulate(end[order])
    starts = np.flatnonzero(first[1:] > end[:-1]) + 1
    runs = runs[: len(starts) + 1]
    runs[0, 0], runs[1:, 0] = first[0], first[starts]
    runs[:-1, 1], runs[-1, 1] = end[starts - 1], end[-1]
    runs[:, 1] -= runs[:, 0]
    return runs
