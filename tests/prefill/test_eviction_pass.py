"""Entries kept by an eviction pass, against loops."""

from __future__ import annotations

import pytest

from larder import Policy
from larder.core import Mode, Observation, ScratchPrompt
from larder.models import BatchSegment
from larder.prefill import Blockwise, Whole, no_progress
from model_runs import some_ids
from references import patched, reconstruct
from references.choosing_loop import pool

PROTECT = "protect(sinks=1, recent=2)"


def looked_at(decoder, cache, asked: tuple[ScratchPrompt, ...], length: int, loop, scorer):
    """Scores per layer and head, the highest over all scratch passes."""
    best: dict[int, list[list[float]]] = {}
    for scratch in asked:

        def watch(row, layer, recorded, span=scratch.span):
            spec = cache.spec.layers[layer]
            observation = Observation(
                layer=spec,
                entries=cache.entries(layer),
                queries=recorded.queries,
                query_positions=recorded.positions,
                length=length,
                span=span,
                keys=recorded.keys,
            )
            scores = loop.scores(scorer, observation)
            earlier = best.get(layer, scores)
            best[layer] = [
                [max(a, b) for a, b in zip(old, new, strict=True)]
                for old, new in zip(earlier, scores, strict=True)
            ]

        decoder.read([BatchSegment(cache, scratch.ids)], Mode.SCRATCH, watch)
    return best


def survivors(cache, scores, quota: int, length: int) -> dict[int, list[list[int]]]:
    """Positions that a pooled budget keeps in each head of each layer."""
    out = {}
    for layer, heads in scores.items():
        entries = cache.entries(layer)
        positions = [entries.head_positions(h).tolist() for h in range(len(heads))]
        ranked = [
            [(score, p < 1 or p >= length - 2) for score, p in zip(row, at, strict=True)]
            for row, at in zip(heads, positions, strict=True)
        ]
        chosen = pool(ranked, quota * len(heads))
        out[layer] = [[at[i] for i in kept] for at, kept in zip(positions, chosen, strict=True)]
    return out


def kept(cache) -> dict[int, list[list[int]]]:
    layers = [(layer.index, cache.entries(layer.index)) for layer in cache.spec.managed]
    return {i: [e.head_positions(h).tolist() for h in range(len(e.lengths))] for i, e in layers}


@pytest.mark.parametrize("chunk", [7, 16, 100])
@pytest.mark.parametrize("variant", ["larder", "paper"])
def test_reconstruction_repeats_the_text_by_chunks(
    watched, reader_for, lane_for, chunk, variant
) -> None:
    scorer = f'reconstruct(chunk={chunk}, variant="{variant}")'
    planner = Policy.parse(f"{PROTECT} > {scorer} > pooled()").planner
    reader, ids = reader_for(watched, planner, 9, 40), some_ids(40)
    lane, full = lane_for(watched), lane_for(watched)
    Whole().read(reader, [lane], ids, no_progress)
    reader.append([full], ids)
    asked = planner.scorer.scratch(ids, 0, full.prompts)
    assert len(asked) == -(-40 // chunk)
    scores = looked_at(watched, full.cache, asked, 40, reconstruct, planner.scorer)
    assert kept(lane.cache) == survivors(full.cache, scores, 9, 40)


@pytest.mark.parametrize("variant", ["larder", "paper"])
def test_every_block_is_scored_by_the_prompt(watched, reader_for, lane_for, variant) -> None:
    scorer = f'patched(prompt="episode", variant="{variant}")'
    planner = Policy.parse(f"{PROTECT} > {scorer} > pooled()").planner
    reader, ids = reader_for(watched, planner, 9, 40), some_ids(40)
    lane, twin = lane_for(watched), lane_for(watched)
    for stop in (8, 16, 24, 32):
        Blockwise(8).read(reader, [lane], ids[stop - 8 : stop], no_progress)
    twin = type(lane)(lane.cache.fork(), lane.prompts)
    Blockwise(8).read(reader, [lane], ids[32:], no_progress)
    reader.append([twin], ids[32:])
    asked = planner.scorer.scratch(ids[32:], 32, twin.prompts)
    scores = looked_at(watched, twin.cache, asked, 40, patched, planner.scorer)
    assert kept(lane.cache) == survivors(twin.cache, scores, 9, 40)
