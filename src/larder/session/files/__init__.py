"""Read what people bring: chats, LoCoMo and RealTalk transcripts, documents."""

from larder.session.files.finding import find_files
from larder.session.files.locomo import Adversarial
from larder.session.files.reading import Readable, conversation_of, read_conversation

__all__ = ["Adversarial", "Readable", "conversation_of", "find_files", "read_conversation"]
