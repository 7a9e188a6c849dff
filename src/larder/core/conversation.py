"""Conversations, messages and questions as plain text, before tokenization."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PromptLayout(Enum):
    """Prompt layout of a conversation or document.

    CHAT: messages keep their roles and go through the tokenizer's chat template.
    TRANSCRIPT: a dialogue of two named people; the whole text is one user message (LoCoMo,
        RealTalk).
    DOCUMENT: one long text is one user message, acknowledged by the assistant.
    CONTEXTS: several texts, encoded apart, are one user message, acknowledged by the assistant.
    SINGLE_TURN: one long text and the question after it share one user message (RULER, LongBench).
    PLAIN: one long text, the question and the answer without any chat format, for models that were
        not trained on one.
    """

    CHAT = "chat"
    TRANSCRIPT = "transcript"
    DOCUMENT = "document"
    CONTEXTS = "contexts"
    SINGLE_TURN = "single_turn"
    PLAIN = "plain"

    @property
    def is_document(self) -> bool:
        """Test if the conversation is one long text, or several."""
        return self not in (PromptLayout.CHAT, PromptLayout.TRANSCRIPT)


class Adversarial(Enum):
    """Treatment of adversarial questions, which the conversation does not answer."""

    LEFT_OUT = "left_out"
    ASKED = "asked"


@dataclass(frozen=True)
class Message:
    """Message of a conversation.

    Args:
        role: `system`, `user` or `assistant`.
        content: text that the model sees.
        speaker: a person's name, where the source has one; else empty.
        date: date of the message, as the source spells it; else empty.
        utterance: the text without headers and captions, for embedding; empty means `content`.

    Examples:
        >>> Message("user", "My cat is called Minka.").role
        'user'
    """

    role: str
    content: str
    speaker: str = ""
    date: str = ""
    utterance: str = ""


@dataclass(frozen=True)
class Question:
    """Question about a conversation, with its reference answer where one is known.

    Args:
        question: the question as a user would ask it.
        answer: reference answer; empty where none is known.
        kind: category of the question, for tables.
        depth: relative position of the one fact that it needs, from 0 (start of the text) to 1;
            None where it needs several facts or the position is unknown.
        items: character ranges [start, stop) of the answer that are scored separately; empty
            where the answer is right or wrong as a whole.
        others: alternative correct answers.
        sources: number of passages that hold the needed facts; None where unknown.
        scorer: name of the data set's own scorer in the benchmark; empty for the usual scores.
        classes: possible answers, where the data set scores by classification.
        answer_prefix: beginning of the answer, given to the model; `answer` continues it.

    Examples:
        >>> Question("What is the cat called?", "Minka", answer_prefix="The cat is").prefixed_answer
        ' Minka'
    """

    question: str
    answer: str = ""
    kind: str = ""
    depth: float | None = None
    items: tuple[tuple[int, int], ...] = ()
    others: tuple[str, ...] = ()
    sources: int | None = None
    scorer: str = ""
    classes: tuple[str, ...] = ()
    answer_prefix: str = ""

    @property
    def prefixed_answer(self) -> str:
        """Expected answer as it follows the answer prefix: after a space, if there is a prefix."""
        return f" {self.answer}" if self.answer_prefix and self.answer else self.answer


@dataclass(frozen=True)
class Conversation:
    """Conversation or document: messages in order, and questions about it.

    For every layout but `PromptLayout.CHAT` the model sees `opening` and the unchanged contents,
    joined in one text; `question_prompt` is a format string with `{question}` that wraps a bare
    question.

    Args:
        name: name of the conversation, for tables and messages.
        messages: messages in order.
        questions: questions about the conversation, which are not read with it.
        form: prompt layout.
        opening: text before the first message.
        question_prompt: format string that wraps a question.
        inside: question that the context ends with, so that it is read and compressed with the
            text; None where questions come after compression.

    Examples:
        >>> talk = Conversation("cats", (Message("user", "My cat is called Minka."),))
        >>> memory = engine.read(talk)
    """

    name: str
    messages: tuple[Message, ...]
    questions: tuple[Question, ...] = ()
    form: PromptLayout = PromptLayout.CHAT
    opening: str = ""
    question_prompt: str = "{question}"
    inside: Question | None = None

    def __repr__(self) -> str:
        return (
            f"Conversation({self.name!r}, {len(self.messages)} messages, "
            f"{len(self.questions)} questions)"
        )
