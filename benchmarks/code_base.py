"""Size of the code base, package by package, as docs/house.md has it, and of a checkout.

    python benchmarks/code_base.py

Lines are those of `.py` files. A chain is the longest path of imports that begins in a module of
the package, imports inside functions included, imports for type checkers left out; a name taken
from a package counts as an import of the module that defines it. `on ask` is the number of modules
that a process loaded which ran `larder ask` with the policy `full`. A checkout is what git tracks.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
# Packages of one line of the table.
JOINED = {name: "interop, training, evaluation" for name in ("interop", "training", "evaluation")}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = ast.Module | ast.ClassDef | FUNCTIONS
WEIGHTS = (".safetensors", ".bin", ".npz", ".gguf", ".pt")
ASK = """
import json, sys
from larder.cli.main import main
sys.argv = ["larder", "ask", sys.argv[1], "-q", "Who?", "--max-new-tokens", "2", "--policy", "full"]
try:
    main()
except SystemExit:
    pass
print("modules:" + json.dumps(sorted(sys.modules)))
"""


def main() -> None:
    modules = {module_name(path): path for path in sorted(SOURCES.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    imports = {name: imported(name, tree, modules) for name, tree in trees.items()}
    chains, loaded = chain_lengths(imports), loaded_on_ask()
    table: dict[str, Counter[str]] = {}
    for name, path in modules.items():
        for package in dict.fromkeys((package_of(name), name.partition(".")[0] + " in all")):
            row = table.setdefault(package, Counter())
            row["files"] += 1
            row["lines"] += count_lines(path)
            row["chain"] = max(row["chain"], chains[name])
            row["on ask"] += name in loaded
    for package, row in table.items():
        print(json.dumps({"package": package, **row}))
    own = {name: tree for name, tree in trees.items() if name.partition(".")[0] == "larder"}
    print(json.dumps(kinds_of_lines(own, modules)))
    print(json.dumps({"checkout MB": checkout_sizes()}))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(name: str) -> str:
    top, _, rest = name.partition(".")
    inner = rest.partition(".")[0]
    if top != "larder":
        return top
    is_package = (SOURCES / top / inner).is_dir() and inner
    return JOINED.get(inner, inner) if is_package else "the package itself"


@cache
def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def imported(name: str, tree: ast.AST, modules: dict[str, Path]) -> set[str]:
    """Modules of ours that a module imports."""
    found: set[str] = set()
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else definer(node.module, alias.name, modules))
    return {one for one in found if one in modules and one != name}


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a tree without the blocks for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from runtime_nodes(node)


def definer(package: str, name: str, modules: dict[str, Path]) -> str:
    """Module that defines a name which a package offers lazily; the package if there is none."""
    if package not in modules:
        return package
    return lazy_names(modules[package].with_suffix(".pyi"), package).get(name, package)


@cache
def lazy_names(stub: Path, package: str) -> dict[str, str]:
    if stub.name != "__init__.pyi" or not stub.is_file():
        return {}
    nodes = [one for one in ast.parse(stub.read_text()).body if isinstance(one, ast.ImportFrom)]
    return {
        alias.asname or alias.name: f"{package}.{node.module}"
        for node in nodes
        for alias in node.names
    }


def chain_lengths(imports: dict[str, set[str]]) -> dict[str, int]:
    """Number of modules on the longest path of imports from each module; imports have no cycle."""

    @cache
    def length(name: str) -> int:
        return 1 + max((length(other) for other in imports[name]), default=0)

    return {name: length(name) for name in imports}


def loaded_on_ask() -> set[str]:
    demo = SOURCES / "larder" / "cli" / "demo" / "conversation.json"
    ran = subprocess.run(
        [sys.executable, "-c", ASK, str(demo)], capture_output=True, text=True, check=True
    )
    return set(json.loads(ran.stdout.rpartition("modules:")[2]))


def kinds_of_lines(trees: dict[str, ast.Module], modules: dict[str, Path]) -> dict[str, int]:
    """Docstrings, blank lines outside them and imports of `larder`; lengths of files, functions."""
    counts, files, functions = Counter[str](), list[int](), list[int]()
    for name, tree in trees.items():
        inside: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                inside |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
            if isinstance(node, ast.Import | ast.ImportFrom):
                counts["imports"] += (node.end_lineno or 0) - node.lineno + 1
            if isinstance(node, FUNCTIONS):
                functions.append((node.end_lineno or 0) - node.lineno + 1)
        lines = modules[name].read_text().splitlines()
        blank = {number for number, line in enumerate(lines, start=1) if not line.strip()}
        counts["docstrings"] += len(inside)
        counts["blank"] += len(blank - inside)
        files.append(len(lines))
    tenths = quantiles(functions, n=10)
    return {
        **counts,
        "median file": round(median(files)),
        "longest file": max(files),
        "median function": round(median(functions)),
        "nine in ten functions": round(tenths[-1]),
    }


def checkout_sizes() -> dict[str, float]:
    """Megabytes of tracked files by kind."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sizes = Counter[str]()
    for name in filter(None, listed.stdout.split("\0")):
        sizes[kind_of_file(name)] += (ROOT / name).stat().st_size
    return {
        kind: round(size / 1e6, 2) for kind, size in [*sizes.most_common(), ("all", sizes.total())]
    }


def kind_of_file(name: str) -> str:
    if name.startswith("studies/results/"):
        return "rows of studies"
    if name.startswith("tests/golden/fixtures/"):
        return "goldens"
    if name.endswith(WEIGHTS) or name.startswith("src/larder/models/learned/"):
        return "models and weights"
    if name.endswith((".py", ".pyi")):
        return "Python"
    return "C" if name.endswith((".c", ".h")) else "other"


if __name__ == "__main__":
    main()
