"""Public views of a session: summary, transcript, cached positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from larder.cache.forms.base import CacheLayer
from larder.core.observation import Entries
from larder.server.answer_form import PLAIN_FORM, AnswerForm
from larder.server.request import ChatMessage
from larder.server.session_state import SessionState
from larder.server.transcript import ASSISTANT, PositionMap
from larder.store.sessions.records import Record

REPLACEMENT_CHARACTER = "\ufffd"  # decoded from incomplete UTF-8
MAX_CHARACTER_TOKENS = 4  # tokens that one character may be spread over


@dataclass(frozen=True)
class SessionInfo:
    """Summary of a session for its owner.

    Args:
        name: given by the client, or generated.
        state: `running`, `waiting` or `idle`.
        tokens: of the whole transcript.
        tier_bytes: bytes of its cache by tier: `device`, `host`, `disk`.
        tier: the fastest tier that has the whole cache; `none` if only the tokens are stored.
        kept_tokens: entries that can be attended to, offloaded ones included; per kv head on
            average.
        held_tokens: entries of the largest cache that count against the budget; per kv head on
            average.
        budget_tokens: limit of `held_tokens`; None without a limit.
        evicted_tokens, merged_tokens, lossless: as in `Report`.
        epoch: turns committed so far.
        made, last_used: seconds since 1970.
        durable: true if the store has all turns.
    """

    name: str
    state: str
    turns: int
    tokens: int
    tier: str
    tier_bytes: Mapping[str, int]
    kept_tokens: int
    evicted_tokens: int
    merged_tokens: int
    lossless: bool
    pinned: bool
    epoch: int
    made: float
    last_used: float
    durable: bool = True
    held_tokens: int = 0
    budget_tokens: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The session as JSON."""
        fields = {**vars(self), "tier_bytes": dict(self.tier_bytes)}
        del fields["name"]
        return {"id": self.name, "object": "session", **fields}


@dataclass(frozen=True)
class SessionTranscript:
    """Messages of a session.

    Args:
        spans: token range [start, stop) of each message.
    """

    view: SessionInfo
    turns: tuple[ChatMessage, ...]
    spans: tuple[tuple[int, int], ...]

    def as_json(self) -> dict[str, Any]:
        """The session as JSON, without its messages."""
        return self.view.as_json()


@dataclass(frozen=True)
class EpisodeInfo:
    """One of the caches of a session with episodes.

    Args:
        kept_tokens: entries in the cache, per kv head on average.
        segments: segments of the conversation assigned to the episode.
        about: its representative segments.
        tier: where the cache is.
    """

    number: int
    is_active: bool
    kept_tokens: int
    segments: int
    about: tuple[str, ...]
    tier: str
    nbytes: int


