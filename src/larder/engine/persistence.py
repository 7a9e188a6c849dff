"""Interface of chat persistence, its null object, and the result of a restore.

`store_persistence` saves to a store; it is imported where a store is opened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from larder.session.chat_state import ChatState
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy
from larder.session.prefill import ModelRuntime
from larder.session.transcript.chat_log import ChatLog
from larder.session.transcript.chat_log_file import ChatLogStore, open_chat_log

if TYPE_CHECKING:  # imported where contexts are read
    from larder.prefill.contexts import ChunkSource

NOT_SAVED = "new"
# Text of each reason; the store counts by the keys.
REASON_TEXTS = {
    NOT_SAVED: "nothing was saved",
    "tokens only": "only its tokens were saved",
    "evicted": "its caches were evicted from the store",
    "identity": "it was saved with another model or tokenizer",
    "policy": "it was saved under another policy",
    "codec": "it was saved with another codec",
    "tokens": "it was saved with another text",
    "slower": "prefill is faster than loading",
    "damaged": "the saved data is damaged",
    "format": "it was saved by another version of Larder",
    "slow": "the disk does not respond",
    "budget": "it does not fit in memory",
}


@dataclass(frozen=True)
class ResumeResult:
    """Result of restoring a chat.

    Args:
        state: restored state; None where the log must be prefilled again.
        reason: key of `REASON_TEXTS` without a state, or for a part that could not be loaded;
            else empty.
        tokens: number of tokens restored.
        seconds: time that it took.
        codec: codec that the caches were saved with, if another is asked for; else empty.
        is_outdated: True if the restored caches should replace the saved ones.
    """

    state: ChatState | None
    reason: str = ""
    tokens: int = 0
    seconds: float = 0.0
    codec: str = ""
    is_outdated: bool = False

    @property
    def summary(self) -> str:
        """One line about the result."""
        read = f"prefilled again: {REASON_TEXTS.get(self.reason, self.reason)}"
        saved = f" (saved as {self.codec})" if self.codec else ""
        if self.state is None:
            return f"{read}{saved}"
        line = f"restored {self.tokens:,} tokens in {self.seconds:.2f} s{saved}"
        return f"{line}, the rest {read}" if self.reason else line


class ChatPersistence(ABC):
    """Interface of everything that outlives a chat: its log, and its caches in between."""

    @abstractmethod
    def open_log(self, name: str | None) -> ChatLogStore:
        """Log of the chat of that name; without a name, one that ends with the process."""

    @abstractmethod
    def load(self, name: str, runtime: ModelRuntime, policy: Policy, log: ChatLog) -> ResumeResult:
        """Restore the newest saved state that is a prefix of the chat log.

        Args:
            policy: policy with every size filled in.
        """

    @abstractmethod
    def save(self, name: str, state: ChatState) -> str:
        """Save a state; the reason why its caches were not saved, empty where they were."""

    @abstractmethod
    def record_prefill_time(self, memory: ConversationMemory) -> None:
        """Record the prefill time of a chat, for the choice between loading and prefill."""

    @abstractmethod
    def chunks(self) -> ChunkSource | None:
        """Contexts that were read before; None where nothing is saved."""


class NoPersistence(ChatPersistence):
    """Persistence that saves logs alone; every chat is prefilled again."""

    def open_log(self, name: str | None) -> ChatLogStore:
        return open_chat_log(name)

    def load(self, name: str, runtime: ModelRuntime, policy: Policy, log: ChatLog) -> ResumeResult:
        return ResumeResult(None, NOT_SAVED)

    def save(self, name: str, state: ChatState) -> str:
        return NOT_SAVED

    def record_prefill_time(self, memory: ConversationMemory) -> None:
        del memory

    def chunks(self) -> ChunkSource | None:
        return None
