"""Engine client over several replicas, routed by session."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, ParamSpec, TypeVar

from larder.server import operations
from larder.server.api_errors import server_stopping
from larder.server.cluster.relay import Relay, ReplicaLost, ReplicaSet, no_replica, routing_key
from larder.server.engine_client import EngineClient
from larder.server.operation import Operation, Placement
from larder.server.request import ApiError, Listener, Request, Ticket

PATIENCE_SECONDS = 30.0
ANY_REPLICA = routing_key("", "what every replica knows")
P = ParamSpec("P")
R = TypeVar("R")
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
        self._constants: dict[str, Any] = {}

    def submit(self, request: Request, listener: Listener) -> Ticket:
        with self._lock:
            if self._is_closed:
                raise server_stopping()
            relay = Relay(self._replicas, request, listener, self._loop, self._patience_seconds)
        relay.wait()
        return relay

    def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        arguments = operation.arguments(*args, **kwargs)
        if operation.placement is Placement.ALL:
            return self._call_all(operation, arguments)
        if operation.name in self._constants:
            return self._constants[operation.name]
        is_any = operation.placement is Placement.ANY
        key = ANY_REPLICA if is_any else routing_key(*arguments[:2])
        value = self._run(self._call_async(key, operation.name, *arguments))
        if isinstance(value, ApiError):
            raise value
        if operation.is_constant:
            self._constants[operation.name] = value
        return value

    def is_healthy(self) -> bool:
        return not self._is_closed and self.call(operations.is_healthy)

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

    async def _call_async(self, key: str, method: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(self._patience_seconds):
                while True:
                    try:
                        return await self._replicas.ask(key, method, *arguments)
                    except ReplicaLost:
                        await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise no_replica("none accepts the request") from error

    def _call_all(self, operation: Operation[..., R], arguments: tuple[Any, ...]) -> R:
        """Merged results of the replicas that have one."""
        assert operation.merge is not None
        results = self._run(self._replicas.ask_all(operation.name, *arguments))
        return operation.merge(results)

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
