"""Request bodies: their bytes on a budget, decoded beside the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from larder.core.errors import BudgetError, LarderError
from larder.server.http.json_body import JsonBody, decode_body
from larder.server.persistence.session_file import IMPORT_BYTES
from larder.server.request import ApiError
from larder.store.ledger import ByteBudgets, ByteLedger, Reservation, Tier

INLINE_BYTES = 32 << 10  # of a body that is decoded in less time than a thread takes to begin
JSON_GROWTH = 16  # bytes that a byte of JSON decodes to, at most
IMPORT_GROWTH = 8  # the same of a session: its fields are known, and most bytes are text or ids
SOON_SECONDS = 1.0
Model = TypeVar("Model", bound=JsonBody)
Result = TypeVar("Result")


class BodyBudget:
    """The memory of request bodies, and of what they are decoded to. For the event loop.

    One long body is decoded at a time, and one session imported: a decoder holds the interpreter's
    lock for as long as it takes, and several at once would keep every other request waiting.

    Args:
        budget_bytes: of all bodies; one tenant's may take half of it.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._ledger = ByteLedger(
            ByteBudgets({Tier.HOST: budget_bytes}, {Tier.HOST: budget_bytes // 2})
        )
        self._decoding, self._importing = CapacityLimiter(1), CapacityLimiter(1)

    @property
    def used_bytes(self) -> int:
        """Bytes that are held or about to be."""
        return self._ledger.used(Tier.HOST)

    @contextmanager
    def of(self, tenant: str) -> Iterator[Reservation]:
        """A reservation of no bytes yet, for one request's body."""
        with self._ledger.reserve(Tier.HOST, tenant, 0) as held:
            yield held

    def extend(self, held: Reservation, count: int) -> None:
        """Reserve more bytes for a body.

        Raises:
            Refusal: 429 `too_many_requests` or 503 `overloaded`: there is no room.
        """
        held.bytes += self._reserved(held.tenant, count).bytes

    async def decode(self, tenant: str, model: type[Model], content: bytes) -> Model | None:
        """The model that a JSON body describes.

        Raises:
            Refusal: as `decode_body`, and where there is no room.
        """
        if len(content) <= INLINE_BYTES:
            return decode_body(model, content)
        decode, count = partial(decode_body, model, content), JSON_GROWTH * len(content)
        return await self._run(self._decoding, tenant, count, decode)

    async def take_in(self, tenant: str, act: Callable[[], Result]) -> Result:
        """Import a session, with the most that it may come to reserved meanwhile.

        Raises:
            Refusal: there is no room.
        """
        return await self._run(self._importing, tenant, IMPORT_GROWTH * IMPORT_BYTES, act)

    async def _run(
        self, limiter: CapacityLimiter, tenant: str, count: int, act: Callable[[], Result]
    ) -> Result:
        """Do something in a thread with bytes reserved."""
        outcome = await to_thread.run_sync(self._within, tenant, count, act, limiter=limiter)
        try:
            if isinstance(outcome, LarderError):
                raise outcome
            return outcome
        finally:
            del outcome  # else this frame and the error would hold each other

    def _within(self, tenant: str, count: int, act: Callable[[], Result]) -> Result | LarderError:
        """What comes of it. An error of ours is returned without its frames: raised across
        threads it would be a cycle that holds the body until garbage is collected."""
        try:
            with self._reserved(tenant, count):
                return act()
        except LarderError as error:
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)

    def _reserved(self, tenant: str, count: int) -> Reservation:
        try:
            return self._ledger.reserve(Tier.HOST, tenant, count)
        except BudgetError as error:
            limit = self._ledger.tenant_limit(Tier.HOST, tenant)
            if self._ledger.used(Tier.HOST, tenant) + count > limit:
                raise ApiError(
                    f"The bodies of your requests take more than {limit} bytes: wait for some of "
                    "them to end, or send less at once.",
                    429,
                    "too_many_requests",
                    retry_after=SOON_SECONDS,
                ) from error
            raise ApiError(
                "The bodies of all requests take as many bytes as they may: try again later.",
                503,
                "overloaded",
                retry_after=SOON_SECONDS,
            ) from error
