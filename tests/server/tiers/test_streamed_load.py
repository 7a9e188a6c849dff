"""Chunked cache loads with a deadline, and recomputed remainders."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder.models import LoadedModel
from larder.store import StreamController, ThroughputEstimates, Tier
from server_core import answered, box_question
from server_stores import Stored

CHUNK = 16


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second for each token that is read, and none for what is loaded."""
    monkeypatch.setattr("larder.store.prefix.chunk_index.CHUNK_TOKENS", CHUNK)
    monkeypatch.setattr(ThroughputEstimates, "prefill_seconds", lambda self, tokens: float(tokens))
    monkeypatch.setattr(ThroughputEstimates, "load_seconds", lambda self, tier, n: 1e-12 * n)


@pytest.mark.parametrize("deadline", [20.0, 50.0, 10_000.0])
def test_resumed_session_recomputes_chunks_past_the_deadline(
    small: LoadedModel, tmp_path: Path, deadline: float
) -> None:
    stored = Stored(
        small, tmp_path, codec="cachegen", streaming=StreamController(deadline), policy="full"
    )
    first = stored.ask(box_question(1), "x")
    held = first.result.prompt_tokens + first.result.new_tokens
    turns = answered(box_question(1), first, "Why?")
    stored.core.admin.release(stored.core.idle("a", "x"))
    stored.run()
    again = stored.ask(turns, "x").result
    assert again.tier == "disk" and again.prompt_tokens > held
    if deadline > held:
        assert again.cached_tokens == 0 and again.lossless
    else:
        assert held - deadline - 2 <= again.cached_tokens < held - deadline + CHUNK
        assert again.recomputed_tokens > 0 and not again.lossless
    stored.close()


@pytest.mark.extended
def test_chunked_load_reserves_one_level_of_one_chunk(small: LoadedModel, tmp_path: Path) -> None:
    stored = Stored(small, tmp_path, codec="cachegen", policy="full")
    first = stored.ask(box_question(1), "x")
    turns = answered(box_question(1), first, "Why?")
    core = stored.core
    session = core.sessions.find("a", "x")
    core.tiers.save(session)
    stored.run()
    core.tiers.drop(session)
    saved, [record] = session.residency.saved_cache, stored.store.sessions.heads()
    sizes = [ref.bytes for ref in record.spans]
    assert saved is not None and len(sizes) > 3 and saved.nbytes == sum(sizes)
    assert saved.load_bytes == max(sizes) + 2 * record.cache_bytes
    core.ledger.lower(Tier.HOST, core.ledger.used(Tier.HOST) + saved.load_bytes)
    again = stored.ask(turns, "x").result
    assert again.tier == "disk" and again.cached_tokens == saved.tokens
    stored.close()


def test_fork_of_a_coarse_load_keeps_the_finest_levels(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(small, tmp_path, codec="cachegen", policy="full")
    core, levels = stored.core, 3
    first = stored.ask(box_question(1, 4), "x")
    turns = answered(box_question(1, 4), first, "Why?")
    core.admin.release(core.idle("a", "x"))
    stored.run()
    monkeypatch.setattr(StreamController, "level", lambda *_: levels - 1)
    core.fork("a", "x", "direct")
    direct = stored.ask(turns, "direct")
    assert direct.result.tier == "disk" and not direct.result.lossless  # the caches of x, coarsely
    core.fork("a", "direct", "second")  # before those of the first fork are stored
    assert not stored.ask(answered(turns, direct, "How?"), "second").result.lossless
    for name in ("second", "direct"):
        core.admin.release(core.idle("a", name))
    stored.run()
    spans = {record.name: record.spans for record in stored.store.sessions.heads()}
    full = (first.result.prompt_tokens // CHUNK) * levels
    assert full > 3 * levels
    for name in ("direct", "second"):
        assert spans[name][:full] == spans["x"][:full]
    stored.close()
