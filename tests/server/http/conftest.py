"""One server for all tests of HTTP: two tenants with keys, an operator among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from larder.engine import TokenSampler
from larder.server import ApiKeyAuth, HttpSettings, Principal
from server.http.running_server import Running, running
from server.http.scripted_model import END, Write

ANNE, BOB = "sk-anne-0123456789", "sk-bob-0123456789ab"
KEYS = {ANNE: Principal("anne", is_operator=True), BOB: Principal("bob", is_operator=False)}


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    settings = HttpSettings(max_body_bytes=100_000, ping_seconds=0.05)
    with running(ApiKeyAuth(KEYS), settings) as served:
        yield served


@pytest.fixture
def served(server: Running) -> Running:
    """Server without requests or sessions."""
    hub = server.hub
    for result in (hub.asked, hub.tickets, hub.held, hub.pinned):
        result.clear()
    return server


@pytest.fixture(scope="session")
def http(server: Running) -> Iterator[httpx2.Client]:
    """HTTP client of the tenant Anne."""
    headers = {"authorization": f"Bearer {ANNE}"}
    with httpx2.Client(base_url=server.url, headers=headers, timeout=20) as client:
        yield client


@pytest.fixture(scope="session")
def anne(server: Running) -> Iterator[OpenAI]:
    with OpenAI(api_key=ANNE, base_url=f"{server.url}/v1", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def bob(server: Running) -> Iterator[OpenAI]:
    with OpenAI(api_key=BOB, base_url=f"{server.url}/v1", max_retries=0) as client:
        yield client


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch) -> Write:
    """Sets the next answers of the model."""
    waiting = list[str]()

    def sample(self: TokenSampler, logits: Any, answer_ids: Sequence[int]) -> int:
        if len(answer_ids) < len(waiting[0]):
            return ord(waiting[0][len(answer_ids)])
        waiting.pop(0)
        return END

    def add(*texts: str) -> None:
        waiting.extend(texts)

    monkeypatch.setattr(TokenSampler, "sample", sample)
    return add
