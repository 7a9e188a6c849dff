"""Priorities of requests, preemption, and prefill between decode steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from larder.models import LoadedModel
from larder.server import MIN_MOVES, PROBE_INTERVAL, ChatMessage, HostMoveRates
from larder.store import Tier
from server_core import POLICIES, Client, Served, answered, box_question

LONG = box_question(2, 12)
REST = ((1, None), (1, 0), (30, 0))  # steps before an urgent request, and room on the host


def room(loaded: LoadedModel, policy: str, turns: Any, new_tokens: int) -> int:
    """Device bytes of one such request alone."""
    served = Served(loaded, policy)
    served.ask(turns, "x", max_new_tokens=new_tokens)
    return served.core.reservations.peak


def reserved(loaded: LoadedModel, policy: str, turns: Any, new_tokens: int) -> int:
    """Device bytes that count on the quota of the tenant of such a request."""
    served = Served(loaded, policy)
    served.submit(turns, max_new_tokens=new_tokens)
    served.step()
    return served.core.ledger.used(Tier.DEVICE, "a")


def finished(served: Served, clients: dict[str, Client]) -> list[str]:
    """Names of requests in the order in which they end."""
    order = list[str]()
    for _ in range(2000):
        served.step()
        order += [n for n, each in clients.items() if each.report and n not in order]
        if len(order) == len(clients):
            return order
        assert not any(each.error for each in clients.values())
    raise AssertionError(f"after many steps only {order} have ended")


def test_lower_priority_values_run_first(small: LoadedModel) -> None:
    served = Served(small, device=int(1.2 * room(small, "full", box_question(1), 4)))
    clients = {
        f"{priority} {n}": served.submit(box_question(n + 10 * priority), priority=priority)[0]
        for n, priority in enumerate((2, 1, 1, 0, 2))
    }
    assert finished(served, clients) == ["0 3", "1 1", "1 2", "2 0", "2 4"]
    assert served.core.scheduler.preemptions == 0


def test_prefill_and_decode_follow_priority(small: LoadedModel) -> None:
    served = Served(small, "full", prefill_chunk=16, rows=1)
    late = {"late": served.submit(LONG, tenant="a", priority=1, max_new_tokens=8)[0]}
    for _ in range(2):
        served.step()
    first = {"first": served.submit(box_question(3, 12), tenant="b", max_new_tokens=8)[0]}
    assert finished(served, late | first) == ["first", "late"]
    assert not late["late"].text or late["late"].result


def test_equal_priorities_share_by_tokens_served(small: LoadedModel) -> None:
    """Two tenants read equally many tokens although one has four times as many requests."""
    served = Served(small, "full", prefill_chunk=16)
    flood = [served.submit(box_question(n, 12), tenant="a", priority=3)[0] for n in range(4)]
    served.submit(box_question(9, 12), tenant="b", priority=3)
    served.submit(box_question(8, 12), tenant="b", priority=3)
    served.submit(box_question(7, 2), tenant="c", priority=4)
    for _ in range(24):
        served.step()
        one, other = (served.core.scheduler._served[tenant] for tenant in "ab")
        assert abs(one - other) <= 2 * 16
    assert served.core.scheduler._served["c"] == 0 and not any(each.report for each in flood)


@pytest.mark.extended
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(
    ("steps", "host"), [(30, None), *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
)
def test_preempted_answer_resumes_unchanged(
    small: LoadedModel, policy: str, steps: int, host: int | None
) -> None:
    alone = Served(small, policy)
    turns = box_question(1)
    before = alone.ask(turns, "x", max_new_tokens=6)
    more = answered(turns, before, LONG[0].text)
    expected = alone.ask(more, "x", max_new_tokens=40)
    urgent_text = alone.ask(box_question(5, 12), max_new_tokens=4).text

    device = int(1.3 * room(small, policy, more, 40))
    served = Served(small, policy, device=device, host=500_000 if host is None else 150_000)
    assert served.ask(turns, "x", max_new_tokens=6).text == before.text
    slow, _ = served.submit(more, "x", priority=5, max_new_tokens=40)
    for _ in range(steps):
        served.step()
    assert slow.report is None
    urgent, _ = served.submit(box_question(5, 12), tenant="b", max_new_tokens=4)
    assert finished(served, {"slow": slow, "urgent": urgent}) == ["urgent", "slow"]
    assert served.core.scheduler.preemptions == 1
    assert urgent.text == urgent_text and slow.text == expected.text
    for name in ("prompt_tokens", "new_tokens", "session", "reason"):
        assert getattr(slow.result, name) == getattr(expected.result, name)
    served.core.tiers.lower(Tier.DEVICE, 10 * device)
    following = answered(more, slow, "And now?")
    assert served.ask(following, "x").text == alone.ask(following, "x").text


@pytest.mark.parametrize("policy", ["full", pytest.param("limited", marks=pytest.mark.slow)])
def test_cancelled_preempted_request_leaves_the_session_unchanged(
    small: LoadedModel, policy: str
) -> None:
    turns = box_question(1)
    device = int(1.3 * room(small, policy, LONG, 40))
    served, alone = Served(small, policy, device=device), Served(small, policy)
    before = served.ask(turns, "x")
    alone.ask(turns, "x")
    slow, ticket = served.submit(
        answered(turns, before, LONG[0].text), "x", priority=1, max_new_tokens=40
    )
    for _ in range(25):
        served.step()
    urgent, _ = served.submit(box_question(5, 10), max_new_tokens=30)
    while not served.core.scheduler.preemptions:
        served.step()
    ticket.cancel()
    served.run()
    assert slow.result.reason == "cancelled" and urgent.result.new_tokens == 30
    again = answered(turns, before, "Which box?")
    assert served.ask(again, "x").text == alone.ask(again, "x").text
    assert served.core.sessions.find("a", "x").transcript.epoch == 2


def test_request_is_not_preempted_by_equal_priority(small: LoadedModel) -> None:
    served = Served(small, device=int(1.2 * room(small, "full", LONG, 40)))
    first, _ = served.submit(LONG, priority=1, max_new_tokens=40)
    served.step()
    second, _ = served.submit(box_question(4, 10), tenant="b", priority=1)
    assert finished(served, {"first": first, "second": second}) == ["first", "second"]
    assert served.core.scheduler.preemptions == 0


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["full", "limited"])
def test_exhausted_tenant_quota_does_not_preempt_others(small: LoadedModel, policy: str) -> None:
    quota = int(1.2 * reserved(small, policy, LONG, 40))
    served = Served(small, policy, quotas={Tier.DEVICE: quota})
    first, _ = served.submit(LONG, tenant="a", max_new_tokens=40)
    other, _ = served.submit(box_question(3), tenant="b", priority=5, max_new_tokens=40)
    served.step()
    waiting, _ = served.submit(box_question(5, 12), tenant="a", max_new_tokens=40)
    late, _ = served.submit(box_question(6), tenant="c", priority=5, max_new_tokens=4)
    served.step()
    assert sorted(state.session.tenant for state in served.core.scheduler.running) == [
        "a",
        "b",
        "c",
    ]
    clients = {"first": first, "other": other, "waiting": waiting, "late": late}
    order = finished(served, clients)
    assert order.index("first") < order.index("waiting")
    assert served.core.scheduler.preemptions == 0


def test_tenant_at_its_quota_preempts_its_own_requests(small: LoadedModel) -> None:
    quota = int(1.2 * reserved(small, "full", LONG, 40))
    served = Served(small, quotas={Tier.DEVICE: quota})
    slow, _ = served.submit(LONG, tenant="a", priority=1, max_new_tokens=40)
    other, _ = served.submit(box_question(3), tenant="b", priority=9, max_new_tokens=60)
    served.step()
    urgent, _ = served.submit(box_question(5, 12), tenant="a", max_new_tokens=4)
    order = finished(served, {"slow": slow, "urgent": urgent, "other": other})
    assert order.index("urgent") < order.index("slow")
    assert served.core.scheduler.preemptions == 1


@pytest.mark.extended
def test_shortage_of_host_memory_preempts_no_device_request(small: LoadedModel) -> None:
    """A turn of a chat counts on host memory; an exact answer has none to give."""

    def started(host: int | None) -> tuple[Served, list[list[ChatMessage]]]:
        served = Served(small, "limited", host=host)
        return served, [
            answered(box_question(n), served.ask(box_question(n), name), "Why?")
            for n, name in ((1, "c"), (2, "j"))
        ]

    ample, turns = started(None)
    idle = ample.core.ledger.used(Tier.HOST)
    ample.submit(turns[0], "c", max_new_tokens=30)
    ample.step()
    turn = ample.core.ledger.used(Tier.HOST) - idle
    served, turns = started(idle + int(1.7 * turn))
    exact, _ = served.submit(LONG, "e", priority=5, exact=True, max_new_tokens=60)
    first, _ = served.submit(turns[0], "c", max_new_tokens=30)
    served.step()
    assert len(served.core.scheduler.running) == 2
    second, _ = served.submit(turns[1], "j", max_new_tokens=4)
    served.step()
    assert [state.session.name for state in served.core.scheduler.queue] == ["j"]
    clients = {"exact": exact, "first": first, "second": second}
    order = finished(served, clients)
    assert order.index("first") < order.index("second")
    assert served.core.scheduler.preemptions == 0


@contextmanager
def prompt_tokens(served: Served) -> Iterator[list[int]]:
    """Tokens of prompts that each prefill block reads."""
    counts = list[int]()
    read = served.core.engine.loaded.decoder.read

    def counting(rows: Any, *more: Any, **named: Any) -> Any:
        counts.append(sum(len(row.ids) for row in rows))
        return read(rows, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.core.engine.loaded.decoder, "read", counting)
        yield counts


@pytest.mark.parametrize(
    ("policy", "chunk"),
    [
        ("full", None),
        pytest.param("full", 7, marks=pytest.mark.slow),
        pytest.param("limited", None, marks=pytest.mark.slow),
    ],
)
def test_prefill_tokens_between_decode_steps_are_bounded(
    small: LoadedModel, policy: str, chunk: int | None
) -> None:
    served = Served(small, policy, prefill_chunk=chunk)
    bound = chunk or served.core.serving.block
    quick = [served.submit(box_question(n, 1), max_new_tokens=60)[0] for n in range(2)]
    running = served.core.scheduler.running
    while len(running) < 2 or any(not state.answer.output_ids for state in running):
        served.step()
    states, steps = list(running), 0
    long = [
        served.submit(box_question(n, 30), tenant=tenant)[0] for n, tenant in ((4, "b"), (5, "c"))
    ]
    with prompt_tokens(served) as counts:
        while any(each.report is None for each in long) and len(states[0].answer.output_ids) < 50:
            numbers, before = [len(state.answer.output_ids) for state in states], len(counts)
            served.step()
            assert sum(counts[before:]) <= bound
            steps += 1
            if policy == "full":  # under a policy with blocks a step may end one instead
                added = zip(states, numbers, strict=True)
                assert all(
                    len(state.answer.output_ids) > n for state, n in added if state in running
                )
    assert steps > 2 and len(counts) > 2 and quick


def test_cache_is_recomputed_when_moving_it_is_slower() -> None:
    rates = HostMoveRates()
    assert not rates.is_slower(10**9, 1e-9), "nothing is known"
    for _ in range(MIN_MOVES):
        rates.note(1000, 1.0)
    assert not rates.is_slower(1000, 1.0)
    decisions = [rates.is_slower(1001, 1.0) for _ in range(2 * PROBE_INTERVAL)]
    assert decisions.count(False) == 2, "a slow move is measured again at times"
    rates.note(10_000, 1.0)
    assert not rates.is_slower(10_000, 1.0)


@pytest.mark.parametrize("is_slow", [False, True])
def test_evicted_sessions_take_the_cheaper_of_offload_and_drop(
    small: LoadedModel, is_slow: bool
) -> None:
    served = Served(small, device=int(1.2 * room(small, "full", box_question(1), 4)))
    for _ in range(MIN_MOVES):
        served.core.tiers.rates.note(1 if is_slow else 10**12, 1.0)
    turns = box_question(1)
    first = served.ask(turns, "x")
    served.ask(box_question(3), "y")
    tiers = served.core.tiers
    assert (tiers.parked["host"] > 0) is not is_slow and (tiers.dropped > 0) is is_slow
    tiers.lower(Tier.DEVICE, 10**6)
    again = served.ask(answered(turns, first, "Why?"), "x")
    assert (again.result.recomputed_tokens > 0) is is_slow
    assert again.text == Served(small).ask(answered(turns, first, "Why?"), "x").text
