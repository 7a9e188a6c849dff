"""Base of recall indexes that compare queries and keys as they were before rotation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.spec import LayerSpec
from larder.ops.rope import rotate
from larder.recall._index_base import EntryIndex


def check_rotation(layer: LayerSpec, name: str) -> None:
    """Check that the rotation of a layer can be undone.

    Raises:
        CacheError: the rotary embedding of the layer is unknown.
    """
    if layer.radians is None:
        raise CacheError(
            f"Layer {layer.index} has a rotary embedding unknown to Larder, so {name} cannot undo "
            "it: take a recall part that reads rotated keys, such as pq()."
        )


class UnrotatedIndex(EntryIndex):
    """Index with the position of the latest query, in `_last`.

    It comes with every step (`observe_step`); before any, it is that of the latest entry.
    """

    is_stateless = False

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        self._radians = torch.tensor(layer.radians)
        self._last = torch.tensor(-1)

    def observe_step(
        self,
        queries: Float[Tensor, "H D"],
        stays: Entries,
        before: Float[Tensor, "H Q D"] | None = None,
    ) -> None:
        self._last = stays.head_positions(0)[-1].long().cpu()

    def _note_latest(self, entries: Entries) -> None:
        """The latest query is at the latest entry, or behind."""
        positions = [entries.head_positions(head)[-1:] for head in range(self.layer.kv_heads)]
        self._last = torch.cat([self._last[None], *positions]).max().long()

    def unrotated_queries(self, queries: Float[Tensor, "H D"]) -> Float[Tensor, "H D"]:
        """Float32 queries of the latest position before rotation."""
        return rotate(queries.float()[:, None], -self._last[None], self._radians)[:, 0]

    def unrotated_keys(self, head: int, entries: Entries, first: int) -> Float[Tensor, "S D"]:
        """Float32 keys of a head before rotation, from entry `first` on."""
        keys = entries.keys_from(head, first).float()
        positions = entries.effective_rope_positions[entries.rows(head)][first:]
        return rotate(keys[None], -positions, self._radians)[0]
