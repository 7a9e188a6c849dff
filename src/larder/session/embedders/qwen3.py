"""Qwen3-Embedding of any size, by name or folder: the best encoder of EpiCache's ablation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Float32, Int
from torch import Tensor

from larder.session.embedders._encoder import Encoder
from larder.session.embedders.base import Embedder

SMALLEST = "Qwen/Qwen3-Embedding-0.6B"
MAX_TOKENS = 2048

SEGMENT_FORM = (
    "Instruct: Name the topics and themes of this part of a conversation.\n"
    "Query: What is being talked about here?\n"
    "Document: {text}"
)
QUESTION_FORM = "\nQuery: {text}"


class Qwen3(Embedder):
    """Encoder of EpiCache's published results.

    Y. Zhang et al., "Qwen3 Embedding: Advancing Text Embedding and Reranking Through Foundation
    Models" (2025), arXiv 2506.05176: the hidden state of the last token, normalized. As in
    EpiCache's released code, segments have an instruction and questions a label alone, the reverse
    of the usage that the model was trained for; the wording is ours. The code runs it in bfloat16,
    Larder in float32.

    Args:
        source: a local folder or a Hugging Face name; the paper finds 0.6B sufficient.
        device: device of the encoder.

    Raises:
        ModelError: the model cannot be loaded.
    """

    def __init__(self, source: str = SMALLEST, device: str = "cpu") -> None:
        self._source = source
        self._encoder = Encoder(source, last_pool, MAX_TOKENS, "left", device)

    @property
    def name(self) -> str:
        return self._source

    def embed_segments(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        return self._encoder.embed([SEGMENT_FORM.format(text=text) for text in texts])

    def embed_questions(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        return self._encoder.embed([QUESTION_FORM.format(text=text) for text in texts])

    @property
    def max_tokens(self) -> int:
        return self._encoder.max_tokens

    def num_tokens(self, text: str) -> int:
        return self._encoder.num_tokens(SEGMENT_FORM.format(text=text))

    def reads_whole(self, text: str) -> bool:
        return self._encoder.reads_whole(QUESTION_FORM.format(text=text))


def last_pool(hidden: Float[Tensor, "B S D"], mask: Int[Tensor, "B S"]) -> Float[Tensor, "B D"]:
    """Hidden state of the last token; padding is on the left, so it is the last column."""
    return hidden[:, -1]


Part = Qwen3
