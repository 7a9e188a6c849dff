"""Engine client over several replicas, routed by session.

Replicas are processes whose answers are sent as frames; the relay of one answer survives the loss
of a replica.

A replica that is lost halfway is replaced by another one, which gives the same answer again (same
seed, or the stored answer). Text that the client has received already is skipped.

Requests of one session, and of its forks, go to the same replica: their routing key is derived from
the session's name without the number of a fork. A request without a session is routed by the stable
prefix of its conversation, and the name of its new session has that key.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from larder.core.session_name import root_name
from larder.server import operations
from larder.server.api_errors import server_stopping
from larder.server.engine_client import EngineClient
from larder.server.http.error_responses import logged_api_error
from larder.server.http.streaming import AnswerQueue
from larder.server.operation import Operation, Placement
from larder.server.operations import OPERATIONS
from larder.server.request import ApiError, Listener, Report, Request, Ticket, TokenLogprob
from larder.store.digests import key_of

PATIENCE_SECONDS = 30.0
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
LOG = logging.getLogger(__name__)
# Errors that a retry may resolve, here or at the client.
TRANSIENT_CODES = frozenset({"session_held", "session_superseded", "stopping"})
BUSY = "session_busy"
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.05, 1.0
KEY_DIGITS = 16
EVERY_REPLICA = "what every replica knows"
GENERATED_NAME = re.compile(rf"s-([0-9a-f]{{{KEY_DIGITS}}})-[0-9a-f]+$")
CANCELLED = "cancelled"
CANCELLED_REPORT = Report("", 0, 0, 0, 0, 0, 0, 0, True, "none", CANCELLED, 0.0, 0.0, 0.0)
THREADS = 32  # that may wait for the model's thread at the same time


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
        key = routing_key("", EVERY_REPLICA) if is_any else routing_key(*arguments[:2])
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


class Replica:
    """Engine client in a process of its own.

    Args:
        open_client: context manager of the client; its exit cancels running answers.
    """

    def __init__(self, open_client: Callable[[], AbstractContextManager[EngineClient]]) -> None:
        self._resources = ExitStack()
        self._client = self._resources.enter_context(open_client())
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="larder replica")

    async def answer(self, request: Request) -> AsyncGenerator[list[Frame], None]:
        """Frames of an answer, in batches; closing the generator cancels the request."""
        loop, queue = asyncio.get_running_loop(), AnswerQueue()
        try:
            ticket = await loop.run_in_executor(self._pool, self._client.submit, request, queue)
        except Exception as error:
            yield [logged_api_error(error)]
            return
        try:
            yield [StartFrame()]
            is_over = False
            while not is_over:
                items = await queue.take_all()
                is_over = isinstance(items[-1], Report | Exception)
                yield [logged_api_error(e) if isinstance(e, Exception) else e for e in items]
        finally:
            ticket.cancel()

    async def ask(self, operation: str, *arguments: Any) -> Any:
        """Result of an operation of the engine client, or its `ApiError`."""
        if operation not in OPERATIONS:
            raise ValueError(f"An engine client has no operation {operation!r}.")
        loop, call = asyncio.get_running_loop(), partial(self._client.call, OPERATIONS[operation])
        try:
            return await loop.run_in_executor(self._pool, call, *arguments)
        except Exception as error:
            return logged_api_error(error)

    def check_health(self) -> None:
        """Raise RuntimeError if the model's thread has ended."""
        if not self._client.is_healthy():
            raise RuntimeError("The model's thread has ended.")

    def close(self) -> None:
        """Close the engine client; completed turns are stored already."""
        self._resources.close()
        self._pool.shutdown(wait=False)

    def __del__(self) -> None:
        self.close()


class StartFrame:
    """Frame: the request was accepted."""


# The frames after `StartFrame` are texts and log-probabilities; the last one is the report, or the
# error.
Frame = StartFrame | str | tuple[TokenLogprob, ...] | Report | ApiError


class ReplicaLost(Exception):
    """Replica lost before the end of an answer."""


class ReplicaSet(ABC):
    """Replicas in other processes, each of which can serve any session. Thread-safe.

    A key is routed to the same replica for as long as that lives.
    """

    @abstractmethod
    def answer(self, key: str, request: Request) -> AsyncGenerator[Frame, None]:
        """Frames of a replica's answer; closing the generator early cancels the request.

        Raises:
            ReplicaLost: the replica is gone.
        """

    @abstractmethod
    async def ask(self, key: str, operation: str, *arguments: Any) -> Any:
        """Result of an operation of a replica's engine client, or its `ApiError`.

        Raises:
            ReplicaLost: the replica is gone.
        """

    @abstractmethod
    async def ask_all(self, operation: str, *arguments: Any) -> list[Any]:
        """Results of an operation of every live replica that has one."""

    @abstractmethod
    def close(self) -> None:
        """Let all replicas finish their answers, and stop them."""


