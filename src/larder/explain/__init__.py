"""Shows what a cache keeps: one page that a browser opens without a network."""

from larder.explain.explanation import Explanation, PageAnswer, PageEpisode, PageMessage
from larder.explain.page import render
from larder.explain.texts import token_texts

__all__ = [
    "Explanation",
    "PageAnswer",
    "PageEpisode",
    "PageMessage",
    "render",
    "token_texts",
]
