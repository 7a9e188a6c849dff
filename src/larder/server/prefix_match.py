"""How far a request's messages are those of a session, and what they add to it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from larder.core.errors import UsageError
from larder.server.request import ChatMessage
from larder.server.session_state import ASSISTANT, TOKEN_TYPECODE, CompletedTurn
from larder.session.transcript.chat_template import TemplateMessage as Told
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

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
    return array(TOKEN_TYPECODE, scribe.going_on(told) if said else scribe.prompt(told))


def prefix_key(tenant: str, ids: Sequence[int]) -> tuple[str, bytes]:
    """By which sessions are found that may share their caches with a text."""
    return tenant, array(TOKEN_TYPECODE, ids[:PREFIX_TOKENS]).tobytes()
