"""No test here loses power: nobody waits for the disk."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four tokens, so that short texts have several."""
    monkeypatch.setattr("larder.store.prefix.chunk_index.CHUNK_TOKENS", 4)
