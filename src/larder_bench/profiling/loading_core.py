"""Engine core without threads, for tests and for benchmarks under a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from larder.server import (
    CandidateLoader,
    ChatMessage,
    EngineCore,
    Listener,
    Request,
    SessionState,
    Ticket,
    TranscriptSnapshot,
)


class LoadingCore(EngineCore):
    """Engine core that loads stored sessions as they are named, on the thread that calls it."""

    def submit(self, request: Request, listener: Listener, arrived: float) -> Ticket:
        submit = partial(super().submit, request, listener, arrived)
        loader = CandidateLoader(
            self.sessions,
            self._persistence,
            self.residency_locks,
            lambda act: act(),
            self.restorer.restore,
            self.restorer,
        )
        return loader.resolve_resident(request, self.serving_of(request), submit)

    def announce(self, tenant: str, steps: Mapping[str, int]) -> tuple[str, ...]:
        for name in super().announce(tenant, steps):
            self.restorer.restore(tenant, name)
            self.sessions.set_workflow_steps(tenant, {name: steps[name]})
        return ()

    def open(self, tenant: str, name: str, turns: Sequence[ChatMessage]) -> SessionState:
        self.restorer.restore(tenant, name)
        return super().open(tenant, name, turns)

    def fork(self, tenant: str, name: str, new_name: str | None) -> SessionState:
        if new_name is not None:
            self.restorer.restore(tenant, new_name)
        return super().fork(tenant, name, new_name)

    def import_(self, tenant: str, name: str, transcript: TranscriptSnapshot) -> SessionState:
        self.restorer.restore(tenant, name)
        return super().import_(tenant, name, transcript)

    def find(self, tenant: str, name: str) -> SessionState:
        self.restorer.restore(tenant, name)
        return super().find(tenant, name)
