"""Which session a request belongs to; what was said decides, names are hints.

A request goes on with a session if its messages begin with all that was said there. If they only
begin as the session does, it goes on in a fork, and the session stays as it is. The same request
again gets the same answer again.
"""

from __future__ import annotations

import secrets
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from larder.core.errors import UsageError
from larder.core.session_name import branch_name, root_name
from larder.server.api_errors import (
    invalid_request,
    session_busy,
    session_exists,
    session_not_found,
    validate_session_name,
)
from larder.server.request import ChatMessage, Request
from larder.server.serving_policy import ServingPolicy
from larder.server.session_state import (
    ASSISTANT,
    TOKEN_TYPECODE,
    CompletedTurn,
    GenerationParams,
    SessionState,
)
from larder.session.transcript.chat_template import TemplateMessage as Told
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter


@dataclass(frozen=True)
class ResolvedSession:
    """Where a request goes on.

    Args:
        said: the finished exchanges that its text begins with.
        turns: the messages behind them.
        wanted: every token in front of the answer.
        again: the exchange that has answered this very request before.
    """

    sitting: SessionState
    said: tuple[CompletedTurn, ...] = ()
    turns: tuple[ChatMessage, ...] = ()
    wanted: tuple[int, ...] = ()
    again: CompletedTurn | None = None


