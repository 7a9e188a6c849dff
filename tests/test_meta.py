"""Checks of the project's own files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "larder"
FAMILIES = (
    "scorers",
    "aggregation",
    "heads",
    "values",
    "units",
    "budgets",
    "compensation",
    "tallies",
    "storage",
    "providers",
)
FILE_LINES = 500
FUNCTION_LINES = 60
LONG_VALUE = 12  # lines of a constant that may stand where it is used


def part_names(folder: Path) -> list[str]:
    """The public names of a family: its files, without the base contract and private ones."""
    stems = (file.stem for file in folder.glob("*.py"))
    return sorted(name for name in stems if not name.startswith("_") and name != "base")


def parts_without_reference(family: str, policy: Path, references: Path) -> list[str]:
    names = part_names(policy / family)
    return [name for name in names if not (references / f"{name}.py").is_file()]


def long_functions(source: str) -> list[str]:
    functions = (
        node
        for node in statements(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [node.name for node in functions if body_lines(node) > FUNCTION_LINES]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements at any depth, without the expressions in them."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(tree, part, ())
        for node in inner if isinstance(inner, list) else ():
            yield node
            yield from statements(node)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, the docstring left out: explanations may be long."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def late_constants(source: str) -> list[str]:
    """Constants under the first class or function of a file that need none of its own."""
    body = ast.parse(source).body
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    first = next((n for n, node in enumerate(body) if isinstance(node, definitions)), len(body))
    own = {"vars"} | {node.name for node in body if isinstance(node, definitions)}
    late = list[str]()
    for node in body[first:]:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        used = {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
        if isinstance(target, ast.Name) and (used & own or not target.id.isupper()):
            own.add(target.id)
        elif isinstance(target, ast.Name) and (node.end_lineno or 0) - node.lineno < LONG_VALUE:
            late.append(target.id)
    return late


def source_files() -> list[Path]:
    folders = (PACKAGE, *(ROOT / name for name in ("tests", "benchmarks", "examples", "training")))
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def imported_packages(source: str) -> set[str]:
    """The top-level names that a file imports, wherever in the file it does."""
    names: set[str] = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def declared_distributions() -> set[str]:
    """Distributions that pyproject.toml requires for users, with their extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(w for e in extras if e != "dev" for w in extras[e])]
    return {canonicalize_name(Requirement(line).name) for line in wanted}


def test_change_of_any_c_file_recompiles_the_extension() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    [extension] = tool["setuptools"]["ext-modules"]
    files = [*PACKAGE.glob("ops/cpu/c/*.[ch]")]
    listed = {ROOT / name for name in extension["sources"] + extension["depends"]}
    assert files and listed.issuperset(files), listed.symmetric_difference(files)


