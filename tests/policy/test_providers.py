"""Providers: each as its slow loop says, row by row, and without memory that nobody counts."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from builders import HIDDEN, ToyAttention, a_layer
from larder import Policy
from larder.core import ModelError, UnknownName
from larder.policy import (
    PROVIDERS,
    ActivationProvider,
    DraftProvider,
    GateProvider,
    GradientProvider,
    ImageProvider,
    Kind,
    TokenProvider,
    VocabularyProvider,
    WeightProvider,
    column_providers,
    select_providers,
)
from learned_gates import random_tensors

VOCAB, TOKENS = 11, 7


def of_kind(kind: type[Kind]) -> list[Any]:
    return list(select_providers(PROVIDERS.names(), kind).items())


def loop(name: str) -> ModuleType:
    return import_module(f"references.{name}")


def logits(seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def attention() -> ToyAttention:
    torch.manual_seed(1)
    return ToyAttention(a_layer())


@pytest.mark.parametrize(("name", "provider"), of_kind(TokenProvider))
def test_token_columns_equal_their_reference(name, provider) -> None:
    rows, ids = logits(), torch.arange(TOKENS) % VOCAB
    got = provider.measure(rows, ids)
    assert provider.has_column and got.dtype == torch.float32
    assert got.tolist() == pytest.approx(loop(name).numbers(rows.tolist(), ids.tolist()), abs=1e-4)
    parts = [provider.measure(rows[a:b], ids[a:b]) for a, b in ((0, 3), (3, TOKENS))]
    torch.testing.assert_close(torch.cat(parts), got)


@pytest.mark.parametrize(("name", "provider"), of_kind(ImageProvider))
def test_image_columns_equal_their_reference(name, provider) -> None:
    is_image = torch.tensor([False, True, True, False])
    got = provider.measure(is_image)
    assert provider.has_column and got.dtype == torch.float32
    assert got.tolist() == loop(name).marks(is_image.tolist())


@pytest.mark.parametrize(("name", "provider"), of_kind(ActivationProvider))
def test_captured_activations_equal_their_reference(name, provider, attention) -> None:
    states = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        got = provider.capture(attention, states)
        first = provider.capture(attention, states[:3])
    expected = torch.tensor(loop(name).captured(attention, states.tolist()))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(first, got[:3])
    assert len(got) == TOKENS and (got.dim() == 1 or not provider.has_column)


@pytest.mark.parametrize(("name", "provider"), of_kind(GateProvider))
@pytest.mark.parametrize("group", [1, 3])
def test_gates_equal_their_reference(name, provider, group) -> None:
    layer = a_layer(2, group)
    weights = random_tensors(provider, layer, HIDDEN)
    states = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))
    got = provider.gate(states, weights)
    numbers = {key: tensor.tolist() for key, tensor in weights.items()}
    assert provider.has_column and got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(loop(name).gated(numbers, states.tolist())))
    torch.testing.assert_close(
        provider.gate(states[:3].bfloat16(), weights), got[:3], atol=0.1, rtol=0.1
    )
    for key in weights:
        assert not torch.allclose(provider.gate(states, {**weights, key: -weights[key]}), got), key


@pytest.mark.parametrize(("name", "provider"), of_kind(WeightProvider))
def test_tensors_are_views_of_weights(name, provider, attention) -> None:
    layer = a_layer()
    got = provider.layer_tensor(attention, layer)
    arguments = attention, layer.query_heads, layer.head_dim
    torch.testing.assert_close(got, torch.tensor(loop(name).tensor(*arguments)))
    owned = {weight.untyped_storage().data_ptr() for weight in attention.parameters()}
    assert got.untyped_storage().data_ptr() in owned
    with pytest.raises(ModelError):
        provider.layer_tensor(torch.nn.Identity(), layer)


@pytest.mark.parametrize(("name", "provider"), of_kind(GradientProvider))
def test_gradients_equal_their_reference(name, provider) -> None:
    states = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))
    assert float(provider.objective(states)) == pytest.approx(loop(name).objective(states.tolist()))
    got = provider.numbers(states.bfloat16())
    assert got.dtype == torch.float32 and got.shape == (TOKENS,)
    expected = loop(name).numbers(states.bfloat16().tolist())
    assert got.tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("name", "provider"), of_kind(DraftProvider))
def test_drafted_tokens_equal_their_reference(name, provider) -> None:
    for seed in range(3):
        rows = logits(seed)
        assert provider.next_tokens(rows) == loop(name).tokens(rows.tolist())
        assert provider.next_tokens(rows[2:3]) == loop(name).tokens(rows[2:3].tolist())


TEXTS = [
    ". ",
    "word",
    "?",
    '!"',
    "a.b",
    ".,",
    "\n",
    " x\ny",
    "",
    ")",
    ".)",
    "。",
    "...",
    "' ",
    "<s>",
]


@pytest.mark.parametrize(("name", "provider"), of_kind(VocabularyProvider))
def test_vocabulary_sets_equal_their_reference(name, provider) -> None:
    texts = (*TEXTS, *getattr(loop(name), "TEXTS", ()))  # its reference may name some more
    cases = [(text, special) for text in texts for special in (False, True)]
    found = [provider.contains(*each) for each in cases]
    assert found == [loop(name).contains(*each) for each in cases]
    assert len(set(found)) == 2


def test_provider_is_found_by_its_file_and_an_unknown_one_is_refused() -> None:
    assert set(column_providers(("mass", "surprise"), TokenProvider)) == {"surprise"}
    assert not column_providers(("surprise",), ActivationProvider)
    with pytest.raises(UnknownName, match="No provider named 'surprises'"):
        select_providers(["surprises"], TokenProvider)


def test_decode_scorer_does_not_make_prefill_observe_the_whole_text() -> None:
    press = "kvpress(press='ExpectedAttentionPress()')"
    prefill = Policy.parse(f"whole() > {press} > uniform(tokens=64)").planner
    decode = f'whole() > snapkv() > uniform(tokens=64) > split(scorer="{press}")'
    assert prefill.observes_whole_text
    assert not Policy.parse(decode).planner.observes_whole_text
