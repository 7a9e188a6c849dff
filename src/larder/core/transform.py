"""Transform coding of cache entries: coder, exact entries and blocks, as policies ask for them.

Policies choose a `TransformSpec`, caches carry it out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import Enum

from larder.core.errors import BadParameter

LAST_TIER = 2  # tiers are -2 to 2: steps of 1/4 to 4 times the common step
NUM_TIERS = 2 * LAST_TIER + 1
TIER_GRADE = 1 + LAST_TIER  # grade of tier 0; grade 0 is exact, 1 the finest tier


class Coder(Enum):
    """Coder of quantized components.

    ENTROPY: a range coder with static tables; a block of entries is decoded as a whole.
    WIDTHS: a fixed number of bits per component, 0 to 8; any entry can be decoded alone.
    """

    ENTROPY = "entropy"
    WIDTHS = "widths"


@dataclass(frozen=True)
class TransformSpec:
    """Transform-coded storage of the managed layers of a cache.

    Args:
        coder: of the quantized components.
        sinks: first positions that are never coded.
        recent: latest entries of a head that stay exact while text is generated.
        block: most entries of a head that are coded together.
        model: fingerprint of the model whose calibration codes the entries.
    """

    coder: Coder = Coder.ENTROPY
    sinks: int = 4
    recent: int = 8
    block: int = 256
    model: str = ""

    def __post_init__(self) -> None:
        numbers = ("sinks", self.sinks, 0), ("recent", self.recent, 0), ("block", self.block, 1)
        for name, value, least in numbers:
            if value < least:
                raise BadParameter(f"transform.{name} must be at least {least}, got {value}.")

    def of_model(self, fingerprint: str) -> TransformSpec:
        """Spec with the fingerprint of a model."""
        return replace(self, model=fingerprint)

    def to_text(self) -> str:
        """Text form, as sessions save it."""
        return json.dumps(asdict(self) | {"coder": self.coder.value})

    @staticmethod
    def from_text(text: str) -> TransformSpec:
        """Spec from its text form."""
        fields = json.loads(text)
        return TransformSpec(**fields | {"coder": Coder(fields["coder"])})
