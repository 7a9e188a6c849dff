"""Stored sessions of requests with contexts: found after a restart, their branches kept apart."""

from __future__ import annotations

from pathlib import Path

from larder.models import LoadedModel
from larder.server import ChatMessage, LocalEngineClient
from server_core import Client, user
from server_engine_clients import ask, hub_in

CONTEXTS = ("Box 7 holds 12 coins. " * 3, "Box 9 holds 4 keys. " * 3)
ASKED = [user("What does box 7 hold?")]


def continued(client: Client, question: str) -> list[ChatMessage]:
    """The conversation after one answer, with its next question."""
    return [*ASKED, ChatMessage("assistant", client.text), user(question)]


def test_nameless_sessions_with_contexts_continue_after_a_restart(
    small: LoadedModel, tmp_path: Path
) -> None:
    with hub_in(tmp_path, small) as hub:
        first = ask(hub, ASKED, contexts=CONTEXTS)
    turns, later = continued(first, "Why?"), {2: ("Box 5 is empty.",)}
    with hub_in(tmp_path, small) as hub:
        second = ask(hub, turns, contexts=CONTEXTS, message_contexts=later)
        assert second.result.session == first.result.session
    turns = [*turns, ChatMessage("assistant", second.text), user("Sure?")]
    with hub_in(tmp_path, small) as hub:
        third = ask(hub, turns, contexts=CONTEXTS, message_contexts=later)
        assert third.result.session == first.result.session


def test_branch_of_a_session_with_contexts_gets_an_unused_name(
    small: LoadedModel, tmp_path: Path
) -> None:
    def asked(hub: LocalEngineClient, question: str) -> str:
        return ask(hub, continued(first, question), contexts=CONTEXTS).result.session

    with hub_in(tmp_path, small) as hub:
        first = ask(hub, ASKED, contexts=CONTEXTS)
        root = first.result.session
        assert [asked(hub, "Why?"), asked(hub, "How?")] == [root, f"{root}~2"]
    with hub_in(tmp_path, small) as hub:
        hub.session("a", root)
        assert asked(hub, "Who?") == f"{root}~3"
        assert asked(hub, "How?") == f"{root}~2"
