"""Recovery of a server that is killed repeatedly at random times."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import httpx2
import pytest
import torch

from larder import Engine
from larder.engine import ModelSnapshots
from larder.models import LoadedModel
from larder.server import (
    Archive,
    Durability,
    EngineOptions,
    HttpSettings,
    LocalEngineClient,
    LoopbackAuth,
    ServerConfig,
    StoreDiskTier,
    StoreSessionPersistence,
    create_app,
)
from larder.store import ByteBudgets, Store, Tier
from server_core import Served, box_question, characters, user

KILLS = int(os.environ.get("LARDER_TEST_KILLS", "20"))
START_SECONDS = 60
TALKS, NEW_TOKENS, MOST_TURNS = 5, 5, 6
SECRET = b"s" * 32
# Of which the caches of two and of three conversations take about all.
BUDGETS = ByteBudgets({Tier.DEVICE: 600_000, Tier.HOST: 900_000})


def store_in(folder: Path) -> Store:
    return Store(str(folder / "blobs"), folder / "home", secret=SECRET, kept_epochs=2)


def serve(loaded: LoadedModel, folder: Path, durability: Durability, port: Connection) -> None:
    """The life of a server, up to its death."""
    import uvicorn

    store = store_in(folder)
    persistence = StoreSessionPersistence(store, loaded.decoder.spec)
    disk = StoreDiskTier(persistence, ModelSnapshots(store, loaded), durability)
    hub = LocalEngineClient(
        Engine(loaded, policy="full"), EngineOptions(BUDGETS), persistence=persistence, disk=disk
    )
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=NEW_TOKENS))
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port.send(bound.getsockname()[1])
        uvicorn.Server(ServerConfig(app)).run(sockets=[bound])


@dataclass
class ClientConversation:
    """A conversation as its client knows it: a turn counts once its answer has come whole."""

    number: int
    conversations: int = 0
    heard: int = 0
    turns: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"talk {self.number}-{self.conversations}"

    @property
    def asked(self) -> list[dict[str, str]]:
        answers = len(self.turns) // 2
        text = (
            box_question(self.number + self.conversations, 1)[0].text
            if not answers
            else f"And {answers}?"
        )
        return [*self.turns, {"role": "user", "content": text}]

    def go_on(self, url: str) -> None:
        """Ask until the server is gone; the same again, where no answer has come."""
        if len(self.turns) >= 2 * MOST_TURNS:
            self.conversations, self.turns = self.conversations + 1, []
        with httpx2.Client(base_url=url, timeout=60) as client:
            while len(self.turns) < 2 * MOST_TURNS:
                body = {"model": "characters", "messages": self.asked, "temperature": 0}
                try:
                    reply = client.post(
                        "/v1/chat/completions", json=body, headers={"x-session-id": self.name}
                    )
                    answer = reply.json()
                except (httpx2.HTTPError, ValueError):
                    return
                if reply.is_error:
                    self.problems.append(f"{reply.status_code} {reply.text}")
                    return
                if answer["kv"]["session"] != self.name:
                    self.problems.append(f"{self.name} goes on as {answer['kv']['session']}")
                message = answer["choices"][0]["message"]
                text = {"role": "assistant", "content": message["content"]}
                self.turns = [*self.asked, text]
                self.heard += 1


@dataclass
class UndisturbedServer:
    """A server that was never killed, and what it says to the questions of one conversation."""

    served: Served
    name: str
    answers: list[str] = field(default_factory=list)

    def expected(self, turns: list[dict[str, str]]) -> list[str]:
        """Its answers to the same questions, of which it was asked the first before."""
        for turn in turns[2 * len(self.answers) :: 2]:
            follows, asked = self.name if self.answers else None, [user(turn["content"])]
            result = self.served.ask(asked, self.name, follows=follows, max_new_tokens=NEW_TOKENS)
            self.answers.append(result.text.strip())
        return self.answers


def received(port: Connection) -> int:
    """The port that a server has sent; an error if it ends, or hangs, before."""
    assert port.poll(START_SECONDS), f"the server sent no port in {START_SECONDS} s"
    return port.recv()


def _wait(talks: list[ClientConversation], answers: int, seconds: float) -> None:
    """Until so many answers more have come, or it takes too long; and some time."""
    until, before = time.monotonic() + 20, sum(talk.heard for talk in talks)
    while sum(talk.heard for talk in talks) < before + answers and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(seconds)


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_server_exit_before_serving_is_detected() -> None:
    processes = multiprocessing.get_context("fork")
    mine, its = processes.Pipe()
    process = processes.Process(target=os._exit, args=(1,))
    process.start()
    its.close()
    with pytest.raises(EOFError):
        received(mine)
    process.join()


@pytest.mark.failure(number=3)
@pytest.mark.stress
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_killed_server_keeps_all_acknowledged_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    loaded, chance = characters(), random.Random(11)
    talks, processes = (
        [ClientConversation(number) for number in range(TALKS)],
        multiprocessing.get_context("fork"),
    )
    known: dict[str, UndisturbedServer] = {}
    for kill in range(KILLS):
        durability = chance.choice([Durability.TURN, Durability.TURN, Durability.SNAPSHOT])
        mine, its = processes.Pipe()
        process = processes.Process(target=serve, args=(loaded, tmp_path, durability, its))
        process.start()
        its.close()  # so that the end of the process is the end of the pipe
        url = f"http://127.0.0.1:{received(mine)}"
        threads = [threading.Thread(target=talk.go_on, args=(url,)) for talk in talks]
        for thread in threads:
            thread.start()
        _wait(talks, chance.randint(0, 12), chance.uniform(0.0, 0.3))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for thread in threads:
            thread.join()
        for talk in talks:
            assert not talk.problems, (kill, talk.problems)
            answers = [turn["content"].strip() for turn in talk.turns[1::2]]
            if answers and talk.name not in known:
                known[talk.name] = UndisturbedServer(Served(loaded), talk.name)
            told_of = known[talk.name].expected(talk.turns) if answers else []
            assert answers == told_of[: len(answers)], (kill, talk.name)
    store = store_in(tmp_path)
    checked = store.maintenance.verify(store.sessions.heads())
    assert checked and all(not each.problems for each in checked)
    store.close()
    with capsys.disabled():
        turns = sum(len(each.answers) for each in known.values())
        print(f"\n{KILLS} kills, {len(known)} conversations, {turns} answers told and kept")
