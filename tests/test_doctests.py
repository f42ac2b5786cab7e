"""The examples in docstrings.

Not pytest's --doctest-modules: it imports a file by its place on disk, and allocator/ is no module by that name.
"""

import doctest
import importlib
import pkgutil

import pytest

MODULES = []
for package in ["vtensor", "vtensor.allocator", "vtensor.triton_kernels"]:  # the mapped ones do not lie in the first
    path = importlib.import_module(package).__path__
    MODULES += [package, *(info.name for info in pkgutil.walk_packages(path, f"{package}."))]
MODULES.remove("vtensor.__main__")  # importing it runs the command


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
