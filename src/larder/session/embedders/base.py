"""What every embedder can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32


class Embedder(ABC):
    """Turns texts into vectors whose cosine says how much they speak of the same thing.

    Rows have length 1. No text gives an array [0, D]. A text's row does not depend on the texts
    beside it, but for rounding.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name by which `load_embedder` finds it again."""

    @abstractmethod
    def embed_segments(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        """Embed parts of a conversation: what is clustered, and turns to be filed."""

    @abstractmethod
    def embed_questions(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        """Embed bare questions, to be matched against the centroids of segments."""
