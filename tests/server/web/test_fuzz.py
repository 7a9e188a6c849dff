"""Every endpoint with made-up requests, good and bad: no crash, no traceback to the client."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from larder.server.app import create_app
from larder.server.tenants import Door, Principal
from larder.server.web.archive import Archive
from larder.server.web.desk import Settings
from server.fake_hub import FakeHub

TRIES = 60
FIELDS = {"message", "type", "param", "code"}


class Anyone(Door):
    """Lets everybody in."""

    def admit(self, headers: Mapping[str, str], client: str | None) -> Principal:
        return Principal("anyone", is_operator=True)


def app() -> FastAPI:
    return create_app(FakeHub(), Anyone(), Archive(), Settings())


@pytest.mark.stress
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_every_endpoint_stands_what_is_made_up(mode: str) -> None:
    import schemathesis

    schema = schemathesis.openapi.from_asgi("/openapi.json", app())
    tried = 0
    for operation in schema.get_all_operations():
        cases = operation.ok().as_strategy(generation_mode=schemathesis.GenerationMode(mode))
        tried += attempt(cases)
    assert tried > 10 * TRIES


def attempt(cases: Any) -> int:
    """Send what a strategy makes; how often."""
    tried = 0

    @settings(max_examples=TRIES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def sent(case: Any) -> None:
        nonlocal tried
        tried += 1
        reply = case.call()
        assert reply.status_code < 500, reply.text
        assert "Traceback" not in reply.text
        if reply.status_code >= 400:
            assert set(reply.json()["error"]) == FIELDS

    with suppress(Unsatisfiable):  # where nothing is asked, nothing can be asked wrongly
        sent()
    return tried
