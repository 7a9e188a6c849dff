"""Conversation files that `read_conversation` reads, and digests of conversations."""

from __future__ import annotations

import json
from dataclasses import replace

from blake3 import blake3

from larder.core import Conversation, Message, PromptLayout
from larder.session import ACKNOWLEDGEMENT

DIGEST_LENGTH = 12


def conversation_json(conversation: Conversation) -> str:
    """Conversation as a JSON document with messages and questions.

    A document or a transcript is written as the chat that a model sees: one message, its
    acknowledgment, and questions in their prompt.
    """
    conversation = _as_chat(conversation)
    messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
    questions = [
        {"question": q.question, "answer": q.answer, "kind": q.kind} for q in conversation.questions
    ]
    document = {"messages": messages, "qa": questions}
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def conversation_digest(conversation: Conversation) -> str:
    """Twelve hexadecimal digits that identify the messages and questions of a conversation."""
    return blake3(conversation_json(conversation).encode()).hexdigest(length=DIGEST_LENGTH // 2)


def _as_chat(conversation: Conversation) -> Conversation:
    if conversation.form is PromptLayout.CHAT:
        return conversation
    text = conversation.opening + "".join(message.content for message in conversation.messages)
    messages = (Message("user", text), Message("assistant", ACKNOWLEDGEMENT))
    questions = tuple(
        replace(each, question=conversation.question_prompt.format(question=each.question))
        for each in conversation.questions
    )
    return replace(conversation, messages=messages, questions=questions, form=PromptLayout.CHAT)
