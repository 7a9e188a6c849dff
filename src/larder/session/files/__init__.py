"""Read what people bring: chats, LoCoMo and RealTalk transcripts, documents."""

from larder.session.files.finding import find_files
from larder.session.files.locomo import Adversarial
from larder.session.files.reading import read_conversation

__all__ = ["Adversarial", "find_files", "read_conversation"]
