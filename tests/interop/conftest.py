"""Tiny models on their own attention, to which tests attach caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tiny_models import tiny

TESTED = ("llama", "qwen3", "gemma3")


@pytest.fixture(scope="session")
def models() -> Callable[[str], Any]:
    """`tiny(architecture)`, once for all tests."""
    return cache(tiny)


@pytest.fixture(params=TESTED)
def model(request: pytest.FixtureRequest, models: Callable[[str], Any]) -> Any:
    return models(request.param)


@pytest.fixture
def llama(models: Callable[[str], Any]) -> Any:
    return models("llama")
