"""Memory budget of request bodies, which are decoded outside the event loop."""

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

INLINE_BYTES = 32 << 10  # decoding a smaller body takes less time than starting a thread
JSON_GROWTH = 16  # most bytes that a byte of JSON decodes to
IMPORT_GROWTH = 8  # most bytes of a byte of an imported session: mostly text and ids
SOON_SECONDS = 1.0
Model = TypeVar("Model", bound=JsonBody)
Result = TypeVar("Result")


class BodyBudget:
    """Reservations of memory for request bodies and their decoded values. For the event loop.

    One long body is decoded at a time, and one session imported: a decoder holds the interpreter
    lock throughout, and several at once would block every other request.

    Args:
        budget_bytes: budget of all bodies; one tenant may use half of it.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._ledger = ByteLedger(
            ByteBudgets({Tier.HOST: budget_bytes}, {Tier.HOST: budget_bytes // 2})
        )
        self._decoding, self._importing = CapacityLimiter(1), CapacityLimiter(1)

    @property
    def used_bytes(self) -> int:
        """Reserved bytes."""
        return self._ledger.used(Tier.HOST)

    @contextmanager
    def open_reservation(self, tenant: str) -> Iterator[Reservation]:
        """Reservation for one request body, of zero bytes until `extend`."""
        with self._ledger.reserve(Tier.HOST, tenant, 0) as reservation:
            yield reservation

    def extend(self, reservation: Reservation, count: int) -> None:
        """Add bytes to the reservation of a body.

        Raises:
            ApiError: 429 `too_many_requests` or 503 `overloaded`: the budget is spent.
        """
        reservation.bytes += self._reserve(reservation.tenant, count).bytes

    async def decode(self, tenant: str, model: type[Model], content: bytes) -> Model | None:
        """Model instance decoded from a JSON body.

        Raises:
            ApiError: as `decode_body` and `extend`.
        """
        if len(content) <= INLINE_BYTES:
            return decode_body(model, content)
        decode, count = partial(decode_body, model, content), JSON_GROWTH * len(content)
        return await self._run(self._decoding, tenant, count, decode)

    async def run_import(self, tenant: str, act: Callable[[], Result]) -> Result:
        """Run the import of a session with its largest possible size reserved.

        Raises:
            ApiError: as `extend`.
        """
        return await self._run(self._importing, tenant, IMPORT_GROWTH * IMPORT_BYTES, act)

    async def _run(
        self, limiter: CapacityLimiter, tenant: str, count: int, act: Callable[[], Result]
    ) -> Result:
        """Call `act` in a thread with bytes reserved."""
        outcome = await to_thread.run_sync(self._run_reserved, tenant, count, act, limiter=limiter)
        try:
            if isinstance(outcome, LarderError):
                raise outcome
            return outcome
        finally:
            del outcome  # breaks the reference cycle of this frame and the error

    def _run_reserved(
        self, tenant: str, count: int, act: Callable[[], Result]
    ) -> Result | LarderError:
        """Result of `act`, or its LarderError without frames: raised across threads, the error
        would form a cycle that keeps the body until garbage is collected."""
        try:
            with self._reserve(tenant, count):
                return act()
        except LarderError as error:
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)

    def _reserve(self, tenant: str, count: int) -> Reservation:
        try:
            return self._ledger.reserve(Tier.HOST, tenant, count)
        except BudgetError as error:
            limit = self._ledger.tenant_limit(Tier.HOST, tenant)
            if self._ledger.used(Tier.HOST, tenant) + count > limit:
                raise ApiError(
                    f"The bodies of your requests exceed {limit} bytes: wait for some to end, "
                    "or send less at once.",
                    429,
                    "too_many_requests",
                    retry_after=SOON_SECONDS,
                ) from error
            raise ApiError(
                "The memory budget of request bodies is spent: try again later.",
                503,
                "overloaded",
                retry_after=SOON_SECONDS,
            ) from error
