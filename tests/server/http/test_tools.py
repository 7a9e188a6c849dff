"""Tool loops over HTTP with a scripted model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from server.http.scripted_model import TEMPLATE, TOOL, Write, call_text, client_of, served

CALL: Any = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
NEGATED: Any = {"type": "function", "function": {"name": "deny", "parameters": {"not": {}}}}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    yield from client_of(served(reasoning_parser="qwen3"))


def asked(client: OpenAI, messages: list[Any], **more: Any) -> Any:
    given: Any = {"model": "characters", "tools": [TOOL]} | more
    return client.chat.completions.create(messages=messages, **given)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_tool_call_is_parsed_from_the_answer(client: OpenAI, write: Write) -> None:
    write("I look." + call_text(at="a", n=1.0))
    [choice] = asked(client, [user("What is there?")]).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "look")
    assert json.loads(call.function.arguments) == {"at": "a", "n": 1}


@pytest.mark.extended
def test_tool_call_is_streamed(client: OpenAI, write: Write) -> None:
    write("<think>\nHm.\n</think>\n\nI look." + call_text(at="a") + call_text(at="b"))
    with client.chat.completions.stream(
        model="characters",
        messages=[user("Hello")],
        tools=[TOOL],  # pyright: ignore
    ) as stream:
        deltas = [event.chunk.choices for event in stream if event.type == "chunk"]
        [choice] = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert [json.loads(c.function.arguments)["at"] for c in choice.message.tool_calls or ()] == [
        "a",
        "b",
    ]
    result = [c.delta.model_extra for [c] in deltas if c.delta.model_extra]
    assert "".join(extra.get("reasoning_content", "") for extra in result) == "Hm."


@pytest.mark.extended
def test_malformed_streamed_call_keeps_the_finish_reason(client: OpenAI, write: Write) -> None:
    """A client that hears `tool_calls` would run the call, whose arguments are no JSON."""
    broken = ('{"name": "look", "arguments": {"at": }}', '{"name": "look", "arguments": {"at')
    for number, text in enumerate(broken):
        answer = f"I look.<tool_call>{text}"
        for new_tokens, expected in ((None, "stop"), (len(answer) - 1, "length")):
            write(answer)
            messages = [user(f"Look {number} {expected}.")]
            more = {} if new_tokens is None else {"max_tokens": new_tokens}
            *_, last = asked(client, messages, stream=True, **more)
            assert [choice.finish_reason for choice in last.choices] == [expected]
            write(answer)
            names = {"parameters": "input_schema"}
            tool = {names.get(key, key): value for key, value in TOOL["function"].items()}
            given = {"model": "characters", "tools": [tool], "stream": True, "messages": messages}
            given |= {"max_tokens": new_tokens or len(answer) + 9}
            reply = httpx2.post(f"{client.base_url}messages", json=given, timeout=60)
            [ending] = re.findall(r'"stop_reason":"(\w+)"', reply.text)
            assert ending == {"stop": "end_turn", "length": "max_tokens"}[expected]


@pytest.mark.extended
@pytest.mark.parametrize("is_streamed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ten_step_tool_loop_reuses_one_session(
    client: OpenAI, write: Write, is_streamed: bool
) -> None:
    """The client leaves reasoning out, spells arguments otherwise and swaps results: nothing is
    read again."""
    messages, cached, sessions = [user(f"Look around, {is_streamed}.")], 0, set[str]()
    for step in range(10):
        write(f"<think>\nStep {step}.\n</think>\n\n" + call_text(at=str(step), n=1.0) + call_text())
        if is_streamed:
            parts = list(
                asked(client, messages, stream=True, stream_options={"include_usage": True})
            )
            usage, kv = parts[-1].usage, parts[-1].model_extra["kv"]
            deltas = [c for p in parts for e in p.choices for c in e.delta.tool_calls or ()]
            calls = [delta for delta in deltas if delta.id]
            assert len(deltas) > 4 + len(str(step))  # arguments come as they are written
        else:
            result = asked(client, messages)
            usage, kv, calls = (
                result.usage,
                result.model_extra["kv"],
                result.choices[0].message.tool_calls,
            )
        assert usage.prompt_tokens_details.cached_tokens > cached or not step
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached + 90 > usage.prompt_tokens or not step
        sessions.add(kv["session"])
        first = {"name": "look", "arguments": f'{{"at":"{step}","n":1}}'}
        second = {"name": "look", "arguments": "{ }"}
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": call.id, "type": "function", "function": function}
                    for call, function in zip(calls, (first, second), strict=True)
                ],
            },
            {"role": "tool", "tool_call_id": calls[1].id, "content": "two"},
            {"role": "tool", "tool_call_id": calls[0].id, "content": "one"},
        ]
    assert len(sessions) == 1
    write("That is all.")
    last = asked(client, messages)
    assert last.choices[0].message.content == "That is all."
    assert last.model_extra["kv"]["session"] in sessions


def test_tool_calls_without_a_cache_are_rendered_by_the_template(
    client: OpenAI, write: Write
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}
    write("So.")
    result = asked(
        client,
        [
            user("Fresh?"),
            {"role": "assistant", "content": "Yes.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "ok"},
        ],
    )
    rendered = (
        f"{json.dumps([TOOL])}[user]Fresh?.[assistant]Yes.<tool_call>"
        '{"name": "look", "arguments": {"at": "x"}}</tool_call>.[tool]ok.[assistant]'
    )
    assert result.usage.prompt_tokens == len(rendered)


@pytest.mark.extended
def test_tool_choice_limits_calls(client: OpenAI, write: Write) -> None:
    write(call_text(at="a") + call_text(at="b"))
    result = asked(client, [user("One")], parallel_tool_calls=False)
    assert len(result.choices[0].message.tool_calls) == 1
    write(call_text(at="a"))
    [choice] = asked(client, [user("None")], tool_choice="none").choices
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert choice.message.content == call_text(at="a")


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0 must be"),
        ({"tools": [TOOL, TOOL]}, "two tools of one name"),
        (
            {"tools": [NEGATED], "tool_choice": "required"},
            "parameters of the tool 'deny': .*not.*: leave that part out.* tool_choice: auto",
        ),
        ({"tool_choice": "must"}, "tool_choice must be none, auto, required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "name a function of tools",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice needs tools"),
        (
            {"messages": [user("a"), {"role": "tool", "tool_call_id": "x", "content": "b"}]},
            "answers no call",
        ),
        (
            {
                "messages": [
                    user("a"),
                    {"role": "assistant", "content": "", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "1", "content": "b"},
                    {"role": "tool", "tool_call_id": "1", "content": "c"},
                ]
            },
            "another answers",
        ),
        ({"messages": [{"role": "robot", "content": "a"}]}, "role"),
    ],
)
def test_invalid_tool_requests_are_refused(
    client: OpenAI, more: dict[str, Any], error: str
) -> None:
    more = dict(more)
    with pytest.raises(openai.BadRequestError, match=error):
        asked(client, more.pop("messages", [user("Hello")]), **more)


@pytest.mark.extended
def test_models_without_tool_template_or_parser_refuse_tools() -> None:
    plain = TEMPLATE.replace("{% if tools %}{{ tools | tojson }}{% endif %}", "")
    for template, parser, error in (
        (plain, "hermes", "ignores tools"),
        (TEMPLATE.replace("tool_call>", "call>"), None, "--tool-call-parser"),
    ):
        for client in client_of(served(template, tool_parser=parser)):
            with pytest.raises(openai.BadRequestError, match=error):
                asked(client, [user("Hello")])


@pytest.mark.extended
def test_forced_tool_call_matches_its_schema() -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    for client in client_of(served()):
        for choice in ("required", {"type": "function", "function": {"name": "look"}}):
            schema = {
                "type": "object",
                "properties": {"at": {"enum": ["x", "y"]}},
                "required": ["at"],
            }
            tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
            result = asked(
                client, [user("Hello")], tools=[tool], tool_choice=choice, parallel_tool_calls=False
            )
            [call] = result.choices[0].message.tool_calls
            assert result.choices[0].finish_reason == "tool_calls"
            assert json.loads(call.function.arguments)["at"] in ("x", "y")


def test_allowed_tools_force_a_call_of_one_of_them() -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "wait", "go")]
    allowed = {"mode": "required", "tools": [tools[1]]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    one = {"tools": tools, "parallel_tool_calls": False}
    for client in client_of(served()):
        [result] = asked(client, [user("Hello")], tool_choice=choice, **one).choices
        [call] = result.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("wait", "{}")
        for wrong in ({"mode": "auto"}, {"tools": [TOOL | {"function": {"name": "x"}}]}):
            choice = {"type": "allowed_tools", "allowed_tools": allowed | wrong}
            with pytest.raises(openai.BadRequestError, match="must have the mode required"):
                asked(client, [user("Hello")], tool_choice=choice, **one)


def in_messages(client: OpenAI, messages: list[Any], **more: Any) -> httpx2.Response:
    tool = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
    body = {"model": "characters", "max_tokens": 300, "messages": messages, "tools": [tool]} | more
    url = str(client.base_url).removesuffix("/") + "/messages"
    return httpx2.post(url, json=body, timeout=30)


@pytest.mark.extended
@pytest.mark.parametrize("is_streamed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_messages_tool_loop_reuses_one_session(
    client: OpenAI, write: Write, is_streamed: bool
) -> None:
    messages, cached, sessions = [user(f"Look at this, {is_streamed}.")], 0, set[str]()
    for step in range(4):
        write(f"<think>\nHm {step}.\n</think>\n\nI look." + call_text(at=str(step)) + call_text())
        response = in_messages(client, messages, stream=is_streamed)
        result = streamed_message(response) if is_streamed else response.json()
        assert result["stop_reason"] == "tool_use"
        assert result["usage"]["cache_read_input_tokens"] > cached or not step
        cached = result["usage"]["cache_read_input_tokens"]
        sessions.add(result["kv"]["session"])
        thought, text, first, second = result["content"]
        assert (thought["type"], thought["thinking"]) == ("thinking", f"Hm {step}.")
        assert (text["type"], text["text"]) == ("text", "I look.")
        assert (first["name"], first["input"]) == ("look", {"at": str(step)})
        results = [
            {"type": "tool_result", "tool_use_id": second["id"], "content": "two"},
            {
                "type": "tool_result",
                "tool_use_id": first["id"],
                "content": [{"type": "text", "text": "one"}],
            },
        ]
        messages += [
            {"role": "assistant", "content": result["content"]},
            {"role": "user", "content": results},
        ]
    assert len(sessions) == 1
    write("Done.")
    last = in_messages(client, messages).json()
    assert last["content"] == [{"type": "text", "text": "Done."}]
    assert last["stop_reason"] == "end_turn" and last["kv"]["session"] in sessions
    counted = httpx2.post(
        str(client.base_url).removesuffix("/") + "/messages/count_tokens",
        json={"model": "characters", "messages": messages[:1]},
    )
    assert counted.json()["input_tokens"] == len(f"[user]Look at this, {is_streamed}..[assistant]")


def streamed_message(response: httpx2.Response) -> dict[str, Any]:
    """Message that the events of a stream describe."""
    result: dict[str, Any] = {}
    blocks = list[dict[str, Any]]()
    for frame in response.text.split("\n\n")[:-1]:
        event = json.loads(frame.split("\n")[1].removeprefix("data: "))
        kind, delta = event["type"], event.get("delta", {})
        if kind == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": "", "is_open": True})
        elif kind == "content_block_delta":
            block = blocks[event["index"]]
            assert block["is_open"]
            for field, name in (
                ("text", "text"),
                ("thinking", "thinking"),
                ("json", "partial_json"),
            ):
                block[field] = block.get(field, "") + delta.get(name, "")
        elif kind == "content_block_stop":
            block = blocks[event["index"]]
            block["is_open"] = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"])
        elif kind == "message_delta":
            result = delta | {"usage": event["usage"], "kv": event["kv"]}
    assert not any(block.pop("is_open") for block in blocks)
    drop = ("json",)
    return result | {"content": [{k: v for k, v in b.items() if k not in drop} for b in blocks]}


@pytest.mark.extended
def test_messages_tool_choice_limits_calls(client: OpenAI, write: Write) -> None:
    write(call_text(at="a") + call_text(at="b"))
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    result = in_messages(client, [user("One")], tool_choice=choice).json()
    assert [block["type"] for block in result["content"]] == ["tool_use"]
    refused = in_messages(client, [user("One")], tool_choice={"type": "tool", "name": "x"})
    assert refused.status_code == 400 and "tool_choice" in refused.json()["error"]["message"]
    for choice in ({"type": []}, {"type": "robot"}):
        assert in_messages(client, [user("One")], tool_choice=choice).status_code == 400
    deep: Any = {"a": [[{"b": None}]]}
    write("Done.")
    messages = [
        user("Deep"),
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "look", "input": deep}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1"},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    assert in_messages(client, messages).json()["content"][0]["text"] == "Done."
    between = [*messages[:2], {"role": "system", "content": "Be brief."}, messages[2]]
    refused = in_messages(client, between)
    assert refused.status_code == 400
    assert "between a tool_use and its tool_result" in refused.json()["error"]["message"]
