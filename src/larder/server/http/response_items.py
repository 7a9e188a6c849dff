"""Items of responses and conversations: messages, calls of functions, their outputs, reasoning; and
the events that stream those of an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from larder.server.answer_form import canonical_answer
from larder.server.api_errors import invalid_request
from larder.server.http.archive import ConversationItem
from larder.server.http.image_parts import RequestImages
from larder.server.http.protocol import (
    IMAGE_PARTS,
    ContentPart,
    InputMessage,
    Text,
    known_parts,
    new_id,
)
from larder.server.request import ChatMessage
from larder.server.tool_parsers.base import ToolCall
from larder.session.transcript.chat_template import TOOL_ROLE, has_mark, split_marks

CALL, OUTPUT, MESSAGE, REASONING = ("function_call", "function_call_output", "message", "reasoning")
REASONING_PART = "reasoning_text"
PREFIXES = {CALL: "fc_", OUTPUT: "fco_"}
CONTENT_TYPES = {"assistant": "output_text"}
OutputEvent = tuple[str, dict[str, Any]]  # type and content
EMPTY_PARTS: Mapping[str, dict[str, Any]] = {
    MESSAGE: {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    REASONING: {"type": "reasoning_text", "text": ""},
}
TEXT_EVENTS = {MESSAGE: "response.output_text", REASONING: "response.reasoning_text"}
LOGPROBS: Mapping[str, dict[str, Any]] = {MESSAGE: {"logprobs": []}, REASONING: {}}


def _text_parts(output: Any) -> Any:
    """The output. Raise ValueError if a part of it is no text."""
    for part in output if isinstance(output, list) else ():
        if part.type in IMAGE_PARTS or part.text is None:
            raise ValueError("the output of a function holds texts alone: send input_text parts")
    return output


class ItemPart(ContentPart):
    """Part of an item's content."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs"})
    type: Literal[
        "text", "input_text", "output_text", "refusal", "image_url", "input_image", "reasoning_text"
    ]


def _item_parts(content: Any) -> Any:
    """The content. Raise ValueError if a part is no text, image or reasoning."""
    parts = content if isinstance(content, list) else ()
    known_parts([part for part in parts if part.type != REASONING_PART])
    return content


class ResponseInputItem(InputMessage):
    """Item of the input: message, call of a function, its output, or reasoning, which is passed
    over."""

    # Of items of an answer, which clients send back.
    ignored_fields: ClassVar[frozenset[str]] = frozenset(
        {"id", "status", "summary", "encrypted_content"}
    )
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Annotated[
        Text | Annotated[list[ItemPart], Field(fail_fast=True)] | None, BeforeValidator(_item_parts)
    ] = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text = ""
    output: Annotated[
        Text | Annotated[list[ContentPart], Field(fail_fast=True)] | None,
        BeforeValidator(_text_parts),
    ] = None

    def stored(self, images: RequestImages | None) -> ChatMessage:
        """Item in the form of the archive.

        Raises:
            ApiError: 400: a field of its type is missing, or an image is not taken here.
        """
        if self.type == MESSAGE:
            if self.role is None:
                raise _refused("A message of the input has no role: send user, assistant, ...")
            parts = () if self.content is None or isinstance(self.content, str) else self.content
            if any(part.type == REASONING_PART for part in parts):
                raise _refused("A message holds reasoning: send it as an item of its own.")
            return self.turn(images)
        if self.call_id is None or (self.type == CALL and self.name is None):
            raise _refused(f"An item {self.type} needs call_id{' and name' * (self.type == CALL)}.")
        if self.type == CALL:
            return stored_call(self.call_id, self.name or "", self.arguments)
        output = self.output or ""
        text = output if isinstance(output, str) else "".join(part.text or "" for part in output)
        return ChatMessage(OUTPUT, json.dumps({"call_id": self.call_id, "output": text}))


def stored_call(call_id: str, name: str, arguments: str) -> ChatMessage:
    """Call of a function in the form of the archive."""
    call = {"call_id": call_id, "name": name, "arguments": arguments}
    return ChatMessage(CALL, json.dumps(call))


