"""Readers of conversation files: chats, LoCoMo and RealTalk transcripts, documents."""

from larder.session.files.loader import (
    ConversationLike,
    conversation_of,
    find_files,
    read_conversation,
)
from larder.session.files.locomo import Adversarial

__all__ = ["Adversarial", "ConversationLike", "conversation_of", "find_files", "read_conversation"]
