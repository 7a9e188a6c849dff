"""A memory that grows by turns: stage 3b of EpiCache, which its released code leaves out.

Follows M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv 2509.17396, section 3.1, stage 3b:
a turn stays in the cache that answered it (3b-1); a turn like no episode opens one of its own
(3b-2); a cache to which more than M_block tokens were added beyond M is built anew. The paper
compares the question with tau; here it is the finished turn, so that a question is always answered
by the nearest episode. And here every turn ends with a plan, so that no cache rests above M.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from larder.cache.sequence import SequenceCache
from larder.core.conversation import PromptLayout
from larder.core.observation import Prompts
from larder.core.spec import ModelSpec
from larder.prefill.base import Progress, Steps, no_progress, run_steps
from larder.prefill.memory import PeakMemoryMeter
from larder.prefill.reader import PrefillSequence
from larder.session.caches import SessionCaches
from larder.session.capacity import block_tokens, budget_tokens, entry_bound
from larder.session.chat_state import ActiveTurn, ChatState, TurnCommit, TurnUndo
from larder.session.episodes.matching import EpisodeMatch
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy
from larder.session.prefill import (
    ModelRuntime,
    build_caches_steps,
    prefill_memory,
    prefill_memory_steps,
    prefill_reader,
    prompts_per_cache,
    turn_reader,
)
from larder.session.transcript.chat_log import ChatLog, ChatTurn

MAX_UNDO_TURNS = 8  # turns that can be cut off; the states before them are kept


class ChatCache:
    """The memory of a chat, one cache or one per episode.

    `state` changes in a single step, so an interruption leaves the chat before or after a turn. A
    refresh builds its caches beside the old ones, which stay until all are ready. Not safe for two
    threads at once.

    Args:
        state: that of all that was said so far.
    """

    def __init__(
        self, desk: ModelRuntime, state: ChatState, progress: Progress = no_progress
    ) -> None:
        self._runtime, self._progress = desk, progress
        self.state = state
        self._undo: deque[TurnUndo] = deque(maxlen=MAX_UNDO_TURNS)
        self.peak_bytes = self.state.memory.figures.peak_kv_bytes
        self.peak_entries = self.state.memory.figures.peak_entries
        self.refresh_meter = PeakMemoryMeter()  # of the latest refresh

    @property
    def caches(self) -> SessionCaches:
        return self.state.memory.caches

    @property
    def length(self) -> int:
        """Tokens said so far."""
        said = sum(len(exchange.ids) for exchange in self.state.log.exchanges)
        return len(self.state.memory.transcript.ids) + said

    @classmethod
    def read(
        cls, desk: ModelRuntime, policy: Policy, log: ChatLog, progress: Progress = no_progress
    ) -> ChatCache:
        """The memory of a log that is read here.

        Args:
            policy: with every size filled in.
        """
        source = log.source(log.transcript(desk.scribe))
        return cls(
            desk, ChatState(prefill_memory(desk, source, policy, {}, progress), log), progress
        )

    def draw(self, question: str) -> ActiveTurn:
        """Make the cache for a bare question active, for a turn; a copy of it where entries go at
        every step: what goes cannot come back, and the turn may have to be taken back.

        The cache that was active is written back.
        """
        cache, match = self.state.memory.recall(question)
        number = 0 if match is None else match.episode
        if self.state.memory.policy.timing.excess() is None:
            return self._drawn(number, cache, match)
        return self._drawn(number, cache.fork(), match, cache)

    def ahead(self, drawer: ActiveTurn, ids: tuple[int, ...]) -> Steps[ActiveTurn]:
        """The same question over a copy that has read the beginning of its message as a context."""
        policy, saved = self.state.memory.policy, self.caches.activate(drawer.number)
        cache, book = drawer.cache if drawer.is_copy else saved.fork(), self.book(drawer.number)
        reader = prefill_reader(self._runtime, policy, drawer.mark + len(ids), PeakMemoryMeter())
        yield from policy.schedule.steps(reader, [PrefillSequence(cache, book)], ids)
        copied = self._drawn(drawer.number, cache, drawer.match, saved)
        return replace(copied, mark=drawer.mark)

    def book(self, number: int) -> Prompts:
        """The prompts that judge a cache."""
        memory = self.state.memory
        return prompts_per_cache(self._runtime, memory.router, memory.prompts)[number]

    def file(self, drawer: ActiveTurn, exchange: ChatTurn) -> TurnCommit:
        """The state once a finished turn is filed. Nothing changes before `accept`.

        Args:
            drawer: whose cache has read the turn from `drawer.mark` on.
        """
        state, memory = self.state, self.state.memory
        filing = memory.router.file(exchange.text, drawer.number)
        shelf, opened, uncut = memory.caches, state.opened, uncut_entries(self.state)
        added = drawer.cache.next_position - drawer.mark
        if filing.number != drawer.number:
            books = prompts_per_cache(self._runtime, filing.router, memory.prompts)
            shelf = shelf.with_cache(filing.number, self._opened(drawer, books[filing.number]))
            opened += 1
            uncut.append(shared_prefix_len(memory) + added)
        else:
            uncut[drawer.number] += added
            if drawer.is_copy:
                shelf = shelf.with_cache(drawer.number, drawer.cache)
        memory = replace(memory, caches=shelf, router=filing.router)
        told = state.log.plus(exchange), state.refreshes, opened, tuple(uncut)
        return TurnCommit(ChatState(memory, *told), filing.number)

    def accept(self, drawer: ActiveTurn, filed: TurnCommit) -> None:
        """Go over to what `file` has prepared."""
        self.note(drawer.cache.managed_entries)
        if filed.number != drawer.number:
            self._undo.clear()
            self.undo(drawer)
        elif drawer.is_planned:
            self._undo.clear()
        else:
            self._undo.append(TurnUndo(self.state, drawer.number, drawer.mark))
        self.state = filed.state
        if drawer.is_copy:
            self.caches.activate(drawer.number)

    def settling(self, drawer: ActiveTurn, filed: TurnCommit) -> Steps[None]:
        """Bring the cache that has read an accepted turn back to its budget.

        Interrupted, the turn stands, and the next one begins by reading all that was said.
        """
        if filed.number != drawer.number:  # which has its own cache, within its budget
            return
        try:
            yield from drawer.turn.end_turn_steps()
            drawer.cache.compact()
        except BaseException:
            self._lose(self.state.log)
            raise
        self.note(drawer.turn.meter.peak_entries)
        if drawer.is_planned:
            self._undo.clear()

    def undo(self, drawer: ActiveTurn) -> None:
        """Have the cache of a turn that does not count be as before it."""
        if drawer.is_copy:
            return
        if drawer.turn.snapshot is None:
            drawer.cache.truncate(drawer.mark)
            drawer.cache.compact()
        else:
            drawer.turn.snapshot.compact()
            self.caches.replace_active(drawer.turn.snapshot)

    def before(self, exchanges: int) -> ChatCache | None:
        """A second memory, as when so many exchanges were said; None where that must be read anew.

        Its caches are in host memory.
        """
        undone = len(self.state.log.exchanges) - exchanges
        spec, state = self._runtime.decoder.spec, self.state
        slides = len(spec.managed) < len(spec.layers)
        if not 0 <= undone <= (0 if slides else len(self._undo)):
            return None
        caches = list(self.caches.copies())
        for undo in list(self._undo)[::-1][:undone]:
            caches[undo.number].truncate(undo.mark)
            state = undo.state
        memory = replace(state.memory, caches=SessionCaches(spec, caches))
        return ChatCache(self._runtime, replace(state, memory=memory), self._progress)

    def roll_back(self, log: ChatLog) -> None:
        """Be as when no more than this beginning of the log was said.

        Where that must be read anew, the old caches go first. Interrupted, the next turn reads it.
        """
        while len(self.state.log.exchanges) > len(log.exchanges) and self._take_back():
            pass
        if len(self.state.log.exchanges) > len(log.exchanges):
            self._lose(log)
            self.refresh()

    def refresh(self) -> None:
        """Build caches that are overdue anew, by stage 1 and block prefill over all that was said.

        Where a chat has become long enough for more episodes than it has, all are formed anew.
        Interrupted, the old caches stay, and the next turn refreshes first.
        """
        run_steps(self.refresh_steps(), self._progress)

    def refresh_steps(self) -> Steps[None]:
        """As `refresh`, in steps."""
        spec = self._runtime.decoder.spec
        if not len(self.caches):
            self.refresh_meter = PeakMemoryMeter()
            self.state = yield from prefill_again_steps(
                self._runtime, self.state, self.refresh_meter
            )
            self._note_peaks()
        while overdue := overdue_caches(self.state, spec):
            self._undo.clear()
            self.caches.rest()
            self.refresh_meter = PeakMemoryMeter(self.caches.nbytes)
            told = self._runtime, self.state, overdue[0], self.refresh_meter
            self.state = yield from rebuild_steps(*told)
            self._note_peaks()

    def note(self, entries: int, copied_bytes: int = 0) -> None:
        """Remember the highest bytes and entries; a copy stands beside the shelf."""
        self.peak_bytes = max(self.peak_bytes, self.caches.nbytes + copied_bytes)
        self.peak_entries = max(self.peak_entries, entries)

    def _take_back(self) -> bool:
        """Cut the last turn off its cache, if that is enough to undo it; whether it was.

        A sliding window has dropped for it what it cannot bring back.
        """
        spec = self._runtime.decoder.spec
        if not self._undo or len(spec.managed) < len(spec.layers):
            return False
        undo, shelf = self._undo.pop(), self.caches
        cache = shelf.activate(undo.number)
        cache.truncate(undo.mark)
        cache.compact()
        self.state = replace(undo.state, memory=replace(undo.state.memory, caches=shelf))
        return True

    def _drawn(
        self,
        number: int,
        cache: SequenceCache,
        match: EpisodeMatch | None,
        saved: SequenceCache | None = None,
    ) -> ActiveTurn:
        policy, mark = self.state.memory.policy, cache.next_position
        turn = turn_reader(self._runtime, policy, cache, self.book(number), saved)
        return ActiveTurn(number, cache, match, mark, turn, cache.plans, saved is not None)

    def _opened(self, drawer: ActiveTurn, book: Prompts) -> SequenceCache:
        """A cache of its own for the turn: how the conversation begins, and what it has read.

        The beginning is what the old cache still holds of the system prompt, and at least the
        protected first tokens.
        """
        cache = drawer.cache.fork()
        self.peak_bytes = max(self.peak_bytes, self.caches.nbytes + cache.nbytes)
        beginning = shared_prefix_len(self.state.memory)
        cache.forget(beginning, drawer.mark)  # sliding-window layers hold their window
        told = self._runtime, self.state.memory.policy, cache, book, None, drawer.turn.open_ids
        turn = turn_reader(*told)
        if turn.is_over_budget:
            run_steps(turn.end_turn_steps())
        return cache

    def _note_peaks(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.refresh_meter.peak_bytes)
        self.peak_entries = max(self.peak_entries, self.refresh_meter.peak_entries)

    def _lose(self, log: ChatLog) -> None:
        """Have no caches, for they are of another text than this log, or incomplete."""
        self._undo.clear()
        memory = replace(self.state.memory, caches=SessionCaches(self._runtime.decoder.spec, ()))
        self.state = replace(self.state, memory=memory, log=log)


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
    grown = uncut_entries(state) if memory.router.prompt_names else []
    numbers = {number for number, count in enumerate(grown) if count > most}
    for number, held in enumerate(memory.caches.holdings()):
        if bound.exceeded(held.entries + held.paged, held.finest):
            numbers.add(number)
    return sorted(numbers)


def uncut_entries(state: ChatState) -> list[int]:
    """As `State.uncut`, of every cache."""
    most, known = budget_tokens(state.memory.policy), state.uncut
    holdings = state.memory.caches.holdings()
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
    reform = memory.router.refresh(number)
    books = prompts_per_cache(desk, reform.router, memory.prompts)
    wanted = [books[each] for each in reform.rebuilt]
    ids = state.log.source(memory.transcript).ids
    built = yield from build_caches_steps(desk, memory.policy, ids, wanted, meter)
    uncut = uncut_entries(state)
    if len(built) == len(books):
        shelf, uncut = built, list[int]()
    else:
        shelf = memory.caches.with_cache(number, built.activate(0))
        uncut[number] = min(budget_tokens(memory.policy), len(ids))
    memory = replace(memory, caches=shelf, router=reform.router)
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
