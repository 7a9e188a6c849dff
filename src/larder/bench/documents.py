"""One long document and one question, as public data sets have them."""

from __future__ import annotations

from larder.bench.cutting import without_middle
from larder.bench.lifelog import MARK_TOKENS
from larder.bench.sources import Sources
from larder.core.conversation import Conversation, Form, Question
from larder.core.errors import BadParameter
from larder.session.files.document import read
from larder.session.transcript import ACKNOWLEDGEMENT


def about_document(
    name: str,
    text: str,
    question: Question,
    tokens: int,
    sources: Sources,
    opening: str = "",
    question_prompt: str = "{question}",
) -> Conversation:
    """A document of at most `tokens` tokens, its middle left out where it is longer.

    Args:
        name: of the conversation; its first part is that of the task.

    Raises:
        BadParameter: there is no room for anything.
    """
    count = sources.count_tokens
    room = tokens - count(opening) - count(ACKNOWLEDGEMENT) - 2 * MARK_TOKENS
    if room < 2:
        task = name.partition("-")[0]
        raise BadParameter(f"{task}.tokens must hold a document, got {tokens}: take more.")
    document = read(without_middle(text, room, count), name)
    return Conversation(
        name, document.messages, (question,), Form.DOCUMENT, opening, question_prompt
    )
