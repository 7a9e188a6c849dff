"""One answer, whichever replicas it takes.

A replica that is lost halfway is replaced by another one, which gives the same answer again: it is
drawn from the same seed, or was kept. What the client has heard of it is left out.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from contextlib import aclosing

from larder.server.cluster.replica import ErrorFrame, ReplicaLost, ReplicaSet, StartFrame, TextFrame
from larder.server.cluster.routing import route
from larder.server.request import ApiError, Listener, Report, Request, Ticket

LOG = logging.getLogger(__name__)
# What another try mends, here as well as at the client.
TRANSIENT_CODES = frozenset({"session_held", "session_superseded", "stopping"})
BUSY = "session_busy"
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.05, 1.0
CANCELLED = "cancelled"
ANSWER_LOST = "The answer was lost on its way: ask again.", 503, "answer_lost", None, 1.0
CANCELLED_REPORT = Report("", 0, 0, 0, 0, 0, 0, 0, True, "none", CANCELLED, 0.0, 0.0, 0.0)


class Relay(Ticket):
    """A request on its way to replicas.

    Args:
        loop: that everything but `cancel` happens in.
        patience_seconds: how long to try after a replica was lost or has refused for now.
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
        self._begun: Future[None] = Future()
        self._heard, self._is_repeated = "", False
        self._task = asyncio.run_coroutine_threadsafe(self._run(), loop)
        self._task.add_done_callback(lambda task: self._fail(no_replica("the server stops")))

    def wait(self) -> None:
        """Until a replica has taken the request.

        Raises:
            Refusal: none has.
        """
        self._begun.result()

    def cancel(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        try:
            report = await self._answered()
        except asyncio.CancelledError:
            self._fail(no_replica("nobody waits for the answer"))
            self._listener.on_done(CANCELLED_REPORT)
        except ApiError as refusal:
            if not self._fail(refusal):
                self._listener.on_error(refusal)
        else:
            self._listener.on_done(report)

    async def _answered(self) -> Report:
        """What the replica reports that has told everything.

        Raises:
            Refusal: there is no answer.
        """
        deadline, wait = self._loop.time() + self._patience_seconds, FIRST_WAIT_SECONDS
        while True:
            try:
                return await self._tried()
            except ReplicaLost as error:
                refusal = no_replica(str(error))
            except ApiError as error:
                refusal = error
            now = self._loop.time()
            if not self._is_passing(refusal) or now >= deadline:
                raise refusal
            self._is_repeated = True
            LOG.info("Asking again in %.2f s: %s", wait, refusal)
            await asyncio.sleep(min(wait, deadline - now))
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    async def _tried(self) -> Report:
        """What a replica reports when all is said.

        Raises:
            Lost: it has gone, or stops, before that.
            Refusal: it has refused.
        """
        said = ""
        try:
            async with (
                asyncio.timeout(self._patience_seconds) as limit,
                aclosing(self._replicas.answer(self._key, self._request)) as frames,
            ):
                async for frame in frames:
                    limit.reschedule(None)
                    if isinstance(frame, ErrorFrame):
                        raise frame.refusal
                    if isinstance(frame, TextFrame):
                        said += frame.text
                        self._hear(said)
                    elif isinstance(frame, StartFrame):
                        self._begin()
                    elif frame.reason == CANCELLED:
                        raise ReplicaLost("it stops")
                    else:
                        return frame
        except TimeoutError as error:
            raise ReplicaLost("none takes the request") from error
        raise ReplicaLost("it has fallen silent")

    def _is_passing(self, refusal: ApiError) -> bool:
        """Whether it is over soon; a busy session may be busy with what was tried before."""
        return refusal.code in TRANSIENT_CODES or (refusal.code == BUSY and self._is_repeated)

    def _begin(self) -> None:
        if not self._begun.done():
            self._begun.set_result(None)

    def _hear(self, said: str) -> None:
        """Hand on what is new of an answer."""
        known = min(len(said), len(self._heard))
        if said[:known] != self._heard[:known]:
            raise ApiError(*ANSWER_LOST)
        if len(said) > known:
            new, self._heard = said[known:], said
            self._listener.on_text(new)

    def _fail(self, refusal: ApiError) -> bool:
        """Tell who waits for a replica that there is none; False where one had the request."""
        if self._begun.done():
            return False
        self._begun.set_exception(refusal)
        return True


def no_replica(why: str) -> ApiError:
    """A replica has gone, and no other came in time."""
    return ApiError(f"No replica answers ({why}): ask again.", 503, "stopping", retry_after=1.0)
