"""Responses and conversations through OpenAI's client."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import httpx2
import openai
import pytest
from openai import OpenAI

from larder.core import Damaged, StoreError
from larder.server import RESPONSE, ApiError, Archive, ChatMessage, ConversationItem, LoopbackAuth
from server.fake_engine_client import NAME
from server.http.running_server import Running, running


def sent(served: Running) -> list[str]:
    """The text of every turn that the hub was sent last."""
    return [f"{turn.role}: {turn.text}" for turn in served.hub.asked[-1].turns]


def test_conversation_includes_earlier_items(anne: OpenAI, served: Running) -> None:
    conversation = anne.conversations.create(metadata={"about": "bread"})
    first = anne.responses.create(model=NAME, input="one", conversation=conversation.id)
    assert first.output_text == "You said: one "
    assert first.status == "completed" and first.conversation is not None
    assert first.usage is not None
    assert first.usage.input_tokens_details.cache_write_tokens == 9
    anne.responses.create(
        model=NAME, input="two", conversation=conversation.id, instructions="Be short."
    )
    assert sent(served) == [
        "system: Be short.",
        "user: one",
        "assistant: You said: one ",
        "user: two",
    ]
    assert served.hub.asked[-1].session == conversation.id
    items = anne.conversations.items.list(conversation.id, order="asc", limit=3)
    assert [item.type for item in items.data] == ["message"] * 3 and items.has_more
    every = list(anne.conversations.items.list(conversation.id, order="asc", limit=1))
    assert [item.role for item in every] == ["user", "assistant"] * 2
    assert anne.conversations.retrieve(conversation.id).metadata == {"about": "bread"}
    assert anne.conversations.delete(conversation.id).deleted
    assert not served.hub.held
    with pytest.raises(openai.NotFoundError) as raised:
        anne.responses.create(model=NAME, input="three", conversation=conversation.id)
    assert raised.value.code == "conversation_not_found"


def test_deleting_a_conversation_removes_its_sessions(anne: OpenAI, served: Running) -> None:
    """Failure test 21, as far as HTTP has a part in it."""
    conversation = anne.conversations.create()
    for text in ("one", "fork", "two"):
        anne.responses.create(model=NAME, input=text, conversation=conversation.id)
    assert served.hub.asked[-1].session == f"{conversation.id} forked"
    assert len(served.hub.held) == 2
    assert set(conversation.to_dict()) == {"id", "object", "created_at", "metadata"}
    anne.conversations.delete(conversation.id)
    assert not served.hub.held


def test_conversation_items_are_added_and_deleted(anne: OpenAI, served: Running) -> None:
    conversation = anne.conversations.create(items=[{"role": "user", "content": "a"}])
    added = anne.conversations.items.create(
        conversation.id, items=[{"role": "user", "content": "b"}]
    )
    anne.responses.create(model=NAME, input="c", conversation=conversation.id)
    assert sent(served) == ["user: a", "user: b", "user: c"]
    anne.conversations.items.delete(added.data[0].id, conversation_id=conversation.id)
    anne.responses.create(model=NAME, input="d", conversation=conversation.id)
    assert sent(served) == ["user: a", "user: c", "assistant: You said: c ", "user: d"]
    with pytest.raises(openai.NotFoundError):
        anne.conversations.items.retrieve(added.data[0].id, conversation_id=conversation.id)


def test_previous_response_id_continues_or_forks_the_session(anne: OpenAI, served: Running) -> None:
    first = anne.responses.create(model=NAME, input="one")
    second = anne.responses.create(model=NAME, input="fork", previous_response_id=first.id)
    assert served.hub.asked[-1].session == "session-0"
    anne.responses.create(
        model=NAME, input=[{"role": "user", "content": "other"}], previous_response_id=first.id
    )
    assert sent(served) == ["user: one", "assistant: You said: one ", "user: other"]
    anne.responses.create(model=NAME, input="three", previous_response_id=second.id)
    assert served.hub.asked[-1].session == "session-0 forked"
    assert [line.split()[-1] for line in sent(served)] == ["one", "one", "fork", "fork", "three"]
    assert anne.responses.retrieve(second.id).output_text == "You said: fork "
    assert [item.type for item in anne.responses.input_items.list(second.id)] == ["message"]
    anne.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as raised:
        anne.responses.create(model=NAME, input="four", previous_response_id=second.id)
    assert raised.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        anne.responses.create(model=NAME, input="x", previous_response_id="a", conversation="b")


def test_response_with_store_false_is_not_kept(anne: OpenAI, served: Running) -> None:
    response = anne.responses.create(model=NAME, input="one", store=False)
    with pytest.raises(openai.NotFoundError):
        anne.responses.retrieve(response.id)


def test_response_is_streamed(anne: OpenAI, served: Running) -> None:
    with anne.responses.stream(model=NAME, input="long") as stream:
        events = list(stream)
    final = events[-1].response
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == list(range(len(numbers)))
    assert final.output_text == "You said: long "
    assert final.status == "incomplete" and final.incomplete_details is not None
    assert final.incomplete_details.reason == "max_output_tokens"
    assert anne.responses.retrieve(final.id).output_text == final.output_text
    broken = list(anne.responses.create(model=NAME, input="break", stream=True))
    assert broken[-1].type == "response.failed"
    assert broken[-1].response.error is not None


@pytest.mark.failure(number=18)
def test_retried_request_is_not_a_second_turn(
    http: httpx2.Client, anne: OpenAI, served: Running
) -> None:
    """Failure test 18: a client that has lost the answer asks once more by itself."""
    conversation = anne.conversations.create()
    body = {"model": NAME, "input": "one", "conversation": conversation.id}
    first = http.post("/v1/responses", json=body).json()
    retried = {"x-stainless-retry-count": "1"}
    assert http.post("/v1/responses", json=body, headers=retried).json() == first
    assert http.post("/v1/responses", json=body).json()["id"] != first["id"]
    text = http.post("/v1/responses", json={**body, "stream": True}, headers=retried).text
    assert first["id"] not in text  # asked otherwise: another request
    assert len(served.hub.asked) == 3


@pytest.mark.extended
def test_conversations_survive_a_restart(tmp_path: Path) -> None:
    """Failure test 8, as far as HTTP has a part in it."""
    for turn in ("one", "two"):
        archive = Archive(tmp_path / "deep" / "archive.sqlite")
        with running(LoopbackAuth(), archive=archive) as served:
            with OpenAI(api_key="-", base_url=f"{served.url}/v1", max_retries=0) as client:
                if turn == "one":
                    name = client.conversations.create().id
                client.responses.create(model=NAME, input=turn, conversation=name)
                assert len(sent(served)) == (1 if turn == "one" else 3)


@pytest.mark.failure(number=10)
def test_archive_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "archive.sqlite"
    Archive(path).close()
    with closing(sqlite3.connect(path)) as base:
        assert base.execute("PRAGMA user_version").fetchall() == [(1,)]
        base.execute("PRAGMA user_version = 0")  # as the first version left it
    Archive(path).close()
    with closing(sqlite3.connect(path)) as base:
        base.execute("PRAGMA user_version = 7")
    with pytest.raises(StoreError, match="archive of version 7, this larder reads 1"):
        Archive(path)


def test_full_archive_evicts_the_oldest_responses() -> None:
    archive = Archive(limit_bytes=500)
    for number in range(10):
        archive.put("anne", RESPONSE, str(number), {"text": "x" * 100})
    archive.put("bob", RESPONSE, "0", {"text": "y"})
    kept = [n for n in range(10) if archive.get("anne", RESPONSE, str(n)) is not None]
    assert kept == [6, 7, 8, 9]
    assert archive.get("bob", RESPONSE, "0") == {"text": "y"}
    archive.close()


def test_concurrent_append_to_a_conversation_is_a_409() -> None:
    archive = Archive()
    archive.append("anne", "c", [ConversationItem("a", ChatMessage("user", "x"))], expected=0)
    with pytest.raises(ApiError) as raised:
        archive.append("anne", "c", [ConversationItem("b", ChatMessage("user", "y"))], expected=0)
    assert (raised.value.status, raised.value.code) == (409, "conversation_changed")
    assert [item.id for item in archive.items("anne", "c")] == ["a"]
    archive.close()


def test_damaged_archive_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "archive.sqlite"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(Damaged, match="archive.sqlite"):
        Archive(path)
