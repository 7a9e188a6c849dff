"""What a step of decoding costs, and how much a cache takes, at any length and without a text.

Caches are filled with random entries, as if so many tokens had been read. Seconds per step are
those of a batch of equal sequences, as many as a stated memory holds, or of one; tokens per second
follow from their median. The policy acts as it would. The full cache grows with the text, all
others stay at their budget. Wan et al., "D2O: Dynamic Discriminative Operations for Efficient
Long-Context Inference of Large Language Models" (2024), arXiv:2406.13035, section 5.5, has the
table that this is for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from larder.bench.amounts import Matched, Unit
from larder.bench.cells import Cell
from larder.bench.filling import filled
from larder.bench.measures.base import Measure
from larder.bench.rows import Row
from larder.bench.subjects import Governed
from larder.bench.timing import percentiles
from larder.bench.workbench import Workbench
from larder.cache.sequence import Form, SequenceCache
from larder.core.errors import BadParameter, BudgetError, UsageError
from larder.core.types import Mode
from larder.models.passes import Row as Tokens
from larder.policy.budgets.unlimited import WITHOUT_LIMIT
from larder.policy.storage.exact import Exact
from larder.session.policy import Policy
from larder.session.reading import entries_of, tend
from larder.session.sizes import Size, resolve

TOKEN = 7  # any will do


@dataclass(frozen=True)
class Decode(Measure):
    """Steps over filled caches.

    Args:
        steps: that are timed, behind one that is not.
        memory_mib: of KV caches that a batch may take; 0 for one sequence.
    """

    steps: int = 8
    memory_mib: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise BadParameter(f"decode.steps must be 1 or more, got {self.steps}.")
        if self.memory_mib < 0:
            raise BadParameter(f"decode.memory_mib must be 0 or more, got {self.memory_mib}.")

    def measure(self, bench: Workbench, cell: Cell, guess: float | None) -> Row:
        policy, engine = _policy(bench, cell), bench.engine
        cache = _filled(bench, policy, cell.tokens)
        cache.compact()
        held, full = cache.nbytes, engine.loaded.decoder.spec.full_bytes(cell.tokens)
        batch = self._batch(held)
        caches = [cache, *(cache.fork() for _ in range(batch - 1))]
        for one in caches:
            one.allocate(self.steps + 2)
        seconds = _timed(_stepper(bench, policy, caches), self.steps)
        assert policy.budget.tokens is not None  # filled in
        return {
            "context_tokens": cell.tokens,
            "budget_tokens": min(policy.budget.tokens, cell.tokens),
            "bytes_share": round(held / full, 5),
            "active_kv_bytes": held,
            "kv_bytes": held,
            "peak_kv_bytes": max(one.nbytes for one in caches),
            "full_kv_bytes": full,
            "batch": batch,
            "tokens_per_second": round(batch / statistics.median(seconds), 3),
            "latency": {"token": percentiles(seconds)},
            "items": [],
        }

    def _batch(self, nbytes: int) -> int:
        """Raises: BudgetError: the memory does not hold one sequence."""
        batch = (self.memory_mib << 20) // nbytes if self.memory_mib else 1
        if not batch:
            raise BudgetError(
                f"decode.memory_mib={self.memory_mib} does not hold a cache of {nbytes} bytes: "
                "raise it, or take a smaller budget."
            )
        return batch


def _policy(bench: Workbench, cell: Cell) -> Policy:
    """With its size filled in.

    Raises:
        UsageError: caches of its kind are not filled at random.
    """
    if not isinstance(cell.subject, Governed):
        raise UsageError(f"{cell.subject.name} has no cache to decode over: leave it out.")
    policy = cell.subject.case.policy
    if policy.storage != Exact() or policy.recall is not None:
        raise UsageError(
            f"{cell.subject.name} holds entries in few bits or in two tiers, which random ones say "
            "nothing about: leave it out, or see benchmarks/recall_decode.py."
        )
    spec, asked = bench.engine.loaded.decoder.spec, None
    if cell.amount is not None:
        asked = str(_tokens(bench, cell, policy))
    return policy.filled(resolve(policy, asked, cell.tokens, spec), None)


def _tokens(bench: Workbench, cell: Cell, policy: Policy) -> int:
    """Entries per kv head that the cell's budget comes to."""
    spec, amount = bench.engine.loaded.decoder.spec, cell.amount
    assert amount is not None  # the caller has looked
    each = spec.managed_bytes_per_token()
    if cell.matched is Matched.TOKENS or amount.unit is Unit.TOKENS:
        return amount.tokens(cell.tokens, each)
    nbytes = amount.bytes(spec.full_bytes(cell.tokens), each)
    return max(1, Size(nbytes / 1024, "KiB").tokens(cell.tokens, policy, spec))


def _filled(bench: Workbench, policy: Policy, context: int) -> SequenceCache:
    decoder = bench.engine.loaded.decoder
    is_full = policy.budget.tokens == WITHOUT_LIMIT
    form = Form.DENSE if is_full else Form.RAGGED
    entries = context if is_full else min(context, entries_of(policy, decoder.spec))
    return filled(decoder, form, entries, policy.planner.ledger, 0.0, context)


def _stepper(bench: Workbench, policy: Policy, caches: list[SequenceCache]) -> Callable[[], None]:
    """One token for every cache, under the eyes of the policy."""
    decoder, numbers = bench.engine.loaded.decoder, list(range(len(caches)))
    tending, said = tend(bench.engine.desk, policy, caches), [0]

    def step() -> None:
        rows = [Tokens(cache, (TOKEN,)) for cache in caches]
        steps = said * len(rows)
        observer = None if tending is None else tending.observer(numbers, rows, steps)
        decoder.predict(rows, Mode.APPEND, numbers, observer).cpu()  # waits for an accelerator
        said[0] += 1

    return step


@torch.no_grad()
def _timed(step: Callable[[], None], steps: int) -> list[float]:
    step()
    seconds: list[float] = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return seconds


Part = Decode
