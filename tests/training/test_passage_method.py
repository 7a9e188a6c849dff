"""Training through the whole model: gradients through attention, splits, cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from larder.core import BadParameter, LayerSpec, ModelError, Progress, Queries
from larder.models import AttentionInputs, CausalAttention, Decoder, LayerTensors, LoadedModel
from larder.session import TokenizerAdapter
from larder.training import (
    CorpusSplit,
    Passage,
    PassageLimits,
    PassageMethod,
    differentiable_states,
    distillation_loss,
    measure_on_passages,
    read_corpus,
    select_passages,
    train_on_passages,
)

LIMITS = PassageLimits(tokens=150, test_tokens=60, passage_tokens=60)


class ScaledAttention:
    """Causal attention whose outputs are multiplied by a learned number of each layer."""

    def __init__(self, factors: Sequence[Tensor]) -> None:
        self._factors, self._plain = factors, CausalAttention(lambda inputs: None)

    def attend(self, inputs: AttentionInputs) -> Queries:
        return self._plain.attend(inputs) * self._factors[inputs.layer]


@dataclass(frozen=True)
class Factors(PassageMethod):
    """Learns from the model's own logits that its attention outputs are multiplied by 1."""

    first: float = 0.5
    steps: int = 40

    def fit(
        self, decoder: Decoder, passages: Sequence[Passage], seed: int, progress: Progress
    ) -> list[LayerTensors]:
        factors = [torch.tensor([self.first]).requires_grad_() for _ in decoder.spec.managed]
        optimizer = torch.optim.Adam(factors, lr=0.1)
        for done in range(self.steps):
            optimizer.zero_grad()
            self._loss(decoder, factors, passages[0].ids).backward()
            optimizer.step()
            progress(done + 1, self.steps)
        return [{"factor": each.detach()} for each in factors]

    def test(
        self, decoder: Decoder, layers: Sequence[LayerTensors], passages: Sequence[Passage]
    ) -> dict[str, float]:
        factors = [own["factor"] for own in layers]
        return {"loss": float(self._loss(decoder, factors, passages[0].ids).detach())}

    def shapes(
        self, layer: LayerSpec, width: int, tensors: Mapping[str, Tensor]
    ) -> dict[str, tuple[int, ...]]:
        return {"factor": (1,)}

    def _loss(self, decoder: Decoder, factors: Sequence[Tensor], ids: Sequence[int]) -> Tensor:
        ones = [torch.ones(1)] * len(factors)
        teacher, student = (
            F.linear(
                differentiable_states(decoder, ids, ScaledAttention(own)), decoder.embedding_table()
            )
            for own in (ones, factors)
        )
        return distillation_loss(teacher.detach(), student)


@pytest.mark.extended
def test_factors_are_learned_through_the_model(loaded: LoadedModel) -> None:
    done = list[int]()
    learned = train_on_passages(
        Factors(),
        loaded.decoder,
        TokenizerAdapter(loaded.tokenizer),
        read_corpus(None),
        LIMITS,
        lambda step, total: done.append(step),
    )
    assert all(abs(float(own["factor"]) - 1) < 0.2 for own in learned.layers)
    assert len(learned.layers) == len(loaded.decoder.spec.managed) and done == [*range(1, 41)]
    card = learned.card
    assert card.method == "Factors" and card.tokens >= LIMITS.tokens
    assert card.settings == {"first": 0.5, "steps": 40}
    assert card.metrics["test_loss"] < 0.05 and card.metrics["test_documents"] == 1
    assert all(weight.grad is None for weight in loaded.decoder.body.parameters())


def test_given_weights_are_measured_on_the_documents_that_training_leaves_out(
    loaded: LoadedModel,
) -> None:
    adapter, corpus = TokenizerAdapter(loaded.tokenizer), read_corpus(None)
    given = (Factors(steps=1), loaded.decoder, adapter, corpus)
    trained = train_on_passages(*given, LIMITS, lambda step, total: None)
    untested = replace(trained, card=replace(trained.card, metrics={}))
    assert measure_on_passages(*given, LIMITS, untested) == trained
    layers = tuple({"factor": torch.ones(1)} for _ in trained.layers)
    exact = measure_on_passages(*given, LIMITS, replace(untested, layers=layers))
    assert exact.card.metrics["test_loss"] < trained.card.metrics["test_loss"]
    silent = replace(LIMITS, test_tokens=0)
    assert train_on_passages(*given, silent, lambda step, total: None).card.metrics == {}
    with pytest.raises(ModelError, match="leaves out no document"):
        measure_on_passages(*given, silent, untested)


def test_plain_attention_equals_the_models_logits(loaded: LoadedModel) -> None:
    ids = list(range(5, 45))
    states = differentiable_states(loaded.decoder, ids, CausalAttention(lambda inputs: None))
    with loaded.decoder.attention, torch.no_grad():
        plain = CausalAttention(lambda inputs: None)
        logits = loaded.decoder.module(torch.tensor([ids]), larder=plain)
    torch.testing.assert_close(
        loaded.decoder.module.get_output_embeddings()(states),
        logits.logits[0],
        atol=1e-4,
        rtol=1e-4,
    )


def test_passages_of_each_split_end_at_their_token_count() -> None:
    passages = [
        Passage(f"{split.value} {n}", "texts", split, 0, tuple(range(40)))
        for n in range(5)
        for split in CorpusSplit
    ]
    chosen = select_passages(iter(passages), LIMITS)
    counts = {split: len(own) for split, own in chosen.items()}
    assert counts == {CorpusSplit.TRAIN: 4, CorpusSplit.TEST: 2, CorpusSplit.HELD_OUT: 2}


def test_divergence_hand_values() -> None:
    teacher = torch.zeros(1, 2)
    assert float(distillation_loss(teacher, teacher)) == pytest.approx(0, abs=1e-7)
    uneven = torch.tensor([[1.0, 3.0]]).log()  # shares of 1/4 and 3/4
    expected = 0.5 * (torch.log(torch.tensor(2.0)) + torch.log(torch.tensor(2 / 3)))
    assert float(distillation_loss(teacher, uneven)) == pytest.approx(float(expected))


def test_missing_documents_and_divergence_are_refused(loaded: LoadedModel) -> None:
    adapter, corpus = TokenizerAdapter(loaded.tokenizer), read_corpus(None)
    given = (loaded.decoder, adapter, corpus)
    with pytest.raises(ModelError, match="diverged in layer 0: take another seed"):
        train_on_passages(Factors(float("nan"), 1), *given, LIMITS, lambda step, total: None)
    huge = replace(LIMITS, passage_tokens=10**6)
    with pytest.raises(ModelError, match="no training document: give more texts"):
        train_on_passages(Factors(), *given, huge, lambda step, total: None)
    with pytest.raises(BadParameter, match="above 0"):
        PassageLimits(tokens=0)