class SessionIndex:
    """All sessions by tenant and name. For the model's thread."""

    def __init__(self, scribe: TokenizerAdapter, clock: Callable[[], float]) -> None:
        self._scribe, self._clock = scribe, clock
        self._sittings: dict[tuple[str, str], SessionState] = {}
        self._families: dict[tuple[str, str], dict[int, SessionState]] = defaultdict(dict)
        self._firsts: dict[tuple[str, int], dict[int, SessionState]] = defaultdict(dict)
        self._prefixes: dict[tuple[str, bytes], dict[int, SessionState]] = defaultdict(dict)
        self._indexed: dict[int, tuple[tuple[str, int], tuple[str, bytes]]] = {}
        self._avoided: dict[tuple[str, str], frozenset[str]] = {}
        self._count = 0

    def __iter__(self) -> Iterator[SessionState]:
        return iter(list(self._sittings.values()))

    def __len__(self) -> int:
        return len(self._sittings)

    def of(self, tenant: str) -> list[SessionState]:
        """A tenant's, the one that was used last first."""
        own = [each for (whose, _), each in self._sittings.items() if whose == tenant]
        return sorted(own, key=lambda each: -each.last_used)

    def has(self, tenant: str, name: str) -> bool:
        """Whether there is one of that name."""
        return (tenant, name) in self._sittings

    def find(self, tenant: str, name: str) -> SessionState:
        """Raises: Refusal: there is none."""
        found = self._sittings.get((tenant, name))
        if found is None:
            raise session_not_found(name)
        return found

    def idle(self, tenant: str, name: str) -> SessionState:
        """Raises: Refusal: there is none, or it is answering."""
        found = self.find(tenant, name)
        if found.is_answering:
            raise session_busy(name)
        return found

    def open(self, tenant: str, name: str | None, rule: ServingPolicy) -> SessionState:
        """A new session.

        Raises:
            Refusal: the name is taken, or none.
        """
        name = f"s-{secrets.token_hex(8)}" if name is None else validate_session_name(name)
        if (tenant, name) in self._sittings:
            raise session_exists(name)
        self._count += 1
        now = self._clock()
        sitting = SessionState(self._count, tenant, name, rule, now, last_used=now)
        self._sittings[tenant, name] = sitting
        self._families[tenant, sitting.root][sitting.key] = sitting
        return sitting

    def fork(
        self, source: SessionState, name: str | None, rule: ServingPolicy, exchanges: int
    ) -> SessionState:
        """A session that begins as another one does: a branch of it, unless it has a name."""
        number, avoided = len(self.family(source)), self._avoided.get((source.tenant, source.root))
        while name is None:
            number += 1
            tried = branch_name(source.root, number)
            is_taken = self.has(source.tenant, tried) or tried in (avoided or ())
            name = None if is_taken else tried
        made = self.open(source.tenant, name, rule)
        made.said, made.origin = list(source.said[:exchanges]), source
        made.opening = () if exchanges else source.opening
        return made

    def remember(self, sitting: SessionState) -> None:
        """A turn was added: from now on the session is found by what was said."""
        self._leave_indexes(sitting)
        first, tenant = sitting.said[0], sitting.tenant
        keys = (tenant, list(prefix_hashes(first.turns))[-1]), prefix_key(tenant, first.prompt)
        self._indexed[sitting.key] = keys
        self._firsts[keys[0]][sitting.key] = self._prefixes[keys[1]][sitting.key] = sitting

    def avoid(self, tenant: str, root: str, names: Iterable[str]) -> None:
        """No branch of a session is to have these names, whether or not they are in memory."""
        self._avoided[tenant, root] = frozenset(names)

    def announce(self, tenant: str, steps: Mapping[str, int]) -> None:
        """Somebody knows in how many steps of a workflow sessions are asked again, by name."""
        for name, count in steps.items():
            sitting = self._sittings.get((tenant, name))
            if sitting is not None:
                sitting.steps = float(count)

    def forget(self, sitting: SessionState) -> None:
        """It is no more."""
        self._sittings.pop((sitting.tenant, sitting.name), None)
        _discard_key(self._families, own := (sitting.tenant, sitting.root), sitting)
        if own not in self._families:
            self._avoided.pop(own, None)
        self._leave_indexes(sitting)

    def _leave_indexes(self, sitting: SessionState) -> None:
        keys = self._indexed.pop(sitting.key, None)
        if keys is not None:
            _discard_key(self._firsts, keys[0], sitting)
            _discard_key(self._prefixes, keys[1], sitting)

    def family(self, sitting: SessionState) -> list[SessionState]:
        """All that began as one session, it among them."""
        return list(self._families.get((sitting.tenant, sitting.root), {}).values())

    def branches(self, tenant: str, name: str) -> list[str]:
        """Names of those that began as a session did; none of a branch."""
        family = self._families.get((tenant, name), {}).values()
        return [each.name for each in family if each.name != name]

    def sharing(self, sitting: SessionState, wanted: tuple[int, ...]) -> SessionState | None:
        """Another session of the tenant whose cache can begin a text: the one that has most of it.

        Only what lost nothing is shared, except inside a family of forks.
        """
        key = prefix_key(sitting.tenant, wanted)
        told = [
            (each.usable(wanted), each.has_resident_cache, each.key, each)
            for each in self._prefixes.get(key, {}).values()
            if each is not sitting
            and each.rule is sitting.rule
            and (each.is_lossless or each.root == sitting.root)
        ]
        usable, *_, best = max(told, default=(0, None))
        return best if usable else None

    def resolve(self, request: Request, rule: ServingPolicy) -> ResolvedSession:
        """Where a request goes on; a session that it makes is there from now on.

        Raises:
            Refusal: `follows` names none, the session is answering, or there is nothing to answer.
        """
        if request.raw_prompt is not None:
            wanted = self._scribe.encode(request.raw_prompt)
            if not wanted:
                raise invalid_request("The prompt is empty: say something.", "prompt")
            return ResolvedSession(
                self._named(request, rule), (), (ChatMessage("", request.raw_prompt),), wanted
            )
        if request.follows is not None:
            return self._following(request, rule)
        return self._matching(request, rule)

    def _made(self, sitting: SessionState) -> SessionState:
        """A session that lasts only if its first turn does."""
        sitting.is_provisional = True
        return sitting

    def _named(self, request: Request, rule: ServingPolicy) -> SessionState:
        """A new session, under the client's name where that is free."""
        name = request.session
        if name is not None and (request.tenant, name) in self._sittings:
            return self._made(self.fork(self.find(request.tenant, name), None, rule, 0))
        if name is None and request.routing_tag:
            name = f"s-{request.routing_tag}-{secrets.token_hex(8)}"
        return self._made(self.open(request.tenant, name, rule))

    def _following(self, request: Request, rule: ServingPolicy) -> ResolvedSession:
        name = str(request.follows)
        sitting = self.find(request.tenant, name)
        last = sitting.said[-1:]
        is_same = bool(last) and self._is_again(last[0], request, request.turns)
        if is_same and sitting.rule is rule:
            return ResolvedSession(sitting, again=last[0])
        self.idle(request.tenant, name)
        turns = request.turns if sitting.said else sitting.opening + request.turns
        said = tuple(sitting.said)
        wanted = self._wanted(said, turns)
        if sitting.rule is not rule:
            sitting = self._made(self.fork(sitting, None, rule, len(said)))
        return ResolvedSession(sitting, said, turns, wanted)

    def _matching(self, request: Request, rule: ServingPolicy) -> ResolvedSession:
        told = self.candidates(request)
        best, match = self._best(told, request, rule)
        if best is not None and self._is_repeated(best, match, request, rule):
            return ResolvedSession(best, again=best.said[-1])
        waiting = [each for each in told if each.is_answering]
        is_whole = best is not None and match.exchanges == len(best.said)
        if request.session is not None and waiting and (not is_whole or best in waiting):
            raise session_busy(request.session)
        exchanges = match.exchanges if best is not None else 0
        said = tuple(best.said[:exchanges]) if best is not None else ()
        wanted = self._wanted(said, match.rest)
        if best is None or (not exchanges and self._is_free(request)):
            return ResolvedSession(self._named(request, rule), (), request.turns, wanted)
        if not is_whole or best.is_answering or best.rule is not rule:
            best = self._made(self.fork(best, None, rule, exchanges))
        return ResolvedSession(best, said, match.rest, wanted)

    def branching(self, request: Request, rule: ServingPolicy) -> str | None:
        """The root of the session that a request makes a branch of; None where it makes none."""
        name = request.follows or request.session
        if request.follows is not None or request.raw_prompt is not None:
            known = None if name is None else self._sittings.get((request.tenant, name))
            if known is None or (request.follows is not None and known.rule is rule):
                return None
            return known.root
        best, match = self._best(self.candidates(request), request, rule)
        is_first = not match.exchanges and self._is_free(request)
        if best is None or is_first or self._is_repeated(best, match, request, rule):
            return None
        is_whole = match.exchanges == len(best.said) and best.rule is rule
        return None if is_whole and not best.is_answering else best.root

    def _is_free(self, request: Request) -> bool:
        """Whether a session that a request begins has the name that it gives."""
        return request.session is None or not self.has(request.tenant, request.session)

    def candidates(self, request: Request) -> list[SessionState]:
        """Sessions that the request may mean."""
        tenant = request.tenant
        if request.session is not None:
            return list(self._families.get((tenant, root_name(request.session)), {}).values())
        keys = ((tenant, digest) for digest in prefix_hashes(request.turns))
        return [each for key in keys for each in self._firsts.get(key, {}).values()]

    def settles(self, request: Request) -> bool:
        """Whether no other session that is elsewhere can be meant by a request."""
        return any(continues_session(each.said, request.turns) for each in self.candidates(request))

    def _best(
        self, told: list[SessionState], request: Request, rule: ServingPolicy
    ) -> tuple[SessionState | None, PrefixMatch]:
        """The session that the messages agree with longest; of equals, one that they go on with."""
        best, rank, found = None, (-1, False, False, 0), PrefixMatch(0, request.turns)
        for each in told:
            match = match_prefix(each.said, request.turns)
            is_whole = match.exchanges == len(each.said)
            is_again = self._is_repeated(each, match, request, rule)
            own = match.exchanges, is_again or is_whole, not each.is_answering, each.key
            if own > rank:
                best, rank, found = each, own, match
        return best, found

    def _is_repeated(
        self, sitting: SessionState, match: PrefixMatch, request: Request, rule: ServingPolicy
    ) -> bool:
        """Whether the request is the one that the session has answered last, by the same rule."""
        if sitting.rule is not rule or match.exchanges != len(sitting.said) - 1:
            return False
        return self._is_again(sitting.said[-1], request, match.rest)

    def _is_again(
        self, said: CompletedTurn, request: Request, rest: tuple[ChatMessage, ...]
    ) -> bool:
        return said.turns == rest and said.asked == GenerationParams.of(request)

    def _wanted(
        self, said: tuple[CompletedTurn, ...], rest: tuple[ChatMessage, ...]
    ) -> tuple[int, ...]:
        try:
            new = prompt_ids(self._scribe, said, rest)
        except UsageError as error:
            raise invalid_request(str(error), "messages") from error
        ids = [token for each in said for part in (each.prompt, each.answer) for token in part]
        return (*ids, *new)


