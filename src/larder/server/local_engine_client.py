"""Engine client over an engine core in this process."""

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
        budgets: capacity of device and host memory for caches, in bytes.
        eviction: name of the eviction policy of a full tier.
        rows: maximum number of sequences in one decode step.
        waiting: maximum number of queued requests.
        persistence: stores finished turns.
        disk: stores caches that are not in use.
        clock: seconds since 1970.

    Raises:
        UsageError: the policy cannot be served.
    """

    def __init__(
        self,
        engine: Engine,
        budgets: ByteBudgets = ByteBudgets(),  # noqa: B008, frozen
        *,
        eviction: str = "lru",
        rows: int = 64,
        waiting: int = 1024,
        persistence: SessionPersistence | None = None,
        disk: DiskTier | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._persistence = persistence or SessionPersistence()
        core = self._core = EngineCore(
            engine,
            budgets,
            eviction,
            rows,
            waiting,
            self._persistence,
            disk or DiskTier(),
            clock,
            self._wake,
            lookup=lambda tenant, name: None,
        )
        self._made = clock()
        self._removals = PendingRemovals()
        self._token_texts = TokenTexts(engine.tokenizer.decode)
        self._thread = ModelThread(self._core.step, self._core.close)
        self._candidates = CandidateLoader(
            core.sessions,
            self._persistence,
            core.residency_locks,
            self._thread.call,
            self._load,
            core.restorer,
        )

    def submit(self, request: Request, listener: Listener) -> Ticket:
        core, arrived = self._core, self._core.clock()
        try:
            take = partial(self._submit_now, request, listener, arrived)
            return self._candidates.resolve_resident(request, core.rule_of(request), take)
        except ApiError as error:
            core.refused.note(error.code)
            raise

    def models(self) -> tuple[ServedModel, ...]:
        core = self._core
        model = ServedModel(
            name=core.engine.loaded.name,
            policy=str(core.rule),
            context_tokens=core.context,
            made=self._made,
            budget_tokens=core.rule.budget_tokens,
            beyond_budget=core.engine.beyond_budget,
        )
        return (model,)

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
        resident = self._thread.call(
            lambda: tuple(map(session_info, self._core.sessions.of(tenant)))
        )
        names = {view.name for view in resident}
        kept = [view for view in self._persistence.list_sessions(tenant) if view.name not in names]
        return tuple(sorted((*resident, *kept), key=lambda view: -view.last_used))

    def session(self, tenant: str, name: str) -> SessionTranscript:
        with self._candidates.resident(tenant, name):
            return self._thread.call(lambda: session_transcript(self._core.find(tenant, name)))

    def open(self, tenant: str, name: str, turns: Sequence[ChatMessage] = ()) -> SessionInfo:
        with self._candidates.resident(tenant, name):
            return self._thread.call(lambda: session_info(self._core.open(tenant, name, turns)))

    def pin(self, tenant: str, name: str) -> SessionInfo:
        return self._set_pinned(tenant, name, True)

    def unpin(self, tenant: str, name: str) -> SessionInfo:
        return self._set_pinned(tenant, name, False)

    def release(self, tenant: str, name: str) -> SessionInfo:
        with self._candidates.resident(tenant, name):
            return self._wait_until_moved(lambda: self._core.release(tenant, name))

    def prefetch(self, tenant: str, name: str) -> SessionInfo:
        with self._candidates.resident(tenant, name):
            return self._wait_until_moved(lambda: self._core.prefetch(tenant, name))

    def fork(self, tenant: str, name: str, new_name: str | None = None) -> SessionInfo:
        core, candidates = self._core, self._candidates
        family = candidates.family(tenant, name) if new_name is None else ()

        def forked() -> SessionInfo:
            if family:
                core.sessions.reserve_names(tenant, root_name(name), family)
            return session_info(core.fork(tenant, name, new_name))

        with candidates.resident(tenant, name, new_name):
            return self._thread.call(forked)

    def compact(self, tenant: str, name: str) -> SessionInfo:
        with self._candidates.resident(tenant, name):
            view = self._wait_until_moved(lambda: self._core.compact(tenant, name))
            self._persistence.compact_history(tenant, name)
            return view

    def export(self, tenant: str, name: str) -> bytes:
        with self._candidates.resident(tenant, name):
            transcript = self._thread.call(
                lambda: session_file.take_snapshot(self._core.find(tenant, name))
            )
            return session_file.encode(
                transcript, self._core.engine.loaded.decoder.spec.fingerprint
            )

    def import_(self, tenant: str, name: str, data: bytes) -> SessionInfo:
        limit = session_file.SessionFileLimit(session_file.IMPORT_BYTES, self._core.context)
        transcript = self._core.restorer.decode(data, limit=limit)
        with self._candidates.resident(tenant, name):
            return self._thread.call(
                lambda: session_info(self._core.import_(tenant, name, transcript))
            )

    def remove(self, tenant: str, name: str, branches: bool = False) -> tuple[str, ...]:
        core, to_load = self._core, [name]
        if branches and root_name(name) == name:
            to_load += self._persistence.branches(tenant, name)
        elif root_name(name) == name:
            to_load += self._candidates.family(tenant, name)

        def removed() -> tuple[list[str], list[str], list[str], list[Future[None]]]:
            unloaded = [each for each in unreadable if not core.sessions.has(tenant, each)]
            made = core.sessions.branches(tenant, name) + [
                each for each in unloaded if each != name
            ]
            wanted = [name, *(made if branches else ())]
            if len(wanted) > 1 and not (name in unloaded or core.sessions.has(tenant, name)):
                wanted.remove(name)  # the root is removed already, only branches are left
            deletions = core.remove(tenant, *(each for each in wanted if each not in unloaded))
            self._removals.begin(tenant, wanted)
            return wanted, [] if branches else made, unloaded, deletions

        with core.residency_locks.hold(tenant, name):
            unreadable = self._candidates.restore_candidates(
                tenant, to_load
            )  # sessions that cannot be read can be removed
            wanted, remaining, unloaded, deletions = self._thread.call(removed)
        discarded = (self._persistence.discard(tenant, each) for each in wanted if each in unloaded)
        deletions += [future for future in discarded if future is not None]
        wait(deletions)
        self._removals.end(tenant, wanted)
        for future in deletions:
            future.result()
        return tuple(remaining)

    def kept(self, tenant: str, name: str) -> CachedPositions:
        def kept() -> CachedPositions:
            session = self._core.find(tenant, name)
            positions = cached_positions(session)
            return (
                replace(positions, texts=self._token_texts.texts(session.ids))
                if positions.tokens
                else positions
            )

        with self._candidates.resident(tenant, name):
            return self._thread.call(kept)

    def stats(self) -> ServerStats:
        core = self._core
        return self._thread.call(
            lambda: collect_stats(
                scheduler=core.scheduler,
                ledger=core.ledger,
                reservations=core.reservations,
                tiers=core.tiers,
                sessions=core.sessions,
                refused=core.refused.counts(),
                passed_over=core.restorer.passed_over.counts(),
                begun_again=core.restorer.restarted.counts(),
                unwritten=core.unwritten,
            )
        )

    def is_healthy(self) -> bool:
        return self._thread.is_alive

    def problems(self) -> tuple[str, ...]:
        return ("turns_not_durable",) if self._core.unwritten.is_degraded else ()

    def close(self) -> None:
        self._thread.close()

    def limit(self, tier: Tier, count: int) -> int:
        """Set a tier's budget while serving; the bytes above it, freed once their answers are
        complete."""
        return self._thread.call(lambda: self._core.tiers.lower(tier, count))

    def _submit_now(self, request: Request, listener: Listener, arrived: float) -> Ticket:
        ticket = self._core.submit(request, listener, arrived)
        self._core.sessions.set_workflow_steps(request.tenant, request.steps)
        return ticket

    def _wake(self) -> None:
        self._thread.wake()

    def _load(self, tenant: str, name: str) -> None:
        """Load a stored session into memory; a slow store does not block the model's thread."""
        while not self._is_loaded(tenant, name):
            continue

    def _is_loaded(self, tenant: str, name: str) -> bool:
        """One attempt of `_recall`; False if the session may have been removed
        while it was read."""
        core, removals = self._core, self._removals
        ended, found = removals.ended, self._persistence.load(tenant, name)
        if found is None:
            return True
        transcript = core.restorer.decode(found.data, "session")

        def is_settled() -> bool:
            if removals.has(tenant, name):
                return True
            if removals.ended != ended:
                return False
            core.restorer.install(tenant, name, found, transcript)
            return True

        return self._thread.call(is_settled)

    def _wait_until_moved(self, move: Callable[[], Future[SessionState]]) -> SessionInfo:
        """Wait until a session has moved, while other requests are answered."""
        session = self._thread.call(move).result()
        return self._thread.call(lambda: session_info(session))

    def _set_pinned(self, tenant: str, name: str, is_pinned: bool) -> SessionInfo:
        def pin() -> tuple[SessionState, bool, Future[None] | None]:
            session = self._core.find(tenant, name)
            before, session.is_pinned = session.is_pinned, is_pinned
            written = self._persistence.pin(session)
            self._core.completions.track_write(session, written, lambda _: None)
            return session, before, written

        def undo() -> None:
            session.is_pinned = before

        with self._candidates.resident(tenant, name):
            session, before, written = self._thread.call(pin)
            if written is not None:
                if written.exception() is not None:
                    self._thread.call(undo)
                written.result()
            return self._thread.call(lambda: session_info(session))


class PendingRemovals:
    """Sessions whose removal is in progress, so that a concurrent read does not restore them.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: Counter[tuple[str, str]] = Counter()
        self._ended = 0

    @property
    def ended(self) -> int:
        """Number of completed removals; if it has grown during a read, the session read may have
        been removed."""
        with self._lock:
            return self._ended

    def has(self, tenant: str, name: str) -> bool:
        """True if a session is being removed."""
        with self._lock:
            return self._under_way[tenant, name] > 0

    def begin(self, tenant: str, names: Iterable[str]) -> None:
        """Note sessions that are out of memory and about to leave the store."""
        with self._lock:
            self._under_way.update((tenant, name) for name in names)

    def end(self, tenant: str, names: Iterable[str]) -> None:
        """Note that their removal has ended, successful or not."""
        with self._lock:
            self._under_way.subtract((tenant, name) for name in names)
            self._under_way = +self._under_way
            self._ended += 1
