"""Recall measure: share of an answer's attention that the recalled pages hold.

A conversation is read under a policy that parks, and the expected answers are given token by token.
At every step and layer, what was fetched is held against the keys with the largest products of all
that are parked, query head by query head. Mao et al., "IceCache: Memory-efficient KV-cache
Management for Long-Sequence LLMs" (2026), arXiv:2604.10539, section 3.2 and figure 3. There the
largest are looked for among what their index says are the k largest; here, among all entries of the
pages that it fetches, as only these are attended to. Queries are those of the policy's own pass,
which has attended to recalled pages at the steps before.

Policies are compared over the same layers, those from `first` on, and by one rule of sharing: a kv
head has as many pages as the policy fetches, which its query heads name in turn, the best of each
first. Where a policy lets query heads choose for themselves, this is not what they attended to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.forms.tiered import TieredLayer
from larder.cache.offload.page_fetch import PageSelection
from larder.cache.sequence import SequenceCache
from larder.core.errors import BadParameter, UsageError
from larder.core.types import Mode
from larder.engine.engine import Engine
from larder.models.forward_batch import BatchSegment as Tokens
from larder.models.forward_batch import LayerActivations
from larder.ops.search import interleaved
from larder.session.memory import ConversationMemory
from larder_bench.measures.base import Measure
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.scoring.item_scores import NumberedQuestion
from larder_bench.studies.cells import Cell
from larder_bench.studies.methods import PolicyMethod
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import ContextReader, number_questions

RANKS = (1, 3, 5)
NAMES = {rank: f"recall_{rank}" for rank in RANKS}
RecallPlace = tuple[int, int, int]  # question, layer, step


@dataclass(frozen=True)
class RecallMeasure(Measure):
    """Recall of the largest products.

    Args:
        questions: that are asked, the first of a conversation.
        steps: tokens of each answer, at most.
        first: the first layer that counts. Policies leave different numbers of layers dense.
    """

    questions: int = 12
    steps: int = 10
    first: int = 2

    def __post_init__(self) -> None:
        for name, value in (("questions", self.questions), ("steps", self.steps)):
            if value < 1:
                raise BadParameter(f"recall.{name} must be 1 or more, got {value}.")
        if self.first < 0:
            raise BadParameter(f"recall.first must be 0 or more, got {self.first}.")

    def measure(self, bench: ModelContext, cell: Cell, guess: float | None) -> Row:
        _check(cell, self.first)
        readings = ContextReader.of(bench, replace(cell, is_shown=False), guess)
        heard = _RecallTally(self.first)
        sittings = number_questions(cell.task, readings.conversation)
        asked = [one for sitting in sittings for one in sitting]
        memory = readings.read(asked[0].question)
        for one in asked[: self.questions]:
            heard.question = one.number
            cache = self._answer(bench.engine, memory, one, heard)
        recall = memory.policy.recall
        assert recall is not None  # looked at
        shown = heard.exhibits(recall.tokens or 0)
        index = _index_figures(cache.tiers)
        return readings.figures() | index | {"items": heard.items(), EXHIBITS_KEY: shown}

    def _answer(
        self, engine: Engine, memory: ConversationMemory, one: NumberedQuestion, heard: _RecallTally
    ) -> SequenceCache:
        """Give the expected answer over a fork of the cache, heard step by step."""
        cache = memory.activate_for(one.question.question)[0].fork()
        wrapped = memory.conversation.question_prompt.format(question=one.question.question)
        decoder, scribe = engine.loaded.decoder, engine.tokenizer
        decoder.read([Tokens(cache, scribe.encode_question(wrapped))], Mode.APPEND)
        answer = scribe.encode(one.question.answer)[: self.steps]
        for step, token in enumerate(answer):

            def hear(_: int, layer: int, made: LayerActivations, step: int = step) -> None:
                heard.hear(cache, layer, step, made.queries[:, -1])

            decoder.read([Tokens(cache, (token,))], Mode.APPEND, hear)
        return cache


@dataclass
class _RecallTally:
    """What was found from a first layer on, by question, layer and step; means over query heads."""

    first: int
    question: int = 0
    found: dict[RecallPlace, Mapping[str, float]] = field(default_factory=dict)

    def hear(
        self, cache: SequenceCache, layer: int, step: int, queries: Float[Tensor, "H D"]
    ) -> None:
        """Look at what a layer has just fetched, if it has."""
        tier = cache.stores[layer]
        if layer < self.first or not isinstance(tier, TieredLayer) or not tier.has_offloaded:
            return
        choice = tier.finder.choice or (tier.leader and tier.leader.finder.choice)
        if choice:
            numbers = _of_kv_heads(tier, queries, choice)
            self.found[self.question, layer, step] = _layer_recall(tier, queries, numbers)

    def items(self) -> list[Row]:
        """One per question and layer, over the steps of its answer."""
        pairs = dict.fromkeys((question, layer) for question, layer, _ in self.found)
        return [
            {"kind": f"layer {layer}", "question": question, "turn": 0, "depth": None}
            | _means(own for (q, at, _), own in self.found.items() if (q, at) == (question, layer))
            | {"counts": True}
            for question, layer in pairs
        ]

    def exhibits(self, fetched: int) -> list[Row]:
        """One for each layer and step, over all questions, and one over everything."""
        pairs = dict.fromkeys((layer, step) for _, layer, step in self.found)
        rows = [
            _exhibit(fetched, *pair, (o for (_, *at), o in self.found.items() if (*at,) == pair))
            for pair in pairs
        ]
        return [*rows, _exhibit(fetched, None, None, self.found.values())] if rows else []


def _of_kv_heads(
    tier: TieredLayer, queries: Float[Tensor, "H D"], choice: PageSelection
) -> Int64[Tensor, "K P S"]:
    """The entries of the pages found, a set for all query heads of a kv head."""
    heads, recall = tier.layer.kv_heads, tier.parking.recall
    if len(choice.pages) == heads:
        return choice.numbers
    finder, pages = tier.finder, choice.pages
    if tier.leader is not None and tier.finder.choice is None:
        finder = tier.leader.finder
    else:  # the choice is cut to what query heads share
        pages = finder.look(queries[:, None], tier.parked()).pages
    return finder.shared_index.index.contents(interleaved(pages, heads, recall.pages))


def _layer_recall(
    tier: TieredLayer, queries: Float[Tensor, "H D"], numbers: Int64[Tensor, "K P S"]
) -> Mapping[str, float]:
    """Of the parked entries of one layer: which of the largest products were fetched, and how much
    attention is paid to what was, and to what always stays.
    """
    parked, stays, layer = tier.parked(), tier.entries(), tier.layer
    each: list[Mapping[str, float]] = []
    for head, query in enumerate(queries.float().cpu()):
        own, row = head // layer.group, head * len(numbers) // layer.query_heads
        products = parked.head_keys(own).float().cpu() @ query
        beside = stays.head_keys(own).float().cpu() @ query
        is_found = torch.zeros(len(products), dtype=torch.bool)
        held = numbers[row]
        is_found[held[held >= 0]] = True
        order = products.argsort(descending=True)
        weights = (torch.cat([products, beside]) * layer.scaling).softmax(-1)[: len(products)]
        near = 1 - float(weights.sum())
        told = {NAMES[rank]: float(is_found[order[:rank]].float().mean()) for rank in RANKS}
        told["mass"] = near + float(weights[is_found].sum())
        told["possible"] = near + float(weights[order[: int(is_found.sum())]].sum())
        each.append(told)
    return _means(each)


def _means(told: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each number."""
    rows = list(told)
    return {name: round(fmean(row[name] for row in rows), 5) for name in rows[0]}


