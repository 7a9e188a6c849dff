"""Candidate sessions of a request without a session name."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder.models import LoadedModel
from larder.server import ApiError, ChatMessage, Metrics
from server_core import Served, answered, box_question, characters
from server_engine_clients import ask, flip, hub_in, persistence_in


@pytest.fixture(scope="module")
def other() -> LoadedModel:
    """Another model, whose tokens are the same."""
    return characters(layers=3)


def talk(loaded: LoadedModel, folder: Path) -> list[ChatMessage]:
    """Messages of a stored conversation and its next request."""
    served = Served(loaded, persistence=persistence_in(folder, loaded))
    turns = answered(box_question(1), served.ask(box_question(1), "x"), "Why?")
    return answered(turns, served.ask(turns, "x"), "Sure?")


def test_sessions_of_another_model_are_no_candidates(
    small: LoadedModel, other: LoadedModel, tmp_path: Path
) -> None:
    turns = talk(small, tmp_path)
    with hub_in(tmp_path, other) as hub:
        assert ask(hub, turns).result.session != "x"
        assert not hub.stats().passed_over
        with pytest.raises(ApiError, match="another model"):
            ask(hub, turns, "x")
    with hub_in(tmp_path, small) as hub:
        assert ask(hub, turns).result.session == "x"


@pytest.mark.parametrize("reason", ["invalid_request", "session_unreadable", "kv_budget_exceeded"])
def test_unusable_candidate_session_is_skipped_and_counted(
    small: LoadedModel,
    other: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "larder.server.persistence.store.MODEL_LABEL", "unknown", raising=False
        )  # as it was once written
        turns = talk(small, tmp_path)
    if reason == "session_unreadable":
        flip(tmp_path, small)
    loaded = other if reason == "invalid_request" else small
    served = Served(loaded, persistence=persistence_in(tmp_path, loaded))
    if reason == "kv_budget_exceeded":
        monkeypatch.setattr(
            served.core.tiers, "charge_transcript", lambda session: session.name != "x"
        )
    assert served.ask(turns).result.session != "x"
    assert served.core.restorer.passed_over.counts() == {reason: 1}
    if reason != "kv_budget_exceeded":
        with hub_in(tmp_path, loaded) as hub:
            assert ask(hub, turns).result.session != "x"
            assert hub.stats().passed_over == {reason: 1}
            line = f'larder_sessions_passed_over_total{{reason="{reason}"}} 1.0'
            assert line in Metrics(hub).text().decode().splitlines()
            assert reason not in Metrics(hub).text_as_vllm("any").decode()


@pytest.mark.parametrize("is_damaged", [True, False])
def test_unreadable_session_can_be_removed(
    small: LoadedModel, other: LoadedModel, tmp_path: Path, is_damaged: bool
) -> None:
    talk(small, tmp_path)
    if is_damaged:
        flip(tmp_path, small)
    with hub_in(tmp_path, small if is_damaged else other) as hub:
        with pytest.raises(ApiError):
            hub.session("a", "x")
        hub.remove("a", "x")
        assert hub.sessions("a") == ()
        with pytest.raises(ApiError, match="no session"):
            hub.remove("a", "x")
    assert persistence_in(tmp_path, small).load("a", "x") is None
