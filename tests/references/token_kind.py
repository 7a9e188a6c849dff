"""`token_kind`: 3 for a special token, 2 for punctuation, 1 for any other."""

from __future__ import annotations

from references.tally_loop import AttentionRecord


def remembered(record: AttentionRecord) -> dict[str, float]:
    return {"token_kind": 1.0}


def kind(token: int, special: set[int], signs: set[int]) -> float:
    if token in special:
        return 3.0
    return 2.0 if token in signs else 1.0