def _exhibit(
    fetched: int, layer: int | None, step: int | None, told: Iterable[Mapping[str, float]]
) -> Row:
    means = _means(told)
    recalled = {str(rank): means[name] for rank, name in NAMES.items()}
    place = {"layer": layer, "step": None if step is None else step + 1}
    return {"row": "recall", "fetched_tokens": fetched, **place, "recall": recalled}


def _index_figures(tiers: Sequence[TieredLayer]) -> Row:
    """Bytes of the indexes per key, and the fill of their pages."""
    used = [tier for tier in tiers if tier.has_offloaded and tier.finder.shared_index.is_used]
    keys = sum(sum(tier.parked().lengths) for tier in used)
    if not keys:
        return {}
    indexes = [tier.finder.shared_index.index for tier in used]
    room = sum(sum(index.counts) * index.page for index in indexes)
    nbytes = sum(tensor.nbytes for index in indexes for tensor in index.tensors())
    return {"index_bytes_per_key": round(nbytes / keys, 2), "page_fill": round(keys / room, 4)}


def _check(cell: Cell, first: int) -> None:
    """Raises: UsageError: nothing is parked, or not in all the layers that count."""
    if not isinstance(cell.subject, PolicyMethod) or cell.subject.variant.policy.recall is None:
        raise UsageError(
            f"{cell.subject.name} parks nothing, so nothing is recalled: take a policy with "
            "park(), such as icecache, and --control none."
        )
    dense = cell.subject.variant.policy.recall.dense
    if dense > first:
        raise UsageError(
            f"{cell.subject.name} leaves its first {dense} layers dense, but recall counts from "
            f"layer {first} on: give recall(first={dense}) or fewer dense layers."
        )


Part = RecallMeasure
