"""LangChain's client against the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from server.fake_engine_client import NAME
from server.http.conftest import ANNE
from server.http.running_server import Running

if TYPE_CHECKING:  # seconds to import, which each worker would spend to collect the tests
    from langchain_openai import ChatOpenAI


def model(served: Running, **more: object) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    headers = {"x-session-id": "one"}
    return ChatOpenAI(
        model=NAME,
        api_key=ANNE,  # pyright: ignore[reportArgumentType]
        base_url=f"{served.url}/v1",
        default_headers=headers,
        max_retries=0,
        **more,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.extended
def test_usage_metadata_has_cached_tokens(served: Running) -> None:
    from langchain_core.messages import AIMessage

    talk = model(served)
    talk.invoke("hello")
    answer = talk.invoke([("system", "Be short."), ("user", "again")])
    assert isinstance(answer, AIMessage) and answer.content == "You said: again "
    assert answer.usage_metadata is not None
    details = answer.usage_metadata["input_token_details"]
    assert (details["cache_read"], details["cache_creation"]) == (8, 9)
    assert [turn.role for turn in served.hub.asked[-1].turns] == ["system", "user"]
    assert {asked.session for asked in served.hub.asked} == {"one"}


@pytest.mark.extended
def test_langchain_answer_is_streamed(served: Running) -> None:
    from langchain_core.messages import AIMessageChunk

    chunks = list(model(served, stream_usage=True).stream("hello"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert isinstance(whole, AIMessageChunk) and whole.content == "You said: hello "
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] == 3


@pytest.mark.extended
def test_responses_api_answers(served: Running) -> None:
    answer = model(served, use_responses_api=True).invoke("hello")
    assert answer.text == "You said: hello "
