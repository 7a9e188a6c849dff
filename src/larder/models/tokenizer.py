"""Check that a tokenizer fits a model."""

from __future__ import annotations

from typing import Any

from larder.core.arguments import check_type
from larder.core.errors import BadParameter

TOKENIZER_CALL = "transformers.AutoTokenizer.from_pretrained(NAME)"
EXPECTED = f"the tokenizer of the model, as by {TOKENIZER_CALL}, or the one of its processor"
LEAST_COVERAGE = 0.5  # of the embedding rows; models pad them by a few per cent


def check_tokenizer(tokenizer: Any, model: Any) -> None:
    """Check that a tokenizer fits a model.

    Raises:
        BadParameter: it is missing, of another type, slow, or has another vocabulary.
    """
    from transformers import PreTrainedTokenizerBase

    check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, EXPECTED)
    if not tokenizer.is_fast:
        raise BadParameter(
            f"The tokenizer {type(tokenizer).__name__} reports no character offsets, because it is "
            f"not a fast one: give {TOKENIZER_CALL}."
        )
    rows, tokens = int(model.get_input_embeddings().weight.shape[0]), len(tokenizer)
    if tokens > rows or tokens < LEAST_COVERAGE * rows:
        raise BadParameter(
            f"The tokenizer has {tokens} tokens, but the model's embedding has {rows} rows: give "
            "the tokenizer that came with the model, or call model.resize_token_embeddings(len("
            "tokenizer)) if tokens were added."
        )
