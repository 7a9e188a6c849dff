"""Small models for tests of many sessions."""

from __future__ import annotations

import pytest

from larder.models import LoadedModel
from larder.store import RestorePath, ThroughputEstimates
from server_core import characters


@pytest.fixture(scope="session")
def small() -> LoadedModel:
    return characters()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore by loading always, whatever the measured speed of prefill."""
    monkeypatch.setattr(ThroughputEstimates, "choose", lambda *args: RestorePath.LOAD)
