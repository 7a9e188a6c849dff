"""Recall measure: share of an answer's attention that the recalled pages hold.

A conversation is read under a policy that offloads, and the expected answers are decoded token by
token. At every step and layer, the fetched pages are compared with the offloaded keys with the
largest products, query head by query head. Mao et al., "IceCache: Memory-efficient KV-cache
Management for Long-Sequence LLMs" (2026), arXiv:2604.10539, section 3.2 and figure 3. They look for
the largest among the k largest of their index; here it is all entries of the fetched pages, as only
these are attended to. Queries are those of the policy's own pass, which attended to recalled pages
at the previous steps.

Policies are compared over the same layers, from `first` on, and with the same sharing: a kv head
has as many pages as the policy fetches, chosen by its query heads in turn, best first. If a policy
lets query heads choose separately, they attended to other pages than these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache import PageSelection, SequenceCache, TieredLayer
from larder.core import BadParameter, Mode, UsageError
from larder.engine import Engine
from larder.models import BatchSegment as Tokens
from larder.models import LayerActivations
from larder.ops import cap_logits, interleaved, sink_logits, softmax_with_sinks
from larder.session import ConversationMemory
from larder_bench.measures.base import Measure
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.scoring.item_scores import NumberedQuestion
from larder_bench.studies.cells import Cell
from larder_bench.studies.methods import PolicyMethod
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import ConversationReader, number_questions

RANKS = (1, 3, 5)
NAMES = {rank: f"recall_{rank}" for rank in RANKS}
RecallPlace = tuple[int, int, int]  # question, layer, step


@dataclass(frozen=True)
class RecallMeasure(Measure):
    """Recall of the largest products.

    Args:
        questions: number of questions, the first ones of a conversation.
        steps: maximum number of tokens of each answer.
        first: first layer that counts. Policies leave different numbers of layers dense.
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

    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        _check(cell, self.first)
        reader = ConversationReader.of(bench, replace(cell, has_exhibits=False), tokens_per_byte)
        tally = _RecallTally(self.first)
        sequences = number_questions(cell.task, reader.conversation)
        questions = [one for sequence in sequences for one in sequence]
        memory = reader.read(questions[0].question)
        for one in questions[: self.questions]:
            tally.question = one.number
            cache = self._answer(bench.engine, memory, one, tally)
        recall = memory.policy.recall
        assert recall is not None  # checked by _check
        exhibits = tally.exhibits(recall.tokens or 0)
        index = _index_figures(cache.tiers)
        return reader.figures() | index | {"items": tally.items(), EXHIBITS_KEY: exhibits}

    def _answer(
        self, engine: Engine, memory: ConversationMemory, one: NumberedQuestion, tally: _RecallTally
    ) -> SequenceCache:
        """Decode the expected answer on a fork of the cache and record the recall of each step."""
        cache = memory.activate_for(one.question.question)[0].fork()
        decoder, tokenizer = engine.loaded.decoder, engine.tokenizer
        prompt = tokenizer.encode_question_about(memory.conversation, one.question)
        decoder.read([Tokens(cache, prompt)], Mode.APPEND)
        answer = tokenizer.encode(one.question.prefixed_answer)[: self.steps]
        for step, token in enumerate(answer):

            def observe(
                _: int, layer: int, activations: LayerActivations, step: int = step
            ) -> None:
                tally.observe(cache, layer, step, activations.queries[:, -1])

            decoder.read([Tokens(cache, (token,))], Mode.APPEND, observe)
        return cache


@dataclass
class _RecallTally:
    """Recall from a first layer on, by question, layer and step; means over query heads."""

    first: int
    question: int = 0
    values: dict[RecallPlace, Mapping[str, float]] = field(default_factory=dict)

    def observe(
        self, cache: SequenceCache, layer: int, step: int, queries: Float[Tensor, "H D"]
    ) -> None:
        """Record the recall of the pages that a layer has just fetched, if any."""
        tier = cache.layers[layer]
        if layer < self.first or not isinstance(tier, TieredLayer) or not tier.has_offloaded:
            return
        choice = tier.fetcher.selection or (tier.leader and tier.leader.fetcher.selection)
        if choice:
            numbers = _of_kv_heads(tier, queries, choice)
            self.values[self.question, layer, step] = _layer_recall(tier, queries, numbers)

    def items(self) -> list[Row]:
        """Items, one per question and layer, over the steps of its answer."""
        pairs = dict.fromkeys((question, layer) for question, layer, _ in self.values)
        return [
            {"kind": f"layer {layer}", "question": question, "turn": 0, "depth": None}
            | _means(row for (q, at, _), row in self.values.items() if (q, at) == (question, layer))
            | {"counts": True}
            for question, layer in pairs
        ]

    def exhibits(self, fetched: int) -> list[Row]:
        """Exhibits, one per layer and step over all questions, and one over everything."""
        pairs = dict.fromkeys((layer, step) for _, layer, step in self.values)
        rows = [
            _exhibit(fetched, *pair, (o for (_, *at), o in self.values.items() if (*at,) == pair))
            for pair in pairs
        ]
        return [*rows, _exhibit(fetched, None, None, self.values.values())] if rows else []


