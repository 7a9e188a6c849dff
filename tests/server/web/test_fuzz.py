"""Every endpoint with thousands of made-up requests: no crash, no traceback to the client."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from server.fake_hub import FakeHub

from larder.server.app import create_app
from larder.server.tenants import Loopback
from larder.server.web.archive import Archive
from larder.server.web.desk import Settings

pytestmark = pytest.mark.stress

APP = create_app(FakeHub(), Loopback(), Archive(), Settings())
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


@SCHEMA.parametrize()
@settings(max_examples=100, suppress_health_check=list(HealthCheck), deadline=None)
def test_every_endpoint_stands_what_is_made_up(case: Any) -> None:
    reply = case.call(headers={"host": "localhost"})
    assert reply.status_code < 500 or reply.json()["error"]["code"] in ("overloaded", "stopping")
    assert "Traceback" not in reply.text
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
