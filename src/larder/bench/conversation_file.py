"""A conversation as a file that `read_conversation` gives back."""

from __future__ import annotations

import json

from larder.core.conversation import Conversation


def as_json(conversation: Conversation) -> str:
    """The conversation as a file with messages and questions."""
    messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
    questions = [
        {"question": q.question, "answer": q.answer, "kind": q.kind} for q in conversation.questions
    ]
    document = {"messages": messages, "qa": questions}
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"
