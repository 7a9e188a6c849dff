"""The cache of one sequence: a store per layer, and the true position of the next token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.forms.base import CacheLayer
from larder.cache.forms.tiered import TieredLayer, tiered_layers
from larder.cache.latest_activations import LatestActivations
from larder.cache.spec import CacheForm, CacheSpec
from larder.cache.state_dict import move_state, restore_layers, state_dict
from larder.core.codec import Codec
from larder.core.errors import BudgetError, CacheError
from larder.core.ledger import Ledger
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.recall import OffloadSpec
from larder.core.spec import LayerPairing, ModelSpec, RecomputeSpec
from larder.core.types import Keys, Mode, Positions, Queries, Values


class SequenceCache:
    """Keys and values of one sequence, for all layers.

    `next_position` is the number of tokens truly read, whatever is left of them. If a pass through
    the model fails halfway, `truncate(next_position)` puts every layer back, unless a plan was
    carried out in it: what a plan rejects is freed at once. Such a cache is `invalidate`ed, and of
    no use any more. Two threads must not use one cache; what forks share stands still.
    `plans` counts the changes so far that cannot be taken back: plans, and columns written.
    `latest` is what is remembered of the newest tokens, where somebody asks for it.

    Args:
        ledger, ..., rebuilding: as in `CacheSpec`, which refuses what does not fit.
    """

    def __init__(
        self,
        spec: ModelSpec,
        form: CacheForm,
        ledger: Ledger = Ledger(),  # noqa: B008, frozen and empty
        codecs: Sequence[Codec] = (),
        pairing: LayerPairing | None = None,
        parking: OffloadSpec | None = None,
        rebuilding: RecomputeSpec | None = None,
    ) -> None:
        self.spec = spec
        self.cache_spec = CacheSpec(
            form, ledger, tuple(codecs), pairing or LayerPairing(), parking, rebuilding
        )
        self.next_position = 0
        self.plans = 0
        self.latest = LatestActivations(ledger.queries)
        self._is_spoiled = False
        self._stores = [self.cache_spec.store(layer, spec) for layer in spec.layers]
        self.cache_spec.link_layers(self._stores)

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: Keys,
        values: Values,
        positions: Positions,
        mode: Mode,
        sections: tuple[int, ...],
        shift: int = 0,
    ) -> Queries:
        """One layer's attention, in one of three modes.

        Args:
            shift: how much later than `next_position` a scratch text begins; below 0 earlier.

        Raises: CacheError: several sections were to be appended, or the cache is spoiled.
        """
        self._check()
        if mode is Mode.PROBE:
            return torch.zeros_like(queries)
        store = self._stores[layer]
        if mode is Mode.SCRATCH:
            return store.attend(queries, keys, values, positions, sections, shift)
        if len(sections) != 1:
            raise CacheError(f"{len(sections)} sections were to be appended: append one at a time.")
        return store.extend(queries, keys, values, positions)

    def record_logits(self, layers: Iterable[int]) -> None:
        """Have layers keep the logits of the next token that is attended, for `heard`."""
        for layer in layers:
            self._stores[layer].record_logits()

    def heard(self, layer: int) -> Float[Tensor, "R C"] | None:
        """As `Store.heard`."""
        return self._stores[layer].heard()

    def advance(self, tokens: int) -> None:
        """Count tokens as read, once every layer holds them."""
        self.next_position += tokens

    def apply(self, layer: int, plan: Plan) -> None:
        """Carry out a plan in one layer; what it rejects is freed at once."""
        with self._changing():
            self._stores[layer].apply(plan)

    def evict(self, layer: int, plan: Plan) -> None:
        """Carry out a plan; what it rejects becomes room for the tokens that come next."""
        with self._changing():
            self._stores[layer].evict(plan)

    def note(self, layer: int, columns: Mapping[str, Tensor]) -> None:
        """Replace columns of the ledger in one layer, one number per row of its storage."""
        with self._changing():
            self._stores[layer].note(columns)

    def remember(self, layer: int, queries: Queries, positions: Positions) -> None:
        """Take the queries of a pass, post-RoPE, among the latest of a layer."""
        with self._changing():
            self.latest.remember(layer, queries, positions)

    def forget(self, start: int, stop: int) -> None:
        """Have managed layers drop for good what they hold at true positions [start, stop)."""
        with self._changing():
            for layer in self.spec.managed:
                self._stores[layer.index].forget(start, stop)

    def invalidate(self) -> None:
        """A pass failed after some layers had carried out their plans: no layer may be used."""
        self._is_spoiled = True

    def allocate(self, room: int) -> None:
        """Set storage aside for at least `room` more tokens per head, which stay."""
        for store in self._stores:
            store.allocate(room)

    def reserve(self, room: int) -> None:
        """As `allocate`, for tokens that `truncate` may take back, also from sliding windows."""
        for store in self._stores:
            store.reserve(room)

    def compact(self) -> None:
        """Give all slack back."""
        for store in self._stores:
            store.compact()

    def truncate(self, length: int) -> None:
        """Forget everything at true positions `length` and later."""
        for store in self._stores:
            store.truncate(length)
        if length < self.next_position:
            self.next_position = length
            self.latest.truncate(length)

    def fork(self) -> SequenceCache:
        """An independent copy, without slack."""
        self._check()
        copy = SequenceCache(self.spec, **vars(self.cache_spec))
        copy._stores = [store.fork() for store in self._stores]
        copy.cache_spec.link_layers(copy._stores)
        copy.next_position, copy.latest = self.next_position, self.latest.fork()
        return copy

    def entries(self, layer: int) -> Entries:
        """What a layer holds, as views; as a copy where it is held in few bits."""
        self._check()
        return self._stores[layer].entries()

    def entries_copy_bytes(self, layer: int) -> int:
        """Bytes that `entries` copies; 0 where it hands out views."""
        return self._stores[layer].entries_copy_bytes

    def attention_copy_bytes(self, layer: int) -> int:
        """As `Store.attended_bytes`."""
        return self._stores[layer].attention_copy_bytes

    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Entries of each kv head of each layer."""
        return tuple(store.lengths for store in self._stores)

    def full_precision_lengths(self) -> tuple[tuple[int, ...], ...]:
        """Those of them that are held at full precision."""
        return tuple(store.full_precision_lengths for store in self._stores)

    @property
    def managed_entries(self) -> int:
        """Entries over all layers and heads that a budget governs."""
        return sum(sum(s.lengths) for s in self._stores if self.cache_spec.is_budgeted(s.layer))

    @property
    def stores(self) -> tuple[CacheLayer, ...]:
        """Those of all layers."""
        return tuple(self._stores)

    @property
    def tiers(self) -> list[TieredLayer]:
        """The stores of layers that have a slow tier."""
        return tiered_layers(self._stores)

    @property
    def pages(self) -> tuple[int, int]:
        """Pages that were recalled so far, and how many of them had to be moved."""
        counts = [store.pages for store in self.tiers]
        return sum(asked for asked, _ in counts), sum(moved for _, moved in counts)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, slack and metadata included."""
        return sum(store.nbytes for store in self._stores) + self.latest.nbytes

    @property
    def device_nbytes(self) -> int:
        """Bytes of them in the model's memory, where a cache has a slower tier."""
        return sum(store.device_nbytes for store in self._stores) + self.latest.nbytes

    @property
    def shared_nbytes(self) -> int:
        """Bytes that a cache which it was forked from, or a fork of it, holds as well."""
        return sum(store.shared_nbytes for store in self.tiers)

    def replaced_bytes(self, layer: int) -> int:
        """Bytes that a layer held twice while its last change was carried out."""
        return self._stores[layer].replaced_bytes

    @property
    def largest_layer_bytes(self) -> int:
        """Bytes of the layer that holds most, slack included."""
        return max(store.nbytes for store in self._stores)

    def state(self) -> dict[str, Tensor]:
        """All tensors by name, without slack."""
        self._check()
        return state_dict(self._stores) | self.latest.state()

    def release_state(self, place: torch.device) -> dict[str, Tensor]:
        """As `saving.handed_over`: all tensors, layer by layer; the cache is empty afterwards."""
        self._check()
        try:
            handed = move_state(self._stores, self.cache_spec, self.spec, place)
        finally:
            self.cache_spec.link_layers(self._stores)
        return handed | self.latest.release_state(place)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Count a change that cannot be taken back, even if it is broken off halfway."""
        self._check()
        self.plans += 1
        try:
            yield
        except (BudgetError, CacheError):  # refused: nothing has changed
            self.plans -= 1
            raise

    def _check(self) -> None:
        if self._is_spoiled:
            raise CacheError(
                "A pass over this cache was broken off when some layers had already dropped "
                "entries for good: read the text again into a new cache."
            )

    def meta(self) -> dict[str, str]:
        """What `restore` needs beside the tensors."""
        return self.cache_spec.meta() | {"next_position": str(self.next_position)}

    @classmethod
    def restore(
        cls, spec: ModelSpec, state: Mapping[str, Tensor], meta: Mapping[str, str]
    ) -> SequenceCache:
        """The cache that `state` and `meta` came from, on tensors of its own.

        Raises: CacheError: the state has other layers than the model, or no ledger of `meta`'s.
        """
        return cls._rebuilt(spec, state, meta, lambda store, own: store.restore(store.layer, own))

    @classmethod
    def adopt(
        cls, spec: ModelSpec, state: Mapping[str, Tensor], meta: Mapping[str, str]
    ) -> SequenceCache:
        """As `restore`, but tensors that are in place are taken over instead of copied.

        `state` must not be used afterwards: the cache writes into it.
        """
        return cls._rebuilt(spec, state, meta, lambda store, own: store.adopt(store.layer, own))

    @classmethod
    def _rebuilt(
        cls,
        spec: ModelSpec,
        state: Mapping[str, Tensor],
        meta: Mapping[str, str],
        fill: Callable[[CacheLayer, dict[str, Tensor]], CacheLayer],
    ) -> SequenceCache:
        cache = SequenceCache(spec, **vars(CacheSpec.of(meta)))
        cache._stores = restore_layers(cache._stores, cache.cache_spec, spec, state, fill)
        cache.cache_spec.link_layers(cache._stores)
        cache.next_position = int(meta["next_position"])
        cache.latest = LatestActivations.restore(
            state, cache.cache_spec.ledger.queries, spec.device
        )
        return cache
