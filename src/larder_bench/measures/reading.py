"""Cost of prefill, and the policy's share of it.

Random tokens are prefilled as a session's text is, into one cache or several, and scored by prompts
of random tokens. The parts are the forward passes that append (`model`), those of the prompts that
entries are scored by (`prompts`), and scores, plans and eviction (`policy`). Compare with `random`,
which reads the same blocks without scoring.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from larder.core import BadParameter, BudgetUnit, MemoryBudget
from larder.prefill import PeakMemoryMeter
from larder.session import build_caches
from larder_bench.measures.base import Measure
from larder_bench.measures.decode import sized_policy
from larder_bench.profiling.step_profiler import MODEL, POLICY, Clock
from larder_bench.profiling.synthetic_cache import random_ids, random_prompts, replace_decoder
from larder_bench.profiling.timed_decoder import TimedDecoder
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.studies.cells import Cell
from larder_bench.studies.model_context import ModelContext

PROMPTS = "prompts"


@dataclass(frozen=True)
class Reading(Measure):
    """Prefill of random tokens.

    Args:
        caches: number of caches, as of a policy with that many episodes.
    """

    caches: int = 1

    def __post_init__(self) -> None:
        if self.caches < 1:
            raise BadParameter(f"reading.caches must be 1 or more, got {self.caches}.")

    def is_alike(self, amount: MemoryBudget) -> bool:
        """A number of tokens has one meaning; shares and bytes depend on the matched quantity."""
        return amount.unit is BudgetUnit.TOKENS

    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        return self.timed(bench, cell, time.perf_counter)

    def timed(self, bench: ModelContext, cell: Cell, clock: Clock) -> Row:
        """Row of a cell, timed by a clock."""
        policy, decoder = sized_policy(bench, cell), bench.engine.loaded.decoder
        clocked, meter = TimedDecoder(decoder, clock), PeakMemoryMeter()
        ids, prompts = random_ids(decoder, cell.tokens), random_prompts(decoder, policy)
        runtime = replace_decoder(bench.engine.runtime, clocked)
        started = clock()
        caches = build_caches(runtime, policy, ids, [prompts] * self.caches, meter)
        seconds = clock() - started
        active = max(usage.fast_tier_bytes for usage in caches.usage())
        full = decoder.spec.full_bytes(cell.tokens)
        parts = {MODEL: seconds - clocked.observer_seconds - clocked.scratch}
        parts |= {PROMPTS: clocked.scratch, POLICY: clocked.observer_seconds}
        assert policy.budget.tokens is not None  # set by sized_policy
        return {
            "context_tokens": cell.tokens,
            "budget_tokens": min(policy.budget.tokens, cell.tokens),
            "bytes_share": round(active / full, 5),
            "active_kv_bytes": active,
            "kv_bytes": caches.nbytes,
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
                        {"name": name, "p50": part, "p95": part} for name, part in parts.items()
                    ],
                }
            ],
        }


Part = Reading