def _of_kv_heads(
    tier: TieredLayer, queries: Float[Tensor, "H D"], choice: PageSelection
) -> Int64[Tensor, "K P S"]:
    """Entries of the fetched pages, one set for all query heads of a kv head."""
    heads, recall = tier.layer.kv_heads, tier.parking.recall
    if len(choice.pages) == heads:
        return choice.numbers
    fetcher, pages = tier.fetcher, choice.pages
    if tier.leader is not None and tier.fetcher.selection is None:
        fetcher = tier.leader.fetcher
    else:  # the selection is limited to pages that query heads share
        pages = fetcher.search(queries[:, None], tier.parked()).pages
    return fetcher.shared_index.index.contents(interleaved(pages, heads, recall.pages))


def _layer_recall(
    tier: TieredLayer, queries: Float[Tensor, "H D"], numbers: Int64[Tensor, "K P S"]
) -> Mapping[str, float]:
    """Recall and attention of one layer's offloaded entries: which of the largest products were
    fetched, and the attention on fetched and resident entries.
    """
    parked, resident, layer = tier.parked(), tier.entries(), tier.layer
    each: list[Mapping[str, float]] = []
    for head, query in enumerate(queries.float().cpu()):
        kv_head, row = head // layer.group, head * len(numbers) // layer.query_heads
        products = parked.head_keys(kv_head).float().cpu() @ query
        resident_products = resident.head_keys(kv_head).float().cpu() @ query
        is_fetched = torch.zeros(len(products), dtype=torch.bool)
        fetched = numbers[row]
        is_fetched[fetched[fetched >= 0]] = True
        order = products.argsort(descending=True)
        logits = torch.cat([products, resident_products]) * layer.scaling
        sink = sink_logits(layer, logits)[head : head + 1]
        both = softmax_with_sinks(cap_logits(logits, layer.softcap)[None], sink)[0]
        weights = both[: len(products)]
        resident_mass = 1 - float(weights.sum())
        values = {NAMES[rank]: float(is_fetched[order[:rank]].float().mean()) for rank in RANKS}
        values["mass"] = resident_mass + float(weights[is_fetched].sum())
        values["possible"] = resident_mass + float(weights[order[: int(is_fetched.sum())]].sum())
        each.append(values)
    return _means(each)


def _means(values: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each number."""
    rows = list(values)
    return {name: round(fmean(row[name] for row in rows), 5) for name in rows[0]}


def _exhibit(
    fetched: int, layer: int | None, step: int | None, values: Iterable[Mapping[str, float]]
) -> Row:
    means = _means(values)
    recalled = {str(rank): means[name] for rank, name in NAMES.items()}
    labels = {"layer": layer, "step": None if step is None else step + 1}
    return {"row": "recall", "fetched_tokens": fetched, **labels, "recall": recalled}


def _index_figures(tiers: Sequence[TieredLayer]) -> Row:
    """Bytes of the indexes per key, and the fill of their pages."""
    used = [tier for tier in tiers if tier.has_offloaded and tier.fetcher.shared_index.is_used]
    keys = sum(sum(tier.parked().lengths) for tier in used)
    if not keys:
        return {}
    indexes = [tier.fetcher.shared_index.index for tier in used]
    capacity = sum(sum(index.counts) * index.page for index in indexes)
    nbytes = sum(tensor.nbytes for index in indexes for tensor in index.tensors())
    return {"index_bytes_per_key": round(nbytes / keys, 2), "page_fill": round(keys / capacity, 4)}


def _check(cell: Cell, first: int) -> None:
    """Check that a cell's policy offloads entries of all layers that count.

    Raises:
        UsageError: it offloads nothing, or not in all of these layers.
    """
    if not isinstance(cell.subject, PolicyMethod) or cell.subject.variant.policy.recall is None:
        raise UsageError(
            f"{cell.subject.name} offloads nothing, so nothing is recalled: take a policy with "
            "park(), such as icecache, and --control none."
        )
    dense = cell.subject.variant.policy.recall.dense
    if dense > first:
        raise UsageError(
            f"{cell.subject.name} leaves its first {dense} layers dense, but recall counts from "
            f"layer {first} on: give recall(first={dense}) or fewer dense layers."
        )


Part = RecallMeasure
