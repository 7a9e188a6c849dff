"""Embedder over the token embeddings of the language model: needs no further package."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from larder.session.embedders._encoder import unit_rows
from larder.session.embedders.base import Embedder


class TokenTable(Embedder):
    """Mean of the rows of a text in the input embedding table of the model.

    "LLM-embedding" in the ablation of M. Kim et al., "EpiCache: Episodic KV Cache Management for
    Long-Term Conversation on Resource-Constrained Environments" (2025), arXiv 2509.17396, table 2,
    where it is the weakest encoder.

    Args:
        table: embedding table; it is referenced, not copied.
        encode: token ids of a text, without special tokens.
    """

    def __init__(self, table: Float[Tensor, "V D"], encode: Callable[[str], Sequence[int]]) -> None:
        self._table, self._encode = table.detach(), encode

    @property
    def name(self) -> str:
        return "tokens"

    def embed_segments(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        rows = torch.zeros(len(texts), self._table.shape[1])
        for row, text in zip(rows, texts, strict=True):
            row.copy_(self._mean(list(self._encode(text))))
        return unit_rows(rows, self.name)

    def embed_questions(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        return self.embed_segments(texts)

    def num_tokens(self, text: str) -> int:
        return len(self._encode(text))

    def _mean(self, ids: list[int]) -> Float[Tensor, " D"]:
        # A text without tokens is the average token, which is near no particular topic.
        return (self._table[ids] if ids else self._table).float().mean(0)


Part = TokenTable
