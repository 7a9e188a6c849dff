"""Whether two greedy answers to the same text part only where the model hardly prefers one."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import zstandard

from larder.core.types import AppendKind, Mode
from larder.engine.engine import Engine
from larder.engine.sampler import SamplingParams
from larder.models.forward_batch import BatchSegment
from larder.prefill.base import split_blocks
from larder.prefill.reader import PrefillSequence
from larder.server.serving_policy import ServingPolicy
from larder.server.session_state import TOKEN_TYPECODE, CompletedTurn, GenerationParams
from larder.session.prefill import common_prompts

TIE_GAP = 1e-3  # of the two best logits: below, rounding may decide


@dataclass(frozen=True)
class AnswerDivergence:
    """Where two answers part.

    Args:
        exchange: number of the turn.
        place: number of the token in its answer.
        gap: between the two best logits there.
    """

    exchange: int
    place: int
    gap: float

    @property
    def is_close(self) -> bool:
        """Whether rounding may have decided."""
        return self.gap < TIE_GAP


def exported_turns(exported: bytes) -> list[CompletedTurn]:
    """What was said in a session, token for token, of the file that a server exports."""
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
    """Where two courses of a session part; None where they are the same.

    Args:
        engine: with the policy that both were answered under.

    Raises:
        ValueError: they were not asked the same, or one is shorter.
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
    engine: Engine, before: Sequence[CompletedTurn], said: CompletedTurn, answered: int
) -> float:
    """The text up to there is read once more, in the blocks of the server; then one token is asked.

    Policies that drop may hold other entries than they did then, since blocks end elsewhere when
    turns are read as one text.
    """
    rule = ServingPolicy.of(engine)
    ids = [
        token for each in before for part in (each.prompt_ids, each.answer_ids) for token in part
    ]
    text = (*ids, *said.prompt_ids, *said.answer_ids[:answered])
    cache, reader = rule.empty_cache(), rule.reader(len(text))
    lane = PrefillSequence(cache, common_prompts(engine.tokenizer))
    for block in split_blocks(text[:-1], rule.block):
        reader.read_and_evict([lane], block, block, cache.next_position)
    row = BatchSegment(cache, text[-1:], append_kind=AppendKind.STEP)
    logits = engine.loaded.decoder.forward_logits([row], Mode.SCRATCH, [0])[0]
    best, second = logits.float().topk(2).values.tolist()
    return best - second
