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
from larder.prefill.meter import PeakMemoryMeter
from larder.session.capacity import block_tokens, budget_tokens, entry_bound
from larder.session.chat_state import ChatState
from larder.session.memory import ConversationMemory
from larder.session.prefill import (
    ModelRuntime,
    build_caches_steps,
    prefill_memory_steps,
    prompts_per_cache,
)


def overdue_caches(state: ChatState, spec: ModelSpec) -> list[int]:
    """The caches that are to be built anew, by number.

    Those to which turns have added more than a block beyond M, where that changes what they are
    judged by; and those that hold more than M, as an earlier version left them.
    """
    memory = state.memory
    bound = entry_bound(memory.policy, spec)
    if bound is None:
        return []
    most = budget_tokens(memory.policy) + block_tokens(memory.policy)
    grown = uncut_entries(state) if memory.router.writes else []
    numbers = {number for number, count in enumerate(grown) if count > most}
    for number, held in enumerate(memory.shelf.holdings()):
        if bound.exceeded(held.entries + held.paged, held.finest):
            numbers.add(number)
    return sorted(numbers)


def uncut_entries(state: ChatState) -> list[int]:
    """As `State.uncut`, of every cache."""
    most, known = budget_tokens(state.memory.policy), state.uncut
    holdings = state.memory.shelf.holdings()
    return [*known, *(min(most, held.next_position) for held in holdings[len(known) :])]


def prefill_again_steps(
    desk: ModelRuntime, state: ChatState, meter: PeakMemoryMeter
) -> Steps[ChatState]:
    """Read all that was said into new caches, where there are none."""
    log, memory = state.log, state.memory
    source = log.source(log.transcript(desk.scribe))
    memory = yield from prefill_memory_steps(desk, source, memory.policy, memory.prompts, meter)
    return ChatState(memory, log, state.refreshes)


def rebuild_steps(
    desk: ModelRuntime, state: ChatState, number: int, meter: PeakMemoryMeter
) -> Steps[ChatState]:
    """Read all that was said into a new cache, or into new ones for all episodes."""
    memory = state.memory
    reform = memory.router.reform(number)
    books = prompts_per_cache(desk, reform.router, memory.prompts)
    wanted = [books[each] for each in reform.rebuilt]
    ids = state.log.source(memory.transcript).ids
    built = yield from build_caches_steps(desk, memory.policy, ids, wanted, meter)
    uncut = uncut_entries(state)
    if len(built) == len(books):
        shelf, uncut = built, list[int]()
    else:
        shelf = memory.shelf.holding(number, built.activate(0))
        uncut[number] = min(budget_tokens(memory.policy), len(ids))
    memory = replace(memory, shelf=shelf, router=reform.router)
    return ChatState(memory, state.log, state.refreshes + 1, state.opened, tuple(uncut))


def shared_prefix_len(memory: ConversationMemory) -> int:
    """Tokens at the start that belong to every episode: 1 or more."""
    return max(1, memory.policy.protect.sinks, system_prompt_len(memory))


def system_prompt_len(memory: ConversationMemory) -> int:
    """Tokens of the system prompt that a chat's history begins with."""
    conversation, stop = memory.conversation, 0
    if conversation.form is not PromptLayout.CHAT:
        return stop
    for message, span in zip(conversation.messages, memory.transcript.spans, strict=True):
        if message.role != "system":
            break
        stop = span[1]
    return stop
