"""Bundled model, and passages of the bundled corpus for trainings on a few tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from larder.models import LoadedModel, load
from larder.session import TokenizerAdapter
from larder.training import Passage, PassageLimits, read_corpus, select_passages


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("seed", dtype="float32")


@pytest.fixture(scope="module")
def passages_within(loaded: LoadedModel) -> Callable[[PassageLimits], list[Passage]]:
    """Reader of the passages of all splits within limits."""

    def read(limits: PassageLimits) -> list[Passage]:
        tokenizer = TokenizerAdapter(loaded.tokenizer)
        passages = read_corpus(None).passages(tokenizer, limits.passage_tokens)
        return [one for several in select_passages(passages, limits).values() for one in several]

    return read
