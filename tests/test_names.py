"""Names of modules and classes: terms of the field, and no class name twice in a package."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PACKAGES = ("larder", "larder_bench")
# Everyday words that say nothing to someone who searches for a term of the field.
FORBIDDEN_MODULES = frozenset(
    """hearing begun manner luck told spots leaving sitting cabinet desk scribe purse shelf shelves
    room rooms stowing keeping tending judge heads behind at_once pieces places awaiting gathering
    removals utils helpers misc common""".split()
)
FORBIDDEN_CLASSES = frozenset(
    """Held Kept Turn Piece Said Asked Made Told Begun Sitting Cabinet Desk Scribe Purse Shelf Room
    Rooms Manner Luck Heard Hearing Beginning Leaving""".split()
)
FORBIDDEN_VARIABLES = frozenset(
    """said told heard hearing luck begun anew manner spots sitting cabinet desk scribe purse shelf
    shelves""".split()
)
# Gerunds that are the field's own nouns.
FIELD_GERUNDS = frozenset(
    """routing pooling packing sampling timing streaming spelling clustering matching merging
    embedding scoring reasoning forcing logging""".split()
)
# Their file names are their spelling.
PARTS = frozenset(
    {
        "larder_bench/measures/reading.py",
        "larder/prefill/schedules/narrowing.py",
        "larder/prefill/schedules/layerwise_narrowing.py",
    }
)
PATH = re.compile(r"`((?:src/)?[\w/]+(?:\.py|/))`")


def modules() -> list[Path]:
    return sorted(file for name in PACKAGES for file in (SOURCE / name).rglob("*.py"))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def classes_by_package() -> dict[str, Counter[str]]:
    """By top-level folder of a package, how many classes at module level have each name."""
    found: dict[str, Counter[str]] = {}
    for file in modules():
        package = "/".join(file.relative_to(SOURCE).parts[:2])
        nodes = parsed(file).body
        names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
        found.setdefault(package, Counter()).update(names)
    return found


def missing_paths(page: str, names: list[str]) -> list[str]:
    """Paths named by a page that are neither a file nor a folder of the checkout."""
    known = {"/" + str(file.relative_to(ROOT)) for file in modules()}
    known |= {f"{folder.rsplit('/', 1)[0]}/" for folder in known}
    known |= {f"/{path.name}/" for path in ROOT.iterdir() if path.is_dir()}
    return [
        path
        for path in PATH.findall(page)
        if not any(one.endswith("/" + path) or f"/{path}" in one for one in known)
    ] + [name for name in names if not any(one.endswith("/" + name) for one in known)]


def test_no_module_has_a_forbidden_name() -> None:
    stems = {file.stem.lstrip("_"): file for file in modules()}
    assert {stem: path for stem, path in stems.items() if stem in FORBIDDEN_MODULES} == {}


def test_gerunds_are_the_fields_own() -> None:
    names = {str(file.relative_to(SOURCE)): file.stem.rpartition("_")[2] for file in modules()}
    gerunds = {path: word for path, word in names.items() if word.endswith("ing")}
    assert {path for path, word in gerunds.items() if word not in FIELD_GERUNDS} <= PARTS


def test_no_class_has_a_forbidden_name() -> None:
    found = {name for names in classes_by_package().values() for name in names}
    assert found & FORBIDDEN_CLASSES == set()


def test_no_variable_has_a_forbidden_name() -> None:
    found = {
        f"{file.relative_to(SOURCE)}: {node.arg if isinstance(node, ast.arg) else node.id}"
        for file in modules()
        for node in ast.walk(parsed(file))
        if (isinstance(node, ast.arg) and node.arg in FORBIDDEN_VARIABLES)
        or (isinstance(node, ast.Name) and node.id in FORBIDDEN_VARIABLES)
    }
    # A field of the export format.
    assert found == {"larder/server/persistence/session_file.py: said"}


def test_class_names_are_unique_within_a_package() -> None:
    twice = {
        package: [name for name, count in names.items() if count > 1]
        for package, names in classes_by_package().items()
    }
    assert {package: names for package, names in twice.items() if names} == {}


def test_class_names_are_unique_across_packages() -> None:
    found = Counter(name for names in classes_by_package().values() for name in names)
    assert {name for name, count in found.items() if count > 1} == set()


@pytest.mark.parametrize("page", ["structure.md", "glossary.md"])
def test_paths_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    walk = re.findall(r"^       (\S+\.py) ", text, flags=re.MULTILINE)
    assert missing_paths(text, walk) == []


def test_missing_path_is_found() -> None:
    page = "`ops/attention.py`, `ops/cpu/`, `ops/gone.py`, `gone/`"
    assert missing_paths(page, ["core/plan.py", "core/gone.py"]) == [
        "ops/gone.py",
        "gone/",
        "core/gone.py",
    ]
