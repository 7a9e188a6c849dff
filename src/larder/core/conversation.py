"""What people bring: a conversation or a document, and questions about it.

Plain words that every layer shares; nothing here knows tokens or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PromptLayout(Enum):
    """How a source wants to be laid before the model.

    CHAT: messages keep their roles and go through the tokenizer's chat template.
    TRANSCRIPT: two named people talk; the whole text is one user message (LoCoMo, RealTalk).
    DOCUMENT: one long text is one user message.
    """

    CHAT = "chat"
    TRANSCRIPT = "transcript"
    DOCUMENT = "document"


@dataclass(frozen=True)
class Message:
    """One utterance.

    Args:
        role: `system`, `user` or `assistant`.
        content: the text, as the model shall see it.
        speaker: a person's name, where the source has one; else empty.
        date: when it was said, as the source spells it; else empty.
        utterance: the text without headers and captions, for embedding; empty means `content`.
    """

    role: str
    content: str
    speaker: str = ""
    date: str = ""
    utterance: str = ""


@dataclass(frozen=True)
class Question:
    """A question about a conversation, with the answer that a scorer expects, if known.

    Args:
        kind: what sort of question it is, for tables.
        depth: where the one fact that it needs stands, from 0, the start of the text, to 1; None
            where it needs several, or nobody knows.
        items: where in the answer each part that is scored by itself stands, as characters
            [start, stop); none where the answer is right or wrong as a whole.
        others: answers that are as good.
        sources: how many places of the text hold what it needs; None where nobody knows.
        scorer: how the public data set that it is of scores answers, by a name that the benchmark
            knows; empty where there is nothing beside the usual scores.
        classes: all that the answer can be, where the data set scores by that.
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


@dataclass(frozen=True)
class Conversation:
    """A named source: its messages in order, and questions about it.

    For `Form.TRANSCRIPT` and `Form.DOCUMENT` the model sees `opening` and the contents joined, as
    they are, in one user message; `question_prompt` is a format string with `{question}` that wraps
    a bare question.
    """

    name: str
    messages: tuple[Message, ...]
    questions: tuple[Question, ...] = ()
    form: PromptLayout = PromptLayout.CHAT
    opening: str = ""
    question_prompt: str = "{question}"
