"""Tools, formats and reasoning of `/v1/responses` over a scripted model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from server.http.scripted_model import TOOL, Write, call_text, client_of, served

FLAT: Any = {"type": "function", "strict": False, **TOOL["function"]}
MODEL = "characters"


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    yield from client_of(served(reasoning_parser="qwen3"))


def streamed(client: OpenAI, given: dict[str, Any]) -> Any:
    """Final response of a stream whose events are those of its items."""
    with client.responses.stream(**given) as stream:
        events = list(stream)
    result = [event.to_dict(warnings=False) for event in events]
    assert [event["sequence_number"] for event in result] == list(range(len(result)))
    final = events[-1].response
    joined, open_items = dict[str, str](), dict[int, str]()
    for event in result:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(open_items) and event["item"]["id"]
            open_items[event["output_index"]] = event["item"]["id"]
        elif kind.endswith(".delta"):
            assert event["item_id"] == open_items[event["output_index"]]
            joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done", "function_call_arguments.done"):
            assert joined[event["item_id"]] == event.get("text", event.get("arguments"))
        elif kind == "output_item.done":
            index = event["output_index"]
            assert event["item"]["id"] == final.output[index].id == open_items[index]
    assert len(final.output) == len(open_items)
    return final


@pytest.mark.extended
@pytest.mark.parametrize(
    ("way", "is_streamed"), [("input", True), ("previous", False), ("conversation", True)]
)
def test_tool_loop_reuses_one_session(
    client: OpenAI, write: Write, way: str, is_streamed: bool
) -> None:
    items: list[Any] = [{"role": "user", "content": f"Look around, {way} {is_streamed}."}]
    more: dict[str, Any] = {}
    if way == "conversation":
        more = {"conversation": client.conversations.create().id}
    new, sessions, cached = items, set[str](), 0
    for step in range(2):
        write(f"<think>\nStep {step}.\n</think>\n\nI look." + call_text(at=str(step)) + call_text())
        given = {"model": MODEL, "input": new, "tools": [FLAT], **more}
        result = streamed(client, given) if is_streamed else client.responses.create(**given)
        assert result.status == "completed" and result.output_text == "I look."
        thought, message, first, second = result.output
        assert (thought.type, thought.content[0].text) == ("reasoning", f"Step {step}.")
        assert (message.type, first.name) == ("message", "look")
        assert first.type == second.type == "function_call"
        assert json.loads(first.arguments) == {"at": str(step)} and second.arguments == "{}"
        assert result.usage.input_tokens_details.cached_tokens > cached or not step
        cached = result.usage.input_tokens_details.cached_tokens
        sessions.add(result.model_extra["kv"]["session"])
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": second.call_id, "output": "two"},
            {
                "type": "function_call_output",
                "call_id": first.call_id,
                "output": [{"type": "input_text", "text": "one"}],
            },
        ]
        if way == "input":
            items = [*items, *(item.to_dict() for item in result.output), *outputs]
            new = items
        else:
            new = outputs
            more |= {"previous_response_id": result.id} if way == "previous" else {}
    assert len(sessions) == 1
    write("Done.")
    last = client.responses.create(model=MODEL, input=new, tools=[FLAT], **more)
    assert last.output_text == "Done." and last.model_extra is not None
    assert last.model_extra["kv"]["session"] in sessions
    listed = client.responses.input_items.list(last.id, order="asc").data
    if way != "input":
        assert [item.type for item in listed] == ["function_call_output"] * 2
    if way == "conversation":
        every = client.conversations.items.list(more["conversation"], order="asc").data
        loop = ["message", "function_call", "function_call", *["function_call_output"] * 2]
        assert [item.type for item in every] == ["message", *loop * 2, "message"]


@pytest.mark.extended
def test_tool_choice_is_obeyed_and_truncated_calls_are_incomplete(
    client: OpenAI, write: Write
) -> None:
    write(call_text(at="a") + call_text(at="b"))
    result = client.responses.create(
        model=MODEL, input="One", tools=[FLAT], parallel_tool_calls=False
    )
    assert [item.type for item in result.output] == ["function_call"]
    assert result.parallel_tool_calls is False and result.tools[0].name == "look"  # pyright: ignore
    write(call_text(at="a"))
    result = client.responses.create(model=MODEL, input="No", tools=[FLAT], tool_choice="none")
    assert result.output_text == call_text(at="a")
    for is_streamed in (False, True):
        write(call_text(at="abcdefghi"))
        given = {"model": MODEL, "input": f"{is_streamed}", "tools": [FLAT]}
        given |= {"max_output_tokens": len(call_text(at="abcdefghi")) - len('"}}\n</tool_call>')}
        result = streamed(client, given) if is_streamed else client.responses.create(**given)
        [call] = result.output
        assert (result.status, call.status) == ("incomplete", "incomplete")
        assert call.arguments == '{"at": "abcdefghi'


@pytest.mark.extended
def test_malformed_tool_calls_are_text(client: OpenAI, write: Write) -> None:
    unnamed = '<tool_call>{"name": "", "arguments": {"a": 1}}</tool_call>'
    unclosed = '<tool_call>{"name": "look", "arguments": {"a": 1'
    for text, is_streamed in ((unnamed, True), (unnamed, False), (unclosed, False)):
        write(text)
        given = {"model": MODEL, "input": f"{text} {is_streamed}", "tools": [FLAT]}
        result = streamed(client, given) if is_streamed else client.responses.create(**given)
        assert (result.status, result.output_text) == ("completed", text)
        assert [item.type for item in result.output] == ["message"]


@pytest.mark.extended
def test_malformed_streamed_call_is_incomplete(client: OpenAI, write: Write) -> None:
    for broken in ('{"name": "look", "arguments": {"at": }}', '{"name": "look", "arguments": {"at'):
        write(f"I look.<tool_call>{broken}")
        given = {"model": MODEL, "input": broken, "tools": [FLAT]}
        result = streamed(client, given)
        message, call = result.output
        assert (message.status, call.status, result.status) == ("completed", *["incomplete"] * 2)
        assert result.incomplete_details.reason == "invalid_function_call"
        assert broken[broken.index('{"at') :].startswith(call.arguments)
        stored = client.responses.retrieve(result.id)
        assert (stored.status, stored.output[1].type) == ("incomplete", "function_call")
    write("I look." + call_text() + "<tool_call>{")
    result = streamed(client, {"model": MODEL, "input": "Whole", "tools": [FLAT]})
    assert result.status == "completed" and [item.type for item in result.output][1:] == [
        "function_call"
    ]


def test_forced_tool_calls_and_text_formats_yield_valid_json(client: OpenAI) -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")

    class Place(BaseModel):
        at: bool

    schema = {"type": "object", "properties": {"at": {"enum": ["x"]}}, "required": ["at"]}
    schema["additionalProperties"] = False
    tool = {"type": "function", "name": "look", "parameters": schema}
    for choice in ("required", {"type": "function", "name": "look"}):
        result: Any = client.responses.create(
            model=MODEL, input="Go", tools=[tool], tool_choice=choice, parallel_tool_calls=False
        )  # pyright: ignore[reportCallIssue, reportArgumentType]
        assert json.loads(result.output[0].arguments) == {"at": "x"}
    parsed = client.responses.parse(model=MODEL, input="Where?", text_format=Place)
    assert isinstance(parsed.output_parsed, Place)
    form: Any = {"format": {"type": "json_object"}, "verbosity": "low"}
    result = client.responses.create(model=MODEL, input="{", text=form, max_output_tokens=3)
    assert result.output_text.startswith("{") and "text.verbosity" in result.warnings[0]


CALL: Any = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
RESULT: Any = {"type": "function_call_output", "call_id": "1", "output": "b"}


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0 is no function"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0 must be"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [FLAT]}, "name a function"),
        ({"input": [RESULT]}, "answers no function_call"),
        ({"input": [CALL, RESULT, RESULT]}, "another answers"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "needs call_id and name"),
        ({"input": [{"type": "message", "content": "a"}]}, "has no role"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format: type must be"),
        ({"text": {"format": "json"}}, "text.format must be an object"),
        (
            {"input": [{**RESULT, "output": [{"type": "input_image", "image_url": "data:"}]}]},
            "texts alone",
        ),
    ],
)
def test_invalid_response_requests_are_refused(
    client: OpenAI, more: dict[str, Any], error: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=error):
        client.responses.create(**{"model": MODEL, "input": "Hello"} | more)


def test_images_are_refused_by_a_text_model(client: OpenAI) -> None:
    part = {"type": "input_image", "detail": "auto", "image_url": image_url()}
    message: Any = {"role": "user", "content": [{"type": "input_text", "text": "See"}, part]}
    with pytest.raises(openai.BadRequestError, match="only texts are read"):
        client.responses.create(model=MODEL, input=[message])


def image_url() -> str:
    from PIL import Image

    data = BytesIO()
    Image.new("RGB", (4, 4)).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
