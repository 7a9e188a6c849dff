"""Layer without entries of its own: it attends to those of an earlier layer (Gemma 3n).

    source      entries of layer n        appended, planned for and counted there
    this layer  nothing

A block of several tokens is appended to the source behind the last layer that reads it, so that all
of them attend to the same entries. Plans follow the queries of the source alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.new_tokens import NewTokens
from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import LayerSpec
from larder.core.types import Keys, Mode, Positions, Values


class SharedKVLayer(CacheLayer):
    """Reader of another layer's entries. `link_shared_layers` sets the source."""

    has_public_name = False

    source: CacheLayer

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        """No effect: the source appends the tokens, a block behind its last reader."""
        if len(positions) > 1:
            self.source.finish_reader()

    def attention_calls(self, new: NewTokens) -> Iterable[AttentionCall]:
        """Kernel calls of the source; what it records of its own queries stays."""
        scratch = replace(new, mode=Mode.SCRATCH, shift=new.offset)
        return self.source.attention_calls(scratch)

    @property
    def _is_empty(self) -> bool:
        return not any(self.source.lengths)

    def apply(self, plan: Plan) -> None:
        raise CacheError(
            f"Layer {self.layer.index} shares the entries of layer {self.layer.kv_source}, so no "
            "plan applies to it: plan for managed layers only."
        )

    def evict(self, plan: Plan) -> None:
        self.apply(plan)

    def allocate(self, room: int) -> None:
        """No effect: the layer holds nothing."""
        del room

    def compact(self) -> None:
        """No effect: the layer holds nothing."""

    def truncate(self, length: int) -> None:
        """No effect: the layer holds nothing."""
        del length

    def entries(self) -> Entries:
        """No entries, of the dtype and on the device of the source."""
        held, nothing = self.source.entries(), (0,) * self.layer.kv_heads
        return Entries(held.keys[:0], held.values[:0], held.positions[:0], nothing, nothing)

    def state(self) -> dict[str, Tensor]:
        return {}

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> SharedKVLayer:
        return cls(layer)

    def own_tensors(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def lengths(self) -> tuple[int, ...]:
        return (0,) * self.layer.kv_heads


def link_shared_layers(layers: Sequence[CacheLayer]) -> None:
    """Link layers without entries of their own with the layers that they attend to."""
    readers = [layer for layer in layers if isinstance(layer, SharedKVLayer)]
    for reader in readers:
        assert reader.layer.kv_source is not None  # that is what makes it a reader
        reader.source = layers[reader.layer.kv_source]
        reader.source.num_readers = sum(
            other.layer.kv_source == reader.layer.kv_source for other in readers
        )


Part = SharedKVLayer
