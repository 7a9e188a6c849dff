"""Requests that have no memory yet, in a queue per tenant."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from larder.server.api_errors import overloaded, too_many_requests
from larder.server.request_state import RequestState


class RequestQueue:
    """Nobody's flood keeps others out: a tenant has no more places than it leaves free.

    For the model's thread.

    Args:
        most: requests that wait, of all tenants together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: dict[str, deque[RequestState]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def __iter__(self) -> Iterator[RequestState]:
        return (job for own in self._jobs.values() for job in own)

    @property
    def tenants(self) -> list[str]:
        """Who waits, the one that came first in front."""
        return list(self._jobs)

    def check(self, tenant: str) -> None:
        """Raises: Refusal: there is no place for one more request."""
        count, own = len(self), len(self._jobs.get(tenant, ()))
        if count >= self._most:
            raise overloaded(count)
        if own >= self._most - count:
            raise too_many_requests(own)

    def add(self, job: RequestState) -> None:
        """Take a request in, behind those of its tenant."""
        self._jobs.setdefault(job.sitting.tenant, deque()).append(job)

    def first(self, tenant: str) -> RequestState:
        """Whose turn it is of those who wait."""
        return self._jobs[tenant][0]

    def remove(self, job: RequestState) -> None:
        """It waits no more."""
        tenant = job.sitting.tenant
        self._jobs[tenant].remove(job)
        if not self._jobs[tenant]:
            del self._jobs[tenant]
