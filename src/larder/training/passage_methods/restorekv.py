"""RestoreKV: learned tokens whose entries make up for evicted ones, by self-distillation.

Baek, Shin, Kong, "RestoreKV: Recovering Full-Cache Behavior Under Aggressive Query-Agnostic KV
Cache Eviction" (2026), arXiv:2608.01247: the 8 tokens and the low-rank updates of their pass are
trained so that the model over what KVzip keeps and over their entries predicts as the frozen model
over the full cache does. The training code was not public; the loss, KL(full || restored), the
shares that are kept and the texts that are predicted are ours: the tokens that follow a text, and a
part of it that is recited after a request and its first words. Texts, scores and what the full
cache predicts are computed once; a step differentiates the learned tokens and these probes alone.

Much smaller than the paper's: dozens of texts of hundreds of tokens, and no questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from larder.core.errors import BadParameter, ModelError
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Keys, NamedTensors, Queries, TensorShapes, Values
from larder.models.attention_backend import AttentionInputs, CausalAttention
from larder.models.decoder import Decoder
from larder.models.learned_weights import LayerTensors
from larder.models.lm_head import LMHead
from larder.policy.providers.restorekv import RESTORE_TOKENS, RestoreTokens
from larder.prefill.base import Progress
from larder.prefill.contexts import check_chunkable
from larder.session.prefill import common_prompts
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.training.cartridge import visible
from larder.training.corpus import Corpus, CorpusSplit, Passage
from larder.training.gated_attention import attention_under_mask
from larder.training.labels import CHUNK_TOKENS, CopyPass, row_attention
from larder.training.passage_method import (
    PassageLimits,
    PassageMethod,
    differentiable_states,
    distillation_loss,
)
from larder.training.passage_methods.lookahead_kv import first_soft_tokens

FOLLOWING = 48  # tokens behind a text, and of a recited part, whose predictions are compared
CUE_TOKENS = 16  # of a recited part, which are given
SINKS = 4  # entries that stay, as in the released code
LEAST_TOKENS = 2 * (CUE_TOKENS + FOLLOWING)  # of a text
SHARES = (1 / 4, 1 / 8, 1 / 16)  # of entries that are kept, learned ones among them


@dataclass(frozen=True)
class LayerText:
    """Entries of a text in one layer.

    Args:
        scores: highest share of the attention of a copy of the text.
    """

    keys: Keys
    values: Values
    scores: Float[Tensor, "K N"]


@dataclass(frozen=True)
class Probes:
    """Texts behind a cache, end to end.

    Args:
        rows: tokens whose predictions are compared.
        teacher: logits of these over the full cache, in half precision.
    """

    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    teacher: Float[Tensor, "R V"]


@dataclass(frozen=True)
class TaughtText:
    """Text that was read once, and what is asked of its cache."""

    layers: Mapping[int, LayerText]
    probes: Probes

    @property
    def tokens(self) -> int:
        return next(iter(self.layers.values())).keys.shape[1]


@dataclass(frozen=True)
class VisibleEntries:
    """Entries of a layer, and those of each kv head that are seen."""

    keys: Keys
    values: Values
    seen: Bool[Tensor, "K S"]


class SuffixAttention:
    """Attention of texts behind a cache: to its entries, and causally within each text.

    Args:
        entries: of each layer.
        lengths: tokens of each text.

    Attributes:
        new: keys and values of the texts by layer, which gradients pass through.
    """

    def __init__(self, entries: Mapping[int, VisibleEntries], lengths: Sequence[int]) -> None:
        self._entries, self._own = entries, visible(0, lengths)
        self.new = dict[int, tuple[Keys, Values]]()

    def attend(self, inputs: AttentionInputs) -> Queries:
        self.new[inputs.layer] = inputs.keys, inputs.values
        held, count = self._entries[inputs.layer], inputs.queries.shape[1]
        keys = torch.cat([held.keys.to(inputs.keys), inputs.keys], 1)
        values = torch.cat([held.values.to(inputs.values), inputs.values], 1)
        group = len(inputs.queries) // len(keys)
        cached = held.seen.repeat_interleave(group, 0)[:, None].expand(-1, count, -1)
        own = self._own.to(cached.device).expand(len(cached), -1, -1)
        seen = torch.cat([cached, own], 2)  # [H, Q, S]
        return attention_under_mask(inputs, inputs.queries, keys, values, seen)


@dataclass(frozen=True)
class RestoreTraining(PassageMethod):
    """Learned tokens and low-rank updates by AdamW, one text and one share of entries a step.

    Args:
        rank: of the updates.
        rate: highest learning rate; it falls along a cosine.
    """

    rank: int = 8
    epochs: int = 7
    rate: float = 2e-3

    def __post_init__(self) -> None:
        if min(self.rank, self.epochs) < 1 or not self.rate > 0:
            raise BadParameter(f"restorekv needs numbers above 0, got {self}.")

    def passages(
        self, corpus: Corpus, adapter: TokenizerAdapter, limits: PassageLimits
    ) -> dict[CorpusSplit, list[Passage]]:
        """Plain texts that are long enough, each with the request to recite it behind it."""
        request = tuple(common_prompts(adapter)["repeat"])
        chosen = super().passages(corpus, adapter, limits)
        return {
            split: [
                replace(passage, ids=passage.ids + request, predicting=(len(passage.ids),))
                for passage in passages
                if len(passage.ids) >= LEAST_TOKENS + FOLLOWING
            ]
            for split, passages in chosen.items()
        }

    def fit(
        self, decoder: Decoder, passages: Sequence[Passage], seed: int, progress: Progress
    ) -> list[LayerTensors]:
        check_restorable(decoder.spec)
        source, order = torch.Generator().manual_seed(seed), Random(seed)
        provider = RestoreTokens()
        layers = first_soft_tokens(decoder, RESTORE_TOKENS, self.rank, source)
        tensors = [each.requires_grad_() for layer in layers for each in layer.values()]
        optimizer = torch.optim.AdamW(tensors, lr=self.rate, weight_decay=0)
        steps = self.epochs * len(passages)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.rate, total_steps=steps + 1, pct_start=0.1
        )
        total = len(passages) + steps
        texts = list[TaughtText]()
        for passage in passages:
            texts.append(taught_text(decoder, passage, order))
            progress(len(texts), total)
        for done in range(steps):
            if done % len(texts) == 0:
                turns = order.sample(range(len(texts)), len(texts))
            text, share = texts[turns[done % len(texts)]], order.choice(SHARES)
            optimizer.zero_grad()
            restored = restored_entries(decoder, layers, provider, text)
            restored_loss(decoder, text, share, restored).backward()
            torch.nn.utils.clip_grad_norm_(tensors, 1.0)
            optimizer.step()
            schedule.step()
            progress(len(texts) + done + 1, total)
        return [{name: each.detach().cpu() for name, each in layer.items()} for layer in layers]

    def test(
        self, decoder: Decoder, layers: Sequence[LayerTensors], passages: Sequence[Passage]
    ) -> dict[str, float]:
        """Mean divergence of the compared tokens with restored entries and without, of equally many
        entries, by the share that is kept.
        """
        device, order, found = decoder.spec.device, Random(0), dict[str, list[float]]()
        tensors = [{name: each.to(device) for name, each in layer.items()} for layer in layers]
        for passage in passages:
            text = taught_text(decoder, passage, order)
            restored = restored_entries(decoder, tensors, RestoreTokens(), text)
            for share in SHARES:
                for name, added in (("kl", restored), ("evicted_kl", {})):
                    loss = restored_loss(decoder, text, share, added)
                    named = f"{name}_{round(1 / share)}"
                    found.setdefault(named, []).append(float(loss.detach()))
        return {name: fmean(numbers) for name, numbers in found.items()}

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        return RestoreTokens().shapes(layer, width, tensors)


def check_restorable(spec: ModelSpec) -> None:
    """Check that the layers of a model hold keys and values of all tokens.

    Raises:
        ModelError: they do not.
    """
    check_chunkable(spec, "restorekv")
    if any(layer.latent_rank or layer.sinks or layer.softcap for layer in spec.layers):
        raise ModelError(
            "restorekv cannot be trained for a model with latents (MLA), attention sinks or capped "
            "logits: choose another model, or drop()."
        )


def taught_text(decoder: Decoder, passage: Passage, order: Random) -> TaughtText:
    """Text of a passage that is read once; the last tokens of it are what follows.

    Args:
        passage: with the request to recite it from the index that it predicts on.
        order: draws the part that is recited.
    """
    (stop,) = passage.predicting
    request, count = passage.ids[stop:], stop - FOLLOWING
    text, following = passage.ids[:count], passage.ids[count:stop]
    start = order.randrange(count - CUE_TOKENS - FOLLOWING + 1)
    recited = request + text[start : start + CUE_TOKENS + FOLLOWING]
    ids, lengths = following + recited, (len(following), len(recited))
    rows = (*range(FOLLOWING - 1), *range(len(ids) - FOLLOWING - 1, len(ids) - 1))
    layers = scored_layers(decoder, CopyPass.of(text, request))
    seen = {index: everything(layer) for index, layer in layers.items()}
    with torch.no_grad():
        teacher = compared_logits(decoder, seen, count, ids, lengths, rows)
    return TaughtText(layers, Probes(ids, lengths, rows, teacher.half()))


@torch.no_grad()
def scored_layers(decoder: Decoder, text: CopyPass) -> dict[int, LayerText]:
    """Entries of a text in every layer, and KVzip's scores of them."""
    found = dict[int, LayerText]()

    def show(inputs: AttentionInputs) -> None:
        best = torch.zeros(inputs.keys.shape[0], text.context, device=inputs.keys.device)
        for some in torch.arange(text.copy, len(text.ids)).split(CHUNK_TOKENS):
            weights = row_attention(inputs, int(some[0]), len(some))[1][..., : text.context]
            shares = weights / weights.sum(-1, keepdim=True)
            best = torch.maximum(best, shares.amax((1, 2)))
        keys, values = inputs.keys[:, : text.context], inputs.values[:, : text.context]
        found[inputs.layer] = LayerText(keys.clone(), values.clone(), best)

    decoder.forward_uncached(text.ids, CausalAttention(show))
    return found


