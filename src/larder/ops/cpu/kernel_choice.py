"""Choice between larder's kernels and torch's, measured once per machine.

The two round differently, so a choice that changed between two starts of a process would change
the last bits of logits. Choices are saved under `$LARDER_HOME/kernels`, with what they depend on:
the processor, torch's version and the compiled kernels. CPU time of a single thread is compared:
on a busy machine the time of the clock says little, and a choice holds for any number of threads.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from larder.core.home import home, measured_count
from larder.ops.cpu.c_library import MODULE

FILE = "choices.json"  # in the folder of kernels
REPETITIONS = 5
PROCESSOR_FIELDS = ("vendor_id", "model name", "cpu family", "model", "stepping", "CPU part")


def saved_choice(name: str, measure: Callable[[], int], most: int) -> int:
    """Number of a choice on this machine, measured at most once.

    Args:
        name: of the choice, with all sizes that it depends on.
        measure: the number from 0 to `most`; runs in a thread of its own, on one torch thread.
    """
    onednn = "with" if torch.backends.mkldnn.enabled else "without"
    key = f"{name}, {onednn} oneDNN, {machine()}"
    path = home() / "kernels" / FILE
    return measured_count(path, key, lambda: _on_one_torch_thread(measure), most)


def slowdown(ours: Callable[[], float], others: Callable[[], float]) -> float:
    """Median ratio of the seconds that two calls return, in turn, behind one of each."""
    ratios = [ours() / max(others(), 1e-9) for _ in range(REPETITIONS + 1)]
    return median(ratios[1:])


def thread_seconds(call: Callable[[], object]) -> float:
    """CPU seconds of a call in this thread."""
    started = time.thread_time()
    call()
    return time.thread_time() - started


@cache
def machine() -> str:
    """Processor, versions and kernels, which a measured choice depends on."""
    parts = _processor(), torch.backends.cpu.get_cpu_capability(), f"torch {torch.__version__}"
    return ", ".join((*parts, f"kernels {_library_digest()}"))


def _processor() -> str:
    """Name of the processor and its stepping."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    known = dict[str, str]()
    for line in lines:
        field, _, value = line.partition(":")
        known.setdefault(field.strip(), value.strip())
    found = [known[field] for field in PROCESSOR_FIELDS if field in known]
    return " ".join([platform.machine(), *found])


def _library_digest() -> str:
    """Digest of the compiled kernels; empty without them."""
    found = find_spec(MODULE)
    if found is None or found.origin is None:
        return ""
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()[:16]


def _on_one_torch_thread(measure: Callable[[], int]) -> int:
    """Result of a call in a new thread, while torch uses one thread there.

    Other threads keep their number of threads, unless they start meanwhile.
    """

    def run() -> int:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return measure()
        finally:
            torch.set_num_threads(threads)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
