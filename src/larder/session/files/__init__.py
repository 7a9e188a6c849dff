"""Readers of conversation files: chats, LoCoMo and RealTalk transcripts, documents."""

from larder.core.conversation import Adversarial
from larder.session.files.loader import (
    ConversationLike,
    conversation_of,
    find_files,
    read_conversation,
)

__all__ = ["Adversarial", "ConversationLike", "conversation_of", "find_files", "read_conversation"]
