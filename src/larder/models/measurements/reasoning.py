"""How hard a head looks at the sentence that a question of two sentences is decided by.

Fu et al., "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval
and Reasoning" (2024), arXiv:2410.19258, HeadKV-R2: two claims are hidden in a text, how old two
people are, and behind it stands the question who is older. The model answers freely. At each token
of its answer the k highest weights of a head are taken, k the length of the right claim, and those
of them that lie inside it count, each divided by k; the token that is written need not be in it. A
run counts only if the F1 of its answer is above one half, and a head's score is the mean over runs
of several lengths and depths, as in the released code.

Differences: texts are made from the bundled one, and are shorter; the claims stand side by side,
the older person first in every other run (inferred); F1 is of tokens; a run that does not count
adds nothing, but if no run does, all of them count, so that any model can be measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.sequence import CacheForm, SequenceCache
from larder.core.errors import BadParameter
from larder.core.types import Mode
from larder.models.decoder import Decoder
from larder.models.forward_batch import BatchSegment, LayerActivations
from larder.models.measurements._attention_capture import flatten_layers
from larder.models.measurements.base import Granularity, Measurement, SampleText

SEED = 0
CLAIM_TEMPLATE = "\n{name} is {age} years old."
QUESTION_TEMPLATE = "\nWho is older, {one} or {other}? The older one is"
AGES = (24, 71)  # of the younger and of the older
RIGHT_F1 = 0.5  # above it an answer is right


@dataclass(frozen=True)
class ReasoningPrompt:
    """A text with a question behind it.

    Args:
        claim: tokens [start, stop) that the answer follows from.
        answer: the tokens of the right answer.
    """

    ids: tuple[int, ...]
    claim: tuple[int, int]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Reasoning(Measurement):
    """Hits of the highest weights in the right claim, one number per query head.

    Args:
        lengths: of the texts, in tokens.
        depths: where in each text the claims stand, as fractions of it.
    """

    lengths: tuple[int, ...] = (256, 512)
    depths: tuple[float, ...] = (0.1, 0.4, 0.7)
    granularity = Granularity.QUERY_HEAD

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise BadParameter(f"reasoning.lengths must be 1 or more each, got {self.lengths}.")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise BadParameter(f"reasoning.depths must be in [0, 1], got {self.depths}.")

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        runs = [run_prompt(decoder, riddle) for riddle in self.prompts(sample)]
        counted = [is_right for is_right, _ in runs]
        if not any(counted):
            counted = [True] * len(runs)
        sums = {layer: torch.zeros_like(own) for layer, own in runs[0][1].items()}
        for (_, scores), counts in zip(runs, counted, strict=True):
            for layer, own in scores.items():
                sums[layer] += own * counts
        means = {layer: (own / len(runs)).tolist() for layer, own in sums.items()}
        return flatten_layers(decoder, means)

    def prompts(self, sample: SampleText) -> list[ReasoningPrompt]:
        """One per length and depth; people are drawn alike for the same text."""
        source = torch.Generator().manual_seed(SEED)
        order = torch.randperm(len(sample.words), generator=source).tolist()
        names = [sample.words[place].capitalize() for place in order]
        places = [(length, depth) for length in self.lengths for depth in self.depths]
        return [
            _reasoning_prompt(
                sample,
                length,
                depth,
                (names[2 * n % len(names)], names[(2 * n + 1) % len(names)]),
                n % 2,
            )
            for n, (length, depth) in enumerate(places)
        ]


def _reasoning_prompt(
    sample: SampleText, length: int, depth: float, people: tuple[str, str], older: int
) -> ReasoningPrompt:
    text = sample.ids(length)
    cut = int(depth * length)
    ids, claims = [*text[:cut]], list[tuple[int, int]]()
    for place, name in enumerate(people):
        claim = sample.encode(CLAIM_TEMPLATE.format(name=name, age=AGES[place == older]))
        claims.append((len(ids), len(ids) + len(claim)))
        ids += claim
    ids += [*text[cut:], *sample.encode(QUESTION_TEMPLATE.format(one=people[0], other=people[1]))]
    return ReasoningPrompt(tuple(ids), claims[older], tuple(sample.encode(f" {people[older]}")))


@torch.no_grad()
def run_prompt(
    decoder: Decoder, riddle: ReasoningPrompt
) -> tuple[bool, dict[int, Float[Tensor, " H"]]]:
    """Whether the model's answer is right, and what each head of each layer looked at meanwhile."""
    cache = SequenceCache(decoder.spec, CacheForm.DENSE)
    layers = [layer.index for layer in decoder.spec.managed]
    scores: dict[int, Tensor] = {}

    def watch(row: int, layer: int, recorded: LayerActivations) -> None:
        del row
        if layer in layers:
            hits = _hits(cache, layer, recorded.queries[:, -1], riddle.claim)
            scores[layer] = scores.get(layer, 0) + hits

    said: list[int] = []
    fed = riddle.ids
    while len(said) < len(riddle.answer):
        logits = decoder.forward_logits(
            [BatchSegment(cache, fed)], Mode.APPEND, [len(fed) - 1], watch
        )
        said.append(int(logits[0].argmax()))
        fed = (said[-1],)
    return f1(said, riddle.answer) > RIGHT_F1, scores


def _hits(
    cache: SequenceCache, layer: int, queries: Float[Tensor, "H D"], claim: tuple[int, int]
) -> Float[Tensor, " H"]:
    """Of the k highest weights of each head, those inside a claim of k tokens, over k."""
    entries, spec = cache.entries(layer), cache.spec.layers[layer]
    keys = torch.stack([entries.head_keys(head) for head in range(spec.kv_heads)]).float()
    groups = queries.float().unflatten(0, (spec.kv_heads, -1))  # [K, R, D]
    weights = (groups @ keys.mT * spec.scaling).softmax(-1).flatten(0, 1).cpu()  # [H, S]
    k = min(claim[1] - claim[0], weights.shape[1])
    best = torch.argsort(weights, dim=-1, descending=True, stable=True)[:, :k]
    inside = (best >= claim[0]) & (best < claim[1])
    return (weights.gather(1, best) * inside).sum(1).double() / k


def f1(said: Sequence[int], right: Sequence[int]) -> float:
    """Of the tokens of an answer, as bags."""
    common = (Counter(said) & Counter(right)).total()
    return 2 * common / (len(said) + len(right)) if said or right else 0.0


Part = Reasoning
