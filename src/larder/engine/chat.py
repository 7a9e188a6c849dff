"""Chat: a conversation of turns whose caches stay within the budget, optionally saved to disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from larder.core.arguments import check_count, check_type, checked_call, require
from larder.core.conversation import Conversation
from larder.core.errors import InputError, UsageError
from larder.core.progress import Progress, no_progress
from larder.core.types import TokenIds
from larder.engine.answer import Answer, AnswerOptions, check_prompt_fits
from larder.engine.detokenizer import discard_text
from larder.engine.engine import Engine
from larder.engine.persistence import NOT_SAVED, ChatPersistence, NoPersistence, ResumeResult
from larder.engine.progress_bar import generation_progress
from larder.engine.sampler import SamplingParams
from larder.prefill.base import run_steps
from larder.session.capacity import (
    beyond_budget,
    block_tokens,
    budget_tokens,
    budgeted_layers,
    resolve_budget,
    resolve_budget_without_context,
)
from larder.session.chat_cache import ChatCache
from larder.session.chat_state import ActiveTurn, ChatState, TurnCommit
from larder.session.files.json_fields import valid_unicode
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy
from larder.session.transcript.chat_log import ChatLog, ChatTurn
from larder.session.transcript.chat_log_file import ChatIdentity, ChatRecord, chat_log_path

EMPTY_HISTORY = Conversation("nothing", ())


class Chat:
    """Chat under an engine's policy. Not thread-safe.

    Between turns each cache holds at most the budget, and during a turn at most budget + block.
    Copies made to undo a turn count as well. A policy that evicts while decoding works on a copy of
    the cache, which then replaces it; caches of such a policy stay within their budget and are
    never rebuilt.

    A turn is atomic: if it is interrupted or fails, caches and file are as before it, with the one
    exception described in `say`. If only the plan or the refresh after a turn is interrupted, the
    turn is committed, and the next turn begins with the missing work.

    Args:
        engine: model, policy and budget.
        name: session name, under which the chat is saved; None for a chat that ends with the
            process.
        history: conversation to begin with. An existing session has its own.
        progress: receives the number of tokens read and to read, at the start and whenever caches
            are rebuilt.
        keeper: restores the caches of an existing session, and saves them on `keep`.
        state: state to begin with in place of a history; the chat takes it over, and the session
            must be new.

    Raises:
        InputError: the session file is damaged, or was written with another model.
        UsageError: the session name is invalid, or the session has another history; the budget is a
            share of a context that does not exist; the policy needs the question in advance.

    Examples:
        >>> chat = Chat(engine.under("streaming_llm", 256))
        >>> answer = chat.say("My cat is called Minka.", max_new_tokens=8)
        >>> len(chat.turns)
        1
    """

    @checked_call
    def __init__(
        self,
        engine: Engine,
        name: str | None = None,
        history: Conversation | None = None,
        progress: Progress = no_progress,
        keeper: ChatPersistence | None = None,
        state: ChatState | None = None,
    ) -> None:
        check_type("engine", engine, Engine, "an Engine")
        self._engine, self._name, self._persistence = engine, name, keeper or NoPersistence()
        self._log_store = self._persistence.open_log(name)
        self._saved_record = self._log_store.load()
        log = initial_log(self._saved_record, engine, name, history)
        self._write_backs = 0
        self.outcome: TurnOutcome | None = None
        if state is None:
            self.resumed = self._resume(log, progress)
            return
        if self._saved_record is not None:
            raise UsageError(f"The session {name!r} exists already: take another name.")
        self.resumed = ResumeResult(None, NOT_SAVED)
        self._caches = ChatCache(engine.runtime, state, progress)
        self._log_store.save(state.log, self._identity())

    def __repr__(self) -> str:
        return (
            f"Chat({self._name!r}, policy={self.policy.short!r}, turns={len(self.turns)}, "
            f"kv_bytes={self.figures.kv_bytes}, full_kv_bytes={self.figures.full_kv_bytes})"
        )

    def say(
        self,
        text: str,
        on_text: Callable[[str], None] = discard_text,
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 256,
        progress: Progress | None = None,
    ) -> Answer:
        """Send a message and generate the answer; both become a turn of the chat.

        The session file is written just before the turn is committed in memory. An interrupt
        between the two leaves the turn in the file alone: open the session again to continue.

        Args:
            text: the message, without a chat template.
            on_text: receives the text of the answer as it is generated; if it raises, the turn is
                undone.
            sampling: sampling parameters; None takes the most likely token at every step.
            max_new_tokens: most tokens of the answer.
            progress: as for `Engine.ask`.

        Returns:
            The answer, with the memory and work that it took.

        Raises:
            InputError: the text is blank, or longer than the budget; the session file cannot be
                written.

        Examples:
            >>> chat.say("What is my cat called?", max_new_tokens=8).question
            'What is my cat called?'
        """
        check_type("text", text, str, "a message as a string")
        check_count("max_new_tokens", max_new_tokens)
        chat_cache, refreshes_before = self._caches, self._caches.state.refreshes
        chat_cache.refresh()
        prompt = self._prompt(text)
        turn, end_ids = self._open_turn(text), self._engine.tokenizer.end_of_turn_ids()
        turn.reader.reserve(len(prompt) + len(end_ids) + max_new_tokens)
        self._record_peaks(turn)
        try:
            with generation_progress(progress, on_text) as report:
                options = AnswerOptions(
                    sampling or SamplingParams(), max_new_tokens, on_text=on_text, progress=report
                )
                completion = self._engine.answer_generator.generate(turn.reader, prompt, options)
            ids = prompt + completion.ids + end_ids
            self._read_rest(turn, ids, len(completion.ids))
            held_bytes = self._record_peaks(turn)
            commit = self._commit(turn, ChatTurn(text, completion.text, ids))
        except BaseException:
            chat_cache.abort_turn(turn)
            raise
        finally:
            turn.cache.compact()
        run_steps(chat_cache.enforce_budget_steps(turn, commit))
        chat_cache.refresh()
        refreshes = chat_cache.state.refreshes - refreshes_before
        self.outcome = TurnOutcome(turn.number, commit.number, refreshes)
        return completion.answer(text, turn.match, len(prompt), held_bytes)

    def keep(self) -> str:
        """Save the caches of the session.

        The chat log is saved with every turn, independently of this.

        Returns:
            Reason why the caches were not saved, a key of `REASON_TEXTS`; empty if they were.

        Examples:
            >>> chat.keep()  # a chat without a name ends with the process
            'new'
        """
        restored = self.resumed.state
        if self._name is None or not self.turns:
            return NOT_SAVED
        if restored is not None and len(restored.log.turns) == len(self.turns):
            return ""
        self._caches.refresh()
        return self._persistence.save(self._name, self._caches.state)

    def fork(self, name: str | None = None) -> Chat:
        """Fork the chat at its present state, for a side task (CIFLEX) or another continuation.

        Args:
            name: session name of the fork; None for one that ends with the process.

        Returns:
            Chat with copies of the caches; turns of one are not seen by the other.

        Raises:
            UsageError: a session of that name exists already.

        Examples:
            >>> answer = chat.fork().say("A side task.", max_new_tokens=8)
        """
        copied = self._caches.copy_before(len(self.turns))
        assert copied is not None  # no turn is to be undone
        return Chat(self._engine, name, keeper=self._persistence, state=copied.state)

    def roll_back(self, turns: int = 1) -> None:
        """Remove the last turns, in memory and on disk.

        Turns whose caches have only grown since are truncated; otherwise the rest of the log is
        prefilled again.

        Args:
            turns: number of turns to remove, from 0 to all.

        Raises:
            BadParameter: the chat has fewer turns.
            InputError: the session file cannot be written.

        Examples:
            >>> chat.roll_back()
            >>> len(chat.turns)
            0
        """
        require(0 <= turns <= len(self.turns), "turns", f"0 to {len(self.turns)}", turns)
        log = self._caches.state.log
        log = replace(log, turns=log.turns[: len(self.turns) - turns])
        self._log_store.save(log, self._identity())
        self._caches.roll_back(log)

    @property
    def turns(self) -> tuple[ChatTurn, ...]:
        """Turns of the chat, in order, without the history."""
        return self._caches.state.log.turns

    @property
    def history(self) -> Conversation:
        """Conversation before the first turn; empty for a chat without one."""
        return self._caches.state.log.history

    @property
    def policy(self) -> Policy:
        """Policy with every size filled in."""
        return self._caches.state.memory.policy

    @property
    def beyond_budget(self) -> tuple[str, ...]:
        """Exceptions from the budget bound, a clause each, as `Engine.beyond_budget`."""
        return beyond_budget(self.policy, self._engine.loaded.decoder.spec)

    @property
    def former_policy(self) -> str | None:
        """Policy that a resumed session last ran under; None for a new session."""
        return None if self._saved_record is None else self._saved_record.identity.policy

    @property
    def memory(self) -> ConversationMemory:
        """Current memory, for `Engine.ask`, which does not change it. The next turn replaces it."""
        if not len(self._caches.caches):  # an interruption has left no caches
            self._caches.refresh()
        return self._caches.state.memory

    @property
    def figures(self) -> ChatFigures:
        """Present and peak memory of the chat."""
        chat_cache, caches = self._caches, self._caches.caches
        return ChatFigures(
            turns=len(self.turns),
            log_tokens=chat_cache.num_tokens,
            budget_tokens=budget_tokens(self.policy),
            block_tokens=block_tokens(self.policy),
            full_kv_bytes=self._engine.loaded.decoder.spec.full_bytes(chat_cache.num_tokens),
            active_kv_bytes=caches.fast_tier_bytes,
            parked_kv_bytes=max(0, caches.nbytes - caches.fast_tier_bytes),
            peak_kv_bytes=max(chat_cache.peak_bytes, caches.nbytes),
            peak_entries=chat_cache.peak_entries,
            refreshes=chat_cache.state.refreshes,
            opened=chat_cache.state.opened,
            write_backs=self._write_backs,
        )

    @property
    def episodes(self) -> tuple[ChatEpisode, ...]:
        """Caches of the chat, by number; a single one where the policy forms no episodes."""
        caches, router = self._caches.caches, self.memory.router
        layers = budgeted_layers(self.policy, self._engine.loaded.decoder.spec)
        heads = sum(layer.kv_heads for layer in layers)
        usage = caches.usage()
        prompts = router.prompts() or [()] * len(usage)
        segments = router.segments() or [0] * len(usage)
        return tuple(
            ChatEpisode(
                number=index,
                entries_per_head=cache.entries / max(1, heads),
                kv_bytes=cache.nbytes,
                next_position=cache.next_position,
                segments=segments[index],
                prompt_texts=prompts[index],
                is_active=index == caches.active_number,
            )
            for index, cache in enumerate(usage)
        )

    def _resume(self, log: ChatLog, progress: Progress) -> ResumeResult:
        """Restore the saved caches and replay the turns since, or prefill the whole log."""
        runtime, policy = self._engine.runtime, sized_policy(self._engine, log)
        resumed = ResumeResult(None, NOT_SAVED)
        if self._name is not None and self._saved_record is not None:
            resumed = self._persistence.load(self._name, runtime, policy, log)
        if resumed.state is None:
            self._caches = ChatCache.prefill(runtime, policy, log, progress)
            self._persistence.record_prefill_time(self.memory)
            return resumed
        self._caches = ChatCache(runtime, resumed.state, progress)
        for turn in log.turns[len(self.turns) :]:
            self._replay_turn(turn)
        return resumed

    def _replay_turn(self, logged: ChatTurn) -> None:
        """Read a turn of the log into the caches, without generation."""
        chat_cache = self._caches
        chat_cache.refresh()
        turn = self._open_turn(logged.question)
        turn.reader.reserve(len(logged.ids))
        run_steps(turn.reader.message_steps(logged.ids))
        self._read_rest(turn, logged.ids, 0)
        self._record_peaks(turn)
        commit = chat_cache.prepare_commit(turn, logged)
        chat_cache.commit(turn, commit)
        run_steps(chat_cache.enforce_budget_steps(turn, commit))
        chat_cache.refresh()

    def _prompt(self, text: str) -> tuple[int, ...]:
        tokenizer = self._engine.tokenizer
        if not text.strip():
            raise InputError("The message is blank: write at least one word.")
        question = self.history.question_prompt.format(question=valid_unicode(text, "The message"))
        is_first = self._caches.num_tokens == 0
        encode = tokenizer.encode_first_question if is_first else tokenizer.encode_question
        prompt = encode(question)
        check_prompt_fits(prompt, budget_tokens(self.policy))
        return prompt

    def _open_turn(self, text: str) -> ActiveTurn:
        """Open a turn, and count the write-back of another cache that it causes."""
        former, turn = self._caches.caches.active_number, self._caches.open_turn(text)
        self._write_backs += former is not None and former != turn.number
        return turn

    def _read_rest(self, turn: ActiveTurn, ids: TokenIds, num_generated: int) -> None:
        """Read the ids that decoding left unread: the last of the answer, the end of the turn."""
        unread = ids[turn.cache.next_position - turn.start_position :]
        run_steps(turn.reader.closing_steps(unread, num_generated))

    def _commit(self, turn: ActiveTurn, finished: ChatTurn) -> TurnCommit:
        """Write the session file, then commit a finished turn in memory."""
        commit = self._caches.prepare_commit(turn, finished)
        self._log_store.save(commit.state.log, self._identity())
        self._caches.commit(turn, commit)
        return commit

    def _record_peaks(self, turn: ActiveTurn) -> int:
        """Record peak bytes and entries of the turn; the bytes held now."""
        copied = 0 if turn.copy is None else turn.copy.nbytes
        entries = max(turn.cache.managed_entries, turn.reader.meter.peak_entries)
        self._caches.record_peaks(entries, copied)
        return self._caches.caches.nbytes + copied

    def _identity(self) -> ChatIdentity:
        model = self._engine.loaded
        return ChatIdentity(model.name, model.decoder.spec.fingerprint, str(self.policy))


def initial_log(
    record: ChatRecord | None, engine: Engine, name: str | None, history: Conversation | None
) -> ChatLog:
    """Log that a chat begins with: that of its session file, or an empty one over the history.

    Raises:
        InputError: the session was written with another model.
        UsageError: the session has another history.
    """
    if record is None:
        return ChatLog(EMPTY_HISTORY if history is None else replace(history, questions=()))
    if record.identity.fingerprint != engine.loaded.decoder.spec.fingerprint:
        model = record.identity.model
        raise InputError(
            f"The session file {chat_log_path(str(name))} was written with another model "
            f"({model}): take that model, or another session name."
        )
    if history is not None and replace(history, questions=()) != record.log.history:
        raise UsageError(
            f"The session {name!r} began with another history ({record.log.history.name}): "
            "continue without one, or take another session name."
        )
    return record.log


def sized_policy(engine: Engine, log: ChatLog) -> Policy:
    """Policy of the engine with the sizes for the whole chat, which the history determines."""
    spec, sizes, policy = engine.loaded.decoder.spec, engine.sizes, engine.policy
    context = len(log.transcript(engine.tokenizer).ids)
    if context:
        tokens = resolve_budget(policy, sizes.budget, context, spec)
    else:
        tokens = resolve_budget_without_context(policy, sizes.budget, spec)
    return policy.with_sizes(tokens, sizes.block, context or None)


@dataclass(frozen=True)
class ChatFigures:
    """Memory figures of a chat at one moment.

    Args:
        turns: number of turns, those of former processes included.
        log_tokens: tokens of history and turns.
        budget_tokens: M, entries per kv head averaged over managed layers.
        block_tokens: M_block; a cache is refreshed when it exceeds M + M_block.
        full_kv_bytes: a plain cache of `log_tokens`, states of recurrent layers included.
        active_kv_bytes: bytes of the cache on the device without its slow tier; 0 before the first
            turn.
        parked_kv_bytes: bytes of the caches and slow tiers in host memory.
        peak_kv_bytes: peak bytes of all caches together, scratch tokens included.
        peak_entries: peak of managed entries of the cache in use, over layers and heads.
        refreshes: number of cache rebuilds since the chat was opened.
        opened: number of episodes that turns have opened since then.
        write_backs: number of times an active cache was written back for another.
    """

    turns: int
    log_tokens: int
    budget_tokens: int
    block_tokens: int
    full_kv_bytes: int
    active_kv_bytes: int
    parked_kv_bytes: int
    peak_kv_bytes: int
    peak_entries: int
    refreshes: int
    opened: int
    write_backs: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of all caches together."""
        return self.active_kv_bytes + self.parked_kv_bytes


@dataclass(frozen=True)
class ChatEpisode:
    """One cache of a chat.

    Args:
        entries_per_head: entries per kv head, averaged over managed layers.
        kv_bytes: bytes of all its tensors.
        next_position: number of tokens read.
        segments: number of segments assigned to it; 0 without episodes.
        prompt_texts: segments that its entries were scored with.
        is_active: whether it is on the device.
    """

    number: int
    entries_per_head: float
    kv_bytes: int
    next_position: int
    segments: int
    prompt_texts: tuple[str, ...]
    is_active: bool


@dataclass(frozen=True)
class TurnOutcome:
    """Outcome of the latest turn.

    Args:
        answered_by: number of the cache that answered.
        filed_in: number of the cache that holds the turn; another one if it opened an episode.
        refreshes: number of cache rebuilds after the turn.
    """

    answered_by: int
    filed_in: int
    refreshes: int

    @property
    def is_new_episode(self) -> bool:
        return self.filed_in != self.answered_by
