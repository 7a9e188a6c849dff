"""Items of long answers, each scored separately: numbered steps, and lists of values."""

from __future__ import annotations

import re
from collections.abc import Sequence

Spans = tuple[tuple[int, int], ...]

# Border of two items: after the period of one, before the space and the number of the next.
BORDER = re.compile(r"(?<=\.)(?= (?:\d+|Answer): )")


def numbered_item_spans(answer: str) -> Spans:
    """Spans of the steps of "1: one. 2: two. Answer: three": characters [start, stop), with the
    space before each.
    """
    starts = [0, *(match.start() for match in BORDER.finditer(answer))]
    return tuple(zip(starts, [*starts[1:], len(answer)], strict=True))


def join_items(parts: Sequence[str]) -> tuple[str, Spans]:
    """Comma-separated parts, and their spans: with the space before each, without the comma,
    because it depends on the next part.
    """
    spans, start = list[tuple[int, int]](), 0
    for part in parts:
        stop = start + bool(start) + len(part)
        spans.append((start, stop))
        start = stop + 1
    return ", ".join(parts), tuple(spans)