class Relay(Ticket):
    """Ticket of a request that is forwarded to replicas.

    Args:
        loop: event loop of all work but `cancel`.
        patience_seconds: time for retries after a lost replica or a transient error.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        request: Request,
        listener: Listener,
        loop: asyncio.AbstractEventLoop,
        patience_seconds: float,
    ) -> None:
        self._replicas, self._listener, self._loop = replicas, listener, loop
        self._key, self._request = route(request)
        self._patience_seconds = patience_seconds
        self._started: Future[None] = Future()
        self._sent_text, self._sent_logprobs, self._is_repeated = "", 0, False
        self._task = asyncio.run_coroutine_threadsafe(self._run(), loop)
        self._task.add_done_callback(lambda task: self._fail(no_replica("the server stops")))

    def wait(self) -> None:
        """Block until a replica has accepted the request.

        Raises:
            ApiError: no replica has.
        """
        self._started.result()

    def cancel(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        try:
            report = await self._answer()
        except asyncio.CancelledError:
            self._fail(no_replica("nobody waits for the answer"))
            self._listener.on_done(CANCELLED_REPORT)
        except ApiError as refusal:
            if not self._fail(refusal):
                self._listener.on_error(refusal)
        else:
            self._listener.on_done(report)

    async def _answer(self) -> Report:
        """Report of the complete answer, after retries.

        Raises:
            ApiError: there is no answer.
        """
        deadline, wait = self._loop.time() + self._patience_seconds, FIRST_WAIT_SECONDS
        while True:
            try:
                return await self._try_once()
            except ReplicaLost as error:
                refusal = no_replica(str(error))
            except ApiError as error:
                refusal = error
            now = self._loop.time()
            if not self._is_transient(refusal) or now >= deadline:
                raise refusal
            self._is_repeated = True
            LOG.info("Retrying in %.2f s: %s", wait, refusal)
            await asyncio.sleep(min(wait, deadline - now))
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    async def _try_once(self) -> Report:
        """Report of one attempt.

        Raises:
            ReplicaLost: the replica is gone or stops before the end.
            ApiError: the replica has refused.
        """
        text, num_logprobs = "", 0
        try:
            async with (
                asyncio.timeout(self._patience_seconds) as limit,
                aclosing(self._replicas.answer(self._key, self._request)) as frames,
            ):
                async for frame in frames:
                    limit.reschedule(None)
                    if isinstance(frame, ApiError):
                        raise frame
                    if isinstance(frame, str):
                        text += frame
                        self._send_new_text(text)
                    elif isinstance(frame, tuple):
                        num_logprobs += len(frame)
                        self._send_new_logprobs(frame, num_logprobs)
                    elif isinstance(frame, StartFrame):
                        self._mark_started()
                    elif frame.reason == CANCELLED:
                        raise ReplicaLost("it stops")
                    else:
                        return frame
        except TimeoutError as error:
            raise ReplicaLost("none accepts the request") from error
        raise ReplicaLost("it stopped sending")

    def _is_transient(self, refusal: ApiError) -> bool:
        """True for transient errors; a busy session may be busy with an earlier attempt."""
        return refusal.code in TRANSIENT_CODES or (refusal.code == BUSY and self._is_repeated)

    def _mark_started(self) -> None:
        if not self._started.done():
            self._started.set_result(None)

    def _send_new_text(self, text: str) -> None:
        """Forward the part of an answer that the client does not have."""
        known = min(len(text), len(self._sent_text))
        if text[:known] != self._sent_text[:known]:
            message = "The answer was lost during a retry: send the request again."
            raise ApiError(message, 503, "answer_lost", retry_after=1.0)
        if len(text) > known:
            new, self._sent_text = text[known:], text
            self._listener.on_text(new)

    def _send_new_logprobs(self, logprobs: tuple[TokenLogprob, ...], count: int) -> None:
        """Forward log-probabilities that the client does not have; `count` with those before."""
        if count > self._sent_logprobs:
            self._listener.on_logprobs(logprobs[-(count - self._sent_logprobs) :])
            self._sent_logprobs = count

    def _fail(self, refusal: ApiError) -> bool:
        """Make `wait` fail; False if a replica had accepted the request."""
        if self._started.done():
            return False
        self._started.set_exception(refusal)
        return True


def no_replica(reason: str) -> ApiError:
    """503 error: no replica responded in time."""
    return ApiError(f"No replica answers ({reason}): retry.", 503, "stopping", retry_after=1.0)


def routing_key(tenant: str, name: str) -> str:
    """Routing key of a session and of all its forks."""
    root = root_name(name)
    tag = GENERATED_NAME.match(root)
    return tag[1] if tag else key_of("session", tenant, root)


def route(request: Request) -> tuple[str, Request]:
    """Routing key of a request, and the request with its routing tag."""
    name = request.follows or request.session
    if name is not None:
        return routing_key(request.tenant, name), request
    tag = key_of("text", request.tenant, *_stable_prefix(request))[:KEY_DIGITS]
    return tag, replace(request, routing_tag=tag)


def _stable_prefix(request: Request) -> list[str]:
    """Roles and texts up to the first user message, which stay the same as a conversation grows."""
    if request.raw_prompt is not None:
        return [request.raw_prompt]
    prefix: list[str] = []
    for turn in request.turns:
        prefix += (turn.role, turn.text)
        if turn.role == "user":
            break
    return prefix
