"""Readings that are kept: of the same text, under the same policy, with the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from larder.core.conversation import Conversation
from larder.engine.engine import Engine
from larder.engine.persistence import NOT_SAVED, ChatPersistence, ResumeResult
from larder.prefill.base import Progress, no_progress
from larder.session.budget_resolution import resolve_budget
from larder.session.chat_state import ChatState
from larder.session.memory import ConversationMemory
from larder.session.transcript.chat_log import ChatLog
from larder.session.transcript.chat_log_record import chat_log_record
from larder.store.digests import key_of


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
