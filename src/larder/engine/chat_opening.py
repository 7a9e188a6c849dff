"""What a chat begins with: the log of its session, or a history; and the sizes that hold for it."""

from __future__ import annotations

from dataclasses import replace

from larder.core.conversation import Conversation
from larder.core.errors import InputError, UsageError
from larder.engine.engine import Engine
from larder.session.budget_resolution import resolve_budget, resolve_budget_without_context
from larder.session.policy import Policy
from larder.session.transcript.chat_log import ChatLog
from larder.session.transcript.session_file import ChatRecord, session_path

EMPTY_HISTORY = Conversation("nothing", ())


def initial_log(
    kept: ChatRecord | None, engine: Engine, name: str | None, history: Conversation | None
) -> ChatLog:
    """What a chat begins with: its own log, or the history given.

    Raises:
        InputError: the session was written with another model.
        UsageError: it has another history.
    """
    if kept is None:
        return ChatLog(EMPTY_HISTORY if history is None else replace(history, questions=()))
    if kept.stamp.fingerprint != engine.loaded.decoder.spec.fingerprint:
        raise InputError(
            f"The session file {session_path(str(name))} was written with another model "
            f"({kept.stamp.model}): take --model {kept.stamp.model}, or another session name."
        )
    if history is not None and replace(history, questions=()) != kept.log.history:
        raise UsageError(
            f"The session {name!r} began with another history ({kept.log.history.name}): go on "
            "without giving one, or take another session name."
        )
    return kept.log


def sized_policy(engine: Engine, log: ChatLog) -> Policy:
    """The engine's policy with the sizes that hold for the whole chat: those of its history."""
    spec, sizes, policy = engine.loaded.decoder.spec, engine.sizes, engine.policy
    context = len(log.transcript(engine.scribe).ids)
    if context:
        tokens = resolve_budget(policy, sizes.budget, context, spec)
    else:
        tokens = resolve_budget_without_context(policy, sizes.budget, spec)
    return policy.filled(tokens, sizes.block)
