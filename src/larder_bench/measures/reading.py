"""Cost of prefill, and the policy's share of it.

Random tokens are read as a session reads a text, into one cache or several, judged by prompts of
random tokens. A reading consists of the passes that append (`model`), of those read behind the
cache to judge it by (`prompts`), and of what watches them: scores, plans, eviction (`policy`). Set
it beside `random`, which reads by the same blocks and judges by nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from larder.core.errors import BadParameter
from larder.core.memory_budget import BudgetUnit, MemoryBudget
from larder.prefill.memory import PeakMemoryMeter
from larder.session.prefill import build_caches
from larder_bench.measures.base import Measure
from larder_bench.measures.decode import sized_policy
from larder_bench.profiling.step_profiler import MODEL, POLICY
from larder_bench.profiling.synthetic_cache import random_ids, random_prompts, replace_decoder
from larder_bench.profiling.timed_decoder import TimedDecoder
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.studies.cells import Cell
from larder_bench.studies.model_context import ModelContext

PROMPTS = "prompts"


@dataclass(frozen=True)
class Reading(Measure):
    """One reading of random tokens.

    Args:
        caches: that are read into, as by a policy with so many episodes.
    """

    caches: int = 1

    def __post_init__(self) -> None:
        if self.caches < 1:
            raise BadParameter(f"reading.caches must be 1 or more, got {self.caches}.")

    def is_alike(self, amount: MemoryBudget) -> bool:
        """A number of tokens is taken as it is; shares and bytes are of one or the other."""
        return amount.unit is BudgetUnit.TOKENS

    def measure(self, bench: ModelContext, cell: Cell, guess: float | None) -> Row:
        policy, decoder = sized_policy(bench, cell), bench.engine.loaded.decoder
        clocked, meter = TimedDecoder(decoder, time.perf_counter), PeakMemoryMeter()
        ids, book = random_ids(decoder, cell.tokens), random_prompts(decoder, policy)
        runtime = replace_decoder(bench.engine.runtime, clocked)
        started = time.perf_counter()
        shelf = build_caches(runtime, policy, ids, [book] * self.caches, meter)
        seconds = time.perf_counter() - started
        active = max(holding.fast_tier_bytes for holding in shelf.usage())
        full = decoder.spec.full_bytes(cell.tokens)
        parts = {MODEL: seconds - clocked.observer_seconds - clocked.scratch}
        parts |= {PROMPTS: clocked.scratch, POLICY: clocked.observer_seconds}
        assert policy.budget.tokens is not None  # filled in
        return {
            "context_tokens": cell.tokens,
            "budget_tokens": min(policy.budget.tokens, cell.tokens),
            "bytes_share": round(active / full, 5),
            "active_kv_bytes": active,
            "kv_bytes": shelf.nbytes,
            "peak_kv_bytes": meter.peak_bytes,
            "full_kv_bytes": full,
            "prefill_seconds": round(seconds, 4),
            "policy_share": round(1 - parts[MODEL] / seconds, 4),
            "items": [],
            EXHIBITS_KEY: [
                {
                    "row": "breakdown",
                    "step": "reading",
                    "parts": [
                        {"name": name, "p50": took, "p95": took} for name, took in parts.items()
                    ],
                }
            ],
        }


Part = Reading
