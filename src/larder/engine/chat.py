"""A conversation that goes on: every turn is remembered within the budget, and survives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from larder.core.arguments import check_count, check_type
from larder.core.conversation import Conversation
from larder.core.errors import BadParameter, InputError, UsageError
from larder.engine.answer import Answer, check_prompt_fits
from larder.engine.engine import Engine, discard_text
from larder.engine.persistence import NOT_SAVED, ChatPersistence, NoPersistence, ResumeResult
from larder.engine.sampler import SamplingParams
from larder.prefill.base import Progress, no_progress, run_steps
from larder.session.capacity import (
    block_tokens,
    budget_tokens,
    budgeted_layers,
    resolve_budget,
    resolve_budget_without_context,
)
from larder.session.chat_cache import ChatCache
from larder.session.chat_state import ActiveTurn, ChatState
from larder.session.files.json_fields import valid_unicode
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy
from larder.session.transcript.chat_log import ChatLog, ChatTurn
from larder.session.transcript.session_file import (
    ChatIdentity,
    ChatLogStore,
    ChatRecord,
    NoLogStore,
    SessionFile,
    session_path,
)


class Chat:
    """A chat under an engine's policy. Not safe for two threads at once.

    A policy that acts while text is generated does so on a copy of the cache, which then takes its
    place; its caches stay within their budget and are not built anew.

    Between two turns each cache holds no more than the budget, and while one runs no more than
    budget + block. The copies that undo a turn are counted with the others.

    A turn counts as a whole or not at all: interrupted or failed, caches and file are as before it.
    The one exception: see `say`.
    If only the plan or the refresh behind a turn is interrupted, the turn stands and the next one
    begins with that.

    Args:
        name: of the session, which then survives the process; None for one that does not.
        history: a conversation to begin with. A session that exists has its own already.
        progress: told of tokens read and to read, at the start and whenever caches are built anew.
        keeper: restores the caches of a session that exists, and saves them when told to `keep`.
        state: to begin with in place of a history, taken over; the session must be new.

    Raises:
        InputError: the session's file is damaged, or was written with another model.
        UsageError: the name is none, or the session has another history; a budget that is a share
            of a context that is not there; a policy that needs its question in advance.
    """

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
        self._engine, self._name, self._keeper = engine, name, keeper or NoPersistence()
        self._log_store: ChatLogStore = (
            NoLogStore() if name is None else SessionFile(name, self._keeper.logs)
        )
        self._kept = self._log_store.load()
        log = initial_log(self._kept, engine, name, history)
        self._write_backs = 0
        self.outcome: TurnOutcome | None = None
        if state is None:
            self.resumed = self._open(log, progress)
            return
        if self._kept is not None:
            raise UsageError(f"There is a session {name!r} already: take another name.")
        self.resumed, self._caches = (
            ResumeResult(None, NOT_SAVED),
            ChatCache(engine.desk, state, progress),
        )
        self._log_store.save(state.log, self._identity())

    def say(
        self,
        text: str,
        on_text: Callable[[str], None] = discard_text,
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 256,
    ) -> Answer:
        """Say something and hear the answer; both are remembered.

        The file is written first, a moment before memory takes the turn over. An interrupt in just
        that moment leaves the turn in the file alone: open the session anew to go on with it.

        Args:
            on_text: told of the answer's text as it comes; what it raises ends the turn undone.

        Raises:
            InputError: the text is blank, or longer than the budget; the session's file cannot be
                written.
        """
        check_type("text", text, str, "what is said, as a string")
        check_count("max_new_tokens", max_new_tokens)
        cabinet, before = self._caches, self._caches.state.refreshes
        cabinet.refresh()
        prompt = self._prompt(text)
        drawer, closing = self._recall(text), self._engine.scribe.closing()
        cache, turn = drawer.cache, drawer.turn
        turn.reserve(len(prompt) + len(closing) + max_new_tokens)
        self._note(drawer)
        try:
            rest = run_steps(turn.message_steps(prompt))
            told = (
                cache,
                rest,
                sampling or SamplingParams(),
                max_new_tokens,
                (),
                on_text,
                turn.observer,
            )
            reply = self._engine.speaker.generate(*told)
            ids = prompt + reply.ids + closing
            self._finish(drawer, ids, len(reply.ids))
            held_bytes = self._note(drawer)
            filed = cabinet.file(drawer, ChatTurn(text, reply.text, ids))
            self._log_store.save(filed.state.log, self._identity())
            cabinet.accept(drawer, filed)
        except BaseException:
            cabinet.undo(drawer)
            raise
        finally:
            cache.compact()
        run_steps(cabinet.settling(drawer, filed))
        cabinet.refresh()
        self.outcome = TurnOutcome(drawer.number, filed.number, cabinet.state.refreshes - before)
        return reply.answer(text, drawer.match, len(prompt), held_bytes)

    def keep(self) -> str:
        """Save the caches of a session; one word for why they were not, empty where they were.

        What was said is safe without.
        """
        restored = self.resumed.state
        if self._name is None or not self.turns:
            return NOT_SAVED
        if restored is not None and len(restored.log.exchanges) == len(self.turns):
            return ""
        self._caches.refresh()
        return self._keeper.save(self._name, self._caches.state)

    def fork(self, name: str | None = None) -> Chat:
        """A second chat that begins where this one is, for a side task (CIFLEX) or another way on.

        Args:
            name: of its session; None for one that ends with the process.

        Raises:
            UsageError: there is such a session already.
        """
        copied = self._caches.before(len(self.turns))
        assert copied is not None  # nothing is to be undone
        return Chat(self._engine, name, keeper=self._keeper, state=copied.state)

    def roll_back(self, turns: int = 1) -> None:
        """Forget the last turns, in memory and on disk, as if they had never been said.

        The latest are cut off where their caches have only grown since; else what is left of the
        log is read anew.

        Raises:
            BadParameter: there are fewer.
            InputError: the session's file cannot be written.
        """
        if not 0 <= turns <= len(self.turns):
            raise BadParameter(f"turns must be 0 to {len(self.turns)}, got {turns}.")
        log = self._caches.state.log
        log = replace(log, exchanges=log.exchanges[: len(self.turns) - turns])
        self._log_store.save(log, self._identity())
        self._caches.roll_back(log)

    @property
    def turns(self) -> tuple[ChatTurn, ...]:
        """What was said, in order, without the history."""
        return self._caches.state.log.exchanges

    @property
    def history(self) -> Conversation:
        """What was read before the first turn; without messages where nothing was."""
        return self._caches.state.log.history

    @property
    def policy(self) -> Policy:
        """With every size filled in."""
        return self._caches.state.memory.policy

    @property
    def beyond_budget(self) -> tuple[str, ...]:
        """As `Engine.beyond_budget`."""
        return self._engine.beyond_budget

    @property
    def former_policy(self) -> str | None:
        """The policy that a resumed session was last held under; None for a new one."""
        return None if self._kept is None else self._kept.stamp.policy

    @property
    def memory(self) -> ConversationMemory:
        """What it remembers now: `engine.ask` leaves no trace in it. The next turn replaces it."""
        if not len(self._caches.caches):  # an interruption has left nothing
            self._caches.refresh()
        return self._caches.state.memory

    @property
    def figures(self) -> ChatFigures:
        """What the memory takes now, and took at its highest."""
        cabinet, shelf = self._caches, self._caches.caches
        return ChatFigures(
            turns=len(self.turns),
            log_tokens=cabinet.length,
            budget_tokens=budget_tokens(self.policy),
            block_tokens=block_tokens(self.policy),
            full_kv_bytes=self._engine.loaded.decoder.spec.full_bytes(cabinet.length),
            active_kv_bytes=shelf.fast_tier_bytes,
            parked_kv_bytes=max(0, shelf.nbytes - shelf.fast_tier_bytes),
            peak_kv_bytes=max(cabinet.peak_bytes, shelf.nbytes),
            peak_entries=cabinet.peak_entries,
            refreshes=cabinet.state.refreshes,
            opened=cabinet.state.opened,
            write_backs=self._write_backs,
        )

    @property
    def episodes(self) -> tuple[ChatEpisode, ...]:
        """Its caches, by number; a single one where the policy forms no episodes."""
        shelf, router = self._caches.caches, self.memory.router
        layers = budgeted_layers(self.policy, self._engine.loaded.decoder.spec)
        heads = sum(layer.kv_heads for layer in layers)
        holdings = shelf.holdings()
        prompts = router.prompts() or [()] * len(holdings)
        segments = router.segments() or [0] * len(holdings)
        return tuple(
            ChatEpisode(
                number=number,
                entries_per_head=held.entries / max(1, heads),
                kv_bytes=held.nbytes,
                next_position=held.next_position,
                segments=segments[number],
                prompt_texts=prompts[number],
                is_active=number == shelf.active,
            )
            for number, held in enumerate(holdings)
        )

    def _open(self, log: ChatLog, progress: Progress) -> ResumeResult:
        """Restore what was saved and read what was said since, or read everything."""
        desk, policy = self._engine.desk, sized_policy(self._engine, log)
        resumed = ResumeResult(None, NOT_SAVED)
        if self._name is not None and self._kept is not None:
            resumed = self._keeper.load(self._name, desk, policy, log)
        if resumed.state is None:
            self._caches = ChatCache.read(desk, policy, log, progress)
            self._keeper.note_reading(self.memory)
            return resumed
        self._caches = ChatCache(desk, resumed.state, progress)
        for exchange in log.exchanges[len(self.turns) :]:
            self._hear(exchange)
        return resumed

    def _hear(self, exchange: ChatTurn) -> None:
        """Read a turn that was said before, in one pass."""
        cabinet = self._caches
        cabinet.refresh()
        drawer = self._recall(exchange.question)
        drawer.turn.reserve(len(exchange.ids))
        run_steps(drawer.turn.message_steps(exchange.ids))
        self._finish(drawer, exchange.ids, 0)
        self._note(drawer)
        cabinet.accept(drawer, filed := cabinet.file(drawer, exchange))
        run_steps(cabinet.settling(drawer, filed))
        cabinet.refresh()

    def _prompt(self, text: str) -> tuple[int, ...]:
        scribe = self._engine.scribe
        if not text.strip():
            raise InputError("The message is blank: say something.")
        asked = self.history.question_prompt.format(question=valid_unicode(text, "The message"))
        prompt = scribe.question(asked) if self._caches.length else scribe.opening(asked)
        check_prompt_fits(prompt, budget_tokens(self.policy))
        return prompt

    def _recall(self, text: str) -> ActiveTurn:
        """The cache that answers; a copy of it, where entries go while the answer is generated."""
        former, drawer = self._caches.caches.active, self._caches.draw(text)
        self._write_backs += former is not None and former != drawer.number
        return drawer

    def _finish(self, drawer: ActiveTurn, ids: tuple[int, ...], said: int) -> None:
        """Read what decoding has left unread: the answer's last token, the end of the turn."""
        unread = ids[drawer.cache.next_position - drawer.mark :]
        run_steps(drawer.turn.closing_steps(unread, said))

    def _note(self, drawer: ActiveTurn) -> int:
        """Remember what is held now; the bytes of it."""
        copied = 0 if drawer.copy is None else drawer.copy.nbytes
        entries = max(drawer.cache.managed_entries, drawer.turn.meter.peak_entries)
        self._caches.note(entries, copied)
        return self._caches.caches.nbytes + copied

    def _identity(self) -> ChatIdentity:
        model = self._engine.loaded
        return ChatIdentity(model.name, model.decoder.spec.fingerprint, str(self.policy))


