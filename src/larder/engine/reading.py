"""Readings that are kept: of the same text, under the same policy, with the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from larder.core.conversation import Conversation
from larder.engine.engine import Engine
from larder.engine.keeping import NEW, Keeper, Resumed
from larder.prefill.base import Progress, silent
from larder.session.log import Log
from larder.session.log_format import record_of
from larder.session.memory import Memory
from larder.session.sizes import resolve
from larder.session.snapshot import State
from larder.store.digests import key_of


def read_or_restore(
    engine: Engine,
    keeper: Keeper,
    conversation: Conversation,
    prompts: Mapping[str, str],
    progress: Progress = silent,
) -> tuple[Memory, Resumed]:
    """Restore a reading that was kept, or read, and keep that.

    Args:
        prompts: as `Engine.read` takes them; a reading for others is another one.

    Raises:
        LarderError: as `Engine.read` does.
    """
    desk, log = engine.desk, Log(replace(conversation, questions=()))
    ids = log.transcript(desk.scribe).ids
    if not ids:
        return engine.read(conversation, prompts, progress), Resumed(None, NEW)
    tokens = resolve(engine.policy, engine.sizes.budget, len(ids), desk.decoder.spec)
    policy = engine.policy.filled(tokens, engine.sizes.block)
    told = [text for name in sorted(prompts) for text in (name, prompts[name])]
    text = json.dumps(record_of(log))
    name = f"reading {key_of('reading', text, str(policy), *told)[:32]}"
    resumed = keeper.load(name, desk, policy, log)
    if resumed.state is not None:
        return replace(resumed.state.memory, conversation=conversation), resumed
    memory = engine.read(conversation, prompts, progress)
    keeper.note_reading(memory)
    keeper.save(name, State(memory, log))
    return memory, resumed
