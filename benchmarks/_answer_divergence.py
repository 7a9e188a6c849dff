"""Divergence of two greedy answers to the same text, and whether rounding can explain it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import zstandard

from larder.core import AppendKind, Mode
from larder.engine import Engine, SamplingParams
from larder.models import BatchSegment
from larder.prefill import PrefillSequence, split_blocks
from larder.server import TOKEN_TYPECODE, CompletedTurn, GenerationParams, ServingPolicy
from larder.session import common_prompts

TIE_GAP = 1e-3  # between the two best logits: below, rounding may decide


@dataclass(frozen=True)
class AnswerDivergence:
    """First divergence of two sessions.

    Args:
        exchange: index of the turn.
        place: index of the token in its answer.
        gap: difference of the two best logits there.
    """

    exchange: int
    place: int
    gap: float

    @property
    def is_close(self) -> bool:
        """Test if rounding may explain the divergence."""
        return self.gap < TIE_GAP


def exported_turns(exported: bytes) -> list[CompletedTurn]:
    """Turns of a session from the file that a server exports, token for token."""
    document = json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(exported))
    asked = GenerationParams(SamplingParams(), 0, ())
    return [
        CompletedTurn(
            (),
            array(TOKEN_TYPECODE, t["prompt"]),
            t["text"],
            array(TOKEN_TYPECODE, t["answer"]),
            t["unread"],
            asked,
            "",
        )
        for t in document["said"]
    ]


def first_divergence(
    engine: Engine, first: Sequence[CompletedTurn], second: Sequence[CompletedTurn]
) -> AnswerDivergence | None:
    """First divergence of two sessions; None if they are equal.

    Args:
        engine: engine with the policy of both sessions.

    Raises:
        ValueError: their prompts differ, or one has fewer turns.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} turns against {len(second)}")
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        if one.prompt_ids != other.prompt_ids:
            raise ValueError(f"turn {number} was asked differently")
        if one.answer_ids != other.answer_ids:
            same = _common_length(one.answer_ids, other.answer_ids)
            gap = _logit_gap(engine, first[:number], one, same)
            return AnswerDivergence(number, same, gap)
    return None


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    same = [number for number, (one, other) in enumerate(pairs) if one != other]
    return same[0] if same else min(len(first), len(second))


@torch.no_grad()
def _logit_gap(
    engine: Engine, before: Sequence[CompletedTurn], turn: CompletedTurn, answered: int
) -> float:
    """Gap of the two best logits for the next token, after reading the text again in the server's
    blocks.

    Policies that evict may keep other entries than in the session, because blocks end elsewhere
    when turns are read as one text.
    """
    rule = ServingPolicy.of(engine)
    ids = [
        token for each in before for part in (each.prompt_ids, each.answer_ids) for token in part
    ]
    text = (*ids, *turn.prompt_ids, *turn.answer_ids[:answered])
    cache, reader = rule.empty_cache(), rule.reader(len(text))
    lane = PrefillSequence(cache, common_prompts(engine.tokenizer))
    for block in split_blocks(text[:-1], rule.block):
        for _ in reader.read_and_evict_steps([lane], block, block, cache.next_position):
            pass
    row = BatchSegment(cache, text[-1:], append_kind=AppendKind.STEP)
    logits = engine.loaded.decoder.forward_logits([row], Mode.SCRATCH, [0])[0]
    best, second = logits.float().topk(2).values.tolist()
    return best - second
