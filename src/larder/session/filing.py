"""A memory that grows by turns: stage 3b of EpiCache, which its released code leaves out.

Follows M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv 2509.17396, section 3.1, stage 3b:
a turn stays in the cache that answered it (3b-1); a turn like no episode opens one of its own
(3b-2); a cache that exceeds M + M_block is built anew. The paper compares the question with tau;
here it is the finished turn, so that a question is always answered by the nearest episode.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from larder.cache.sequence import SequenceCache
from larder.core.conversation import Form
from larder.prefill.base import Progress, Steps, completed, silent
from larder.prefill.meter import Meter
from larder.prefill.tending import Tending
from larder.session.agreeing import DEFAULT_BLOCK_TOKENS
from larder.session.log import Exchange, Log
from larder.session.matching import Match
from larder.session.memory import Memory
from larder.session.policy import Policy
from larder.session.reading import Desk, books_for, building, gather, tend
from larder.session.rooms import entries_of, governed, slots_of, tokens_of
from larder.session.shelf import Shelf
from larder.session.snapshot import State

UNDONE = 8  # turns that can be cut off; the states before them are kept


@dataclass(frozen=True)
class Drawer:
    """The cache that answers a question, and where it stood before.

    Args:
        number: of the cache.
        mark: true position of the question's first token.
        is_copy: whether `cache` is a copy, which takes the place of the cache once the turn is
            filed; else the turn is taken back by `truncate`.
    """

    number: int
    cache: SequenceCache
    match: Match | None
    mark: int
    is_copy: bool = False

    def copied(self) -> Drawer:
        """The same question over a copy, from which entries may go for good."""
        return replace(self, cache=self.cache.fork(), is_copy=True)


@dataclass(frozen=True)
class Undo:
    """How to take a turn back: the state before, and the cache that has grown since `mark`."""

    state: State
    number: int
    mark: int


@dataclass(frozen=True)
class Filed:
    """The state behind a turn, and the number of the cache that holds the turn in it."""

    state: State
    number: int


class Cabinet:
    """The memory of a chat, one cache or one per episode.

    `state` changes in a single step, so an interruption leaves the chat before or after a turn. A
    refresh builds its caches beside the old ones, which stay until all are ready. Not safe for two
    threads at once.

    Args:
        state: that of all that was said so far.
    """

    def __init__(self, desk: Desk, state: State, progress: Progress = silent) -> None:
        self._desk, self._progress = desk, progress
        self.state = state
        self._undo: deque[Undo] = deque(maxlen=UNDONE)
        self.peak_bytes = self.state.memory.figures.peak_kv_bytes
        self.peak_entries = self.state.memory.figures.peak_entries
        self.building = Meter()  # of the latest refresh

    @property
    def shelf(self) -> Shelf:
        return self.state.memory.shelf

    @property
    def length(self) -> int:
        """Tokens said so far."""
        said = sum(len(exchange.ids) for exchange in self.state.log.exchanges)
        return len(self.state.memory.transcript.ids) + said

    @property
    def bound(self) -> int:
        """L x K x (M + M_block): entries, pages included, beyond which a cache is refreshed."""
        spec, policy = self._desk.decoder.spec, self.state.memory.policy
        heads = sum(layer.kv_heads for layer in governed(policy, spec))
        tokens = entries_of(policy, spec) + slots_of(policy, spec) + policy.lag
        return heads * (tokens + block_of(policy))

    @property
    def finest_bound(self) -> int | None:
        """The same of those at full precision, where M has less room for them than for others.

        Turns are read at full precision: counted by number alone they would outgrow the bytes.
        """
        spec, policy = self._desk.decoder.spec, self.state.memory.policy
        if not policy.staying.codecs:
            return None
        entries, block = entries_of(policy, spec), block_of(policy)
        rooms = [policy.storage.finest(entries, own, spec.dtype.itemsize) for own in spec.managed]
        pairs = zip(spec.managed, rooms, strict=True)
        return sum(layer.kv_heads * (room + block) for layer, room in pairs)

    @classmethod
    def read(cls, desk: Desk, policy: Policy, log: Log, progress: Progress = silent) -> Cabinet:
        """The memory of a log that is read here.

        Args:
            policy: with every size filled in.
        """
        source = log.source(log.transcript(desk.scribe))
        return cls(desk, State(gather(desk, source, policy, {}, progress), log), progress)

    def recall(self, question: str) -> Drawer:
        """Make the cache for a bare question active; the one that was active is written back."""
        cache, match = self.state.memory.recall(question)
        return Drawer(0 if match is None else match.episode, cache, match, cache.next_position)

    def draw(self, question: str) -> tuple[Drawer, Tending | None]:
        """As `recall`; a copy, where entries go while the answer is generated, and who sees to it.

        What goes cannot come back, and the turn may have to be taken back.
        """
        drawer = self.recall(question)
        tending = tend(self._desk, self.state.memory.policy, [drawer.cache])
        return (drawer if tending is None else drawer.copied()), tending

    def file(self, drawer: Drawer, exchange: Exchange) -> Filed:
        """The state once a finished turn is filed. Nothing changes before `accept`.

        Args:
            drawer: whose cache has read the turn from `drawer.mark` on.
        """
        state, memory = self.state, self.state.memory
        filing = memory.router.file(exchange.text, drawer.number)
        shelf, opened = memory.shelf, state.opened
        if filing.number != drawer.number:
            shelf = shelf.holding(filing.number, self._opened(drawer))
            opened += 1
        elif drawer.is_copy:
            shelf = shelf.holding(drawer.number, drawer.cache)
        memory = replace(memory, shelf=shelf, router=filing.router)
        log = state.log.plus(exchange)
        return Filed(replace(state, memory=memory, log=log, opened=opened), filing.number)

    def accept(self, drawer: Drawer, filed: Filed) -> None:
        """Go over to what `file` has prepared."""
        self.note(drawer.cache.managed_entries)
        if drawer.is_copy or filed.number != drawer.number:
            self._undo.clear()
        else:
            self._undo.append(Undo(self.state, drawer.number, drawer.mark))
        if filed.number != drawer.number and not drawer.is_copy:
            drawer.cache.truncate(drawer.mark)
        self.state = filed.state
        if drawer.is_copy:
            self.shelf.activate(drawer.number)

    def before(self, exchanges: int) -> Cabinet | None:
        """A second memory, as when so many exchanges were said; None where that must be read anew.

        Its caches are in host memory.
        """
        undone = len(self.state.log.exchanges) - exchanges
        spec, state = self._desk.decoder.spec, self.state
        slides = len(spec.managed) < len(spec.layers)
        if not 0 <= undone <= (0 if slides else len(self._undo)):
            return None
        caches = list(self.shelf.copies())
        for undo in list(self._undo)[::-1][:undone]:
            caches[undo.number].truncate(undo.mark)
            state = undo.state
        memory = replace(state.memory, shelf=Shelf(spec, caches))
        return Cabinet(self._desk, replace(state, memory=memory), self._progress)

    def roll_back(self, log: Log) -> None:
        """Be as when no more than this beginning of the log was said."""
        while len(self.state.log.exchanges) > len(log.exchanges):
            if not self._take_back():
                read = Cabinet.read(self._desk, self.state.memory.policy, log, self._progress)
                self.state = replace(read.state, refreshes=self.state.refreshes)

    def overdue(self) -> list[int]:
        """The caches that exceed their bound, by number."""
        bound, finest = self.bound, self.finest_bound
        return [
            number
            for number, held in enumerate(self.shelf.holdings())
            if held.entries + held.paged > bound or (finest is not None and held.finest > finest)
        ]

    def refresh(self) -> None:
        """Bring every cache back within M, by stage 1 and block prefill over all that was said.

        Where a chat has become long enough for more episodes than it has, all are formed anew.
        Interrupted, the old caches stay, and the next turn refreshes first.
        """
        completed(self.refreshing(), self._progress)

    def refreshing(self) -> Steps[None]:
        """As `refresh`, in steps."""
        while overdue := self.overdue():
            yield from self._rebuilding(overdue[0])

    def note(self, entries: int, copied_bytes: int = 0) -> None:
        """Remember the highest bytes and entries; a copy stands beside the shelf."""
        self.peak_bytes = max(self.peak_bytes, self.shelf.nbytes + copied_bytes)
        self.peak_entries = max(self.peak_entries, entries)

    def _take_back(self) -> bool:
        """Cut the last turn off its cache, if that is enough to undo it; whether it was.

        A sliding window has dropped for it what it cannot bring back.
        """
        spec = self._desk.decoder.spec
        if not self._undo or len(spec.managed) < len(spec.layers):
            return False
        undo, shelf = self._undo.pop(), self.shelf
        cache = shelf.activate(undo.number)
        cache.truncate(undo.mark)
        cache.compact()
        self.state = replace(undo.state, memory=replace(undo.state.memory, shelf=shelf))
        return True

    def _opened(self, drawer: Drawer) -> SequenceCache:
        """A cache of its own for the turn: how the conversation begins, and what it has read.

        The beginning is what the old cache still holds of the system prompt, and at least the
        protected first tokens.
        """
        cache = drawer.cache.fork()
        self.peak_bytes = max(self.peak_bytes, self.shelf.nbytes + cache.nbytes)
        cache.forget(self._beginning(), drawer.mark)  # sliding-window layers hold their window
        return cache

    def _beginning(self) -> int:
        """Tokens at the start that belong to every episode: 1 or more."""
        memory = self.state.memory
        return max(1, memory.policy.protect.sinks, system_stop(memory))

    def _rebuilding(self, number: int) -> Steps[None]:
        self._undo.clear()
        memory, desk = self.state.memory, self._desk
        reform = memory.router.reform(number)
        memory.shelf.rest()
        meter = self.building = Meter(memory.shelf.nbytes)
        books = books_for(desk, reform.router, {})
        wanted = [books[each] for each in reform.rebuilt]
        ids = self.state.log.source(memory.transcript).ids
        built = yield from building(desk, memory.policy, ids, wanted, meter)
        self.peak_bytes = max(self.peak_bytes, meter.peak_bytes)
        self.peak_entries = max(self.peak_entries, meter.peak_entries)
        if len(built) == len(books):
            shelf = built
        else:
            shelf = memory.shelf.holding(number, built.activate(0))
        memory = replace(memory, shelf=shelf, router=reform.router)
        refreshes = self.state.refreshes + 1
        self.state = replace(self.state, memory=memory, refreshes=refreshes)


def system_stop(memory: Memory) -> int:
    """Tokens of the system prompt that a chat's history begins with."""
    conversation, stop = memory.conversation, 0
    if conversation.form is not Form.CHAT:
        return stop
    for message, span in zip(conversation.messages, memory.transcript.spans, strict=True):
        if message.role != "system":
            break
        stop = span[1]
    return stop


def block_of(policy: Policy) -> int:
    """M_block; schedules without blocks get as much room as a default block."""
    tokens = policy.schedule.tokens
    return min(DEFAULT_BLOCK_TOKENS, tokens_of(policy)) if tokens is None else tokens
