"""Writes the goldens anew: `PYTHONPATH=tests python -m golden.make [NAME...]`.

The name `homes` writes the kept homes as well, which without it stay as they are. Only on purpose:
a golden says what must not change, so a commit that rewrites one says why.
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from golden import help_texts, homes, policies, surface
from golden.comparison import Golden, write

GOLDENS: dict[str, Golden] = {
    **help_texts.GOLDENS,
    **policies.GOLDENS,
    **surface.GOLDENS,
    **homes.GOLDENS,
}
HOMES = "homes"


def main(names: list[str]) -> None:
    """Write the goldens of these names, or all."""
    if unknown := set(names) - GOLDENS.keys() - {HOMES}:
        sys.exit(f"no golden named {', '.join(sorted(unknown))}: {HOMES}, {', '.join(GOLDENS)}")
    with tempfile.TemporaryDirectory() as home:
        os.environ["LARDER_HOME"] = home
        if HOMES in names:
            homes.build()
            names = [name for name in names if name != HOMES] + [*homes.GOLDENS]
        for name in names or GOLDENS:
            print(write(name, GOLDENS[name]()))


if __name__ == "__main__":
    main(sys.argv[1:])
