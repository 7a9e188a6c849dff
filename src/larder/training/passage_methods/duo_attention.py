"""DuoAttention: gates that choose between full and streaming attention, one per kv head.

Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads"
(2024), arXiv:2410.10819, section 3.2, and its released code: each head's output is a mixture of
full attention and of attention to sinks and recent tokens alone. Gates begin at 1 and are clamped
to [0, 1]; the loss is the squared change of the last hidden states where passkeys are asked for,
and a penalty on the mean gate. `retrieval_heads(trial="gates")` takes the heads with the highest
gates.

Shrunk: texts of a thousand tokens in place of 32,000, so 16 sinks and 64 recent tokens in place of
128 and 256; two steps for each passage in place of 2,000, at three times the rate; passkeys of two
words of a text in place of 32 words of the spelling alphabet. The loss is that of the tokens that
predict passkeys; in the released code, of all tokens of questions and answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.spec import LayerSpec
from larder.core.types import NamedTensors, Queries, TensorShapes
from larder.models.attention_backend import AttentionInputs
from larder.models.decoder import Decoder
from larder.models.learned_weights import LayerTensors
from larder.models.lm_head import LMHead
from larder.models.measurements._needles import NeedleSettings
from larder.models.measurements.base import SampleText
from larder.models.measurements.duo_attention import GATES, TrainedGates
from larder.prefill.base import Progress
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.training.corpus import Corpus, CorpusSplit, Passage
from larder.training.gated_attention import attention_under_mask, token_ages, visible_tokens
from larder.training.passage_method import PassageLimits, PassageMethod, differentiable_states

RAMP = 5  # the learning rate rises over the first of so many parts, and falls over the last
LOWEST_RATE = 0.1  # of the highest
BLOCK = 256  # tokens whose attention is computed at a time


class MixedAttention:
    """Attention of every layer as a mixture of full and streaming attention, without a cache.

    Args:
        gates: share of full attention of each kv head, by layer; layers without have full
            attention.
        sinks: first tokens that streaming attention sees.
        recent: latest tokens that it sees, a token's own included.
    """

    def __init__(
        self, gates: Mapping[int, Float[Tensor, " K"]], sinks: int = 0, recent: int = 1
    ) -> None:
        self._gates, self._sinks, self._recent = gates, sinks, recent

    def attend(self, inputs: AttentionInputs) -> Queries:
        full = streaming_attention(inputs, 0, inputs.queries.shape[1])
        if inputs.layer not in self._gates:
            return full
        streaming = streaming_attention(inputs, self._sinks, self._recent)
        group = len(inputs.queries) // len(inputs.keys)
        share = self._gates[inputs.layer].repeat_interleave(group)[:, None, None]
        return (share * full + (1 - share) * streaming).to(full.dtype)


def streaming_attention(inputs: AttentionInputs, sinks: int, recent: int) -> Queries:
    """Causal attention of a text to its first and latest tokens, which gradients pass through.

    Args:
        recent: latest tokens that a token sees, its own included; with as many as the text has it
            sees all before it.
    """
    total, outs, ages = inputs.queries.shape[1], list[Queries](), token_ages(inputs)
    seen = visible_tokens(inputs, ages)
    seen &= (torch.arange(total, device=ages.device) < sinks) | (ages < recent)
    for start in range(0, total, BLOCK):
        stop = min(start + BLOCK, total)
        first = max(start - recent + 1, 0)
        early = min(sinks, first)
        keys, values, own = (
            torch.cat([each[:, :early], each[:, first:stop]], 1)
            for each in (inputs.keys, inputs.values, seen[start:stop])
        )
        outs.append(attention_under_mask(inputs, inputs.queries[:, start:stop], keys, values, own))
    return torch.cat(outs, 1)


@dataclass(frozen=True)
class DuoAttentionGates(PassageMethod):
    """Gates by AdamW, one passage a step.

    Args:
        sinks, recent: tokens that streaming heads see.
        needles: passkeys hidden in a text.
        words: of a passkey.
        rate: highest learning rate.
        penalty: weight of the mean gate in the loss.
    """

    sinks: int = 16
    recent: int = 64
    needles: int = 10
    words: int = 2
    epochs: int = 2
    rate: float = 0.06
    penalty: float = 0.05

    def __post_init__(self) -> None:
        counts = (self.recent, self.needles, self.words, self.epochs)
        if min(counts) < 1 or self.sinks < 0 or not self.rate > 0 or self.penalty < 0:
            raise BadParameter(
                "duo_attention needs numbers above 0, and sinks and a penalty of at least 0, got "
                f"{self}."
            )

    def passages(
        self, corpus: Corpus, adapter: TokenizerAdapter, limits: PassageLimits
    ) -> dict[CorpusSplit, list[Passage]]:
        """Passages of the corpus with passkeys hidden in them, and questions behind."""
        sample, source = SampleText(adapter.encode), torch.Generator().manual_seed(limits.seed)
        settings = NeedleSettings(limits.passage_tokens, self.needles, self.words)

        def hidden(passage: Passage) -> Passage:
            seed = int(torch.randint(1 << 31, (), generator=source))
            found = settings.hidden_in(passage.ids, sample, seed)
            return replace(passage, ids=found.ids, predicting=found.predicting)

        chosen = super().passages(corpus, adapter, limits)
        return {split: [hidden(own) for own in passages] for split, passages in chosen.items()}

    def fit(
        self, decoder: Decoder, passages: Sequence[Passage], seed: int, progress: Progress
    ) -> list[LayerTensors]:
        gates = {
            layer.index: torch.ones(layer.kv_heads, device=decoder.spec.device).requires_grad_()
            for layer in decoder.spec.managed
        }
        optimizer = torch.optim.AdamW(gates.values(), lr=self.rate, weight_decay=0)
        source, steps = torch.Generator().manual_seed(seed), self.epochs * len(passages)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_share, steps))
        drawn = [index for _ in range(self.epochs) for index in _shuffled(len(passages), source)]
        wanted = dict[int, Tensor]()
        for step, index in enumerate(drawn, start=1):
            if index not in wanted:
                wanted[index] = self._states(decoder, passages[index], {}).detach()
            optimizer.zero_grad()
            self._loss(decoder, passages[index], gates, wanted[index]).backward()
            optimizer.step()
            schedule.step()
            _clamp(gates)
            progress(step, steps)
        return [{GATES: gate.detach().cpu()} for gate in gates.values()]

    def _loss(
        self,
        decoder: Decoder,
        passage: Passage,
        gates: Mapping[int, Tensor],
        wanted: Float[Tensor, "N hidden"],
    ) -> Float[Tensor, ""]:
        change = self._states(decoder, passage, gates) - wanted
        mean_gate = torch.cat([*gates.values()]).abs().mean()
        return change.square().mean() + self.penalty * mean_gate

    def test(
        self, decoder: Decoder, layers: Sequence[LayerTensors], passages: Sequence[Passage]
    ) -> dict[str, float]:
        """Mean gate, and the share of passkeys that are said with all heads full and with half."""
        gates = torch.cat([each[GATES] for each in layers])
        best = torch.zeros(len(gates), device=decoder.spec.device)
        best[gates.topk(len(gates) // 2).indices] = 1
        parts = best.split([len(each[GATES]) for each in layers])
        indices = [layer.index for layer in decoder.spec.managed]
        return {
            "mean_gate": float(gates.mean()),
            "recall": self._recall(decoder, passages, {}),
            "recall_half": self._recall(decoder, passages, dict(zip(indices, parts, strict=True))),
        }

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        return TrainedGates().shapes(layer, width, tensors)

    def _states(
        self, decoder: Decoder, passage: Passage, gates: Mapping[int, Tensor]
    ) -> Float[Tensor, "N hidden"]:
        """Last hidden states where passkeys are predicted."""
        attention = MixedAttention(gates, self.sinks, self.recent)
        states = differentiable_states(decoder, passage.ids, attention)
        return states[list(passage.predicting)].float()

    def _recall(
        self, decoder: Decoder, passages: Sequence[Passage], gates: Mapping[int, Tensor]
    ) -> float:
        """Share of passkeys whose every token is the most likely one."""
        head, hits = LMHead(decoder.module), list[bool]()
        for passage in passages:
            states = self._states(decoder, passage, gates).detach().to(decoder.spec.dtype)
            predicted = head.logits(states).argmax(-1).tolist()
            right = [
                token == passage.ids[index + 1]
                for token, index in zip(predicted, passage.predicting, strict=True)
            ]
            hits += answers_right(passage.predicting, right)
        return sum(hits) / max(len(hits), 1)


def rate_share(steps: int, step: int) -> float:
    """Learning rate of a step, counted from 0, over the highest."""
    ramp = max(steps // RAMP, 1)
    rising, falling = (step + 1) / ramp, (steps - step) / ramp
    return min(1.0, max(rising, LOWEST_RATE), max(falling, LOWEST_RATE))


def answers_right(predicting: Sequence[int], right: Sequence[bool]) -> list[bool]:
    """True for each answer all of whose tokens are right.

    Args:
        predicting: indices of tokens; those of an answer follow one another.
    """
    found, before = list[bool](), -2
    for index, is_right in zip(predicting, right, strict=True):
        if index == before + 1:
            found[-1] &= is_right
        else:
            found.append(is_right)
        before = index
    return found


@torch.no_grad()
def _clamp(gates: Mapping[int, Tensor]) -> None:
    for gate in gates.values():
        gate.clamp_(0, 1)


def _shuffled(count: int, source: torch.Generator) -> list[int]:
    return torch.randperm(count, generator=source).tolist()


Part = DuoAttentionGates
