"""Interface of chat persistence, its null object, and the result of a restore.

`store_persistence` saves to a store; it is imported where a store is opened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from larder.core.types import TokenIds
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
        sender: model that the caches were taken from, and what was computed again; empty for those
            of the model itself.
    """

    state: ChatState | None
    reason: str = ""
    tokens: int = 0
    seconds: float = 0.0
    codec: str = ""
    is_outdated: bool = False
    sender: str = ""

    @property
    def summary(self) -> str:
        """One line about the result."""
        read = f"prefilled again: {REASON_TEXTS.get(self.reason, self.reason)}"
        saved = f" (saved as {self.codec})" if self.codec else ""
        if self.state is None:
            return f"{read}{saved}"
        of = f" of {self.sender}" if self.sender else ""
        line = f"restored {self.tokens:,} tokens{of} in {self.seconds:.2f} s{saved}"
        return f"{line}, the rest {read}" if self.reason else line


class ChatPersistence(ABC):
    """Interface of what outlives a chat: its log, and its caches between two runs."""

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

    def receive(
        self, name: str, runtime: ModelRuntime, policy: Policy, log: ChatLog
    ) -> ResumeResult:
        """Restore a state that another model of the same shape has saved; by default none.

        Raises:
            LarderError: what is asked for can never serve this model.
        """
        del name, runtime, policy, log
        return ResumeResult(None, NOT_SAVED)

    def share_states(self, policy: Policy, ids: TokenIds) -> AbstractContextManager[object]:
        """Context in which a text is read whose hidden states are saved for other models; by
        default nothing is.

        Raises:
            UsageError: the policy does not read a text so that it can be shared.
        """
        del policy, ids
        return nullcontext()


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
