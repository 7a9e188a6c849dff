"""Chat template of a tokenizer: renders whole conversations, and the text that a message adds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import groupby
from types import CodeType
from typing import Any

from larder.core.errors import ModelError

# Role of a message that is none: its content is JSON of variables of the chat template, which hold
# for the whole conversation.
VARIABLES_ROLE = "template"
# Variables that a conversation cannot set.
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "tokenize", "chat_template", "add_generation_prompt"}
)
TOOL_ROLE = "tool"  # of a message with the result of a tool
CALL_ID = "call{:05}"  # nine characters, as Mistral's templates want them
TOOLS = "tools"  # variable of the template with the tools of a conversation
PLAIN_ROLES = {"system": "System", "user": "User", "assistant": "Assistant", TOOL_ROLE: "Tool"}
# A mark stands in the text of a message where an image stands, and names it by its SHA-256. It
# begins with a code point that is no character, which texts from outside must not contain.
MARK_START, MARK_STOP = "\ufdd0", "\ufdd1"  # Unicode reserves both for use inside a program
_MARK = re.compile(f"{MARK_START}image ([0-9a-f]{{64}}){MARK_STOP}")
_CALL_MARK = re.compile(f"{MARK_START}call ([^{MARK_STOP}]*){MARK_STOP}")
ANSWER_PLACEHOLDER = "0mark0"  # placeholder of an answer; no template changes it
TEXT_PART = {"type": "text", "text": ANSWER_PLACEHOLDER}
# Errors of the code of a template itself; `render_template` raises the others.
TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def image_mark(digest: str) -> str:
    """Mark of an image, as text.

    Args:
        digest: SHA-256 in hexadecimal.
    """
    return f"{MARK_START}image {digest}{MARK_STOP}"


def call_mark(name: str, arguments: str) -> str:
    """Mark of a tool call in the text of an assistant's message.

    Args:
        arguments: JSON, or any text where the model wrote none.
    """
    return f"{MARK_START}call {json.dumps([name, arguments])}{MARK_STOP}"


def without_calls(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Text of a message without its tool calls, and these: names and decoded arguments."""
    calls = [json.loads(found) for found in _CALL_MARK.findall(text)]
    return _CALL_MARK.sub("", text), [(name, _decoded(arguments)) for name, arguments in calls]


def _decoded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def has_mark(text: str) -> bool:
    """True if a text contains the beginning of a mark."""
    return MARK_START in text


def image_digests(text: str) -> list[str]:
    """Digests of the images in a text, in order."""
    return _MARK.findall(text)


def split_marks(text: str) -> list[str]:
    """Texts around the images: one more than there are images."""
    return _MARK.split(text)[::2]


@dataclass(frozen=True)
class TemplateMessage:
    """Message with role and content, as templates take it."""

    role: str
    content: str