def everything(layer: LayerText) -> VisibleEntries:
    """All entries of a text in a layer."""
    return VisibleEntries(layer.keys, layer.values, torch.ones_like(layer.scores, dtype=torch.bool))


def selection_masks(
    layers: Mapping[int, LayerText], share: float, added: int
) -> dict[int, Bool[Tensor, "K N"]]:
    """Entries of each layer that stay: those of the highest scores over all layers and heads.

    Args:
        share: of all entries, `added` ones of each kv head among them.
    """
    scores = torch.stack([layer.scores for layer in layers.values()])  # [L, K, N]
    count = scores.shape[2]
    scores[..., :SINKS] = torch.inf
    wanted = scores.shape[0] * scores.shape[1] * max(round(share * count) - added, SINKS)
    keep = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    keep[scores.flatten().argsort(descending=True, stable=True)[:wanted]] = True
    return dict(zip(layers, keep.view(scores.shape), strict=True))


def restored_entries(
    decoder: Decoder, layers: Sequence[LayerTensors], provider: RestoreTokens, text: TaughtText
) -> dict[int, tuple[Keys, Values]]:
    """Keys and values of the learned tokens behind a text, by layer; gradients pass through."""
    seen = {index: everything(layer) for index, layer in text.layers.items()}
    attention = SuffixAttention(seen, (provider.tokens,))
    positions = torch.arange(text.tokens - provider.tokens, text.tokens, device=decoder.spec.device)
    with decoder.soft_prompts.modules.installed(layers, provider):
        differentiable_states(decoder, [0] * provider.tokens, attention, positions)
    return attention.new


