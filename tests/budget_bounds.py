"""Helpers for tests of the budget bound: sentences by family, and the peak entries of any cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from larder import Policy
from larder.cache import SequenceCache
from larder.models import ForwardBatch
from larder.session import budgeted_layers, entries_per_head

KEYDIFF = "blockwise() > protect(sinks=4, recent=8) > keydiff() > uniform()"
SENTENCES = {
    "keydiff": KEYDIFF,
    "snapkv": "blockwise() > protect(sinks=4, recent=4) > snapkv(window=8) > pooled()",
    "snapkv_whole": "whole() > protect(sinks=0, recent=4) > snapkv(window=8) > uniform()",
    "streaming_llm": "blockwise() > protect(sinks=4, recent=0) > sinks_and_window() > uniform()",
    "h2o": "blockwise() > protect(sinks=0, recent=0.5) > column_mass() > uniform() > every_step()",
    "h2o_while_reading": "blockwise() > protect(sinks=0, recent=0.5) > column_mass() > uniform()",
    "d2o": (
        "blockwise() > protect(sinks=4, recent=0.25) > column_mass() > inverse_variance() > "
        "fold_ema() > every_step()"
    ),
    "kvzip": "blockwise() > protect(sinks=4, recent=8) > reconstruct() > pooled()",
    "novelty": "blockwise() > protect(sinks=4, recent=0) > novelty() > uniform()",
    "epicache": (
        "episodes(count=2, segment=1, representatives=2) > episodic() > "
        'protect(sinks=4, recent=8) > patched(prompt="episode") > pooled()'
    ),
    "icecache": (
        "blockwise() > protect(sinks=4, recent=8) > sinks_and_window() > uniform() > "
        "park() > dci(page=4, dense=1) > lagged(tokens=4)"
    ),
    "kivi": (
        "blockwise() > protect(sinks=4, recent=8) > sinks_and_window() > uniform() > "
        "quantized(bits=2, group=8) > every_step()"
    ),
    "int4": (
        "blockwise() > protect(sinks=4, recent=4) > snapkv(window=8) > uniform() > "
        "quantized(bits=4, group=8)"
    ),
    "lagged": "whole() > protect(sinks=0, recent=4) > recurrence() > uniform() > lagged(tokens=64)",
    "split": (
        "blockwise() > protect(sinks=0, recent=4) > last_query() > uniform() > split(reading=0.7)"
    ),
}


@dataclass
class Peak:
    """The most entries that one cache held, over layers and heads, pages included."""

    entries: int = 0

    def note(self, cache: SequenceCache) -> None:
        self.entries = max(self.entries, held(cache))


def held(cache: SequenceCache) -> int:
    """Entries of a cache that its budget is for, pages that may be recalled included."""
    recalling = [tier for tier in cache.tiers if tier.has_offloaded]
    pages = sum(t.layer.kv_heads * (t.parking.recall.tokens or 0) for t in recalling)
    return cache.managed_entries + pages


@contextmanager
def peaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peak]:
    """Watches every layer of every pass, whoever makes it."""
    peak, inner = Peak(), ForwardBatch.attend

    def attend(self: ForwardBatch, *args: object) -> object:
        for row in self.segments:
            peak.note(row.cache)
        out = inner(self, *args)  # pyright: ignore
        for row in self.segments:
            peak.note(row.cache)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(ForwardBatch, "attend", attend)
        yield peak


def most(policy: Policy, cache: SequenceCache, block: int) -> tuple[int, int]:
    """Entries of one cache at rest, and while a turn runs."""
    spec = cache.spec
    heads = sum(layer.kv_heads for layer in budgeted_layers(policy, spec))
    pages = 0 if policy.recall is None else policy.recall.tokens or 0
    resting = entries_per_head(policy, spec) + pages + policy.lag
    return heads * resting, heads * (resting + block)
