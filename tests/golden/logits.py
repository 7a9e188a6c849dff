"""Goldens of numbers: last logits of every architecture, with full and bounded caches."""

from __future__ import annotations

from typing import Any

from golden.access import architectures, last_logits
from golden.comparison import Golden

TEXT = (
    "The attic window is repaired on July 5. My cat is called Mira, and she sleeps on the sofa. "
    "The band rehearses at Belnor; my grandfather was a plumber who liked long walks."
)
MORE = " What is my cat called?"
POLICIES = {
    "full": ("full", None),
    "keydiff": ("blockwise() > protect(sinks=4, recent=8) > keydiff() > pooled()", "48"),
    "snapkv": ("blockwise() > protect(sinks=4, recent=8) > snapkv(window=8) > uniform()", "48"),
}
TOLERANCE = 1e-4
TOP = 5


def logits() -> Any:
    """The largest and some fixed logits, and sums over all, by architecture and policy."""
    return {
        architecture: {
            name: _summary(last_logits(architecture, policy, budget, TEXT, MORE))
            for name, (policy, budget) in POLICIES.items()
        }
        for architecture in architectures()
    }


def _summary(values: list[float]) -> dict[str, Any]:
    order = sorted(range(len(values)), key=lambda index: -values[index])
    return {
        "count": len(values),
        "top": [[index, round(values[index], 6)] for index in order[:TOP]],
        "every_16th": [round(value, 6) for value in values[::16]],
        "mean": round(sum(values) / len(values), 6),
        "mean_square": round(sum(value * value for value in values) / len(values), 6),
    }


GOLDENS: dict[str, Golden] = {"logits": logits}
