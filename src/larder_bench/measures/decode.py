"""Cost of a decode step and size of a cache, at any length and without a text.

Caches are filled with made-up entries, as if so many tokens had been read: see
`larder_bench.profiling.synthetic_cache`. Seconds per step are those of a batch of equal sequences,
as many as a stated memory holds in all tiers, or of one. The policy acts as it would: where entries
go only every so often, the mean step is that of a whole window, by the medians of both kinds of
step. The full cache grows with the text, all others stay at their budget. Rounding that is due
every so many steps, as KIVI's, is in the 95th percentile and the breakdown, but not in that mean.
What a step consists of is told by a second run with clocks in it.
Wan et al., "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large
Language Models" (2024), arXiv:2406.13035, section 5.5, has the table that this is for, and Mao et
al., "IceCache: Memory-efficient KV-cache Management for Long-Sequence LLMs" (2026),
arXiv:2604.10539, the breakdown in figure 6b.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from larder.cache.sequence import SequenceCache
from larder.core.errors import BadParameter, BudgetError, UsageError
from larder.core.memory_budget import BudgetUnit, MemoryBudget
from larder.core.types import Mode
from larder.models.forward_batch import BatchSegment as Tokens
from larder.session.capacity import amount_tokens, resolve_budget
from larder.session.policy import Policy
from larder.session.prefill import decode_planner
from larder_bench.measures.base import Measure
from larder_bench.profiling.step_profiler import (
    POLICY,
    Clock,
    StepProfiler,
    part_percentiles,
    profile_steps,
)
from larder_bench.profiling.synthetic_cache import (
    SyntheticCache,
    append_random_entries,
    build_synthetic_cache,
    replace_decoder,
)
from larder_bench.profiling.synthetic_keys import inject_streams, stop_injection
from larder_bench.profiling.timing import percentiles
from larder_bench.results.budget_labels import MatchedQuantity
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.studies.cells import Cell
from larder_bench.studies.methods import PolicyMethod
from larder_bench.studies.model_context import ModelContext

TOKEN = 7  # any will do
PLAIN_STEP, EVICTION_STEP = "step", "step in which entries go"


@dataclass(frozen=True)
class Decode(Measure):
    """Steps over filled caches.

    Args:
        steps: that are timed, behind one that is not.
        memory_mib: of KV caches that a batch may take, all tiers together; 0 for one sequence.
    """

    steps: int = 8
    memory_mib: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise BadParameter(f"decode.steps must be 1 or more, got {self.steps}.")
        if self.memory_mib < 0:
            raise BadParameter(f"decode.memory_mib must be 0 or more, got {self.memory_mib}.")

    def is_alike(self, amount: MemoryBudget) -> bool:
        """A number of tokens is taken as it is; shares and bytes are of one or the other."""
        return amount.unit is BudgetUnit.TOKENS

    def measure(self, bench: ModelContext, cell: Cell, guess: float | None) -> Row:
        policy, engine = sized_policy(bench, cell), bench.engine
        made = build_synthetic_cache(engine.runtime, policy, cell.tokens, 2 * self.steps + 1)
        made.cache.compact()
        fast, slow = made.fast_bytes, made.slow_bytes
        full = engine.loaded.decoder.spec.full_bytes(cell.tokens)
        caches = self._batch(made.cache, fast + slow)
        steps = _StepRunner(bench, policy, caches, made)
        try:
            plain = steps.go(self.steps, time.perf_counter)
            with profile_steps(_synchronized_clock(bench)) as spent:
                told = steps.go(self.steps, spent.clock, spent)
        finally:
            stop_injection(caches)
        tokens = policy.budget.tokens
        assert tokens is not None  # filled in
        return {
            "context_tokens": cell.tokens,
            "budget_tokens": min(tokens, cell.tokens),
            "bytes_share": round(fast / full, 5),
            "active_kv_bytes": fast,
            "slow_kv_bytes": slow,
            "kv_bytes": fast + slow,
            "peak_kv_bytes": max(fast + slow, *(one.nbytes for one in caches)),
            "full_kv_bytes": full,
            "batch": len(caches),
            "tokens_per_second": round(len(caches) / plain.mean, 3),
            "policy_share": round(told.share, 4),
            "latency": {"token": percentiles(plain.seconds)},
            "items": [],
            EXHIBITS_KEY: told.exhibits(),
        }

    def _batch(self, cache: SequenceCache, nbytes: int) -> list[SequenceCache]:
        """Raises: BudgetError: the memory does not hold one sequence."""
        batch = (self.memory_mib << 20) // nbytes if self.memory_mib else 1
        if not batch:
            raise BudgetError(
                f"decode.memory_mib={self.memory_mib} does not hold a cache of {nbytes} bytes: "
                "raise it, or take a smaller budget."
            )
        return [cache, *(cache.fork() for _ in range(batch - 1))]


@dataclass
class StepTimings:
    """Steps that were taken.

    Args:
        window: of so many steps, entries go in the last.
        gone: whether they did, of each step.
        parts: seconds of each step by what it consists of.
    """

    window: int
    seconds: list[float] = field(default_factory=list)
    gone: list[bool] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Seconds of a step, over a whole window."""
        return self._over_window(self.seconds)

    @property
    def share(self) -> float:
        """Time of the policy per decode step, over a whole window."""
        own = [sum(step.get(name, 0.0) for name in (POLICY, "evict")) for step in self.parts]
        return self._over_window(own) / self._over_window([sum(s.values()) for s in self.parts])

    def exhibits(self) -> list[Row]:
        """Parts of the time of each kind of decode step."""
        kinds = (
            [(PLAIN_STEP, False), (EVICTION_STEP, True)]
            if len({*self.gone}) > 1
            else [(PLAIN_STEP, self.gone[0])]
        )
        return [
            {
                "row": "breakdown",
                "step": name,
                "parts": part_percentiles(self._of(self.parts, is_due)),
            }
            for name, is_due in kinds
        ]

    def _over_window(self, values: Sequence[float]) -> float:
        quiet, due = self._of(values, False), self._of(values, True)
        if not quiet or not due or self.window == 1:
            return statistics.median(values)
        both = statistics.median(quiet) * (self.window - 1) + statistics.median(due)
        return both / self.window

    def _of(self, values: Sequence, is_due: bool) -> list:
        return [value for value, gone in zip(values, self.gone, strict=True) if gone is is_due]