class PromptEnd(Enum):
    """End of a rendered prompt: after the last message, or where the assistant's answer begins."""

    CLOSED = "closed"
    ANSWER = "answer"


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a tokenizer, which renders messages as the model was trained on.

    For a template that rejects system messages inside a conversation, or two messages of one role
    in a row, they are merged into user messages. Without a template, messages are plain lines.
    """

    tokenizer: Any

    def render(self, turns: Sequence[TemplateMessage], end: PromptEnd) -> str:
        """Render a conversation as text.

        Raises:
            ModelError: the template fails even on alternating messages, or exceeds a bound of
                output or time.
        """
        given = [turn for turn in turns if turn.role == VARIABLES_ROLE]
        turns = [turn for turn in turns if turn.role != VARIABLES_ROLE]
        if not self.tokenizer.chat_template:
            return _plain_text(turns, end)
        from jinja2 import TemplateError

        variables = self._variables_of(given)
        try:
            return self._apply(turns, end, variables)
        except TemplateError:
            pass
        try:
            return self._apply(_alternating_messages(turns), end, variables)
        except TemplateError as error:
            raise ModelError(
                f"The tokenizer's chat template rejects the conversation: {error}. Give a model "
                "whose template takes user and assistant turns."
            ) from error

    def user_message(self, content: str, end: PromptEnd) -> str:
        """Text that a user message adds after a finished answer."""
        return self.continuation([TemplateMessage("user", content)], end)

    def continuation(self, turns: Sequence[TemplateMessage], end: PromptEnd) -> str:
        """Text that further messages add after a finished answer."""
        messages = [
            TemplateMessage("user", "?"),
            TemplateMessage("assistant", ANSWER_PLACEHOLDER),
            *turns,
        ]
        return self._after_placeholder(messages, end).removeprefix(self.end_of_turn())

    def end_of_turn(self) -> str:
        """Text that ends the assistant's turn after an answer."""
        return self._after_placeholder(
            [TemplateMessage("user", "?"), TemplateMessage("assistant", ANSWER_PLACEHOLDER)],
            PromptEnd.CLOSED,
        )

    def _after_placeholder(self, turns: Sequence[TemplateMessage], end: PromptEnd) -> str:
        _, placeholder, rest = self.render(turns, end).partition(ANSWER_PLACEHOLDER)
        if not placeholder:
            raise ModelError(
                "The tokenizer's chat template drops the assistant's answers: "
                "give a model whose template keeps them."
            )
        return rest

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables of the template that a conversation may set."""
        if not self.tokenizer.chat_template:
            return frozenset()
        from jinja2 import TemplateError

        from larder.session.transcript.template_sandbox import template_variables

        try:
            used = template_variables(self.tokenizer.get_chat_template())
        except TemplateError:  # reported by `render`
            return frozenset()
        return used.difference(RESERVED_VARIABLES, self.tokenizer.special_tokens_map)

    def _variables_of(self, messages: Sequence[TemplateMessage]) -> dict[str, Any]:
        """Variables in messages of `VARIABLES_ROLE`, those that the template has.

        Raises:
            ModelError: a content is not a JSON object.
        """
        found: dict[str, Any] = {}
        for turn in messages:
            try:
                found |= json.loads(turn.content)
            except (ValueError, TypeError, RecursionError) as error:
                raise ModelError(
                    f"The variables of the chat template are not a JSON object ({error}): begin "
                    "another conversation."
                ) from error
        taken = self.variables | {TOOLS}
        return {name: value for name, value in found.items() if name in taken}

    def _apply(
        self, turns: Sequence[TemplateMessage], end: PromptEnd, variables: Mapping[str, Any]
    ) -> str:
        return self._rendered(self._messages(turns), end, variables)

    def _messages(self, turns: Sequence[TemplateMessage]) -> list[dict[str, Any]]:
        """Messages in the form of templates. The results of tools are in the order of the calls."""
        messages, made, given = list[dict[str, Any]](), 0, 0
        for turn in turns:
            text, calls = without_calls(turn.content)
            message: dict[str, Any] = {"role": turn.role, "content": self._content(text)}
            if calls:
                message["tool_calls"] = [
                    {
                        "id": CALL_ID.format(made + index),
                        "type": "function",
                        "function": {"name": name, "arguments": arguments},
                    }
                    for index, (name, arguments) in enumerate(calls)
                ]
                made += len(calls)
            elif turn.role == TOOL_ROLE:
                message["tool_call_id"] = CALL_ID.format(given)
                given += 1
            messages.append(message)
        return messages

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], end: PromptEnd, variables: Mapping[str, Any]
    ) -> str:
        from jinja2 import TemplateError

        from larder.session.transcript.template_sandbox import render_template

        named = {**self.tokenizer.special_tokens_map, **variables}
        try:
            return render_template(
                self._code, messages, add_generation_prompt=end is PromptEnd.ANSWER, **named
            )
        except TEMPLATE_ERRORS as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def _content(self, text: str) -> str | list[dict[str, str]]:
        """Content of a message: its text, or parts for a template that takes those alone, or where
        there are images. A template without image parts renders the marks of images as text."""
        if not (self._takes_images if has_mark(text) else self._takes_parts_alone):
            return text
        parts = list[dict[str, str]]()
        for index, part in enumerate(split_marks(text)):
            parts += [{"type": "image"}] if index else []
            parts += [{"type": "text", "text": part}] if part else []
        return parts or [{"type": "text", "text": ""}]

    @cached_property
    def _takes_images(self) -> bool:
        """True if the template writes something for a part that is an image."""
        shown = self._probe([{"type": "image"}, TEXT_PART])
        return ANSWER_PLACEHOLDER in shown and shown != self._probe([TEXT_PART])

    @cached_property
    def _takes_parts_alone(self) -> bool:
        """True if the template drops contents that are no lists of parts."""
        if ANSWER_PLACEHOLDER in self._probe(ANSWER_PLACEHOLDER):
            return False
        return ANSWER_PLACEHOLDER in self._probe([TEXT_PART])

    @cached_property
    def takes_tools(self) -> bool:
        """True if the template writes the tools of a conversation."""
        if not self.tokenizer.chat_template:
            return False
        given = [{"type": "function", "function": {"name": ANSWER_PLACEHOLDER, "parameters": {}}}]
        return ANSWER_PLACEHOLDER in self._probe("", **{TOOLS: given})

    def _probe(self, content: str | list[dict[str, str]], **variables: Any) -> str:
        """Rendering of one user message; empty if the template rejects it."""
        from jinja2 import TemplateError

        try:
            messages = [{"role": "user", "content": content}]
            return self._rendered(messages, PromptEnd.CLOSED, variables)
        except (ModelError, TemplateError):
            return ""

    @cached_property
    def _code(self) -> CodeType:
        from larder.session.transcript.template_sandbox import compile_template

        return compile_template(self.tokenizer.get_chat_template())


def _plain_text(turns: Sequence[TemplateMessage], end: PromptEnd) -> str:
    lines = "".join(f"{PLAIN_ROLES[turn.role]}: {turn.content}\n" for turn in turns)
    return lines + "Assistant:" if end is PromptEnd.ANSWER else lines


def _alternating_messages(turns: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Merge messages into strictly alternating user and assistant messages."""
    renamed = [TemplateMessage("user", t.content) if t.role == "system" else t for t in turns]
    merged = [
        TemplateMessage(role, "\n".join(turn.content for turn in group))
        for role, group in groupby(renamed, key=lambda turn: turn.role)
    ]
    return [TemplateMessage("user", "..."), *merged] if merged[0].role == "assistant" else merged
