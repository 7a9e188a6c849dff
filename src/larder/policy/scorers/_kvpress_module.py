"""Attention-module adapter for presses of kvpress, over an observation.

No model is behind it. Hidden states are the token indices of the pass, and the projections look up
the recorded queries and keys: so queries are right for every architecture, and nothing is projected
twice. Dimensions of a head are put in the order in which presses pair them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.errors import ScoreError
from larder.core.observation import Observation
from larder.core.part import LOG_COUNT
from larder.ops.attention import cap_logits, sink_logits, sinks_by_group
from larder.ops.attention_weights import softmax_with_sinks
from larder.ops.rope import rotate

SCALING_TOLERANCE = 1e-6  # tolerance between a scaling and 1 / sqrt(D)


@dataclass(frozen=True, eq=False)
class AttentionModuleAdapter:
    """Some kv heads of a layer, of equally many entries, with the query heads that share them."""

    observation: Observation
    kv_heads: Sequence[int]

    @property
    def layer_idx(self) -> int:
        return self.observation.layer.index

    @property
    def head_dim(self) -> int:
        return self.observation.layer.head_dim

    @property
    def num_key_value_groups(self) -> int:
        return self.observation.layer.group

    @property
    def query_heads(self) -> list[int]:
        """Query heads that share the kv heads, in order."""
        group = self.observation.layer.group
        return [head * group + offset for head in self.kv_heads for offset in range(group)]

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(
            num_attention_heads=len(self.query_heads),
            num_key_value_heads=len(self.kv_heads),
            head_dim=self.head_dim,
            _attn_implementation="eager",
        )

    @cached_property
    def keys(self) -> Float[Tensor, "1 K S D"]:
        """Cached keys, as attention takes them."""
        entries = self.observation.entries
        return self._paired(torch.stack([entries.head_keys(h).float() for h in self.kv_heads]))[
            None
        ]

    @property
    def values(self) -> Float[Tensor, "1 K S D"]:
        entries = self.observation.entries
        return torch.stack([entries.head_values(h).float() for h in self.kv_heads])[None]

    @property
    def numbers(self) -> Float[Tensor, "1 Q 1"]:
        """Token indices of the pass, in the place of hidden states."""
        count = self.observation.queries.shape[1]
        return torch.arange(count, device=self.observation.queries.device).float()[None, :, None]

    def q_proj(self, numbers: Float[Tensor, "1 N 1"]) -> Float[Tensor, "1 N _"]:
        """Queries before rotation, scaled so that a product over sqrt(D) is a logit."""
        factor = self.observation.layer.scaling * self.head_dim**0.5
        unturned = self._unturned(self.observation.queries[self.query_heads], numbers)
        return unturned if abs(factor - 1) < SCALING_TOLERANCE else unturned * factor

    def k_proj(self, numbers: Float[Tensor, "1 N 1"]) -> Float[Tensor, "1 N _"]:
        """Keys of the tokens of the pass before rotation."""
        return self._unturned(self.observation.keys[list(self.kv_heads)], numbers)

    def rotary_emb(
        self, like: Tensor, positions: Int[Tensor, "1 N"]
    ) -> tuple[Float[Tensor, "1 N D"], Float[Tensor, "1 N D"]]:
        """Cosines and sines; a press counts positions from the first token of the pass."""
        return self._turn(positions[0] + (self._places[-1] + 1 - len(self._places)))

    @property
    def position_embeddings(self) -> tuple[Float[Tensor, "1 Q D"], Float[Tensor, "1 Q D"]]:
        """Cosines and sines of the tokens of the pass; empty where rotation is unknown."""
        if self.observation.layer.radians is None:
            nothing = self.numbers.new_zeros(1, 0, self.head_dim)
            return nothing, nothing
        return self._turn(self._places)

    def weights(self) -> Float[Tensor, "1 H Q S"]:
        """Full matrix of attention weights, for presses that need it."""
        return torch.cat([self._of_head(head) for head in self.kv_heads])[None]

    def _of_head(self, head: int) -> Float[Tensor, "R Q S"]:
        observation, group = self.observation, self.observation.layer.group
        entries, queries = (
            observation.entries,
            observation.queries[head * group : (head + 1) * group].float(),
        )
        products = queries @ entries.head_keys(head).float().T * observation.layer.scaling
        logits = cap_logits(products, observation.layer.softcap)
        sinks = sinks_by_group(sink_logits(observation.layer, logits), observation.layer.kv_heads)[
            head
        ]
        if LOG_COUNT in entries.columns:
            logits += entries.columns[LOG_COUNT][entries.rows(head)]
        later = entries.head_positions(head) > observation.query_positions[:, None]
        return softmax_with_sinks(logits.masked_fill(later, -torch.inf), sinks)

    @property
    def _places(self) -> Int[Tensor, " Q"]:
        return self.observation.effective_rope_positions[self.kv_heads[0]]

    @cached_property
    def _order(self) -> list[int]:
        """Order of dimensions that pairs d with d + D / 2, unrotated dimensions last in each
        half.
        """
        half = len(self._radians)
        rest = range(2 * half, self.head_dim)
        middle = len(rest) // 2
        return [*range(half), *rest[:middle], *range(half, 2 * half), *rest[middle:]]

    @property
    def _radians(self) -> tuple[float, ...]:
        return self.observation.layer.radians or ()

    def _paired(self, vectors: Float[Tensor, "*rest D"]) -> Float[Tensor, "*rest D"]:
        is_plain = 2 * len(self._radians) in (0, self.head_dim)
        return vectors if is_plain else vectors[..., self._order]

    def _unturned(
        self, rotated: Float[Tensor, "N Q D"], numbers: Float[Tensor, "1 M 1"]
    ) -> Float[Tensor, "1 M _"]:
        if self.observation.layer.radians is None:
            raise ScoreError(
                f"Layer {self.layer_idx} rotates its queries in an unknown way, so "
                "this press cannot get them unrotated: take one that uses cached keys."
            )
        rows = numbers[0, :, 0].long()
        radians = torch.tensor(self._radians, device=rotated.device)
        back = rotate(rotated[:, rows].float(), -self._places[rows], radians)
        return self._paired(back).transpose(0, 1).flatten(1)[None]

    def _turn(
        self, positions: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "1 N D"], Float[Tensor, "1 N D"]]:
        radians = torch.zeros(self.head_dim // 2, device=positions.device)
        radians[: len(self._radians)] = torch.tensor(self._radians, device=positions.device)
        angles = (positions.float()[:, None] * radians).repeat(1, 2)[None]
        return angles.cos(), angles.sin()


def model_stub(model: str) -> Any:
    """Model stub with a name, for presses that look up learned weights."""
    return SimpleNamespace(
        config=SimpleNamespace(name_or_path=model), dtype=torch.float32, device=torch.device("cpu")
    )
