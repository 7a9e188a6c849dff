"""Session index: sessions by tenant and name, and the resolution of a request to a session.

Messages decide, names are hints. A request continues a session if its messages begin with the whole
transcript. If they diverge from it, the request continues in a fork, and the session is unchanged.
A repeated request gets the stored answer.
"""

from __future__ import annotations

import secrets
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from larder.core.session_name import branch_name, root_name
from larder.core.types import TokenIds
from larder.server.api_errors import (
    invalid_request,
    session_busy,
    session_exists,
    session_not_found,
    validate_session_name,
)
from larder.server.image_prompts import ImagePromptEncoder, rendered_prompt
from larder.server.request import ChatMessage, Request
from larder.server.serving_policy import ServingPolicy
from larder.server.session_state import SessionIdentity, SessionState
from larder.server.transcript import ASSISTANT, TOKEN_TYPECODE, CompletedTurn, GenerationParams
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

PREFIX_TOKENS = 16  # shorter common prefixes are not worth sharing


@dataclass(frozen=True)
class ResolvedSession:
    """The session that a request continues.

    Args:
        past_turns: completed turns that the prompt begins with.
        new_messages: messages after them.
        prompt_ids: all tokens before the answer.
        repeated_turn: the turn that has answered this very request before.
    """

    session: SessionState
    past_turns: tuple[CompletedTurn, ...] = ()
    new_messages: tuple[ChatMessage, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    repeated_turn: CompletedTurn | None = None


class SessionIndex:
    """All sessions in memory by tenant and name. For the model's thread."""

    def __init__(
        self, tokenizer: TokenizerAdapter, images: ImagePromptEncoder, clock: Callable[[], float]
    ) -> None:
        self._tokenizer, self._images, self._clock = tokenizer, images, clock
        self._sessions: dict[tuple[str, str], SessionState] = {}
        self._families: dict[tuple[str, str], dict[int, SessionState]] = defaultdict(dict)
        self._firsts: dict[tuple[str, int], dict[int, SessionState]] = defaultdict(dict)
        self._prefixes: dict[tuple[str, bytes], dict[int, SessionState]] = defaultdict(dict)
        self._indexed: dict[int, tuple[tuple[str, int], tuple[str, bytes]]] = {}
        self._avoided: dict[tuple[str, str], frozenset[str]] = {}
        self._count = 0

    def __iter__(self) -> Iterator[SessionState]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def of(self, tenant: str) -> list[SessionState]:
        """Sessions of a tenant, most recently used first."""
        sessions = [each for (whose, _), each in self._sessions.items() if whose == tenant]
        return sorted(sessions, key=lambda each: -each.usage.last_used)

    def has(self, tenant: str, name: str) -> bool:
        """True if the session is in memory."""
        return (tenant, name) in self._sessions

    def find(self, tenant: str, name: str) -> SessionState:
        """The session of this name.

        Raises:
            ApiError: 404 `session_not_found`.
        """
        found = self._sessions.get((tenant, name))
        if found is None:
            raise session_not_found(name)
        return found

    def idle(self, tenant: str, name: str) -> SessionState:
        """The session of this name, if it is not answering.

        Raises:
            ApiError: 404 `session_not_found`, or 409 `session_busy`.
        """
        found = self.find(tenant, name)
        if found.usage.is_answering:
            raise session_busy(name)
        return found

    def open(self, tenant: str, name: str | None, serving: ServingPolicy) -> SessionState:
        """Create a session; without a name, under a random one.

        Raises:
            ApiError: 409 `session_exists`, or 400 `invalid_session_id`.
        """
        name = f"s-{secrets.token_hex(8)}" if name is None else validate_session_name(name)
        if (tenant, name) in self._sessions:
            raise session_exists(name)
        self._count += 1
        now = self._clock()
        session = SessionState(SessionIdentity(self._count, tenant, name, now), serving)
        session.usage.last_used = now
        self._sessions[tenant, name] = session
        self._families[tenant, session.root][session.key] = session
        return session

    def fork(
        self, source: SessionState, name: str | None, serving: ServingPolicy, exchanges: int
    ) -> SessionState:
        """Create a session that begins with turns of another; without a name, as a numbered branch
        of it."""
        number = len(self.family(source))
        avoided = self._avoided.get((source.tenant, source.root), ())
        while name is None:
            number += 1
            candidate = branch_name(source.root, number)
            is_taken = self.has(source.tenant, candidate) or candidate in avoided
            name = None if is_taken else candidate
        forked = self.open(source.tenant, name, serving)
        forked.transcript.turns, forked.residency.origin = list(source.turns[:exchanges]), source
        forked.transcript.opening_messages = () if exchanges else source.transcript.opening_messages
        return forked

    def index_session(self, session: SessionState) -> None:
        """Index the session by its first messages and tokens; after each first turn."""
        self._unindex(session)
        first, tenant = session.turns[0], session.tenant
        keys = (
            (tenant, list(prefix_hashes(first.messages))[-1]),
            prefix_key(tenant, first.prompt_ids),
        )
        self._indexed[session.key] = keys
        self._firsts[keys[0]][session.key] = self._prefixes[keys[1]][session.key] = session

    def reserve_names(self, tenant: str, root: str, names: Iterable[str]) -> None:
        """Reserve names that branches of a session must not get, although they
        are not in memory."""
        self._avoided[tenant, root] = frozenset(names)

    def set_workflow_steps(self, tenant: str, steps: Mapping[str, int]) -> None:
        """Set the number of workflow steps until sessions are used again, by name."""
        for name, count in steps.items():
            session = self._sessions.get((tenant, name))
            if session is not None:
                session.usage.workflow_steps = float(count)

    def forget(self, session: SessionState) -> None:
        """Remove a session from all indexes."""
        self._sessions.pop((session.tenant, session.name), None)
        _discard_key(self._families, family_key := (session.tenant, session.root), session)
        if family_key not in self._families:
            self._avoided.pop(family_key, None)
        self._unindex(session)

    def _unindex(self, session: SessionState) -> None:
        keys = self._indexed.pop(session.key, None)
        if keys is not None:
            _discard_key(self._firsts, keys[0], session)
            _discard_key(self._prefixes, keys[1], session)

    def family(self, session: SessionState) -> list[SessionState]:
        """All sessions with the same root, the session included."""
        return list(self._families.get((session.tenant, session.root), {}).values())

    def branches(self, tenant: str, name: str) -> list[str]:
        """Names of the branches of a session; empty for a branch."""
        family = self._families.get((tenant, name), {}).values()
        return [each.name for each in family if each.name != name]

    def find_shared_prefix(
        self, session: SessionState, prompt_tokens: TokenIds
    ) -> SessionState | None:
        """Another session of the tenant with the longest common prefix in its cache.

        Only lossless caches are shared, except within a family.
        """
        key = prefix_key(session.tenant, prompt_tokens)
        ranked = [
            (each.usable_prefix_len(prompt_tokens), each.residency.is_resident, each.key, each)
            for each in self._prefixes.get(key, {}).values()
            if each is not session
            and each.serving is session.serving
            and (each.residency.is_lossless or each.root == session.root)
        ]
        usable, *_, best = max(ranked, default=(0, None))
        return best if usable else None

    def resolve(self, request: Request, serving: ServingPolicy) -> ResolvedSession:
        """The session that a request continues; it is created if necessary.

        Raises:
            ApiError: `follows` names no session, the session is answering, or there is nothing to
                answer.
        """
        if request.raw_prompt is not None:
            messages, prompt_tokens = self._whole_prompt(request)
            return ResolvedSession(self._create(request, serving), (), messages, prompt_tokens)
        if request.follows is not None:
            return self._resolve_follows(request, serving)
        return self._resolve_messages(request, serving)

    def resolve_ephemeral(
        self, request: Request, serving: ServingPolicy, leader: ResolvedSession | None
    ) -> ResolvedSession:
        """A session for one answer, which is removed with its request.

        Args:
            leader: where another answer to the same prompt is given; None if that is not known.
        """
        name = f"s-{secrets.token_hex(8)}"
        if leader is None:
            messages, prompt_tokens = self._whole_prompt(request)
            session = self._provisional(self.open(request.tenant, name, serving))
            return ResolvedSession(session, (), messages, prompt_tokens)
        forked = self.fork(leader.session, name, leader.session.serving, len(leader.past_turns))
        return replace(leader, session=self._provisional(forked))

    def _whole_prompt(self, request: Request) -> tuple[tuple[ChatMessage, ...], tuple[int, ...]]:
        """Messages and tokens of a request that continues no session."""
        if request.raw_prompt is None:
            return request.turns, self.prompt_ids((), request.turns, request.images)
        prompt_tokens = request.raw_ids or self._tokenizer.encode(request.raw_prompt)
        if not prompt_tokens:
            raise invalid_request("The prompt is empty: send at least one token.", "prompt")
        return (ChatMessage("", request.raw_prompt),), prompt_tokens

    def _provisional(self, session: SessionState) -> SessionState:
        """Mark a session that is removed if its first turn fails."""
        session.usage.is_provisional = True
        return session

    def _create(self, request: Request, serving: ServingPolicy) -> SessionState:
        """Create a session, under the client's name if it is free."""
        name = request.session
        if name is not None and (request.tenant, name) in self._sessions:
            return self._provisional(self.fork(self.find(request.tenant, name), None, serving, 0))
        if name is None and request.routing_tag:
            name = f"s-{request.routing_tag}-{secrets.token_hex(8)}"
        return self._provisional(self.open(request.tenant, name, serving))

    def _resolve_follows(self, request: Request, serving: ServingPolicy) -> ResolvedSession:
        name = str(request.follows)
        session = self.find(request.tenant, name)
        last = session.turns[-1:]
        is_same = bool(last) and self._is_same_request(last[0], request, request.turns)
        if is_same and session.serving is serving:
            return ResolvedSession(session, repeated_turn=last[0])
        self.idle(request.tenant, name)
        turns = (
            request.turns if session.turns else session.transcript.opening_messages + request.turns
        )
        past_turns = tuple(session.turns)
        prompt_tokens = self.prompt_ids(past_turns, turns, request.images)
        if session.serving is not serving:
            session = self._provisional(self.fork(session, None, serving, len(past_turns)))
        return ResolvedSession(session, past_turns, turns, prompt_tokens)

    def _resolve_messages(self, request: Request, serving: ServingPolicy) -> ResolvedSession:
        candidates = self.candidates(request)
        best, match = self._best(candidates, request, serving)
        if best is not None and self._is_repeated(best, match, request, serving):
            return ResolvedSession(best, repeated_turn=best.turns[-1])
        waiting = [each for each in candidates if each.usage.is_answering]
        is_whole = best is not None and match.exchanges == len(best.turns)
        if request.session is not None and waiting and (not is_whole or best in waiting):
            raise session_busy(request.session)
        exchanges = match.exchanges if best is not None else 0
        past_turns = tuple(best.turns[:exchanges]) if best is not None else ()
        prompt_tokens = self.prompt_ids(past_turns, match.new_messages, request.images)
        if best is None or (not exchanges and self._is_free(request)):
            return ResolvedSession(self._create(request, serving), (), request.turns, prompt_tokens)
        if not is_whole or best.usage.is_answering or best.serving is not serving:
            best = self._provisional(self.fork(best, None, serving, exchanges))
        return ResolvedSession(best, past_turns, match.new_messages, prompt_tokens)

    def branch_root(self, request: Request, serving: ServingPolicy) -> str | None:
        """Root of the session that a request branches from; None if it creates no branch."""
        name = request.follows or request.session
        if request.follows is not None or request.raw_prompt is not None:
            known = None if name is None else self._sessions.get((request.tenant, name))
            if known is None or (request.follows is not None and known.serving is serving):
                return None
            return known.root
        best, match = self._best(self.candidates(request), request, serving)
        is_first = not match.exchanges and self._is_free(request)
        if best is None or is_first or self._is_repeated(best, match, request, serving):
            return None
        is_whole = match.exchanges == len(best.turns) and best.serving is serving
        return None if is_whole and not best.usage.is_answering else best.root

    def _is_free(self, request: Request) -> bool:
        """True if a new session can have the name that the request gives."""
        return request.session is None or not self.has(request.tenant, request.session)

    def candidates(self, request: Request) -> list[SessionState]:
        """Sessions that the request may continue."""
        tenant = request.tenant
        if request.session is not None:
            return list(self._families.get((tenant, root_name(request.session)), {}).values())
        keys = ((tenant, digest) for digest in prefix_hashes(request.turns))
        return [each for key in keys for each in self._firsts.get(key, {}).values()]

    def has_exact_match(self, request: Request) -> bool:
        """True if no session outside memory can match the request better."""
        return any(
            continues_session(each.turns, request.turns) for each in self.candidates(request)
        )

    def _best(
        self, candidates: list[SessionState], request: Request, serving: ServingPolicy
    ) -> tuple[SessionState | None, PrefixMatch]:
        """Session with the longest match; of equal ones, one that the messages continue."""
        best, rank, found = None, (-1, False, False, 0), PrefixMatch(0, request.turns)
        for each in candidates:
            match = match_prefix(each.turns, request.turns)
            is_whole = match.exchanges == len(each.turns)
            is_again = self._is_repeated(each, match, request, serving)
            candidate_rank = (
                match.exchanges,
                is_again or is_whole,
                not each.usage.is_answering,
                each.key,
            )
            if candidate_rank > rank:
                best, rank, found = each, candidate_rank, match
        return best, found

    def _is_repeated(
        self, session: SessionState, match: PrefixMatch, request: Request, serving: ServingPolicy
    ) -> bool:
        """True if the request equals the last one of the session, under the same policy."""
        if session.serving is not serving or match.exchanges != len(session.turns) - 1:
            return False
        return self._is_same_request(session.turns[-1], request, match.new_messages)

    def _is_same_request(
        self, turn: CompletedTurn, request: Request, new_messages: tuple[ChatMessage, ...]
    ) -> bool:
        is_same = turn.messages == new_messages and turn.params == GenerationParams.of(request)
        return is_same and request.logprobs is None

    def prompt_ids(
        self,
        past_turns: tuple[CompletedTurn, ...],
        new_messages: tuple[ChatMessage, ...],
        images: Mapping[str, bytes],
    ) -> tuple[int, ...]:
        """Token ids of completed turns and new messages.

        Args:
            images: files of the images of the messages, by SHA-256.

        Raises:
            ApiError: 400: there is no message to answer, or its images cannot be read.
        """
        if not new_messages or new_messages[-1].role == ASSISTANT:
            raise invalid_request(
                "The last message must not be the assistant's: send a message to answer.",
                "messages",
            )
        prompt = rendered_prompt(self._tokenizer, past_turns, new_messages)
        if prompt.digests:
            new = self._images.ids(prompt, images)
        else:
            new = self._tokenizer.encode(prompt.text)
        ids = [
            token
            for each in past_turns
            for part in (each.prompt_ids, each.answer_ids)
            for token in part
        ]
        return (*ids, *new)


def _discard_key(
    index: dict[tuple, dict[int, SessionState]], key: tuple, session: SessionState
) -> None:
    index.get(key, {}).pop(session.key, None)
    if key in index and not index[key]:
        del index[key]


@dataclass(frozen=True)
class PrefixMatch:
    """Common prefix of a request's messages and a session.

    Args:
        exchanges: number of equal turns.
        new_messages: messages after them.
    """

    exchanges: int
    new_messages: tuple[ChatMessage, ...]


def match_prefix(turns: Sequence[CompletedTurn], messages: tuple[ChatMessage, ...]) -> PrefixMatch:
    """Compare messages with completed turns; white space around an answer does not count."""
    position = exchanges = 0
    for each in turns:
        stop = position + len(each.messages)
        if messages[position:stop] != each.messages or stop >= len(messages) - 1:
            break
        answer = messages[stop]
        if answer.role != ASSISTANT or answer.text.strip() != each.text.strip():
            break
        position, exchanges = stop + 1, exchanges + 1
    return PrefixMatch(exchanges, messages[position:])


def continues_session(turns: Sequence[CompletedTurn], messages: tuple[ChatMessage, ...]) -> bool:
    """True if the messages are the whole transcript and a new question, or repeat the last
    question; otherwise another session may match better."""
    match = match_prefix(turns, messages)
    if match.exchanges == len(turns):
        return all(message.role != ASSISTANT for message in match.new_messages)
    return match.exchanges == len(turns) - 1 and match.new_messages == turns[-1].messages


def prefix_hashes(turns: Iterable[ChatMessage]) -> Iterator[int]:
    """Hash of each prefix of the messages; matches are compared before use."""
    digest = 0
    for turn in turns:
        digest = hash((digest, turn))
        yield digest


def prefix_key(tenant: str, ids: Sequence[int]) -> tuple[str, bytes]:
    """Index key of sessions that may share a cache: the first tokens of a text."""
    return tenant, array(TOKEN_TYPECODE, ids[:PREFIX_TOKENS]).tobytes()
