"""Sessions as their owners see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from larder.core.observation import Entries
from larder.server.engine_client import CachedPositions, EpisodeInfo, SessionInfo, SessionTranscript
from larder.server.request import ChatMessage
from larder.server.session_state import ASSISTANT, PositionMap, SessionState
from larder.store.sessions.records import Record


def session_status(sitting: SessionState) -> str:
    """In one word, as in `SessionInfo`."""
    if sitting.is_running:
        return "running"
    return "waiting" if sitting.is_answering else "idle"


def session_info(sitting: SessionState) -> SessionInfo:
    """A session in figures."""
    held, rule = sitting.held, sitting.rule
    kept = held.entries // max(1, rule.heads) if rule.is_limited else held.read
    gone = max(0, held.read - kept)
    return SessionInfo(
        name=sitting.name,
        state=session_status(sitting),
        turns=len(sitting.opening) + sum(len(each.turns) + 1 for each in sitting.said),
        tokens=sitting.tokens,
        tier=sitting.tier,
        tier_bytes={
            "device": sitting.device_bytes,
            "host": sitting.host_bytes,
            "disk": 0 if sitting.kept is None else sitting.kept.nbytes,
        },
        kept_tokens=kept,
        evicted_tokens=0 if rule.merges else gone,
        merged_tokens=gone if rule.merges else 0,
        lossless=sitting.is_lossless,
        pinned=sitting.is_pinned,
        epoch=sitting.epoch,
        made=sitting.made,
        last_used=sitting.last_used,
        durable=sitting.written > 0 and sitting.durable_turns == len(sitting.said),
        held_tokens=_max_cache_entries(sitting) // max(1, rule.heads),
        budget_tokens=rule.budget_tokens,
    )


def _max_cache_entries(sitting: SessionState) -> int:
    """Entries of the fullest of a session's caches, over layers and heads."""
    if sitting.chat_cache is None:
        return sitting.held.entries
    return max((held.entries for held in sitting.chat_cache.caches.usage()), default=0)


def stored_session_info(record: Record, has_cache: bool) -> SessionInfo:
    """A session that only the store has, from what its record tells."""
    labels, nbytes = record.labels, sum(ref.bytes for ref in record.cache_refs)
    return SessionInfo(
        name=record.name,
        state="idle",
        turns=int(labels.get("turns", 0)),
        tokens=record.num_tokens,
        tier="disk" if has_cache else "none",
        tier_bytes={"device": 0, "host": 0, "disk": nbytes if has_cache else 0},
        kept_tokens=int(labels.get("kept", 0)) if has_cache else 0,
        evicted_tokens=int(labels.get("evicted", 0)) if has_cache else 0,
        merged_tokens=int(labels.get("merged", 0)) if has_cache else 0,
        lossless=not has_cache or labels.get("whole") == "yes",
        pinned=record.is_pinned,
        epoch=int(labels.get("epoch", record.epoch)),
        made=float(labels.get("made", record.made)),
        last_used=record.made,
        held_tokens=int(labels.get("held", 0)) if has_cache else 0,
        budget_tokens=int(labels["budget"]) if labels.get("budget") else None,
    )


def session_transcript(sitting: SessionState) -> SessionTranscript:
    """A session with what was said; messages of one prompt share its tokens evenly."""
    turns, spans, start = list[ChatMessage](), list[tuple[int, int]](), 0
    for each in sitting.said:
        for number in range(len(each.turns)):
            first, stop = (
                start + len(each.prompt) * edge // len(each.turns) for edge in (number, number + 1)
            )
            spans.append((first, stop))
        middle = start + len(each.prompt)
        start = middle + len(each.answer)
        spans.append((middle, start))
        turns += [*each.turns, ChatMessage(ASSISTANT, each.text)]
    if not turns:
        turns, spans = list(sitting.opening), [(0, 0)] * len(sitting.opening)
    return SessionTranscript(session_info(sitting), tuple(turns), tuple(spans))


def cached_positions(sitting: SessionState) -> CachedPositions:
    """What the cache holds, looked at where it is; nothing where that cannot be seen from here."""
    cache, tier = sitting.active, sitting.tier
    if sitting.parked is not None:
        cache = sitting.parked.shown(sitting.rule.desk.decoder.spec)
    if cache is None:
        return CachedPositions(0, (), episodes=_episodes(sitting), tier=tier)
    spots, tokens = sitting.spots.of(sitting.episode), cache.next_position
    layers = tuple(_positions(cache.entries(layer.index), spots) for layer in cache.spec.layers)
    slow = {each.layer.index: each for each in cache.tiers if each.has_offloaded}
    parked = tuple(
        _positions(slow[layer.index].parked(), spots) if layer.index in slow else ()
        for layer in cache.spec.layers
    )
    if sitting.chat_cache is not None:
        tokens = max(tokens, sitting.chat_cache.num_tokens)
    held = parked if slow else ()
    return CachedPositions(tokens, layers, parked=held, episodes=_episodes(sitting), tier=tier)


def _positions(held: Entries, spots: PositionMap) -> tuple[tuple[int, ...], ...]:
    """Where in the text the entries of each head stand."""
    heads = range(len(held.lengths))
    return tuple(spots.placed(held.head_positions(head).tolist()) for head in heads)


def _episodes(sitting: SessionState) -> tuple[EpisodeInfo, ...]:
    """The caches of a session that has one for each topic."""
    if sitting.chat_cache is None:
        return ()
    shelf, router = sitting.chat_cache.caches, sitting.chat_cache.state.memory.router
    about, segments = router.prompts(), router.segments()
    return tuple(
        EpisodeInfo(
            number=number,
            is_active=number == shelf.active_number,
            kept_tokens=held.entries // max(1, sitting.rule.heads),
            segments=segments[number],
            about=about[number],
            tier="device" if number == shelf.active_number else "host",
            nbytes=held.nbytes,
        )
        for number, held in enumerate(shelf.usage() if about else ())
    )


REPLACEMENT_CHARACTER = "\ufffd"  # what a tokenizer writes for bytes that are no whole character
MAX_CHARACTER_TOKENS = 4  # tokens that a character is spread over


class TokenTexts:
    """Texts of token ids, each looked up once. Not safe from threads.

    Args:
        decode: the text of token ids, without special tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """One text per token; of tokens that share a character, the last one has it."""
        texts = [self._text(token) for token in ids]
        start = 0
        while start < len(texts):
            if REPLACEMENT_CHARACTER in texts[start]:
                start = self._mend(texts, ids, start)
            start += 1
        return tuple(texts)

    def _text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def _mend(self, texts: list[str], ids: Sequence[int], start: int) -> int:
        """Join tokens from here on until they make whole characters; the last that was joined."""
        for stop in range(start + 2, min(start + MAX_CHARACTER_TOKENS, len(ids)) + 1):
            text = self._decode(list(ids[start:stop]))
            if REPLACEMENT_CHARACTER not in text:
                texts[start:stop] = [""] * (stop - start - 1) + [text]
                return stop - 1
        return start
