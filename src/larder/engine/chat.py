"""A conversation that goes on: every turn is remembered within the budget, and survives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from larder.core.conversation import Conversation
from larder.core.errors import InputError, UsageError
from larder.core.types import Coming, Mode
from larder.engine.answer import Answer
from larder.engine.chat_view import ChatFigures, EpisodeView, Outcome
from larder.engine.decoding import Tend, untended
from larder.engine.engine import Engine, unheard
from larder.engine.reply import check_fits
from larder.engine.sampling import Sampling
from larder.models.passes import Row
from larder.prefill.base import Progress, silent
from larder.prefill.tending import Tending
from larder.session.files.fields import whole
from larder.session.filing import Cabinet, Drawer, block_of
from larder.session.log import Exchange, Log
from larder.session.logbook import (
    Forgetful,
    Kept,
    Logbook,
    SessionFile,
    Stamp,
    session_path,
)
from larder.session.memory import Memory
from larder.session.policy import Policy
from larder.session.reading import tend
from larder.session.rooms import governed, tokens_of
from larder.session.sizes import resolve, resolve_open

NOTHING = Conversation("nothing", ())


class Chat:
    """A chat under an engine's policy. Not safe for two threads at once.

    A policy that acts while text is generated does so on a copy of the cache, which then takes its
    place; its caches stay within their budget and are not built anew.

    A turn counts as a whole or not at all: interrupted or failed, caches and file are as before it.
    The one exception: see `say`.
    If only the refresh behind a turn is interrupted, the turn stands and the next one begins with
    the refresh.

    Args:
        name: of the session, which then survives the process; None for one that does not.
        history: a conversation to begin with. A session that exists has its own already.
        progress: told of tokens read and to read, at the start and whenever caches are built anew.

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
        progress: Progress = silent,
    ) -> None:
        self._engine = engine
        self._logbook: Logbook = Forgetful() if name is None else SessionFile(name)
        self._kept = self._logbook.load()
        log = _log(self._kept, engine, name, history)
        self._cabinet = Cabinet(engine.desk, _policy(engine, log), log, progress)
        self._write_backs = 0
        self.outcome: Outcome | None = None

    def say(
        self,
        text: str,
        on_text: Callable[[str], None] = unheard,
        sampling: Sampling | None = None,
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
        cabinet, before = self._cabinet, self._cabinet.state.refreshes
        cabinet.refresh()
        prompt = self._prompt(text)
        drawer, tending = self._recall(text)
        cache, closing = drawer.cache, self._engine.scribe.closing()
        observe = untended if tending is None else tending.observer
        cache.reserve(len(prompt) + len(closing) + (max_new_tokens if tending is None else 1))
        self._note(drawer)
        try:
            reply = self._engine.speaker.reply(
                cache, prompt, sampling or Sampling(), max_new_tokens, (), on_text, observe
            )
            ids = prompt + reply.ids + closing
            self._finish(drawer, ids, observe, len(reply.ids))
            held_bytes = self._note(drawer)
            filed = cabinet.file(drawer, Exchange(text, reply.text, ids))
            self._logbook.save(filed.state.log, self._stamp())
            cabinet.accept(drawer, filed)
        except BaseException:
            cache.truncate(drawer.mark)
            raise
        finally:
            cache.compact()
        cabinet.refresh()
        self.outcome = Outcome(drawer.number, filed.number, cabinet.state.refreshes - before)
        return reply.answer(text, drawer.match, len(prompt), held_bytes)

    @property
    def turns(self) -> tuple[Exchange, ...]:
        """What was said, in order, without the history."""
        return self._cabinet.state.log.exchanges

    @property
    def history(self) -> Conversation:
        """What was read before the first turn; without messages where nothing was."""
        return self._cabinet.state.log.history

    @property
    def policy(self) -> Policy:
        """With every size filled in."""
        return self.memory.policy

    @property
    def former_policy(self) -> str | None:
        """The policy that a resumed session was last held under; None for a new one."""
        return None if self._kept is None else self._kept.stamp.policy

    @property
    def memory(self) -> Memory:
        """What it remembers now: `engine.ask` leaves no trace in it. The next turn replaces it."""
        return self._cabinet.state.memory

    @property
    def figures(self) -> ChatFigures:
        """What the memory takes now, and took at its highest."""
        cabinet, shelf = self._cabinet, self._cabinet.shelf
        return ChatFigures(
            turns=len(self.turns),
            log_tokens=cabinet.length,
            budget_tokens=tokens_of(self.policy),
            block_tokens=block_of(self.policy),
            full_kv_bytes=self._engine.loaded.decoder.spec.full_bytes(cabinet.length),
            active_kv_bytes=shelf.in_use_bytes,
            parked_kv_bytes=max(0, shelf.nbytes - shelf.in_use_bytes),
            peak_kv_bytes=max(cabinet.peak_bytes, shelf.nbytes),
            peak_entries=cabinet.peak_entries,
            refreshes=cabinet.state.refreshes,
            opened=cabinet.state.opened,
            write_backs=self._write_backs,
        )

    @property
    def episodes(self) -> tuple[EpisodeView, ...]:
        """Its caches, by number; a single one where the policy forms no episodes."""
        shelf, router = self._cabinet.shelf, self.memory.router
        layers = governed(self.policy, self._engine.loaded.decoder.spec)
        heads = sum(layer.kv_heads for layer in layers)
        holdings = shelf.holdings()
        prompts = router.prompts() or [()] * len(holdings)
        segments = router.segments() or [0] * len(holdings)
        return tuple(
            EpisodeView(
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

    def _prompt(self, text: str) -> tuple[int, ...]:
        scribe = self._engine.scribe
        if not text.strip():
            raise InputError("The message is blank: say something.")
        asked = self.history.question_prompt.format(question=whole(text, "The message"))
        prompt = scribe.question(asked) if self._cabinet.length else scribe.opening(asked)
        check_fits(prompt, tokens_of(self.policy))
        return prompt

    def _recall(self, text: str) -> tuple[Drawer, Tending | None]:
        """The cache that answers; a copy of it, where entries go while the answer is generated."""
        former = self._cabinet.shelf.active
        drawer = self._cabinet.recall(text)
        self._write_backs += former is not None and former != drawer.number
        tending = tend(self._engine.desk, self.policy, [drawer.cache])
        return (drawer if tending is None else drawer.copied()), tending

    def _finish(self, drawer: Drawer, ids: tuple[int, ...], observe: Tend, said: int) -> None:
        """Read what decoding has left unread: the answer's last token, the end of the turn."""
        unread = ids[drawer.cache.next_position - drawer.mark :]
        if unread:
            row = Row(drawer.cache, unread, coming=Coming.TEXT)
            decoder = self._engine.loaded.decoder
            decoder.read([row], Mode.APPEND, observe([0], [row], [said]))

    def _note(self, drawer: Drawer) -> int:
        """Remember what is held now; the bytes of it."""
        copied = drawer.cache.nbytes if drawer.is_copy else 0
        self._cabinet.note(drawer.cache.managed_entries, copied)
        return self._cabinet.shelf.nbytes + copied

    def _stamp(self) -> Stamp:
        loaded = self._engine.loaded
        return Stamp(loaded.name, loaded.decoder.spec.fingerprint, str(self.policy))


def _log(kept: Kept | None, engine: Engine, name: str | None, history: Conversation | None) -> Log:
    """What a chat begins with: its own log, or the history given."""
    if kept is None:
        return Log(NOTHING if history is None else replace(history, questions=()))
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


def _policy(engine: Engine, log: Log) -> Policy:
    """The engine's policy with the sizes that hold for the whole chat: those of its history."""
    spec, sizes, policy = engine.loaded.decoder.spec, engine.sizes, engine.policy
    context = len(log.transcript(engine.scribe).ids)
    if context:
        tokens = resolve(policy, sizes.budget, context, spec)
    else:
        tokens = resolve_open(policy, sizes.budget, spec)
    return policy.filled(tokens, sizes.block)
