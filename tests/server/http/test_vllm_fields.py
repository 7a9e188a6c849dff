"""Fields of `vllm serve` that docs/from_vllm.md lists: refused by name, or named in warnings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.fake_engine_client import NAME
from server.http.running_server import Running

PAGE = Path(__file__).parents[3] / "docs/from_vllm.md"
BODY: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
VALUES = {"guided_...": ("guided_regex", "a"), "best_of": ("best_of", 2)}


def documented(beginning: str) -> list[tuple[str, Any]]:
    """Fields of the row that begins so, with a value that would change the answer."""
    [row] = [line for line in PAGE.read_text().splitlines() if line.startswith(beginning)]
    names = re.findall(r"`([^`]+)`", row.split("|")[1])
    fields = [name.partition(": ") for name in names]
    return [VALUES.get(name, (name, value != "false")) for name, _, value in fields]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_documented_fields_of_vllm_are_refused_by_name(
    http: httpx2.Client, served: Running, path: str
) -> None:
    body = BODY if path == "chat/completions" else {"model": NAME, "prompt": "a"}
    fields = documented("| fields `best_of`")
    assert len(fields) > 14
    for name, value in fields:
        reply = http.post(f"/v1/{path}", json=body | {name: value})
        assert reply.status_code == 400, name
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", name)
        assert name in error["message"]
    assert not served.hub.asked


def test_other_documented_fields_of_vllm_are_named_in_warnings(
    http: httpx2.Client, served: Running
) -> None:
    fields = dict(documented("| other fields"))
    assert len(fields) > 3
    reply = http.post("/v1/chat/completions", json=BODY | fields)
    assert reply.status_code == 200
    for name in fields:
        assert any(f"'{name}'" in warning for warning in reply.json()["warnings"]), name
