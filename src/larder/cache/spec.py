"""Cache specification: form and options of a sequence's cache, and its metadata as text; names and
texts in saved states.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from larder.core.codec import Codec, ResidualSpec, TransformSpec
from larder.core.errors import CacheError, UsageError
from larder.core.part import Ledger
from larder.core.recall import OffloadSpec
from larder.core.registry import Family
from larder.core.spec import LayerPairing, LayerSpec, ModelSpec, RecomputeSpec

if TYPE_CHECKING:
    from larder.cache.forms.base import CacheLayer

FORMS = Family("cache form", "larder.cache.forms")


@dataclass(frozen=True)
class CacheSpec:
    """Form and options of the managed layers of a cache.

    Args:
        form: name of the cache form, a file of `larder.cache.forms`.
        ledger: columns, scalars and queries that a policy keeps.
        codecs: of precision grades 1, 2, ...
        pairing: which layers share entries, in a paired cache.
        parking: offload of rejected entries; None for none.
        rebuilding: recomputation of rejected entries; None for none.
        transform: transform coding of kept entries; None for none.
        residual: coding of what predictions from the layer below leave; None for none.
    """

    form: str
    ledger: Ledger = Ledger()
    codecs: tuple[Codec, ...] = ()
    pairing: LayerPairing = LayerPairing()
    parking: OffloadSpec | None = None
    rebuilding: RecomputeSpec | None = None
    transform: TransformSpec | None = None
    residual: ResidualSpec | None = None

    def options(self) -> dict[str, object]:
        """Options that not every form supports, by name; None for those that are not given."""
        return {
            "ledger": self.ledger if self.ledger != Ledger() else None,
            "codecs": self.codecs or None,
            "parking": self.parking,
            "rebuilding": self.rebuilding,
            "transform": self.transform,
            "residual": self.residual,
        }

    def check_options(self, supported: frozenset[str], required: frozenset[str]) -> None:
        """Check the options against those that a form supports and requires.

        Raises:
            CacheError: an option is not supported, or a required one is missing.
        """
        for name, value in self.options().items():
            if value is not None and name not in supported:
                others = [form for form in FORMS.names() if name in FORMS.load(form).supports]
                raise CacheError(
                    f"A {self.form} cache does not support {name}, got {value}: leave it out, or "
                    f"use a cache form that supports it ({', '.join(others)})."
                )
            if value is None and name in required:
                raise CacheError(f"A {self.form} cache requires {name}, got none: give it.")

    @property
    def corrects(self) -> bool:
        """True if decode steps correct entries of the latest tokens."""
        return self.parking is not None and bool(self.parking.recall.corrected)

    @property
    def reads_again(self) -> bool:
        """True if calls of the model may read earlier tokens beside new ones."""
        return self.corrects or self.rebuilding is not None

    def check_model(self, model: ModelSpec) -> None:
        """Check that a cache of a model with recurrent layers never reads its tokens again.

        Raises:
            CacheError: it does, from a position whose recurrent state is not known.
        """
        if model.recurrent and self.reads_again:
            reader = "corrected=" if self.corrects else "recompute()"
            raise CacheError(
                f"{reader} reads earlier tokens again, but recurrent layers of the model hold a "
                "state of all tokens and none of an earlier position: leave it out."
            )

    def meta(self) -> dict[str, str]:
        """Specification as text fields, the inverse of `of`."""
        return {
            "form": self.form,
            "columns": ",".join(self.ledger.columns),
            "scalars": ",".join(self.ledger.scalars),
            "queries": str(self.ledger.queries),
            "codecs": json.dumps([codec.to_fields() for codec in self.codecs]),
            "pairing": json.dumps(asdict(self.pairing)),
            "parking": "" if self.parking is None else self.parking.to_text(),
            "rebuilding": "" if self.rebuilding is None else self.rebuilding.to_text(),
            **({} if self.transform is None else {"transform": self.transform.to_text()}),
            **({} if self.residual is None else {"residual": self.residual.to_text()}),
        }

    @staticmethod
    def of(meta: Mapping[str, str]) -> CacheSpec:
        """Specification from `meta`; a missing field has its default."""
        columns, scalars = (
            tuple(filter(None, meta[kind].split(","))) for kind in ("columns", "scalars")
        )
        parking, rebuilding = meta.get("parking", ""), meta.get("rebuilding", "")
        transform, residual = meta.get("transform", ""), meta.get("residual", "")
        return CacheSpec(
            form=meta["form"],
            ledger=Ledger(columns, scalars, queries=int(meta.get("queries", "0"))),
            codecs=tuple(
                Codec.from_fields(parts) for parts in json.loads(meta.get("codecs", "[]"))
            ),
            pairing=LayerPairing(**json.loads(meta.get("pairing", "{}"))),
            parking=OffloadSpec.from_text(parking) if parking else None,
            rebuilding=RecomputeSpec.from_text(rebuilding) if rebuilding else None,
            transform=TransformSpec.from_text(transform) if transform else None,
            residual=ResidualSpec.from_text(residual) if residual else None,
        )


PLAIN = CacheSpec("ragged")  # without options


@dataclass(frozen=True)
class LayerOptions:
    """Options of one layer: how its tensors are created, and what its cache is specified as.

    Args:
        dtype, device: of keys and values.
    """

    dtype: torch.dtype
    device: torch.device
    spec: CacheSpec

    @staticmethod
    def of_state(state: Mapping[str, Tensor], spec: CacheSpec = PLAIN) -> LayerOptions:
        """Options of a restored layer, whose keys are in its state."""
        return LayerOptions(state["keys"].dtype, state["keys"].device, spec)

    def with_ledger(self, ledger: Ledger) -> LayerOptions:
        """Options with the ledger of a restored layer."""
        return replace(self, spec=replace(self.spec, ledger=ledger))


def with_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose names start with a prefix, by the rest of their names."""
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def text_tensor(text: str) -> Tensor:
    """Text as a tensor of its bytes."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def text_of(saved: Tensor) -> str:
    """Text of a tensor, the inverse of `text_tensor`."""
    return bytes(saved.cpu().tolist()).decode()


def saved_spec_text(state: Mapping[str, Tensor], key: str, layer: LayerSpec, kind: str) -> str:
    """Text of a spec in the state of a saved layer.

    Args:
        kind: `offload`, `transform`, ..., for the error.

    Raises:
        CacheError: the state has none.
    """
    if key not in state:
        raise CacheError(
            f"Layer {layer.index} of the saved cache has no {kind} spec, but its description has "
            "one: build the cache again."
        )
    return text_of(state[key])


def form_of(spec: CacheSpec) -> type[CacheLayer]:
    """Class of the form of a cache."""
    return FORMS.load(spec.form)


def create_layer(layer: LayerSpec, model: ModelSpec, spec: CacheSpec) -> CacheLayer:
    """Empty layer: of the specified form, a sliding window, or one that shares entries.

    Raises:
        UsageError: layers on several devices would hold numbers together.
    """
    kind: type[CacheLayer]
    if layer.kv_source is not None:
        kind = FORMS.load("shared_kv")
    elif layer.sliding_window is not None:
        kind = FORMS.load("window")
    else:
        kind = form_of(spec).layer_class(spec)
        if kind.can_page and model.arena is not None and _can_page(layer, spec):
            kind = FORMS.load("paged")
    if kind.spans_layers and model.layer_devices:
        found = ", ".join(dict.fromkeys(map(str, model.layer_devices)))
        raise UsageError(
            f"The layers of the model are computed on {found}, but this storage of the "
            "cache holds numbers of several layers together: name one device for all "
            "layers (device_map={'': DEVICE}), or take a policy that selects entries."
        )
    return kind.create(layer, model.of_layer(layer.index), spec)


def _can_page(layer: LayerSpec, spec: CacheSpec) -> bool:
    """True if a plain layer needs nothing beside keys, values, positions and a ledger."""
    is_coded = spec.codecs or spec.transform is not None or spec.residual is not None
    return not (is_coded or layer.latent_rank)
