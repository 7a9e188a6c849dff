"""Size of an installation, extra by extra, and cold starts.

    python benchmarks/installation.py [--runs 5]

Bytes are those of the files that pip recorded for each distribution in the running environment.
What an extra needs is followed through the metadata of requirements, so that one environment
answers for all extras; those that are not installed are left out. torch stands apart with what it
brings itself, because its builds differ by gigabytes. Cold starts are new processes, the median of
their CPU seconds; the first run of each is not counted. One JSONL line each in
results/installation.jsonl.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, metadata
from pathlib import Path
from statistics import median

from _timing import environment, write
from packaging.requirements import Requirement

import larder.cli

OUT = Path("results/installation.jsonl")
MIB = 1 << 20
DEMO = Path(larder.cli.__path__[0]) / "demo"
LARDER = [sys.executable, "-c", "import sys; from larder.cli.main import main; sys.exit(main())"]
STARTS = {
    "import larder": [sys.executable, "-c", "import larder"],
    "larder --help": [*LARDER, "--help"],
    "larder ask": [
        *LARDER,
        "ask",
        str(DEMO / "conversation.json"),
        "-q",
        "Who?",
        "--budget",
        "256",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    base = needed_by("larder")
    torch = needed_by("torch")
    rows = [{"install": "torch", "mib": mib(torch), "packages": len(torch)}]
    rows.append({"install": "larder", "mib": mib(base - torch), "packages": len(base - torch)})
    rows.append({"install": "larder itself", "mib": round(package_bytes() / MIB, 1), "packages": 1})
    for extra in sorted(metadata("larder").get_all("Provides-Extra") or []):
        try:
            added = needed_by(f"larder[{extra}]") - base
        except PackageNotFoundError as missing:
            print(f"larder[{extra}] is left out: {missing.name} is not installed")
            continue
        rows.append({"install": f"larder[{extra}]", "mib": mib(added), "packages": len(added)})
    for name, command in STARTS.items():
        seconds = [cpu_seconds(command) for _ in range(runs + 1)][1:]
        rows.append({"start": name, "cpu_seconds": round(median(seconds), 2)})
    for row in rows:
        print(row)
    write(OUT, [row | environment() for row in rows])


def needed_by(requirement: str) -> set[str]:
    """Names of the distributions that a requirement brings, itself included."""
    waiting, found = [Requirement(requirement)], set[tuple[str, frozenset[str]]]()
    while waiting:
        one = waiting.pop()
        key = (distribution(one.name).name.lower().replace("_", "-"), frozenset(one.extras))
        if key in found:
            continue
        found.add(key)
        for text in distribution(one.name).requires or []:
            other = Requirement(text)
            extras = one.extras or {""}
            if other.marker is None or any(other.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(other)
    return {name for name, _ in found}


def package_bytes() -> int:
    """Bytes of larder's own packages; an editable installation records none of their files."""
    packages = (
        Path(larder.cli.__path__[0]).parents[1] / name for name in ("larder", "larder_bench")
    )
    files = (file for package in packages for file in package.rglob("*"))
    return sum(one.stat().st_size for one in files if one.is_file() and one.suffix != ".pyc")


def mib(names: set[str]) -> float:
    """MiB of the files of distributions."""
    files = [Path(str(file.locate())) for name in names for file in distribution(name).files or []]
    return round(sum(file.stat().st_size for file in set(files) if file.is_file()) / MIB, 1)


def cpu_seconds(command: list[str]) -> float:
    """CPU seconds of a new process with its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
