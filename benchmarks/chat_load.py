"""Chats of ten turns by many clients at once, against any server with OpenAI's chat completions.

    python benchmarks/chat_load.py --url http://127.0.0.1:8000 --model smollm2 --label larder
        [--clients 1 8 32] [--turns 10] [--new-tokens 24] [--words 40] [--key KEY]
        [--process PID | --start COMMAND]

Each client talks in a conversation of its own: it streams an answer, and sends the whole
conversation with its next message. All share a system prompt, as the users of one assistant do.
Measured are tokens per second, tokens per CPU second of the server, seconds to the first token
(median and 95th percentile), and the highest resident memory of the server with its children, on
Linux. `--start` runs the server for as long as the benchmark does, so that several servers can take
turns; `--process` measures one that runs. Without both, only the clients' figures are printed. Rows
go to results/chat_load.jsonl. docs/serving_measured.md says how the peers were started.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from _server import Server, StreamedAnswer
from _timing import environment, write

OUT = Path("results/chat_load.jsonl")
START_SECONDS, POLL_SECONDS = 600.0, 0.1
MIB = 1 << 20
WORDS = "river bridge garden winter letter copper window market engine forest silver harbor".split()


@dataclass(frozen=True)
class LoadOptions:
    """Conversations that each client sends.

    Args:
        words: of a message; the system prompt has four times as many.
        new_tokens: most tokens of an answer.
    """

    model: str
    turns: int = 10
    new_tokens: int = 24
    words: int = 40


@dataclass(frozen=True)
class ProcessUse:
    """CPU time and memory of a process and its children.

    Args:
        cpu_seconds: of those that live, and of children that were waited for.
        resident_bytes: at this time.
    """

    cpu_seconds: float
    resident_bytes: int

    @staticmethod
    def of(root: int) -> ProcessUse:
        """Use of a process tree; nothing of a process that has ended."""
        parents = dict[int, int]()
        fields = dict[int, list[str]]()
        for place in Path("/proc").iterdir():
            if place.name.isdigit():
                try:
                    own = (place / "stat").read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                parents[int(place.name)], fields[int(place.name)] = int(own[1]), own
        tree = [number for number in fields if _is_under(number, root, parents)]
        ticks = sum(int(field) for number in tree for field in fields[number][11:15])
        pages = sum(int(fields[number][21]) for number in tree)
        cpu_seconds = ticks / os.sysconf("SC_CLK_TCK")
        return ProcessUse(cpu_seconds, pages * os.sysconf("SC_PAGE_SIZE"))


def _is_under(number: int, root: int, parents: dict[int, int]) -> bool:
    while number > 1 and number != root:
        number = parents.get(number, 0)
    return number == root


@dataclass
class MemoryPoller:
    """Highest resident memory of a process tree, from `start` to the end of the block."""

    process: int
    most: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> MemoryPoller:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.most = max(self.most, ProcessUse.of(self.process).resident_bytes)
            if self.ended.wait(POLL_SECONDS):
                return


def messages_of(client: str, options: LoadOptions) -> Iterator[dict[str, str]]:
    """System prompt of all, then the messages of one client, the same in every run."""
    yield {"role": "system", "content": "You tell stories. " + _text(Random(0), 4 * options.words)}
    rng = Random(client)
    for turn in range(options.turns):
        text = f"{_text(rng, options.words)} Tell a long story about this, part {turn + 1}."
        yield {"role": "user", "content": text}


def _text(rng: Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)) + "."


def chat(server: Server, client: str, options: LoadOptions) -> list[StreamedAnswer]:
    """Answers of one client's conversation.

    Raises:
        RuntimeError: the server refused a request.
    """
    system, *asked = messages_of(client, options)
    messages, answers = [system], list[StreamedAnswer]()
    for message in asked:
        messages.append(message)
        body = {"model": options.model, "messages": messages, "max_tokens": options.new_tokens}
        answer = server.chat({**body, "temperature": 0})
        if answer.error or answer.status != 200:
            raise RuntimeError(f"{client} was refused: {answer.status} {answer.error}")
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text or " "})
    return answers


def measured(server: Server, clients: int, run: str, options: LoadOptions) -> dict[str, Any]:
    """Figures of concurrent clients.

    Args:
        run: name of the run; conversations of two runs differ.
    """
    before = ProcessUse.of(server.process)
    started = time.perf_counter()
    with MemoryPoller(server.process) as poller, ThreadPoolExecutor(clients) as pool:
        names = [f"{run} {number}" for number in range(clients)]
        result = list(pool.map(lambda name: chat(server, name, options), names))
    seconds = time.perf_counter() - started
    cpu_seconds = ProcessUse.of(server.process).cpu_seconds - before.cpu_seconds
    answers = [answer for each in result for answer in each]
    tokens = sum(answer.tokens or len(answer.times) for answer in answers)
    firsts = [answer.times[0] if answer.times else answer.seconds for answer in answers]
    late = [each[-1].times[0] if each[-1].times else each[-1].seconds for each in result]
    return {
        "clients": clients,
        "requests": len(answers),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds if cpu_seconds else None,
        "first_token": {f"p{p}": float(np.percentile(firsts, p)) for p in (50, 95)},
        "first_token_of_last_turn": float(np.median(late)),
        "resident_bytes": poller.most or None,
    }


@contextmanager
def started(command: str, url: str, key: str) -> Iterator[Server]:
    """Run a server until the block ends, in a process group of its own.

    Raises:
        RuntimeError: it ends, or does not answer in time.
    """
    process = subprocess.Popen(
        shlex.split(command), stdout=subprocess.DEVNULL, start_new_session=True
    )
    server = Server(url, process.pid, key)
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(server):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not start: {command}")
            time.sleep(POLL_SECONDS)
        yield server
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(server: Server) -> bool:
    try:
        return server.ask("GET", "/health").status == 200
    except OSError:
        return False


def rows_of(server: Server, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per number of clients; a short conversation before all of them warms up."""
    load = LoadOptions(options.model, options.turns, options.new_tokens, options.words)
    chat(server, "warm-up", LoadOptions(options.model, 2, 4, options.words))
    for clients in options.clients:
        run = f"{clients} of {options.run}"
        row = {"label": options.label, **measured(server, clients, run, load)}
        print(line_of(row), flush=True)
        yield row | {"load": vars(load), "environment": environment()}


def line_of(row: dict[str, Any]) -> str:
    """A row as one line for people."""
    first, cpu = row["first_token"], row["tokens_per_cpu_second"]
    memory = "" if row["resident_bytes"] is None else f"  {row['resident_bytes'] / MIB:7,.0f} MiB"
    return (
        f"{row['label']:14} {row['clients']:3} clients {row['tokens_per_second']:7.1f} tokens/s"
        f"{'' if cpu is None else f' {cpu:7.1f} per CPU s'}"
        f"  first token {first['p50']:.2f}/{first['p95']:.2f} s{memory}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.start:
        with started(options.start, options.url, options.key) as server:
            rows = list(rows_of(server, options))
    else:
        rows = list(rows_of(Server(options.url, options.process, options.key), options))
    write(options.out, rows)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Chats by many clients at once.")
    parser.add_argument("--url", required=True, help="without /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--label", required=True, help="name of the server in the rows")
    parser.add_argument("--run", default="1", help="name of the run: other conversations")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--key", default="")
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--start", help="command that runs the server")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
