"""Reasons of failed restores: counted, and logged as warnings where they are faults."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from logging.handlers import BufferingHandler

import pytest

from larder.core import Damaged, Refused
from larder.store import FailureCounter


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What the logger of the store gets."""
    log, handler = logging.getLogger("larder.store"), BufferingHandler(100)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield handler.buffer
    log.removeHandler(handler)
    log.setLevel(level)


def test_cache_of_another_policy_is_no_warning_and_damage_is(
    records: list[logging.LogRecord],
) -> None:
    failures = FailureCounter()
    assert failures.note_error(Refused("The cache was made by full.", "policy")) == "policy"
    assert failures.note_error(Damaged("A blob is damaged.")) == "damaged"
    assert failures.counts() == {"policy": 1, "damaged": 1}
    assert [record.levelname for record in records] == ["INFO", "WARNING"]
