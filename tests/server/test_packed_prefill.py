"""Packing of several prompts into one forward batch or into decode steps."""

from __future__ import annotations

from typing import Any

import pytest

from larder.core import CacheError
from larder.models import Decoder
from larder.server.session_backend import base
from server_core import Client, Served, answered, box_question, characters


@pytest.fixture
def passes(monkeypatch) -> list[list[int]]:
    """Tokens of each row of the passes that read without logits, all prompts among them."""
    monkeypatch.setattr(base, "SHORT_TAIL_TOKENS", 0)
    found: list[list[int]] = []
    read = Decoder.read

    def recording(self: Decoder, segments: Any, *args: Any, **named: Any) -> Any:
        found.append([len(each.ids) for each in segments])
        return read(self, segments, *args, **named)

    monkeypatch.setattr(Decoder, "read", recording)
    return found


def served_characters(passes: list[list[int]], *args: Any, **named: Any) -> Served:
    """Server whose model has been verified; the passes of the verification are not recorded."""
    served = Served(characters(), *args, **named)
    passes.clear()
    return served


def asked(served: Served, count: int, sentences: int = 2) -> list[Client]:
    return [
        served.submit(box_question(number, sentences), f"s{number}")[0] for number in range(count)
    ]


def test_simultaneous_prompts_are_packed_in_one_forward_batch(passes) -> None:
    alone = served_characters(passes)
    expected = [alone.ask(box_question(number), f"s{number}").text for number in range(4)]
    singles = list(passes)
    served = served_characters(passes)
    clients = asked(served, 4)
    served.run()
    assert [client.text for client in clients] == expected
    assert len(singles) == 4 and len(passes) == 1
    assert passes == [[count for (count,) in singles]]
    assert served.core.scheduler.blocks == 1
    for number, client in enumerate(clients):
        turn = alone.core.find("a", f"s{number}").turns[0]
        assert client.result.prompt_tokens == len(turn.prompt_ids)
        turns = answered(box_question(number), client, "And the next one?")
        assert served.ask(turns, f"s{number}").text == alone.ask(turns, f"s{number}").text


def test_packed_batch_is_at_most_one_block(passes) -> None:
    served = served_characters(passes, prefill_chunk=128)
    asked(served, 4, sentences=1)
    served.run()
    assert any(len(rows) > 1 for rows in passes)
    assert max(map(sum, passes)) <= 128


def test_blocks_of_unpackable_policies_are_prefilled_separately(passes) -> None:
    served = served_characters(passes, "limited")
    asked(served, 3)
    served.run()
    assert {len(rows) for rows in passes} == {1}


def test_prompts_with_logprobs_are_prefilled_separately(passes) -> None:
    served = served_characters(passes)
    scored, _ = served.submit(box_question(0), "s0", prompt_logprobs=True, logprobs=0)
    asked_later, _ = served.submit(box_question(1), "s1")
    served.run()
    assert scored.result.new_tokens and asked_later.result.new_tokens
    assert {len(rows) for rows in passes} == {1}


def test_failed_packed_batch_is_retried_one_by_one(monkeypatch) -> None:
    expected = [Served(characters()).ask(box_question(number)).text for number in range(3)]
    read = Decoder.read

    def refusing(self: Decoder, segments: Any, *args: Any, **named: Any) -> Any:
        if len(segments) > 1:
            raise CacheError("no memory for several")
        return read(self, segments, *args, **named)

    monkeypatch.setattr(Decoder, "read", refusing)
    served = Served(characters())
    clients = asked(served, 3)
    served.run()
    assert [client.text for client in clients] == expected


def test_failing_request_of_a_packed_batch_fails_alone(monkeypatch) -> None:
    """The pass of all fails as long as it is among them, and then its own."""
    read = Decoder.read

    def refusing(self: Decoder, segments: Any, *args: Any, **named: Any) -> Any:
        if any(len(each.ids) > 100 for each in segments):
            raise CacheError("too long")
        return read(self, segments, *args, **named)

    monkeypatch.setattr(Decoder, "read", refusing)
    served = Served(characters())
    first, _ = served.submit(box_question(0, 8), "s0")
    others = [served.submit(box_question(number, 1), f"s{number}")[0] for number in (1, 2)]
    served.run()
    assert isinstance(first.error, CacheError)
    assert all(client.result.new_tokens for client in others)


@pytest.fixture
def steps(monkeypatch) -> list[list[int]]:
    """Tokens of each row of the passes with logits."""
    found: list[list[int]] = []
    forward = Decoder.forward_logits

    def recording(self: Decoder, segments: Any, *args: Any, **named: Any) -> Any:
        found.append([len(each.ids) for each in segments])
        return forward(self, segments, *args, **named)

    monkeypatch.setattr(Decoder, "forward_logits", recording)
    return found


def test_short_prompts_are_prefilled_in_decode_steps(steps) -> None:
    alone = Served(characters())
    expected = [alone.ask(box_question(number, 1), f"s{number}").text for number in range(4)]
    steps.clear()
    served = Served(characters())
    first = asked(served, 1, sentences=1)
    for _ in range(3):
        served.core.step()
    others = [served.submit(box_question(number, 1), f"s{number}")[0] for number in range(1, 4)]
    served.run()
    assert [client.text for client in (*first, *others)] == expected
    assert served.core.scheduler.blocks == 0
    mixed = [rows for rows in steps if 1 in rows and max(rows) > 1]
    assert mixed
    assert max(map(max, steps)) <= base.SHORT_TAIL_TOKENS
    for number, client in enumerate((*first, *others)):
        turns = answered(box_question(number, 1), client, "And the next one?")
        assert served.ask(turns, f"s{number}").text == alone.ask(turns, f"s{number}").text


def test_short_prompts_that_arrive_together_start_in_one_step(steps) -> None:
    alone = Served(characters())
    expected = [alone.ask(box_question(number, 1), f"s{number}").text for number in range(4)]
    served = Served(characters())
    steps.clear()  # of the verification of the model
    clients = asked(served, 4, sentences=1)
    served.run()
    assert [client.text for client in clients] == expected
    assert len(steps[0]) == 4 and sum(steps[0]) > base.SHORT_TAIL_TOKENS
    assert sum(steps[0]) <= served.core.serving.block
    assert all(set(rows) == {1} for rows in steps[1:])


def test_prompt_tokens_of_one_step_are_at_most_a_block(steps) -> None:
    served = Served(characters())
    steps.clear()
    asked(served, 1, sentences=1)
    served.run()
    most = 2 * max(steps[0])
    served = Served(characters(), prefill_chunk=most)
    steps.clear()
    clients = asked(served, 5, sentences=1)
    served.run()
    assert all(client.result.new_tokens for client in clients)
    ends = [[count for count in rows if count > 1] for rows in steps]
    assert max(map(len, ends)) == 2
    assert max(map(sum, ends)) <= most


def test_long_prompt_progresses_beside_short_ones(steps) -> None:
    served = Served(characters(), prefill_chunk=64)
    long, _ = served.submit(box_question(0, 12), "long")
    shorts = list[Client]()
    while long.report is None and len(steps) < 200:
        shorts.append(served.submit(box_question(len(shorts), 1), None)[0])
        served.core.step()
    served.run()
    assert long.result.new_tokens and len(shorts) < 200
    assert all(sum(n for n in rows if n > 1) <= 64 for rows in steps)
    assert all(short.result.new_tokens for short in shorts)
