"""Attention over the latents of MLA is the model's own attention, and latents are held once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures.families_latent import FAMILIES
from builders import tiers_of
from interop.fake_presses import QueryPress
from larder.cache import SequenceCache
from larder.core import (
    CacheError,
    Codec,
    Folds,
    Ledger,
    Mode,
    ModelError,
    Plan,
    ScoreError,
    StepRule,
    StepScore,
    StepScoring,
    UsageError,
)
from larder.interop import LarderCache
from larder.models import (
    AttentionInputs,
    BatchSegment,
    CausalAttention,
    Decoder,
    LayerActivations,
    wrap_model,
)
from larder.policy import ActivationProvider, select_providers
from larder.store import join_chunks, slice_chunk, slice_rest
from model_runs import native_logits, read_on, some_ids

TOLERANCE = 1e-4  # float32, on logits whose spread is 0.5 or more
RANK, WIDTH = 24, 32  # of the registry: numbers of a latent, and of an entry
IDS = some_ids(40)


@pytest.fixture(scope="module")
def model() -> Any:
    (family,) = (family for family in FAMILIES if family.name == "DeepSeek-V3")
    return family.model()


@pytest.fixture(scope="module")
def decoder(model: Any) -> Decoder:
    """Decoder that leaves the model its own attention between calls."""
    own = wrap_model(model)
    own.share()
    return own


def read(decoder: Decoder, form: str = "ragged", count: int = 30) -> SequenceCache:
    held = SequenceCache(decoder.spec, form)
    read_on(decoder, held, IDS[:count], 9)
    return held


def some_rows(count: int) -> Plan:
    return Plan.from_mask(torch.arange(count) % 3 != 0, (count,))


def test_latent_layer_spec(decoder: Decoder) -> None:
    for layer in decoder.spec.layers:
        assert (layer.query_heads, layer.kv_heads, layer.head_dim) == (4, 1, WIDTH)
        assert (layer.latent_rank, layer.radians) == (RANK, None)
        assert layer.bytes_per_token(torch.float32) == WIDTH * 4


@pytest.mark.parametrize("form", ["dense", "ragged"])
def test_blocks_and_steps_equal_the_model(model: Any, decoder: Decoder, form: str) -> None:
    held = SequenceCache(decoder.spec, form)
    got = torch.cat([read_on(decoder, held, IDS[:30], 9), read_on(decoder, held, IDS[30:], 1)])
    assert (got - native_logits(model, IDS)).abs().max() < TOLERANCE
    held.compact()
    lengths = 2 * 8 if form == "ragged" else 0  # int64 start and length of the one head
    assert held.nbytes == len(decoder.spec.layers) * (len(IDS) * (WIDTH * 4 + 4) + lengths)


@torch.no_grad()
def test_absorbed_attention_weights_equal_the_model(model: Any, decoder: Decoder) -> None:
    weights = list[Tensor]()

    def record(inputs: AttentionInputs) -> None:
        logits = inputs.queries @ inputs.keys[0].T * inputs.scaling
        later = torch.ones(logits.shape[1:]).triu(1).bool()
        weights.append(logits.masked_fill(later, -torch.inf).softmax(-1))

    decoder.forward_uncached(IDS, CausalAttention(record))
    model.set_attn_implementation("eager")
    own = model(torch.tensor([IDS]), use_cache=False, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    for got, expected in zip(weights, own, strict=True):
        assert torch.allclose(got, expected[0], atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("form", ["dense", "ragged"])
@pytest.mark.parametrize("change", ["apply", "evict"])
def test_logits_after_latent_eviction_equal_the_model(
    model: Any, decoder: Decoder, form: str, change: str
) -> None:
    held, plan = read(decoder, form), some_rows(30)
    for layer in decoder.spec.layers:
        getattr(held, change)(layer.index, plan)
    past = model(torch.tensor([IDS[:30]])).past_key_values
    for layer in past.layers:
        layer.keys, layer.values = layer.keys[:, :, plan.kept], layer.values[:, :, plan.kept]
    for at in range(30, 34):
        got = read_on(decoder, held, IDS[at : at + 1], 1)
        positions, one = torch.tensor([[at]]), torch.tensor([[IDS[at]]])
        expected = model(one, past_key_values=past, position_ids=positions).logits[0]
        assert (got - expected).abs().max() < TOLERANCE


def test_latents_are_evicted_by_plans_only(decoder: Decoder) -> None:
    """Keys and values are one storage, whose rows a kernel would move twice."""
    held = SequenceCache(decoder.spec, "ragged", Ledger(("mass",)))
    read_on(decoder, held, IDS[:8], 8)
    held.record_logits([0])
    read_on(decoder, held, IDS[8:9], 1)
    assert held.layers[0].eviction_storage(StepRule(StepScoring(StepScore.MASS), None, {})) is None
    assert held.layers[0].take_logits() is not None


def test_saved_and_forked_caches_continue(decoder: Decoder) -> None:
    for form in ("dense", "ragged"):
        held = read(decoder, form)
        held.apply(1, some_rows(30))
        assert not any(name.endswith("values") for name in held.state())
        restored = SequenceCache.restore(decoder.spec, held.state(), held.meta())
        forked = held.fork()
        meta, moved = forked.meta(), forked.release_state(torch.device("cpu"))
        adopted = SequenceCache.adopt(decoder.spec, moved, meta)
        got = [read_on(decoder, each, IDS[30:], 5) for each in (held, restored, adopted)]
        assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


def test_joined_prefix_chunks_equal_the_whole(decoder: Decoder) -> None:
    held = read(decoder, "dense")
    held.compact()
    state = held.state()
    chunks = [slice_chunk(state, start, start + 8) for start in (0, 8, 16)]
    joined = join_chunks(chunks, slice_rest(state, 24), decoder.spec, 30)
    assert joined.keys() == state.keys()
    assert all(torch.equal(joined[name], state[name]) for name in state)


def test_merges_require_equal_key_and_value_weights(decoder: Decoder) -> None:
    held, weights = read(decoder), torch.tensor([0.25, 0.75])
    before = held.entries(0).keys[:2].clone()
    folds = Folds(torch.tensor([0, 1]), torch.tensor([1, 1]), weights, weights)
    kept = torch.arange(1, 30)
    held.apply(0, Plan(kept, (29,), folds=folds))
    merged = (before * weights[:, None]).sum(0)
    assert torch.allclose(held.entries(0).keys[0], merged, atol=1e-6)
    assert torch.equal(held.entries(0).values[0], held.entries(0).keys[0, :RANK])
    apart = Folds(torch.tensor([0, 1]), torch.tensor([1, 1]), weights, weights.flip(0))
    with pytest.raises(CacheError, match=r"different weights.*variant='paper'"):
        held.apply(1, Plan(kept, (29,), folds=apart))


class AdaptedLinear(nn.Linear):
    """Projection whose weight alone does not tell what it computes."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.5


