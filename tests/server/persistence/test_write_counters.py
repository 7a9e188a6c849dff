"""Counters of failed writes and of rejected restores."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder.core import StoreFull
from larder.models import LoadedModel
from larder.server import ServerStats
from larder.server.http.metrics import _counters
from larder.store import Manifest
from server_core import answered, box_question
from server_engine_clients import failing
from server_stores import Stored

pytestmark = pytest.mark.usefixtures("loads")
FULL = StoreFull("No room.")


def test_unwritten_turn_is_not_counted_as_a_rejected_restore(
    small: LoadedModel, tmp_path: Path
) -> None:
    stored = Stored(small, tmp_path)
    with failing(stored.store.sessions, "append", FULL):
        stored.ask(box_question(1), "x")
    assert (stored.disk.stats().rejected, stored.disk.stats().unwritten) == ({}, {"full": 1})
    stored.close()


def test_cache_is_restored_when_its_access_time_cannot_be_written(
    small: LoadedModel, tmp_path: Path
) -> None:
    first = Stored(small, tmp_path)
    turns = answered(box_question(1), first.ask(box_question(1), "x"), "Why?")
    first.close()
    again = Stored(small, tmp_path)
    with failing(Manifest, "used", FULL):
        last = again.ask(turns, "x")
    assert last.result.restored_tokens > 0 == last.result.recomputed_tokens
    assert (again.disk.stats().rejected, again.disk.stats().unwritten) == ({}, {"full": 1})
    again.close()


def test_write_metrics_have_descriptions_and_reason_labels() -> None:
    found = {
        each.name: each for each in _counters(ServerStats(rejected={"a": 1}, unwritten={"full": 2}))
    }
    one, other = found["larder_restore_rejected"], found["larder_store_unwritten"]
    assert "not restored" in one.documentation and "failed to write" in other.documentation
    assert [(each.labels, each.value) for each in other.samples] == [({"reason": "full"}, 2)]
    assert [each.labels for each in one.samples] == [{"reason": "a"}]
