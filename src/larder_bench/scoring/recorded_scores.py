"""Caches that many policies make of one reading: scores are recorded, plans carried out on copies.

A text is read once for each scorer, and every policy and budget of that scorer starts from a copy
of the full cache. Behind each cache two texts are forced and compared with the full cache: the
true continuation, and a passage of the text that is recited after a request and its first tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import BadParameter, Entries, LayerScores, Mode, ModelSpec, Observation, Plan
from larder.engine import Engine
from larder.models import BatchSegment
from larder.policy import Exact, Planner, Storage
from larder.prefill import PeakMemoryMeter, PrefillSequence
from larder.session import (
    Policy,
    budgeted_layers,
    common_prompts,
    empty_cache,
    entries_per_head,
    planner_with_quotas,
    prefill_reader,
)

COMPARED_BYTES = 2  # of a number in bfloat16
CUE_TOKENS = 16  # of a recited passage, which are given
RECORDING_TOKENS = 128  # entries per head of the budget of a pass that only records
NEXT, RECITED = "next", "recited"


@dataclass(frozen=True)
class RecordingPlanner(Planner):
    """Planner that records scores and makes no plan."""

    recorded: dict[int, LayerScores] = field(default_factory=dict[int, LayerScores], compare=False)

    @staticmethod
    def of(planner: Planner) -> RecordingPlanner:
        """Recording planner with the parts of another one."""
        return RecordingPlanner(
            **{each.name: getattr(planner, each.name) for each in fields(planner)}
        )

    def plan(
        self,
        ready: Mapping[int, LayerScores],
        quotas: Mapping[int, int],
        entries: Callable[[int], Entries],
    ) -> dict[int, Plan]:
        self.recorded.update(ready)
        return {}


@dataclass(frozen=True)
class Probe:
    """Text that is forced behind a cache.

    Args:
        first: index of the first token whose distribution is compared.
    """

    ids: tuple[int, ...]
    first: int


@dataclass(frozen=True, eq=False)
class RecordedText:
    """Text, its full cache, and what was recorded of it.

    Args:
        probes: by name.
        logits: of each probe behind the full cache.
    """

    engine: Engine
    ids: tuple[int, ...]
    cache: SequenceCache
    probes: Mapping[str, Probe]
    logits: Mapping[str, Tensor]
    _scores: dict[str, dict[int, LayerScores]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(engine: Engine, ids: tuple[int, ...], following: int) -> RecordedText:
        """Text whose last `following` tokens are its continuation.

        Raises:
            BadParameter: it is too short for the recited passage, or for the pass that records.
        """
        length = len(ids) - following
        least = max(2 * (CUE_TOKENS + following), RECORDING_TOKENS + 1)
        if length < least:
            raise BadParameter(
                f"A text of {max(length, 0)} tokens and {following} that follow is too short to "
                f"compare caches of: take one of {least} tokens or more, or fewer tokens to follow."
            )
        cache = SequenceCache(engine.loaded.decoder.spec, "ragged")
        engine.loaded.decoder.read([BatchSegment(cache, ids[:length])], Mode.APPEND)
        cache.compact()
        start = length // 2
        passage = ids[start : start + CUE_TOKENS + following]
        repeat = common_prompts(engine.tokenizer)["repeat"] + passage
        probes = {NEXT: Probe(ids[length:], 1), RECITED: Probe(repeat, len(repeat) - following)}
        logits = {name: forced_logits(engine, cache, probe) for name, probe in probes.items()}
        return RecordedText(engine, ids[:length], cache, probes, logits)

    def scores(self, policy: Policy, tokens: int = RECORDING_TOKENS) -> dict[int, LayerScores]:
        """Scores of the budgeted layers under a policy, by layer index.

        The text is read again for them, once for all policies whose scores are the same.

        Args:
            tokens: budget per kv head, which some scorers, units and values know.
        """
        sized = self._with_recorded_budget(policy, tokens)
        name = _recorded_parts(sized, self.engine.loaded.decoder.spec)
        if name not in self._scores:
            self._scores[name] = self._recorded(sized)
        return self._scores[name]

    def held(self, policy: Policy, tokens: int) -> SequenceCache:
        """Copy of the full cache under a policy, at a budget in tokens per kv head.

        Raises:
            BudgetError: the policy refuses the budget.
        """
        spec, length = self.engine.loaded.decoder.spec, len(self.ids)
        sized = policy.with_sizes(tokens, None)
        entries = entries_per_head(sized, spec)
        planner, quotas = planner_with_quotas(self.engine.runtime, sized, entries, length)
        cache = self._copy(sized)
        protecting, ready = replace(planner, storage=Exact()), dict[int, LayerScores]()
        for layer, scored in self.scores(policy, tokens).items():
            observation = Observation(
                spec.layers[layer],
                cache.entries(layer),
                torch.empty(0, 0, 0),
                torch.empty(0, dtype=torch.long),
                length,
                (0, 0),
            )
            own = protecting.with_protection(
                planner.with_model_inputs(observation), scored.scores, entries
            )
            learned = {**own.learned, **scored.learned}
            statistics = scored.storage_statistics
            ready[layer] = replace(own, storage_statistics=statistics, learned=learned)
        plans = planner.plan(ready, quotas, cache.entries)
        for layer, plan in cache.fit_plans(plans).items():
            cache.apply(layer, plan)
        return cache

    def _copy(self, policy: Policy) -> SequenceCache:
        """Copy of the full cache in the form of a policy."""
        cache = empty_cache(policy, self.engine.loaded.decoder.spec)
        for layer, store in enumerate(cache.layers):
            own = self.cache.entries(layer)
            heads = range(len(own.lengths))
            keys = torch.stack([own.head_keys(head) for head in heads])
            values = torch.stack([own.head_values(head) for head in heads])
            store.append(keys, values, own.head_positions(0))
        cache.advance(len(self.ids))
        return cache

    def _with_recorded_budget(self, policy: Policy, tokens: int) -> Policy:
        """Policy at the budget to record scores at: its own only where they depend on it."""
        usual = policy.with_sizes(RECORDING_TOKENS, None)
        size = min(tokens, len(self.ids) - 1)  # a text that fits its budget is not scored
        own = policy.with_sizes(size, None)
        same = (own.scorer, own.unit) == (usual.scorer, usual.unit)
        return usual if same and not policy.values.selects else own

    def _recorded(self, sized: Policy) -> dict[int, LayerScores]:
        reader = prefill_reader(self.engine.runtime, sized, len(self.ids), PeakMemoryMeter())
        planner = RecordingPlanner.of(reader.planner)
        cache = empty_cache(sized, self.engine.loaded.decoder.spec)
        sequence = PrefillSequence(cache, common_prompts(self.engine.tokenizer))
        steps = replace(reader, planner=planner).read_and_evict_steps(
            [sequence], self.ids, self.ids, 0
        )
        for _ in steps:
            pass
        return planner.recorded


def _recorded_parts(sized: Policy, spec: ModelSpec) -> str:
    """Spelling of what recorded scores depend on; policies that spell it alike share them."""
    layers = [layer.index for layer in budgeted_layers(sized, spec)]
    scoring = [sized.scorer, sized.planner.reduction, sized.values, sized.unit]
    parts = [layers, sized.schedule, *scoring]
    if sized.values.selects:
        parts += [sized.protect, sized.budget]
    if type(sized.storage).inspect is not Storage.inspect:
        parts.append(sized.storage)
    if sized.compensation.required_providers():
        parts.append(sized.compensation)
    return " ".join(map(str, parts))


def compared_bytes(cache: SequenceCache) -> int:
    """Bytes of the managed layers of a cache whose exact entries are counted in bfloat16."""
    total, extra = 0, cache.spec.dtype.itemsize - COMPARED_BYTES
    for store in cache.layers:
        if not store.layer.is_managed:
            continue
        exact = sum(store.full_precision_lengths)
        total += store.nbytes - 2 * store.layer.head_dim * extra * exact
    return total


def compared_full_bytes(text: RecordedText) -> int:
    """Bytes of the managed layers of the full cache of a text in bfloat16."""
    spec = text.cache.spec
    return spec.managed_bytes_per_token() * COMPARED_BYTES // spec.dtype.itemsize * len(text.ids)


def forced_logits(engine: Engine, cache: SequenceCache, probe: Probe) -> Tensor:
    """Logits that predict the compared tokens of a probe."""
    rows = range(probe.first - 1, len(probe.ids) - 1)
    return engine.loaded.decoder.forward_logits(
        [BatchSegment(cache, probe.ids)], Mode.SCRATCH, rows
    )
