"""Generated requests to every endpoint: no crash and no traceback in a response."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from larder import Engine
from larder.models import LoadedModel
from larder.server import (
    Archive,
    Authenticator,
    EmbedderQueue,
    EngineClient,
    EngineOptions,
    HttpSettings,
    LocalEngineClient,
    Principal,
    create_app,
)
from larder.store import ByteBudgets, Tier
from server.fake_engine_client import NAME, FakeHub
from topic_embedder import TopicEmbedder

FIELDS = {"message", "type", "param", "code"}
MESSAGES_FIELDS = {"message", "type"}  # of errors in Anthropic's form
OVERLOADED = {"overloaded", "overloaded_error"}
MODES = ("positive", "negative")
TIMEOUT_SECONDS = 600.0  # of a request: 99 answers to one prompt take long on a busy machine


class OpenAuth(Authenticator):
    """Authenticator that admits every request."""

    def admit(self, headers: Mapping[str, str], client: str | None) -> Principal:
        return Principal("anyone", is_operator=True)


def app(hub: EngineClient) -> FastAPI:
    """All endpoints of a server whose model and embedder have the name `NAME`."""
    embedder = EmbedderQueue(TopicEmbedder(NAME), NAME)
    return create_app(hub, OpenAuth(), Archive(), HttpSettings(max_new_tokens=4), embedder)


@pytest.mark.slow
def test_endpoints_accept_or_refuse_generated_requests() -> None:
    assert attempts(app(FakeHub()), "negative", 1, is_same=True) > 10


@pytest.mark.stress
@pytest.mark.parametrize("mode", MODES)
def test_endpoints_accept_or_refuse_many_generated_requests(mode: str) -> None:
    assert attempts(app(FakeHub()), mode, 60, is_same=False) > 600


@pytest.mark.stress
@pytest.mark.parametrize("mode", MODES)
def test_endpoints_with_a_model_survive_generated_requests(mode: str, small: LoadedModel) -> None:
    budgets = ByteBudgets({Tier.DEVICE: 300_000, Tier.HOST: 600_000})
    hub = LocalEngineClient(Engine(small, policy="full"), EngineOptions(budgets, names=(NAME,)))
    try:
        assert attempts(app(hub), mode, 40, is_same=False) > 400
        stats = hub.stats()
        assert stats.budget_violations == 0 and hub.is_healthy()
    finally:
        hub.close()


def is_messages(case: Any) -> bool:
    """True for a request in Anthropic's format."""
    return str(case.operation.path).startswith("/v1/messages")


def attempts(served: FastAPI, mode: str, tries: int, is_same: bool) -> int:
    """Try every endpoint so often; how many requests there were."""
    import schemathesis

    schema = schemathesis.openapi.from_asgi("/openapi.json", served)
    tried = 0
    for operation in schema.get_all_operations():
        cases = operation.ok().as_strategy(generation_mode=schemathesis.GenerationMode(mode))
        tried += attempt(cases, tries, is_same)
    return tried


def attempt(cases: Any, tries: int, is_same: bool) -> int:
    """Send what a strategy makes; how often."""
    tried = 0

    @settings(
        max_examples=tries,
        deadline=None,
        derandomize=is_same,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def sent(case: Any) -> None:
        nonlocal tried
        tried += 1
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = NAME  # a name that is made up is a 404, before all else
        reply = case.call(timeout=TIMEOUT_SECONDS)
        assert "Traceback" not in reply.text
        if reply.status_code >= 400:
            error = reply.json()["error"]
            fields = MESSAGES_FIELDS if is_messages(case) else FIELDS
            assert set(error) == fields, reply.text
        if reply.status_code >= 500:
            assert OVERLOADED & set(error.values()), reply.text

    with suppress(Unsatisfiable):  # where nothing is asked, nothing can be asked wrongly
        sent()
    return tried
