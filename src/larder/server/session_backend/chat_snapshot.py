"""Chat state stored beside the caches: the session state, the active episode, and position maps.

{"schema": 1, "chat": ..., "base": ..., "episode": ..., "spots": [[number, starts, texts], ...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from larder.cache.sequence import SequenceCache
from larder.core.conversation import Conversation, Message
from larder.core.errors import Damaged, LarderError
from larder.engine.chat import EMPTY_HISTORY
from larder.server.request import ChatMessage
from larder.server.resident_caches import COPIES, ResidentCaches
from larder.server.serving_policy import CacheOccupancy
from larder.server.session_state import SessionState
from larder.server.transcript import CompletedTurn, PositionMap, PositionMaps
from larder.session.caches import SessionCaches
from larder.session.chat_cache import ChatCache
from larder.session.chat_state import chat_state_record, parse_chat_record, restore_chat_state
from larder.session.routing import Router
from larder.session.transcript.chat_log import ChatLog, ChatTurn
from larder.session.transcript.chat_template import VARIABLES_ROLE
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

SCHEMA = 1


class ChatCaches(ResidentCaches):
    """Caches of a session of the chat backend: the one that answers on the device, others on the
    host."""

    spans_tiers = True

    def __init__(self, chat_cache: ChatCache) -> None:
        self._chat_cache = chat_cache

    @property
    def caches(self) -> SessionCaches:
        return self._chat_cache.caches

    @property
    def chat_cache(self) -> ChatCache:
        return self._chat_cache

    @property
    def router(self) -> Router:
        return self._chat_cache.state.memory.router

    def stop_rebuild(self) -> None:
        self._chat_cache.stop_refresh()

    @property
    def rebuild_bytes(self) -> int:
        return self._chat_cache.refresh_meter.peak_live_bytes

    @property
    def idle_bytes(self) -> int:
        return self.caches.nbytes

    @property
    def write_bytes(self) -> int:
        """Chat caches are written one by one. Their full size may be held twice meanwhile:
        offloading and activation can both need it."""
        return self.caches.nbytes + COPIES * max(each.nbytes for each in self.caches.usage())

    def occupancy(self, latest: CacheOccupancy) -> CacheOccupancy:
        return latest

    def contains(self, turns: int) -> bool:
        return len(self._chat_cache.state.log.turns) == turns

    def record(self, session: SessionState) -> bytes:
        return encode_chat_state(session)

    def written_caches(self) -> Sequence[SequenceCache]:
        return self.caches.lend_views()

    def active_cache(self) -> SequenceCache | None:
        return self.caches.active_cache

    def num_tokens(self, read: int) -> int:
        return max(read, self._chat_cache.num_tokens)


def encode_chat_state(session: SessionState) -> bytes:
    """The record that `restore_chat` needs beside caches and transcript."""
    residency = session.residency
    assert residency.chat_cache is not None
    maps_by_cache = residency.position_maps.maps.items()
    record = {
        "schema": SCHEMA,
        "chat": chat_state_record(residency.chat_cache.state).decode(),
        "base": residency.rebuilt_turns,
        "episode": residency.episode,
        "spots": [[number, each.starts, each.texts] for number, each in maps_by_cache],
    }
    return json.dumps(record, ensure_ascii=False).encode()


def restore_chat(
    session: SessionState,
    ids: Sequence[int],
    caches: Sequence[SequenceCache],
    chat_state: bytes | None,
) -> None:
    """Install loaded caches in a session, in the state after these tokens.

    Args:
        ids: a prefix of the session's transcript.
        caches: owned by the session afterwards.
        chat_state: record of `encode_chat_state`.

    Raises:
        Damaged: caches and record do not match the transcript; the session is unchanged.
    """
    residency = session.residency
    decoded = parse_chat_record(chat_state, SCHEMA, "The chat state beside the caches")
    serving = session.serving
    try:
        base, episode = int(decoded["base"]), int(decoded["episode"])
        position_maps = PositionMaps(
            {
                int(number): _position_map(starts, texts)
                for number, starts, texts in decoded["spots"]
            }
        )
        data = str(decoded["chat"]).encode()
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(
            f"The chat state beside the caches is invalid ({error}): discard it."
        ) from error
    if not (session.turns and 0 <= episode < len(caches) and 0 <= base <= len(session.turns)):
        raise Damaged("The chat state beside the caches does not match them: discard it.")
    log = session_log(session.root, session.turns, serving.runtime.tokenizer)
    state = restore_chat_state(data, ids, caches, serving.runtime, serving.policy, log, 0.0)
    residency.resident_caches = ChatCaches(ChatCache(serving.runtime, state))
    residency.rebuilt_turns, residency.episode = base, episode
    residency.position_maps = position_maps


def _position_map(starts: Sequence[int], texts: Sequence[int]) -> PositionMap:
    """A position map from its JSON.

    Raises:
        ValueError: the lists are empty or of different lengths.
    """
    if not starts or len(starts) != len(texts):
        raise ValueError(f"a position map of {len(starts)} starts and {len(texts)} texts")
    return PositionMap(tuple(map(int, starts)), tuple(map(int, texts)))


def opening_history(
    name: str, turns: Sequence[ChatMessage], prompt: Sequence[int], tokenizer: TokenizerAdapter
) -> tuple[Conversation, int]:
    """The conversation before the first question, and its number of tokens.

    Args:
        name: root name of the session.
        turns: messages before the first answer.
        prompt: their tokens.
    """
    if len(turns) < 2 or turns[0].role == VARIABLES_ROLE:
        return EMPTY_HISTORY, 0
    messages = tuple(Message(turn.role, turn.text) for turn in turns[:-1])
    history = Conversation(name, messages)
    try:
        ids = tokenizer.encode_conversation(history).ids
    except LarderError:  # not every chat template can end after these messages
        return EMPTY_HISTORY, 0
    return (history, len(ids)) if tuple(prompt[: len(ids)]) == ids else (EMPTY_HISTORY, 0)


def session_log(
    name: str, completed: Sequence[CompletedTurn], tokenizer: TokenizerAdapter
) -> ChatLog:
    """Log of completed turns.

    Args:
        name: root name of the session.
        completed: one or more turns.
    """
    history, skipped = opening_history(
        name, completed[0].messages, completed[0].prompt_ids, tokenizer
    )
    return ChatLog(history, tuple(_exchanges(completed, skipped)))


def _exchanges(completed: Sequence[CompletedTurn], skipped: int) -> Iterator[ChatTurn]:
    for each in completed:
        ids = (*each.prompt_ids[skipped:], *each.answer_ids)
        yield ChatTurn(each.messages[-1].text, each.text, ids)
        skipped = 0
