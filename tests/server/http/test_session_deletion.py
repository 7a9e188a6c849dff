"""Response of the session deletion endpoint."""

from __future__ import annotations

import httpx2

from server.fake_engine_client import NAME
from server.http.running_server import Running


def say(http: httpx2.Client, name: str) -> None:
    messages = [{"role": "user", "content": name}]
    body = {"model": NAME, "messages": messages, "session_id": name}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_session_deletion_lists_remaining_branches(http: httpx2.Client, served: Running) -> None:
    for name in ("x", "x~2", "y"):
        say(http, name)
    assert http.delete("/v1/sessions/x").json()["branches"] == ["x~2"]
    say(http, "x")
    assert http.delete("/v1/sessions/x", params={"branches": "true"}).json()["branches"] == []
    assert [each["id"] for each in http.get("/v1/sessions").json()["data"]] == ["y"]
    refused = http.delete("/v1/sessions/y", params={"branches": "perhaps"})
    assert refused.status_code == 400 and "branches" in refused.json()["error"]["message"]
