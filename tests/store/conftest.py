"""Fixtures of store tests: chunks of few tokens."""

from __future__ import annotations

import pytest


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four tokens, so that short texts have several."""
    monkeypatch.setattr("larder.store.prefix.chunk_index.CHUNK_TOKENS", 4)
