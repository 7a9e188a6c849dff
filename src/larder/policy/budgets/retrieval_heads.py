"""Head budgets for retrieval heads only; streaming heads keep the protected tokens.

Published methods: `trial="repeats"` is Tang et al., "RazorAttention: Efficient KV Cache
Compression Through Retrieval Heads" (2024), arXiv:2407.15891, section 3.2: retrieval heads are
those that look most at what followed the same token before (14 of 15 of them) or at the same token
(1 of 15), in a random text that is repeated. `trial="passkeys"` and `trial="gates"` are Xiao et
al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads" (2024),
arXiv:2410.10819: those for which it makes most difference to see the first and the latest tokens
only. The first tests one head at a time (`streaming_error`), the second takes the gates that the
paper trains, of all heads together (`larder train duo_attention`). `trial="copy"` is Kim et al.,
"KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (2025), arXiv:2505.23416,
context-independent: those that look hardest at some token of a text while the model repeats it
(`reconstruction`).

In all, retrieval heads keep everything and streaming heads the first tokens and the latest, so
that memory grows with the text. Here the budget is fixed: streaming heads hold what `protect`
names, which is why it should leave room, the entries that this frees go to the retrieval heads,
alike, and what these cannot fill goes back. Where retrieval heads cannot hold everything, the
scorer says what they keep. A kv head counts as soon as one of its query heads does, where the
measurement tells these apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from larder.core.arguments import require
from larder.core.observation import Calibration, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas
from larder.ops.apportionment import apportion
from larder.policy.budgets._selection import top_k_by_head_weight
from larder.policy.budgets.base import Budget
from larder.policy.layer_calibration import split_evenly

ECHO_SHARE = 1 / 15  # of the retrieval heads, in the paper 1 % of 15 %
SLIP = 1e-9  # so that .15 of 20 are 3


class Trial(Enum):
    """Measurement of retrieval heads: repeated text, loss on hidden sentences, trained gates, or
    copied text.
    """

    REPEATS = "repeats"
    PASSKEYS = "passkeys"
    GATES = "gates"
    COPY = "copy"


SINGLE = {
    Trial.PASSKEYS: "streaming_error",
    Trial.GATES: "duo_attention",
    Trial.COPY: "reconstruction",
}


@dataclass(frozen=True)
class RetrievalHeads(Budget):
    """Full budget for few heads, streaming for the others.

    Args:
        share: of the model's kv heads that are retrieval heads, in (0, 1], rounded up. The papers
            take 0.15 (RazorAttention), and 0.25 or, with grouped heads, 0.5 (DuoAttention).
        trial: `repeats`, `passkeys`, `gates` or `copy`.
    """

    share: float = 0.15
    trial: Trial = Trial.REPEATS
    separates_streaming_heads = True
    calibrations = frozenset({"echo", "induction", *SINGLE.values()})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.share <= 1, "retrieval_heads.share", "a fraction in (0, 1]", self.share)

    def required_calibrations(self) -> frozenset[str]:
        single = SINGLE.get(self.trial)
        return frozenset({"echo", "induction"} if single is None else {single})

    def head_weights(self, calibration: Calibration) -> tuple[float, ...]:
        """1 for a retrieval head, 0 for a streaming head."""
        name = SINGLE.get(self.trial, "induction")
        if self.trial in SINGLE:
            chosen = _highest(calibration[name], self.share)
        else:
            chosen = _highest(calibration["echo"], self.share * ECHO_SHARE)
            chosen |= _highest(calibration[name], self.share * (1 - ECHO_SHARE))
        return tuple(float(head in chosen) for head in range(len(calibration[name])))

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, calibration: Calibration
    ) -> tuple[int, ...]:
        if tokens >= most:
            return (tokens,) * layers
        total, room = layers * (tokens - least), most - least
        heads = split_evenly("retrieval heads", self.head_weights(calibration), layers)
        wholes = [sum(head) / len(head) for head in heads]
        filled = [math.ceil(whole * room) for whole in wholes]
        if sum(filled) >= total:
            parts = apportion(total, wholes, 0, filled)
        else:
            parts = apportion(total, [1 - whole for whole in wholes], filled, room)
        return tuple(least + part for part in parts)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {
            index: top_k_by_head_weight(scored, quotas[index] * len(scored.lengths))
            for index, scored in ready.items()
        }


def _highest(scores: Sequence[float], share: float) -> set[int]:
    """The heads with the highest scores, a share of all; of equals the first."""
    order = sorted(range(len(scores)), key=lambda head: -scores[head])
    return set(order[: math.ceil(share * len(scores) - SLIP)])


Part = RetrievalHeads
