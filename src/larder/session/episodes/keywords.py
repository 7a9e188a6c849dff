"""A few words that tell episodes apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

WORD = r"(?u)\b[^\W\d_]{3,}\b"  # no numbers, no fragments


def episode_keywords(texts: Sequence[str], count: int = 5) -> list[tuple[str, ...]]:
    """For each text the words it has much of and the others little, the most telling first.

    Nothing for a single text, which has nothing to be told apart from.
    """
    from sklearn.feature_extraction.text import CountVectorizer

    if len(texts) < 2:
        return [()] * len(texts)
    vectorizer = CountVectorizer(stop_words="english", token_pattern=WORD)
    try:
        found: Any = vectorizer.fit_transform(texts)
    except ValueError:  # nothing but stop words
        return [()] * len(texts)
    counts = found.toarray()  # [E, words]
    # A word that all texts have weighs nothing, however often each has it.
    rarity = np.log(len(texts) / (counts > 0).sum(axis=0))
    weights = np.log1p(counts) * rarity
    words = vectorizer.get_feature_names_out()
    ranked = np.argsort(-weights, axis=1, kind="stable")[:, :count]
    return [
        tuple(str(words[w]) for w in row if weights[number, w] > 0)
        for number, row in enumerate(ranked)
    ]
