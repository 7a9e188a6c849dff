"""Environment of a measurement: versions, the processor, the commit."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from blake3 import blake3

import larder
from larder_bench.results.rows import ENVIRONMENT, SCHEMA, Row

ID_LENGTH = 12
PROCESSOR_KEY = "processor"  # field of the kind of processor
KERNELS_KEY = "kernels"  # field of larder's own kernels
# Files of the package that round sums and products, and that choose what does.
KERNEL_SOURCES = (
    "ops/**/*.py",
    "ops/**/*.[ch]",
    "models/layer_runner.py",
    "models/decoder_stack.py",
)
# Features of torch.cpu that multiply bfloat16, those that oneDNN prefers first.
_BFLOAT16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16")


def environment_row(threads: int, accelerator: str = "") -> Row:
    """Row of the environment that measured figures depend on, besides what cells record. Its id
    does not depend on the date.

    Args:
        threads: torch threads.
        accelerator: name of the accelerator; empty if the model runs on the CPU.
    """
    fields: Row = {
        "larder": _version("larder"),
        "commit": checkout_commit(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "platform": platform.platform(),
        "cpu": _cpu(),
        PROCESSOR_KEY: processor_kind(),
        KERNELS_KEY: kernels_kind(),
        "threads": threads,
        **({"accelerator": accelerator} if accelerator else {}),
    }
    digest = blake3(json.dumps(fields).encode()).hexdigest(length=ID_LENGTH // 2)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    head = {"schema": SCHEMA, "row": ENVIRONMENT, "id": digest}
    return {**head, **fields, "date": date}


def processor_kind() -> str:
    """Vendor of the CPU and its instructions for bfloat16, such as `GenuineIntel amx_bf16`; without
    such instructions the vector set that torch uses, such as `AuthenticAMD AVX2`.

    Kinds round products differently: libraries choose kernels by both.
    """
    import torch  # here, so that reports start without it

    features = getattr(torch.cpu, "get_capabilities", dict)()  # not in older torch
    found = [name for name in _BFLOAT16_FEATURES if features.get(name)]
    vendor = _cpuinfo("vendor_id") or platform.machine()
    return f"{vendor} {found[0] if found else torch.backends.cpu.get_cpu_capability()}"


@cache
def kernels_kind() -> str:
    """Digest of the sources of larder's kernels, and the numbers of rows up to which they multiply
    bfloat16 and float32 in place of torch, which are measured on each machine.

    Other kernels may add in another order, and then round differently on the same processor.
    """
    from torch import bfloat16, float32

    from larder.ops import max_rows  # here, so that reports start without torch

    package = Path(larder.__file__).parent
    sources = sorted({path for pattern in KERNEL_SOURCES for path in package.glob(pattern)})
    contents = blake3()
    for path in sources:
        contents.update(path.relative_to(package).as_posix().encode() + b"\0")
        contents.update(path.read_bytes())
    digest = contents.hexdigest(length=ID_LENGTH // 2)
    return f"{digest}, {max_rows(bfloat16)} rows, {max_rows(float32)} in float32"


def checkout_commit() -> str:
    """Commit of the checkout that contains this file; empty without a checkout.

    It ends in `-dirty` if a tracked file has been changed since.
    """
    if not (commit := _git("rev-parse", "--short", "HEAD")):
        return ""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _git(*words: str) -> str:
    """Output of git in the checkout of this file; empty without a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return completed.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    """Model name of the CPU if the system reports it."""
    return _cpuinfo("model name") or platform.processor()


def _cpuinfo(field: str) -> str:
    """Field of the first CPU in /proc/cpuinfo; empty where the system has no such file or field."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    values = [line.partition(":")[2].strip() for line in lines if line.startswith(field)]
    return values[0] if values else ""
