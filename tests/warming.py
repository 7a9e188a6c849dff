"""Compiles kernels in a process of its own while workers collect, so that they find most of them.

A fresh clone has no compiled kernels, and two workers would each compile nearly all of them.
Without workers there is nobody to be ahead of, and nothing is done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Sentences that between them use most kernels, those that all tests need first.
SENTENCES = (
    "h2o",
    "blockwise() > keydiff() > uniform() > drop() > quantized(bits=4, group=8)",
    "d2o",
    "cam",
)


def begin(workers: object) -> subprocess.Popen[bytes] | None:
    """Start to compile, if tests run in several workers and this is none of them."""
    if not workers or "PYTEST_XDIST_WORKER" in os.environ:
        return None
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, __file__], cwd=ROOT, stdin=quiet, stdout=quiet, stderr=quiet
    )


def end(compiling: subprocess.Popen[bytes]) -> None:
    """Nothing of it outlives the tests."""
    compiling.kill()
    compiling.wait()


def compile_all() -> None:
    """Answer one question under each of the sentences."""
    from larder import Engine, read_conversation

    conversation = read_conversation(ROOT / "examples" / "conversation.json")
    for sentence in SENTENCES:
        engine = Engine.load(policy=sentence, budget="128")
        engine.ask(engine.read(conversation), conversation.questions[0].question)


if __name__ == "__main__":
    compile_all()