def new_items(
    items: Sequence[InputMessage], images: RequestImages | None = None
) -> tuple[ConversationItem, ...]:
    """Items of a request with new ids.

    Args:
        images: takes the images; None where there may be none.
    """
    found = list[ConversationItem]()
    for item in items:
        if isinstance(item, ResponseInputItem) and item.type == REASONING:
            continue
        stored = item.stored(images) if isinstance(item, ResponseInputItem) else item.turn(images)
        found.append(ConversationItem(new_id(PREFIXES.get(stored.role, "msg_")), stored))
    return tuple(found)


def item_json(item: ConversationItem) -> dict[str, Any]:
    """Item as JSON. Of images only their indices are stored."""
    if item.turn.role in PREFIXES:
        fields = json.loads(item.turn.text)
        return {"id": item.id, "type": item.turn.role, "status": "completed", **fields}
    kind, text = CONTENT_TYPES.get(item.turn.role, "input_text"), item.turn.text
    content: list[dict[str, Any]] = []
    for index, part in enumerate(split_marks(text) if has_mark(text) else [text]):
        if index:
            content.append({"type": "input_image", "detail": "auto", "image_url": None})
        if part or not index:
            content.append({"type": kind, "text": part})
    if kind == "output_text":
        content[0] |= {"annotations": [], "logprobs": []}
    return {
        "id": item.id,
        "type": MESSAGE,
        "role": item.turn.role,
        "status": "completed",
        "content": content,
    }


def chat_messages(items: Sequence[ConversationItem]) -> tuple[ChatMessage, ...]:
    """Messages of a conversation: calls belong to the assistant's message before them, outputs are
    in the order of the calls.

    Raises:
        ApiError: 400: an output answers no call of the assistant's message before it.
    """
    found, indices, outputs = list[ChatMessage](), dict[str, int](), dict[int, ChatMessage]()
    for item in _with_calls(items):
        if isinstance(item, _Answer):
            found += _in_order(outputs)
            indices = {call_id: index for index, call_id in enumerate(item.ids)}
            found.append(item.message)
        elif item.role == OUTPUT:
            output = json.loads(item.text)
            index = indices.get(output["call_id"])
            if index is None or index in outputs:
                raise _refused(
                    f"The function_call_output of {output['call_id'][:100]!r} answers no "
                    "function_call before it, or one that another answers: send the items of the "
                    "response too, or previous_response_id."
                )
            outputs[index] = ChatMessage(TOOL_ROLE, output["output"])
        else:
            found += _in_order(outputs)
            indices = {}
            found.append(item)
    return (*found, *_in_order(outputs))


class _Answer:
    """Message of the assistant with its calls."""

    def __init__(self, text: str) -> None:
        self._text, self._calls, self.ids = text, list[ToolCall](), list[str]()

    def add(self, call: dict[str, str]) -> None:
        self._calls.append(ToolCall.of(call["name"], call["arguments"]))
        self.ids.append(call["call_id"])

    @property
    def message(self) -> ChatMessage:
        """The message in the form of the engine."""
        text = canonical_answer(self._text, tuple(self._calls)) if self._calls else self._text
        return ChatMessage("assistant", text)


def _with_calls(items: Sequence[ConversationItem]) -> Iterator[ChatMessage | _Answer]:
    """Items, with the assistant's messages and calls of functions put together."""
    answer: _Answer | None = None
    for item in items:
        if item.turn.role == CALL:
            answer = answer or _Answer("")
            answer.add(json.loads(item.turn.text))
            continue
        if answer is not None:
            yield answer
        answer = _Answer(item.turn.text) if item.turn.role == "assistant" else None
        if answer is None:
            yield item.turn
    if answer is not None:
        yield answer


def _in_order(outputs: dict[int, ChatMessage]) -> list[ChatMessage]:
    """Waiting outputs in the order of their calls; the list of waiting ones is cleared."""
    found = [outputs[index] for index in sorted(outputs)]
    outputs.clear()
    return found


def _refused(message: str) -> Exception:
    return invalid_request(message, "input")


