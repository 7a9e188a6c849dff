"""Finding entries again that were parked in a slow tier: what a cache asks and an index answers.

A layer's slow tier numbers the entries of each kv head 0, 1, 2, ... in the order in which they
came, which is not always that of their positions. Numbers never change. An index divides them into
pages of its own making and finds pages for a query; what a page holds may change as entries come,
and then its version does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.codec import Codec
from larder.core.errors import BadParameter
from larder.core.family import Family, public_name
from larder.core.observation import Entries
from larder.core.spec import LayerSpec
from larder.core.spelling import build, parse, spell

RECALLS = Family("recall", "larder.recall")
SAMPLE_ENTRIES = 1 << 10  # of each head, by which the bytes of an index are judged beforehand


@dataclass(frozen=True)
class Estimate:
    """Entries that stand for many that were not fetched.

    Args:
        keys, values: per kv head.
        log_counts: added to their logits: ln of how many each stands for; -inf for none.
    """

    keys: Float[Tensor, "K E D"]
    values: Float[Tensor, "K E D"]
    log_counts: Float[Tensor, "K E"]


@dataclass(frozen=True)
class RecallResult:
    """Pages for the queries of one step, the best first.

    Args:
        pages: their numbers, -1 behind the last. A row per set: K sets, one for all query heads of
            a kv head, or H, one per query head; set n belongs to kv head n // (N / K).
        estimate: what stands for the entries of all other pages; None where nothing does.
        share: how much of the attention to all entries the found ones are estimated to have, per
            query head, in (0, 1]; the rest goes to `mean`. None where nothing is mixed in.
        mean: the mean value of all entries, per kv head, wherever there is a share.
        is_whole: whether the step attends to everything that is parked instead of the pages.
    """

    pages: Int64[Tensor, "N P"]
    estimate: Estimate | None = None
    share: Float[Tensor, " H"] | None = None
    mean: Float[Tensor, "K D"] | None = None
    attends_all: bool = False


class RecallIndex(ABC):
    """Finds entries of one layer's slow tier by their keys, for all heads in one call.

    It holds no keys or values but digests of them: the slow tier hands its entries over at every
    call, in host memory, in the order of their numbers. One thread at a time may use it.

    Args:
        page: the most entries that a page holds; 1 where entries are found one by one.
    """

    page: int

    # Whether looking for pages leaves it as it was, so that two caches may use one until it grows.
    is_stateless: ClassVar[bool] = True

    @abstractmethod
    def add(self, entries: Entries, queries: Float[Tensor, "H Q D"] | None = None) -> None:
        """Take in all entries that it does not know yet: of each head those with higher numbers.

        Args:
            queries: the latest of the text, where the part asked for any.
        """

    def follow(self, queries: Float[Tensor, "H D"], stays: Entries) -> None:
        """Note what a step asks before it is searched for, where the part `follows` steps; the
        newest token is the last that `stays` in the fast tier, in every head.
        """
        del queries, stays

    @abstractmethod
    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        """At most `count` pages per set for the query of every query head."""

    @abstractmethod
    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        """What `find` would answer if its search missed nothing, by looking at every key."""

    @abstractmethod
    def contents(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P S"]:
        """Numbers of the entries of pages, -1 behind the last of each; S is `page`."""

    @abstractmethod
    def versions(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P"]:
        """How often the contents of pages have changed."""

    @property
    @abstractmethod
    def counts(self) -> tuple[int, ...]:
        """Pages of each kv head."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor and array held, as tensors, slack included: what its bytes are."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Everything that `Recall.adopt` needs to answer alike, without slack."""


class SearchMode(Enum):
    """Whether an index is asked what it finds, or what it would find if it missed nothing."""

    INDEX = "index"
    EXACT = "exact"


class FetchMode(Enum):
    """When pages are searched for and moved, while text is generated.

    IN_TURN: when a layer asks, with its own queries.
    AHEAD: on a worker thread, while the layer before computes, with what that one foretells of the
        queries. Close, not equal.
    COMPARED: ahead, and once more in turn, to count the pages that both find.
    """

    IN_TURN = "in_turn"
    AHEAD = "ahead"
    COMPARED = "compared"


class PrefillRecall(Enum):
    """What blocks of text see of what is parked: all of it, or what their mean query finds."""

    EXACT = "exact"
    RECALLED = "recalled"


@dataclass(frozen=True)
class RecallPart(ABC):
    """How parked entries are found again: a part of a policy. A frozen dataclass.

    Args:
        tokens: entries per kv head that are fetched for a step; None for what the budget leaves
            beside the protected ones.
        dense: the first so many layers park nothing.
        search: what the index is asked.
        fetch: when it is asked, while text is generated.
        layers: so many layers in a row share what the first of them finds. The others have no index
            as long as they have parked the same tokens, head by head; else they search themselves.
            IceCache's released code has 3 of them where it is asked to.
        corrected: so many of the latest tokens are read once more with every new one, and attend to
            what was fetched for it; see `larder.cache.forms.corrected`. No more than protect.recent
            keeps. RetroAttention has 1 and more.
        union: entries per kv head that the tokens of a question attend to together, of what is
            parked: the pages that each of them finds, the best of each in turn. Left open, all of
            it, exactly.

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

    # Whether what it finds is pages and nothing else, so that another layer can use it.
    is_plain: ClassVar[bool] = True
    # How many of the latest queries of a text the index wants to see when entries come.
    observed: ClassVar[int] = 0
    # Names of the tallies whose columns it reads, where the cache keeps them.
    tallies: ClassVar[frozenset[str]] = frozenset()
    # Names of the sets of token ids that these tallies need.
    lexicon: ClassVar[frozenset[str]] = frozenset()
    # Whether its index is told of every step before it is searched.
    follows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        name = public_name(type(self))
        if self.page < 1:
            raise BadParameter(f"{name}.page must be at least 1 entry, got {self.page}.")
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
        if self.dense < 0:
            raise BadParameter(f"{name}.dense must be at least 0 layers, got {self.dense}.")
        if self.layers < 1:
            raise BadParameter(f"{name}.layers must be at least 1, got {self.layers}.")
        if self.corrected < 0:
            raise BadParameter(f"{name}.corrected must be at least 0, got {self.corrected}.")
        if self.corrected and not self.is_plain:
            raise BadParameter(
                f"{name}.corrected must be 0, got {self.corrected}: what {name} has estimated for "
                "a token cannot be taken back when it is fetched."
            )
        if self.layers > 1 and not self.is_plain:
            raise BadParameter(
                f"{name}.layers must be 1, got {self.layers}: what {name} says of entries that it "
                "does not fetch holds for the layer that was searched alone."
            )

    @property
    @abstractmethod
    def page(self) -> int:
        """The most entries of a page."""

    @property
    def pages(self) -> int:
        """Pages per kv head that are fetched for a step, once `tokens` is filled in."""
        return (self.tokens or 0) // self.page

    @property
    def prefill(self) -> PrefillRecall:
        """What blocks of a text attend to of what is parked."""
        return PrefillRecall.EXACT

    def sets(self, layer: LayerSpec) -> int:
        """Sets of pages that a step has room for, of `tokens` entries each: one per kv head, which
        query heads that choose for themselves share, or one per query head, in R times the memory.
        """
        return layer.kv_heads

    def leader_of(self, place: int) -> int:
        """Which layer searches for one, by their places among the layers that park."""
        return place - place % self.layers

    @abstractmethod
    def index(self, layer: LayerSpec) -> RecallIndex:
        """An empty index for one layer."""

    @abstractmethod
    def adopt(self, layer: LayerSpec, state: Mapping[str, Tensor]) -> RecallIndex:
        """The index that `state` came from."""

    def entry_bytes(self, layer: LayerSpec) -> float:
        """About what an index takes for each entry: what one over random entries does."""
        source, heads = torch.Generator().manual_seed(0), layer.kv_heads
        keys, values = torch.randn(2, heads * SAMPLE_ENTRIES, layer.head_dim, generator=source)
        queries = torch.randn(layer.query_heads, self.observed, layer.head_dim, generator=source)
        starts = tuple(head * SAMPLE_ENTRIES for head in range(heads))
        positions = torch.arange(SAMPLE_ENTRIES, dtype=torch.int32).repeat(heads)
        index = self.index(layer)
        sample = Entries(keys, values, positions, starts, (SAMPLE_ENTRIES,) * heads)
        index.add(sample, queries if self.observed else None)
        held = sum(tensor.untyped_storage().nbytes() for tensor in index.tensors())
        return held / len(keys)


@dataclass(frozen=True)
class OffloadSpec:
    """Where rejected entries go, and how they are found again.

    Args:
        host_mib: the most host memory that a sequence's parked entries may take; None for what
            the machine has.
        codec: in how few bits they are held; None for as they are.
    """

    recall: RecallPart
    host_mib: int | None = None
    codec: Codec | None = None

    def to_text(self) -> str:
        """All of it as text."""
        rounded = "" if self.codec is None else f" > {spell(self.codec)}"
        return f"{'' if self.host_mib is None else self.host_mib} {spell(self.recall)}{rounded}"

    @staticmethod
    def from_text(text: str) -> OffloadSpec:
        """What `told` gave."""
        host, _, sentence = text.partition(" ")
        call, *rounded = parse(sentence)
        recall = build(RECALLS.load(call.name), call.parameters)
        codec = build(Codec, rounded[0].parameters) if rounded else None
        return OffloadSpec(recall, int(host) if host else None, codec)
