"""Scheduling of many conversations: equal answers, fairness and budgets."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from larder import LarderError
from larder.models import LoadedModel
from larder.server import MAX_PASSED_BLOCKS, ApiError, ChatMessage
from larder.store import Tier
from server_core import POLICIES, Served, answered, box_question, characters, user

MODES = sorted(POLICIES)


def need(loaded: LoadedModel, policy: str) -> int:
    """Bytes that one of the conversations below may come to."""
    served = Served(loaded, policy)
    turns = box_question(11)
    served.ask(answered(turns, served.ask(turns, "x"), "Why?"), "x")
    return served.core.reservations.peak


@pytest.mark.extended
@pytest.mark.parametrize(
    ("policy", "sessions", "fitting"), [("full", 6, 3), ("limited", 6, 2), ("stepwise", 5, 1)]
)
def test_sessions_beyond_the_budget_match_single_sessions(
    small: LoadedModel, policy: str, sessions: int, fitting: int
) -> None:
    crowd = Served(small, policy, device=fitting * need(small, policy))
    alone = Served(small, policy)
    texts: dict[int, list[ChatMessage]] = {
        number: box_question(number) for number in range(sessions)
    }
    for more in ("Why?", "Sure?"):
        own = {n: alone.ask(turns, f"n{n}").text for n, turns in texts.items()}
        clients = {n: crowd.submit(turns, f"n{n}")[0] for n, turns in texts.items()}
        crowd.run()
        assert {n: client.text for n, client in clients.items()} == own
        texts = {n: answered(turns, clients[n], more) for n, turns in texts.items()}
    assert crowd.core.tiers.parked["host"] > 0 < crowd.core.tiers.restored["host"]
    if fitting > 1:  # steps of several at once
        assert crowd.core.scheduler.steps < alone.core.scheduler.steps


def test_request_is_served_when_other_tenants_fill_the_device(small: LoadedModel) -> None:
    served = Served(small, device=int(1.9 * need(small, "full")), host=50_000)
    for tenant in "abca":
        assert served.ask(box_question(11), "x", tenant=tenant).result.new_tokens


def test_prompts_are_prefilled_while_writes_complete(small: LoadedModel) -> None:
    served = Served(small)
    client, _ = served.submit(box_question(11, 20), "x")
    for _ in range(90):
        ended = Future[None]()
        ended.set_result(None)
        served.core.completions.when_done(ended, lambda _: None)
        served.step()
    assert client.result.new_tokens


@pytest.mark.extended
@pytest.mark.parametrize("policy", MODES)
def test_dropped_cache_is_recomputed_to_the_same_answer(small: LoadedModel, policy: str) -> None:
    kept, lost = Served(small, policy), Served(small, policy, host=300_000)
    turns, told_lost = box_question(1, 3), None
    for more in ("And 8?", "Why?"):
        first = kept.ask(turns, "x")
        told_lost = lost.ask(turns, "x")
        assert told_lost.text == first.text
        turns = answered(turns, first, more)
        lost.core.tiers.drop(lost.core.sessions.find("a", "x"))
    assert told_lost is not None and told_lost.result.recomputed_tokens > 0
    assert told_lost.result.cached_tokens == 0


def test_long_prompt_does_not_stall_decoding(small: LoadedModel) -> None:
    served = Served(small, "limited")
    short, _ = served.submit(box_question(1, 1), max_new_tokens=16)
    while not short.text:
        served.step()
    long, _ = served.submit(box_question(2, 12))
    served.run()
    assert long.result.prompt_tokens > 10 * served.core.serving.block
    between = [after - before for before, after in zip(short.steps, short.steps[1:], strict=False)]
    assert max(between) <= 2  # a token may finish no character: text then comes with the next one


def test_prefill_in_chunks_gives_the_same_answer(small: LoadedModel) -> None:
    answers = list[str]()
    for chunk in (None, 7):
        served = Served(small, prefill_chunk=chunk)
        long, _ = served.submit(box_question(2, 12), max_new_tokens=8)
        served.run()
        least = 1 if chunk is None else long.result.prompt_tokens // chunk
        assert served.core.scheduler.blocks >= least
        answers.append("".join(long.text))
    assert answers[0] == answers[1]
    assert served.core.scheduler.blocks > 10


@pytest.mark.extended
def test_second_tenant_is_served_before_the_rest_of_a_flood(small: LoadedModel) -> None:
    served = Served(small, "limited")
    flood = [served.submit(box_question(number, 8))[0] for number in range(3)]
    served.step()
    other, _ = served.submit(box_question(5, 4), tenant="b", max_new_tokens=1)
    while other.report is None:
        served.step()
    own = -(-other.result.prompt_tokens // served.core.serving.block) + 2  # and to end the turn
    assert served.core.scheduler.blocks <= 2 * own + 2
    assert all(client.report is None for client in flood)
    served.run()
    assert all(client.result.new_tokens for client in flood)


@pytest.mark.failure(number=19)
@pytest.mark.parametrize(
    ("policy", "steps"),
    [("full", 0), ("full", 1), ("full", 12), ("limited", 2), ("limited", 9), ("stepwise", 9)],
)
def test_cancelled_request_releases_everything(small: LoadedModel, policy: str, steps: int) -> None:
    served, other = Served(small, policy), Served(small, policy)
    turns = box_question(1)
    before = served.ask(turns, "x")
    other.ask(turns, "x")
    used = served.core.ledger.used(Tier.DEVICE)
    client, ticket = served.submit(
        answered(turns, before, "And " + box_question(2, 5)[0].text), "x", max_new_tokens=40
    )
    new, new_ticket = served.submit(box_question(3, 5), max_new_tokens=40)
    for _ in range(steps):
        served.step()
    assert client.report is None
    ticket.cancel()
    new_ticket.cancel()
    served.step()
    assert client.result.reason == new.result.reason == "cancelled"
    assert served.core.ledger.used(Tier.DEVICE) <= used
    assert [each.name for each in served.core.sessions] == ["x"]
    assert served.core.sessions.find("a", "x").transcript.epoch == 1
    again = answered(turns, before, "Which box?")
    assert served.ask(again, "x").text == other.ask(again, "x").text


@pytest.mark.failure(number=19)
def test_cancelled_request_truncates_a_copied_cache(small: LoadedModel) -> None:
    served, other, turns = Served(small), Served(small), box_question(1)
    before = served.ask(turns, "x")
    other.ask(turns, "x")
    served.core.fork("a", "x", "y")
    line = box_question(2, 5)[0].text
    served.ask(answered(turns, before, f"{line} Why?"), "y")
    session = served.core.sessions.find("a", "x")
    served.core.tiers.drop(session)
    more = answered(turns, before, f"{line} Which box?")
    client, ticket = served.submit(more, "x", max_new_tokens=40)
    served.step()
    text = session.transcript.ids
    assert len(session.residency.cached_ids) > len(text), "copied with a part of the prompt"
    ticket.cancel()
    served.step()
    assert client.result.reason == "cancelled"
    cached = session.residency.cached_ids
    assert cached and cached == text[: len(cached)]
    assert served.ask(more, "x").text == other.ask(more, "x").text


@pytest.mark.extended
def test_failing_sequence_of_a_batch_fails_alone(small: LoadedModel) -> None:
    served, alone = Served(small, "stepwise"), Served(small, "stepwise")
    clients = [served.submit(box_question(number), max_new_tokens=20)[0] for number in range(3)]
    while len([state for state in served.core.scheduler.running if state.answer.output_ids]) < 3:
        served.step()
    broken = served.core.scheduler.running[1]
    broken.cache.invalidate()
    served.run()
    failed = [client for client in clients if client.error is not None]
    assert len(failed) == 1 and broken.listener is failed[0]
    for number, client in enumerate(clients):
        if client is not failed[0]:
            assert client.text == alone.ask(box_question(number), max_new_tokens=20).text
    assert len(list(served.core.sessions)) == 2


def test_failing_listener_fails_alone(small: LoadedModel) -> None:
    served = Served(small)

    def fail(text: str) -> None:
        raise IndexError(text)

    good, bad = served.submit(box_question(1))[0], served.submit(box_question(2))[0]
    bad.on_text = fail  # type: ignore[method-assign]
    served.run()
    assert isinstance(bad.error, IndexError) and good.result.new_tokens == 4


@pytest.mark.failure(number=24)
def test_request_larger_than_the_budget_is_refused(small: LoadedModel) -> None:
    served = Served(small, device=60_000)
    with pytest.raises(ApiError, match="have that limit raised") as caught:
        served.submit(box_question(1, 30))
    assert (caught.value.status, caught.value.code) == (400, "kv_budget_exceeded")
    assert not list(served.core.sessions) and served.core.ledger.used(Tier.DEVICE) == 0
    with pytest.raises(ApiError, match="shorten") as caught:
        Served(small).submit([user("word " * 1000)])
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.failure(number=24)
def test_lowered_budget_is_enforced_at_once(small: LoadedModel) -> None:
    served = Served(small, device=20_000_000, host=20_000_000)
    for number in range(4):
        served.ask(box_question(number), f"n{number}")
    half = served.core.ledger.used(Tier.DEVICE) // 2
    assert served.core.tiers.lower(Tier.DEVICE, half) == 0
    served.check()
    served.core.tiers.lower(Tier.DEVICE, 1000)
    client, _ = served.submit(box_question(1)[:1], "n1")  # the very same request needs no memory
    assert client.result.new_tokens
    assert served.core.tiers.lower(Tier.HOST, 12_000) == 0
    served.check()


@pytest.mark.extended
@pytest.mark.parametrize(
    "policy",
    [
        *("kivi_blockwise", "sirllm", "kvzip_blockwise"),
        "blockwise() > sinks_and_window() > uniform() > cam() > every_step()",
    ],
)
def test_policies_hold_at_most_their_reservation(small: LoadedModel, policy: str) -> None:
    served = Served(small, policy, tokens=48)
    turns = box_question(1, 6)
    more = answered(turns, served.ask(turns, "x"), "Why?")
    client = served.ask(more, "x", max_new_tokens=8)
    assert not client.result.lossless and served.core.reservations.violations == 0


def test_sliding_window_answers_match_after_a_cancellation_and_an_edit() -> None:
    windows = characters("gemma3")
    crowd, alone = Served(windows, device=220_000), Served(windows)
    texts: dict[int, list[ChatMessage]] = {number: box_question(number) for number in range(3)}
    for more in ("Why?", "Sure?"):
        clients = {n: crowd.submit(turns, f"n{n}")[0] for n, turns in texts.items()}
        gone, ticket = crowd.submit(box_question(7), "gone")
        crowd.step()
        ticket.cancel()
        crowd.run()
        assert gone.result.reason == "cancelled"
        for number, client in clients.items():
            assert client.text == alone.ask(texts[number], f"n{number}").text
        edited = [*texts[0][:-1], user("Who?")]
        assert crowd.ask(edited, "n0").text == alone.ask(edited, "n0").text
        texts = {n: answered(turns, clients[n], more) for n, turns in texts.items()}


@pytest.mark.parametrize("length", [800, 1000])
def test_window_caches_of_long_prompts_stay_within_their_reservation(length: int) -> None:
    """A window keeps a block in front of the latest one, for a rollback."""
    served = Served(characters("gemma3", layers=3))
    client = served.ask([user("x" * length)], "x", max_new_tokens=3)  # checks after each step
    assert client.result.prompt_tokens >= length


@pytest.mark.parametrize(
    ("policy", "way"),
    [
        ("icecache", "raise the budget"),
        ("exact_question", "question"),
        ("snapkv_blockwise", "raise the budget"),
    ],
)
def test_unservable_policy_is_refused_at_startup(small: LoadedModel, policy: str, way: str) -> None:
    with pytest.raises(LarderError, match=way):
        Served(small, policy, tokens=256 if policy == "exact_question" else 32)


@pytest.mark.extended
def test_queue_keeps_places_for_other_tenants(small: LoadedModel) -> None:
    served = Served(small)  # with 64 places
    with pytest.raises(ApiError, match="wait for") as caught:
        for number in range(64):
            served.submit(box_question(number))
    error = caught.value
    assert (error.status, error.code) == (429, "too_many_requests") and error.retry_after
    assert len(served.core.scheduler.queue) == len(served.core.sessions) == 32
    for _ in range(16):
        other, _ = served.submit(box_question(5), tenant="b")
    with pytest.raises(ApiError):
        served.submit(box_question(5), tenant="b")
    served.run()
    assert other.result.new_tokens and served.ask(box_question(50)).result.new_tokens


def test_full_queue_refuses_requests(small: LoadedModel) -> None:
    served = Served(small)
    with pytest.raises(ApiError) as caught:
        for number in range(100):
            served.submit(box_question(1), tenant=f"t{number}")
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    assert len(served.core.scheduler.queue) == 64


@pytest.mark.extended
def test_long_prompt_is_not_starved_by_short_ones(small: LoadedModel) -> None:
    served, number = Served(small, "limited"), 100
    scheduler = served.core.scheduler
    long, _ = served.submit(box_question(1, 6), max_new_tokens=1)
    served.step()
    [state] = scheduler.running
    most = (state.prefill.remaining_blocks + 1) * (MAX_PASSED_BLOCKS + 3)
    while long.report is None and scheduler.blocks < most:
        while len(scheduler.queue) + len(scheduler.running) < 3:
            number += 1
            served.submit(box_question(number, 1), max_new_tokens=1)
        served.step()
    assert long.result.new_tokens == 1
    assert scheduler.blocks > 2 * long.result.prompt_tokens // 16  # others were read between
