"""Contexts read apart, corrected by how earlier contexts changed at the same place (KVCOMM).

Ye et al., "KVCOMM: Online Cross-context KV-cache Communication for Efficient LLM-based Multi-agent
Systems" (2025), arXiv:2510.12872. A context is read once behind the prefix (its base). At a place
among the contexts, entries differ from the rotated base by a change, and like contexts change
alike: an anchor holds base and change of a context that was computed in full there. A new context
takes the changes of the anchors, weighted for each token and layer by a softmax of the negative
distance of its base from theirs, for keys and values apart. It is computed in full, and becomes an
anchor itself, if there are fewer than two anchors that are as long, or if they are all as near:
if the entropy of the softmax of their negative distances exceeds `entropy` x log2 of their number.

Differences: agents and placeholders are places among contexts; what stands behind the contexts is
read, where the released code changes it as well; a context that is an anchor takes its own change
alone; distances are L2 norms over heads and channels, in the mean over tokens and layers where
anchors are judged (inferred); the least recently used anchor leaves a `ChunkMemory`, and of more
than `anchors` the latest count. The first context stands where its base was read, and is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.chunk_entries import ChunkEntries
from larder.core.arguments import require
from larder.core.spec import ModelSpec
from larder.core.types import TokenIds
from larder.models.cacheblend import ContextChunk
from larder.models.chunk_recompute import recompute_tokens
from larder.prefill.base import ContextReuse, ContextText, Steps
from larder.prefill.contexts import ChunkAnchor, ChunkReader, ChunkSource
from larder.prefill.reader import PrefillReader, PrefillSequence
from larder.prefill.schedules._chunk_schedule import ChunkedSchedule

FEWEST = 2  # anchors that a change is estimated from


@dataclass(frozen=True)
class Anchored(ChunkedSchedule):
    """Contexts read apart, changed as anchors changed at their places (KVCOMM).

    Args:
        entropy: most entropy of the anchors' weights, as a share of that of equal weights.
        anchors: most anchors of a place that count.
    """

    entropy: float = 0.3
    anchors: int = 20

    def __post_init__(self) -> None:
        require(0 <= self.entropy <= 1, "anchored.entropy", "a share in [0, 1]", self.entropy)
        require(self.anchors >= FEWEST, "anchored.anchors", f"{FEWEST} or more", self.anchors)

    @property
    def context_copies(self) -> int:
        return 5  # chunks as read and as changed, what is computed, its slices and their changes

    def context_steps(
        self,
        reader: PrefillReader,
        sequence: PrefillSequence,
        text: ContextText,
        source: ChunkSource,
    ) -> Steps[ContextReuse]:
        self.check(reader)
        spec, limit = reader.decoder.spec, self.reused_tokens(reader, text)
        chunk_reader = ChunkReader(reader.decoder, text.prefix, source)
        chunks, bases = list[ContextChunk](), dict[int, tuple[int, int, ChunkEntries]]()
        if (prefix := chunk_reader.prefix()) is not None:
            kept = min(len(text.prefix), limit)
            chunks.append(ContextChunk(text.prefix[:kept], prefix.first(kept)))
        is_known, chosen, again, start = list[bool](), list[int](), 0, min(len(text.prefix), limit)
        for index, ids in enumerate(text.contexts):
            base, found = chunk_reader.chunk(ids)
            count = max(0, min(len(ids), limit - start))
            changed = base if index == 0 else None
            if index:
                known = source.anchors(spec, text.prefix, index)[-self.anchors :]
                changed = estimate(ids, base, known, self.entropy)
            if changed is None:
                bases[index] = start, start + count, base
                chosen += range(start, start + count)
                again += count * found
            entries = None if changed is None else changed.first(count)
            chunks.append(ContextChunk(ids[:count], entries))
            is_known.append(found)
            start += count
            yield start, len(text.ids)
        rows = torch.tensor(chosen, dtype=torch.int64, device=spec.device)
        entries = recompute_tokens(reader.decoder, chunks, rows).entries
        for index, (first, stop, base) in bases.items():
            ids = text.contexts[index]
            if stop - first == len(ids):
                change = changes(entries.slice(first, stop), base, spec)
                source.add_anchor(text.prefix, index, ChunkAnchor(ids, base, change))
        return (yield from self.finish(reader, sequence, text, entries, is_known, again))


def changes(entries: ChunkEntries, base: ChunkEntries, spec: ModelSpec) -> ChunkEntries:
    """Numbers that were added to the entries of a chunk; keys rotated as those of `base`."""
    moved = entries.moved_to(base.start, spec)
    keys = tuple(a - b for a, b in zip(moved.keys, base.keys, strict=True))
    values = tuple(a - b for a, b in zip(moved.values, base.values, strict=True))
    return ChunkEntries(keys, values, base.start)


def estimate(
    ids: TokenIds, base: ChunkEntries, known: Sequence[ChunkAnchor], entropy: float
) -> ChunkEntries | None:
    """Entries of a chunk with the change that anchors foretell; None if they foretell none.

    Of anchors on another device one layer at a time is on that of the chunk, as far as it goes.

    Args:
        ids: tokens of the chunk.
        entropy: as in `Anchored`.
    """
    count = base.num_tokens
    same = [anchor for anchor in known if anchor.ids == ids]
    anchors = same or [anchor for anchor in known if anchor.base.num_tokens >= count]
    if not same:
        if len(anchors) < FEWEST:
            return None
        away = torch.tensor([_mean_distance(base, anchor.base) for anchor in anchors])
        weights = (-away).softmax(0)
        bits = float(torch.special.entr(weights).sum()) / math.log(2)
        if bits > entropy * math.log2(len(anchors)):
            return None
    keys, values = (
        tuple(
            own + _weighted(own, [_sides(a.base, side)[layer] for a in anchors],
                            [_sides(a.change, side)[layer] for a in anchors])
            for layer, own in enumerate(_sides(base, side))
        )
        for side in ("keys", "values")
    )  # fmt: skip
    return ChunkEntries(keys, values, base.start)


def _sides(entries: ChunkEntries, side: str) -> tuple[Float[Tensor, "K N D"], ...]:
    return entries.keys if side == "keys" else entries.values


def _weighted(
    own: Float[Tensor, "K N D"],
    bases: Sequence[Float[Tensor, "K M D"]],
    added: Sequence[Float[Tensor, "K M D"]],
) -> Float[Tensor, "K N D"]:
    """Changes of one layer and side, weighted by nearness of each token's base."""
    count = own.shape[1]
    away = torch.stack([_distances(own, base) for base in bases])  # [A, N]
    weights = (-away).softmax(0)[:, None, :, None]
    parts = torch.stack([one[:, :count].to(own.device, torch.float32) for one in added])
    return (weights * parts).sum(0).to(own.dtype)  # [K, N, D]


def _distances(own: Float[Tensor, "K N D"], base: Float[Tensor, "K M D"]) -> Float[Tensor, " N"]:
    """Distance of each token of one layer and side from that of a base."""
    near = base[:, : own.shape[1]].to(own.device)
    return (own - near).float().square().sum((0, 2)).sqrt()


def _mean_distance(one: ChunkEntries, other: ChunkEntries) -> float:
    """Distance of the values of two chunks, in the mean over tokens and layers."""
    pairs = zip(one.values, other.values, strict=True)
    away = [_distances(chunk, base).mean() for chunk, base in pairs]
    return float(torch.stack(away).mean())


Part = Anchored
