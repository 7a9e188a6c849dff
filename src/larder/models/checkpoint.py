"""Checkpoint of a cache as residuals or token ids, from which its keys and values are recomputed.

Qasim et al., "The Residual Stream Is All You Need: On the Redundancy of the KV Cache in
Transformer Inference" (2026), arXiv:2603.19664, for idle sequences, such as a conversation between
two turns. The paper recomputes at every step what does not fit the budget; here a whole cache is
restored once. Each source suits other caches:

every      Any selection of entries by a policy: keys and values of a layer follow from its own
           residuals, and only those of tokens that it still has are stored.
one, ids   Only a cache without rejected entries: re-read tokens attend to every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.errors import CacheError
from larder.core.ledger import Ledger
from larder.core.types import Keys, Values
from larder.models.forward_batch import BatchSegment
from larder.models.introspection import TOLERANCE
from larder.models.kv_cost import KVSource
from larder.models.recompute import BLOCK_TOKENS, KVRecompute, ResidualStream

REBUILT = ("keys", "values")
FORMS = ("dense", "ragged")


@dataclass(frozen=True)
class Checkpoint:
    """State of a cache with keys and values replaced by their source; it owns its tensors.

    Args:
        held: source of the keys and values.
        ids: token ids, if they are the source.
        residuals: by layer; of all tokens, or of those in the layer's cache, in order.
        rest: tensors of the cache's state that are stored unchanged.
        meta: metadata of the cache.
    """

    held: KVSource
    ids: Int[Tensor, " S"]
    residuals: Mapping[int, Float[Tensor, "_ hidden"]]
    rest: Mapping[str, Tensor]
    meta: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = *self.residuals.values(), *self.rest.values(), self.ids
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def cache(self, recompute: KVRecompute, block: int = BLOCK_TOKENS) -> SequenceCache:
        """Restored cache.

        Args:
            block: tokens recomputed at a time; entries first read in blocks of that size are
                restored bit by bit.
        """
        if self.held is KVSource.EVERY:
            return self._projected(recompute, block)
        spec, form = recompute.spec, self.meta["form"]
        empty = SequenceCache(spec, form)
        cache = SequenceCache.adopt(spec, empty.state() | _copies(self.rest), empty.meta())
        if self.held is KVSource.IDS:
            for part in self.ids.split(block):
                recompute.read(BatchSegment(cache, tuple(part.tolist())), ResidualStream(()))
        for depth, rows in self.residuals.items():
            recompute.reread(depth, rows, cache, block)
        return cache

    def _projected(self, recompute: KVRecompute, block: int) -> SequenceCache:
        state = _copies(self.rest)
        for layer, rows in self.residuals.items():
            at = state[f"{layer}.positions"]
            places = at.unique()
            parts = zip(rows.split(block), places.split(block), strict=True)
            found = [recompute.project({layer: own}, p.long())[layer] for own, p in parts]
            index = torch.searchsorted(places, at)
            lengths = state.get(f"{layer}.lengths")
            for name, blocks in zip(REBUILT, zip(*found, strict=True), strict=True):
                state[f"{layer}.{name}"] = _placed(torch.cat(blocks, 1), index, lengths)
        return SequenceCache.adopt(recompute.spec, state, self.meta)


def put_aside(
    held: KVSource,
    cache: SequenceCache,
    ids: Sequence[int],
    residuals: ResidualStream,
    recompute: KVRecompute,
) -> Checkpoint:
    """Checkpoint of a cache, which is not changed.

    Args:
        held: source to store; ONE uses the first layer of `residuals`, EVERY needs all layers.
        ids: all tokens of the cache.
        residuals: of all tokens of the cache.

    Raises:
        CacheError: the cache could not be restored exactly.
    """
    _check(held, cache, ids, residuals)
    state, meta = cache.state(), cache.meta()
    text = torch.tensor(ids, dtype=torch.int32)
    if held is KVSource.IDS:
        return Checkpoint(held, text, {}, {}, meta)
    if held is KVSource.ONE:
        depth = min(residuals.layers)
        numbers = {str(layer) for layer in range(depth)}
        below = {name: t for name, t in state.items() if name.split(".")[0] in numbers}
        return Checkpoint(held, text[:0].clone(), {depth: residuals.before(depth)}, below, meta)
    own = {
        layer: residuals.before(layer)[state[f"{layer}.positions"].unique().long()]
        for layer in residuals.layers
    }
    rest = {name: t for name, t in state.items() if name.split(".")[-1] not in REBUILT}
    checkpoint = Checkpoint(held, text[:0].clone(), own, rest, meta)
    _compare(state, checkpoint.cache(recompute).state())
    return checkpoint


def _check(
    held: KVSource, cache: SequenceCache, ids: Sequence[int], residuals: ResidualStream
) -> None:
    """Raise CacheError if residuals or ids are missing, or entries were rejected."""
    if held is KVSource.ENTRIES or cache.cache_spec.form not in FORMS or cache.cache_spec.codecs:
        raise CacheError(
            f"A {cache.cache_spec.form} cache has no checkpoint as {held.value}: give a "
            "dense or ragged one at full precision, and residuals or ids."
        )
    layers = {KVSource.IDS: (), KVSource.EVERY: tuple(range(len(cache.spec.layers)))}
    wanted = layers.get(held, sorted(residuals.layers)[:1])
    counts = {layer: len(residuals.before(layer)) for layer in residuals.layers}
    known = [*(counts.get(layer, 0) for layer in wanted), len(ids)]
    if not (wanted or held is KVSource.IDS) or set(known) != {cache.next_position}:
        raise CacheError(
            f"The cache has read {cache.next_position} tokens, but residuals of the layers "
            f"{list(wanted)} and ids are there for {sorted(set(known))}: record all of them."
        )
    whole = all(
        set(lengths) == {cache.next_position}
        for layer, lengths in zip(cache.spec.layers, cache.lengths(), strict=True)
        if layer.sliding_window is None
    )
    is_plain = whole and cache.plans == 0 and cache.cache_spec.ledger == Ledger()
    if held is not KVSource.EVERY and not is_plain:
        raise CacheError(
            f"A policy works on this cache, but {held.value} would read the text again with all "
            "entries and without their statistics: store every residual instead."
        )


def _compare(own: Mapping[str, Tensor], rebuilt: Mapping[str, Tensor]) -> None:
    """Raise CacheError if recomputed keys or values differ from those of the cache."""
    for name, tensor in own.items():
        if name.endswith(REBUILT) and tensor.numel():
            largest = tensor.abs().max().clamp_min(1e-6)
            error = float((tensor - rebuilt[name]).abs().max() / largest)
            if not error <= TOLERANCE[tensor.dtype]:
                raise CacheError(
                    f"{name} of this cache do not follow from what entered the layer (difference "
                    f"{error:.2g} of the largest): entries were merged, so store them unchanged."
                )


def _placed(rows: Keys | Values, index: Tensor, lengths: Tensor | None) -> Tensor:
    """Recomputed rows in the layout of a layer: equal in every head, or packed head by head."""
    if lengths is None:
        return rows[:, index]
    heads = torch.repeat_interleave(torch.arange(len(lengths)), lengths.cpu()).to(rows.device)
    return rows[heads, index]


def _copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}
