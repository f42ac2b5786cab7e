"""The house's rules: who may import whom, what a package's __init__ holds, what importing vtensor does."""

import ast
import graphlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = {name: ROOT / folder for name, folder in SETUPTOOLS["package-dir"].items()}
MAPPED = sorted(folder.name for name, folder in FOLDERS.items() if name != folder.name)

# Top to bottom. A module imports from its own layer and from those below, also inside functions and under
# TYPE_CHECKING. A name stands for the module and all that is in it, but for the two in EXACT.
LAYERS = [
    [
        "vtensor",
        "vtensor.cli",
        "vtensor.__main__",
        "vtensor.demo",
        "vtensor.doctor",
        "vtensor.bench",
        "vtensor.observe",
        "vtensor.integrations",
        "vtensor.serving",
    ],
    ["vtensor.attention_backends", "vtensor.kvcache"],
    ["vtensor.triton_kernels"],
    ["vtensor.mode"],
    ["vtensor.factory"],
    ["vtensor.traced"],
    ["vtensor.tensor"],
    ["vtensor.access", "vtensor.copies", "vtensor.growth"],
    ["vtensor.watched"],
    ["vtensor.region", "vtensor.pools", "vtensor.effects", "vtensor.streams"],
    ["vtensor.allocator", "vtensor.allocator.pluggable"],
    ["vtensor.allocator.arena"],
    ["vtensor.allocator.address_space"],
    ["vtensor.allocator.mapper"],
    ["vtensor.allocator.mapper_native", "vtensor.allocator.segments"],
    ["vtensor.allocator.page_pool", "vtensor.allocator.reservation"],
    ["vtensor.allocator.plan", "vtensor.allocator.graveyard"],
    ["vtensor.allocator.handles"],
    ["vtensor.allocator.driver", "vtensor.allocator.native"],
    ["vtensor.indexing"],
    ["vtensor.footprint"],
    ["vtensor.allocator.words"],
    [
        "vtensor.devices",
        "vtensor.eager",
        "vtensor.errors",
        "vtensor.interrupts",
        "vtensor.units",
        "vtensor.unpicklable",
    ],
]
EXACT = {"vtensor", "vtensor.allocator"}  # their contents lie in several layers; a new module must name its own

# Kernels know tensors and strides, never pages; what manages pages knows no kernel. That is the paper's claim.
KERNELS = "vtensor.triton_kernels"
KERNELS_MAY_IMPORT = [KERNELS, "vtensor.errors", "vtensor.units"]
PAGES = "vtensor.kvcache"

HEAVY = {"cuda", "llvmlite", "numba", "transformers", "triton"}


@dataclass(frozen=True)
class Import:
    """One import of a module of vtensor."""

    target: str
    line: int
    at_import_time: bool


def is_in(module: str, package: str) -> bool:
    """Say whether a module is a package or in it."""
    return module == package or module.startswith(package + ".")


@cache
def modules() -> dict[str, Path]:
    """Return every module on disk, by the name that it is imported by."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return dict(sorted(found.items()))


@cache
def imports(module: str) -> list[Import]:
    """Return a module's imports of modules of vtensor."""
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return [
        Import(target, node.lineno, at_import_time)
        for node, at_import_time in import_nodes(ast.parse(path.read_text()))
        for target in targets(node, package)
        if is_in(target, "vtensor")
    ]


