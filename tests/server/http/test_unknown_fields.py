"""Warnings about unknown fields inside a body, with their paths."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from larder.server import AnswerForm
from larder.server.http import json_body
from server.fake_engine_client import NAME
from server.http.running_server import Running

TEXT = {"type": "text", "text": "a"}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
CHAT = "chat/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": "a"}]} | fields


def of_messages(**fields: Any) -> dict[str, Any]:
    return chat(max_tokens=4) | fields


def of_responses(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "input": "a"} | fields


def warned_paths(http: httpx2.Client, path: str, body: dict[str, Any]) -> list[str]:
    """Paths in the warnings of an answer."""
    reply = http.post(f"/v1/{path}", json=body)
    assert reply.status_code == 200, reply.text
    warnings = reply.json().get("warnings", [])
    assert all(each.endswith("is no field of this endpoint and was ignored.") for each in warnings)
    return [each.split("'")[1] for each in warnings]


def user(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)} | fields


BODIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "message": (CHAT, chat(messages=[user(TEXT, name="Bo", frob=1)]), ["name", "frob"]),
    "part": (CHAT, chat(messages=[user(TEXT, TEXT | {"x": {"y": 1}})]), ["content.1.x"]),
    "options": (
        CHAT,
        chat(stream_options={"include_usage": True, "frob": 1}),
        ["stream_options.frob"],
    ),
    "format": (
        CHAT,
        chat(response_format={"type": "text", "frob": 1, "json_schema": {"x": 1}}),
        ["response_format.frob", "response_format.json_schema.x"],
    ),
    "completion": (
        "completions",
        {"model": NAME, "prompt": "a", "stream_options": {"frob": 1}},
        ["stream_options.frob"],
    ),
    "item": ("responses", of_responses(input=[user(TEXT, frob=1)]), ["input.0.frob"]),
    "item part": (
        "responses",
        of_responses(input=[user({"type": "input_text", "text": "a", "x": 1})]),
        ["input.0.content.0.x"],
    ),
    "text": (
        "responses",
        of_responses(text={"verbosity": "low", "format": {"type": "text", "x": 1}}),
        ["text.verbosity", "text.format.x"],
    ),
    "block": (
        "messages",
        of_messages(messages=[user(TEXT | {"frob": 1}, x=2)]),
        ["messages.0.content.0.frob", "messages.0.x"],
    ),
    "result": (
        "messages",
        of_messages(
            messages=[
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"any": 1}}],
                },
                user(
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "is_error": True,
                        "content": [TEXT | {"frob": 1}],
                    }
                ),
            ]
        ),
        ["messages.1.content.0.is_error", "messages.1.content.0.content.0.frob"],
    ),
    "system": (
        "messages",
        of_messages(system=[TEXT | {"frob": 1}], output_config={"effort": "low"}),
        ["system.0.frob", "output_config.effort"],
    ),
}


@pytest.mark.parametrize("case", BODIES)
def test_unknown_nested_fields_are_reported_with_paths(
    http: httpx2.Client, served: Running, case: str
) -> None:
    path, body, names = BODIES[case]
    found = warned_paths(http, path, body)
    assert len(found) == len(names)
    assert all(any(each.endswith(name) for each in found) for name in names), found


def test_streams_and_token_counts_report_unknown_fields(
    http: httpx2.Client, served: Running
) -> None:
    body = chat(messages=[user(TEXT | {"frob": 1})], stream=True)
    assert "'messages.0.content.0.frob'" in http.post(f"/v1/{CHAT}", json=body).text
    counted = of_messages(messages=[user(TEXT | {"frob": 1})])
    del counted["max_tokens"]
    assert warned_paths(http, "messages/count_tokens", counted) == ["messages.0.content.0.frob"]


def test_echoed_answers_and_nulls_are_not_reported(http: httpx2.Client, served: Running) -> None:
    answer = {"role": "assistant", "content": "b", "refusal": None, "annotations": []}
    answer |= {"reasoning_content": "why", "tool_calls": [CALL], "audio": None}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    asked = {"role": "user", "content": "a"}
    assert not warned_paths(http, CHAT, chat(messages=[asked, answer, result]))
    first = http.post("/v1/responses", json=of_responses()).json()
    assert not warned_paths(http, "responses", of_responses(input=[*first["output"], asked]))
    whole = http.post("/v1/messages", json=of_messages()).json()
    message = {"role": "assistant", "content": whole["content"]}
    cached = user(TEXT | {"cache_control": {"type": "ephemeral"}})
    assert not warned_paths(http, "messages", of_messages(messages=[asked, message, cached]))


def test_reported_unknown_fields_are_bounded(http: httpx2.Client, served: Running) -> None:
    many = [user(TEXT | {f"x{part}": 1 for part in range(9)}) for _ in range(9)]
    found = warned_paths(http, CHAT, chat(messages=many))
    assert len(found) == 16 and found[9] == "messages.1.content.0.x0"
    long = {"role": "user", "content": "a", "y" * 5000: 1}
    [only] = warned_paths(http, CHAT, chat(messages=[long]))
    assert only.startswith("messages.0.yyy") and len(only) == 200


def test_long_bodies_report_the_same_unknown_fields(
    http: httpx2.Client, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [TEXT | {"unset": None}, TEXT | {"frob": 1, "null": "null"}]
    body = chat(messages=[user(*parts)], top=1, none=None)
    long = {**body, "messages": [user(*parts, TEXT | {"text": "n: " * 1000})]}
    monkeypatch.setattr(json_body, "MAPPING_BYTES", 1000)
    assert len(json.dumps(body)) < json_body.MAPPING_BYTES < len(json.dumps(long))
    names = ["top", "messages.0.content.1.frob", "messages.0.content.1.null"]
    assert warned_paths(http, CHAT, body) == warned_paths(http, CHAT, long) == names
    strings = 24  # names and values
    monkeypatch.setattr(json_body, "MAX_STRINGS", strings - 1)
    refused = http.post(f"/v1/{CHAT}", json=long)
    assert refused.status_code == 400 and "more than 23 names" in refused.text
    monkeypatch.setattr(json_body, "MAX_STRINGS", strings)
    assert warned_paths(http, CHAT, long) == names
    monkeypatch.setattr(json_body, "MAX_STRINGS", 3)
    nulls = user({"unset": None} | TEXT, TEXT | {"text": 'n, ","x": null' * 200, "none": None})
    assert not warned_paths(http, CHAT, {"first": None, **chat(messages=[nulls]), "last": None})
    for place in ({"top": 1}, {"messages": [user(TEXT | {"text": "n" * 2000, "frob": 1})]}):
        assert http.post(f"/v1/{CHAT}", json=chat(messages=[nulls]) | place).status_code == 400


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (b'{"a": null}', b"{}"),
        (b'{"a":null, "b":1 , "c" : null}', b'{ "b":1 }'),
        (rb'{"b":"a,\",\"x\":null","c,":null}', rb'{"b":"a,\",\"x\":null"}'),
        (b'[null, {"b": [null], "c": "null"}]', b'[null, {"b": [null], "c": "null"}]'),
    ],
)
def test_null_fields_are_removed(text: bytes, left: bytes) -> None:
    assert json_body.without_nulls(text) == left


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (rb'{"a":1,"b" :{"c":2}}', 3),
        (rb'["a\":", "b\":", "c: d"]', 3),
        (rb'{"a\\":1,"b\\" : ":\"c: d"}', 3),
    ],
)
def test_string_count_is_bounded_by_quotation_marks(text: bytes, count: int) -> None:
    assert json_body.most_strings(text) == count
    assert json_body.most_strings(rb'["\\\""]') >= 1  # an upper bound


def test_unknown_fields_of_tools_are_reported(
    http: httpx2.Client, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = AnswerForm(tool_parser="hermes")
    model = replace(served.hub.models()[0], takes_tools=True, answer_form=form)
    monkeypatch.setattr(served.hub, "models", lambda: (model,))
    tools: list[Any] = [FUNCTION | {"strict": True, "frob": 1}]
    found = warned_paths(http, "responses", of_responses(tools=tools, tool_choice="none"))
    assert found == ["tools.0.frob"]
    tools = [{"name": "f", "input_schema": {}, "cache_control": {}, "x": 1}]
    choice = {"type": "none", "y": 1}
    found = warned_paths(http, "messages", of_messages(tools=tools, tool_choice=choice))
    assert sorted(found) == ["tool_choice.y", "tools.0.x"]


def test_tool_call_of_an_unsupported_type_is_refused(http: httpx2.Client, served: Running) -> None:
    answer = {"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}
    reply = http.post(f"/v1/{CHAT}", json=chat(messages=[answer]))
    assert reply.status_code == 400 and "tool_calls.0.type" in reply.text
