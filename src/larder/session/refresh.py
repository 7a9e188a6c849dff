"""When the caches of a chat are built anew, and how: the refresh of EpiCache's stage 3b.

M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv 2509.17396, section 3.1. A cache that has been cut
down to M after every turn never holds more than M + M_block; what it would hold uncut says when
its episode is due.
"""

from __future__ import annotations

from dataclasses import replace

from larder.core.conversation import PromptLayout
from larder.core.spec import ModelSpec
from larder.prefill.base import Steps
from larder.prefill.meter import Meter
from larder.session.memory import Memory
from larder.session.reading import Desk, books_for, building, gathering
from larder.session.rooms import block_of, bound_of, tokens_of
from larder.session.snapshot import State


def overdue_of(state: State, spec: ModelSpec) -> list[int]:
    """The caches that are to be built anew, by number.

    Those to which turns have added more than a block beyond M, where that changes what they are
    judged by; and those that hold more than M, as an earlier version left them.
    """
    memory = state.memory
    bound = bound_of(memory.policy, spec)
    if bound is None:
        return []
    most = tokens_of(memory.policy) + block_of(memory.policy)
    grown = uncut_of(state) if memory.router.writes else []
    numbers = {number for number, count in enumerate(grown) if count > most}
    for number, held in enumerate(memory.shelf.holdings()):
        if bound.exceeded(held.entries + held.paged, held.finest):
            numbers.add(number)
    return sorted(numbers)


def uncut_of(state: State) -> list[int]:
    """As `State.uncut`, of every cache."""
    most, known = tokens_of(state.memory.policy), state.uncut
    holdings = state.memory.shelf.holdings()
    return [*known, *(min(most, held.next_position) for held in holdings[len(known) :])]


def reading_anew(desk: Desk, state: State, meter: Meter) -> Steps[State]:
    """Read all that was said into new caches, where there are none."""
    log, memory = state.log, state.memory
    source = log.source(log.transcript(desk.scribe))
    memory = yield from gathering(desk, source, memory.policy, memory.prompts, meter)
    return State(memory, log, state.refreshes)


def rebuilding(desk: Desk, state: State, number: int, meter: Meter) -> Steps[State]:
    """Read all that was said into a new cache, or into new ones for all episodes."""
    memory = state.memory
    reform = memory.router.reform(number)
    books = books_for(desk, reform.router, memory.prompts)
    wanted = [books[each] for each in reform.rebuilt]
    ids = state.log.source(memory.transcript).ids
    built = yield from building(desk, memory.policy, ids, wanted, meter)
    uncut = uncut_of(state)
    if len(built) == len(books):
        shelf, uncut = built, list[int]()
    else:
        shelf = memory.shelf.holding(number, built.activate(0))
        uncut[number] = min(tokens_of(memory.policy), len(ids))
    memory = replace(memory, shelf=shelf, router=reform.router)
    return State(memory, state.log, state.refreshes + 1, state.opened, tuple(uncut))


def beginning_of(memory: Memory) -> int:
    """Tokens at the start that belong to every episode: 1 or more."""
    return max(1, memory.policy.protect.sinks, system_stop(memory))


def system_stop(memory: Memory) -> int:
    """Tokens of the system prompt that a chat's history begins with."""
    conversation, stop = memory.conversation, 0
    if conversation.form is not PromptLayout.CHAT:
        return stop
    for message, span in zip(conversation.messages, memory.transcript.spans, strict=True):
        if message.role != "system":
            break
        stop = span[1]
    return stop
