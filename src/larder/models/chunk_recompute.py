"""Entries of a text from cached chunks, where given tokens are computed in all layers.

The part that Cache-Craft, KVCOMM and other rules of what to compute again share: cached keys are
rotated to their new positions, the given tokens pass through all layers, each attends to cached and
new keys alike, and their keys and values replace the cached ones. Unlike in
`larder.models.cacheblend` the tokens are known beforehand, so no layer is computed for all of them.
Attention of new chunks can be summed up on the way, for `ChunkProfile`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from larder.cache.chunk_entries import ChunkEntries, ChunkProfile
from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import AttentionInputs
from larder.models.cacheblend import (
    ContextChunk,
    check_blendable,
    joined_layers,
    select_positions,
    select_states,
)
from larder.models.decoder import Decoder
from larder.ops.attention import cap_logits, masked_attention
from larder.ops.attention_weights import softmax_with_sinks

ROWS = 1 << 7  # tokens whose weights are held at once


@dataclass(frozen=True)
class RecomputedText:
    """Entries of a text, and the attention profiles of some of its chunks.

    Args:
        entries: of the whole text, from position 0 on.
        profiles: by index of the chunk.
    """

    entries: ChunkEntries
    profiles: dict[int, ChunkProfile]


@torch.no_grad()
def recompute_tokens(
    decoder: Decoder,
    chunks: Sequence[ContextChunk],
    chosen: Int64[Tensor, " M"],
    profiled: Sequence[int] = (),
    first: int = 0,
) -> RecomputedText:
    """Entries of the concatenated chunks.

    Args:
        chosen: ascending positions of the tokens to compute; all of chunks without entries.
        profiled: indices of chunks whose attention is summed up; all of their tokens are chosen.
        first: index of the first chunk that attention between chunks counts for: those before it
            are a prefix that every text has.

    Raises:
        ModelError: the model has sliding windows, a single layer, or an unknown key rotation.
    """
    check_blendable(decoder.spec)
    ids = [token for chunk in chunks for token in chunk.ids]
    sums = [_ChunkAttention(chunks, index, first) for index in profiled]
    fusion = _ChosenFusion(decoder, chunks, chosen, sums)
    if len(chosen):
        with forward_hooks(fusion.install(decoder.body.layers)):
            decoder.forward_uncached(ids, fusion)
    entries = ChunkEntries(tuple(fusion.keys), tuple(fusion.values))
    return RecomputedText(entries, {each.index: each.profile() for each in sums})


class _ChosenFusion:
    """Layer attention of chosen tokens over cached keys and values, which theirs replace."""

    def __init__(
        self,
        decoder: Decoder,
        chunks: Sequence[ContextChunk],
        chosen: Int64[Tensor, " M"],
        sums: Sequence[_ChunkAttention],
    ) -> None:
        self.keys, self.values = joined_layers(decoder.spec, chunks)
        self._chosen, self._sums = chosen, sums

    def install(self, layers: Iterable[nn.Module]) -> Any:
        """Handles of the hooks, as they are installed."""
        for index, layer in enumerate(layers):
            hook = self._later if index else self._first
            yield layer.register_forward_pre_hook(hook, with_kwargs=True)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        keys, values = self.keys[inputs.layer], self.values[inputs.layer]
        keys[:, self._chosen], values[:, self._chosen] = inputs.keys, inputs.values
        positions = torch.arange(keys.shape[1], device=keys.device)
        visible = positions[None] <= self._chosen[:, None]  # [M, N]
        queries = inputs.queries_at(self._chosen)
        for each in self._sums:
            each.add(inputs, queries, keys, self._chosen)
        out = masked_attention(queries, keys, values, inputs.scaling, visible, inputs.softcap)
        return inputs.output(out)

    def _first(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        args, options = select_states(args, options, self._chosen)
        return select_positions(args, options, self._chosen)

    def _later(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return select_positions(args, options, self._chosen)


class _ChunkAttention:
    """Sums of a chunk's attention to the chunks before it and to itself, layer by layer."""

    def __init__(self, chunks: Sequence[ContextChunk], index: int, first: int) -> None:
        self.index = index
        edges = list(pairwise(accumulate((len(chunk.ids) for chunk in chunks), initial=0)))
        self._own, self._before = edges[index], edges[first:index]
        self._ids = tuple(chunk.ids for chunk in chunks[first:index])
        self._inter = list[list[float]]()
        self._intra = list[float]()
        self._tokens = torch.zeros(len(chunks[index].ids))

    def add(
        self,
        inputs: AttentionInputs,
        queries: Float[Tensor, "H M D"],
        keys: Float[Tensor, "K N D"],
        chosen: Int64[Tensor, " M"],
    ) -> None:
        """Add one layer: weights are averaged over heads."""
        start, stop = self._own
        rows = ((chosen >= start) & (chosen < stop)).nonzero().flatten()
        inter, intra = [0.0] * len(self._before), 0.0
        for some in rows.split(ROWS):
            grouped = queries[:, some].float().unflatten(0, (len(keys), -1))  # [K, R, Q, D]
            logits = grouped @ keys[:, None, :stop].float().transpose(-1, -2) * inputs.scaling
            logits = cap_logits(logits, inputs.softcap).flatten(0, 1)  # [H, Q, S]
            later = torch.arange(stop, device=logits.device) > chosen[some, None]
            weights = softmax_with_sinks(logits.masked_fill(later, -torch.inf), inputs.sinks)
            mean = weights.mean(0)  # [Q, S]
            for index, (low, high) in enumerate(self._before):
                masses = mean[:, low:high].sum(1)
                inter[index] += float(masses.sum())
                self._tokens[(chosen[some] - start).cpu()] += masses.cpu()
            intra += float(mean[:, start:].sum())
        self._inter.append(inter)
        self._intra.append(intra)

    def profile(self) -> ChunkProfile:
        """Profile of the layers that were added."""
        inter = tuple(map(tuple, self._inter))
        return ChunkProfile(self._ids, inter, tuple(self._intra), tuple(self._tokens.tolist()))
