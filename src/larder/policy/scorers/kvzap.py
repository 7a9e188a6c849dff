"""Scorer by a prediction of what the model would look at while it repeats the context (KVzap).

Jegou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning" (2026), arXiv:2601.07891.
The logarithm of KVzip+'s score of an entry (its highest weight while the context is repeated, times
the length of what its value writes, over the length of the reader's hidden state) is predicted from
the token's hidden state when it is written, so that no pass repeats anything. `ridge` is a linear
map per layer, `mlp` a perceptron; `larder train kvzap` and `larder train kvzap_mlp` make them.

The paper drops what is below a fixed threshold; here a budget bounds what is kept, by `global` as
in KVzip. A window of 128 recent tokens stays there (`protect(recent=128)`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from larder.core.observation import Observation, ScoreScale
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer


class Predictor(Enum):
    """Form of the prediction."""

    RIDGE = "ridge"
    MLP = "mlp"


COLUMNS = {Predictor.RIDGE: "kvzap", Predictor.MLP: "kvzap_mlp"}


@dataclass(frozen=True)
class KVzap(Scorer):
    """Predicted logarithm of KVzip+'s score.

    Args:
        form: `ridge` or `mlp`.
    """

    form: Predictor = Predictor.RIDGE
    scale: ClassVar[ScoreScale] = ScoreScale.LOGARITHMS

    def required_providers(self) -> frozenset[str]:
        return frozenset({COLUMNS[self.form]})

    def score(self, observation: Observation) -> Packed:
        return observation.entries.column(COLUMNS[self.form])


Part = KVzap