class _StepRunner:
    """One token after the other for every cache, under the eyes of the policy."""

    def __init__(
        self, bench: ModelContext, policy: Policy, caches: list[SequenceCache], made: SyntheticCache
    ) -> None:
        self._decoder, self._caches, self._policy = bench.engine.loaded.decoder, caches, policy
        runtime = replace_decoder(bench.engine.runtime, self._decoder)
        self._tending = decode_planner(runtime, policy, caches)
        self._go_to = inject_streams(caches, made.streams) if made.streams else None
        self._said = 0

    @torch.no_grad()
    def go(self, steps: int, clock: Clock, spent: StepProfiler | None = None) -> StepTimings:
        """Time steps behind one that is not timed; the last is one in which entries go."""
        window = (self._policy.timing.excess() or 0) + 1
        if window > steps + 1:
            append_random_entries(self._decoder, self._caches, window - 1 - steps)
        for cache in self._caches:
            cache.allocate(steps + 2)
        timed, step = StepTimings(window), self._stepper(spent)
        step()
        for _ in range(steps):
            before, started = self._held, clock()
            parts = {} if spent is None else spent.step(step)
            if spent is None:
                step()
            timed.seconds.append(clock() - started)
            timed.parts.append(parts)
            timed.gone.append(self._held <= before)
        return timed

    @property
    def _held(self) -> int:
        return self._caches[0].managed_entries

    def _stepper(self, spent: StepProfiler | None) -> Callable[[], None]:
        numbers = list(range(len(self._caches)))

        def step() -> None:
            if self._go_to is not None:
                self._go_to(self._said)
            rows = [Tokens(cache, (TOKEN,)) for cache in self._caches]
            said, observer = [self._said] * len(rows), None
            if self._tending is not None:
                observer = self._tending.observer(numbers, rows, said)
            if spent is not None:
                observer = spent.wrap_observer(observer)
            self._decoder.forward_logits(rows, Mode.APPEND, numbers, observer).cpu()  # waits
            self._said += 1

        return step


def sized_policy(bench: ModelContext, cell: Cell) -> Policy:
    """That of a cell, with its size filled in.

    Raises:
        UsageError: what the cell is about is no policy.
    """
    if not isinstance(cell.subject, PolicyMethod):
        raise UsageError(f"{cell.subject.name} has no cache to decode over: leave it out.")
    policy = cell.subject.variant.policy
    spec, asked = bench.engine.loaded.decoder.spec, None
    if cell.amount is not None:
        asked = str(_tokens(bench, cell, policy))
    return policy.with_sizes(resolve_budget(policy, asked, cell.tokens, spec), None)


def _tokens(bench: ModelContext, cell: Cell, policy: Policy) -> int:
    """Entries per kv head that the cell's budget comes to."""
    spec, amount = bench.engine.loaded.decoder.spec, cell.amount
    assert amount is not None  # the caller has looked
    each = spec.managed_bytes_per_token()
    if cell.matched is MatchedQuantity.TOKENS or amount.unit is BudgetUnit.TOKENS:
        return amount.tokens(cell.tokens, each)
    nbytes = amount.bytes(spec.full_bytes(cell.tokens), each)
    return max(
        1, amount_tokens(MemoryBudget(float(nbytes), BudgetUnit.BYTES), cell.tokens, policy, spec)
    )


def _synchronized_clock(bench: ModelContext) -> Clock:
    """A clock that waits for an accelerator first, so that each part has its own time."""
    if bench.engine.loaded.decoder.spec.device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


Part = Decode
