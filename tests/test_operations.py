"""OPERATIONS.md is true: every line of its tables is run, and compared with the same on torch.zeros."""

from __future__ import annotations

import ast
import copy
import io
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vtensor as vt
from vtensor.allocator.driver import get_driver

TABLES = (Path(__file__).resolve().parent.parent / "OPERATIONS.md").read_text()
LINES = [line for line in TABLES.splitlines() if re.match(r"\| `", line)]
NUM_ROWS = 16


def cells(line: str) -> tuple[str, str, str, str]:
    """Code, where it runs, what it gives, and which rows have memory then."""
    first, gives, memory = (cell.strip() for cell in re.split(r" \| ", line.strip().strip("|")))
    match = re.fullmatch(r"`(.*)`(?: where it is on a (CPU|GPU))?", first)
    assert match, line
    return match[1], {"CPU": "cpu", "GPU": "cuda"}.get(match[2] or "", ""), gives, memory


def run(code: str, x: torch.Tensor) -> Any:
    names = {
        **{"x": x, "row": x.shape[1], "torch": torch, "nn": nn, "F": F, "np": np, "vt": vt},
        **{"copy": copy, "pickle": pickle, "io": io},
    }
    with warnings.catch_warnings(), torch.device(x.device):
        warnings.simplefilter("ignore")
        if isinstance(ast.parse(code).body[0], ast.Expr):
            return eval(code, names)  # the tables are ours
        exec(code, names)
    return None


def shown(result: Any) -> str:
    """What came out, in the words of the tables."""
    if result is None:
        return "-"
    if isinstance(result, list | tuple) and result and isinstance(result[0], torch.Tensor):
        return shown(result[0])
    return "virtual" if type(result) is vt.VirtualTensor else "plain"


def test_there_are_tables() -> None:
    assert len(LINES) > 80
    assert all(line.count(" | ") == 2 for line in LINES)


@pytest.mark.parametrize("line", LINES, ids=lambda line: cells(line)[0])
def test_a_line_of_the_tables(line: str, device: str) -> None:
    code, where, gives, memory = cells(line)
    if where and where != device.split(":")[0]:
        pytest.skip(f"is of a {where}")
    row = get_driver(device).default_page_group_bytes // 4
    x = vt.empty(NUM_ROWS, row, device=device)
    torch.manual_seed(0)
    if gives == "error":
        with pytest.raises(vt.VTensorError):
            run(code, x)
    else:
        result = run(code, x)
        if gives == "shared":
            data = result if isinstance(result, torch.Tensor) else torch.from_numpy(result)
            assert x.data_ptr() <= data.data_ptr() < x.data_ptr() + x.nbytes
        else:
            assert shown(result) == gives
            if gives == "plain" and isinstance(result, torch.Tensor) and result.layout is torch.strided:
                assert not x.data_ptr() <= result.data_ptr() < x.data_ptr() + x.nbytes
        dense = torch.zeros(NUM_ROWS, row, device=device)
        torch.manual_seed(0)
        if all(word not in code for word in ("commit", "resi", "plain", "_array", "data_ptr", "repr")):
            expected = run(code, dense)
            if isinstance(expected, torch.Tensor) and "empty" not in code:
                assert torch.equal(result.detach().to_dense(), expected.detach().to_dense())
        if "commit" not in code:
            assert torch.equal(x.detach().clone(), dense.detach())
    expected_rows = {"none": [], "all": list(range(NUM_ROWS))}
    rows = expected_rows[memory] if memory in expected_rows else [int(number) for number in memory.split(", ")]
    assert np.flatnonzero(x.residency()).tolist() == rows
