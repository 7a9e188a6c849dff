"""Further choices of a prompt, and scored prompts, which leave no session."""

from __future__ import annotations

from dataclasses import replace

import pytest

from larder.engine import SamplingParams
from larder.models import LoadedModel
from larder.server import Request
from larder.store import Tier
from server_core import LIMITED, STEPWISE, Client, Served, answered, box_question, user

DRAWN = SamplingParams(temperature=1.0, seed=7)


def requests(turns: list, count: int, session: str | None = None) -> list[Request]:
    first = Request("a", tuple(turns), session, DRAWN, 9, choice_group="g")
    seeds = [replace(DRAWN, seed=DRAWN.seed + number) for number in range(count)]
    return [replace(first, choice=n, sampling=seed) for n, seed in enumerate(seeds)]


def answers(served: Served, several: list[Request], together: bool) -> list[Client]:
    """Answers to requests; the others follow once the first has read, or has ended."""
    clients, tickets = [Client(served=served) for _ in several], list[object]()
    for request, client in zip(several, clients, strict=True):
        tickets.append(served.core.submit(request, client, served.core.clock()))
        while request is several[0] and not client.text and served.step():
            pass
        if not together:
            served.run()
    served.run()
    return clients


@pytest.mark.extended
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("policy", ["full", LIMITED, STEPWISE])
def test_choices_match_single_requests(small: LoadedModel, policy: str, together: bool) -> None:
    served, alone = Served(small, policy, tokens=64), Served(small, policy, tokens=64)
    first = served.ask(box_question(1), "x")
    turns = answered(box_question(1), first, "And what does the next box hold?")
    clients = answers(served, requests(turns, 3, "x"), together)
    for number, client in enumerate(clients):
        name = f"s{number}"
        alone.ask(box_question(1), name)
        seed = replace(DRAWN, seed=DRAWN.seed + number)
        expected = alone.ask(turns, name, sampling=seed, max_new_tokens=9)
        assert client.result.new_tokens and client.text == expected.text
    assert [session.name for session in served.core.sessions] == ["x"]
    solo = Served(small, policy, tokens=64)
    solo.ask(box_question(1), "x")
    answers(solo, requests(turns, 1, "x"), together)
    for tier in (Tier.DEVICE, Tier.HOST):
        assert served.core.ledger.used(tier) == solo.core.ledger.used(tier)
    assert served.ask(answered(turns, clients[0], "So?"), "x").result.session == "x"


def test_choices_prefill_the_prompt_once(small: LoadedModel) -> None:
    served = Served(small)
    _, *others = answers(served, requests(box_question(3), 3), together=True)
    length = others[0].result.prompt_tokens
    assert [each.result.cached_tokens for each in others] == [length - 1] * 2


def test_further_choices_under_a_budget_prefill_the_conversation(small: LoadedModel) -> None:
    served = Served(small, LIMITED, tokens=64)
    turns = answered(box_question(1), served.ask(box_question(1), "x"), "And the next box?")
    first, *others = (each.result for each in answers(served, requests(turns, 3, "x"), True))
    assert first.cached_tokens > 0 == first.recomputed_tokens
    for each in others:
        assert (each.cached_tokens, each.recomputed_tokens) == (0, first.cached_tokens)


def test_scored_prompt_ends_with_a_generated_stop_token(small: LoadedModel) -> None:
    text, stop = "Box 7 holds 12 coins.", small.tokenizer.eos_token_id
    scored = {"raw_prompt": text, "logprobs": 1, "prompt_logprobs": True, "max_new_tokens": 1}
    params = SamplingParams(logit_bias={stop: 100.0})
    client = Served(small).ask([], sampling=params, **scored)
    assert [each.token for each in client.logprobs] == [*map(ord, text), stop]
    assert not client.text.strip(text)


@pytest.mark.parametrize("policy", ["full", LIMITED])
def test_scored_prompt_leaves_no_session(small: LoadedModel, policy: str) -> None:
    served, full = Served(small, policy), Served(small)
    text = "Box 7 holds 12 coins. " * 5
    scored = {"raw_prompt": text, "logprobs": 1, "prompt_logprobs": True, "max_new_tokens": 1}
    for _ in range(2):
        client, other = served.ask([], **scored), full.ask([], **scored)
        assert [each.token for each in client.logprobs[:-1]] == [ord(sign) for sign in text]
        assert client.logprobs == other.logprobs
        assert client.result.cached_tokens == 0
    assert not list(served.core.sessions) and served.core.ledger.used(Tier.DEVICE) == 0


def test_cancelled_first_choice_does_not_stop_the_others(small: LoadedModel) -> None:
    served = Served(small)
    first, *others = requests([user("Who is there, and who is not?")], 2)
    client, other = Client(served=served), Client(served=served)
    ticket = served.core.submit(first, client, served.core.clock())
    while not client.text:
        served.step()
    served.core.submit(others[0], other, served.core.clock())
    ticket.cancel()
    served.run()
    assert client.result.reason == "cancelled" and other.result.new_tokens > 0
    assert not list(served.core.sessions)
