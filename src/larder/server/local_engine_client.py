"""Many conversations over one model in this process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial

from larder.core.session_name import root_name
from larder.engine.engine import Engine
from larder.server.api_errors import invalid_request
from larder.server.engine_client import (
    CachedPositions,
    EngineClient,
    ServedModel,
    ServerStats,
    SessionInfo,
    SessionTranscript,
)
from larder.server.engine_core import EngineCore
from larder.server.model_thread import ModelThread
from larder.server.persistence import session_file
from larder.server.persistence.base import SessionPersistence
from larder.server.persistence.restore import CandidateLoader
from larder.server.request import ApiError, ChatMessage, Listener, Request, Ticket
from larder.server.session_info import (
    TokenTexts,
    cached_positions,
    session_info,
    session_transcript,
)
from larder.server.session_state import SessionState
from larder.server.stats import collect_stats
from larder.server.tiers.disk import DiskTier
from larder.store.ledger import ByteBudgets, Tier


class LocalEngineClient(EngineClient):
    """Serves an engine's model under its policy. Safe from any thread.

    The engine must not be used by others meanwhile.

    Args:
        budgets: bytes that caches may take on the device and in host memory.
        eviction: the rule for who leaves a tier that is full.
        rows: the most answers that one pass goes on with.
        waiting: the most requests that wait.
        keeper: told of finished turns.
        vault: keeps caches that are not in use.
        clock: seconds since 1970.

    Raises:
        UsageError: the policy is not one that a server can follow.
    """

    def __init__(
        self,
        engine: Engine,
        budgets: ByteBudgets = ByteBudgets(),  # noqa: B008, frozen
        *,
        eviction: str = "lru",
        rows: int = 64,
        waiting: int = 1024,
        keeper: SessionPersistence | None = None,
        vault: DiskTier | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keeper = keeper or SessionPersistence()
        told = engine, budgets, eviction, rows, waiting, self._keeper, vault or DiskTier(), clock
        self._core = EngineCore(*told, self._wake, lambda tenant, name: None)
        self._made = clock()
        self._removals = PendingRemovals()
        self._pieces = TokenTexts(engine.tokenizer.decode)
        self._thread = ModelThread(self._core.step, self._core.close)
        core = self._core
        own = core.sessions, self._keeper, core.awaited, self._thread.call, self._recall
        self._gathering = CandidateLoader(*own, core.recalling)

    def submit(self, request: Request, listener: Listener) -> Ticket:
        core, asked = self._core, self._core.clock()
        try:
            take = partial(self._taken, request, listener, asked)
            return self._gathering.resolve_resident(request, core.rule_of(request), take)
        except ApiError as error:
            core.refused.note(error.code)
            raise

    def models(self) -> tuple[ServedModel, ...]:
        core = self._core
        told = core.engine.loaded.name, str(core.rule), core.context, self._made
        return (ServedModel(*told, core.rule.budget_tokens, core.engine.beyond_budget),)

    def tokenize(self, text: str) -> tuple[int, ...]:
        self._core.check_length(text, param="prompt")
        return self._thread.call(lambda: self._core.engine.tokenizer.encode(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        engine = self._core.engine
        wrong = [token for token in ids if not 0 <= token < engine.loaded.decoder.vocab_size]
        if wrong:
            raise invalid_request(
                f"Token id {wrong[0]} is outside the vocabulary of "
                f"{engine.loaded.decoder.vocab_size}: send ids of this model.",
                "tokens",
            )
        return self._thread.call(lambda: engine.tokenizer.decode(ids))

    def sessions(self, tenant: str) -> tuple[SessionInfo, ...]:
        here = self._thread.call(lambda: tuple(map(session_info, self._core.sessions.of(tenant))))
        names = {view.name for view in here}
        kept = [view for view in self._keeper.list_sessions(tenant) if view.name not in names]
        return tuple(sorted((*here, *kept), key=lambda view: -view.last_used))

    def session(self, tenant: str, name: str) -> SessionTranscript:
        with self._gathering.these(tenant, name):
            return self._thread.call(lambda: session_transcript(self._core.find(tenant, name)))

    def open(self, tenant: str, name: str, turns: Sequence[ChatMessage] = ()) -> SessionInfo:
        with self._gathering.these(tenant, name):
            return self._thread.call(lambda: session_info(self._core.open(tenant, name, turns)))

    def pin(self, tenant: str, name: str) -> SessionInfo:
        return self._pinned(tenant, name, True)

    def unpin(self, tenant: str, name: str) -> SessionInfo:
        return self._pinned(tenant, name, False)

    def release(self, tenant: str, name: str) -> SessionInfo:
        with self._gathering.these(tenant, name):
            return self._moved(lambda: self._core.release(tenant, name))

    def prefetch(self, tenant: str, name: str) -> SessionInfo:
        with self._gathering.these(tenant, name):
            return self._moved(lambda: self._core.prefetch(tenant, name))

    def fork(self, tenant: str, name: str, new_name: str | None = None) -> SessionInfo:
        core, gathering = self._core, self._gathering
        family = gathering.family(tenant, name) if new_name is None else ()

        def forked() -> SessionInfo:
            if family:
                core.sessions.avoid(tenant, root_name(name), family)
            return session_info(core.fork(tenant, name, new_name))

        with gathering.these(tenant, name, new_name):
            return self._thread.call(forked)

    def compact(self, tenant: str, name: str) -> SessionInfo:
        with self._gathering.these(tenant, name):
            view = self._moved(lambda: self._core.compact(tenant, name))
            self._keeper.merge(tenant, name)
            return view

    def export(self, tenant: str, name: str) -> bytes:
        with self._gathering.these(tenant, name):
            told = self._thread.call(
                lambda: session_file.take_snapshot(self._core.find(tenant, name))
            )
            return session_file.encode(told, self._core.engine.loaded.decoder.spec.fingerprint)

    def import_(self, tenant: str, name: str, data: bytes) -> SessionInfo:
        limit = session_file.SessionFileLimit(session_file.IMPORT_BYTES, self._core.context)
        told = self._core.recalling.read(data, limit=limit)
        with self._gathering.these(tenant, name):
            return self._thread.call(lambda: session_info(self._core.import_(tenant, name, told)))

    def remove(self, tenant: str, name: str, branches: bool = False) -> tuple[str, ...]:
        core, own = self._core, [name]
        if branches and root_name(name) == name:
            own += self._keeper.branches(tenant, name)
        elif root_name(name) == name:
            own += self._gathering.family(tenant, name)

        def removed() -> tuple[list[str], list[str], list[str], list[Future[None]]]:
            away = [each for each in lost if not core.sessions.has(tenant, each)]
            made = core.sessions.branches(tenant, name) + [each for each in away if each != name]
            wanted = [name, *(made if branches else ())]
            if len(wanted) > 1 and not (name in away or core.sessions.has(tenant, name)):
                wanted.remove(name)  # it has gone before them
            gone = core.remove(tenant, *(each for each in wanted if each not in away))
            self._removals.begin(tenant, wanted)
            return wanted, [] if branches else made, away, gone

        with core.awaited.these(tenant, name):
            lost = self._gathering.guess(tenant, own)  # what cannot be read can be gone
            wanted, staying, away, gone = self._thread.call(removed)
        told = (self._keeper.discard(tenant, each) for each in wanted if each in away)
        gone += [future for future in told if future is not None]
        wait(gone)
        self._removals.end(tenant, wanted)
        for future in gone:
            future.result()
        return tuple(staying)

    def kept(self, tenant: str, name: str) -> CachedPositions:
        def kept() -> CachedPositions:
            sitting = self._core.find(tenant, name)
            held = cached_positions(sitting)
            return replace(held, texts=self._pieces.texts(sitting.ids)) if held.tokens else held

        with self._gathering.these(tenant, name):
            return self._thread.call(kept)

    def stats(self) -> ServerStats:
        core = self._core
        told = core.scheduler, core.ledger, core.purse, core.tiers, core.sessions
        recalling = core.recalling
        others = core.refused.told(), recalling.passed_over.told(), recalling.begun_again.told()
        others = *others, core.unwritten
        return self._thread.call(lambda: collect_stats(*told, *others))

    def is_healthy(self) -> bool:
        return self._thread.is_alive

    def problems(self) -> tuple[str, ...]:
        return ("turns_not_durable",) if self._core.unwritten.is_degraded else ()

    def close(self) -> None:
        self._thread.close()

    def limit(self, tier: Tier, count: int) -> int:
        """Set a tier's budget while serving; bytes above it that go as soon as answers are done."""
        return self._thread.call(lambda: self._core.tiers.lower(tier, count))

    def _taken(self, request: Request, listener: Listener, asked: float) -> Ticket:
        ticket = self._core.submit(request, listener, asked)
        self._core.sessions.announce(request.tenant, request.steps)
        return ticket

    def _wake(self) -> None:
        self._thread.wake()

    def _recall(self, tenant: str, name: str) -> None:
        """Have a session be in memory, if it is kept; a slow store holds nobody else up."""
        while not self._is_settled(tenant, name):
            continue

    def _is_settled(self, tenant: str, name: str) -> bool:
        """As `_recall`; False where what was read may be what was removed meanwhile."""
        core, removals = self._core, self._removals
        ended, found = removals.ended, self._keeper.recall(tenant, name)
        if found is None:
            return True
        told = core.recalling.read(found.data, "session")

        def is_settled() -> bool:
            if removals.has(tenant, name):
                return True
            if removals.ended != ended:
                return False
            core.recalling.take(tenant, name, found, told)
            return True

        return self._thread.call(is_settled)

    def _moved(self, move: Callable[[], Future[SessionState]]) -> SessionInfo:
        """Wait until a session has moved, while others are answered."""
        sitting = self._thread.call(move).result()
        return self._thread.call(lambda: session_info(sitting))

    def _pinned(self, tenant: str, name: str, is_pinned: bool) -> SessionInfo:
        def pin() -> tuple[SessionState, bool, Future[None] | None]:
            sitting = self._core.find(tenant, name)
            before, sitting.is_pinned = sitting.is_pinned, is_pinned
            written = self._keeper.pin(sitting)
            self._core.news.track_write(sitting, written, lambda _: None)
            return sitting, before, written

        def undo() -> None:
            sitting.is_pinned = before

        with self._gathering.these(tenant, name):
            sitting, before, written = self._thread.call(pin)
            if written is not None:
                if written.exception() is not None:
                    self._thread.call(undo)
                written.result()
            return self._thread.call(lambda: session_info(sitting))


class PendingRemovals:
    """Safe from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: Counter[tuple[str, str]] = Counter()
        self._ended = 0

    @property
    def ended(self) -> int:
        """How many have come to an end; if there are more than before something was read, a session
        that was removed may have been read."""
        with self._lock:
            return self._ended

    def has(self, tenant: str, name: str) -> bool:
        """Whether a session is being removed."""
        with self._lock:
            return self._under_way[tenant, name] > 0

    def begin(self, tenant: str, names: Iterable[str]) -> None:
        """Sessions are out of memory, and about to leave where they are kept."""
        with self._lock:
            self._under_way.update((tenant, name) for name in names)

    def end(self, tenant: str, names: Iterable[str]) -> None:
        """They have left, or could not."""
        with self._lock:
            self._under_way.subtract((tenant, name) for name in names)
            self._under_way = +self._under_way
            self._ended += 1
