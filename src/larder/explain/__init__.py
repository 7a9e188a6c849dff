"""Explain page: one self-contained HTML file that shows which entries a cache keeps."""

from larder.explain.explanation import (
    Explanation,
    PageAnswer,
    PageEpisode,
    PageMessage,
    token_texts,
)
from larder.explain.page import render

__all__ = ["Explanation", "PageAnswer", "PageEpisode", "PageMessage", "render", "token_texts"]
