"""Scorer by key norm, short keys first; no attention needed.

Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (2024),
arXiv:2406.11430: keys of low norm tend to get the most attention. The paper leaves the first two
layers whole; here every layer is judged.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class KeyNorm(Scorer):
    """Minus the length of the key."""

    def score(self, observation: Observation) -> Packed:
        return -observation.entries.pack(observation.entries.keys).float().square().sum(-1).sqrt()


Part = KeyNorm