@dataclass
class ResponseOutput:
    """Output items of a streamed answer.

    Args:
        items: in the form of responses; the last may be open.
    """

    items: list[dict[str, Any]] = field(default_factory=list)
    _is_open: bool = False

    def add(self, deltas: Sequence[dict[str, Any]]) -> list[OutputEvent]:
        """Events of deltas in the form of chat completions."""
        events = list[OutputEvent]()
        for delta in deltas:
            if text := delta.get("reasoning_content"):
                events += self._text(REASONING, text)
            if text := delta.get("content"):
                events += self._text(MESSAGE, text)
            for call in delta.get("tool_calls", ()):
                events += self._call(call)
        return events

    def finish(self, is_cut: bool) -> list[OutputEvent]:
        """Events that close the open item; an answer without items has an empty message.

        Args:
            is_cut: the answer was cut by its length.
        """
        events = list[OutputEvent]()
        if not self.items:
            events += self._open(MESSAGE)
        return events + self._close("incomplete" if is_cut else "completed")

    def stored(self) -> tuple[ConversationItem, ...]:
        """Items in the form of the archive, without reasoning."""
        found = list[ConversationItem]()
        for item in self.items:
            if item["type"] == MESSAGE:
                message = ChatMessage("assistant", item["content"][0]["text"])
                found.append(ConversationItem(item["id"], message))
            elif item["type"] == CALL:
                call = stored_call(item["call_id"], item["name"], item["arguments"])
                found.append(ConversationItem(item["id"], call))
        if not found:  # the turn of an answer that is reasoning alone
            return (ConversationItem(new_id("msg_"), ChatMessage("assistant", "")),)
        return tuple(found)

    def _reference(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _text(self, kind: str, text: str) -> list[OutputEvent]:
        events = list[OutputEvent]()
        if not self._is_open or self.items[-1]["type"] != kind:
            events += [*self._close("completed"), *self._open(kind)]
        self.items[-1]["content"][0]["text"] += text
        fields = {**self._reference(), "content_index": 0, "delta": text, **LOGPROBS[kind]}
        return [*events, (f"{TEXT_EVENTS[kind]}.delta", fields)]

    def _call(self, call: Mapping[str, Any]) -> list[OutputEvent]:
        events, function = list[OutputEvent](), call["function"]
        if "id" in call:
            events += self._close("completed")
            own = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            events += self._opened({"id": new_id("fc_"), "type": CALL, **own})
        if arguments := function["arguments"]:
            self.items[-1]["arguments"] += arguments
            fields = {**self._reference(), "delta": arguments}
            events.append(("response.function_call_arguments.delta", fields))
        return events

    def _open(self, kind: str) -> list[OutputEvent]:
        """Begin an item that is a message or reasoning."""
        if kind == MESSAGE:
            events = self._opened({"id": new_id("msg_"), "type": MESSAGE, "role": "assistant"})
        else:
            events = self._opened({"id": new_id("rs_"), "type": REASONING, "summary": []})
        self.items[-1]["content"] = [dict(EMPTY_PARTS[kind])]
        fields = {**self._reference(), "content_index": 0, "part": EMPTY_PARTS[kind]}
        return [*events, ("response.content_part.added", fields)]

    def _opened(self, item: dict[str, Any]) -> list[OutputEvent]:
        item["status"] = "in_progress"
        self.items.append(item)
        self._is_open = True
        shown = item if item["type"] == CALL else {**item, "content": []}
        fields = {"output_index": len(self.items) - 1, "item": dict(shown)}
        return [("response.output_item.added", fields)]

    def _close(self, status: str) -> list[OutputEvent]:
        if not self._is_open:
            return []
        self._is_open, item = False, self.items[-1]
        item["status"], reference = status, self._reference()
        events = list[OutputEvent]()
        if item["type"] == CALL:
            fields = {**reference, "arguments": item["arguments"]}
            events.append(("response.function_call_arguments.done", fields))
        else:
            [part], kind = item["content"], item["type"]
            fields = {**reference, "content_index": 0}
            done = {**fields, "text": part["text"], **LOGPROBS[kind]}
            events.append((f"{TEXT_EVENTS[kind]}.done", done))
            events.append(("response.content_part.done", {**fields, "part": part}))
        ended = {"output_index": reference["output_index"], "item": item}
        return [*events, ("response.output_item.done", ended)]
