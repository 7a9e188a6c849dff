"""Queue of requests that wait for memory."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from larder.server.api_errors import overloaded, too_many_requests
from larder.server.request_state import RequestState


class RequestQueue:
    """Bounded request queue, fair between tenants: a tenant may occupy at most as many places as
    are free. Each tenant's requests are in order of priority and arrival. For the model's thread.

    Args:
        most: maximum number of waiting requests of all tenants.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: dict[str, list[RequestState]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def __iter__(self) -> Iterator[RequestState]:
        return (job for own in self._jobs.values() for job in own)

    @property
    def tenants(self) -> list[str]:
        """Tenants with waiting requests, in order of arrival."""
        return list(self._jobs)

    def check(self, tenant: str) -> None:
        """Raise if a request of this tenant cannot be queued.

        Raises:
            ApiError: 503 `overloaded`, or 429 `too_many_requests`.
        """
        count, own = len(self), len(self._jobs.get(tenant, ()))
        if count >= self._most:
            raise overloaded(count)
        if own >= self._most - count:
            raise too_many_requests(own)

    def add(self, job: RequestState) -> None:
        """Add a request to its tenant's queue."""
        own = self._jobs.setdefault(job.session.tenant, [])
        insort(own, job, key=lambda each: (each.request.priority, each.order))

    def first(self, tenant: str) -> RequestState:
        """The next request of a tenant."""
        return self._jobs[tenant][0]

    def remove(self, job: RequestState) -> None:
        """Remove a request from its queue."""
        tenant = job.session.tenant
        self._jobs[tenant].remove(job)
        if not self._jobs[tenant]:
            del self._jobs[tenant]
