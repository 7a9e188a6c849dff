"""Answers of many parts, each scored by itself: numbered steps, and values in a row."""

from __future__ import annotations

import re
from collections.abc import Sequence

Spans = tuple[tuple[int, int], ...]

# Between two items: the stop of one, and the number of the next behind the space.
BORDER = re.compile(r"(?<=\.)(?= (?:\d+|Answer): )")


def numbered_item_spans(answer: str) -> Spans:
    """Where each step of "1: one. 2: two. Answer: three" stands: characters [start, stop), the
    space before included.
    """
    starts = [0, *(found.start() for found in BORDER.finditer(answer))]
    return tuple(zip(starts, [*starts[1:], len(answer)], strict=True))


def join_items(parts: Sequence[str]) -> tuple[str, Spans]:
    """The parts in a row, and where each stands in it: the space before it included, the comma left
    out, for whether more follows is no part's doing.
    """
    spans, start = list[tuple[int, int]](), 0
    for part in parts:
        stop = start + bool(start) + len(part)
        spans.append((start, stop))
        start = stop + 1
    return ", ".join(parts), tuple(spans)
