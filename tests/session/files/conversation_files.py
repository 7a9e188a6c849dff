"""Files of conversations, and what is read of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from larder import Conversation, read_conversation
from larder.core import InputError


def write(folder: Path, content: object, name: str = "talk.json") -> Path:
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def text_of(conversation: Conversation) -> str:
    return conversation.opening + "".join(message.content for message in conversation.messages)


def complaint(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_conversation(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message
