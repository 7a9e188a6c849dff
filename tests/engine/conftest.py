"""The bundled model, loaded once for all chats, and conversations that are read once."""

from __future__ import annotations

import pytest

from chats import EPISODES, Library, under
from larder import Engine
from larder.models import LoadedModel
from larder.session import chat_cache, prefill


@pytest.fixture(autouse=True)
def calibrated(measured_once: None) -> None:
    """The bundled model is measured once."""


@pytest.fixture(scope="session")
def loaded(seed_model: LoadedModel) -> LoadedModel:
    return seed_model


@pytest.fixture(scope="session")
def library() -> Library:
    return Library(prefill.prefill_memory)


@pytest.fixture
def read_once(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats with the same history under the same policy begin with copies of one reading."""
    for module in (prefill, chat_cache):
        monkeypatch.setattr(module, "prefill_memory", library.gather)


@pytest.fixture(scope="session")
def engine(loaded: LoadedModel) -> Engine:
    return under(loaded, EPISODES)
