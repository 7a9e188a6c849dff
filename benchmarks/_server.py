"""Server in its own process, and clients that time its answers."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

TIMEOUT_SECONDS = 3600.0  # of a request: many clients wait for each other


@dataclass(frozen=True)
class Server:
    """Running server.

    Args:
        url: base URL.
        process: process id, for measurements.
        key: an operator's API key; empty without keys.
    """

    url: str
    process: int
    key: str = ""

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> HttpReply:
        """Reply to one request, read completely.

        Args:
            body: bytes, or anything else as JSON.
            key: API key instead of the server's own.
        """
        connection = self._sent(method, path, body, self.key if key is None else key)
        try:
            response = connection.getresponse()
            return HttpReply(response.status, response.read(), dict(response.getheaders()))
        finally:
            connection.close()

    def chat(self, body: Mapping[str, Any], stop_after: int | None = None) -> StreamedAnswer:
        """Streamed answer to a chat completion.

        Args:
            stop_after: number of text deltas after which the client disconnects.
        """
        started = time.perf_counter()
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        connection = self._sent("POST", "/v1/chat/completions", request, self.key)
        answer = StreamedAnswer()
        try:
            response = connection.getresponse()
            answer.status = response.status
            if response.status != 200:
                answer.error = json.loads(response.read())["error"]
                return answer
            for line in response:
                if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
                    continue
                answer.take(json.loads(line[len(b"data: ") :]), time.perf_counter() - started)
                if answer.error or (stop_after is not None and len(answer.times) >= stop_after):
                    break
        finally:
            answer.seconds = time.perf_counter() - started
            connection.close()
        return answer

    def metrics(self) -> dict[str, float]:
        """All numbers of `/metrics`, with their labels."""
        text = self.ask("GET", "/metrics").body.decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def sessions(self) -> list[dict[str, Any]]:
        """Sessions of the server."""
        return self.ask("GET", "/v1/sessions").json["data"]

    def _sent(self, method: str, path: str, body: Any, key: str) -> http.client.HTTPConnection:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            str(place.hostname), place.port, timeout=TIMEOUT_SECONDS
        )
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers["content-type"] = "application/json"
        connection.request(method, path, body, headers)
        return connection


@dataclass(frozen=True)
class HttpReply:
    """Reply to a request."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class StreamedAnswer:
    """Streamed answer.

    Args:
        times: seconds from the request to each text delta, or part of a call.
        calls: tool calls, as messages of the assistant have them.
        kv, usage: report of the server; empty if the client disconnected before.
    """

    text: str = ""
    times: list[float] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    kv: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    seconds: float = 0.0

    def take(self, chunk: dict[str, Any], at: float) -> None:
        """Add a chunk of the stream."""
        self.error = chunk.get("error") or {}
        self.kv = chunk.get("kv") or self.kv
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            delta = choice["delta"].get("content")
            if delta:
                self.text += delta
                self.times.append(at)
            for call in choice["delta"].get("tool_calls") or ():
                self._take_call(call)
                self.times.append(at)

    def _take_call(self, part: dict[str, Any]) -> None:
        """Add a part of a call; the first one has its id."""
        if "id" in part:
            self.calls.append({name: part[name] for name in ("id", "type", "function")})
        else:
            function = self.calls[part["index"]]["function"]
            function["arguments"] += part["function"]["arguments"]

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return int(self.usage.get("completion_tokens", 0))


def session_path(session: str, *more: str) -> str:
    """Path of a session, or of a resource under it."""
    return "/".join(("/v1/sessions", quote(session, safe=""), *more))


@contextmanager
def run_server(home: Path, options: Sequence[str], keys: str = "") -> Iterator[Server]:
    """Run `larder serve` with these options until the block ends.

    Args:
        home: folder of everything that it writes.
        keys: contents of a file of keys; the first one is an operator's.

    Raises:
        RuntimeError: the server does not start.
    """
    variables = {"LARDER_HOME": str(home), **({"LARDER_API_KEYS": keys} if keys else {})}
    command = [sys.executable, "-m", "larder", "serve", "--json", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **variables})
    assert process.stdout is not None
    try:
        document = _document(process.stdout)
        if "url" not in document:
            raise RuntimeError(f"the server did not start: {document}")
        yield Server(document["url"], process.pid, keys.split()[1] if keys else "")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _document(lines: Iterable[bytes]) -> dict[str, Any]:
    """First JSON document of the output; empty if there is none."""
    text = b""
    for line in lines:
        text += line
        if line.rstrip() == b"}":
            return json.loads(text)
    return {}
