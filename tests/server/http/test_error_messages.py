"""Error messages of the API: the wrong value, the rule and a way to correct it."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from server.fake_engine_client import NAME
from server.http.running_server import Running

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello."}]
JSON = {"content-type": "application/json"}


def message(reply: httpx2.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    return reply.json()["error"]["message"]


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/json"])
def test_missing_or_wrong_content_type_error_names_the_expected_type(
    http: httpx2.Client, served: Running, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    result = message(http.post(CHAT, content=b"{}", headers=headers), 415)
    assert (kind or "no type") in result and "content-type: application/json" in result


@pytest.mark.parametrize("content", [b"", b"null"])
def test_empty_body_has_its_own_message(
    http: httpx2.Client, served: Running, content: bytes
) -> None:
    result = message(http.post(CHAT, content=content, headers=JSON), 400)
    assert result == "The body is empty, or null: send a JSON object."


@pytest.mark.parametrize(
    ("path", "body", "message_part"),
    [
        (CHAT, {"stop": ["x"] * 17}, "stop: List should have at most 16 items"),
        (TEXT, {"prompt": ["x"] * 129}, "prompt: List should have at most 128 items"),
        (TEXT, {"prompt": ["x", 3]}, "prompt.1: Input should be a valid string"),
        (CHAT, {"stop": ""}, "stop: "),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "a"}]}]}, ".content: a part is"),
        (CHAT, {"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role: "),
        (CHAT, {"messages": [{"role": "bot", "content": "a"}]}, "'assistant' or 'tool'"),
        (CHAT, {"messages": [{"role": "user"}]}, "role user has no content: send a text"),
        (CHAT, {"guided_json": {}}, "guided_json is not supported: send structured_outputs."),
        (CHAT, {"functions": [{}]}, "functions is not supported: send tools."),
        (TEXT, {"use_beam_search": True}, "use_beam_search is not supported: leave it out."),
        (TEXT, {"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
        (CHAT, {"continue_final_message": True}, "continue_final_message is not supported"),
        (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template is not supported"),
        (CHAT, {"structured_outputs": {"choice": [1]}}, "choice must be a list of texts, got list"),
        (MESSAGES, {"tools": [{"name": "a b"}]}, "tools.0 must be {'name': ..., 'input_schema'"),
        (MESSAGES, {"tools": [{"name": "a", "input_schema": []}]}, "'input_schema': ...}, with"),
        (MESSAGES, {"tools": [{"name": "a", "type": "bash_1"}]}, "is of the type 'bash_1', but"),
        (MESSAGES, {"tool_choice": {"type": "must"}}, "tool_choice.type must be auto, any, none"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "x"}}, "with the name of one of tools"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "a"}]}]}, "send blocks of"),
    ],
)
def test_invalid_field_message_names_field_and_rule(
    http: httpx2.Client, served: Running, path: str, body: dict[str, Any], message_part: str
) -> None:
    whole = {"model": NAME, "max_tokens": 4, "messages": HELLO, "prompt": "x"}
    if path != TEXT:
        del whole["prompt"]
    error = message(http.post(path, json=whole | body), 400)
    assert message_part in error and "Value error" not in error
    assert not served.hub.asked


@pytest.mark.parametrize(
    ("name", "harmless"),
    [("skip_special_tokens", True), ("length_penalty", 1), ("use_beam_search", False)],
)
def test_unsupported_fields_with_default_values_are_accepted(
    http: httpx2.Client, served: Running, name: str, harmless: Any
) -> None:
    reply = http.post(CHAT, json={"model": NAME, "messages": HELLO, name: harmless})
    assert reply.status_code == 200 and "warnings" not in reply.json()


@pytest.mark.parametrize(
    ("schema", "is_left_out"),
    [({"type": "array", "uniqueItems": True}, True), ({"type": "frob"}, False)],
)
def test_unenforceable_schema_error_says_how_to_fix_it(
    http: httpx2.Client, served: Running, schema: dict[str, Any], is_left_out: bool
) -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": NAME, "messages": HELLO, "response_format": wanted}
    error = message(http.post(CHAT, json=body), 400)
    assert "leave that part out, or correct it" in error
    assert ("With strict: false it is left out." in error) is is_left_out


def test_404_names_the_api_description_and_405_the_allowed_method(
    http: httpx2.Client, served: Running
) -> None:
    assert "nothing at /v1/frob: GET /openapi.json" in message(http.get("/v1/frob"), 404)
    for wrong in (CHAT.removeprefix("/v1"), f"/v1{CHAT}"):
        assert f"send it to {CHAT}. The base URL" in message(http.post(wrong, json={}), 404)
    assert message(http.get(CHAT), 405) == f"GET is not allowed at {CHAT}: use POST."
    result = http.get(MESSAGES)
    assert result.json()["type"] == "error" and "use POST" in message(result, 405)


def test_missing_key_error_names_both_headers(served: Running) -> None:
    with httpx2.Client(base_url=served.url) as stranger:
        error = message(stranger.get("/v1/models"), 401)
    assert "Authorization: Bearer KEY" in error and "x-api-key: KEY" in error
