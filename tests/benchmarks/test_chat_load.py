"""Clients of the server benchmarks against a small model: each of their requests is answered."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest

from larder.core import Conversation, Message, Question
from larder.server import (
    ApiKeyAuth,
    Archive,
    EmbedderQueue,
    EngineOptions,
    HttpSettings,
    Principal,
    create_app,
)
from server.http.running_server import listening
from server.http.scripted_model import served
from topic_embedder import TopicEmbedder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def among_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    tenants = {"sk-anne-0123456789": "anne", "sk-bob-0123456789ab": "bob"}
    keys = {key: Principal(name, is_operator=name == "anne") for key, name in tenants.items()}
    hub = served(options=EngineOptions(names=("seed",)))
    embedder = EmbedderQueue(TopicEmbedder(), "minilm")
    settings = HttpSettings(max_new_tokens=16)
    app = create_app(hub, ApiKeyAuth(keys), Archive(), settings, embedder)
    with listening(app) as found:
        yield found


@pytest.mark.extended
def test_load_rows_have_request_counts_latencies_and_memory(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load, rows = import_module("chat_load"), import_module("larder_bench.results.rows")
    out = tmp_path / "rows.jsonl"
    given = ["--url", url, "--model", "seed", "--label", "own", "--key", "sk-bob-0123456789ab"]
    given += ["--clients", "1", "2", "--turns", "2", "--new-tokens", "3", "--words", "3"]
    assert load.main([*given, "--process", str(os.getpid()), "--out", str(out)]) == 0
    one, two = rows.read_rows(out)
    assert (one["requests"], two["requests"]) == (2, 4)
    assert 2 <= one["tokens"] <= 6 and one["tokens_per_cpu_second"] > 0
    assert one["first_token"]["p50"] <= one["first_token"]["p95"] < one["seconds"]
    assert one["resident_bytes"] > 1 << 20
    assert capsys.readouterr().out.count("clients") == 2


def test_clients_have_equal_messages_in_every_run_and_a_shared_prefix() -> None:
    load = import_module("chat_load")
    options = load.LoadOptions("m", turns=2, words=5)
    one, again, other = (list(load.messages_of(name, options)) for name in ("a", "a", "b"))
    assert one == again and one[0] == other[0] and one[1] != other[1] and len(one) == 3


def removal_status(client: Any) -> str:
    """Status of a removal, asked again while the server ends an answer that the client left."""
    deadline = time.monotonic() + 30
    while (status := str(client.remove())) == "409" and time.monotonic() < deadline:
        time.sleep(0.05)
    return status


@pytest.mark.parametrize(
    "act",
    [
        "use_tools",
        "use_conversation",
        "embed",
        "message",
        "fork",
        "copy_session",
        "disconnect",
        "use_wrong_key",
    ],
)
def test_random_clients_are_answered(url: str, act: str) -> None:
    client_module, soak = import_module("_random_client"), import_module("soak")
    server = import_module("_server").Server(url, os.getpid(), "sk-bob-0123456789ab")
    client = client_module.RandomClient(server, server.key, f"c {act}", 3, Random(1))
    client.begin()
    outcome = f"{act}: {getattr(client, act)()}"
    assert not soak._is_broken(outcome) and "no" not in outcome, outcome
    assert removal_status(client) in ("200", "404")


def test_trace_holds_the_document_with_the_answer() -> None:
    trace = import_module("context_order").trace
    messages = tuple(Message("user", f"Box {n} holds key{n}.") for n in range(12))
    questions = tuple(Question(f"What does box {n} hold?", f"key{n}.") for n in range(12))
    requests = trace(Conversation("boxes", messages, questions), 6, 3, 20)
    assert len(requests) == 20 and all(len(set(each.contexts)) == 3 for each in requests)
    assert all(any(r.question.answer in text for text in r.contexts) for r in requests)
