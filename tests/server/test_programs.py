"""Order of programs in the queue, and predicted pauses of their tools."""

from __future__ import annotations

from typing import Any

import pytest

from larder.models import LoadedModel
from larder.server import ChatMessage, SchedulingPolicy, request_queue
from server_core import Client, Served, answered, box_question, user

PROGRAMS = SchedulingPolicy.PROGRAM_FCFS


def one_at_a_time(loaded: LoadedModel, scheduling: SchedulingPolicy) -> Served:
    """A server with memory for one conversation."""
    probe = Served(loaded)
    probe.ask(box_question(1, 5), "x")
    device = int(1.3 * probe.core.reservations.peak)
    return Served(loaded, device=device, host=60_000, scheduling=scheduling)


def finished(served: Served, clients: dict[str, Client]) -> list[str]:
    """Names in the order in which their answers end."""
    order = list[str]()
    while len(order) < len(clients):
        served.step()
        order += [n for n, each in clients.items() if each.report is not None and n not in order]
    return order


@pytest.mark.parametrize(
    ("scheduling", "order"),
    [
        (SchedulingPolicy.PRIORITY, ["running", "new 0", "new 1", "old"]),
        (PROGRAMS, ["running", "old", "new 0", "new 1"]),
    ],
)
def test_started_program_precedes_new_programs_under_program_fcfs(
    small: LoadedModel, scheduling: SchedulingPolicy, order: list[str]
) -> None:
    served = one_at_a_time(small, scheduling)
    turns = box_question(1, 3)
    first = served.ask(turns, "old", program="P")
    names = ("running", "new 0", "new 1")
    clients = {n: served.submit(box_question(k, 5), n)[0] for k, n in enumerate(names, start=2)}
    served.step()
    clients["old"], _ = served.submit(answered(turns, first, "Why?"), "old", program="P")
    assert finished(served, clients) == order


def test_new_programs_are_not_starved(small: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "MAX_PASSED_REQUESTS", 5)
    served = one_at_a_time(small, PROGRAMS)
    turns = {name: box_question(number, 5) for number, name in enumerate(("old 0", "old 1"))}
    clients = {name: served.submit(own, name)[0] for name, own in turns.items()}
    new, rounds = served.submit(box_question(7, 5), "new")[0], 0
    while new.report is None and rounds < 12:
        served.step()
        for name, client in clients.items():
            if client.report is not None:
                turns[name], rounds = box_question(rounds, 5), rounds + 1
                clients[name] = served.submit(turns[name], name, program=name)[0]
    assert new.report is not None and 5 <= rounds <= 8


def test_resident_sessions_go_first_after_priority(small: LoadedModel) -> None:
    served = Served(small, scheduling=PROGRAMS)
    turns, rank = box_question(1), served.core.scheduler.queue.policy.first
    first = served.ask(turns, "held")
    states = [served.submit(box_question(number), f"n{number}")[1] for number in (2, 3)]
    again = served.submit(answered(turns, first, "Why?"), "held")[1]
    urgent = served.submit(box_question(4), "urgent", priority=-1)[1]
    assert rank([*states, again]) is again and rank(states) is states[0]  # pyright: ignore
    assert rank([urgent, *states, again]) is urgent  # pyright: ignore
    served.run()


def test_uncontended_requests_are_admitted_at_once(small: LoadedModel) -> None:
    served = Served(small, scheduling=PROGRAMS)
    turns = {name: box_question(number) for number, name in enumerate("ab")}
    for _ in range(3):
        clients = {name: served.submit(own, name)[0] for name, own in turns.items()}
        served.step()
        assert not len(served.core.scheduler.queue)
        served.run()
        turns = {name: answered(turns[name], clients[name], "Why?") for name in turns}


def test_program_is_named_by_the_request_or_is_a_session_with_its_branches(
    small: LoadedModel,
) -> None:
    served = Served(small, scheduling=PROGRAMS)
    turns = box_question(1)
    served.ask(turns, "x")
    served.ask(box_question(2), "planner", program="run")
    new: Any = served.submit(box_question(3), "new")[1]
    critic: Any = served.submit(box_question(4), "critic", program="run")[1]
    other = [*turns, ChatMessage("assistant", "None."), user("Why?")]
    branch: Any = served.submit(other, "x")[1]
    assert branch.session.name == "x~2"
    assert branch.program_order < critic.program_order < new.program_order
    served.run()


def test_predicted_pauses_of_a_new_tool_are_those_of_its_tenant(small: LoadedModel) -> None:
    served = Served(small, eviction="continuum")
    turns = box_question(1)
    for number in range(3):
        client = served.ask(turns, "x", tool="test")
        turns = answered(turns, client, f"Why {number}?")
    usage = served.core.sessions.find("a", "x").usage
    assert len(usage.pause.pauses) == 2 and min(usage.pause.pauses) > 0 < usage.pause.wait_seconds
    assert usage.pause.pauses == tuple(usage.think_times)
    served.ask(box_question(2), "y", tool="lint")
    assert served.core.sessions.find("a", "y").usage.pause.pauses == usage.pause.pauses
    served.ask(box_question(3), "z", tenant="b", tool="test")
    assert served.core.sessions.find("b", "z").usage.pause.pauses == ()


def two_programs(loaded: LoadedModel, is_old_resident: bool) -> tuple[Served, dict[str, Client]]:
    """Requests of an old program, and of a later one whose cache is in memory."""
    served = Served(loaded, scheduling=PROGRAMS, prefill_chunk=16)
    turns, long = {"old": box_question(1), "held": box_question(2)}, box_question(3, 5)[0].text
    clients = {name: served.ask(own, name, program=name) for name, own in turns.items()}
    if not is_old_resident:
        served.core.tiers.drop(served.core.sessions.find("a", "old"))
    for name, own in turns.items():
        more = answered(own, clients[name], long)
        clients[name] = served.submit(more, name, program=name)[0]
    return served, clients


@pytest.mark.parametrize(
    ("is_resident", "order"), [(True, ["old", "held"]), (False, ["held", "old"])]
)
def test_prompts_are_prefilled_in_admission_order(
    small: LoadedModel, is_resident: bool, order: list[str]
) -> None:
    served, clients = two_programs(small, is_resident)
    assert finished(served, clients) == order


@pytest.mark.parametrize(("passed", "order"), [(64, ["held", "old"]), (63, ["old", "held"])])
def test_overtaken_request_is_prefilled_first(
    small: LoadedModel, passed: int, order: list[str]
) -> None:
    served, clients = two_programs(small, is_old_resident=True)
    [held] = [state for state in served.core.scheduler.queue if state.session.name == "held"]
    held.passed = passed
    assert finished(served, clients) == order


def test_prompts_are_not_starved_by_old_programs(
    small: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "MAX_PASSED_REQUESTS", 3)
    served, _ = two_programs(small, is_old_resident=True)
    read, scheduler = list[str](), served.core.scheduler
    while len(read) < 8 and served.step():
        read += [
            state.session.name
            for state in scheduler.running
            if state.prefill.passed_blocks == 0 and not state.prefill.is_done
        ]
    assert read == ["old", "old", "old", "held", "old", "old", "old", "held"]
