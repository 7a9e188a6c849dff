"""Movement by rounding of the cells that `make smoke` measures again.

The same checks run under several kernels of the same processor: those that torch takes by itself,
those without instructions for bfloat16, those of AVX2, and in float32, which the others
approximate. Their means over the items of each cell go to `studies/roundings.json`, and those of
the committed row; `larder_bench.execution.row_comparison` allows what they span.

    python benchmarks/roundings.py --corpus FOLDER --data FOLDER [--kernels avx2] [--model NAME]

Each takes as long as `make smoke`, and less with models named. What is not measured now stays as it
was in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from larder_bench.cli.check import ROUNDINGS

# Environment and options of a check by the kernels that they choose.
KERNELS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "avx512": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, ()),
    "avx2": ({"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, ()),
    "float32": ({}, ("--dtype", "float32")),
}
DIGITS = 6


def checks(kernels: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of the checks under these kernels."""
    environment, arguments = KERNELS[kernels]
    command = [sys.executable, "-m", "larder", "bench", "--check", "--json", *arguments]
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
    parser.add_argument("--kernels", nargs="+", choices=tuple(KERNELS), default=list(KERNELS))
    options = parser.parse_args()
    known = json.loads(ROUNDINGS.read_text()) if ROUNDINGS.is_file() else {}
    for kernels in options.kernels:
        merge(known, kernels, checks(kernels, options))
        ROUNDINGS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
