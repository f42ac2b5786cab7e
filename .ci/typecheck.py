"""Run mypy over the packages. Arguments go to mypy.

mypy finds modules by their folders and cannot follow the mapping of an editable install, in which the top-level folder
`allocator` is the module `vtensor.allocator`. So it gets a temporary tree in which every folder lies where its module
belongs, made of symlinks; the names in its output are turned back into this repository's.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Check the packages; returns mypy's exit code."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    mapping = pyproject["tool"]["setuptools"]["package-dir"]
    # Outside the root: inside, mypy would find every file twice.
    with tempfile.TemporaryDirectory(prefix="vtensor-types-") as tree:
        lay_out(Path(tree), mapping)
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        # The cache knows files by their path below the tree, so it serves the next tree too.
        command += ["--cache-dir", str(ROOT / ".mypy_cache"), *sys.argv[1:], "--package", "vtensor"]
        done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True)
    print(to_repository(done.stdout, mapping), end="")
    return done.returncode


def lay_out(tree: Path, mapping: dict[str, str]) -> None:
    """Link every mapped folder's entries to where its module belongs."""
    for module, folder in sorted(mapping.items()):  # a package comes before those inside it
        place = tree.joinpath(*module.split("."))
        place.mkdir(parents=True, exist_ok=True)
        for entry in (ROOT / folder).iterdir():
            if entry.name != "__pycache__":
                (place / entry.name).symlink_to(entry)


def to_repository(output: str, mapping: dict[str, str]) -> str:
    """Turn paths of the tree, at the start of a line, into paths of the repository."""
    for module, folder in mapping.items():
        output = re.sub(rf"^{re.escape(module.replace('.', '/'))}/", f"{folder}/", output, flags=re.MULTILINE)
    return output


if __name__ == "__main__":
    sys.exit(main())
