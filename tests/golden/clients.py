"""Client of the server's HTTP interface."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

SECONDS = 60


def get(url: str) -> str:
    """Text at an address."""
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        return answer.read().decode()


def fetched(url: str) -> Any:
    """JSON document at an address."""
    return json.loads(get(url))


def post(url: str, document: Mapping[str, Any], **headers: str) -> Any:
    """JSON reply to a JSON document."""
    return json.loads(post_bytes(url, json.dumps(document).encode(), **headers))


def post_bytes(url: str, content: bytes = b"", **headers: str) -> bytes:
    """Reply to a request with that body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    asked = urllib.request.Request(
        url, content, {"content-type": "application/json"} | named, method="POST"
    )
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        return answer.read()
