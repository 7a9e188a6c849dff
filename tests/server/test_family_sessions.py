"""Batched sessions of models with recurrent layers, latents or shared entries."""

from __future__ import annotations

import pytest

from server_core import POLICIES, Served, answered, box_question, family_characters

HYBRID = "LFM2"
CASES = [
    *(pytest.param(HYBRID, policy, 3, id=f"{HYBRID}-{policy}") for policy in POLICIES),
    *(
        pytest.param(name, policy, 2, id=f"{name}-{policy}")
        for name in ("DeepSeek-V2", "Gemma 3n")
        for policy in ("full", "stepwise")
    ),
]


@pytest.mark.extended
@pytest.mark.parametrize("name, policy, count", CASES)
def test_batched_sessions_match_single_sessions(name: str, policy: str, count: int) -> None:
    together, alone = (Served(family_characters(name), policy) for _ in range(2))
    texts = {number: box_question(number) for number in range(count)}
    for more in ("Why?", "Sure?"):
        own = {n: alone.ask(turns, f"n{n}").text for n, turns in texts.items()}
        clients = {n: together.submit(turns, f"n{n}")[0] for n, turns in texts.items()}
        together.run()
        assert {n: client.text for n, client in clients.items()} == own
        texts = {n: answered(turns, clients[n], more) for n, turns in texts.items()}
    assert together.core.scheduler.steps < alone.core.scheduler.steps


def test_recurrent_state_is_reused_for_its_whole_text_only() -> None:
    """A longer text continues a session, an edited one is read from the start."""
    edited, continued = (Served(family_characters(HYBRID)) for _ in range(2))
    first = [each.ask(box_question(1), "x") for each in (edited, continued)]
    assert edited.ask(answered(box_question(1), first[0], "Why?"), "x").result.cached_tokens > 0
    asked = [
        each.ask(answered(box_question(1), first[0], "How?"), "x") for each in (edited, continued)
    ]
    assert asked[0].result.cached_tokens == 0 < asked[1].result.cached_tokens
    assert asked[0].text == asked[1].text
