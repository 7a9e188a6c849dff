"""Workflows that announce their next agents: caches fetched ahead against plain LRU.

    python benchmarks/workflow_prefetch.py [--steps 40] [--flows 2] [--agents 4]
        [--device-bytes 1600000]

Several workflows take turns; each is a ring of agents with a session of their own, and every
request says in how many steps each agent of its workflow is asked again (`kv_steps`). The device
holds a few of the caches, host memory and a store the others. Printed, and written to
results/workflow_prefetch.jsonl, is where the cache of an agent was when it was asked, for eviction
by last use, and by steps with what comes next fetched ahead. Nothing is timed: a load that was
started while the agent before answered has ended by the next request.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from _timing import environment, write
from _virtual_server import MODEL, PROMPT_SECONDS, Answer, VirtualServer, text_of, user

from larder.engine import Engine, ModelSnapshots
from larder.models import LoadedModel
from larder.server import ChatMessage, Durability, Request, StoreDiskTier, StoreSessionPersistence
from larder.store import ByteBudgets, Store, Tier
from larder_bench.random_models import open_model

OUT = Path("results/workflow_prefetch.jsonl")
TENANT, FIRST_WORDS, STEP_WORDS = "flows", 160, 12


class UntimedDisk(StoreDiskTier):
    """Disk tier whose choices do not depend on measured times."""

    def note_reading(self, tokens: int, seconds: float) -> None:
        del tokens, seconds

    def seconds_to_read(self, tokens: int) -> float:
        return tokens * PROMPT_SECONDS


def replay(
    loaded: LoadedModel, eviction: str, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Figures of all workflows under an eviction policy."""
    with closing(Store(str(folder / "blobs"), folder / "home", secret=b"b" * 32)) as store:
        persistence = StoreSessionPersistence(store, loaded.decoder.spec)
        disk = UntimedDisk(persistence, ModelSnapshots(store, loaded, "raw"), Durability.TURN)
        budgets = ByteBudgets({Tier.DEVICE: options.device_bytes, Tier.HOST: options.host_bytes})
        server = VirtualServer(
            budgets,
            eviction,
            persistence=persistence,
            disk=disk,
            engine=Engine(loaded, policy="full"),
        )
        with closing(server.core):
            return _figures(server, options)


def _figures(server: VirtualServer, options: argparse.Namespace) -> dict[str, Any]:
    tiers, again, prompt = Counter[str](), 0, 0
    chats: dict[str, list[ChatMessage]] = {}
    for step in range(options.steps):
        flow, position = step % options.flows, step // options.flows % options.agents
        ring = [f"flow {flow}, agent {number}" for number in range(options.agents)]
        name = ring[position]
        messages = chats.setdefault(name, [user(text_of(name, FIRST_WORDS))])
        due = {each: (n - position - 1) % options.agents + 1 for n, each in enumerate(ring)}
        request = Request(TENANT, tuple(messages), name, max_new_tokens=4, steps=due)
        answer = server.submit(request)
        server.core.announce(TENANT, request.steps)
        _settle(server)
        assert answer.report is not None
        _go_on(messages, answer, f"{name}, step {step}")
        if step >= options.flows * options.agents:  # every agent has been asked once
            tiers[answer.report.tier] += 1
            again += answer.report.recomputed_tokens
            prompt += answer.report.prompt_tokens
    steps = tiers.total()
    return {"again": again / prompt} | {tier: tiers[tier] / steps for tier in TIERS}


TIERS = ("device", "host", "disk", "none")


def _settle(server: VirtualServer) -> None:
    """Run until no request and no load is left."""
    core = server.core
    while server.step() or core.completions.in_flight:
        continue


def _go_on(messages: list[ChatMessage], answer: Answer, name: str) -> None:
    messages += [ChatMessage("assistant", answer.text), user(text_of(name, STEP_WORDS))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Caches fetched ahead against plain LRU.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--flows", type=int, default=2)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--device-bytes", type=int, default=1_600_000)
    parser.add_argument("--host-bytes", type=int, default=3_000_000)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    loaded, rows = open_model(MODEL), list[dict[str, Any]]()
    for eviction in ("lru", "kvflow"):
        with tempfile.TemporaryDirectory() as folder:
            row = {"eviction": eviction} | replay(loaded, eviction, options, Path(folder))
        rows.append(row)
        where = ", ".join(f"{tier} {row[tier]:.2f}" for tier in TIERS)
        print(f"{eviction:8} {where}; {row['again']:.2f} of all tokens read again", flush=True)
    write(options.out, [row | {"environment": environment()} for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
