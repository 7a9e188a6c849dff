"""Spans of image tokens in a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

Span = tuple[int, int]  # [start, stop)


@dataclass(frozen=True)
class ImageSpans:
    """Images in a text, as spans of tokens that are read in one block.

    Args:
        spans: [start, stop) of each image, in order and disjoint.
        bidirectional: those of them whose tokens attend to each other in both directions.
    """

    spans: tuple[Span, ...] = ()
    bidirectional: tuple[Span, ...] = ()

    def within(self, start: int, stop: int) -> ImageSpans:
        """Spans of the tokens [start, stop), counted from `start`."""
        return ImageSpans(
            _within(self.spans, start, stop), _within(self.bidirectional, start, stop)
        )

    def shifted(self, offset: int) -> ImageSpans:
        """Spans counted from `offset` tokens earlier."""
        return ImageSpans(_shifted(self.spans, offset), _shifted(self.bidirectional, offset))

    def border(self, cut: int, after: int) -> int:
        """Cut outside of images: `cut`, or the start of the image that it lies in.

        Args:
            after: the cut before; where the image starts there, its stop is taken.
        """
        for start, stop in self.spans:
            if start < cut < stop:
                return start if start > after else stop
        return cut

    def mask(self, num_tokens: int) -> Bool[Tensor, " N"]:
        """True at the image tokens among the first `num_tokens`."""
        found = torch.zeros(num_tokens, dtype=torch.bool)
        for start, stop in self.spans:
            found[start:stop] = True
        return found


NO_IMAGES = ImageSpans()


def spans_of(flags: Sequence[bool]) -> tuple[Span, ...]:
    """Runs of consecutive true flags."""
    edges = [n for n, flag in enumerate(flags) if flag != (n > 0 and flags[n - 1])]
    if len(edges) % 2:
        edges.append(len(flags))
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _within(spans: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    return tuple(
        (max(first, start) - start, min(last, stop) - start)
        for first, last in spans
        if first < stop and last > start
    )


def _shifted(spans: tuple[Span, ...], offset: int) -> tuple[Span, ...]:
    return tuple((start + offset, stop + offset) for start, stop in spans)
