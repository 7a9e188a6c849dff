"""Anthropic's form of a conversation: `POST /v1/messages`, and the count of its tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field

from larder.core.errors import LarderError
from larder.engine.constraint import Constraint
from larder.server.answer_form import AnswerForm, ParsedAnswer, canonical_answer
from larder.server.api_errors import invalid_request
from larder.server.http.app_state import Unsupported, app_state
from larder.server.http.error_responses import MESSAGES_PATH, as_api_error, messages_error_body
from larder.server.http.image_parts import RequestImages, placed_mark
from larder.server.http.json_body import JsonObject
from larder.server.http.json_route import PromptRoute
from larder.server.http.protocol import (
    GenerationRequest,
    Stop,
    Text,
    Tokens,
    engine_request,
    kv_usage,
    new_id,
    session_hint,
    warnings_of,
)
from larder.server.http.streaming import (
    AnswerStream,
    EventStream,
    StreamIdle,
    collect_answer,
    sse_event,
    stream_answer,
)
from larder.server.http.structured import answer_constraint
from larder.server.http.tools import (
    AUTO,
    MAX_TOOLS,
    NAME_RULE,
    NONE,
    REQUIRED,
    AnswerParser,
    answer_rules,
    check_results_follow,
    checked_tools,
    is_tool_name,
    tool_variables,
    whole_call_json,
)
from larder.server.http.unknown_fields import BodyPart
from larder.server.operations import count_prompt
from larder.server.request import ChatMessage, Report
from larder.server.session_info import ServedModel
from larder.server.tool_parsers.base import ToolCall
from larder.session.transcript.chat_template import VARIABLES_ROLE

router = APIRouter(tags=["text"], route_class=PromptRoute, prefix=MESSAGES_PATH)
CACHE_CONTROL = frozenset({"cache_control"})  # not needed: every prefix is cached
CHOICE_FIELDS = ("type", "name", "disable_parallel_tool_use")
TOOL_FIELDS = ("type", "name", "description", "input_schema", *CACHE_CONTROL)
BLOCKS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
NO_USAGE = {"input_tokens": 0, "output_tokens": 0}


class ImageSource(BodyPart):
    """Data of an image."""

    type: Text
    media_type: Text | None = None
    data: Text | None = None

    @property
    def url(self) -> str:
        """Data URL of the image."""
        return f"data:{self.media_type};base64,{self.data}"


class ResultBlock(BodyPart):
    """Block of the result of a tool."""

    ignored_fields: ClassVar[frozenset[str]] = CACHE_CONTROL
    type: Literal["text"]
    text: Text


class ContentBlock(BodyPart):
    """Block of a message: text, image in base64, reasoning, call of a tool, or result of one."""

    # Those of reasoning are passed over with it.
    ignored_fields: ClassVar[frozenset[str]] = CACHE_CONTROL | {"thinking", "signature", "data"}
    type: Literal["text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: Text | None = None
    source: ImageSource | None = None
    id: Text = ""
    name: Text | None = None
    input: JsonObject = None
    tool_use_id: Text | None = None
    content: Text | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None

    @property
    def result(self) -> str:
        """Text of the result of a tool."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(each.text for each in content)


class SystemBlock(BodyPart):
    """Block of the system prompt."""

    ignored_fields: ClassVar[frozenset[str]] = CACHE_CONTROL
    type: Literal["text"]
    text: Text


def _known_blocks(content: Any) -> Any:
    """The content. Raise ValueError if a block has no known type, or lacks what its type has."""
    for block in content if isinstance(content, list) else ():
        if block.type not in BLOCKS:
            raise ValueError(
                f"a block is of type {block.type[:40]!r}: send blocks of the types "
                f"{', '.join(BLOCKS)}"
            )
        if block.type == "text" and block.text is None:
            raise ValueError("a block has no text: send one")
        if block.type == "image" and (block.source is None or block.source.type != "base64"):
            raise ValueError(
                "an image has no source of type base64, and nothing is fetched here: send "
                "{'type': 'base64', 'media_type': 'image/png', 'data': ...}"
            )
        if block.type == "tool_use" and block.name is None:
            raise ValueError("a block of type tool_use has no name: send that of its tool")
    return content


