"""`moments`: how many queries saw an entry, their mean weight, and how it varies."""

from __future__ import annotations

from references.tally_loop import AttentionRecord


def remembered(record: AttentionRecord) -> dict[str, float]:
    weights = [sum(row) / len(row) for row in record.weights]
    mean = sum(weights) / len(weights)
    return {
        "moment_count": float(len(weights)),
        "moment_mean": mean,
        "moment_spread": sum((weight - mean) ** 2 for weight in weights),
    }