def restored_loss(
    decoder: Decoder, text: TaughtText, share: float, added: Mapping[int, tuple[Keys, Values]]
) -> Float[Tensor, ""]:
    """Mean divergence of the probes over the kept entries of a text and over added ones.

    Args:
        share: of entries that are held, added ones included.
        added: keys and values by layer; empty for none.
    """
    count = next(iter(added.values()))[0].shape[1] if added else 0
    masks = selection_masks(text.layers, share, count)
    held = {
        index: _with_added(layer, masks[index], added.get(index))
        for index, layer in text.layers.items()
    }
    probes = text.probes
    own = compared_logits(decoder, held, text.tokens, probes.ids, probes.lengths, probes.rows)
    return distillation_loss(probes.teacher, own)


def _with_added(
    layer: LayerText, kept: Bool[Tensor, "K N"], added: tuple[Keys, Values] | None
) -> VisibleEntries:
    if added is None:
        return VisibleEntries(layer.keys, layer.values, kept)
    keys, values = added
    seen = torch.cat([kept, torch.ones_like(kept[:, :1]).expand(-1, keys.shape[1])], 1)
    return VisibleEntries(
        torch.cat([layer.keys, keys], 1), torch.cat([layer.values, values], 1), seen
    )


def compared_logits(
    decoder: Decoder,
    entries: Mapping[int, VisibleEntries],
    start: int,
    ids: Sequence[int],
    lengths: Sequence[int],
    rows: Sequence[int],
) -> Float[Tensor, "R V"]:
    """Logits of some tokens of texts behind a cache.

    Args:
        start: position of the first token of each text.
    """
    positions = torch.cat([torch.arange(length) for length in lengths]) + start
    attention = SuffixAttention(entries, lengths)
    states = differentiable_states(decoder, ids, attention, positions.to(decoder.spec.device))
    return LMHead(decoder.module).logits(states[list(rows)])


Part = RestoreTraining