def run_python(code: str) -> str:
    """Output of `code` in a fresh interpreter, without the type checks of the test suite."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_has_a_reference(family: str) -> None:
    missing = parts_without_reference(family, PACKAGE / "policy", ROOT / "tests" / "references")
    assert not missing, f"{family} without a loop in tests/references/: {', '.join(missing)}"


def test_every_recall_index_has_a_reference() -> None:
    missing = parts_without_reference("recall", PACKAGE, ROOT / "tests" / "references")
    assert not missing, f"recall without a loop in tests/references/: {', '.join(missing)}"


def test_every_eviction_rule_has_a_reference() -> None:
    references = ROOT / "tests" / "references" / "eviction"
    missing = parts_without_reference("eviction", PACKAGE / "store", references)
    assert not missing, f"eviction without a loop in tests/references/: {', '.join(missing)}"


def test_part_without_reference_is_found(tmp_path: Path) -> None:
    family = tmp_path / "policy" / "scorers"
    references = tmp_path / "references"
    family.mkdir(parents=True)
    references.mkdir()
    for name in ("__init__.py", "base.py", "_shared.py", "known.py", "forgotten.py"):
        (family / name).touch()
    (references / "known.py").touch()
    assert parts_without_reference("scorers", tmp_path / "policy", references) == ["forgotten"]


def test_files_stay_short() -> None:
    counts = {file: len(file.read_text().splitlines()) for file in source_files()}
    long = [f"{file.relative_to(ROOT)}: {n}" for file, n in counts.items() if n > FILE_LINES]
    assert not long, f"over {FILE_LINES} lines: {'; '.join(long)}"


def test_functions_stay_short() -> None:
    long = {file: long_functions(file.read_text()) for file in source_files()}
    found = [
        f"{file.relative_to(ROOT)}: {', '.join(names)}" for file, names in long.items() if names
    ]
    assert not found, f"functions over {FUNCTION_LINES} lines: {'; '.join(found)}"


def test_constants_stand_above_classes_and_functions() -> None:
    late = {file: late_constants(file.read_text()) for file in PACKAGE.rglob("*.py")}
    found = [
        f"{file.relative_to(ROOT)}: {', '.join(names)}" for file, names in late.items() if names
    ]
    assert not found, f"constants under a class or function: {'; '.join(sorted(found))}"


def test_late_constant_is_found() -> None:
    source = "A = 1\ndef f(): ...\nB = A\nC = f()\nD = C\nlower = 2\nE = lower\n"
    assert late_constants(source) == ["B"]


def test_long_function_is_found() -> None:
    short = "def short():\n    '''" + "Why.\n" * 100 + "'''\n    return 0\n"
    long = "def long():\n" + "    x = 0\n" * FUNCTION_LINES
    assert long_functions(short + long) == ["long"]


# Options of every command; Python callers have none, so that messages speak of budget and model.
OPTION = re.compile(r"--(?:policy|budget|block|model|adapter|device|dtype|seed)\b")


def options_in_errors(source: str) -> list[int]:
    """Lines that raise an error whose message names an option of the command line."""
    raised = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Raise))
    return [
        node.lineno
        for statement in raised
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant) and OPTION.search(str(node.value))
    ]


@pytest.mark.extended
def test_errors_do_not_assume_the_command_line() -> None:
    files = [file for file in PACKAGE.rglob("*.py") if "cli" not in file.parts]
    named = {str(f.relative_to(PACKAGE)): options_in_errors(f.read_text("utf-8")) for f in files}
    assert {name: lines for name, lines in named.items() if lines} == {}
    assert options_in_errors('raise ValueError(f"{n} is too small: raise --budget.")') == [1]


@pytest.mark.extended
def test_imported_packages_are_declared() -> None:
    imported = {
        name for file in PACKAGE.rglob("*.py") for name in imported_packages(file.read_text())
    }
    carriers = packages_distributions()
    undeclared = {
        name
        for name in imported - set(sys.stdlib_module_names) - {"larder"}
        if not declared_distributions() & {canonicalize_name(d) for d in carriers.get(name, [name])}
    }
    assert not undeclared, f"imported, not declared in pyproject.toml: {sorted(undeclared)}"


def test_nested_imports_are_found() -> None:
    source = "import a.b, c\ndef late():\n    from d.e import f\nfrom . import g\n"
    assert imported_packages(source) == {"a", "c", "d"}


def test_importing_larder_loads_no_model_library() -> None:
    heavy = "{'torch', 'transformers', 'sentence_transformers', 'sklearn', 'numba'}"
    code = f"import sys, larder; print(sorted({heavy} & set(sys.modules)))"
    assert run_python(code) == "[]"


@pytest.mark.extended
def test_importing_larder_changes_nothing_in_transformers() -> None:
    code = """
import importlib, pkgutil
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

def entries():
    tables = (AttentionInterface(), AttentionMaskInterface())
    return [{name: id(table[name]) for name in table} for table in tables]

before = entries()
import larder
for module in pkgutil.walk_packages(larder.__path__, "larder."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # an extra that is not installed
            assert not error.name.startswith("larder"), error
print(entries() == before, len(before[0]) > 0)
"""
    assert run_python(code) == "True True"
