"""Each notebook is kept twice: as a file to read and to change, and as the one that Jupyter opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_both_files_say_the_same(path: Path) -> None:
    notebook, script = (jupytext.read(path.with_suffix(suffix)) for suffix in (".ipynb", ".py"))
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in script.cells
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_is_stored_that_was_not_run_here(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
