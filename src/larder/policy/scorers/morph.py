"""Keep what the latest tokens look at.

Ghadia et al., "Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs"
(2025), arXiv:2503.00979 (MorphKV): the weights of the last R queries, summed or their highest; the
last R tokens stay themselves. The weights come from the tally `fading`, where old queries fade out
instead of dropping out of a window; the latest tokens are for `protect(recent=R)`. The released
code takes weights among the older entries alone; here they are those of plain attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from larder.core.observation import Seen
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer


class Fusion(Enum):
    """How the latest queries become one."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True)
class Morph(Scorer):
    """Attention from the latest queries, whatever earlier ones thought.

    Args:
        fusion: `sum` or `max` over the queries; the released scripts take `max`.
    """

    fusion: Fusion = Fusion.MAX
    tallies = frozenset({"fading"})

    def score(self, seen: Seen) -> Packed:
        return seen.entries.column(f"fading_{self.fusion.value}")


Part = Morph
