"""Anthropic's messages endpoint: answers, streams, token counts and refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from larder.server import ChatMessage
from server.fake_engine_client import NAME
from server.http.conftest import ANNE
from server.http.running_server import Running

HELLO = [{"role": "user", "content": "hello there"}]


def sent(http: httpx2.Client, path: str = "/v1/messages", **body: Any) -> httpx2.Response:
    given = {"model": NAME, "max_tokens": 50, "messages": HELLO} | body
    return http.post(path, json=given)


def events(response: httpx2.Response) -> list[tuple[str, dict[str, Any]]]:
    found = list[tuple[str, dict[str, Any]]]()
    for frame in response.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        result = json.loads(data.removeprefix("data: "))
        assert result["type"] == name.removeprefix("event: ")
        found.append((result["type"], result))
    return found


def test_message_is_answered_with_usage(http: httpx2.Client, served: Running) -> None:
    result = sent(http, temperature=0.5, top_k=3, stop_sequences=["END"]).json()
    assert result["content"] == [{"type": "text", "text": "You said: hello there "}]
    assert (result["type"], result["role"], result["model"]) == ("message", "assistant", NAME)
    assert (result["stop_reason"], result["stop_sequence"]) == ("end_turn", None)
    usage = result["usage"]
    assert usage["input_tokens"] == 0 and usage["output_tokens"] == 4
    assert usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == 9
    asked = served.hub.asked[-1]
    assert (asked.max_new_tokens, asked.stop, asked.sampling.top_k) == (50, ("END",), 3)


def test_system_prompt_and_content_blocks_become_turns(
    http: httpx2.Client, served: Running
) -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        *HELLO,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": blocks},
    ]
    marked = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    for system in ("Be brief.", marked):
        assert sent(http, system=system, messages=messages).status_code == 200
        assert served.hub.asked[-1].turns == (
            ChatMessage("system", "Be brief."),
            ChatMessage("user", "hello there"),
            ChatMessage("assistant", "ab"),
            ChatMessage("user", "ab"),
        )


def test_unusual_roles_of_claude_code_are_accepted(http: httpx2.Client, served: Running) -> None:
    messages = [{"role": role, "content": f"{role}."} for role in ("ctx", "msg", "system", "user")]
    assert sent(http, messages=messages).status_code == 200
    result = [(turn.role, turn.text) for turn in served.hub.asked[-1].turns]
    assert result == [("user", "ctx."), ("user", "msg."), ("system", "system."), ("user", "user.")]
    assert sent(http, messages=[{"role": "tool", "content": "x"}]).status_code == 400


def test_message_is_streamed_as_events(http: httpx2.Client, served: Running) -> None:
    result = events(sent(http, stream=True))
    names = [name for name, _ in result]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert "".join(e["delta"]["text"] for n, e in result if n == "content_block_delta") == (
        "You said: hello there "
    )
    assert result[0][1]["message"]["content"] == []
    assert result[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    usage = result[-2][1]["usage"]
    assert usage["output_tokens"] == 4 and usage["input_tokens"] == 0
    assert usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == 9
    assert not any(result[0][1]["message"]["usage"].values())


def test_stop_reasons_of_truncated_and_failed_answers(http: httpx2.Client, served: Running) -> None:
    long = [{"role": "user", "content": "long"}]
    assert sent(http, messages=long).json()["stop_reason"] == "max_tokens"
    broken = events(sent(http, messages=[{"role": "user", "content": "break"}], stream=True))
    assert broken[-1] == (
        "error",
        {"type": "error", "error": {"type": "overloaded_error", "message": "It broke."}},
    )


def test_count_tokens_runs_no_model(http: httpx2.Client, served: Running) -> None:
    result = http.post("/v1/messages/count_tokens", json={"model": NAME, "messages": HELLO})
    assert result.json() == {"input_tokens": len("hello there")}
    assert served.hub.asked == []


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ({"model": "other"}, 404, "not_found_error", "no model 'other'"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "ignores tools"),
        (
            {"tools": [{"name": "f", "type": "bash_20250124"}]},
            400,
            "invalid_request_error",
            "tools.0",
        ),
        ({"thinking": {"type": "enabled"}}, 400, "invalid_request_error", "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, 400, "invalid_request_error", "json_sch"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            400,
            "invalid_request_error",
            "answers no tool_use",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}
                ]
            },
            400,
            "invalid_request_error",
            "nothing is fetched",
        ),
        (
            {"messages": [{"role": "user", "content": "refuse slow 429"}]},
            429,
            "rate_limit_error",
            "",
        ),
    ],
)
def test_invalid_messages_are_refused(
    http: httpx2.Client, served: Running, body: dict[str, Any], status: int, kind: str, message: str
) -> None:
    response = sent(http, **body)
    assert response.status_code == status
    result = response.json()
    assert result["type"] == "error" and result["error"]["type"] == kind
    assert message in result["error"]["message"]


def test_api_key_header_admits_its_tenant(served: Running) -> None:
    body = {"model": NAME, "max_tokens": 5, "messages": HELLO}
    with httpx2.Client(base_url=served.url) as client:
        refused = client.post("/v1/messages", json=body, headers={"x-api-key": "sk-nobody-0123456"})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        admitted = client.post("/v1/messages", json=body, headers={"x-api-key": ANNE})
        assert admitted.status_code == 200
    assert served.hub.asked[-1].tenant == "anne"
