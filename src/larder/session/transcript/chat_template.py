"""A tokenizer's chat template, asked for whole conversations and for what one turn adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import groupby
from types import CodeType
from typing import Any

from larder.core.errors import ModelError

PLAIN_ROLES = {"system": "System", "user": "User", "assistant": "Assistant"}
ANSWER_PLACEHOLDER = "0mark0"  # stands for an answer; no template changes it
# What a template's own code can run into; `render_template` says the rest.
TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class TemplateMessage:
    """One message in the template's own terms."""

    role: str
    content: str


class PromptEnd(Enum):
    """How a rendering ends: after the last turn, or where the assistant's answer begins."""

    CLOSED = "closed"
    ANSWER = "answer"


@dataclass(frozen=True)
class ChatTemplate:
    """Renders turns as the model was trained to see them.

    A template that refuses system turns inside a conversation, or two turns of one role, gets them
    folded into the user's turns instead. Without a template, turns are plain lines.
    """

    tokenizer: Any

    def render(self, turns: Sequence[TemplateMessage], end: PromptEnd) -> str:
        """The text of a conversation.

        Raises:
            ModelError: the template fails even on plain alternating turns, or exceeds a bound of
                output or time.
        """
        if not self.tokenizer.chat_template:
            return _plain_text(turns, end)
        from jinja2 import TemplateError

        try:
            return self._apply(turns, end)
        except TemplateError:
            pass
        try:
            return self._apply(_alternating_messages(turns), end)
        except TemplateError as error:
            raise ModelError(
                f"The tokenizer's chat template refuses the conversation: {error}. Give a model "
                "whose template takes user and assistant turns."
            ) from error

    def user_message(self, content: str, end: PromptEnd) -> str:
        """What a user's turn adds behind a finished answer."""
        return self.continuation([TemplateMessage("user", content)], end)

    def continuation(self, turns: Sequence[TemplateMessage], end: PromptEnd) -> str:
        """What further turns add behind a finished answer."""
        told = [
            TemplateMessage("user", "?"),
            TemplateMessage("assistant", ANSWER_PLACEHOLDER),
            *turns,
        ]
        return self._behind_mark(told, end).removeprefix(self.end_of_turn())

    def end_of_turn(self) -> str:
        """What the template puts behind an answer to end the assistant's turn."""
        return self._behind_mark(
            [TemplateMessage("user", "?"), TemplateMessage("assistant", ANSWER_PLACEHOLDER)],
            PromptEnd.CLOSED,
        )

    def _behind_mark(self, turns: Sequence[TemplateMessage], end: PromptEnd) -> str:
        _, found, rest = self.render(turns, end).partition(ANSWER_PLACEHOLDER)
        if not found:
            raise ModelError("The tokenizer's chat template drops the assistant's answers.")
        return rest

    def _apply(self, turns: Sequence[TemplateMessage], end: PromptEnd) -> str:
        from jinja2 import TemplateError

        from larder.session.transcript.template_sandbox import render_template

        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        named = self.tokenizer.special_tokens_map
        try:
            return render_template(
                self._code, messages, add_generation_prompt=end is PromptEnd.ANSWER, **named
            )
        except TEMPLATE_ERRORS as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    @cached_property
    def _code(self) -> CodeType:
        from larder.session.transcript.template_sandbox import compile_template

        return compile_template(self.tokenizer.get_chat_template())


def _plain_text(turns: Sequence[TemplateMessage], end: PromptEnd) -> str:
    lines = "".join(f"{PLAIN_ROLES[turn.role]}: {turn.content}\n" for turn in turns)
    return lines + "Assistant:" if end is PromptEnd.ANSWER else lines


def _alternating_messages(turns: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The same words in strictly alternating user and assistant turns."""
    told = [TemplateMessage("user", t.content) if t.role == "system" else t for t in turns]
    merged = [
        TemplateMessage(role, "\n".join(turn.content for turn in group))
        for role, group in groupby(told, key=lambda turn: turn.role)
    ]
    return [TemplateMessage("user", "..."), *merged] if merged[0].role == "assistant" else merged
