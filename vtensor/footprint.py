"""Footprint: which page groups a strided view touches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["footprint"]


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
    block_bytes = element_bytes
    starts = np.array([offset * element_bytes], np.int64)
    sizes: dict[int, int] = {}
    for stride, size in zip(strides, shape, strict=True):
        sizes[stride] = sizes.get(stride, 1) + size - 1  # dimensions of one stride (windows) reach as one
    for stride, size in sorted(sizes.items()):
        if size == 1 or stride == 0:
            continue
        stride_bytes = stride * element_bytes
        if len(starts) == 1 and stride_bytes - block_bytes < page_group_bytes:
            block_bytes += (size - 1) * stride_bytes
        else:
            starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride_bytes).ravel()
    first = starts // page_group_bytes
    end = (starts + block_bytes - 1) // page_group_bytes + 1
    order = np.argsort(first, kind="stable")
    first, end = first[order], np.maximum.accumulate(end[order])
    is_new = np.ones(len(first), bool)
    is_new[1:] = first[1:] > end[:-1]
    last_of_run = np.append(np.flatnonzero(is_new)[1:] - 1, len(first) - 1)
    return np.stack([first[is_new], end[last_of_run] - first[is_new]], axis=1)
