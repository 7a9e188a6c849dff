"""Engine core, its thread and its stored sessions: what operations of a local engine client use."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

from larder.server.answer_form import PLAIN_FORM, AnswerForm
from larder.server.engine_core import EngineCore
from larder.server.model_thread import ModelThread
from larder.server.persistence.base import SessionPersistence
from larder.server.persistence.restore import CandidateLoader
from larder.server.response_cache import ResponseCache
from larder.server.session_info import TranscriptTexts

T = TypeVar("T")


class EngineContext:
    """Access of operations to one engine core. Safe from any thread.

    Args:
        core: owned by the model's thread, which this starts.
        persistence: stores finished turns.
        responses: answers by meaning.
        answer_form: parsers of answers.
        step_lock: held during a step, by several models that take turns.
    """

    def __init__(
        self,
        core: EngineCore,
        persistence: SessionPersistence,
        responses: ResponseCache,
        answer_form: AnswerForm = PLAIN_FORM,
        step_lock: AbstractContextManager[object] = nullcontext(),  # noqa: B008, without state
    ) -> None:
        def step() -> bool:
            with step_lock:
                return core.step()

        self.answer_form, self.responses = answer_form, responses
        self.core, self.persistence, self.made = core, persistence, core.clock()
        self.removals = PendingRemovals()
        self.token_texts = TranscriptTexts(core.engine.tokenizer.decode)
        self.thread = ModelThread(step, core.close)
        self.candidates = CandidateLoader(
            core.sessions,
            persistence,
            core.residency_locks,
            self.thread.call,
            self._load,
            core.restorer,
        )

    def call(self, function: Callable[[], T]) -> T:
        """Result of a function that runs on the model's thread, between two steps."""
        return self.thread.call(function)

    def resident(self, tenant: str, *names: str | None) -> AbstractContextManager[None]:
        """Context in which sessions are in memory, if they exist, and stay there.

        Raises:
            ApiError: a stored session cannot be loaded.
        """
        return self.candidates.resident(tenant, *names)

    @contextmanager
    def prefetched(self, tenant: str, name: str) -> Iterator[None]:
        """Context of `resident`, for whose session none of another tenant leaves memory.

        Raises:
            ApiError: the session cannot be loaded, or there is no room.
        """
        with self.core.residency_locks.hold(tenant, name):
            self._load(tenant, name, partial(self.core.tiers.evicting_only, tenant))
            yield

    def _load(
        self,
        tenant: str,
        name: str,
        evicting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Load a stored session into memory; a slow store does not block the model's thread.

        Args:
            evicting: context in which memory is made free.
        """
        while not self._is_loaded(tenant, name, evicting):
            continue

    def _is_loaded(
        self, tenant: str, name: str, evicting: Callable[[], AbstractContextManager[None]]
    ) -> bool:
        """Attempt of `_load`; False if the session may have been removed while it was read."""
        core, removals = self.core, self.removals
        ended, found = removals.ended, self.persistence.load(tenant, name)
        if found is None:
            return True
        transcript = core.restorer.decode(found.data, "session")

        def is_settled() -> bool:
            if removals.has(tenant, name):
                return True
            if removals.ended != ended:
                return False
            with evicting():
                core.restorer.install(tenant, name, found, transcript)
            return True

        return self.call(is_settled)


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
