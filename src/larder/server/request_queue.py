"""Queue of requests that wait for memory, the order of a tenant's requests in it, and programs.

A program is what one agent run asks in one session or several; without a name from the client it is
the session with its branches. What is predicted for a session comes from its own tenant alone.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from larder.server.api_errors import overloaded, too_many_requests
from larder.server.request_state import RequestState
from larder.server.session_state import SessionState
from larder.store.eviction.continuum import PauseForecast, ToolPauses

MAX_PASSED_REQUESTS = 64
# Blocks for other requests of its tenant before a request gets one regardless of length.
MAX_PASSED_BLOCKS = 8
MAX_PROGRAMS = 4096  # of a tenant, the least recently used are forgotten
MAX_TENANTS = 1024
NUM_WAITS = 64  # latest waits of a tenant


class SchedulingPolicy(Enum):
    """Order of the requests of one tenant and one priority.

    PRIORITY: by arrival; prompts with the fewest blocks left are read first, unless others were
    passed over `MAX_PASSED_BLOCKS` times.
    PROGRAM_FCFS: sessions whose cache is in memory first, then by the first arrival of the program
    that a request is a part of: Li et al., "Continuum: Efficient and Robust Multi-Turn LLM Agent
    Scheduling with KV Cache Time-to-Live" (2025), arXiv:2511.02230. So a program that has started
    does not queue behind new ones after each of its tool calls. Prompts are read in the same order.
    What differs: a request that `MAX_PASSED_REQUESTS` later ones have overtaken, or as many blocks
    of others since it had one, goes first.
    """

    PRIORITY = "priority"
    PROGRAM_FCFS = "program_fcfs"

    def first(self, states: Sequence[RequestState]) -> RequestState:
        """The next of a tenant's requests, which are in order of priority and arrival."""
        if self is SchedulingPolicy.PRIORITY:
            return states[0]
        return min(states, key=lambda state: (state.request.priority, *_queue_rank(state)))

    def prefill_rank(self, state: RequestState) -> tuple[int, ...]:
        """Rank of a running request among those of its tenant and priority whose prompts are to be
        read."""
        if self is SchedulingPolicy.PRIORITY:
            blocks = state.prefill
            return -(blocks.passed_blocks // MAX_PASSED_BLOCKS), blocks.remaining_blocks
        is_due = max(state.passed, state.prefill.passed_blocks) >= MAX_PASSED_REQUESTS
        return _program_rank(state, is_due, state.was_resident)


def _queue_rank(state: RequestState) -> tuple[int, ...]:
    is_due = state.passed >= MAX_PASSED_REQUESTS
    return _program_rank(state, is_due, state.session.residency.is_resident)


def _program_rank(state: RequestState, is_due: bool, is_resident: bool) -> tuple[int, ...]:
    """Rank of a request by its program; one that is due goes by its own arrival."""
    if is_due:
        return 0, 0, state.order
    return 1, not is_resident, state.program_order, state.order


class RequestQueue:
    """Bounded request queue, fair between tenants: a tenant may occupy at most as many slots as
    are free. For the model's thread, except for `check`.

    Args:
        most: maximum number of waiting requests of all tenants.
        policy: order of each tenant's requests.
    """

    def __init__(self, most: int, policy: SchedulingPolicy = SchedulingPolicy.PRIORITY) -> None:
        self._most, self.policy = most, policy
        self._jobs: dict[str, list[RequestState]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._jobs.values())))  # a copy, which no other thread changes

    def __iter__(self) -> Iterator[RequestState]:
        return (state for states in self._jobs.values() for state in states)

    @property
    def tenants(self) -> list[str]:
        """Tenants with waiting requests, in order of arrival."""
        return list(self._jobs)

    def check(self, tenant: str) -> None:
        """Raise if a request of this tenant cannot be queued. From any thread.

        Raises:
            ApiError: 503 `overloaded`, or 429 `too_many_requests`.
        """
        count, tenant_count = len(self), len(self._jobs.get(tenant, ()))
        if count >= self._most:
            raise overloaded(count)
        if tenant_count >= self._most - count:
            raise too_many_requests(tenant_count)

    def add(self, state: RequestState) -> None:
        """Add a request to its tenant's queue."""
        states = self._jobs.setdefault(state.session.tenant, [])
        insort(states, state, key=lambda each: (each.request.priority, each.order))

    def first(self, tenant: str) -> RequestState:
        """The next request of a tenant."""
        return self.policy.first(self._jobs[tenant])

    def remove(self, state: RequestState) -> None:
        """Remove a request from its queue; those that it leaves behind have been overtaken."""
        tenant = state.session.tenant
        self._jobs[tenant].remove(state)
        for each in self._jobs[tenant]:
            each.passed += each.order < state.order
        if not self._jobs[tenant]:
            del self._jobs[tenant]


@dataclass
class TenantPrograms:
    """Programs of one tenant.

    Args:
        arrivals: number of the first request, by program.
        waits: seconds that the latest requests waited in the queue.
    """

    arrivals: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])
    pauses: ToolPauses = field(default_factory=ToolPauses)
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_WAITS))


class Programs:
    """Programs of all tenants. For the model's thread."""

    def __init__(self) -> None:
        self._tenants = OrderedDict[str, TenantPrograms]()

    def note_arrival(self, state: RequestState) -> None:
        """Order the request by the first request of its program."""
        programs = self._of(state.session.tenant)
        program = state.request.program or state.session.root
        state.program_order = programs.arrivals.setdefault(program, state.order)
        programs.arrivals.move_to_end(program)
        if len(programs.arrivals) > MAX_PROGRAMS:
            programs.arrivals.popitem(last=False)

    def note_start(self, state: RequestState, now: float) -> None:
        """Record the wait of a request that leaves the queue for the first time, and the pause
        before it."""
        programs, usage = self._of(state.session.tenant), state.session.usage
        programs.waits.append(max(0.0, now - state.times.arrived))
        if usage.pause.tool and usage.answered:
            programs.pauses.record(usage.pause.tool, max(0.0, state.times.arrived - usage.answered))
            usage.pause = PauseForecast()

    def note_answer(self, session: SessionState, tool: str) -> None:
        """Predict the pause after an answer.

        Args:
            tool: tool that runs next; empty for none, where the session's own pauses are used.
        """
        programs = self._of(session.tenant)
        pauses = tuple(programs.pauses.after(tool)) if tool else ()
        wait_seconds = sum(programs.waits) / len(programs.waits) if programs.waits else 0.0
        session.usage.pause = PauseForecast(tool, pauses, wait_seconds)

    def _of(self, tenant: str) -> TenantPrograms:
        programs = self._tenants.setdefault(tenant, TenantPrograms())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return programs
