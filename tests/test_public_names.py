"""Public names of the packages: listed once, and what tests, benchmarks and larder_bench import."""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
READERS = ("tests", "benchmarks", "src/larder_bench")
PACKAGES = sorted(stub.parent.name for stub in (SOURCE / "larder").glob("*/__init__.pyi"))


@cache
def public_names(package: str) -> dict[str, str]:
    """Name -> module that a package's stub takes it from."""
    stub = ast.parse((SOURCE / "larder" / package / "__init__.pyi").read_text())
    nodes = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {a.name: f"larder.{package}.{node.module}" for node in nodes for a in node.names}


def is_module(dotted: str) -> bool:
    path = SOURCE.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def is_deep(module: str, name: str) -> bool:
    """True if a name is imported from inside a package that could offer it itself."""
    parts = module.split(".")
    if parts[0] != "larder" or len(parts) < 3 or parts[1] not in PACKAGES or name.startswith("_"):
        return False
    # Modules, and names that a module of the package would hide once it is imported.
    if is_module(f"{module}.{name}") or is_module(f"larder.{parts[1]}.{name}"):
        return False
    offered = public_names(parts[1]).get(name, module)  # a name of another module may be public
    return getattr(import_module(offered), name) is getattr(import_module(module), name)


def deep_imports(text: str) -> list[str]:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    froms = [(node.module or "", alias.name) for node in nodes for alias in node.names]
    return [f"{module}.{name}" for module, name in froms if is_deep(module, name)]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_public_name_is_what_its_module_defines(package: str) -> None:
    offered = import_module(f"larder.{package}")
    for name, module in public_names(package).items():
        assert getattr(offered, name) is getattr(import_module(module), name)
        assert name in dir(offered)


@pytest.mark.parametrize("folder", READERS)
def test_names_are_imported_from_packages(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    found = {str(file.relative_to(ROOT)): deep_imports(file.read_text()) for file in files}
    assert not {file: names for file, names in found.items() if names}, (
        "import these from their package (larder.cache, larder.policy, ...), "
        "and add what it does not offer yet to its __init__.pyi"
    )


def test_import_from_inside_a_package_is_found() -> None:
    module, name = public_names("cache")["DenseLayer"], "DenseLayer"
    assert deep_imports(f"from {module} import {name}") == [f"{module}.{name}"]
    assert not deep_imports(f"from larder.cache import {name}\nfrom larder.cache import forms")