EMPTY_HISTORY = Conversation("nothing", ())


def initial_log(
    kept: ChatRecord | None, engine: Engine, name: str | None, history: Conversation | None
) -> ChatLog:
    """What a chat begins with: its own log, or the history given.

    Raises:
        InputError: the session was written with another model.
        UsageError: it has another history.
    """
    if kept is None:
        return ChatLog(EMPTY_HISTORY if history is None else replace(history, questions=()))
    if kept.stamp.fingerprint != engine.loaded.decoder.spec.fingerprint:
        raise InputError(
            f"The session file {session_path(str(name))} was written with another model "
            f"({kept.stamp.model}): take --model {kept.stamp.model}, or another session name."
        )
    if history is not None and replace(history, questions=()) != kept.log.history:
        raise UsageError(
            f"The session {name!r} began with another history ({kept.log.history.name}): go on "
            "without giving one, or take another session name."
        )
    return kept.log


def sized_policy(engine: Engine, log: ChatLog) -> Policy:
    """The engine's policy with the sizes that hold for the whole chat: those of its history."""
    spec, sizes, policy = engine.loaded.decoder.spec, engine.sizes, engine.policy
    context = len(log.transcript(engine.scribe).ids)
    if context:
        tokens = resolve_budget(policy, sizes.budget, context, spec)
    else:
        tokens = resolve_budget_without_context(policy, sizes.budget, spec)
    return policy.filled(tokens, sizes.block)


