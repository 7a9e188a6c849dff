"""Which modules have the types at their borders checked while tests run."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "larder"
# Kernels are compiled by numba, which cannot compile a function wrapped in a type check.
UNCHECKED = "larder.ops.fast"


def checked_modules(package: Path, unchecked: str) -> list[str]:
    """Every module and folder of the package, cut only as fine as leaving one out demands."""
    name = package.name
    skipped = unchecked.removeprefix(f"{name}.").split(".")
    modules = []
    for depth in range(len(skipped)):
        folder = package.joinpath(*skipped[:depth])
        prefix = ".".join([name, *skipped[:depth]])
        stems = {entry.stem for entry in folder.iterdir() if not entry.stem.startswith(("_", "."))}
        modules += [f"{prefix}.{stem}" for stem in sorted(stems - {skipped[depth]})]
    return modules
