"""`special_tokens`: whatever the tokenizer calls special."""

from __future__ import annotations


def contains(text: str, is_special: bool) -> bool:
    return is_special
