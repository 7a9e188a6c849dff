"""Scorer by statistical leverage of keys; no attention needed.

Chari and Van Durme, "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate
Leverage Scores" (2025), arXiv:2507.08143: the statistical leverage of a key among those of its
head, approximated by a Gaussian sketch of its dimensions. Follows the code that the authors gave to
NVIDIA/kvpress: keys before rotation, centered over the sequence. The paper adds attention without a
causal mask; this is the one half of it, and `compactor` the whole.

There the sketch is drawn at every call and 0.01 is added to the Gram matrix; here one seed gives
all layers, heads and calls the same sketch, and `ridge` counts in mean squared lengths of a
sketched dimension, so that leverage does not depend on how long keys are. Scores there are in
standard deviations from a layer's mean, which changes no order within a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import ScoreError
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.ops.rope import rotate
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class Leverage(Scorer):
    """Leverage score of a key among the keys of its head.

    Args:
        sketch: dimensions that keys are sketched in; as many as a key has, or more, sketch nothing.
        ridge: what is added to the Gram matrix, as a share of its mean diagonal; above 0.
        seed: another seed is another sketch.
    """

    sketch: int = 48
    ridge: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.sketch >= 1, "leverage.sketch", "at least 1 dimension", self.sketch)
        require(self.ridge > 0, "leverage.ridge", "above 0", self.ridge)

    def score(self, observation: Observation) -> Packed:
        entries, radians = observation.entries, observation.layer.radians
        if radians is None:
            raise ScoreError(
                f"Layer {observation.layer.index} rotates its keys in an unknown way, so "
                "leverage cannot undo the rotation: take a scorer that uses cached keys."
            )
        turning = torch.tensor(radians, device=entries.keys.device)
        positions, heads = entries.effective_rope_positions, range(observation.layer.kv_heads)
        rows = [entries.rows(head) for head in heads]
        unturned = [rotate(entries.keys[r].float()[None], -positions[r], turning)[0] for r in rows]
        return torch.cat([self._of_head(keys) for keys in unturned])

    def _of_head(self, keys: Float[Tensor, "S D"]) -> Float[Tensor, " S"]:
        if not len(keys):
            return keys.new_empty(0)
        keys = keys.double()  # few keys leave little of the Gram matrix
        sketched = (keys - keys.mean(0)) @ self._sketch(keys).double()
        gram = sketched.T @ sketched
        ridge = (self.ridge * gram.diagonal().mean()).clamp_min(torch.finfo(gram.dtype).tiny ** 0.5)
        gram.diagonal().add_(ridge)
        root: Tensor = torch.linalg.cholesky(gram)  # pyright: ignore
        whitened: Tensor = torch.linalg.solve_triangular(  # pyright: ignore
            root, sketched.T, upper=False
        )
        return whitened.square().sum(0).float()  # pyright: ignore

    def _sketch(self, keys: Float[Tensor, "S D"]) -> Float[Tensor, "D k"]:
        size = keys.shape[1]
        if self.sketch >= size:
            return torch.eye(size, device=keys.device)
        source = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(size, self.sketch, generator=source)
        return (drawn / self.sketch**0.5).to(keys.device)


Part = Leverage
