"""Softcaps and sinks in every form of storage: attention equals the loop."""

from __future__ import annotations

from cache_stores import append, assert_close, attend, extend


def test_attention_equals_its_reference(variant_subject) -> None:
    """A plan before it, blocks and single tokens, and sections that do not see each other."""
    store, loop = variant_subject.filled()
    start = 13
    for size in (5, 1, 1):
        new = variant_subject.tokens(size, start)
        assert_close(extend(store, new), attend(loop, new))
        append(loop, new)
        start += size
    new = variant_subject.tokens(4, start)
    assert_close(attend(store, new), attend(loop, new))


def test_attention_among_new_tokens_equals_its_reference(variant_subject) -> None:
    new = variant_subject.tokens(9)
    assert_close(attend(variant_subject.new(), new), attend(variant_subject.loop(), new))