@dataclass(frozen=True)
class CachedPositions:
    """Positions of the text that are still in the cache, by layer and kv head.

    Args:
        tokens: tokens that were read.
        layers: ascending text positions by layer and kv head; of the cache that answered last, if
            there are several.
        texts: the text of each token of the transcript; empty if there is no cache.
        parked: offloaded positions in the form of `layers`; empty if there are none.
        episodes: all caches of a session with episodes.
        tier: tier of the cache, as in `SessionInfo`; on some tiers nothing else is known.
        turns, spans: as in `SessionTranscript`.
    """

    tokens: int
    layers: tuple[tuple[tuple[int, ...], ...], ...]
    texts: tuple[str, ...] = ()
    parked: tuple[tuple[tuple[int, ...], ...], ...] = ()
    episodes: tuple[EpisodeInfo, ...] = ()
    tier: str = "none"
    turns: tuple[ChatMessage, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The map as JSON, positions as ranges."""
        turns = [
            {"role": turn.role, "text": turn.text, "start": start, "stop": stop}
            for turn, (start, stop) in zip(self.turns, self.spans, strict=True)
        ]
        layers, parked = (
            [[_ranges(positions) for positions in heads] for heads in part]
            for part in (self.layers, self.parked)
        )
        return {
            "tokens": self.tokens,
            "layers": layers,
            "parked": parked,
            "episodes": [asdict(episode) for episode in self.episodes],
            "tier": self.tier,
            "turns": turns,
            "texts": list(self.texts),
        }


@dataclass(frozen=True)
class ServedModel:
    """A model that the server offers.

    Args:
        context_tokens: longest supported text; None if unknown.
        policy: canonical spelling of the policy.
        made: seconds since 1970.
        budget_tokens: M, entries per kv head of one cache; None without a limit.
        beyond_budget: what is stored in addition to the budget, one clause each.
        template_variables: variables of the chat template that a conversation may set.
        takes_images: messages may have images.
        takes_tools: the chat template writes tools.
        answer_form: parsers of answers.
        primary: first name of the model, which answers have; empty for `name`.
    """

    name: str
    policy: str
    context_tokens: int | None
    made: float
    budget_tokens: int | None = None
    beyond_budget: tuple[str, ...] = ()
    template_variables: frozenset[str] = frozenset()
    takes_images: bool = False
    takes_tools: bool = False
    answer_form: AnswerForm = PLAIN_FORM
    primary: str = ""

    @property
    def answer_name(self) -> str:
        """Name that answers have."""
        return self.primary or self.name


def session_status(session: SessionState) -> str:
    """State of a session, as in `SessionInfo`."""
    if session.usage.is_running:
        return "running"
    return "waiting" if session.usage.is_answering else "idle"


def session_info(session: SessionState) -> SessionInfo:
    """Summary of a session in memory."""
    residency = session.residency
    held, serving = residency.occupancy, session.serving
    kept = held.entries // max(1, serving.heads) if serving.is_limited else held.read
    lost = max(0, held.read - kept)
    return SessionInfo(
        name=session.name,
        state=session_status(session),
        turns=session.transcript.num_messages,
        tokens=session.transcript.tokens,
        tier=residency.tier,
        tier_bytes={
            "device": residency.device_bytes,
            "host": residency.host_bytes,
            "disk": 0 if residency.saved_cache is None else residency.saved_cache.nbytes,
        },
        kept_tokens=kept,
        evicted_tokens=0 if serving.merges else lost,
        merged_tokens=lost if serving.merges else 0,
        lossless=residency.is_lossless,
        pinned=session.usage.is_pinned,
        epoch=session.transcript.epoch,
        made=session.identity.created,
        last_used=session.usage.last_used,
        durable=session.is_durable,
        held_tokens=_max_cache_entries(session) // max(1, serving.heads),
        budget_tokens=serving.budget_tokens,
    )


def _max_cache_entries(session: SessionState) -> int:
    """Entries of the largest cache of a session, over layers and heads."""
    residency = session.residency
    if residency.caches is None:
        return residency.occupancy.entries
    return max((held.entries for held in residency.caches.usage()), default=0)


def stored_session_info(record: Record, has_cache: bool) -> SessionInfo:
    """Summary of a session that only the store has."""
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


def session_transcript(session: SessionState) -> SessionTranscript:
    """Messages of a session; messages of one prompt share its tokens evenly."""
    turns, spans, start = list[ChatMessage](), list[tuple[int, int]](), 0
    for each in session.turns:
        for index in range(len(each.messages)):
            first, stop = (
                start + len(each.prompt_ids) * edge // len(each.messages)
                for edge in (index, index + 1)
            )
            spans.append((first, stop))
        middle = start + len(each.prompt_ids)
        start = middle + len(each.answer_ids)
        spans.append((middle, start))
        turns += [*each.messages, ChatMessage(ASSISTANT, each.text)]
    if not turns:
        turns = list(session.transcript.opening_messages)
        spans = [(0, 0)] * len(turns)
    return SessionTranscript(session_info(session), tuple(turns), tuple(spans))


def cached_positions(session: SessionState) -> CachedPositions:
    """Positions in the session's cache; empty if the cache is not in memory."""
    residency = session.residency
    held, tier = residency.resident_caches, residency.tier
    cache = None if held is None else held.active_cache()
    if held is None or cache is None:
        return CachedPositions(0, (), episodes=_episodes(session), tier=tier)
    maps = residency.position_maps.of(residency.episode)
    tokens = held.num_tokens(cache.next_position)
    layers = tuple(_positions(_entries(store), maps) for store in cache.layers)
    slow = {each.layer.index: each for each in cache.tiers if each.has_offloaded}
    parked = tuple(
        _positions(slow[layer.index].parked(), maps) if layer.index in slow else ()
        for layer in cache.spec.layers
    )
    parked = parked if slow else ()
    return CachedPositions(tokens, layers, parked=parked, episodes=_episodes(session), tier=tier)


def _entries(store: CacheLayer) -> Entries:
    """Entries of a layer; its storage stays shared."""
    return (store.fork() if store.shared_length else store).entries()


def _positions(entries: Entries, maps: PositionMap) -> tuple[tuple[int, ...], ...]:
    """Text positions of the entries of each head."""
    heads = range(len(entries.lengths))
    return tuple(maps.transcript_positions(entries.head_positions(head).tolist()) for head in heads)


def _episodes(session: SessionState) -> tuple[EpisodeInfo, ...]:
    """Caches of a session with episodes."""
    held = session.residency.resident_caches
    router = None if held is None else held.router
    if held is None or router is None:
        return ()
    caches = held.caches
    about, segments = router.prompts(), router.segments()
    return tuple(
        EpisodeInfo(
            number=index,
            is_active=index == caches.active_number,
            kept_tokens=usage.entries // max(1, session.serving.heads),
            segments=segments[index],
            about=about[index],
            tier="device" if index == caches.active_number else "host",
            nbytes=usage.nbytes,
        )
        for index, usage in enumerate(caches.usage() if about else ())
    )


class TranscriptTexts:
    """Text of each token id, memoized. Not safe from threads.

    Args:
        decode: text of token ids, without special tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """One text per token; a character spread over several tokens belongs to the last one."""
        texts = [self._text(token) for token in ids]
        start = 0
        while start < len(texts):
            if REPLACEMENT_CHARACTER in texts[start]:
                start = self._join_characters(texts, ids, start)
            start += 1
        return tuple(texts)

    def _text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def _join_characters(self, texts: list[str], ids: Sequence[int], start: int) -> int:
        """Join tokens from `start` on until they decode to whole characters;
        index of the last one."""
        for stop in range(start + 2, min(start + MAX_CHARACTER_TOKENS, len(ids)) + 1):
            text = self._decode(list(ids[start:stop]))
            if REPLACEMENT_CHARACTER not in text:
                texts[start:stop] = [""] * (stop - start - 1) + [text]
                return stop - 1
        return start


def _ranges(positions: tuple[int, ...]) -> list[int]:
    """Ascending positions as start, stop, start, stop, ..."""
    ranges: list[int] = []
    for position in positions:
        if ranges and ranges[-1] == position:
            ranges[-1] += 1
        else:
            ranges += (position, position + 1)
    return ranges
