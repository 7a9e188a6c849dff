"""Failed loads of caches from the store."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from larder.models import LoadedModel
from larder.store import Tier
from server_chats import asked
from server_core import answered, box_question
from server_stores import Stored

pytestmark = pytest.mark.usefixtures("loads")


# How a session is held, and what cannot be done with its caches when they come back.
HELD = {
    "full": ({"policy": "full"}, "larder.session.caches.offload"),
    "epicache": (asked("epicache"), "larder.server.tiers.disk.restore_chat"),
}


def has_only_logs(stored: Stored) -> bool:
    """True if only transcripts are charged to host memory."""
    logs = [each.transcript.reservation for each in stored.core.sessions]
    return stored.core.ledger.used(Tier.HOST) == sum(log.bytes for log in logs if log is not None)


@pytest.mark.parametrize("failure", [RuntimeError, MemoryError, TypeError])
@pytest.mark.parametrize("kind", HELD)
def test_failed_load_releases_its_reservation(
    small: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    failure: type[Exception],
) -> None:
    options, place = HELD[kind]
    stored = Stored(small, tmp_path, **options)  # pyright: ignore
    turns = answered(box_question(1), stored.ask(box_question(1), "x"), "Why?")
    stored.core.admin.release(stored.core.idle("a", "x"))
    stored.run()
    with monkeypatch.context() as patch:
        patch.setattr(place, Mock(side_effect=failure("not here")))
        client, _ = stored.served.submit(turns, "x")
        stored.run()
        assert isinstance(client.error, failure) and has_only_logs(stored)
        moved = stored.core.admin.prefetch(stored.core.idle("a", "x"))
        stored.run()
        assert moved.result(0).residency.tier == "disk" and has_only_logs(stored)
    assert stored.ask(turns, "x").result.tier == "disk"
    stored.close()
