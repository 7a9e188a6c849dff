"""DuoAttention's gates: the attention they mix, what training finds, and who reads them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from larder.core import BadParameter, ModelError
from larder.models import (
    Card,
    CausalAttention,
    Decoder,
    LearnedWeights,
    NeedleSettings,
    TrainedGates,
    calibrate,
    learned_file,
    wrap_model,
)
from larder.session import TokenizerAdapter
from larder.training import (
    CorpusSplit,
    DuoAttentionGates,
    MixedAttention,
    Passage,
    PassageLimits,
    answers_right,
    differentiable_states,
    rate_share,
    read_corpus,
)
from larder.training.passage_methods import duo_attention
from measurements import SAMPLE, encode
from model_attention import heads_of
from tiny_models import tiny

SMALL = DuoAttentionGates(sinks=2, recent=5, needles=2, words=1, epochs=30, rate=0.1)
IDS = tuple(range(3, 33))


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    with wrap_model(tiny("llama", layers=2)) as held:
        yield held


def recorded(decoder: Decoder, attention: MixedAttention) -> list[torch.Tensor]:
    """Attention outputs of every layer, before the projection."""
    outs: list[torch.Tensor] = []

    class Recorder:
        def attend(self, inputs):
            outs.append(attention.attend(inputs))
            return CausalAttention(lambda shown: None).attend(inputs)

    differentiable_states(decoder, IDS, Recorder())
    return outs


@pytest.mark.parametrize("block", [4, 256])
def test_gate_mixes_full_and_streaming_attention(decoder, monkeypatch, block) -> None:
    monkeypatch.setattr(duo_attention, "BLOCK", block)
    gates = {0: torch.tensor([0.25, 1.0]), 1: torch.tensor([0.0, 0.5])}
    found = recorded(decoder, MixedAttention(gates, sinks=2, recent=5))

    def seen(token: int, other: int) -> bool:
        return other < 2 or token - other < 5

    for layer, heads in enumerate(heads_of(decoder, IDS)):
        for head in range(4):
            gate = float(gates[layer][head // 2])
            for token in (0, 3, 6, 17, 29):
                mixed = gate * heads.out(head, token)
                mixed = mixed + (1 - gate) * heads.out(head, token, seen)
                torch.testing.assert_close(
                    found[layer][head, token].detach(), mixed, atol=1e-5, rtol=1e-4
                )


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_open_gates_equal_the_models_states(architecture) -> None:
    with wrap_model(tiny(architecture)) as held:
        gates = {layer.index: torch.ones(layer.kv_heads) for layer in held.spec.managed}
        plain = differentiable_states(held, IDS, CausalAttention(lambda shown: None))
        gated = differentiable_states(held, IDS, MixedAttention(gates, 2, 5))
        closed = {index: torch.zeros_like(gate) for index, gate in gates.items()}
        shut = differentiable_states(held, IDS, MixedAttention(closed, 2, 5))
    torch.testing.assert_close(gated, plain, atol=1e-4, rtol=1e-4)
    assert float((shut - plain).detach().abs().max()) > 1e-3


def test_learning_rate_warms_up_and_decays_for_a_fifth() -> None:
    shares = [rate_share(10, step) for step in range(10)]
    assert shares == [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5]
    assert rate_share(100, 0) == 0.1 and rate_share(100, 99) == 0.1


def test_answer_is_correct_with_all_its_tokens() -> None:
    found = answers_right([3, 4, 5, 9, 10, 20], [True, False, True, True, True, False])
    assert found == [False, True, False]


@pytest.mark.extended
def test_training_keeps_only_needed_heads_open(decoder) -> None:
    for index, module in decoder.attentions.items():
        out = module.o_proj.weight.data
        out[:, : 64 if index else 32] = 0  # of all heads, only the second kv head of layer 0 writes
    passage = Passage("text", "texts", CorpusSplit.TRAIN, 0, IDS, tuple(range(20, 29)))
    steps: list[int] = []
    layers = SMALL.fit(decoder, [passage], 0, lambda done, total: steps.append(done))
    gates = torch.cat([own["gates"] for own in layers])
    assert gates.argmax() == 1 and gates[1] > 0.1
    assert gates[[0, 2, 3]].tolist() == [0, 0, 0] and steps == [*range(1, 31)]


@pytest.mark.extended
def test_passages_hide_passkeys_in_texts_of_the_corpus(seed_model) -> None:
    adapter, limits = TokenizerAdapter(seed_model.tokenizer), PassageLimits(150, 60, 60)
    plain = read_corpus(None).passages(adapter, limits.passage_tokens, limits.seed)
    passages = SMALL.passages(read_corpus(None), adapter, limits)
    first, given = (
        passages[CorpusSplit.TRAIN][0],
        next(p for p in plain if p.split is CorpusSplit.TRAIN),
    )
    assert first.document == given.document and len(first.ids) > len(given.ids)
    assert len(answers_right(first.predicting, [True] * len(first.predicting))) == 2
    answer = adapter.decode(first.ids)
    assert answer.count("the secret words of") == 4 and answer.count("What are") >= 2
    others = passages[CorpusSplit.TRAIN][1]
    assert adapter.decode(others.ids)[-30:] != answer[-30:]  # other words are hidden


def test_hidden_needles_keep_the_tokens_of_the_text() -> None:
    found = NeedleSettings(40, 2, 1).hidden_in(IDS, SAMPLE, 7)
    hidden = {index for each in found.needles for index in range(*each.needle)}
    left = [token for index, token in enumerate(found.ids[: found.context]) if index not in hidden]
    assert tuple(left) == IDS
    assert found != NeedleSettings(40, 2, 1).hidden_in(IDS, SAMPLE, 8)


def test_metrics_count_passkeys_with_half_of_the_heads(decoder) -> None:
    passage = Passage("text", "texts", CorpusSplit.TEST, 0, IDS, (20, 21, 25))
    layers = [{"gates": torch.tensor([0.9, 0.2])}, {"gates": torch.tensor([0.1, 0.4])}]
    with torch.no_grad():
        states = differentiable_states(decoder, IDS, MixedAttention({}))
        answer = decoder.module.get_output_embeddings()(states).argmax(-1)
    answered = list(IDS)
    answered[21], answered[22] = int(answer[20]), int(answer[21])
    found = SMALL.test(decoder, layers, [passage])
    assert found["mean_gate"] == pytest.approx(0.4) and 0 <= found["recall_half"] <= 1
    assert found["recall"] == 0
    cut = Passage("text", "texts", CorpusSplit.TEST, 0, (*IDS[:21], answered[21]), (20,))
    assert SMALL.test(decoder, layers, [cut])["recall"] == 1


def gates_of(decoder: Decoder, first: float) -> LearnedWeights:
    card = Card("duo_attention", (decoder.spec.fingerprint,))
    own = [torch.tensor([first, 0.5]), torch.tensor([0.0, 1.0])]
    return LearnedWeights(card, tuple({"gates": each} for each in own))


def test_policies_use_the_latest_trained_gates(decoder, larder_home) -> None:
    names = frozenset({"duo_attention"})
    with pytest.raises(ModelError, match="`larder train duo_attention`"):
        calibrate(decoder, encode, names)
    path = learned_file(decoder.spec.fingerprint, "duo_attention")
    for first in (0.25, 0.75):
        gates_of(decoder, first).save(path)
        assert calibrate(decoder, encode, names) == {"duo_attention": (first, 0.5, 0.0, 1.0)}
    assert not path.with_suffix(".json").exists()


def test_shape_of_gates_is_one_number_per_kv_head(decoder) -> None:
    layer = decoder.spec.layers[0]
    assert SMALL.shapes(layer, 64, {}) == TrainedGates().shapes(layer, 64, {}) == {"gates": (2,)}


@pytest.mark.parametrize("wrong", [{"recent": 0}, {"sinks": -1}, {"rate": 0.0}, {"penalty": -1.0}])
def test_settings_of_gates_out_of_range_are_refused(wrong) -> None:
    with pytest.raises(BadParameter, match="duo_attention needs"):
        DuoAttentionGates(**wrong)
