"""KV cache management for language models under a fixed memory budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from larder.core.conversation import Conversation, Message, Question
    from larder.core.errors import LarderError
    from larder.engine.answer import Answer
    from larder.engine.chat import Chat
    from larder.engine.completion import Completion
    from larder.engine.engine import Engine
    from larder.interop.cache import LarderCache
    from larder.interop.policy_context import applied
    from larder.session.default_policy import default_policy
    from larder.session.files import read_conversation
    from larder.session.policy import Policy

__version__ = "0.1.0"

# Public name -> module that defines it. Modules load on first use, so that `import larder` is fast
# and imports neither torch nor transformers.
_PUBLIC = {
    "Engine": "larder.engine.engine",
    "Answer": "larder.engine.answer",
    "Chat": "larder.engine.chat",
    "Completion": "larder.engine.completion",
    "Conversation": "larder.core.conversation",
    "Message": "larder.core.conversation",
    "Question": "larder.core.conversation",
    "LarderCache": "larder.interop.cache",
    "LarderError": "larder.core.errors",
    "Policy": "larder.session.policy",
    "applied": "larder.interop.policy_context",
    "default_policy": "larder.session.default_policy",
    "read_conversation": "larder.session.files",
}

__all__ = [
    "Answer",
    "Chat",
    "Completion",
    "Conversation",
    "Engine",
    "LarderCache",
    "LarderError",
    "Message",
    "Policy",
    "Question",
    "applied",
    "default_policy",
    "read_conversation",
]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'larder' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
