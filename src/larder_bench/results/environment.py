"""Environment of a measurement: versions, the processor, the commit."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from blake3 import blake3

from larder_bench.results.rows import ENVIRONMENT, SCHEMA, Row

ID_LENGTH = 12


def environment_row(threads: int, accelerator: str = "") -> Row:
    """What figures depend on beside what a cell tells. Equal surroundings have equal ids: the date
    does not count.

    Args:
        threads: that torch computes with.
        accelerator: its name; empty where the model runs on the processor.
    """
    told: Row = {
        "larder": _version("larder"),
        "commit": checkout_commit(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "threads": threads,
        **({"accelerator": accelerator} if accelerator else {}),
    }
    digest = blake3(json.dumps(told).encode()).hexdigest(length=ID_LENGTH // 2)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    head = {"schema": SCHEMA, "row": ENVIRONMENT, "id": digest}
    return {**head, **told, "date": date}


def checkout_commit() -> str:
    """The commit of the checkout that this file belongs to; empty where there is none.

    It ends in `-dirty` where a file that git follows has been changed since.
    """
    if not (commit := _git("rev-parse", "--short", "HEAD")):
        return ""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _git(*words: str) -> str:
    """Output of git in the checkout of this file; empty without a checkout."""
    asked = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()
