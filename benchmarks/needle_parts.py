"""Needles over the policy `larder` at a sixteenth of the bytes, with parts of its loss undone.

Each text is read once. The entries that `larder` keeps are put into an uncoded cache, coded or
exact by part, with the entries that it drops or without them; so a part of the loss is undone at a
time, whatever it costs in bytes. Forced is the number of each needle behind a question and the
beginning of the answer: log-likelihood of the whole number in nats, and whether every token of it
is the likeliest. In bfloat16 rounding moves a number by some .1 nats: processes choose kernels by
time, so compare parts of one run.

    python benchmarks/needle_parts.py --corpus FOLDER --model smollm2 --first 60 --texts 3

Texts are those of the study `larder_needles` by other seeds, whose first six are 0 to 5.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from _needles import needle_texts
from jaxtyping import Bool
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Conversation, Plan
from larder.engine import Engine
from larder.session import Policy
from larder_bench.scoring.recorded_scores import Probe, RecordedText, forced_logits

SHARE = 16  # the cache takes one byte of so many
FEWER = "whole() > reconstruct() > global() > transform(bits=3)"  # entries, in more bits
NEEDLE = "One of the special"  # beginning of the sentence of a needle


@dataclass(frozen=True)
class Part:
    """Part of the loss that is left.

    Args:
        keys: of kept entries are coded.
        values: of kept entries are coded.
        drops: entries that are not kept are dropped.
        spared: entries of needles are exact where they are kept.
        needles: entries of needles are all kept.
    """

    keys: bool = True
    values: bool = True
    drops: bool = True
    spared: bool = False
    needles: bool = False


PARTS = {
    "evicted, exact": Part(keys=False, values=False),
    "keys coded": Part(values=False),
    "values coded": Part(keys=False),
    "coded, the rest exact": Part(drops=False),
    "needles exact where kept": Part(spared=True),
    "needles kept, exact": Part(spared=True, needles=True),
}


@dataclass(frozen=True)
class ForcedNumbers:
    """Log-likelihood of the number of each needle, and whether each is the likeliest."""

    likelihoods: tuple[float, ...]
    found: tuple[bool, ...]

    @staticmethod
    def over(cache: SequenceCache, engine: Engine, probes: Sequence[Probe]) -> ForcedNumbers:
        """Numbers that probes end with, behind a cache."""
        likelihoods, found = list[float](), list[bool]()
        for probe in probes:
            logits, number = forced_logits(engine, cache, probe), torch.tensor(probe.ids)
            number = number[probe.first :]
            own = logits.float().log_softmax(-1).gather(1, number[:, None])
            likelihoods.append(float(own.sum()))
            found.append(bool((logits.argmax(-1) == number).all()))
        return ForcedNumbers(tuple(likelihoods), tuple(found))


def mixed(
    full: SequenceCache, coded: SequenceCache, part: Part, needle: Bool[Tensor, " N"]
) -> SequenceCache:
    """Uncoded cache with the numbers of a coded one where a part leaves them coded.

    Args:
        needle: positions of needles.
    """
    cache, count = SequenceCache(full.spec, "ragged"), len(needle)
    for index, store in enumerate(cache.layers):
        whole, held = full.entries(index), coded.entries(index)
        heads = range(len(whole.lengths))
        keys = torch.stack([whole.head_keys(head) for head in heads])
        values = torch.stack([whole.head_values(head) for head in heads])
        kept = torch.zeros(len(heads), count, dtype=torch.bool)
        for head in heads:
            positions = held.head_positions(head).long()
            kept[head, positions] = True
            changed = ~needle[positions] if part.spared else torch.ones_like(needle[positions])
            for is_coded, numbers, own in (
                (part.keys, keys, held.head_keys(head)),
                (part.values, values, held.head_values(head)),
            ):
                if is_coded:
                    numbers[head, positions[changed]] = own[changed].to(numbers)
        kept |= needle if part.needles else torch.full((count,), not part.drops)
        store.append(keys, values, whole.head_positions(0))
        store.apply(Plan(kept.flatten().nonzero().flatten(), tuple(kept.sum(1).tolist())))
    cache.advance(count)
    return cache


def needle_positions(engine: Engine, chat: Conversation, ids: Sequence[int]) -> Bool[Tensor, " N"]:
    """Positions of the sentences that hide numbers."""
    words = [engine.tokenizer.tokenizer.decode([token]) for token in ids]
    ends = torch.tensor([len(word) for word in words]).cumsum(0)
    text, found = "".join(words), torch.zeros(len(ids), dtype=torch.bool)
    for question in chat.questions:
        stop = text.index(question.answer) + len(question.answer)
        start = text.rindex(NEEDLE, 0, stop)
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        found |= (ends > start) & (begins < stop)
    return found


def rows(engine: Engine, chat: Conversation) -> dict[str, ForcedNumbers]:
    """Results of a text, by part; whole policies are first."""
    memory = engine.read(chat)
    full, ids = memory.caches.activate(0), tuple(memory.transcript.ids)
    probes = list[Probe]()
    for question in chat.questions:
        asked = tuple(engine.tokenizer.encode_question_about(memory.conversation, question))
        answer = tuple(engine.tokenizer.encode(question.prefixed_answer))
        probes.append(Probe(asked + answer, len(asked)))
    text, size = RecordedText(engine, ids, full, {}, {}), len(ids) // SHARE
    coded, fewer = (text.held(Policy.parse(policy), size) for policy in ("larder", FEWER))
    needle = needle_positions(engine, chat, ids)
    caches = {name: mixed(full, coded, part, needle) for name, part in PARTS.items()}
    every = {"full": full, "larder": coded, FEWER: fewer} | caches
    return {name: ForcedNumbers.over(cache, engine, probes) for name, cache in every.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--first", type=int, default=60, help="first seed")
    parser.add_argument("--texts", type=int, default=3)
    options = parser.parse_args()
    engine, texts = Engine.load(options.model, policy="full"), list[dict[str, ForcedNumbers]]()
    seeds = range(options.first, options.first + options.texts)
    for chat in needle_texts(engine, options.model, options.corpus, seeds):
        texts.append(rows(engine, chat))
        for name in texts[0]:
            own = [x for text in texts for x in text[name].likelihoods]
            full = [x for text in texts for x in text["full"].likelihoods]
            changes = [a - b for a, b in zip(own, full, strict=True)]
            row = {
                "part": name,
                "numbers": len(own),
                "found": sum(x for text in texts for x in text[name].found),
                "nats": round(fmean(own), 3),
                "less full": round(fmean(changes), 3),
                "either way": round(fmean(map(abs, changes)), 3),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
