"""Divergence of a policy's cache from the full one at equal bytes, from one reading per scorer.

KL(full || policy) in nats of each token of the true continuation (kind `next`) and of a passage of
the text recited on request (kind `recited`). A text is read once for each scorer, and every policy
and budget is carried out on a copy (`larder_bench.scoring.recorded_scores`). Bytes are those of
every tensor of the cache, exact entries counted in bfloat16, relative to the full bfloat16 cache:
so a model that runs in float32 is measured as in bfloat16. Calibrated tables are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from larder.core import BadParameter, UsageError
from larder.session import Policy
from larder_bench.measures.base import Measure
from larder_bench.results.rows import Row
from larder_bench.scoring.kl_divergence import kl_divergence
from larder_bench.scoring.recorded_scores import (
    COMPARED_BYTES,
    RecordedText,
    compared_bytes,
    compared_full_bytes,
    forced_logits,
)
from larder_bench.studies.cells import Cell
from larder_bench.studies.methods import PolicyMethod, QuestionScope
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.target_size import BudgetFit, search_budget


@dataclass(frozen=True)
class Divergence(Measure):
    """Continuation and recital behind caches that were made of one reading.

    Args:
        following: tokens of the continuation, and of the recited passage, that are compared.
    """

    following: int = 64

    def __post_init__(self) -> None:
        if self.following < 2:
            raise BadParameter(f"divergence.following must be 2 or more, got {self.following}.")

    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        policy, amount = checked_policy(cell), cell.amount
        conversation = bench.conversation(cell.task, cell.seed, cell.tokens)
        text = bench.recorded(conversation, self.following)
        full, length = compared_full_bytes(text), len(text.ids)
        if amount is None:
            fit = BudgetFit(length, text.cache, 1)
        else:
            wanted = amount.bytes(full, full // length)
            first = (
                int(tokens_per_byte * wanted)
                if tokens_per_byte
                else _first_guess(policy, text, wanted, full)
            )
            fit = search_budget(
                lambda tokens: text.held(policy, tokens), compared_bytes, wanted, first, length
            )
        held = compared_bytes(fit.result)
        heads = length * sum(layer.kv_heads for layer in fit.result.spec.managed)
        return {
            "context_tokens": length,
            "budget_tokens": fit.tokens,
            "bytes_share": round(held / full, 5),
            "active_kv_bytes": held,
            "kv_bytes": held,
            "peak_kv_bytes": full,
            "full_kv_bytes": full,
            "prefill_seconds": 0.0,
            "kept": round(fit.result.managed_entries / heads, 4),
            "reads": fit.tries,
            "items": [
                item
                for name, probe in text.probes.items()
                for item in compared_items(
                    name,
                    text.logits[name],
                    forced_logits(text.engine, fit.result, probe),
                    probe.ids[probe.first :],
                )
            ],
        }


def _first_guess(policy: Policy, text: RecordedText, wanted: int, full: int) -> int:
    """Tokens that a budget in bytes may be: of coded entries, those in bytes of the model."""
    exact, spec = wanted * len(text.ids) // full, text.cache.spec
    is_coded = policy.storage.codecs or policy.storage.transform is not None
    return exact * COMPARED_BYTES // spec.dtype.itemsize if is_coded else exact


def checked_policy(cell: Cell) -> Policy:
    """Policy of a cell.

    Raises:
        UsageError: the cell's method needs a question.
    """
    if (
        not isinstance(cell.subject, PolicyMethod)
        or cell.subject.scope is not QuestionScope.CONTEXT
    ):
        raise UsageError(f"{cell.subject.name} needs a question, but divergence asks none.")
    return cell.subject.variant.policy


def compared_items(kind: str, full: Tensor, near: Tensor, ids: tuple[int, ...]) -> list[Row]:
    """Items of a probe, one per compared token."""
    likelihoods = near.log_softmax(-1)
    same = full.argmax(-1) == near.argmax(-1)
    return [
        {
            "kind": kind,
            "question": index,
            "turn": 0,
            "depth": None,
            "kl": round(float(kl), 6),
            "same": bool(same[index]),
            "log_likelihood": round(float(likelihoods[index, token]), 4),
            "counts": True,
        }
        for index, (kl, token) in enumerate(zip(kl_divergence(full, near), ids, strict=True))
    ]


Part = Divergence
