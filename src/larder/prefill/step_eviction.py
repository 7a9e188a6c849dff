"""Eviction behind a decode step, in one call for all layers where a kernel does what plans do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from larder.cache.sequence import SequenceCache
from larder.core.plan import StepRule
from larder.ops.cpu.decode_attention import EvictionStorage
from larder.policy.planner import Planner


@dataclass(frozen=True)
class SteppedRow:
    """One row of a pass of single tokens.

    Args:
        quotas: entries per kv head of each managed layer, by layer index.
        is_due: whether entries are rejected, or attention only recorded.
        length: true tokens read at the end of the pass.
    """

    cache: SequenceCache
    quotas: Mapping[int, int]
    is_due: bool
    length: int


class StepEviction:
    """Part of an observer that a kernel carries out at the end of a pass.

    Args:
        tokens: M, entries per kv head averaged over the managed layers.
    """

    def __init__(
        self, planner: Planner, rule: StepRule, tokens: int, rows: Sequence[SteppedRow]
    ) -> None:
        self._planner, self._rule, self._tokens, self._rows = planner, rule, tokens, rows

    def run(self) -> set[tuple[int, int]]:
        """Evict, and return the layers that are done: (row, layer).

        Rows of which the kernel cannot do a layer are left to plans.
        """
        done: set[tuple[int, int]] = set()
        for number, row in enumerate(self._rows):
            layers = self._layers(row)
            if layers is not None:
                found = row.cache.evict_step(layers, self._rule)
                done.update((number, layer) for layer in found)
        return done

    def _layers(self, row: SteppedRow) -> dict[int, EvictionStorage] | None:
        """Layers of a row, as the kernel takes them; None if there is one that it cannot do."""
        layers: dict[int, EvictionStorage] = {}
        for layer, quota in row.quotas.items():
            store = row.cache.stores[layer]
            own = store.eviction_storage(self._rule)
            if own is None:
                return None
            if not row.is_due:
                layers[layer] = own
                continue
            kept = self._planner.budget.step_quota(store.ledger_scalars(), quota, self._tokens)
            if kept is None:
                return None
            ends = self._planner.protect.ends(kept.protected_by)
            first = max(ends.first, self._planner.watermark)
            layers[layer] = own._replace(count=kept.count, first=first, stop=row.length - ends.last)
        return layers
