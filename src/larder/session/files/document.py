"""A text or markdown file as a document: one message per paragraph."""

from __future__ import annotations

import re

from larder.core.conversation import Conversation, Message, PromptLayout

# A paragraph keeps the blank lines that follow it, so that the paragraphs joined are the file.
PARAGRAPH = re.compile(r"\s*\S.*?(?:\n\s*(?:\n|\Z)|\Z)", re.DOTALL)


def read_document(text: str, name: str) -> Conversation:
    """The document, cut at blank lines; its paragraphs joined give `text` back letter by letter."""
    messages = tuple(
        Message("user", paragraph, utterance=paragraph.strip())
        for paragraph in PARAGRAPH.findall(text)
    )
    return Conversation(name=name, messages=messages, form=PromptLayout.DOCUMENT)
