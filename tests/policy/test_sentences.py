"""Sentences: they end at their last tokens, across passes too."""

from __future__ import annotations

import pytest

from builders import a_layer, a_plan, draw, layer_options
from larder import Policy
from larder.cache import RaggedLayer
from larder.core import Ledger, Observation
from larder.policy import ENDS, TALLIES
from larder.session import TokenizerAdapter

LAYER = a_layer(2, 1)
DOT = 9


class Text:
    """A layer that reads tokens of which `DOT` ends a sentence."""

    def __init__(self) -> None:
        self.store = RaggedLayer(LAYER, layer_options(ledger=Ledger(("sentence",))))
        self.position = 0

    def read(self, *ids: int) -> None:
        new = draw(LAYER, len(ids), self.position)
        self.store.append(new.keys, new.values, new.positions)
        self.position += len(ids)
        observation = Observation(
            LAYER,
            self.store.entries(),
            queries=new.queries,
            query_positions=new.positions,
            length=self.position,
            span=(0, self.position),
            ids=ids,
            lexicon={ENDS: frozenset({DOT})},
        )
        self.store.write_columns(TALLIES.load("sentence")().update(observation))

    def sentences(self, head: int) -> list[float]:
        entries = self.store.entries()
        return entries.columns["sentence"][entries.rows(head)].tolist()


def test_sentence_ends_at_its_last_token() -> None:
    text = Text()
    text.read(1, 1, DOT, 1, DOT, DOT, 1)
    assert text.sentences(0) == text.sentences(1) == [1, 1, -1, 4, -4, -6, 7]


def test_sentence_continues_across_blocks() -> None:
    text = Text()
    text.read(1, DOT, 1, 1)
    text.read(1, DOT, 1)
    text.read(DOT)
    text.read(1)
    assert text.sentences(0) == [1, -1, 3, 3, 3, -3, 7, -7, 9]


def test_sentence_restarts_after_an_evicted_last_token() -> None:
    text = Text()
    text.read(1, DOT, 1, 1)
    text.store.evict(a_plan([[0, 2, 3], [0, 1, 2]], (4, 4)))
    text.read(1, DOT, 1)
    assert text.sentences(0) == [1, 3, 3, 3, -3, 7]
    assert text.sentences(1) == [1, -1, 3, 5, -5, 7]


def test_ended_sentence_does_not_continue() -> None:
    text = Text()
    text.read(1, DOT)
    text.read(1, 1)
    assert text.sentences(0) == [1, -1, 3, 3]


def test_planner_declares_the_sentence_column() -> None:
    assert Policy.parse("keydiff() > sentence()").planner.ledger.columns == ("sentence",)


@pytest.fixture(scope="module")
def adapter(seed_model) -> TokenizerAdapter:
    return TokenizerAdapter(seed_model.tokenizer)


def test_sentence_ends_are_read_from_the_tokenizer(adapter) -> None:
    ends = adapter.lexicon(frozenset({ENDS}))[ENDS]
    assert adapter.lexicon(frozenset()) == {}
    for text in (".", "?", "!", "\n"):
        assert adapter.encode(f"word{text}")[-1] in ends, text
    for text in ("word", ",", ":", ";", " and"):
        assert not set(adapter.encode(text)) & ends, text
    assert set(adapter.tokenizer.all_special_ids) <= ends
