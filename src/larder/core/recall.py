"""Recall of offloaded entries: the interface between a cache and its recall index.

A layer's slow tier numbers the entries of each kv head 0, 1, 2, ... in order of arrival, which is
not always that of their positions. Numbers never change. An index groups them into pages and finds
pages for a query; the content of a page may change as entries arrive, and then its version does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from larder.core.arguments import require
from larder.core.codec import Codec, TransformSpec
from larder.core.errors import BadParameter
from larder.core.observation import Entries
from larder.core.part import PolicyPart
from larder.core.registry import Family, public_name
from larder.core.spec import LayerSpec
from larder.core.spelling import build, parse, spell

RECALLS = Family("recall", "larder.recall")
GAPLESS = "compact()"  # in the text form of an offload
# Codings of offloaded entries, by their names in it.
CODINGS: Mapping[str, type[Codec | TransformSpec]] = {"codec": Codec, "transform": TransformSpec}
SAMPLE_ENTRIES = 1 << 10  # per head, of the sample that estimates the bytes of an index


@dataclass(frozen=True)
class Estimate:
    """Summary entries that represent entries that were not fetched.

    Args:
        keys, values: per kv head.
        log_counts: ln of the number of entries that each represents, added to its logit; -inf for
            none.
    """

    keys: Float[Tensor, "K E D"]
    values: Float[Tensor, "K E D"]
    log_counts: Float[Tensor, "K E"]


@dataclass(frozen=True)
class RecallResult:
    """Pages found for the queries of one step, the best first.

    Args:
        pages: page numbers, -1 behind the last. A row per set: K sets, one for all query heads of
            a kv head, or H, one per query head; set n belongs to kv head n // (N / K).
        log_weights: added to the logits of the entries of each page, in natural log units: -ln of
            the probability with which a sampled page was found, so that it stands for those that
            were not; -inf for a page without weight. None for none.
        estimate: summary of the entries of all other pages; None for none.
        share: estimated share of all attention that goes to the found entries, per query head, in
            (0, 1]; the rest goes to `mean`. None where nothing is mixed in.
        mean: mean value of all entries, per kv head, where `share` is given.
        attends_all: whether the step attends to all offloaded entries instead of the pages.
    """

    pages: Int64[Tensor, "N P"]
    estimate: Estimate | None = None
    share: Float[Tensor, " H"] | None = None
    mean: Float[Tensor, "K D"] | None = None
    attends_all: bool = False
    log_weights: Float[Tensor, "N P"] | None = None


class TreeArrays(NamedTuple):
    """Pages [T] and cells [U] of trees over keys, those of all heads one behind the other.

    Numbers of pages, cells and entries are of a head each, and start at 0.

    Args:
        members: of each page, -1 behind the last: entries on level 0, cells above.
        fills: number of members of each page.
        versions: number of changes of the members of each page.
        nexts: next page of the same cell, -1 behind the last.
        lows: smallest projection of the keys of each page.
        tiers: level of each page.
        firsts: first page of each cell, -1 for none.
        centers: entry that each cell is below.
        scales, means: mean of the keys below each cell is its scale times these codes; no columns
            for none.
    """

    members: Shaped[np.ndarray, "T S"]
    fills: Shaped[np.ndarray, " T"]
    versions: Shaped[np.ndarray, " T"]
    nexts: Shaped[np.ndarray, " T"]
    lows: Shaped[np.ndarray, " T"]
    tiers: Shaped[np.ndarray, " T"]
    firsts: Shaped[np.ndarray, " U"]
    centers: Shaped[np.ndarray, " U"]
    scales: Shaped[np.ndarray, " U"]
    means: Shaped[np.ndarray, "U M"]


@dataclass(frozen=True)
class KeyTrees:
    """Trees over the keys of a layer, one per kv head, as `larder.ops.dci.search` takes them.

    Args:
        bases: first page and first cell of each head, and the end of the last one's.
        levels: of each head.
        beams: cells of each level that a search visits in each head.
    """

    tree: TreeArrays
    bases: Int64[np.ndarray, "2 N"]
    levels: Int64[np.ndarray, " K"]
    beams: Int64[np.ndarray, " K"]


class RecallIndex(ABC):
    """Search index over the offloaded keys of one layer, all heads in one call.

    It holds summaries instead of keys and values: the slow tier passes its entries at every call,
    in host memory, in the order of their numbers. One thread at a time may use it.

    Args:
        page: most entries of a page; 1 where entries are found one by one.
    """

    page: int

    # Whether a search leaves the index unchanged, so that two caches may share it until it grows.
    is_stateless: ClassVar[bool] = True

    @abstractmethod
    def add(self, entries: Entries, queries: Float[Tensor, "H Q D"] | None = None) -> None:
        """Add new entries: in each head those with numbers not yet indexed.

        Args:
            queries: latest queries of the text, where the part has `observed` above 0.
        """

    def observe_step(
        self,
        queries: Float[Tensor, "H D"],
        stays: Entries,
        before: Float[Tensor, "H Q D"] | None = None,
    ) -> None:
        """Observe the queries of a step before its search, where the part has `follows`.

        Args:
            stays: entries of the fast tier; the newest token is the last of every head.
            before: queries of the latest tokens before the step, read or generated, where the part
                has `observed` above 0; None if there were none.
        """
        del queries, stays, before

    @abstractmethod
    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        """Best pages, at most `count` per set, for one query per query head."""

    @abstractmethod
    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        """Result of `find` under exhaustive search over every key."""

    @property
    def has_key_trees(self) -> bool:
        """True if `find` takes the best pages of each query head in `key_trees`, in turn."""
        return False

    def key_trees(self, count: int) -> KeyTrees:
        """Trees in which `find` looks for `count` pages of each head, where it has some."""
        raise NotImplementedError  # indexes that have trees override it

    @abstractmethod
    def contents(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P S"]:
        """Entry numbers of pages, -1 behind the last of each; S is `page`."""

    @abstractmethod
    def versions(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P"]:
        """Version of each page: the number of changes of its content."""

    @property
    @abstractmethod
    def counts(self) -> tuple[int, ...]:
        """Number of pages of each kv head."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors and arrays of the index, as tensors, slack included; their bytes are
        counted.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of `tensors`."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors())

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """State that `restore` takes, without slack."""

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a new index from copies of the tensors of `state`."""


class SearchMode(Enum):
    """Search by the index, or exhaustive search over all keys."""

    INDEX = "index"
    EXACT = "exact"


class FetchMode(Enum):
    """Time at which a decode step searches and fetches pages.

    IN_TURN: in the attention of the layer, with its own queries.
    AHEAD: on a worker thread, while the layer before computes, with predicted queries. Results are
        close but not equal.
    COMPARED: ahead and again in turn, to count the pages that both find.
    """

    IN_TURN = "in_turn"
    AHEAD = "ahead"
    COMPARED = "compared"


class PrefillRecall(Enum):
    """Offloaded entries that prefill blocks attend to: all, or the pages of their mean query."""

    EXACT = "exact"
    RECALLED = "recalled"


@dataclass(frozen=True)
class RecallPart(PolicyPart, ABC):
    """Recall part of a policy: how offloaded entries are found again. A frozen dataclass.

    Args:
        tokens: entries per kv head that are fetched for a step; None for what the budget leaves
            beside the protected ones.
        dense: number of first layers that offload nothing.
        search: index search or exhaustive search.
        fetch: when a decode step searches.
        layers: consecutive layers that share the pages of the first of them. The others have no
            index as long as they have offloaded the same tokens, head by head; else they search for
            themselves. IceCache's released code has an option for 3.
        corrected: latest tokens that are read again with every new one and attend to the pages
            fetched for it; see `larder.cache.forms.corrected`. At most protect.recent.
            RetroAttention has 1 and more.
        union: offloaded entries per kv head that the tokens of a question attend to together: the
            pages that each of them finds, the best of each in turn. Open: all of them, exactly.
        exact: offloaded entries per kv head up to which a decode step attends to all of them
            instead of searching. Open: `larder` measures up to where that is faster on this
            machine, where offloaded entries lie in the model's memory; caches that are created
            without it search always.

    Raises:
        BadParameter: a value out of range.
    """

    tokens: int | None = None
    dense: int = 2
    search: SearchMode = SearchMode.INDEX
    fetch: FetchMode = FetchMode.IN_TURN
    layers: int = 1
    corrected: int = 0
    union: int | None = None
    exact: int | None = None

    # Whether results are pages only, without estimates, so that another layer can use them.
    is_plain: ClassVar[bool] = True
    # Whether found pages have log-weights, which hold for the query that was searched for.
    weighs_pages: ClassVar[bool] = False
    # Number of latest queries of a text that the index needs when entries are added.
    observed: ClassVar[int] = 0
    # Whether these arrive as they were before rotation.
    observes_unrotated: ClassVar[bool] = False
    # Whether something is measured over the indexes of all layers before the first is searched.
    measures_layers: ClassVar[bool] = False
    # Whether its index observes every step before the search.
    follows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        name = public_name(type(self))
        require(self.page >= 1, f"{name}.page", "at least 1 entry", self.page)
        if self.tokens is not None and self.tokens < 1:
            raise BadParameter(f"{name}.tokens must be at least 1, got {self.tokens}.")
        if self.tokens is not None and self.tokens % self.page:
            raise BadParameter(
                f"{name}.tokens is {self.tokens}, which pages of {self.page} do not divide: give "
                f"{self.tokens // self.page * self.page or self.page}, or another page."
            )
        if self.union is not None and (self.union < self.page or self.union % self.page):
            raise BadParameter(
                f"{name}.union must be whole pages of {self.page} entries, at least one, got "
                f"{self.union}."
            )
        if self.union is not None and self.weighs_pages:
            raise BadParameter(
                f"{name}.union must be open, got {self.union}: what {name} finds is weighted for "
                "one token, and others of a question would attend to it with wrong weights."
            )
        if self.exact is not None and self.exact < 0:
            raise BadParameter(f"{name}.exact must be at least 0 entries, got {self.exact}.")
        if self.exact and not self.can_read_all:
            raise BadParameter(
                f"{name}.exact must be 0 or open, got {self.exact}: with these parameters every "
                f"step of {name} has to search."
            )
        require(self.dense >= 0, f"{name}.dense", "at least 0 layers", self.dense)
        require(self.layers >= 1, f"{name}.layers", "at least 1", self.layers)
        require(self.corrected >= 0, f"{name}.corrected", "at least 0", self.corrected)
        if self.corrected and not self.is_plain:
            raise BadParameter(
                f"{name}.corrected must be 0, got {self.corrected}: an estimate that {name} used "
                "for a token cannot be undone once the token is fetched."
            )
        if self.layers > 1 and not self.is_plain:
            raise BadParameter(
                f"{name}.layers must be 1, got {self.layers}: its estimates of entries "
                "that are not fetched hold only for the layer that was searched."
            )

    @property
    @abstractmethod
    def page(self) -> int:
        """Most entries of a page."""

    @property
    def pages(self) -> int:
        """Pages per kv head that are fetched for a step, once `tokens` is filled in."""
        return (self.tokens or 0) // self.page

    @property
    def can_read_all(self) -> bool:
        """True if a step may attend to all entries in place of a search, which leaves no trace."""
        is_alone = self.layers == 1 and not self.corrected and self.fetch is FetchMode.IN_TURN
        return is_alone and self.is_plain and not self.follows and not self.observed

    @property
    def prefill(self) -> PrefillRecall:
        """Offloaded entries that prefill blocks attend to."""
        return PrefillRecall.EXACT

    @property
    def coverage(self) -> float:
        """Share of each query head's attention that the lines cover along which several tokens are
        read; 1 for all of it.
        """
        return 1.0

    def awaits_measurement(self, indexes: Sequence[RecallIndex]) -> bool:
        """True if `measure` would change indexes."""
        del indexes
        return False

    def measure(self, indexes: Sequence[RecallIndex]) -> None:
        """Measure what holds for all layers, where the part has `measures_layers`.

        Args:
            indexes: one per layer that offloads, each with all offloaded entries.
        """
        del indexes

    def sets(self, layer: LayerSpec) -> int:
        """Number of page sets of a step, of `tokens` entries each: one per kv head, shared by its
        query heads, or one per query head, in R times the memory.
        """
        return layer.kv_heads

    def leader_of(self, index: int) -> int:
        """Layer whose pages a layer uses, both as indices among the layers that offload."""
        return index - index % self.layers

    @abstractmethod
    def index(self, layer: LayerSpec) -> RecallIndex:
        """Empty index for one layer."""

    def adopt(self, layer: LayerSpec, state: Mapping[str, Tensor]) -> RecallIndex:
        """Index restored from `RecallIndex.state`."""
        index = self.index(layer)
        index.restore(state)
        return index

    def entry_bytes(self, layer: LayerSpec) -> float:
        """Estimated index bytes per entry, measured on random entries."""
        source, heads = torch.Generator().manual_seed(0), layer.kv_heads
        keys, values = torch.randn(2, heads * SAMPLE_ENTRIES, layer.head_dim, generator=source)
        queries = torch.randn(layer.query_heads, self.observed, layer.head_dim, generator=source)
        starts = tuple(head * SAMPLE_ENTRIES for head in range(heads))
        positions = torch.arange(SAMPLE_ENTRIES, dtype=torch.int32).repeat(heads)
        index = self.index(layer)
        sample = Entries(keys, values, positions, starts, (SAMPLE_ENTRIES,) * heads)
        index.add(sample, queries if self.observed else None)
        total = sum(tensor.untyped_storage().nbytes() for tensor in index.tensors())
        return total / len(keys)


@dataclass(frozen=True)
class OffloadSpec:
    """Offload of rejected entries to host memory, and their recall.

    Args:
        host_mib: most host memory of a sequence's offloaded entries, in MiB; None for no limit.
        codec: quantization or transform coding of offloaded entries; None for none.
        is_gapless: whether recalled and resident entries are attended to at consecutive positions.
    """

    recall: RecallPart
    host_mib: int | None = None
    codec: Codec | TransformSpec | None = None
    is_gapless: bool = False

    def of_model(self, fingerprint: str) -> OffloadSpec:
        """Spec with the fingerprint of a model, where the coding has calibrated tables."""
        if not isinstance(self.codec, TransformSpec):
            return self
        return replace(self, codec=self.codec.of_model(fingerprint))

    def to_text(self) -> str:
        """Text form, as sessions save it."""
        parts = [spell(self.recall)] + ([] if self.codec is None else [_coding_text(self.codec)])
        parts += [GAPLESS] if self.is_gapless else []
        return f"{'' if self.host_mib is None else self.host_mib} {' > '.join(parts)}"

    @staticmethod
    def from_text(text: str) -> OffloadSpec:
        """Spec from its text form."""
        host, _, sentence = text.partition(" ")
        call, *others = parse(sentence)
        recall = build(RECALLS.load(call.name), call.parameters)
        codecs = [other for other in others if f"{other.name}()" != GAPLESS]
        codec = build(CODINGS[codecs[0].name], codecs[0].parameters) if codecs else None
        return OffloadSpec(recall, int(host) if host else None, codec, len(codecs) < len(others))


def _coding_text(coding: Codec | TransformSpec) -> str:
    """Text of the coding of offloaded entries, by its name in `CODINGS`."""
    name = next(name for name, kind in CODINGS.items() if isinstance(coding, kind))
    return f"{name}({spell(coding).partition('(')[2]}"