def import_nodes(tree: ast.AST, at_import_time: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Walk to all that imports: statements, and calls of import_module. With each: does it run at import time?"""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        yield node, at_import_time
        yield from import_nodes(node, at_import_time and not is_function and not is_for_types)


def targets(node: ast.AST, package: str) -> Iterator[str]:
    """Return the modules that a node imports. `from a import b` means a.b where that is a module, else a."""
    match node:
        case ast.Import(names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(name, names, level):
            above = package.rsplit(".", level - 1)[:1] if level else []
            source = ".".join(above + ([name] if name else []))
            for alias in names:
                submodule = f"{source}.{alias.name}"
                yield submodule if submodule in modules() else source
        case ast.Call(func, [ast.Constant(str(name)), *_]) if ast.unparse(func).endswith("import_module"):
            yield name


def layer_of(module: str) -> int | None:
    """Return the number of a module's layer, counted from the top; None where no layer names it."""
    for number, names in enumerate(LAYERS):
        if any(module == name or (name not in EXACT and is_in(module, name)) for name in names):
            return number
    return None


def why_not(importer: str, target: str) -> str | None:
    """Say which rule an import breaks, or None."""
    if importer == "vtensor":  # re-exports
        return None
    if is_in(importer, KERNELS) and not any(is_in(target, name) for name in KERNELS_MAY_IMPORT):
        return f"{KERNELS} imports only vtensor.errors and vtensor.units"
    if is_in(importer, PAGES) and is_in(target, KERNELS):
        return f"{PAGES} and {KERNELS} never import each other"
    upper, lower = layer_of(importer), layer_of(target)
    if upper is not None and lower is not None and lower < upper:
        return "imports run downwards only"
    return None


@pytest.mark.parametrize("module", modules())
def test_a_layer_names_every_module(module: str) -> None:
    assert layer_of(module) is not None, f"add {module} to LAYERS in {__file__}"


@pytest.mark.parametrize("module", modules())
def test_imports_run_downwards(module: str) -> None:
    path = modules()[module].relative_to(ROOT)
    broken = [
        f"{path}:{found.line}: {module} imports {found.target}: {rule}"
        for found in imports(module)
        if (rule := why_not(module, found.target))
    ]
    assert not broken, "\n".join(broken)


def test_no_import_cycle() -> None:
    graph = {module: {found.target for found in imports(module) if found.at_import_time} for module in modules()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize(
    ("importer", "target", "allowed"),
    [
        ("vtensor.kvcache.manager", "vtensor.allocator.mapper", True),
        ("vtensor.kvcache.manager", "vtensor.kvcache.layout", True),
        ("vtensor.kvcache.manager", "vtensor.triton_kernels.decode", False),
        ("vtensor.triton_kernels.decode", "vtensor.errors", True),
        ("vtensor.triton_kernels.decode", "vtensor.kvcache.layout", False),
        ("vtensor.triton_kernels.decode", "vtensor.tensor", False),
        ("vtensor.attention_backends", "vtensor.triton_kernels", True),
        ("vtensor.factory", "vtensor.triton_kernels", False),
        ("vtensor.allocator.page_pool", "vtensor.allocator.address_space", False),
        ("vtensor.allocator.driver.cuda", "vtensor.allocator.native", True),
        ("vtensor.errors", "vtensor.allocator.driver", False),
        ("vtensor.tensor", "vtensor", False),
        ("vtensor.cli", "vtensor", True),
        ("vtensor", "vtensor.kvcache", True),
    ],
)
def test_the_rules_themselves(importer: str, target: str, allowed: bool) -> None:
    assert (why_not(importer, target) is None) == allowed


def test_every_kind_of_import_is_seen() -> None:
    source = """
import vtensor.errors
from . import units
from ..kvcache import config as c
if TYPE_CHECKING:
    from vtensor.tensor import VirtualTensor
class A:
    import vtensor.cli
def lazy():
    from .sibling import x
    importlib.import_module("vtensor.demo")
"""
    seen = [
        (target, at_import_time)
        for node, at_import_time in import_nodes(ast.parse(source))
        for target in targets(node, "vtensor.observe")
    ]
    assert sorted(seen) == [
        ("vtensor.cli", True),
        ("vtensor.demo", False),
        ("vtensor.errors", True),
        ("vtensor.kvcache" + ".config" * ("vtensor.kvcache.config" in modules()), True),
        ("vtensor.observe", True),
        ("vtensor.observe.sibling", False),
        ("vtensor.tensor", False),
    ]


@pytest.mark.parametrize("module", [name for name, path in modules().items() if path.name == "__init__.py"])
def test_init_only_re_exports(module: str) -> None:
    path = modules()[module]
    for number, node in enumerate(ast.parse(path.read_text()).body):
        match node:
            case ast.Expr(ast.Constant(str())) if number == 0:
                continue
            case ast.Import() | ast.ImportFrom():
                continue
            case ast.If(body=body, orelse=[]) if all(isinstance(line, ast.Import | ast.ImportFrom) for line in body):
                continue
            case ast.Assign([ast.Name("__all__")]):
                continue
            case ast.If(body=[ast.Raise()], orelse=[]) if module in FOLDERS and "__name__" in ast.unparse(node.test):
                continue  # the guard against the bare name
        pytest.fail(f"{path.relative_to(ROOT)}:{node.lineno}: more than docstring, imports and __all__")


def test_pyproject_lists_the_packages_on_disk() -> None:
    # Every folder with a module counts, with an __init__.py or without: what is not listed is not in the wheel.
    on_disk = {name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in modules().items()}
    assert sorted(SETUPTOOLS["packages"]) == sorted(on_disk)
    for package in on_disk:
        assert package in modules(), f"{package} has no __init__.py"


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter."""
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("folder", MAPPED)
def test_bare_import_of_a_mapped_folder_fails(folder: str) -> None:
    # At the root, `import allocator` would otherwise make a second copy of every class.
    done = run_python(f"import {folder}", cwd=ROOT)
    assert done.returncode != 0
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("ImportError")
    assert f"vtensor.{folder}" in error


IMPORT_VTENSOR = """
import os, sys, threading
from pathlib import Path

import torch

def loaded():
    # of modules by their top-level name, native threads, and the driver's library
    maps = Path("/proc/self/maps")
    driver = maps.exists() and "libcuda.so" in maps.read_text()
    threads = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 0
    return {name.partition(".")[0] for name in sys.modules}, threads, driver

modules, threads, driver = loaded()  # what torch does by itself is not ours
import vtensor
modules_after, threads_after, driver_after = loaded()
print("modules", *sorted((modules_after - modules) & {HEAVY}))
print("threads", threading.active_count() - 1 + threads_after - threads)
print("driver", int(driver_after and not driver), int(torch.cuda.is_initialized()))

child = os.fork()
if child == 0:
    import vtensor
    device = "cuda" if torch.cuda.is_available() else "cpu"
    os._exit(int(torch.ones(2, device=device).sum().item() != 2))
print("fork", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_import_has_no_side_effects(tmp_path: Path) -> None:
    done = run_python(IMPORT_VTENSOR.replace("{HEAVY}", repr(HEAVY)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["modules", "threads 0", "driver 0 0", "fork 0"]
