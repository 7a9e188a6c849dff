"""Output items of a response, and the events that stream them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from larder.server.http.archive import ConversationItem
from larder.server.http.protocol import new_id
from larder.server.http.response_items import CALL, MESSAGE, REASONING, stored_call
from larder.server.request import ChatMessage

OutputEvent = tuple[str, dict[str, Any]]  # type and content
EMPTY_PARTS: Mapping[str, dict[str, Any]] = {
    MESSAGE: {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    REASONING: {"type": "reasoning_text", "text": ""},
}
TEXT_EVENTS = {MESSAGE: "response.output_text", REASONING: "response.reasoning_text"}
LOGPROBS: Mapping[str, dict[str, Any]] = {MESSAGE: {"logprobs": []}, REASONING: {}}


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
