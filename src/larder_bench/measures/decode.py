"""Cost of a decode step and size of a cache, at any length and without a text.

Caches are filled with synthetic entries, as if that many tokens had been read: see
`larder_bench.profiling.synthetic_cache`. Seconds per step are measured on a batch of equal
sequences, as many as fit into a given memory in all tiers, or on one. The policy evicts as usual:
where it evicts once per window, the mean step is that of a whole window, from the medians of both
kinds of step. The full cache grows with the text, all others stay at their budget. Periodic
quantization, as KIVI's, is in the 95th percentile and the breakdown, but not in that mean. The
breakdown of a step comes from a second run with clocks in it.
Wan et al., "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large
Language Models" (2024), arXiv:2406.13035, section 5.5, has such a table, and Mao et
al., "IceCache: Memory-efficient KV-cache Management for Long-Sequence LLMs" (2026),
arXiv:2604.10539, the breakdown in figure 6b.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from larder.cache import SequenceCache
from larder.core import BadParameter, BudgetError, BudgetUnit, MemoryBudget, Mode, UsageError
from larder.models import BatchSegment as Tokens
from larder.session import Policy, amount_tokens, decode_planner, resolve_budget
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

TOKEN = 7  # arbitrary
PLAIN_STEP, EVICTION_STEP = "step", "step in which entries go"


@dataclass(frozen=True)
class Decode(Measure):
    """Decode steps over filled caches.

    Args:
        steps: number of timed steps, after one warm-up step.
        memory_mib: memory for the KV caches of a batch, all tiers together; 0 for one sequence.
    """

    steps: int = 8
    memory_mib: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise BadParameter(f"decode.steps must be 1 or more, got {self.steps}.")
        if self.memory_mib < 0:
            raise BadParameter(f"decode.memory_mib must be 0 or more, got {self.memory_mib}.")

    def is_alike(self, amount: MemoryBudget) -> bool:
        """A number of tokens has one meaning; shares and bytes depend on the matched quantity."""
        return amount.unit is BudgetUnit.TOKENS

    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        return self.timed(bench, cell, time.perf_counter)

    def timed(self, bench: ModelContext, cell: Cell, clock: Clock) -> Row:
        """Row of a cell, timed by a clock."""
        policy, engine = sized_policy(bench, cell), bench.engine
        synthetic = build_synthetic_cache(engine.runtime, policy, cell.tokens, 2 * self.steps + 1)
        synthetic.cache.compact()
        fast, slow = synthetic.fast_bytes, synthetic.slow_bytes
        full = engine.loaded.decoder.spec.full_bytes(cell.tokens)
        caches = self._batch(synthetic.cache, fast + slow)
        steps = _StepRunner(bench, policy, caches, synthetic)
        try:
            plain = steps.run(self.steps, clock)
            with profile_steps(_synchronized(clock, bench)) as profiler:
                profiled = steps.run(self.steps, profiler.clock, profiler)
        finally:
            stop_injection(caches)
        tokens = policy.budget.tokens
        assert tokens is not None  # set by sized_policy
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
            "policy_share": round(profiled.share, 4),
            "latency": {"token": percentiles(plain.seconds)},
            "items": [],
            EXHIBITS_KEY: profiled.exhibits(),
        }

    def _batch(self, cache: SequenceCache, nbytes: int) -> list[SequenceCache]:
        """Copies of a cache that fit into the memory.

        Raises:
            BudgetError: the memory does not hold one sequence.
        """
        batch = (self.memory_mib << 20) // nbytes if self.memory_mib else 1
        if not batch:
            raise BudgetError(
                f"decode.memory_mib={self.memory_mib} does not hold a cache of {nbytes} bytes: "
                "raise it, or take a smaller budget."
            )
        return [cache, *(cache.fork() for _ in range(batch - 1))]


@dataclass
class StepTimings:
    """Durations of decode steps.

    Args:
        window: number of steps per eviction.
        evicted: whether each step evicted entries.
        parts: seconds of the parts of each step.
    """

    window: int
    seconds: list[float] = field(default_factory=list)
    evicted: list[bool] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Mean seconds of a step, over a whole window."""
        return self._over_window(self.seconds)

    @property
    def share(self) -> float:
        """Policy's share of the time, over a whole window."""
        policy = [sum(step.get(name, 0.0) for name in (POLICY, "evict")) for step in self.parts]
        return self._over_window(policy) / self._over_window([sum(s.values()) for s in self.parts])

    def exhibits(self) -> list[Row]:
        """Exhibits with the parts of each kind of step."""
        kinds = (
            [(PLAIN_STEP, False), (EVICTION_STEP, True)]
            if len({*self.evicted}) > 1
            else [(PLAIN_STEP, self.evicted[0])]
        )
        return [
            {
                "row": "breakdown",
                "step": name,
                "parts": part_percentiles(self._select(self.parts, is_evicting)),
            }
            for name, is_evicting in kinds
        ]

    def _over_window(self, values: Sequence[float]) -> float:
        plain, evicting = self._select(values, False), self._select(values, True)
        if not plain or not evicting or self.window == 1:
            return statistics.median(values)
        total = statistics.median(plain) * (self.window - 1) + statistics.median(evicting)
        return total / self.window

    def _select(self, values: Sequence, is_evicting: bool) -> list:
        return [
            value
            for value, evicted in zip(values, self.evicted, strict=True)
            if evicted is is_evicting
        ]


