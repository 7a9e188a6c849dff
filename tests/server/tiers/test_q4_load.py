"""Sessions restored with 4-bit caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder.models import LoadedModel
from larder.store import Tier
from server_core import answered, box_question
from server_stores import Stored

pytestmark = pytest.mark.usefixtures("loads")


def test_session_continues_from_four_bit_codes(small: LoadedModel, tmp_path: Path) -> None:
    stored = Stored(small, tmp_path, codec="q4", policy="full")
    turns, exact_bytes = box_question(1, 12), 0
    for number in range(3):
        client = stored.ask(turns, "x")
        told_of = client.result
        if number:
            session = stored.core.idle("a", "x")
            cache = session.residency.active
            assert told_of.tier == "disk" and not told_of.lossless
            assert told_of.cached_tokens > 0.9 * held
            assert cache is not None and cache.cache_spec.form == "graded"
            assert cache.nbytes < 0.6 * exact_bytes
            assert stored.core.ledger.used(Tier.DEVICE) >= cache.nbytes
        held = told_of.prompt_tokens + told_of.new_tokens
        exact_bytes = small.decoder.spec.full_bytes(held)
        turns = answered(turns, client, f"And box {number}?")
        stored.core.admin.release(stored.core.idle("a", "x"))
        stored.run()
    assert stored.ask(turns, "x").result.tier == "disk"
    assert stored.ask(turns, "y").result.lossless, "another session does not begin with codes"
    stored.close()
