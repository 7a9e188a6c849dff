"""Sliding-window layer: the last positions that any later query can see.

The window is by true position, outside any budget, and counted separately. Entries that leave the
window are dropped with the next block, so that a pass that fails in a later layer can be undone.

    held    [ window of the block's first token | block ]

With chunked attention the window of a token is its chunk up to itself: entries of a chunk are
dropped with the first block behind it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.memory_usage import ForkFamily
from larder.cache.new_tokens import NewTokens
from larder.cache.spec import LayerOptions
from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import LayerSpec
from larder.core.types import Keys, Positions, Values
from larder.ops.attention import windowed_attention


class SlidingWindowLayer(CacheLayer):
    """Last `sliding_window` entries, or those of the chunk, the same in every head.

    Older entries are lost: `truncate` can go back over the last appended block, and over as many
    more tokens as were reserved. Call `reserve` before a longer rollback.
    """

    has_public_name = False

    def __init__(self, layer: LayerSpec, options: LayerOptions) -> None:
        if layer.sliding_window is None:
            raise CacheError(f"Layer {layer.index} has no sliding window: use a dense cache.")
        shape, device = (layer.kv_heads, 0, layer.head_dim), options.device
        super().__init__(layer)
        self.options = options
        self._keys = torch.empty(shape, dtype=options.dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self._positions = torch.empty(0, dtype=torch.int32, device=device)
        self._slack = 0
        self._family = ForkFamily(self)
        self._count()

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        rows = self._seen_from(int(positions[0]) - self._slack)
        self._hold(
            torch.cat([self._keys[:, rows], keys], dim=1),
            torch.cat([self._values[:, rows], values], dim=1),
            torch.cat([self._positions[rows], positions.to(torch.int32)]),
        )

    def apply(self, plan: Plan) -> None:
        raise CacheError(
            f"Layer {self.layer.index} has a sliding window, so no plan applies to it: plan for "
            "managed layers only."
        )

    def evict(self, plan: Plan) -> None:
        self.apply(plan)

    def allocate(self, room: int) -> None:
        """No effect: the window has a fixed size."""
        del room

    def reserve(self, room: int) -> None:
        """Hold `room` entries beyond the window, so that as many tokens can be taken back."""
        self._slack = max(self._slack, room)

    def compact(self) -> None:
        """Drop entries outside the window; later rollbacks go no further back than now."""
        self._slack = 0
        if len(self._positions):
            self._keep(self._seen_from(int(self._positions[-1])))

    def truncate(self, length: int) -> None:
        self._keep(slice(0, int((self._positions < length).sum())))

    def entries(self) -> Entries:
        heads, held = self.layer.kv_heads, len(self._positions)
        return Entries(
            self._keys.flatten(0, 1),
            self._values.flatten(0, 1),
            self._positions.repeat(heads),
            tuple(head * held for head in range(heads)),
            (held,) * heads,
        )

    def fork(self) -> SlidingWindowLayer:
        """Layer with the same entries in the same storage, which neither of both writes."""
        copy = SlidingWindowLayer(self.layer, self.options)
        copy._keys, copy._values, copy._positions = self._keys, self._values, self._positions
        copy._family = self._family
        copy._family.join(copy)
        copy._count()
        return copy

    @property
    def shared_nbytes(self) -> int:
        return self._family.shared_bytes(self)

    def separate(self) -> None:
        if self.shared_nbytes:
            self._keep(slice(None))

    def state(self) -> dict[str, Tensor]:
        return {
            "keys": self._keys.clone(),
            "values": self._values.clone(),
            "positions": self._positions.clone(),
        }

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> SlidingWindowLayer:
        store = cls(layer, LayerOptions.of_state(state))
        store._keys, store._values = state["keys"], state["values"]
        store._positions = state["positions"]
        store._count()
        return store

    def own_tensors(self) -> tuple[Tensor, ...]:
        return self._keys, self._values, self._positions

    @property
    def lengths(self) -> tuple[int, ...]:
        return (len(self._positions),) * self.layer.kv_heads

    def attention_calls(self, new: NewTokens) -> list[AttentionCall]:
        call = partial(
            windowed_attention,
            new.queries,
            self.layer.first_visible(new.positions),
            self._keys,
            self._values,
            self._positions,
            self.layer.scaling,
            self.layer.softcap,
        )
        return [call]

    def _seen_from(self, position: int) -> slice:
        """Rows visible to a query at `position` or later."""
        return slice(int((self._positions < self.layer.first_visible(position)).sum()), None)

    def _keep(self, rows: slice) -> None:
        self._hold(
            self._keys[:, rows].clone(memory_format=torch.contiguous_format),
            self._values[:, rows].clone(memory_format=torch.contiguous_format),
            self._positions[rows].clone(),
        )

    def _hold(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Replace all tensors at once, after everything that can fail."""
        self.replaced_bytes = self.nbytes
        self._keys, self._values, self._positions = keys, values, positions
        self._count()

    def _count(self) -> None:
        self._count_bytes()
        self.usage.set_entries(len(self._positions) * self.layer.kv_heads)


Part = SlidingWindowLayer
