"""Movement by rounding of the cells that `make smoke` measures again.

The same checks run under several kernels of the same processor: those that torch takes by itself,
those without instructions for bfloat16, those of AVX2, in float32, which the others approximate,
and Larder's own kernel of layers for calls of up to 16, 64 and 128 tokens. Up to how many it is the
faster one is measured once per machine; on one machine it came out as 64 and as 128. Their means
over the items of each cell go to `studies/roundings.json`, and those of the committed row;
`larder_bench.execution.row_comparison` allows what they span.

    python benchmarks/roundings.py --corpus FOLDER --data FOLDER [--kernels avx2] [--model NAME]
                                   [--study NAME]

Each takes as long as `make smoke`, and less with models or a study named. What is not measured now
stays as it was in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from larder.core.home import home
from larder_bench.cli.check import ROUNDINGS

# Environment and options of a check by the kernels that they choose.
KERNELS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "avx512": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, ()),
    "avx2": ({"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, ()),
    "float32": ({}, ("--dtype", "float32")),
}
ROW_LIMITS = {"rows_16": 16, "rows_64": 64, "rows_128": 128}
CHOICES = Path("kernels", "choices.json")  # below `$LARDER_HOME`: what was measured of kernels
LIMIT_KEY = "rows of bfloat16"  # with which the names of such a choice begin
DIGITS = 6


def checks(kernels: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of the checks under these kernels."""
    if kernels in ROW_LIMITS:
        with limited_home(ROW_LIMITS[kernels]) as folder:
            return _checks({"LARDER_HOME": str(folder)}, (), options)
    return _checks(*KERNELS[kernels], options)


@contextmanager
def limited_home(rows: int) -> Iterator[Path]:
    """Folder like `$LARDER_HOME`, with another limit of Larder's kernel of layers."""
    choices = json.loads((home() / CHOICES).read_text())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in home().iterdir():
            if path.name != CHOICES.parent.name:
                (folder / path.name).symlink_to(path)
        (folder / CHOICES).parent.mkdir()
        limited = {key: rows if key.startswith(LIMIT_KEY) else n for key, n in choices.items()}
        (folder / CHOICES).write_text(json.dumps(limited))
        yield folder


def _checks(
    environment: dict[str, str], arguments: tuple[str, ...], options: argparse.Namespace
) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "larder", "bench", "--check", "--json", *arguments]
    if options.study:
        command += ["--study", options.study]
    for name in ("corpus", "data"):
        if getattr(options, name):
            command += [f"--{name}", str(getattr(options, name))]
    for model in options.model or ():
        command += ["--model", model]
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=False
    )
    return json.loads(done.stdout)["checks"]


def merge(known: dict[str, Any], kernels: str, records: list[dict[str, Any]]) -> None:
    """Add the means of records; those of other checks of a study are dropped."""
    for record in records:
        if not record["means"]:
            continue
        study = known.get(record["study"], {})
        if study.get("check") != record["check"]:
            study = {"check": record["check"], "kernels": {}}
        study["committed"] = _rounded(record["committed_means"])
        study["kernels"][kernels] = _rounded(record["means"])
        known[record["study"]] = study


def _rounded(means: dict[str, float]) -> dict[str, float]:
    return {field: round(mean, DIGITS) for field, mean in means.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", action="append", help="studies of these models alone")
    parser.add_argument("--study", help="this study alone")
    known = [*KERNELS, *ROW_LIMITS]
    parser.add_argument("--kernels", nargs="+", choices=known, default=known)
    options = parser.parse_args()
    means = json.loads(ROUNDINGS.read_text()) if ROUNDINGS.is_file() else {}
    for kernels in options.kernels:
        merge(means, kernels, checks(kernels, options))
        ROUNDINGS.write_text(json.dumps(means, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
