"""Engine client over several replicas, routed by session."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import fields
from typing import Any, TypeVar

from larder.server.api_errors import server_stopping
from larder.server.cluster.relay import Relay, no_replica
from larder.server.cluster.replica import ErrorFrame, ReplicaLost, ReplicaSet, ResultFrame
from larder.server.cluster.routing import routing_key
from larder.server.engine_client import (
    CachedPositions,
    EngineClient,
    ServedModel,
    ServerStats,
    SessionInfo,
    SessionTranscript,
)
from larder.server.request import ChatMessage, Listener, Request, Ticket

PATIENCE_SECONDS = 30.0
ANY_REPLICA = routing_key("", "what every replica knows")
T = TypeVar("T")


class ClusterEngineClient(EngineClient):
    """Engine client over replicas. Thread-safe; it owns one thread, in which all answers arrive.

    Sessions are listed from the replicas that have them in memory; of several states of one
    session, the one with the highest epoch, then the most recently used, counts.

    Args:
        patience_seconds: time to find another replica after one was lost.
    """

    def __init__(self, replicas: ReplicaSet, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._replicas, self._patience_seconds = replicas, patience_seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="larder relays", daemon=True
        )
        self._thread.start()
        self._lock, self._is_closed = threading.Lock(), False
        self._models: tuple[ServedModel, ...] = ()

    def submit(self, request: Request, listener: Listener) -> Ticket:
        with self._lock:
            if self._is_closed:
                raise server_stopping()
            relay = Relay(self._replicas, request, listener, self._loop, self._patience_seconds)
        relay.wait()
        return relay

    def models(self) -> tuple[ServedModel, ...]:
        if not self._models:
            self._models = self._call(ANY_REPLICA, "models")
        return self._models

    def tokenize(self, text: str) -> tuple[int, ...]:
        return self._call(ANY_REPLICA, "tokenize", text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._call(ANY_REPLICA, "detokenize", ids)

    def sessions(self, tenant: str) -> tuple[SessionInfo, ...]:
        sessions: dict[str, SessionInfo] = {}
        for view in (view for views in self._call_all("sessions", tenant) for view in views):
            known = sessions.setdefault(view.name, view)
            sessions[view.name] = max(known, view, key=lambda each: (each.epoch, each.last_used))
        return tuple(sorted(sessions.values(), key=lambda each: -each.last_used))

    def session(self, tenant: str, name: str) -> SessionTranscript:
        return self._call_session("session", tenant, name)

    def open(self, tenant: str, name: str, turns: Sequence[ChatMessage] = ()) -> SessionInfo:
        return self._call_session("open", tenant, name, tuple(turns))

    def pin(self, tenant: str, name: str) -> SessionInfo:
        return self._call_session("pin", tenant, name)

    def unpin(self, tenant: str, name: str) -> SessionInfo:
        return self._call_session("unpin", tenant, name)

    def release(self, tenant: str, name: str) -> SessionInfo:
        return self._call_session("release", tenant, name)

    def prefetch(self, tenant: str, name: str) -> SessionInfo:
        return self._call_session("prefetch", tenant, name)

    def fork(self, tenant: str, name: str, new_name: str | None = None) -> SessionInfo:
        return self._call_session("fork", tenant, name, new_name)

    def compact(self, tenant: str, name: str) -> SessionInfo:
        return self._call_session("compact", tenant, name)

    def export(self, tenant: str, name: str) -> bytes:
        return self._call_session("export", tenant, name)

    def import_(self, tenant: str, name: str, data: bytes) -> SessionInfo:
        return self._call_session("import_", tenant, name, data)

    def remove(self, tenant: str, name: str, branches: bool = False) -> tuple[str, ...]:
        return self._call_session("remove", tenant, name, branches)

    def kept(self, tenant: str, name: str) -> CachedPositions:
        return self._call_session("kept", tenant, name)

    def stats(self) -> ServerStats:
        return sum_stats(self._call_all("stats"))

    def is_healthy(self) -> bool:
        return not self._is_closed and any(self._call_all("is_healthy"))

    def problems(self) -> tuple[str, ...]:
        return tuple(sorted({each for result in self._call_all("problems") for each in result}))

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._cancel_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._replicas.close()

    def _call_session(self, method: str, tenant: str, name: str, *arguments: Any) -> Any:
        """Result of a method of the replica that a session is routed to."""
        return self._call(routing_key(tenant, name), method, tenant, name, *arguments)

    def _call(self, key: str, method: str, *arguments: Any) -> Any:
        return _value(self._run(self._call_async(key, method, *arguments)))

    async def _call_async(self, key: str, method: str, *arguments: Any) -> ResultFrame | ErrorFrame:
        try:
            async with asyncio.timeout(self._patience_seconds):
                while True:
                    try:
                        return await self._replicas.ask(key, method, *arguments)
                    except ReplicaLost:
                        await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise no_replica("none accepts the request") from error

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        result = self._run(self._replicas.ask_all(method, *arguments))
        return [each.value for each in result if isinstance(each, ResultFrame)]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._is_closed:
                work.close()
                raise server_stopping()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise server_stopping() from error

    async def _cancel_tasks(self) -> None:
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


def sum_stats(stats: Sequence[ServerStats]) -> ServerStats:
    """Statistics of several engine clients, summed."""
    if not stats:
        return ServerStats()
    return ServerStats(
        **{f.name: _sum([getattr(each, f.name) for each in stats]) for f in fields(ServerStats)}
    )


def _sum(values: Sequence[Any]) -> Any:
    if any(isinstance(value, Mapping) for value in values):
        total: Counter[str] = Counter()
        for value in values:
            total.update(value)
        return dict(total)
    return sum(values)


def _value(result: ResultFrame | ErrorFrame) -> Any:
    if isinstance(result, ErrorFrame):
        raise result.refusal
    return result.value
