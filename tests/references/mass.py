"""`mass`: everything that an entry was given."""

from __future__ import annotations

from references.tally_loop import AttentionRecord


def remembered(record: AttentionRecord) -> dict[str, float]:
    return {"mass": sum(weight for row in record.weights for weight in row)}
