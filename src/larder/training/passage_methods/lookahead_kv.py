"""LookaheadKV: learned tokens that attend to a prompt as the model's answer will.

Ahn et al., "LookaheadKV: Fast and Accurate KV Cache Eviction by Glimpsing into the Future without
Generation" (2026), arXiv:2603.10899. The target of a kv head is the mean attention of the model's
own greedy answer to the prompt, over its tokens and query heads, normalized over the prompt; the
loss is KL(target || prediction), summed over layers and heads. Keys and values of the prompt are
computed once, without gradients, and only the 32 learned tokens are differentiated.

Prompts are of three kinds, in turn: a text that breaks off, a text and a request to summarize it,
and a text with hidden words and a question for one of them. Shrunk: a few dozen prompts of hundreds
of tokens and answers of 16; the paper's data and rates were not at hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.errors import BadParameter
from larder.core.spec import LayerSpec
from larder.core.types import Keys, Mode, NamedTensors, Queries, TensorShapes, TokenIds
from larder.models.attention_backend import AttentionInputs, CausalAttention, RenumberedAttention
from larder.models.batch_segment import BatchSegment
from larder.models.decoder import Decoder
from larder.models.introspection import call_uncached
from larder.models.learned_weights import LayerTensors
from larder.models.measurements._needles import NeedleSettings
from larder.models.measurements.base import SampleText
from larder.ops.attention import cap_logits
from larder.ops.attention_weights import softmax_with_sinks
from larder.policy.providers._soft_tokens import DOWN, EMBEDDINGS, UP
from larder.policy.providers.lookahead_kv import SOFT_TOKENS, LookaheadTokens
from larder.prefill.base import Progress
from larder.session.prefill import common_prompts
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.training.corpus import Corpus, CorpusSplit, Passage
from larder.training.labels import row_attention
from larder.training.passage_method import PassageLimits, PassageMethod

WINDOW = 32  # latest tokens of a prompt whose attention the learned tokens are compared with
BEST = 64  # entries whose share of the answer's attention is measured
HIDDEN = NeedleSettings(count=4, words=3)
TINY = 1e-12


def first_soft_tokens(
    decoder: Decoder, count: int, rank: int, source: torch.Generator
) -> list[dict[str, Tensor]]:
    """Embeddings of `count` random tokens, and updates that change nothing, by managed layer."""
    table = decoder.embedding_table().detach()
    drawn = torch.randint(len(table), (count,), generator=source)
    layers = list[dict[str, Tensor]]()
    for linears in decoder.soft_prompts.modules.linears:
        own = dict[str, Tensor]()
        for name, linear in linears.items():
            bound = 1 / math.sqrt(linear.in_features)
            down = (2 * torch.rand(rank, linear.in_features, generator=source) - 1) * bound
            own |= {f"{name}{DOWN}": down, f"{name}{UP}": torch.zeros(linear.out_features, rank)}
        layers.append({name: each.to(table.device) for name, each in own.items()})
    layers[0][EMBEDDINGS] = table[drawn.to(table.device)].float().clone()
    return layers


@dataclass(frozen=True)
class PromptLayer:
    """Entries of a prompt in one layer, and the attention that they get.

    Args:
        targets: mean attention of the model's answer, normalized over the prompt.
        window: mean attention of the last tokens of the prompt, likewise.
    """

    keys: Keys
    values: Float[Tensor, "K N Dv"]
    targets: Float[Tensor, "K N"]
    window: Float[Tensor, "K N"]


class SoftAttention:
    """Attention of learned tokens over a prompt and themselves, which gradients pass through.

    Args:
        prompt: layers of the prompt, by index.
    """

    def __init__(self, prompt: Mapping[int, PromptLayer]) -> None:
        self._prompt = prompt
        self.shares: dict[int, Float[Tensor, "K N"]] = {}  # normalized over the prompt

    def attend(self, inputs: AttentionInputs) -> Queries:
        known = self._prompt[inputs.layer]
        keys = torch.cat([known.keys, inputs.keys], 1).float()
        values = torch.cat([known.values, inputs.values], 1).float()
        count, own = known.keys.shape[1], inputs.queries.shape[1]
        groups = inputs.queries.float().unflatten(0, (len(keys), -1))  # [K, R, Q, D]
        logits = groups @ keys[:, None].transpose(-1, -2) * inputs.scaling
        back = torch.arange(count, count + own)[:, None] - torch.arange(count + own)
        hidden = (back < 0) | (back >= (inputs.sliding_window or math.inf))
        visible = cap_logits(logits, inputs.softcap).masked_fill(
            hidden.to(logits.device), -torch.inf
        )
        weights = softmax_with_sinks(visible.flatten(0, 1), inputs.sinks)
        weights = weights.unflatten(0, groups.shape[:2])
        self.shares[inputs.layer] = normalized(weights[..., :count].mean((1, 2)))
        return (weights @ values[:, None]).flatten(0, 1).to(inputs.queries.dtype)


def normalized(weights: Float[Tensor, "K N"]) -> Float[Tensor, "K N"]:
    """Weights that sum to 1 in each row."""
    return weights / weights.sum(-1, keepdim=True).clamp(min=TINY)


def divergence(targets: Float[Tensor, "K N"], predicted: Float[Tensor, "K N"]) -> Float[Tensor, ""]:
    """KL(targets || predicted) in nats, summed over rows of shares."""
    logs = targets.clamp(min=TINY).log() - predicted.clamp(min=TINY).log()
    return (targets * logs).sum()


def best_share(
    targets: Float[Tensor, "K N"], predicted: Float[Tensor, "K N"], count: int
) -> Float[Tensor, " K"]:
    """Sum of the targets of the entries that are predicted highest."""
    best = predicted.topk(min(count, predicted.shape[1])).indices
    return targets.gather(1, best).sum(1)


@dataclass(frozen=True)
class LookaheadTraining(PassageMethod):
    """Learned tokens and low-rank updates by AdamW, one prompt a step.

    Args:
        rank: of the updates.
        answer: tokens of a greedy answer.
        rate: highest learning rate; it falls along a cosine.
    """

    rank: int = 8
    answer: int = 16
    epochs: int = 4
    rate: float = 2e-3

    def __post_init__(self) -> None:
        if min(self.rank, self.answer, self.epochs) < 1 or not self.rate > 0:
            raise BadParameter(f"lookahead_kv needs numbers above 0, got {self}.")

    def passages(
        self, corpus: Corpus, adapter: TokenizerAdapter, limits: PassageLimits
    ) -> dict[CorpusSplit, list[Passage]]:
        """Prompts: texts that break off, or end with a request or a question."""
        chosen = super().passages(corpus, adapter, limits)
        return {
            split: [
                replace(passage, ids=kind(passage, adapter))
                for passage, kind in zip(passages, cycle(_KINDS), strict=False)
            ]
            for split, passages in chosen.items()
        }

    def fit(
        self, decoder: Decoder, passages: Sequence[Passage], seed: int, progress: Progress
    ) -> list[LayerTensors]:
        source, steps = torch.Generator().manual_seed(seed), self.epochs * len(passages)
        layers = first_soft_tokens(decoder, SOFT_TOKENS, self.rank, source)
        tensors = [each.requires_grad_() for layer in layers for each in layer.values()]
        optimizer = torch.optim.AdamW(tensors, lr=self.rate, weight_decay=0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        prompts = [read_prompt(decoder, passage.ids, self.answer) for passage in passages]
        done = 0
        for _ in range(self.epochs):
            for index in torch.randperm(len(prompts), generator=source).tolist():
                optimizer.zero_grad()
                self._loss(decoder, layers, prompts[index]).backward()
                torch.nn.utils.clip_grad_norm_(tensors, 1.0)
                optimizer.step()
                schedule.step()
                done += 1
                progress(done, steps)
        return [{name: each.detach().cpu() for name, each in layer.items()} for layer in layers]

    def _loss(
        self, decoder: Decoder, layers: Sequence[LayerTensors], prompt: Mapping[int, PromptLayer]
    ) -> Float[Tensor, ""]:
        shares = predicted_shares(decoder, layers, prompt)
        managed = [layer.index for layer in decoder.spec.managed]
        losses = [divergence(prompt[index].targets, shares[index]) for index in managed]
        return torch.stack(losses).sum()

    def test(
        self, decoder: Decoder, layers: Sequence[LayerTensors], passages: Sequence[Passage]
    ) -> dict[str, float]:
        """Mean over prompts, layers and heads of the divergence and of the share of the answer's
        attention in the best entries: by prediction, by the latest tokens, and by itself.
        """
        tallies = {"kl": 0.0, "share": 0.0, "window_share": 0.0, "most_share": 0.0}
        device, heads = decoder.spec.device, 0
        tensors = [{name: each.to(device) for name, each in layer.items()} for layer in layers]
        for passage in passages:
            prompt = read_prompt(decoder, passage.ids, self.answer)
            shares = predicted_shares(decoder, tensors, prompt)
            for layer in decoder.spec.managed:
                known, found = prompt[layer.index], shares[layer.index].detach()
                heads += layer.kv_heads
                tallies["kl"] += float(divergence(known.targets, found))
                for name, order in (
                    ("share", found),
                    ("window_share", known.window),
                    ("most_share", known.targets),
                ):
                    tallies[name] += float(best_share(known.targets, order, BEST).sum())
        return {name: total / heads for name, total in tallies.items()}

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        return LookaheadTokens().shapes(layer, width, tensors)


def predicted_shares(
    decoder: Decoder, layers: Sequence[LayerTensors], prompt: Mapping[int, PromptLayer]
) -> dict[int, Float[Tensor, "K N"]]:
    """Attention of the learned tokens behind a prompt to its entries, normalized, by layer."""
    attention = SoftAttention(prompt)
    count = next(iter(prompt.values())).keys.shape[1]
    positions = torch.arange(count, count + SOFT_TOKENS, device=decoder.spec.device)
    context = decoder.soft_prompts.modules.installed(layers, LookaheadTokens())
    with torch.enable_grad(), decoder.attention, context:
        call_uncached(
            decoder.body, [0] * SOFT_TOKENS, RenumberedAttention(attention, decoder.spec), positions
        )
    return attention.shares


@torch.no_grad()
def read_prompt(decoder: Decoder, ids: TokenIds, answer: int) -> dict[int, PromptLayer]:
    """Layers of a prompt, with the attention of the model's own greedy answer."""
    found, count = dict[int, PromptLayer](), len(ids)

    def show(inputs: AttentionInputs) -> None:
        def looks(first: int, rows: int) -> Float[Tensor, "K N"]:
            weights = row_attention(inputs, first, rows)[1]
            return normalized(weights[..., :count].mean((1, 2)))

        latest = min(WINDOW, count)
        found[inputs.layer] = PromptLayer(
            inputs.keys[:, :count].clone(),
            inputs.values[:, :count].clone(),
            looks(count, answer),
            looks(count - latest, latest),
        )

    decoder.forward_uncached((*ids, *greedy_answer(decoder, ids, answer)), CausalAttention(show))
    return found


