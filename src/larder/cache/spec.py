"""Cache specification: form and options of a sequence's cache, and its metadata as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from larder.cache.forms._shared_entries import LOWER, UPPER
from larder.cache.forms.base import CacheLayer
from larder.cache.forms.compact import CompactLayer
from larder.cache.forms.corrected import CorrectedLayer
from larder.cache.forms.dense import DenseLayer
from larder.cache.forms.graded import GradedLayer
from larder.cache.forms.paired import PairedLayer, link_pairs
from larder.cache.forms.ragged import RaggedLayer
from larder.cache.forms.rebuilt import RecomputedLayer
from larder.cache.forms.tiered import TieredLayer, tiered_layers
from larder.cache.forms.window import SlidingWindowLayer
from larder.cache.offload.host_memory import MIB, HostMemoryBudget
from larder.core.codec import Codec
from larder.core.errors import CacheError
from larder.core.ledger import Ledger
from larder.core.recall import OffloadSpec
from larder.core.spec import LayerPairing, LayerSpec, ModelSpec, RecomputeSpec


class CacheForm(Enum):
    """Storage form of the managed layers of a cache."""

    DENSE = "dense"
    RAGGED = "ragged"
    COMPACT = "compact"
    PAIRED = "paired"
    TIERED = "tiered"
    REBUILT = "rebuilt"


@dataclass(frozen=True)
class CacheSpec:
    """Form and options of the managed layers; creates and links a `CacheLayer` per layer.

    Args:
        ledger: columns, scalars and queries that a policy keeps.
        codecs: of precision grades 1, 2, ...
        pairing: which layers share entries, in a paired cache.
        parking: offload of rejected entries, in a tiered cache; None in any other.
        rebuilding: recomputation of rejected entries, in a rebuilt cache; None in any other.

    Raises:
        CacheError: a dense cache with a ledger, codecs without a ragged cache, or `parking` or
            `rebuilding` that does not match the form.
    """

    form: CacheForm
    ledger: Ledger = Ledger()
    codecs: tuple[Codec, ...] = ()
    pairing: LayerPairing = LayerPairing()
    parking: OffloadSpec | None = None
    rebuilding: RecomputeSpec | None = None

    def __post_init__(self) -> None:
        if self.form is CacheForm.DENSE and self.ledger != Ledger():
            names = ", ".join(self.ledger.columns + self.ledger.scalars) or "queries"
            raise CacheError(f"A dense cache holds no {names}: use a ragged cache.")
        if self.form is not CacheForm.RAGGED and self.codecs:
            raise CacheError(
                f"A {self.form.value} cache has one precision: use a ragged one for codecs."
            )
        if (self.form is CacheForm.TIERED) != (self.parking is not None):
            raise CacheError(
                f"A {self.form.value} cache was given the offload spec {self.parking}: a tiered "
                "cache needs one, and no other form offloads entries."
            )
        if (self.form is CacheForm.REBUILT) != (self.rebuilding is not None):
            raise CacheError(
                f"A {self.form.value} cache was given the recompute spec {self.rebuilding}: a "
                "rebuilt cache needs one, and no other form recomputes entries."
            )

    def store(self, layer: LayerSpec, spec: ModelSpec) -> CacheLayer:
        """Empty `CacheLayer` for one layer; `link_layers` links it with the others."""
        own = layer, spec.dtype, spec.device
        if layer.sliding_window is not None:
            if self.parking is not None and self.parking.recall.corrected:
                raise CacheError(
                    f"Layer {layer.index} has a sliding window and stores no outputs to correct: "
                    "use corrected=0, or a model without such layers."
                )
            return SlidingWindowLayer(*own)
        if self.form is CacheForm.DENSE:
            return DenseLayer(*own)
        if self.form is CacheForm.PAIRED:
            uppers = [upper for _, upper in self.pairing.pairs(spec.managed)]
            side = UPPER if layer.index in uppers else LOWER
            return PairedLayer(*own, self.ledger, self.pairing, side)
        if self.parking is not None:
            kind = CorrectedLayer if self.parking.recall.corrected else TieredLayer
            return kind(*own, self.ledger, self.parking)
        if self.rebuilding is not None:
            return RecomputedLayer(*own, self.ledger, self.rebuilding)
        if self.codecs:
            return GradedLayer(*own, self.ledger, self.codecs)
        kind = CompactLayer if self.form is CacheForm.COMPACT else RaggedLayer
        return kind(*own, self.ledger)

    def meta(self) -> dict[str, str]:
        """Specification as text fields, the inverse of `of`."""
        return {
            "form": self.form.value,
            "columns": ",".join(self.ledger.columns),
            "scalars": ",".join(self.ledger.scalars),
            "queries": str(self.ledger.queries),
            "codecs": json.dumps([asdict(codec) for codec in self.codecs]),
            "pairing": json.dumps(asdict(self.pairing)),
            "parking": "" if self.parking is None else self.parking.to_text(),
            "rebuilding": "" if self.rebuilding is None else self.rebuilding.to_text(),
        }

    def is_budgeted(self, layer: LayerSpec) -> bool:
        """True for layers under a budget: full attention, and not among the first, dense ones."""
        dense = 0 if self.parking is None else self.parking.recall.dense
        if self.rebuilding is not None:
            dense = self.rebuilding.depth
        return layer.sliding_window is None and layer.index >= dense

    def link_layers(self, stores: Sequence[CacheLayer]) -> None:
        """Link pairs, the shared host memory budget and recall leaders of a sequence's layers."""
        link_pairs(stores)
        if self.parking is not None:
            mib = self.parking.host_mib
            room = HostMemoryBudget(None if mib is None else mib * MIB)
            for store in tiered_layers(stores):
                store.join(room)
            link_recall_leaders(stores)

    @staticmethod
    def of(meta: Mapping[str, str]) -> CacheSpec:
        """Specification from `meta`; a missing field has its default."""
        names = [tuple(filter(None, meta[kind].split(","))) for kind in ("columns", "scalars")]
        codecs = tuple(Codec(**parts) for parts in json.loads(meta.get("codecs", "[]")))
        pairing = LayerPairing(**json.loads(meta.get("pairing", "{}")))
        told = meta.get("parking", "")
        parking = OffloadSpec.from_text(told) if told else None
        manner = meta.get("rebuilding", "")
        rebuilding = RecomputeSpec.from_text(manner) if manner else None
        ledger = Ledger(*names, queries=int(meta.get("queries", "0")))
        return CacheSpec(CacheForm(meta["form"]), ledger, codecs, pairing, parking, rebuilding)


def link_recall_leaders(stores: Sequence[CacheLayer]) -> None:
    """Link each tiered layer to the layer whose page selections it reuses, if any."""
    parking = [store for store in tiered_layers(stores) if not store.is_dense]
    for place, store in enumerate(parking):
        leader = parking[store.parking.recall.leader_of(place)]
        store.leader = leader if leader is not store and _same_heads(leader, store) else None


def _same_heads(left: TieredLayer, right: TieredLayer) -> bool:
    """True if two layers have the same numbers of kv heads and query heads."""
    pair = left.layer, right.layer
    return len({(layer.kv_heads, layer.query_heads) for layer in pair}) == 1