class _StepRunner:
    """Runner of decode steps: one token per cache and step, with the policy observing."""

    def __init__(
        self,
        bench: ModelContext,
        policy: Policy,
        caches: list[SequenceCache],
        synthetic: SyntheticCache,
    ) -> None:
        self._decoder, self._caches, self._policy = bench.engine.loaded.decoder, caches, policy
        runtime = replace_decoder(bench.engine.runtime, self._decoder)
        self._planner = decode_planner(runtime, policy, caches)
        self._move_streams = (
            inject_streams(caches, synthetic.streams) if synthetic.streams else None
        )
        self._generated = 0

    @torch.no_grad()
    def run(self, steps: int, clock: Clock, profiler: StepProfiler | None = None) -> StepTimings:
        """Time steps after one warm-up step; the last one evicts entries."""
        window = (self._policy.timing.excess() or 0) + 1
        if window > steps + 1:
            append_random_entries(self._decoder, self._caches, window - 1 - steps)
        for cache in self._caches:
            cache.allocate(steps + 2)
        timings, step = StepTimings(window), self._stepper(profiler)
        step()
        for _ in range(steps):
            before, started = self._num_entries, clock()
            parts = {} if profiler is None else profiler.step(step)
            if profiler is None:
                step()
            timings.seconds.append(clock() - started)
            timings.parts.append(parts)
            timings.evicted.append(self._num_entries <= before)
        return timings

    @property
    def _num_entries(self) -> int:
        return self._caches[0].managed_entries

    def _stepper(self, profiler: StepProfiler | None) -> Callable[[], None]:
        numbers = list(range(len(self._caches)))

        def step() -> None:
            if self._move_streams is not None:
                self._move_streams(self._generated)
            segments = [Tokens(cache, (TOKEN,)) for cache in self._caches]
            generated, observer = [self._generated] * len(segments), None
            if self._planner is not None:
                observer = self._planner.observer(numbers, segments, generated)

            if profiler is not None:
                observer = profiler.wrap_observer(observer)
            self._decoder.forward_logits(
                segments, Mode.APPEND, numbers, observer
            ).cpu()  # synchronizes
            self._generated += 1

        return step


def sized_policy(bench: ModelContext, cell: Cell) -> Policy:
    """Policy of a cell with its size set.

    Raises:
        UsageError: the cell's method is not a policy.
    """
    if not isinstance(cell.subject, PolicyMethod):
        raise UsageError(f"{cell.subject.name} has no cache to decode over: leave it out.")
    policy = cell.subject.variant.policy
    spec, size = bench.engine.loaded.decoder.spec, None
    if cell.amount is not None:
        size = str(_tokens(bench, cell, policy))
    return policy.with_sizes(resolve_budget(policy, size, cell.tokens, spec), None)


def _tokens(bench: ModelContext, cell: Cell, policy: Policy) -> int:
    """Entries per kv head of the cell's budget."""
    spec, amount = bench.engine.loaded.decoder.spec, cell.amount
    assert amount is not None  # checked by the caller
    each = spec.managed_bytes_per_token()
    if cell.matched is MatchedQuantity.TOKENS or amount.unit is BudgetUnit.TOKENS:
        return amount.tokens(cell.tokens, each)
    nbytes = amount.bytes(spec.full_bytes(cell.tokens), each)
    return max(
        1, amount_tokens(MemoryBudget(float(nbytes), BudgetUnit.BYTES), cell.tokens, policy, spec)
    )


def _synchronized(clock: Clock, bench: ModelContext) -> Clock:
    """Clock that synchronizes the accelerator first, so that each part gets its own time."""
    if bench.engine.loaded.decoder.spec.device.type != "cuda":
        return clock

    def seconds() -> float:
        torch.cuda.synchronize()
        return clock()

    return seconds


Part = Decode
