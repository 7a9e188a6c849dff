"""Caches that a server loads chunk by chunk, and of which it reads what is not in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder.models import LoadedModel
from larder.store import StreamController, ThroughputEstimates
from server_core import answered, told
from server_stores import Stored

CHUNK = 16


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second for each token that is read, and none for what is loaded."""
    monkeypatch.setattr("larder.store.prefix.chunk_index.CHUNK_TOKENS", CHUNK)
    monkeypatch.setattr(ThroughputEstimates, "prefill_seconds", lambda self, tokens: float(tokens))
    monkeypatch.setattr(ThroughputEstimates, "load_seconds", lambda self, tier, n: 1e-12 * n)


@pytest.mark.parametrize("deadline", [20.0, 50.0, 10_000.0])
def test_a_resumed_session_reads_what_its_deadline_leaves_out(
    small: LoadedModel, tmp_path: Path, deadline: float
) -> None:
    stored = Stored(
        small, tmp_path, codec="cachegen", streaming=StreamController(deadline), policy="full"
    )
    first = stored.ask(told(1), "x")
    held = first.told.prompt_tokens + first.told.new_tokens
    turns = answered(told(1), first, "Why?")
    stored.core.admin.release(stored.core.idle("a", "x"))
    stored.run()
    again = stored.ask(turns, "x").told
    assert again.tier == "disk" and again.prompt_tokens > held
    if deadline > held:
        assert again.cached_tokens == 0 and again.lossless
    else:
        assert held - deadline - 2 <= again.cached_tokens < held - deadline + CHUNK
        assert again.recomputed_tokens > 0 and not again.lossless
    stored.close()
