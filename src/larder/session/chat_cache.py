"""Caches of a chat that grow turn by turn: stage 3b of EpiCache, absent from its released code.

Follows M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv 2509.17396, section 3.1, stage 3b:
a turn stays in the cache that answered it (3b-1); a turn like no episode opens one of its own
(3b-2); a cache to which more than M_block tokens were added beyond M is rebuilt. The paper compares
the question with tau; here it is the finished turn, so that the nearest episode always answers a
question. Also, every turn ends with a plan here, so that no cache stays above M between turns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from larder.cache.sequence import SequenceCache
from larder.core.conversation import PromptLayout
from larder.core.observation import Prompts
from larder.core.spec import ModelSpec
from larder.core.types import TokenIds
from larder.prefill.base import Progress, Steps, no_progress, run_steps
from larder.prefill.memory import PeakMemoryMeter
from larder.prefill.reader import PrefillSequence
from larder.session.caches import SessionCaches
from larder.session.capacity import block_tokens, budget_tokens, entry_bound
from larder.session.chat_state import ActiveTurn, ChatState, TurnCommit, TurnUndo
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
from larder.session.routing import EpisodeMatch
from larder.session.transcript.chat_log import ChatLog, ChatTurn

MAX_UNDO_TURNS = 8  # turns that truncation can undo; the states before them are held


class ChatCache:
    """Caches, log and undo of one chat, with one cache or one per episode. Not thread-safe.

    `state` changes in a single assignment, so an interruption leaves the chat before or after a
    turn. A refresh builds new caches beside the old ones, which stay until all are ready.

    Args:
        state: state after all turns so far.
    """

    def __init__(
        self, runtime: ModelRuntime, state: ChatState, progress: Progress = no_progress
    ) -> None:
        self._runtime, self._progress = runtime, progress
        self.state = state
        self._undo: deque[TurnUndo] = deque(maxlen=MAX_UNDO_TURNS)
        self.peak_bytes = self.state.memory.figures.peak_kv_bytes
        self.peak_entries = self.state.memory.figures.peak_entries
        self.refresh_meter = PeakMemoryMeter()  # of the latest refresh
        # A refresh in progress, and the state that it began with.
        self._refreshing: tuple[ChatState, Steps[ChatState]] | None = None

    @property
    def caches(self) -> SessionCaches:
        return self.state.memory.caches

    @property
    def num_tokens(self) -> int:
        """Number of tokens of history and turns."""
        turn_tokens = sum(len(turn.ids) for turn in self.state.log.turns)
        return len(self.state.memory.transcript.ids) + turn_tokens

    @classmethod
    def prefill(
        cls, runtime: ModelRuntime, policy: Policy, log: ChatLog, progress: Progress = no_progress
    ) -> ChatCache:
        """Prefill a chat log into new caches.

        Args:
            policy: policy with every size filled in.
        """
        source = log.prefill_input(log.transcript(runtime.tokenizer))
        memory = prefill_memory(runtime, source, policy, {}, progress)
        return cls(runtime, ChatState(memory, log), progress)

    def open_turn(self, question: str) -> ActiveTurn:
        """Activate the cache for a bare question and open a turn over it.

        Under a policy that evicts while decoding the turn runs on a copy, because evicted entries
        cannot be restored if the turn is undone. The cache that was active is written back.
        """
        cache, match = self.state.memory.activate_for(question)
        number = 0 if match is None else match.episode
        if self.state.memory.policy.timing.excess() is None:
            return self._active_turn(number, cache, match)
        return self._active_turn(number, cache.fork(), match, cache)

    def open_turn_prefilled(self, turn: ActiveTurn, ids: TokenIds) -> Steps[ActiveTurn]:
        """Reopen a turn over a copy that has prefilled the beginning of its message."""
        policy, saved = self.state.memory.policy, self.caches.activate(turn.number)
        cache = turn.cache if turn.is_copy else saved.fork()
        sequence = PrefillSequence(cache, self.scoring_prompts(turn.number))
        reader = prefill_reader(
            self._runtime, policy, turn.start_position + len(ids), PeakMemoryMeter()
        )
        yield from policy.schedule.steps(reader, [sequence], ids)
        copied = self._active_turn(turn.number, cache, turn.match, saved)
        return replace(copied, start=turn.start)

    def scoring_prompts(self, number: int) -> Prompts:
        """Prompts that the entries of a cache are scored with."""
        memory = self.state.memory
        return prompts_per_cache(self._runtime, memory.router, memory.prompts)[number]

    def prepare_commit(self, turn: ActiveTurn, finished: ChatTurn) -> TurnCommit:
        """State with a finished turn. Nothing changes before `commit`.

        Args:
            turn: open turn, whose cache has read all of it.
            finished: log entry of the turn.
        """
        state, memory = self.state, self.state.memory
        assignment = memory.router.assign_turn(finished.text, turn.number)
        caches, opened, uncut = memory.caches, state.opened, uncut_entries(self.state)
        added = turn.cache.next_position - turn.start_position
        if assignment.number != turn.number:
            prompts = prompts_per_cache(self._runtime, assignment.router, memory.prompts)
            caches = caches.with_cache(
                assignment.number, self._new_episode_cache(turn, prompts[assignment.number])
            )
            opened += 1
            uncut.append(shared_prefix_len(memory) + added)
        else:
            uncut[turn.number] += added
            if turn.is_copy:
                caches = caches.with_cache(turn.number, turn.cache)
        memory = replace(memory, caches=caches, router=assignment.router)
        log = state.log.with_turn(finished)
        committed = ChatState(memory, log, state.refreshes, opened, tuple(uncut))
        return TurnCommit(committed, assignment.number)

    def commit(self, turn: ActiveTurn, commit: TurnCommit) -> None:
        """Replace the state by the one of `prepare_commit`."""
        self.record_peaks(turn.cache.managed_entries)
        if commit.number != turn.number:
            self._undo.clear()
            self.abort_turn(turn)
        elif turn.is_planned:
            self._undo.clear()
        else:
            self._undo.append(TurnUndo(self.state, turn.number, turn.start_position))
        self.state = commit.state
        if turn.is_copy:
            self.caches.activate(turn.number)

    def enforce_budget_steps(self, turn: ActiveTurn, commit: TurnCommit) -> Steps[None]:
        """Reduce the cache that has read a committed turn to its budget.

        If interrupted, the turn stays committed, and the next one first prefills the whole log.
        """
        if commit.number != turn.number:  # the new cache is within its budget already
            return
        try:
            yield from turn.reader.end_turn_steps()
            turn.cache.compact()
        except BaseException:
            self._discard_caches(self.state.log)
            raise
        self.record_peaks(turn.reader.meter.peak_entries)
        if turn.is_planned:
            self._undo.clear()

    def abort_turn(self, turn: ActiveTurn) -> None:
        """Restore the cache to its state before an unfinished turn."""
        if turn.is_copy:
            return
        if turn.reader.snapshot is None:
            turn.cache.roll_back(turn.start)
            turn.cache.compact()
        else:
            turn.reader.snapshot.compact()
            self.caches.replace_active(turn.reader.snapshot)

    def copy_before(self, num_turns: int) -> ChatCache | None:
        """Copy in host memory of the chat as of its first turns.

        Args:
            num_turns: number of turns in the copy.

        Returns:
            None if these caches cannot be restored without another prefill.
        """
        undone = len(self.state.log.turns) - num_turns
        spec, state = self._runtime.decoder.spec, self.state
        if not 0 <= undone <= (len(self._undo) if spec.can_truncate else 0):
            return None
        caches = list(self.caches.copies())
        for undo in list(self._undo)[::-1][:undone]:
            caches[undo.number].truncate(undo.start_position)
            state = undo.state
        memory = replace(state.memory, caches=SessionCaches(spec, caches))
        return ChatCache(self._runtime, replace(state, memory=memory), self._progress)

    def roll_back(self, log: ChatLog) -> None:
        """Return to a prefix of the log.

        If that needs another prefill, the old caches are dropped first; if it is interrupted, the
        next turn prefills the log.
        """
        while len(self.state.log.turns) > len(log.turns) and self._undo_last_turn():
            pass
        if len(self.state.log.turns) > len(log.turns):
            self._discard_caches(log)
            self.refresh()

    def refresh(self) -> None:
        """Rebuild overdue caches, by stage 1 and block prefill over the whole log.

        If the chat has become long enough for more episodes, all episodes are formed again. If
        interrupted, the old caches stay, and the next turn refreshes first.
        """
        run_steps(self.refresh_steps(), self._progress)

    def refresh_steps(self) -> Steps[None]:
        """Steps of `refresh`, which go on where an earlier call has stopped between two of them."""
        while (steps := self._refresh_in_progress()) is not None:
            try:
                counts = next(steps)
            except StopIteration as end:
                self.state, self._refreshing = end.value, None
                self._note_peaks()
            except BaseException:
                self._refreshing = None
                raise
            else:
                yield counts

    @property
    def is_overdue(self) -> bool:
        """True if `refresh` has something to do."""
        return not len(self.caches) or bool(self._overdue())

    @property
    def is_refreshing(self) -> bool:
        """True if a refresh has stopped between two of its steps."""
        return self._refreshing is not None

    def stop_refresh(self) -> None:
        """Drop what a refresh in progress has built; the old caches stay."""
        self._refreshing = None

    def _refresh_in_progress(self) -> Steps[ChatState] | None:
        """Steps of the refresh in progress, or of the next one; None if none is due."""
        if self._refreshing is None or self._refreshing[0] is not self.state:
            self._refreshing = None
            steps = self._next_refresh()
            if steps is not None:
                self._refreshing = self.state, steps
        return None if self._refreshing is None else self._refreshing[1]

    def _next_refresh(self) -> Steps[ChatState] | None:
        if not len(self.caches):
            self.refresh_meter = PeakMemoryMeter()
            return prefill_again_steps(self._runtime, self.state, self.refresh_meter)
        overdue = self._overdue()
        if not overdue:
            return None
        self._undo.clear()
        self.caches.offload_active()
        self.refresh_meter = PeakMemoryMeter(self.caches.nbytes)
        return rebuild_steps(self._runtime, self.state, overdue[0], self.refresh_meter)

    def _overdue(self) -> list[int]:
        return overdue_caches(self.state, self._runtime.decoder.spec)

    def record_peaks(self, entries: int, copied_bytes: int = 0) -> None:
        """Record peak bytes and entries; a copy counts in addition to the caches."""
        self.peak_bytes = max(self.peak_bytes, self.caches.nbytes + copied_bytes)
        self.peak_entries = max(self.peak_entries, entries)

    def _undo_last_turn(self) -> bool:
        """Undo the last turn by truncation; False if truncation is not enough.

        Sliding-window layers cannot restore the entries that the turn has displaced, and recurrent
        layers not the state before it.
        """
        if not self._undo or not self._runtime.decoder.spec.can_truncate:
            return False
        undo, caches = self._undo.pop(), self.caches
        cache = caches.activate(undo.number)
        cache.truncate(undo.start_position)
        cache.compact()
        self.state = replace(undo.state, memory=replace(undo.state.memory, caches=caches))
        return True

    def _active_turn(
        self,
        number: int,
        cache: SequenceCache,
        match: EpisodeMatch | None,
        saved: SequenceCache | None = None,
    ) -> ActiveTurn:
        policy, start = self.state.memory.policy, cache.checkpoint()
        reader = turn_reader(self._runtime, policy, cache, self.scoring_prompts(number), saved)
        return ActiveTurn(
            number=number,
            cache=cache,
            match=match,
            start=start,
            reader=reader,
            plans=cache.plans,
            is_copy=saved is not None,
        )

    def _new_episode_cache(self, turn: ActiveTurn, prompts: Prompts) -> SequenceCache:
        """Cache of a new episode: the beginning of the conversation, and the turn.

        The beginning is what the old cache still holds of the system prompt, and at least the
        protected first tokens.
        """
        cache = turn.cache.fork()
        self.peak_bytes = max(self.peak_bytes, self.caches.nbytes + cache.nbytes)
        beginning = shared_prefix_len(self.state.memory)
        cache.drop_range(beginning, turn.start_position)  # sliding-window layers hold their window
        policy, opened = self.state.memory.policy, turn.reader.open_block
        reader = turn_reader(self._runtime, policy, cache, prompts, open_block=opened)
        if reader.is_over_budget:
            run_steps(reader.end_turn_steps())
        return cache

    def _note_peaks(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.refresh_meter.peak_bytes)
        self.peak_entries = max(self.peak_entries, self.refresh_meter.peak_entries)

    def _discard_caches(self, log: ChatLog) -> None:
        """Drop all caches, which are incomplete or belong to another text than this log."""
        self._undo.clear()
        memory = replace(self.state.memory, caches=SessionCaches(self._runtime.decoder.spec, ()))
        self.state = replace(self.state, memory=memory, log=log)


def overdue_caches(state: ChatState, spec: ModelSpec) -> list[int]:
    """Numbers of the caches that must be rebuilt.

    These are caches to which turns have added more than a block beyond M, where the prompts that
    score them depend on the turns; and caches above M, as an earlier version left them.
    """
    memory = state.memory
    bound = entry_bound(memory.policy, spec)
    if bound is None:
        return []
    most = budget_tokens(memory.policy) + block_tokens(memory.policy)
    grown = uncut_entries(state) if memory.router.prompt_names else []
    numbers = {index for index, count in enumerate(grown) if count > most}
    for index, cache in enumerate(memory.caches.usage()):
        if bound.exceeded(cache.entries + cache.slot_entries, cache.full_precision_entries):
            numbers.add(index)
    return sorted(numbers)


def uncut_entries(state: ChatState) -> list[int]:
    """`ChatState.uncut` of every cache."""
    most, known = budget_tokens(state.memory.policy), state.uncut
    usage = state.memory.caches.usage()
    return [*known, *(min(most, cache.next_position) for cache in usage[len(known) :])]


def prefill_again_steps(
    runtime: ModelRuntime, state: ChatState, meter: PeakMemoryMeter
) -> Steps[ChatState]:
    """Prefill the whole log into new caches."""
    log, memory = state.log, state.memory
    source = log.prefill_input(log.transcript(runtime.tokenizer))
    memory = yield from prefill_memory_steps(runtime, source, memory.policy, memory.prompts, meter)
    return ChatState(memory, log, state.refreshes)


def rebuild_steps(
    runtime: ModelRuntime, state: ChatState, number: int, meter: PeakMemoryMeter
) -> Steps[ChatState]:
    """Prefill the whole log into one new cache, or into new ones for all episodes."""
    memory = state.memory
    refresh = memory.router.refresh(number)
    prompts = prompts_per_cache(runtime, refresh.router, memory.prompts)
    rebuilt = [prompts[each] for each in refresh.rebuilt]
    source = state.log.prefill_input(memory.transcript)
    ids, policy = source.ids, memory.policy
    built = yield from build_caches_steps(runtime, policy, ids, rebuilt, meter, source.turn_ends)
    uncut = uncut_entries(state)
    if len(built) == len(prompts):
        caches, uncut = built, list[int]()
    else:
        caches = memory.caches.with_cache(number, built.activate(0))
        uncut[number] = min(budget_tokens(memory.policy), len(ids))
    memory = replace(memory, caches=caches, router=refresh.router)
    return ChatState(memory, state.log, state.refreshes + 1, state.opened, tuple(uncut))


def shared_prefix_len(memory: ConversationMemory) -> int:
    """Number of first tokens that belong to every episode: 1 or more."""
    return max(1, memory.policy.protect.sinks, system_prompt_len(memory))


def system_prompt_len(memory: ConversationMemory) -> int:
    """Number of tokens of the system prompt at the beginning of the history."""
    conversation, stop = memory.conversation, 0
    if conversation.form is not PromptLayout.CHAT:
        return stop
    for message, span in zip(conversation.messages, memory.transcript.spans, strict=True):
        if message.role != "system":
            break
        stop = span[1]
    return stop