def _known_role(role: Any) -> Any:
    """Role of a message: Claude Code has two more for what it adds to those of the user."""
    return "user" if role in ("ctx", "msg") else role


class MessageParam(BodyPart):
    """One message of a conversation."""

    role: Annotated[Literal["user", "assistant", "system"], BeforeValidator(_known_role)]
    content: Annotated[
        Text | Annotated[list[ContentBlock], Field(fail_fast=True)], BeforeValidator(_known_blocks)
    ]

    @property
    def blocks(self) -> Sequence[ContentBlock]:
        """Blocks of the content."""
        if isinstance(self.content, str):
            return [ContentBlock(type="text", text=self.content)]
        return self.content

    def turns(self, ids: Sequence[str], images: RequestImages | None) -> list[ChatMessage]:
        """Messages in the form of the engine: results of tools are messages of their own.

        Args:
            ids: of the calls in the message before it, in order.

        Raises:
            ApiError: 400: an image that is not taken here or cannot be read, or a result that
                answers no call.
        """
        results, text = dict[int, str](), ""
        for block in self.blocks:
            if block.type != "tool_result":
                text += self._text(block, images)
            elif block.tool_use_id in ids and ids.index(block.tool_use_id) not in results:
                results[ids.index(block.tool_use_id)] = block.result
            else:
                raise invalid_request(
                    "A tool_result answers no tool_use of the message before it, or one that "
                    "another answers: send each result with the id of its call as tool_use_id.",
                    "messages",
                )
        calls = tuple(
            ToolCall.of(block.name or "", json.dumps(block.input or {}))
            for block in self.blocks
            if block.type == "tool_use"
        )
        if calls:
            text = canonical_answer(text, calls)
        outputs = [ChatMessage("tool", results[index]) for index in sorted(results)]
        return outputs if outputs and not text else [*outputs, ChatMessage(self.role, text)]

    @property
    def call_ids(self) -> list[str]:
        """Ids of the calls in the message."""
        return [block.id for block in self.blocks if block.type == "tool_use"]

    def _text(self, block: ContentBlock, images: RequestImages | None) -> str:
        if block.source is None:
            return block.text or ""
        return placed_mark(block.source.url, self.role, images)


class CountRequest(GenerationRequest):
    """A conversation whose tokens are counted."""

    json_fields: ClassVar[frozenset[str]] = frozenset(
        {"output_config", "metadata", "tools", "tool_choice"}
    )
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=10_000, fail_fast=True)]
    system: Text | Annotated[list[SystemBlock], Field(max_length=1000, fail_fast=True)] | None = (
        None
    )
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None

    def chat_tools(self, model: ServedModel) -> list[dict[str, Any]]:
        """Tools in the form of chat completions.

        Raises:
            ApiError: 400: as `checked_tools`.
        """
        self.warn_unknown(self.tool_choice, CHOICE_FIELDS, "tool_choice")
        for index, tool in enumerate((self.tools or ())[:MAX_TOOLS]):
            self.warn_unknown(tool, TOOL_FIELDS, f"tools.{index}")
        if not self.tools:
            return []
        tools = [_chat_tool(index, tool) for index, tool in enumerate(self.tools)]
        return checked_tools(tools, model)

    def turns(self, tools: Sequence[Any], images: RequestImages | None) -> tuple[ChatMessage, ...]:
        """Messages in the form of the engine, tools and the system prompt before them.

        Args:
            tools: in the form of chat completions.
            images: takes the images; None for a model without a vision tower.
        """
        system = self.system or ""
        if not isinstance(system, str):
            system = "\n".join(block.text for block in system)
        first = [ChatMessage("system", system)] if system else []
        if tools:
            variables = json.dumps(tool_variables(tools))
            first.insert(0, ChatMessage(VARIABLES_ROLE, variables))
        ids = list[str]()
        check_results_follow([(m.role, {b.type for b in m.blocks}) for m in self.messages])
        for message in self.messages:
            first += message.turns(ids, images)
            ids = message.call_ids
        return tuple(first)


