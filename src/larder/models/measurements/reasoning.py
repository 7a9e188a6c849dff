"""Reasoning score of a head: its highest attention weights on the sentence that decides a question.

Fu et al., "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval
and Reasoning" (2024), arXiv:2410.19258, HeadKV-R2: two claims about the ages of two people are
hidden in a text that ends with the question who is older. The model answers freely. At each token
of its answer, of the k highest weights of a head (k is the length of the correct claim) those
inside the claim are added up, divided by k; the generated token need not be in the claim. A run
counts only if the F1 of its answer is above one half, and a head's score is the mean over runs of
several lengths and depths, as in the released code.

Differences: texts come from the bundled one and are shorter; the claims are adjacent, the older
person first in every other run (inferred); F1 is over tokens; a run that does not count adds
nothing, but if no run counts, all of them do, so that any model can be measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.errors import BadParameter
from larder.core.types import Mode
from larder.models.batch_segment import BatchSegment
from larder.models.decoder import Decoder
from larder.models.measurements._attention_capture import flatten_layers
from larder.models.measurements.base import Granularity, Measurement, SampleText
from larder.models.observers import LayerActivations
from larder.ops.attention import cap_logits, sink_logits
from larder.ops.attention_weights import softmax_with_sinks

SEED = 0
CLAIM_TEMPLATE = "\n{name} is {age} years old."
QUESTION_TEMPLATE = "\nWho is older, {one} or {other}? The older one is"
AGES = (24, 71)  # of the younger and of the older
RIGHT_F1 = 0.5  # an answer with a higher F1 is correct


@dataclass(frozen=True)
class ReasoningPrompt:
    """Text that ends with a question.

    Args:
        claim: tokens [start, stop) of the claim that decides the question.
        answer: tokens of the correct answer.
    """

    ids: tuple[int, ...]
    claim: tuple[int, int]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Reasoning(Measurement):
    """Share of the highest weights inside the correct claim, one number per query head.

    Args:
        lengths: of the texts, in tokens.
        depths: positions of the claims, as fractions of the text in [0, 1].
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
        runs = [run_prompt(decoder, prompt) for prompt in self.prompts(sample)]
        counted = [is_right for is_right, _ in runs]
        if not any(counted):
            counted = [True] * len(runs)
        sums = {layer: torch.zeros_like(run) for layer, run in runs[0][1].items()}
        for (_, scores), counts in zip(runs, counted, strict=True):
            for layer, score in scores.items():
                sums[layer] += score * counts
        means = {layer: (score / len(runs)).tolist() for layer, score in sums.items()}
        return flatten_layers(decoder, means)

    def prompts(self, sample: SampleText) -> list[ReasoningPrompt]:
        """One prompt per length and depth; names are drawn with a fixed seed."""
        source = torch.Generator().manual_seed(SEED)
        order = torch.randperm(len(sample.words), generator=source).tolist()
        names = [sample.words[index].capitalize() for index in order]
        settings = [(length, depth) for length in self.lengths for depth in self.depths]
        return [
            _reasoning_prompt(
                sample,
                length,
                depth,
                (names[2 * n % len(names)], names[(2 * n + 1) % len(names)]),
                n % 2,
            )
            for n, (length, depth) in enumerate(settings)
        ]


def _reasoning_prompt(
    sample: SampleText, length: int, depth: float, people: tuple[str, str], older: int
) -> ReasoningPrompt:
    text = sample.ids(length)
    cut = int(depth * length)
    ids, claims = [*text[:cut]], list[tuple[int, int]]()
    for index, name in enumerate(people):
        claim = sample.encode(CLAIM_TEMPLATE.format(name=name, age=AGES[index == older]))
        claims.append((len(ids), len(ids) + len(claim)))
        ids += claim
    ids += [*text[cut:], *sample.encode(QUESTION_TEMPLATE.format(one=people[0], other=people[1]))]
    return ReasoningPrompt(tuple(ids), claims[older], tuple(sample.encode(f" {people[older]}")))


@torch.no_grad()
def run_prompt(
    decoder: Decoder, prompt: ReasoningPrompt
) -> tuple[bool, dict[int, Float[Tensor, " H"]]]:
    """Correctness of the model's answer, and the score of each head of each managed layer."""
    cache = SequenceCache(decoder.spec, "dense")
    layers = [layer.index for layer in decoder.spec.managed]
    scores: dict[int, Tensor] = {}

    def watch(row: int, layer: int, recorded: LayerActivations) -> None:
        if layer in layers:
            hits = _hits(cache, layer, recorded.queries[:, -1], prompt.claim)
            scores[layer] = scores.get(layer, 0) + hits

    answer: list[int] = []
    ids = prompt.ids
    while len(answer) < len(prompt.answer):
        logits = decoder.forward_logits(
            [BatchSegment(cache, ids)], Mode.APPEND, [len(ids) - 1], watch
        )
        answer.append(int(logits[0].argmax()))
        ids = (answer[-1],)
    return f1(answer, prompt.answer) > RIGHT_F1, scores


def _hits(
    cache: SequenceCache, layer: int, queries: Float[Tensor, "H D"], claim: tuple[int, int]
) -> Float[Tensor, " H"]:
    """Sum of those of the k highest weights of each head inside a claim of k tokens, over k."""
    entries, spec = cache.entries(layer), cache.spec.layers[layer]
    keys = torch.stack([entries.head_keys(head) for head in range(spec.kv_heads)]).float()
    groups = queries.float().unflatten(0, (spec.kv_heads, -1))  # [K, R, D]
    logits = cap_logits(groups @ keys.mT * spec.scaling, spec.softcap).flatten(0, 1)
    weights = softmax_with_sinks(logits, sink_logits(spec, logits)).cpu()  # [H, S]
    k = min(claim[1] - claim[0], weights.shape[1])
    best = torch.argsort(weights, dim=-1, descending=True, stable=True)[:, :k]
    inside = (best >= claim[0]) & (best < claim[1])
    return (weights.gather(1, best) * inside).sum(1).double() / k


def f1(answer: Sequence[int], expected: Sequence[int]) -> float:
    """F1 of two token multisets, in [0, 1]."""
    common = (Counter(answer) & Counter(expected)).total()
    return 2 * common / (len(answer) + len(expected)) if answer or expected else 0.0


Part = Reasoning
