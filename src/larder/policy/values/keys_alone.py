"""Value rule that ignores values.

No paper: the default.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.values.base import NO_SELECTION, Selection, ValueRule


@dataclass(frozen=True)
class KeysAlone(ValueRule):
    """Unchanged scores."""

    def weigh(
        self, scores: Packed, observation: Observation, selection: Selection = NO_SELECTION
    ) -> Packed:
        return scores


Part = KeysAlone