def greedy_answer(decoder: Decoder, ids: TokenIds, count: int) -> list[int]:
    """The most likely tokens behind a prompt, one after the other, ends of a turn included."""
    cache, answer = SequenceCache(decoder.spec, "dense"), list[int]()
    new = ids
    for _ in range(count):
        logits = decoder.forward_logits([BatchSegment(cache, new)], Mode.APPEND, [len(new) - 1])
        answer.append(int(logits[-1].argmax()))
        new = (answer[-1],)
    return answer


def _plain(passage: Passage, adapter: TokenizerAdapter) -> tuple[int, ...]:
    return passage.ids


def _summary(passage: Passage, adapter: TokenizerAdapter) -> tuple[int, ...]:
    return (*passage.ids, *common_prompts(adapter)["summarize"])


def _question(passage: Passage, adapter: TokenizerAdapter) -> tuple[int, ...]:
    """Text with hidden words, and the question for one of them."""
    seed = passage.number * 1009 + len(passage.ids)
    found = HIDDEN.hidden_in(passage.ids, SampleText(adapter.encode), seed)
    asked = found.needles[seed % len(found.needles)]
    question = found.ids[asked.question : asked.predicting[0] + 1]
    return (*found.ids[: found.context], *question)


_KINDS = (_plain, _summary, _question)


Part = LookaheadTraining
