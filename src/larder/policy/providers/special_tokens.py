"""Provider of the special tokens of a tokenizer, such as the one that begins a text."""

from __future__ import annotations

from larder.policy.providers.base import VocabularyProvider


class SpecialTokens(VocabularyProvider):
    """Token set `special_tokens`."""

    def contains(self, text: str, is_special: bool) -> bool:
        return is_special


Part = SpecialTokens
