"""Spans of images: runs of flags, parts of a text, and blocks that cut none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from larder.core import ImageSpans, spans_of
from larder.ops import even_ranges
from larder.prefill import split_blocks

flags_of_tokens = st.lists(st.booleans(), min_size=1, max_size=40)


@given(flags_of_tokens)
def test_spans_are_the_runs_of_flags(flags: list[bool]) -> None:
    images = ImageSpans(spans_of(flags))
    assert images.mask(len(flags)).tolist() == flags
    assert all(not flags[start - 1] for start, _ in images.spans if start)


@given(flags_of_tokens, st.integers(0, 40), st.integers(0, 40))
def test_image_spans_of_a_slice_equal_those_of_its_flags(
    flags: list[bool], one: int, other: int
) -> None:
    start, stop = sorted((min(one, len(flags)), min(other, len(flags))))
    spans = spans_of(flags)
    part = ImageSpans(spans, spans).within(start, stop)
    assert part.spans == spans_of(flags[start:stop])
    assert part.bidirectional == part.spans
    assert part.shifted(start).within(start, stop) == part


@given(flags_of_tokens, st.integers(1, 12))
def test_blocks_do_not_split_images(flags: list[bool], size: int) -> None:
    images, ids = ImageSpans(spans_of(flags)), tuple(range(len(flags)))
    blocks = split_blocks(ids, size, images)
    assert sum(blocks, ()) == ids
    cuts = {block[0] for block in blocks}
    assert not any(start < cut < stop for cut in cuts for start, stop in images.spans)
    for block in blocks:
        assert len(block) <= size or (block[0], block[-1] + 1) in images.spans
    if not images.spans:
        assert [(block[0], block[-1] + 1) for block in blocks] == even_ranges(len(ids), size)
