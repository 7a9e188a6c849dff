"""`drafts`: the token with the highest logit, the first of equals."""

from __future__ import annotations


def tokens(logits: list[list[float]]) -> list[int]:
    out: list[int] = []
    for row in logits:
        best = 0
        for token, logit in enumerate(row):
            if logit > row[best]:
                best = token
        out.append(best)
    return out
