"""Conclusions that the server benchmarks draw from measurements."""

from __future__ import annotations

from array import array
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random

import pytest
import torch

from larder import Engine
from larder.core import Mode, Question
from larder.models import BatchSegment
from larder.server import TOKEN_TYPECODE
from server_core import Served, answered, box_question, characters, encode_session

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def among_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_growth_is_distinguished_from_noise() -> None:
    growth, rng = import_module("_growth").growth, Random(0)
    seconds = [float(second) for second in range(400)]
    noise = [1000 + rng.gauss(0, 20) for _ in seconds]
    rising = [value + second / 5 for value, second in zip(noise, seconds, strict=True)]
    assert not growth(seconds, noise).is_real(5.0)
    found = growth(seconds, rising)
    assert found.is_real(5.0) and found.low < 0.2 < found.high
    assert not found.is_real(200.0)
    assert not growth(seconds, rising[::-1]).is_real(5.0)


def test_diverging_answers_are_judged_by_the_top_two_logits() -> None:
    divergence = import_module("_answer_divergence")
    served = Served(characters())
    turns = box_question(1)
    first = served.ask(turns, "x")
    served.ask(answered(turns, first, "Why?"), "x")
    exported = divergence.exported_turns(encode_session(served.core.sessions.find("a", "x")))
    engine = Engine(characters(), policy="full")
    assert divergence.first_divergence(engine, exported, exported) is None
    other = array(TOKEN_TYPECODE, exported[1].answer_ids)
    other[2] += 1
    found = divergence.first_divergence(
        engine, exported, [exported[0], replace(exported[1], answer_ids=other)]
    )
    assert found is not None and (found.exchange, found.place) == (1, 2)
    before = [
        *exported[0].prompt_ids,
        *exported[0].answer_ids,
        *exported[1].prompt_ids,
        *exported[1].answer_ids[:2],
    ]
    cache, decoder = served.core.serving.empty_cache(), engine.loaded.decoder
    logits = decoder.forward_logits(
        [BatchSegment(cache, tuple(before))], Mode.APPEND, [len(before) - 1]
    )[0]
    best, second = torch.topk(logits, 2).values.tolist()
    assert found.gap == pytest.approx(best - second, abs=1e-4)
    assert found.is_close == (found.gap < 1e-3)
    with pytest.raises(ValueError, match="2 turns against 1"):
        divergence.first_divergence(engine, exported, exported[:1])


@pytest.mark.parametrize(("search_ms", "rate"), [(2, 0.040), (30, 0.175)])
def test_response_cache_pays_from_the_published_hit_rates(search_ms: float, rate: float) -> None:
    """By hand: (6.3 + 2) / 207 and (6.3 + 30) / 207; the quotients without 6.3 are .010, .145."""
    found = import_module("response_cache").break_even_hit_rate(6.3, search_ms, 207)
    assert found == pytest.approx(rate, abs=5e-4)


def test_contexts_one_by_one_follow_those_of_the_request_before() -> None:
    benchmark = import_module("context_order")
    question = Question("Where?", "Berlin")
    asked = [benchmark.ContextRequest(question, contexts) for contexts in ("ab", "cba", "dbc")]
    orders = [contexts.texts for contexts in benchmark.one_by_one(asked)]
    assert ["".join(texts[:3]) for texts in orders] == ["ab", "abc", "dbc"]
