"""Inputs of session eviction: workflow steps and think times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from larder import Engine
from larder.models import LoadedModel
from larder.server import EngineOptions, LocalEngineClient, Request
from server_core import Served, answered, box_question
from server_engine_clients import Waiting
from server_stores import Stored


@pytest.mark.parametrize(("eviction", "leaves"), [("kvflow", "late"), ("lru", "soon")])
def test_kvflow_evicts_the_latest_next_use_and_lru_the_least_recent(
    small: LoadedModel, eviction: str, leaves: str
) -> None:
    probe = Served(small)
    probe.ask(box_question(1), "x")
    size = probe.core.sessions.find("a", "x").residency.nbytes
    served = Served(small, device=3 * size + size // 2, eviction=eviction)
    for number, (name, steps) in enumerate({"soon": 1, "late": 5}.items()):
        served.ask(box_question(number), name, steps={"": steps})
    others = 0
    while all(each.residency.tier == "device" for each in served.core.sessions):
        served.ask(box_question(7 + others), f"new {others}", steps={f"new {others}": 2})
        others += 1
    assert served.core.sessions.find("a", leaves).residency.tier == "host"


def ask(hub: LocalEngineClient, name: str, tenant: str, steps: Mapping[str, int]) -> None:
    client = Waiting()
    request = Request(tenant, tuple(box_question(1)), name, max_new_tokens=2, steps=steps)
    hub.submit(request, client)
    assert client.over.wait(30)


def test_workflow_steps_are_set_by_name_within_a_tenant(small: LoadedModel) -> None:
    with closing(
        LocalEngineClient(Engine(small, policy="full"), EngineOptions(eviction="kvflow"))
    ) as hub:
        for tenant in "ab":
            ask(hub, "planner", tenant, {"": 2})
        ask(hub, "critic", "a", {"planner": 7, "critic": 3, "nobody": 1})
        sessions = hub.context.core.sessions
        told_of = {(each.tenant, each.name): each.usage.workflow_steps for each in sessions}
        assert told_of == {("a", "planner"): 7, ("b", "planner"): 2, ("a", "critic"): 3}
        ask(hub, "critic", "b", {})
        assert sessions.find("b", "critic").usage.workflow_steps == math.inf


def test_think_times_are_recorded_and_survive_a_restart(small: LoadedModel, tmp_path: Path) -> None:
    first = Stored(small, tmp_path)
    turns, ends = box_question(1), list[float]()
    for _ in range(3):
        turns = answered(turns, first.ask(turns, "x"), "Why?")
        ends.append(first.core.find("a", "x").usage.answered)
    session = first.core.find("a", "x")
    client, ticket = first.served.submit(turns, "x")
    ticket.cancel()
    first.run()
    assert client.result.reason == "cancelled" and session.usage.answered == ends[-1]
    pauses = list(session.usage.think_times)
    assert len(pauses) == 2 and 0 < pauses[0] < ends[1] - ends[0]
    first.close()
    again = Stored(small, tmp_path)
    back = again.core.find("a", "x")
    assert list(back.usage.think_times) == pauses and back.usage.answered > 0
    again.close()
