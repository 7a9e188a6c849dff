"""Embedder over any model of the sentence-transformers library, by name or folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32

from larder.core.errors import DependencyError, ModelError
from larder.models.transformers_logging import silence_transformers
from larder.session.embedders._encoder import BATCH, load_failure_message, unit_rows
from larder.session.embedders.base import Embedder


class SentenceTransformers(Embedder):
    """Sentence-transformers model with its own pooling, prompts and length.

    Models with separate prompts for queries and documents use both.

    Args:
        source: a local folder or a Hugging Face name.
        device: device of the model.

    Raises:
        DependencyError: the library is not installed.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, source: str, device: str = "cpu") -> None:
        self._source = source
        self._model = _load(source, device)

    @property
    def name(self) -> str:
        return self._source

    def embed_segments(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        return self._embed(self._model.encode_document, texts)

    def embed_questions(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        return self._embed(self._model.encode_query, texts)

    @property
    def max_tokens(self) -> int | None:
        return self._model.get_max_seq_length()

    def num_tokens(self, text: str) -> int:
        whole = self._model.prompts.get("document", "") + text
        return len(self._model.tokenizer(whole, verbose=False)["input_ids"])

    def reads_whole(self, text: str) -> bool:
        limit, tokenizer = self._model.get_max_seq_length(), self._model.tokenizer
        ids = tokenizer(self._model.prompts.get("query", "") + text)["input_ids"]
        return (limit is None or len(ids) <= limit) and tokenizer.unk_token_id not in ids

    def _embed(self, encode: Any, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        if not texts:
            return np.zeros((0, self._model.get_embedding_dimension()), np.float32)
        rows = encode(list(texts), batch_size=BATCH, show_progress_bar=False)
        return unit_rows(torch.from_numpy(rows), self._source)


def _load(source: str, device: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise DependencyError(
            f"embedder {source} needs the package sentence-transformers, which is not installed; "
            'run `pip install "larder[embed]"`, or take the embedder `minilm` or `tokens`.'
        ) from error
    try:
        with silence_transformers():
            return SentenceTransformer(source, device=device)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(load_failure_message(source, error)) from error


Part = SentenceTransformers
