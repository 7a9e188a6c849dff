"""Prompts that the model writes itself, and prompts that stand elsewhere, behind the caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from larder import Policy
from larder.core import Mode, ScratchPrompt
from larder.models import BatchSegment, wrap_model
from larder.policy import Content, Drafts, Lookahead, PositionsFirst
from larder.prefill import Blockwise, Whole, no_progress, with_drafts
from model_runs import native_logits, some_ids
from references import lookahead, positions_first
from tiny_models import WINDOW_TOKENS, tiny

PARTS = "protect(sinks=1, recent=2)"
SPAN = (0, 1)


def heard(
    decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[BatchSegment, Mode, list[int]]]:
    """Rows of every pass from now on, their modes and positions."""
    result, real = [], type(decoder)._run

    def run(self: Any, module: Any, rows: Any, mode: Mode, *rest: Any, **options: Any) -> Any:
        result.extend((row, mode, row.positions()) for row in rows)
        return real(self, module, rows, mode, *rest, **options)

    monkeypatch.setattr(type(decoder), "_run", run)
    return result


def test_drafts_equal_greedy_generation(watched, reader_for, lane_for, monkeypatch) -> None:
    module, ids = tiny("qwen3", layers=3), some_ids(20)
    expected = lookahead.draft(
        lambda drafted: native_logits(module, (*ids, *drafted))[-1].tolist(), 5
    )
    result = heard(watched, monkeypatch)
    planner = Policy.parse(f"whole() > {PARTS} > lookahead(tokens=5) > uniform()").planner
    Whole().read(reader_for(watched, planner, 9, 20), [lane_for(watched)], ids, no_progress)
    last, mode, positions = result[-1]
    assert list(last.ids) == expected and mode is Mode.SCRATCH
    assert positions == [20, 21, 22, 23, 24]


def test_draft_can_answer_a_prompt(watched, reader_for, lane_for) -> None:
    module, ids, request = tiny("qwen3", layers=3), some_ids(16), some_ids(4, seed=8)
    lane = lane_for(watched)
    reader_for(watched, Policy.parse("keydiff()").planner, 40, 16).append([lane], ids)
    [asked] = with_drafts(
        watched, Drafts(), [lane.cache], [ScratchPrompt(request, SPAN, drafts=4)], ()
    )
    text = (*ids, *request)
    expected = lookahead.draft(
        lambda drafted: native_logits(module, (*text, *drafted))[-1].tolist(), 4
    )
    assert asked == ScratchPrompt((*request, *expected), SPAN)
    part = Lookahead(tokens=4, prompt="question")
    assert part.scratch(ids, 0, {"question": request}) == (
        ScratchPrompt(request, (0, 16), drafts=4),
    )
    assert part.required_prompts() == {"question"} and Lookahead().required_prompts() == frozenset()


def test_draft_presets_require_a_question_or_guidance_prompt() -> None:
    # Behind the end of a turn there is nothing to go on with.
    assert Policy.parse("laq").scorer.required_prompts() == {"question"}
    assert Policy.parse("laq_guidance").scorer.required_prompts() == {"guidance"}
    assert Policy.parse("dapq").scorer.required_prompts() == {"question"}


def test_pseudo_tokens_follow_a_prompt() -> None:
    part, block, book = (
        PositionsFirst(4, prompt="question"),
        tuple(range(9)),
        {"question": (70, 71)},
    )
    [asked] = part.scratch(block, 50, book)
    assert asked == ScratchPrompt((70, 71, 0, 1, 70, 71), (0, 59))
    fixed = PositionsFirst(4, Content.FIXED, prompt="question")
    assert fixed.required_prompts() == {"question", "repeat"}
    assert fixed.scratch(block, 0, {**book, "repeat": (5,)})[0].ids == (70, 71, 5, 5, 5, 5)


def test_batched_drafts_equal_single_drafts(watched, reader_for, lane_for) -> None:
    lanes = [lane_for(watched) for _ in range(2)]
    reader = reader_for(watched, Policy.parse("keydiff()").planner, 40, 16)
    for number, lane in enumerate(lanes):
        reader.append([lane], some_ids(9 + number, seed=number))
    caches, asked = [lane.cache for lane in lanes], [ScratchPrompt((), SPAN, drafts=4)] * 2
    before = [cache.state() for cache in caches]
    together = with_drafts(watched, Drafts(), caches, asked, [5, 6])
    alone = [
        with_drafts(watched, Drafts(), [cache], [ScratchPrompt((), SPAN, drafts=4)], [first])[0]
        for cache, first in zip(caches, (5, 6), strict=True)
    ]
    assert together == alone and together[0].ids != together[1].ids
    for cache, state in zip(caches, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in cache.state().items())


@pytest.mark.parametrize("scorer", ["lookahead(tokens=3, kernel=1)", "positions_first(tokens=4)"])
@pytest.mark.parametrize("shift", [0, 6, -7, -100])
def test_every_block_is_scored_by_its_draft(
    watched, reader_for, lane_for, monkeypatch, scorer, shift
) -> None:
    if "positions" in scorer:
        scorer = f"positions_first(tokens=4, shift={shift})"
    elif shift:
        pytest.skip("only positions_first shifts its drafts")
    planner = Policy.parse(f"blockwise(tokens=8) > {PARTS} > {scorer} > uniform()").planner
    reader, lane = reader_for(watched, planner, 9, 24), lane_for(watched)
    Blockwise(8).read(reader, [lane], some_ids(16), no_progress)
    twin = type(lane)(lane.cache.fork(), lane.prompts)
    result = heard(watched, monkeypatch)
    Blockwise(8).read(reader, [lane], some_ids(8, seed=2), no_progress)
    asked, mode, positions = result[-1]
    assert mode is Mode.SCRATCH and positions[0] == max(0, 24 + shift)
    reader.append([twin], some_ids(8, seed=2))
    loop = lookahead if "lookahead" in scorer else positions_first
    expected = kept_by(watched, twin.cache, asked, loop, planner.scorer)
    entries = [lane.cache.entries(layer.index) for layer in watched.spec.managed]
    assert [e.head_positions(h).tolist() for e in entries for h in range(2)] == expected
    assert reader.wrong == []


def kept_by(
    decoder: Any, cache: Any, asked: BatchSegment, loop: Any, scorer: Any
) -> list[list[int]]:
    """Positions that nine entries per head keep, judged by one pass with a loop."""
    from larder.core import Observation

    out: list[list[int]] = []

    def watch(row: int, layer: int, recorded: Any) -> None:
        entries = cache.entries(layer)
        tensors = (recorded.queries, recorded.positions)
        observation = Observation(cache.spec.layers[layer], entries, *tensors, 24, (0, 24))
        for head, scores in enumerate(loop.scores(scorer, observation)):
            positions = entries.head_positions(head).tolist()
            ranked = sorted(
                zip(scores, positions, strict=True),
                key=lambda pair: (-1 if pair[1] < 1 or pair[1] >= 22 else 0, -pair[0], pair[1]),
            )
            out.append(sorted(position for _, position in ranked[:9]))

    row = BatchSegment(cache, asked.ids, shift=asked.shift)
    decoder.read([row], Mode.SCRATCH, watch)
    return out


def test_pseudo_tokens_are_rotated_to_their_positions(watched, reader_for, lane_for) -> None:
    lane, ids = lane_for(watched), some_ids(24)
    reader_for(watched, Policy.parse("keydiff()").planner, 40, 24).append([lane], ids)
    result: dict[int, Any] = {}
    for shift in (0, 5):
        watched.read(
            [BatchSegment(lane.cache, ids[:3], shift=shift)],
            Mode.SCRATCH,
            lambda row, layer, recorded, at=shift: result.setdefault(at, recorded),
        )
    assert result[5].positions.tolist() == [29, 30, 31]
    assert not torch.allclose(result[0].queries, result[5].queries)
    assert torch.equal(
        result[0].values, result[5].values
    )  # of the first layer: no position in them


@pytest.mark.parametrize("content", Content)
@pytest.mark.parametrize("length", [2, 7, 8, 30])
@pytest.mark.parametrize("tokens", [1, 6, 7])
def test_pseudo_token_ids_equal_their_reference(content, length, tokens) -> None:
    part, block = PositionsFirst(tokens, content), tuple(range(100, 100 + length))
    book = {"repeat": (1, 2, 3)} if part.required_prompts() else {}
    [asked] = part.scratch(block, 50, book)
    expected = positions_first.text(content.value, tokens, list(block), [1, 2, 3])
    assert list(asked.ids) == expected and asked.span == (0, 50 + length)


@pytest.mark.parametrize("shift", [-40, -5, 9])
def test_sliding_layers_accept_shifted_positions(reader_for, lane_for, shift) -> None:
    decoder = wrap_model(tiny("gemma3", layers=4))
    policy = f"blockwise(tokens=8) > {PARTS} > positions_first(tokens=4, shift={shift})"
    reader, lane = reader_for(decoder, Policy.parse(policy).planner, 12, 40), lane_for(decoder)
    Blockwise(8).read(reader, [lane], some_ids(40), no_progress)
    assert 40 > WINDOW_TOKENS + 12 and reader.wrong == []
    twin = lane_for(decoder)
    reader.append([twin], some_ids(40))
    decoder.read([BatchSegment(lane.cache, (5, 6), shift=shift)], Mode.SCRATCH, assert_finite)
    assert lane.cache.next_position == 40


def assert_finite(row: int, layer: int, recorded: Any) -> None:
    assert bool(recorded.queries.isfinite().all()), layer
