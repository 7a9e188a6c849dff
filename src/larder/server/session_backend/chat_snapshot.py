"""What the caches of a chat do not say of it, beside them in the store: the way to them, which of
them answered last, and where in the text they stand.

    {"schema": 1, "chat": ..., "base": ..., "episode": ..., "spots": [[number, starts, texts], ...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from larder.cache.sequence import SequenceCache
from larder.core.conversation import Conversation, Message
from larder.core.errors import Damaged, LarderError
from larder.engine.chat import EMPTY_HISTORY
from larder.server.request import ChatMessage
from larder.server.session_state import CompletedTurn, PositionMap, PositionMaps, SessionState
from larder.session.chat_cache import ChatCache
from larder.session.chat_state import chat_state_record, restore_chat_state
from larder.session.transcript.chat_log import ChatLog, ChatTurn
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

SCHEMA = 1


def has_all_turns(sitting: SessionState) -> bool:
    """Whether the caches of a chat are those of all that was said, and no turn is half in them."""
    cabinet = sitting.chat_cache
    return cabinet is not None and len(cabinet.state.log.turns) == len(sitting.said)


def encode_chat_state(sitting: SessionState) -> bytes:
    """All that `restore_chat` needs of a chat that is up to date, but for its caches and its
    text.
    """
    assert sitting.chat_cache is not None
    spots = sitting.spots.own.items()
    record = {
        "schema": SCHEMA,
        "chat": chat_state_record(sitting.chat_cache.state).decode(),
        "base": sitting.base,
        "episode": sitting.episode,
        "spots": [[number, each.starts, each.texts] for number, each in spots],
    }
    return json.dumps(record, ensure_ascii=False).encode()


def restore_chat(
    sitting: SessionState, ids: Sequence[int], caches: Sequence[SequenceCache], beside: bytes | None
) -> None:
    """Have a session be held in caches that came back, as when it had said these tokens.

    Args:
        ids: the session's text begins with them.
        caches: taken over.

    Raises:
        Damaged: they are not those of that text; the session is as before.
    """
    known, rule = _parsed(beside), sitting.rule
    try:
        base, episode = int(known["base"]), int(known["episode"])
        spots = PositionMaps(
            {int(number): _position_map(*told) for number, *told in known["spots"]}
        )
        data = str(known["chat"]).encode()
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"What stands beside the chat's caches cannot be used ({error}).") from error
    if not (sitting.said and 0 <= episode < len(caches) and 0 <= base <= len(sitting.said)):
        raise Damaged("What stands beside the chat's caches does not fit them.")
    log = session_log(sitting.root, sitting.said, rule.desk.tokenizer)
    state = restore_chat_state(data, ids, caches, rule.desk, rule.policy, log, 0.0)
    sitting.chat_cache = ChatCache(rule.desk, state)
    sitting.base, sitting.episode, sitting.spots = base, episode, spots


def _parsed(beside: bytes | None) -> Mapping[str, Any]:
    try:
        known = json.loads(beside or b"")
    except (ValueError, RecursionError) as error:
        raise Damaged("What stands beside the chat's caches is not JSON.") from error
    if not isinstance(known, dict) or known.get("schema") != SCHEMA:
        raise Damaged(f"What stands beside the chat's caches is not of schema {SCHEMA}.")
    return known


def _position_map(starts: Sequence[int], texts: Sequence[int]) -> PositionMap:
    """Raises: ValueError: this is no way from one to the other."""
    if not starts or len(starts) != len(texts):
        raise ValueError("its places do not fit together")
    return PositionMap(tuple(map(int, starts)), tuple(map(int, texts)))


def opening_history(
    name: str, turns: Sequence[ChatMessage], prompt: Sequence[int], scribe: TokenizerAdapter
) -> tuple[Conversation, int]:
    """What was said before the first question, and how many tokens that is.

    Args:
        name: of the session that all its forks began as.
        turns: before the first answer.
        prompt: the tokens that they came to.
    """
    if len(turns) < 2:
        return EMPTY_HISTORY, 0
    messages = tuple(Message(turn.role, turn.text) for turn in turns[:-1])
    history = Conversation(name, messages)
    try:
        ids = scribe.encode_conversation(history).ids
    except LarderError:  # not every template can be closed anywhere
        return EMPTY_HISTORY, 0
    return (history, len(ids)) if tuple(prompt[: len(ids)]) == ids else (EMPTY_HISTORY, 0)


def session_log(name: str, said: Sequence[CompletedTurn], scribe: TokenizerAdapter) -> ChatLog:
    """The log of finished exchanges.

    Args:
        name: as in `opening_history`.
        said: one or more.
    """
    history, skipped = opening_history(name, said[0].turns, said[0].prompt, scribe)
    return ChatLog(history, tuple(_exchanges(said, skipped)))


def _exchanges(said: Sequence[CompletedTurn], skipped: int) -> Iterator[ChatTurn]:
    for each in said:
        ids = (*each.prompt[skipped:], *each.answer)
        yield ChatTurn(each.turns[-1].text, each.text, ids)
        skipped = 0
