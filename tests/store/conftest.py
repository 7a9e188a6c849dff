"""No test here loses power: nobody waits for the disk."""

from __future__ import annotations

import pytest


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four tokens, so that short texts have several."""
    monkeypatch.setattr("larder.store.prefix.chunk_index.CHUNK_TOKENS", 4)
