"""`newest`: what an entry was given by the latest query that saw it."""

from __future__ import annotations

from references.tally_loop import AttentionRecord


def remembered(record: AttentionRecord) -> dict[str, float]:
    return {"newest": sum(record.weights[-1])}