def _discard_key(
    index: dict[tuple, dict[int, SessionState]], key: tuple, sitting: SessionState
) -> None:
    index.get(key, {}).pop(sitting.key, None)
    if key in index and not index[key]:
        del index[key]


PREFIX_TOKENS = 16  # texts that differ sooner share nothing worth sharing


@dataclass(frozen=True)
class PrefixMatch:
    """How far a request's messages are those of a session.

    Args:
        exchanges: that are the same.
        rest: messages behind them.
    """

    exchanges: int
    rest: tuple[ChatMessage, ...]


def match_prefix(said: Sequence[CompletedTurn], turns: tuple[ChatMessage, ...]) -> PrefixMatch:
    """Compare messages from the first on; white space around an answer does not count."""
    place = exchanges = 0
    for each in said:
        stop = place + len(each.turns)
        if turns[place:stop] != each.turns or stop >= len(turns) - 1:
            break
        answer = turns[stop]
        if answer.role != ASSISTANT or answer.text.strip() != each.text.strip():
            break
        place, exchanges = stop + 1, exchanges + 1
    return PrefixMatch(exchanges, turns[place:])


def continues_session(said: Sequence[CompletedTurn], turns: tuple[ChatMessage, ...]) -> bool:
    """Whether messages are all that was said and a new question, or the last question again; if
    not, another session may have more of them."""
    match = match_prefix(said, turns)
    if match.exchanges == len(said):
        return all(turn.role != ASSISTANT for turn in match.rest)
    return match.exchanges == len(said) - 1 and match.rest == said[-1].turns


def prefix_hashes(turns: Iterable[ChatMessage]) -> Iterator[int]:
    """A number for each beginning of some messages; equal ones are compared before they count."""
    digest = 0
    for turn in turns:
        digest = hash((digest, turn))
        yield digest


def prompt_ids(
    scribe: TokenizerAdapter, said: Sequence[CompletedTurn], rest: Sequence[ChatMessage]
) -> array:
    """Tokens that new messages add behind finished exchanges.

    Raises:
        UsageError: there is nothing to answer.
    """
    if not rest or rest[-1].role == ASSISTANT:
        raise UsageError("The last message must be one that can be answered, not the assistant's.")
    told = [Told(turn.role, turn.text) for turn in rest]
    return array(
        TOKEN_TYPECODE, scribe.encode_continuation(told) if said else scribe.encode_messages(told)
    )


def prefix_key(tenant: str, ids: Sequence[int]) -> tuple[str, bytes]:
    """By which sessions are found that may share their caches with a text."""
    return tenant, array(TOKEN_TYPECODE, ids[:PREFIX_TOKENS]).tobytes()