def test_adapted_projections_equal_the_model() -> None:
    (family,) = (family for family in FAMILIES if family.name == "DeepSeek-V3")
    model = family.model()
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = AdaptedLinear
    expected = native_logits(model, IDS)
    with wrap_model(model) as decoder:
        got = read_on(decoder, SequenceCache(decoder.spec, "dense"), IDS, 9)
    assert (got - expected).abs().max() < TOLERANCE
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)


def test_unsupported_forms_are_refused(decoder: Decoder) -> None:
    for form in ("tiered", "compact", "paired", "rebuilt"):
        with pytest.raises(CacheError, match=r"latents \(MLA\).*drop\(\)"):
            SequenceCache(decoder.spec, form, **tiers_of(form))
    with pytest.raises(CacheError, match="a quantized cache cannot"):
        SequenceCache(decoder.spec, "ragged", codecs=(Codec(8, 8, 8),))


PREFILL = "whole() > protect(sinks=2, recent=4)"
D2O = f"{PREFILL} > column_mass() > uniform() > fold_ema()"
REFUSED = {
    D2O: UsageError,
    f"{PREFILL} > expected() > uniform()": ScoreError,
    f"{PREFILL} > leverage() > uniform()": ScoreError,
    f"{PREFILL} > snapkv(window=4) > criticality() > uniform()": ModelError,
    f"{PREFILL} > snapkv(window=4) > uniform() > cam()": UsageError,
}


@pytest.mark.parametrize("policy", REFUSED)
@torch.no_grad()
def test_unsupported_policies_are_refused(model: Any, policy: str) -> None:
    with pytest.raises(REFUSED[policy], match=r"take|choose"):
        model(torch.tensor([IDS]), past_key_values=LarderCache(model, policy, 12))


@torch.no_grad()
def test_latent_model_with_experts_is_evicted_by_novelty(model: Any) -> None:
    cache = LarderCache(model, f"{PREFILL} > novelty() > uniform()", 12)
    model(torch.tensor([IDS]), past_key_values=cache)
    assert cache.lengths()[0] == ((12,),) * 2


def test_activations_are_captured(decoder: Decoder) -> None:
    seen = dict[int, Tensor]()

    def observe(row: int, layer: int, recorded: LayerActivations) -> None:
        seen[layer] = recorded.inputs["states"]

    segment = BatchSegment(SequenceCache(decoder.spec, "ragged"), IDS)
    decoder.read([segment], Mode.APPEND, observe, select_providers({"states"}, ActivationProvider))
    assert [seen[layer].shape for layer in sorted(seen)] == [(40, 64)] * 2


def test_presses_are_refused(model: Any) -> None:
    with pytest.raises(UsageError, match=r"latents \(MLA\).*policy="):
        LarderCache(model, kvpress=QueryPress(0.5))


@torch.no_grad()
def test_equal_key_and_value_merges_are_supported(model: Any) -> None:
    cache = LarderCache(model, D2O.replace("fold_ema()", "fold_ema(variant='paper')"), 12)
    model(torch.tensor([IDS]), past_key_values=cache)
    assert sum(length for layer in cache.lengths()[0] for length in layer) == 24
