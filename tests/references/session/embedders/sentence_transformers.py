"""The library itself, asked for one text at a time."""

from __future__ import annotations

import numpy as np


def slow_library_rows(folder: str, texts: list[str]) -> np.ndarray:
    from sentence_transformers import SentenceTransformer  # seconds: not where tests are collected

    model = SentenceTransformer(folder, device="cpu")
    rows = [model.encode([text], show_progress_bar=False)[0] for text in texts]
    return np.array([row / np.linalg.norm(row) for row in rows], dtype=np.float32)