class MessagesRequest(CountRequest):
    """A conversation to continue."""

    max_tokens: Tokens
    stop_sequences: Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None

    def constraint(self, unsupported: Unsupported) -> Constraint | None:
        """Constraint that the answer must match, by `output_config.format`.

        Raises:
            ApiError: 400 for a format that is malformed or cannot be enforced.
        """
        self.warn_unknown(self.output_config, ("format",), "output_config")
        wanted = (self.output_config or {}).get("format")
        if wanted is None:
            return None
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise invalid_request(
                "output_config.format must be of type json_schema, with a schema.", "output_config"
            )
        self.warn_unknown(wanted, ("type", "schema"), "output_config.format")
        schema = {"name": "answer", "schema": wanted.get("schema"), "strict": True}
        found = answer_constraint(
            {"type": "json_schema", "json_schema": schema},
            None,
            "output_config.format",
            unsupported,
        )
        for each in () if found is None else found.warnings:
            self.warn(f"output_config.format is not enforced here: {each[:200]}.")
        return found


@router.post("")
async def messages(http: HttpRequest, body: MessagesRequest) -> Response:
    """Answer a conversation, as one body or as a stream."""
    state, hint, images = app_state(http), session_hint(http, body), RequestImages()
    model = state.check_model(body.model)
    tools = body.chat_tools(model)
    turns = await run_in_threadpool(body.turns, tools, images if model.takes_images else None)
    given = body.tool_choice or {}
    choice = _chat_choice(given, tools)
    parallel, unsupported = not given.get("disable_parallel_tool_use"), state.settings.unsupported
    form, constraint = await answer_rules(body, tools, choice, parallel, model, unsupported)
    request = engine_request(
        http,
        state,
        body,
        hint.name,
        body.max_tokens,
        tuple(body.stop_sequences or ()),
        turns,
        constraint=constraint,
        images=images.files,
        answer_form=form,
    )
    answer = await stream_answer(http, state, request, hint.is_firm)
    head = {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model.answer_name,
    }
    if body.stream:
        return EventStream(_events(head, answer, form, warnings_of(body)))
    collected = await collect_answer(answer)
    parsed = form.parse(collected.text)
    response = {
        "usage": _usage(collected.report),
        "kv": kv_usage(collected.report),
        **warnings_of(body),
    }
    ending = _ending(collected.report, bool(parsed.calls))
    return JSONResponse({**head, "content": _content(parsed), **ending, **response})


@router.post("/count_tokens")
async def count_tokens(http: HttpRequest, body: CountRequest) -> JSONResponse:
    """Count the tokens of a conversation, up to the beginning of its answer."""
    state, images = app_state(http), RequestImages()
    body.check(app_state(http).settings.unsupported)
    model = state.check_model(body.model)
    tools = body.chat_tools(model)
    turns = await run_in_threadpool(body.turns, tools, images if model.takes_images else None)
    count = await run_in_threadpool(state.client.call, count_prompt, turns, images.files)
    return JSONResponse({"input_tokens": count, **warnings_of(body)})


