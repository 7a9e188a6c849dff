"""Regenerate the goldens: `PYTHONPATH=tests python -m golden.make [NAME...]`.

The name `homes` writes the kept homes as well, which without it stay as they are. Only on purpose:
a golden says what must not change, so a commit that rewrites one says why.
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from golden import homes
from golden.comparison import write
from golden.every import GOLDENS, SLOW

HOMES = "homes"


def main(names: list[str]) -> None:
    """Write the goldens of these names, or all."""
    known = GOLDENS | SLOW
    if unknown := set(names) - known.keys() - {HOMES}:
        sys.exit(f"no golden named {', '.join(sorted(unknown))}: {HOMES}, {', '.join(known)}")
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"LARDER_HOME": home, "LARDER_RECALL_BREAK_EVEN": "0"}
        if HOMES in names:
            homes.build()
            names = [name for name in names if name != HOMES] + [*homes.GOLDENS, *homes.SLOW]
        for name in names or known:
            print(write(name, known[name]()))


if __name__ == "__main__":
    main(sys.argv[1:])
