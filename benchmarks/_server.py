"""A server of its own process, and clients of it that time what they hear."""

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

PATIENCE_SECONDS = 3600.0  # for an answer: crowds wait for each other


@dataclass(frozen=True)
class Server:
    """One that runs.

    Args:
        key: an operator's; empty where there are no keys.
        process: to be looked at, not to be ended.
    """

    url: str
    process: int
    key: str = ""

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> HttpReply:
        """One request, read to the end.

        Args:
            body: bytes as they are, anything else as JSON.
            key: instead of the server's own.
        """
        connection = self._sent(method, path, body, self.key if key is None else key)
        try:
            told = connection.getresponse()
            return HttpReply(told.status, told.read(), dict(told.getheaders()))
        finally:
            connection.close()

    def chat(self, body: Mapping[str, Any], stop_after: int | None = None) -> StreamedAnswer:
        """An answer as it streams in.

        Args:
            stop_after: pieces of text after which the client leaves.
        """
        begun = time.perf_counter()
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        connection = self._sent("POST", "/v1/chat/completions", asked, self.key)
        heard = StreamedAnswer()
        try:
            told = connection.getresponse()
            heard.status = told.status
            if told.status != 200:
                heard.error = json.loads(told.read())["error"]
                return heard
            for line in told:
                if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
                    continue
                heard.take(json.loads(line[len(b"data: ") :]), time.perf_counter() - begun)
                if heard.error or (stop_after is not None and len(heard.times) >= stop_after):
                    break
        finally:
            heard.seconds = time.perf_counter() - begun
            connection.close()
        return heard

    def metrics(self) -> dict[str, float]:
        """Every number of `/metrics`, labels and all."""
        text = self.ask("GET", "/metrics").body.decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def sessions(self) -> list[dict[str, Any]]:
        """What the server holds."""
        return self.ask("GET", "/v1/sessions").json["data"]

    def _sent(self, method: str, path: str, body: Any, key: str) -> http.client.HTTPConnection:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            str(place.hostname), place.port, timeout=PATIENCE_SECONDS
        )
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers["content-type"] = "application/json"
        connection.request(method, path, body, headers)
        return connection


@dataclass(frozen=True)
class HttpReply:
    """What came back."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class StreamedAnswer:
    """An answer that streamed in.

    Args:
        times: seconds from the request to each piece of text.
        kv, usage: the server's own report; empty where the client left before.
    """

    text: str = ""
    times: list[float] = field(default_factory=list)
    kv: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    seconds: float = 0.0

    def take(self, told: dict[str, Any], at: float) -> None:
        self.error = told.get("error") or {}
        self.kv = told.get("kv") or self.kv
        self.usage = told.get("usage") or self.usage
        for choice in told.get("choices", ()):
            piece = choice["delta"].get("content")
            if piece:
                self.text += piece
                self.times.append(at)

    @property
    def tokens(self) -> int:
        """That were generated."""
        return int(self.usage.get("completion_tokens", 0))


def session_path(session: str, *more: str) -> str:
    """The path of a session, or of what is under it."""
    return "/".join(("/v1/sessions", quote(session, safe=""), *more))


@contextmanager
def run_server(home: Path, options: Sequence[str], keys: str = "") -> Iterator[Server]:
    """Run `larder serve` with these options until the block is left.

    Args:
        home: everything it writes goes there.
        keys: as in a file of keys; the first one is an operator's.

    Raises:
        RuntimeError: it does not start; it has told why.
    """
    own = {"LARDER_HOME": str(home), **({"LARDER_API_KEYS": keys} if keys else {})}
    command = [sys.executable, "-m", "larder", "serve", "--json", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **own})
    assert process.stdout is not None
    try:
        told = _document(process.stdout)
        if "url" not in told:
            raise RuntimeError(f"the server did not start: {told}")
        yield Server(told["url"], process.pid, keys.split()[1] if keys else "")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _document(lines: Iterable[bytes]) -> dict[str, Any]:
    """The JSON document that stands first; empty where there is none."""
    told = b""
    for line in lines:
        told += line
        if line.rstrip() == b"}":
            return json.loads(told)
    return {}
