"""Texts of any length for benchmarks."""

from __future__ import annotations

from typing import Any

from larder.bench.demo_conversation import demo_conversation


def text_ids(tokenizer: Any, count: int) -> tuple[int, ...]:
    """So many tokens of a conversation, from its beginning again where it is too short."""
    said = " ".join(message.content for message in demo_conversation().messages)
    ids = tuple(tokenizer.encode(said, add_special_tokens=False))
    return (ids * (count // len(ids) + 1))[:count]
