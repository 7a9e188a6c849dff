"""The bundled model, loaded once for all chats."""

from __future__ import annotations

import pytest

from chats import EPISODES, under
from larder.engine.engine import Engine
from larder.models.loading import Loaded, load


@pytest.fixture(scope="session")
def loaded() -> Loaded:
    return load()


@pytest.fixture(scope="session")
def engine(loaded: Loaded) -> Engine:
    return under(loaded, EPISODES)
