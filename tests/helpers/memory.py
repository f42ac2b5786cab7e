"""Bytes at an address of either device, and ranges of places."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vtensor.allocator import words
from vtensor.allocator.address_space import AddressSpace

__all__ = ["access_at", "fill", "fill_place", "handles", "place_value", "ranges", "rows", "tensor_at", "value"]


def tensor_at(device: str, address: int, size_bytes: int) -> torch.Tensor:
    """The bytes at an address, as a tensor that owns nothing. The address needs memory only once it is used."""
    where = torch.device(device)
    storage = torch._C._construct_storage_from_data_pointer(address, where, size_bytes)
    return torch.empty(0, dtype=torch.uint8, device=where).set_(storage, 0, (size_bytes,), (1,))


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)  # before anybody unmaps what a kernel still uses


def fill(device: str, address: int, size_bytes: int, number: int) -> None:
    """Write one number into every byte."""
    tensor_at(device, address, size_bytes).fill_(number)
    _wait(device)


def value(device: str, address: int, size_bytes: int) -> int:
    """The number that every byte holds; an assertion error where they differ."""
    found = torch.unique(tensor_at(device, address, size_bytes).cpu()).tolist()
    assert len(found) == 1, f"the bytes at {address:#x} hold {found}"
    return int(found[0])


def fill_place(space: AddressSpace, place: int, number: int) -> None:
    """Write one number into every byte of a place."""
    size = space.page_group_bytes
    fill(space.pool.driver.device, space.base + place * size, size, number)


def place_value(space: AddressSpace, place: int) -> int:
    """The number that every byte of a place holds."""
    size = space.page_group_bytes
    return value(space.pool.driver.device, space.base + place * size, size)


def ranges(*rows: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Ranges of places from rows of (first, count)."""
    return np.array(rows, np.int64).reshape(-1, 2)


def rows(*ranges: tuple[int, int], content: int, largest: int = words.LARGEST_SIZE_CLASS) -> npt.NDArray[np.int64]:
    """Ranges of places from rows of (first, count), all of one content and with one largest size class."""
    return np.array([(*row, content, largest) for row in ranges], np.int64).reshape(-1, words.RANGE_WORDS)


def handles(space: AddressSpace) -> list[tuple[int, int]]:
    """The handles that lie in a space, as (first place, number of places)."""
    shift = int(space.pool.arrays.constants[words.CLASS_SHIFT])
    found = []
    for place in np.flatnonzero(space.arrays.table[: space.num_places]).tolist():
        group = abs(int(space.arrays.table[place])) - 1
        size = 1 << (group >> shift)
        if group % size == 0:
            found.append((place, size))
    return found


def access_at(address: int) -> str:
    """What the system lets the process do at an address of the host, as in /proc/self/maps: ``"rw-s"``."""
    with open("/proc/self/maps") as maps:  # line by line: at the limit of mappings there is no room for all of it
        for line in maps:
            span, permissions = line.split()[:2]
            low, high = (int(end, 16) for end in span.split("-"))
            if low <= address < high:
                return permissions
    return ""
