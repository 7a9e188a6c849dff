"""HTTP connections with limits on the size and duration of incomplete requests."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from larder.server.http.app_state import HttpSettings

UNREAD_BYTES = 1 << 20  # read of a rejected body, so that the client receives the response
TIMEOUT_MESSAGE = b"The request did not arrive in time."


class ServerConfig(uvicorn.Config):
    """Uvicorn configuration of the application: always h11, which bounds the size of headers.

    Args:
        app: application of `create_app`.
        settings: limits; None for those of the application.
        more: further arguments of `uvicorn.Config`.
    """

    def __init__(self, app: FastAPI, settings: HttpSettings | None = None, **more: Any) -> None:
        self.settings: HttpSettings = settings or app.state.larder.settings
        super().__init__(
            app,
            http=TimedConnection,
            ws="none",
            h11_max_incomplete_event_size=self.settings.max_head_bytes,
            limit_concurrency=self.settings.max_connections,
            # The log configuration of uvicorn would close existing handlers.
            log_config=None,
            log_level="warning",
            access_log=False,
            **more,
        )


class TimedConnection(H11Protocol):
    """Connection that is closed when a request does not arrive in time.

    A request has `request_seconds` from its first byte, the first request from the start of the
    connection; received bytes extend the time at `request_bytes_per_second`. When more than half
    of `max_connections` wait for a request, the one that has waited longest is closed.
    """

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._settings = config.settings
        self._timer: asyncio.TimerHandle | None = None
        self._started_at, self._received, self._unread = 0.0, 0, 0

    @property
    def waits_since(self) -> float | None:
        """Start of the incomplete request by the loop's clock; None if there is none."""
        return None if self._timer is None else self._started_at

    def connection_made(self, transport: Any) -> None:  # uvloop has transports of its own
        super().connection_made(transport)
        self._start()
        waiting = [
            (each.waits_since, id(each), each)
            for each in self.connections
            if isinstance(each, TimedConnection) and each.waits_since is not None
        ]
        if len(waiting) > self._settings.max_connections // 2:
            min(waiting)[2].close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None:
            self._start()
        self._received += len(data)
        is_answered = self.cycle is not None and self.cycle.response_complete
        if is_answered and self.conn.their_state is h11.SEND_BODY:
            self._unread += len(data)
        if self._unread > UNREAD_BYTES:
            self.close()
            return
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timer()

    def close(self) -> None:
        """Close the connection; an incomplete request gets a 408."""
        self._stop()
        if not self.transport.is_closing():
            if self._received and self.conn.our_state is h11.IDLE:
                self._send_timeout()
            self.transport.close()

    def _start(self) -> None:
        self._started_at, self._received, self._unread = self.loop.time(), 0, 0
        self._timer = self.loop.call_later(self._settings.request_seconds, self._expire)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _update_timer(self) -> None:
        """Run the timer exactly while a request is incomplete."""
        state = self.conn.their_state
        is_incomplete = state is h11.SEND_BODY or (
            state is h11.IDLE and bool(self.conn.trailing_data[0])
        )
        if not is_incomplete or self.transport.is_closing():
            self._stop()
        elif self._timer is None:
            self._start()

    def _expire(self) -> None:
        rate = self._settings.request_bytes_per_second
        allowed = self._settings.request_seconds + self._received / rate
        remaining = self._started_at + allowed - self.loop.time()
        if self.flow.read_paused:  # the server has paused reading
            remaining = self._settings.request_seconds
        if remaining > 0:
            self._timer = self.loop.call_later(remaining, self._expire)
        else:
            self.close()

    def _send_timeout(self) -> None:
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"),
            h11.Data(data=TIMEOUT_MESSAGE),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
