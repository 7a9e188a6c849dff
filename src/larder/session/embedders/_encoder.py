"""Hugging Face text encoder shared by the embedders: loading, batches by length, unit rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from larder.core.errors import ModelError
from larder.models.transformers_logging import silence_transformers

BATCH = 32

Pool = Callable[[Float[Tensor, "B S D"], Int[Tensor, "B S"]], Float[Tensor, "B D"]]


class Encoder:
    """Text encoder with its tokenizer: one vector per text, no state between calls.

    Args:
        source: a local folder or a Hugging Face name.
        pool: pools the last hidden states to one vector, given the mask of real tokens.
        max_tokens: longer texts are truncated at their end.
        padding_side: `left` or `right`, for shorter texts of a batch.
        device: device of the model, which runs in float32.

    Raises:
        ModelError: the model cannot be loaded, or its weights are incomplete.
    """

    def __init__(
        self, source: str | Path, pool: Pool, max_tokens: int, padding_side: str, device: str
    ) -> None:
        self._name, self._pool, self.max_tokens = str(source), pool, max_tokens
        self._model, self._tokenizer = _load(str(source), padding_side)
        self._model.to(device=device, dtype=torch.float32)
        self._model.eval()

    def embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        """One unit row per text. Texts of similar length share a batch, to reduce padding."""
        rows = torch.zeros(len(texts), self._model.config.hidden_size)
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            rows[batch] = self._rows([texts[i] for i in batch])
        return unit_rows(rows, self._name)

    def num_tokens(self, text: str) -> int:
        """Tokens of a text, special ones included, before it is truncated."""
        return len(self._tokenizer(text, truncation=False, verbose=False)["input_ids"])

    def reads_whole(self, text: str) -> bool:
        """True if a text is not truncated, and has no words that the tokenizer does not know."""
        ids = self._tokenizer(text, truncation=True, max_length=self.max_tokens + 1)["input_ids"]
        return len(ids) <= self.max_tokens and self._tokenizer.unk_token_id not in ids

    @torch.inference_mode()
    def _rows(self, texts: list[str]) -> Float[Tensor, "B D"]:
        tokens = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self._model.device)
        hidden = self._model(**tokens).last_hidden_state  # [B, S, D]
        return self._pool(hidden, tokens["attention_mask"]).cpu()


def unit_rows(rows: Float[Tensor, "N D"], name: str) -> Float32[np.ndarray, "N D"]:
    """Normalize every row to length 1; a row of zeros stays.

    Raises:
        ModelError: a value is not finite.
    """
    if not torch.isfinite(rows).all():
        raise ModelError(
            f"embedder {name} returned values that are not finite; "
            "its weights are damaged, take another embedder."
        )
    return torch.nn.functional.normalize(rows.float(), dim=-1).cpu().numpy()


def _load(source: str, padding_side: str) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoTokenizer

    try:
        with silence_transformers():
            tokenizer = AutoTokenizer.from_pretrained(source, padding_side=padding_side)
            model, report = AutoModel.from_pretrained(source, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(load_failure_message(source, error)) from error
    # Sentence embeddings do not use the pooler of BERT models.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ModelError(
            f"embedder {source} lacks {len(missing)} weights, the first {missing[0]}; "
            "every weight must be there, load a complete model."
        )
    return model, tokenizer


def load_failure_message(source: str, error: Exception) -> str:
    """Error message for a model that does not load: first line of the reason, and the way out."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return (
        f"embedder {source} cannot be loaded: {reason}. "
        "Give a folder with config, tokenizer and weights, or a Hugging Face name within reach."
    )