async def _events(
    head: dict[str, Any], answer: AnswerStream, form: AnswerForm, warnings: dict[str, list[str]]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a streamed answer; an error is the last one."""
    # The numbers of tokens follow at the end.
    empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": NO_USAGE}
    yield _event("message_start", message={**head, **empty})
    parser, blocks = AnswerParser(form), _BlockEvents()
    try:
        async for item in answer:
            if isinstance(item, StreamIdle):
                yield _event("ping")
            elif isinstance(item, str):
                for event in blocks.of(parser.push(item)):
                    yield event
            elif isinstance(item, Report):
                for event in [*blocks.of(parser.finish()), *blocks.end()]:
                    yield event
                response = {"usage": _usage(item), "kv": kv_usage(item), **warnings}
                ending = _ending(item, parser.num_calls > 0 and not parser.is_broken)
                yield _event("message_delta", delta=ending, **response)
                yield _event("message_stop")
    except LarderError as error:
        yield sse_event(messages_error_body(as_api_error(error)), "error")


@dataclass
class _BlockEvents:
    """Events of the blocks of an answer.

    Args:
        index: of the open block; -1 before the first.
        kind: type of the open block; empty for none.
    """

    index: int = -1
    kind: str = ""

    def of(self, deltas: Sequence[dict[str, Any]]) -> list[bytes]:
        """Events of deltas in the form of chat completions."""
        events = list[bytes]()
        for delta in deltas:
            if text := delta.get("reasoning_content"):
                events += self._open("thinking", {"thinking": "", "signature": ""})
                events.append(self._delta("thinking_delta", thinking=text))
            if text := delta.get("content"):
                events += self._open("text", {"text": ""})
                events.append(self._delta("text_delta", text=text))
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "id" in call:
                    named = {"id": call["id"], "name": function["name"], "input": {}}
                    events += self._open("tool_use", named)
                if arguments := function["arguments"]:
                    events.append(self._delta("input_json_delta", partial_json=arguments))
        return events

    def end(self) -> list[bytes]:
        """Events that close the open block; an answer without any has an empty text."""
        events = self._open("text", {"text": ""}) if self.index < 0 else []
        if self.kind:
            events.append(_event("content_block_stop", index=self.index))
        self.kind = ""
        return events

    def _open(self, kind: str, content: dict[str, Any]) -> list[bytes]:
        if self.kind == kind and kind != "tool_use":
            return []
        events = self.end() if self.kind else []
        self.index, self.kind = self.index + 1, kind
        block = {"type": kind, **content}
        return [*events, _event("content_block_start", index=self.index, content_block=block)]

    def _delta(self, kind: str, **content: str) -> bytes:
        return _event("content_block_delta", index=self.index, delta={"type": kind, **content})


def _content(parsed: ParsedAnswer) -> list[dict[str, Any]]:
    """Blocks of a whole answer."""
    blocks = list[dict[str, Any]]()
    if parsed.reasoning:
        blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
    if parsed.content.strip() or not parsed.calls:
        blocks.append({"type": "text", "text": parsed.content})
    for call in parsed.calls:
        response = whole_call_json(call)
        named = {"id": response["id"], "name": call.name, "input": json.loads(call.arguments)}
        blocks.append({"type": "tool_use", **named})
    return blocks


def _chat_tool(number: int, tool: Any) -> dict[str, Any]:
    """Tool in the form of chat completions.

    Raises:
        ApiError: 400: it is none of the client's.
    """
    given = tool if isinstance(tool, dict) else {}
    if given.get("type", "custom") != "custom":
        raise invalid_request(
            f"tools.{number} is of the type {str(given['type'])[:40]!r}, but this server runs no "
            "tools of its own: send {'name': ..., 'input_schema': ...}.",
            "tools",
            "unsupported_parameter",
        )
    if not is_tool_name(given.get("name")) or not isinstance(
        given.get("input_schema"), dict | None
    ):
        raise invalid_request(
            f"tools.{number} must be {{'name': ..., 'input_schema': ...}}, with {NAME_RULE}.",
            "tools",
        )
    function = {name: tool[name] for name in ("name", "description") if name in tool}
    return {
        "type": "function",
        "function": {**function, "parameters": tool.get("input_schema") or {"type": "object"}},
    }


def _chat_choice(tool_choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Any:
    """Choice in the form of chat completions. Raise ApiError 400 if it names no tool."""
    kind, name = str(tool_choice.get("type", AUTO)), tool_choice.get("name")
    if kind == "tool" and any(tool["function"]["name"] == name for tool in tools):
        return {"type": "function", "function": {"name": name}}
    kinds = {"any": REQUIRED, AUTO: AUTO, NONE: NONE}
    if kind not in kinds:
        raise invalid_request(
            "tool_choice.type must be auto, any, none, or tool with the name of one of tools.",
            "tool_choice",
        )
    return kinds[kind]


def _event(name: str, **content: Any) -> bytes:
    return sse_event({"type": name, **content}, name)


def _usage(report: Report) -> dict[str, int]:
    """Token usage: input tokens are those that were neither cached nor are cached from now on."""
    return {
        "input_tokens": 0,
        "cache_read_input_tokens": report.cached_tokens,
        "cache_creation_input_tokens": report.prompt_tokens - report.cached_tokens,
        "output_tokens": report.new_tokens,
    }


def _ending(report: Report, has_calls: bool) -> dict[str, str | None]:
    """Reason for the end of the answer."""
    if has_calls and report.reason == "stop":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if report.matched_stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": report.matched_stop}
    reason = "max_tokens" if report.reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}
