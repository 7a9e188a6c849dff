"""Shows what a cache keeps: one page that a browser opens without a network."""

from larder.explain.explanation import (
    Explanation,
    PageAnswer,
    PageEpisode,
    PageMessage,
    token_texts,
)
from larder.explain.page import render

__all__ = [
    "Explanation",
    "PageAnswer",
    "PageEpisode",
    "PageMessage",
    "render",
    "token_texts",
]
