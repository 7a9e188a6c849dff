"""Watches a pass, scores every layer as it goes by, and carries plans out as soon as they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import torch

from larder.cache.sequence import SequenceCache
from larder.core.observation import Scored, Scratch, Seen
from larder.core.types import Packed
from larder.models.passes import Recorded
from larder.policy.planner import Planner
from larder.prefill.meter import Meter


class Turn(Enum):
    """Whether more passes will add to the scores before anything is decided."""

    MORE = "more"
    LAST = "last"


class Judge:
    """An observer for one settlement; used once.

    Only one layer's queries are ever held: layers that wait for a plan leave their scores. Scores
    of several passes are joined by maximum.

    Args:
        caches: one per row of the pass.
        length: true tokens read when the judged block is in.
    """

    def __init__(
        self,
        planner: Planner,
        caches: Sequence[SequenceCache],
        tokens: int,
        quotas: Mapping[int, int],
        meter: Meter,
        length: int,
    ) -> None:
        self.length = length
        self._planner = planner
        self._caches = caches
        self._tokens = tokens
        self._quotas = quotas
        self._meter = meter
        self._asked: Sequence[Scratch] = ()
        self._turn = Turn.LAST
        self._scratch_tokens = 0
        self._scores: dict[tuple[int, int], Packed] = {}
        self._ready: list[dict[int, Scored]] = [{} for _ in caches]

    def expect(self, asked: Sequence[Scratch], turn: Turn, scratch_tokens: int) -> None:
        """Say what the next pass reads, one entry per row.

        Args:
            scratch_tokens: read behind the caches by all rows together; 0 where all is appended.
        """
        self._asked, self._turn, self._scratch_tokens = asked, turn, scratch_tokens

    def __call__(self, row: int, layer: int, recorded: Recorded) -> None:
        replaced = 0 if self._scratch_tokens else self._caches[row].replaced_bytes(layer)
        self._meter.note(self._caches, self._in_flight(layer) + replaced)
        if layer not in self._quotas:
            return
        seen = self._look(row, layer, recorded)
        scores = self._join(row, layer, self._planner.score(seen))
        if self._turn is Turn.MORE:
            self._scores[row, layer] = scores
            return
        self._ready[row][layer] = self._planner.judge(seen, scores, self._tokens)
        self._carry_out(row, layer)

    def _in_flight(self, layer: int) -> int:
        """Bytes of a scratch pass's own keys and values in one layer, all rows together."""
        spec = self._caches[0].spec
        return spec.layers[layer].bytes_per_token(spec.dtype) * self._scratch_tokens

    def _look(self, row: int, layer: int, recorded: Recorded) -> Seen:
        cache = self._caches[row]
        return Seen(
            cache.spec.layers[layer],
            cache.entries(layer),
            recorded.queries,
            recorded.positions,
            self.length,
            self._asked[row].span,
            recorded.keys,
        )

    def _join(self, row: int, layer: int, scores: Packed) -> Packed:
        earlier = self._scores.pop((row, layer), None)
        return scores if earlier is None else torch.maximum(scores, earlier)

    def _carry_out(self, row: int, current: int) -> None:
        cache = self._caches[row]
        plans = self._planner.plan(self._ready[row], self._quotas, cache.entries)
        for layer, plan in plans.items():
            del self._ready[row][layer]
            cache.apply(layer, plan)
            passing = self._in_flight(current) + cache.replaced_bytes(layer)
            self._meter.note(self._caches, passing)
