"""Memories that outlive the process: saved with their caches, and restored or read again.

A restored memory goes on as the one that was saved would have gone on: to the bit where the codec
loses nothing. Whatever is wrong with what was saved, the log of the chat is the source of truth,
and it is read anew; the reason is logged and counted by the store.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

from larder.core.conversation import Conversation
from larder.core.errors import LarderError
from larder.core.settings import LOCAL_PRINCIPAL
from larder.engine.engine import Engine
from larder.engine.snapshots import ModelSnapshots
from larder.models.loader import LoadedModel
from larder.prefill.base import Progress, no_progress
from larder.session.capacity import resolve_budget
from larder.session.chat_state import ChatState, chat_state_record, restore_chat_state
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy
from larder.session.prefill import ModelRuntime
from larder.session.transcript.chat_log import ChatLog, chat_log_record
from larder.store.blobs.cache_state import RAW_CODEC
from larder.store.digests import key_of
from larder.store.encryption import Encryption, NoEncryption
from larder.store.store import Store

NOT_SAVED = "new"
UNSEALED = NoEncryption()
# What a reason means to people; the store counts by the word.
REASON_TEXTS = {
    NOT_SAVED: "nothing was saved",
    "tokens only": "only what was said was saved",
    "evicted": "its cache has made room for others",
    "identity": "it was saved with another model or tokenizer",
    "policy": "it was saved under another policy",
    "tokens": "what was saved is of another text",
    "slower": "reading is quicker than loading",
    "damaged": "what was saved is damaged",
    "format": "it was saved by another larder",
    "slow": "the disk does not answer",
    "budget": "it does not fit in memory",
}


@dataclass(frozen=True)
class ResumeResult:
    """What came of an attempt to restore.

    Args:
        state: None where all must be read anew.
        reason: one word for why; empty where it was restored.
        tokens: that were restored.
        seconds: that it took.
    """

    state: ChatState | None
    reason: str = ""
    tokens: int = 0
    seconds: float = 0.0

    @property
    def said(self) -> str:
        """One line for people."""
        if self.state is not None:
            return f"restored {self.tokens:,} tokens in {self.seconds:.2f} s"
        return f"read anew: {REASON_TEXTS.get(self.reason, self.reason)}"


class ChatPersistence(ABC):
    """Keeps the states of chats.

    `logs` is how the logs of chats lie.
    """

    logs: Encryption = UNSEALED

    @abstractmethod
    def load(self, name: str, desk: ModelRuntime, policy: Policy, log: ChatLog) -> ResumeResult:
        """The newest state of a chat that its log begins with, or none and why.

        Args:
            policy: with every size filled in.
        """

    @abstractmethod
    def save(self, name: str, state: ChatState) -> str:
        """Keep a state; one word for why its caches were not kept, empty where they were."""

    @abstractmethod
    def note_reading(self, memory: ConversationMemory) -> None:
        """A chat was read anew: so long it takes."""


class NoPersistence(ChatPersistence):
    """Every chat is read anew."""

    def load(self, name: str, desk: ModelRuntime, policy: Policy, log: ChatLog) -> ResumeResult:
        del name, desk, policy, log
        return ResumeResult(None, NOT_SAVED)

    def save(self, name: str, state: ChatState) -> str:
        del name, state
        return NOT_SAVED

    def note_reading(self, memory: ConversationMemory) -> None:
        del memory


class StorePersistence(ChatPersistence):
    """Keeps the states of one tenant's chats with one model in a store.

    Args:
        principal: whose chats they are.
        codec: how keys and values are spelled; a file in `store/codecs`.
        logs: how the logs of chats lie beside the store.
    """

    def __init__(
        self,
        store: Store,
        loaded: LoadedModel,
        principal: str = LOCAL_PRINCIPAL,
        codec: str = RAW_CODEC,
        logs: Encryption = UNSEALED,
    ) -> None:
        self.logs = logs
        self._store, self._principal = store, principal
        self._snapshots = ModelSnapshots(store, loaded, codec)

    def load(self, name: str, desk: ModelRuntime, policy: Policy, log: ChatLog) -> ResumeResult:
        begun = time.perf_counter()
        ids = log.source(log.transcript(desk.scribe)).ids
        try:
            found = self._snapshots.load(self._principal, name, str(policy), ids)
            if found is None or found.cache is None:
                return ResumeResult(None, NOT_SAVED if found is None else found.reason)
            caches, seconds = [found.cache, *found.others], time.perf_counter() - begun
            state = restore_chat_state(
                found.transcript, found.ids, caches, desk, policy, log, seconds
            )
        except LarderError as error:
            return ResumeResult(None, self._store.parts.refusals.note_error(error))
        return ResumeResult(state, "", len(found.ids), time.perf_counter() - begun)

    def save(self, name: str, state: ChatState) -> str:
        memory = state.memory
        ids = state.log.source(memory.transcript).ids
        try:
            snapshot = self._snapshots.of(str(memory.policy), tuple(memory.caches.copies()))
            record = self._store.sessions.save(
                self._principal, name, ids, snapshot, transcript=chat_state_record(state)
            )
        except LarderError as error:
            return self._store.parts.unwritten.note_error(error)
        return "" if record.spans else "tokens only"

    def note_reading(self, memory: ConversationMemory) -> None:
        figures = memory.figures
        self._snapshots.note_reading(figures.context_tokens, figures.prefill_seconds)
        self._snapshots.remember(str(memory.policy))


def prefill_or_restore(
    engine: Engine,
    keeper: ChatPersistence,
    conversation: Conversation,
    prompts: Mapping[str, str],
    progress: Progress = no_progress,
) -> tuple[ConversationMemory, ResumeResult]:
    """Restore a reading that was kept, or read, and keep that.

    Args:
        prompts: as `Engine.read` takes them; a reading for others is another one.

    Raises:
        LarderError: as `Engine.read` does.
    """
    desk, log = engine.desk, ChatLog(replace(conversation, questions=()))
    ids = log.transcript(desk.scribe).ids
    if not ids:
        return engine.read(conversation, prompts, progress), ResumeResult(None, NOT_SAVED)
    tokens = resolve_budget(engine.policy, engine.sizes.budget, len(ids), desk.decoder.spec)
    policy = engine.policy.filled(tokens, engine.sizes.block)
    told = [text for name in sorted(prompts) for text in (name, prompts[name])]
    text = json.dumps(chat_log_record(log))
    name = f"reading {key_of('reading', text, str(policy), *told)[:32]}"
    resumed = keeper.load(name, desk, policy, log)
    if resumed.state is not None:
        return replace(resumed.state.memory, conversation=conversation), resumed
    memory = engine.read(conversation, prompts, progress)
    keeper.note_reading(memory)
    keeper.save(name, ChatState(memory, log))
    return memory, resumed
