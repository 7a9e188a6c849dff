"""An embedder whose topics a test controls: a text is about the words its first line says."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from larder.session import Embedder

TOPICS = ("dog", "car", "sea", "star")
NOISE = 0.3  # texts with a number in them differ from others on their topic


class TopicEmbedder(Embedder):
    """A row per text: the words of `TOPICS` in its first line, and noise that the line decides.

    The first line of a turn is its question: what the model answers does not move it.
    """

    def __init__(self, name: str = "topics") -> None:
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def embed_segments(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        rows = [self._row(text) for text in texts]
        return np.stack(rows) if rows else np.zeros((0, 2 * len(TOPICS)), np.float32)

    def embed_questions(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        return self.embed_segments(texts)

    def _row(self, text: str) -> Float32[np.ndarray, " D"]:
        line = text.partition("\n")[0]
        counts = np.array([line.count(word) for word in TOPICS], np.float64)
        topic = counts / max(1.0, np.linalg.norm(counts))
        noise = np.random.default_rng(zlib.crc32(line.encode())).normal(size=len(TOPICS))
        noise *= NOISE * any(letter.isdigit() for letter in line) / np.linalg.norm(noise)
        row = np.concatenate([topic, noise])
        return (row / max(1e-9, float(np.linalg.norm(row)))).astype(np.float32)
