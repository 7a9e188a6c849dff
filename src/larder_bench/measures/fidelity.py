"""Fidelity of a policy to the full cache on any text: KL divergence, likeliest token, attention
kept.

No answers are needed: after each token of the real continuation it measures KL(full || policy) in
nats, whether the likeliest token is the same, the likelihood of the real one, and the share of the
full cache's attention on entries that were kept. Policies with a cache per episode use the one that
the last message is routed to. Offloaded entries count as lost attention until they are recalled,
but the distributions attend to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core import BadParameter, UsageError
from larder.session import ConversationMemory, Policy, prefill_memory, resolve_budget
from larder_bench.measures.base import Measure
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.scoring.full_cache_reference import FullCacheReference
from larder_bench.scoring.kl_divergence import kl_divergence
from larder_bench.studies.cells import Cell
from larder_bench.studies.exhibits import exhibit_rows
from larder_bench.studies.methods import PolicyMethod, QuestionScope
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.target_size import TargetSize, row_figures


@dataclass(frozen=True)
class Fidelity(Measure):
    """Next-token distributions compared with those of the full cache.

    Args:
        following: number of compared tokens.
    """

    following: int = 128

    def __post_init__(self) -> None:
        if self.following < 2:
            raise BadParameter(f"fidelity.following must be 2 or more, got {self.following}.")

    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        policy = _policy(cell)
        conversation = bench.conversation(cell.task, cell.seed, cell.tokens)
        truth = bench.reference(conversation, self.following)
        spec, context = bench.engine.loaded.decoder.spec, len(truth.passage.source.ids)

        def read(tokens: int | None) -> ConversationMemory:
            size = None if tokens is None else str(tokens)
            sized = policy.with_sizes(resolve_budget(policy, size, context, spec), None)
            return prefill_memory(bench.engine.runtime, truth.passage.source, sized, {})

        if cell.amount is None:
            memory, tries = read(None), 1
        else:
            fit = TargetSize(cell.amount, cell.matched, context, spec).read(read, tokens_per_byte)
            memory, tries = fit.result, fit.tries
        figures = row_figures(memory.figures) | (
            {EXHIBITS_KEY: exhibit_rows(memory)} if cell.has_exhibits else {}
        )
        return figures | {"reads": tries, "items": fidelity_items(truth, memory)}


def _policy(cell: Cell) -> Policy:
    """Policy of a cell.

    Raises:
        UsageError: the cell's method needs a question.
    """
    if (
        not isinstance(cell.subject, PolicyMethod)
        or cell.subject.scope is not QuestionScope.CONTEXT
    ):
        raise UsageError(
            f"{cell.subject.name} needs a question, but fidelity asks none: leave it out."
        )
    return cell.subject.variant.policy


def fidelity_items(truth: FullCacheReference, memory: ConversationMemory) -> list[Row]:
    """Items, one per token of the continuation except the first."""
    logits, cache = truth.expected(memory)
    real = torch.tensor(truth.passage.following[1:], device=logits.device)[:, None]
    likelihoods = logits[:-1].log_softmax(-1).gather(1, real)[:, 0]
    same = (truth.logits.argmax(-1) == logits.argmax(-1))[:-1]
    scores = zip(
        kl_divergence(truth.logits, logits)[:-1].tolist(),
        same.tolist(),
        likelihoods.tolist(),
        truth.attention_mass_kept(cache)[:-1].tolist(),
        strict=True,
    )
    return [
        {
            "kind": "token",
            "question": index,
            "turn": 0,
            "depth": None,
            "kl": round(kl, 5),
            "same": is_same,
            "log_likelihood": round(likelihood, 4),
            "mass": round(mass, 5),
            "counts": True,
        }
        for index, (kl, is_same, likelihood, mass) in enumerate(scores)
    ]


Part = Fidelity
