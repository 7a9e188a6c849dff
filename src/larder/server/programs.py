"""Programs of each tenant: their first arrivals, pauses after tool calls, and waits in the queue.

A program is what one agent run asks in one session or several; without a name from the client it is
the session with its branches. What is predicted for a session comes from its own tenant alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from larder.server.request_state import RequestState
from larder.server.session_state import SessionState
from larder.store.eviction.continuum import PauseForecast, ToolPauses

MAX_PROGRAMS = 4096  # of a tenant, the least recently used are forgotten
MAX_TENANTS = 1024
NUM_WAITS = 64  # latest waits of a tenant


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
