"""Cluster of two Ray machines on this host, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from larder import Engine
from larder.models import LoadedModel
from larder.server import Archive, HttpSettings, LocalEngineClient, LoopbackAuth, create_app
from server.http.running_server import listening

pytestmark = pytest.mark.cluster
MODEL = "seed"
TALKS, TOKENS, LONG_TOKENS = 6, 8, 64
STREAMED = 5  # messages that are there when an answer is streamed
PORTS = ("metrics_agent", "metrics_export", "runtime_env_agent", "dashboard_agent_listen")


@dataclass
class Machines:
    """A server, and the machine that is to be killed."""

    url: str
    cluster: Any
    second: Any

    def kill(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    result = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_raylet_start_wait_time_s": "300",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "LARDER_HOME": str(tmp_path / "front"),
    }
    for name, value in result.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as living:
        cluster, second = living.enter_context(_cluster(tmp_path))
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        url = living.enter_context(_serving(tmp_path))
        yield Machines(url, cluster, second)


@contextmanager
def _cluster(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Two machines with nothing in common but the network."""
    from ray.cluster_utils import Cluster  # pyright: ignore

    own = {"num_cpus": 1, "object_store_memory": 100 << 20}
    homes = [{"env_vars": {"LARDER_HOME": str(folder / name)}} for name in ("one", "two")]
    head = {"include_dashboard": False, **own, **homes[0], **_ports()}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster, cluster.add_node(**own, **homes[1], **_ports())
    finally:
        cluster.shutdown()


def _ports() -> dict[str, int]:
    """Free ports, chosen beforehand because a slow machine may report its own too late."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    found = {f"{name}_port": own.getsockname()[1] for name, own in zip(PORTS, taken, strict=True)}
    for own in taken:
        own.close()
    return found


@contextmanager
def _serving(folder: Path) -> Iterator[str]:
    store, log = folder / "store", folder / "log"
    words = ["serve", "--ray", "--model", MODEL, "--port", "0", "--json", "--store", str(store)]
    with log.open("wb") as errors:
        server = subprocess.Popen(
            [sys.executable, "-m", "larder", *words], stdout=subprocess.PIPE, stderr=errors
        )
    try:
        assert server.stdout is not None
        with closing(server.stdout) as result:
            lines = iter(result.readline, b"")
            text = b""
            for line in lines:
                text += line
                if line == b"}\n":
                    break
            assert text, log.read_text()
            yield json.loads(text)["url"]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


class ClientConversation:
    """A conversation of one client."""

    def __init__(self, client: OpenAI, name: str) -> None:
        self.client, self.name = client, name
        self.messages: list[Any] = [{"role": "user", "content": f"I am {name}, and who are you?"}]
        self.cached: list[int] = []

    def ask(self) -> None:
        result = self.client.chat.completions.create(
            model=MODEL,
            messages=self.messages,
            max_tokens=TOKENS,
            extra_headers={"x-session-id": self.name},
        )
        assert result.usage is not None and result.usage.prompt_tokens_details is not None
        self.cached.append(result.usage.prompt_tokens_details.cached_tokens or 0)
        self._go_on(result.choices[0].message.content or "")

    def stream(self, started: threading.Event) -> None:
        """Longer answer, streamed."""
        with self.client.chat.completions.create(
            model=MODEL,
            messages=self.messages,
            max_tokens=LONG_TOKENS,
            stream=True,
            extra_headers={"x-session-id": self.name},
        ) as chunks:
            text = ""
            for chunk in chunks:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                if text:
                    started.set()
        self._go_on(text)

    def _go_on(self, answer: str) -> None:
        self.messages.append({"role": "assistant", "content": answer})
        self.messages.append({"role": "user", "content": f"And {len(self.messages)}?"})


def test_conversations_survive_the_loss_of_a_machine(
    machines: Machines, seed_model: LoadedModel
) -> None:
    with OpenAI(api_key="-", base_url=f"{machines.url}/v1") as client:
        talks = [ClientConversation(client, f"talk {number}") for number in range(TALKS)]
        result = client.conversations.create()
        for _ in range(2):
            for talk in talks:
                talk.ask()
        assert all(talk.cached[1] > 0 for talk in talks)  # each went where it had been
        responses = [client.responses.create(model=MODEL, input="Hello.", conversation=result.id)]
        _all_at_once(talks, machines)
        for _ in range(2):
            for talk in talks:
                talk.ask()
        responses += [
            client.responses.create(model=MODEL, input="Still there?", conversation=result.id),
            client.responses.create(
                model=MODEL, input="And now?", previous_response_id=responses[0].id
            ),
        ]
        assert len(client.conversations.items.list(result.id).data) == 4
    for talk in talks:
        kept = httpx2.get(f"{machines.url}/v1/sessions/{talk.name}").json()
        assert kept["turns"] == len(talk.messages) - 1
    assert [talk.messages for talk in talks] == [
        _single_server_messages(talk, seed_model) for talk in talks
    ]
    assert all(each.usage.input_tokens > responses[0].usage.input_tokens for each in responses[1:])


def _all_at_once(talks: list[ClientConversation], machines: Machines) -> None:
    """Stream all answers at once, and kill a machine meanwhile."""
    started = threading.Event()
    with ThreadPoolExecutor(len(talks)) as threads:
        streams = [threads.submit(talk.stream, started) for talk in talks]
        started.wait(60)
        machines.kill()
        for stream in streams:
            stream.result()


def _single_server_messages(talk: ClientConversation, loaded: LoadedModel) -> list[Any]:
    """Messages of the same conversation with one undisturbed server."""
    hub = LocalEngineClient(Engine(loaded, policy="full"))
    with listening(create_app(hub, LoopbackAuth(), Archive(), HttpSettings())) as url:
        with OpenAI(api_key="-", base_url=f"{url}/v1", max_retries=0) as client:
            other = ClientConversation(client, talk.name)
            while len(other.messages) < len(talk.messages):
                if len(other.messages) == STREAMED:
                    other.stream(threading.Event())
                else:
                    other.ask()
    return other.messages
