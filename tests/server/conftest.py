"""A model small enough to serve crowds with."""

from __future__ import annotations

import pytest

from larder.models.loading import Loaded
from server_core import characters


@pytest.fixture(scope="session")
def small() -> Loaded:
    return characters()
