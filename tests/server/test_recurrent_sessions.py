"""Sessions of a model with recurrent layers: each has its state, also when they run together."""

from __future__ import annotations

from functools import cache

import pytest

from architectures.families import families
from larder.models import LoadedModel, wrap_model
from server_core import POLICIES, Served, answered, characters, told


@cache
def hybrid() -> LoadedModel:
    [family] = [family for family in families() if family.name == "LFM2"]
    return LoadedModel(wrap_model(family.model()), characters().tokenizer, "hybrid")


@pytest.mark.extended
@pytest.mark.parametrize("policy", POLICIES)
def test_sessions_answer_as_each_alone(policy: str) -> None:
    together, alone = Served(hybrid(), policy), Served(hybrid(), policy)
    texts = {number: told(number) for number in range(3)}
    for more in ("Why?", "Sure?"):
        own = {n: alone.ask(turns, f"n{n}").text for n, turns in texts.items()}
        clients = {n: together.submit(turns, f"n{n}")[0] for n, turns in texts.items()}
        together.run()
        assert {n: client.text for n, client in clients.items()} == own
        texts = {n: answered(turns, clients[n], more) for n, turns in texts.items()}
    assert together.core.scheduler.steps < alone.core.scheduler.steps


def test_a_state_serves_its_whole_text_alone() -> None:
    """A longer text continues a session, an edited one is read from the start."""
    edited, continued = Served(hybrid()), Served(hybrid())
    first = [each.ask(told(1), "x") for each in (edited, continued)]
    assert edited.ask(answered(told(1), first[0], "Why?"), "x").told.cached_tokens > 0
    asked = [each.ask(answered(told(1), first[0], "How?"), "x") for each in (edited, continued)]
    assert asked[0].told.cached_tokens == 0 < asked[1].told.cached_tokens
    assert asked[0].text == asked[1].text