@dataclass(frozen=True)
class ChatFigures:
    """A chat's memory at one moment.

    Args:
        turns: said so far, those of former processes included.
        log_tokens: tokens of history and turns.
        budget_tokens: M, entries per kv head averaged over managed layers.
        block_tokens: M_block; a cache is refreshed when it exceeds M + M_block.
        full_kv_bytes: keys and values of a plain cache of `log_tokens`.
        active_kv_bytes: of the cache on the device without its slow tier; 0 before the first turn.
        parked_kv_bytes: of the caches and slow tiers in host memory.
        peak_kv_bytes: the highest of all caches together at any time, scratch tokens included.
        peak_entries: the most managed entries of the cache in use, over layers and heads.
        refreshes: how often caches were built anew since the chat was opened.
        opened: episodes that turns have opened since then.
        write_backs: how often an active cache made room for another, its turns included.
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
        """All caches together."""
        return self.active_kv_bytes + self.parked_kv_bytes


@dataclass(frozen=True)
class ChatEpisode:
    """One cache of a chat.

    Args:
        entries_per_head: averaged over managed layers.
        kv_bytes: every byte held.
        next_position: tokens it has truly read.
        segments: that are filed under it; 0 where there are no episodes.
        prompt_texts: the segments that it was judged by.
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
    """What became of the latest turn.

    Args:
        answered_by: the cache that answered.
        filed_in: the cache that holds the turn; another one if it opened an episode.
        refreshes: how many refreshes followed.
    """

    answered_by: int
    filed_in: int
    refreshes: int

    @property
    def is_new_episode(self) -> bool:
        return self.filed_in != self.answered_by
