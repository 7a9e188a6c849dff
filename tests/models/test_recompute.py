"""Keys and values rebuilt from what entered the layers are those that were cached."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from larder.cache import SequenceCache
from larder.core import ModelError
from larder.models import BaseModelLayers, BatchSegment, Decoder, KVRecompute, ResidualStream
from model_runs import cuts, read_on, some_ids
from tiny_models import tiny

READ, BLOCK = 45, 16
TOLERANCE = 1e-5


def read_and_kept(decoder: Decoder) -> tuple[KVRecompute, ResidualStream, SequenceCache]:
    """45 tokens read by blocks of 16, with what entered every layer."""
    recompute, layers = decoder.recompute, range(len(decoder.spec.layers))
    residuals, cache = ResidualStream(layers), SequenceCache(decoder.spec, "dense")
    for start, stop in cuts(READ, BLOCK):
        recompute.read(BatchSegment(cache, some_ids(READ)[start:stop]), residuals)
    return recompute, residuals, cache


def projected(recompute: KVRecompute, residuals: ResidualStream, positions: Tensor) -> dict:
    return recompute.project(
        {i: residuals.before(i)[positions] for i in residuals.layers}, positions
    )


def farthest(found: dict, positions: Tensor, cache: SequenceCache) -> float:
    """Largest difference to what a cache holds of some tokens; windows hold but the last."""
    state, errors = cache.state(), []
    for layer, entries in found.items():
        at = state[f"{layer}.positions"].long()
        held = torch.isin(positions, at)
        if not held.any():
            continue
        rows = (positions[held, None] == at).int().argmax(1)
        for name, own in zip(("keys", "values"), entries, strict=True):
            errors.append(float((own[:, held] - state[f"{layer}.{name}"][:, rows]).abs().max()))
    return max(errors)


def differences(one: SequenceCache, other: SequenceCache, first: int = 0) -> float:
    """Largest difference of what two caches hold from layer `first` on."""
    own, others = one.state(), other.state()
    names = [name for name in own if int(name.split(".")[0]) >= first]
    return max(float((own[n].double() - others[n].double()).abs().max()) for n in names)


def test_projected_entries_equal_cached_ones(architecture, kv_heads, adopted) -> None:
    recompute, residuals, cache = read_and_kept(adopted(architecture, kv_heads))
    for start, stop in cuts(READ, BLOCK):
        positions = torch.arange(start, stop)
        assert farthest(projected(recompute, residuals, positions), positions, cache) == 0


def test_any_tokens_are_projected_in_any_order(architecture, adopted) -> None:
    recompute, residuals, cache = read_and_kept(adopted(architecture))
    positions = torch.randperm(READ, generator=torch.Generator().manual_seed(0))[:19]
    positions[0] = READ - 1
    found = projected(recompute, residuals, positions)
    assert farthest(found, positions, cache) < TOLERANCE
    wrong = projected(recompute, residuals, positions.roll(1))
    assert farthest(wrong, positions, cache) > 0.1


def test_only_requested_layers_are_projected(three_layers) -> None:
    recompute, residuals, cache = read_and_kept(three_layers)
    positions = torch.arange(READ)
    found = recompute.project({1: residuals.before(1)}, positions)
    assert list(found) == [1]
    assert farthest(found, positions, cache) < TOLERANCE


def test_projection_of_one_layer_equals_its_formula(adopted) -> None:
    decoder = adopted("qwen3")
    recompute, residuals, _ = read_and_kept(decoder)
    layer, entering = decoder.module.model.layers[1], residuals.before(1)
    own, spec = layer.self_attn, decoder.spec.layers[1]

    def normed(rows: Tensor, weight: Tensor) -> Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    rows = normed(entering, layer.input_layernorm.weight)
    values = (rows @ own.v_proj.weight.T).view(READ, spec.kv_heads, -1)
    keys = normed((rows @ own.k_proj.weight.T).view(READ, spec.kv_heads, -1), own.k_norm.weight)
    angles = torch.arange(READ)[:, None] * torch.tensor(spec.radians)
    left, right = keys.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
    found = recompute.project({1: entering}, torch.arange(READ))[1]
    assert torch.allclose(found[0], turned.transpose(0, 1), atol=TOLERANCE)
    assert torch.allclose(found[1], values.transpose(0, 1), atol=TOLERANCE)


def test_bytes_are_those_of_the_residuals(three_layers) -> None:
    _, residuals, _ = read_and_kept(three_layers)
    assert residuals.nbytes == 3 * READ * 64 * 4
    assert residuals.before(2).shape == (READ, 64)


def test_no_hooks_stay_on_the_model(adopted) -> None:
    decoder = adopted("gemma3")
    before = read_on(decoder, SequenceCache(decoder.spec, "dense"), some_ids(20), 20)
    read_and_kept(decoder)
    layers = BaseModelLayers(decoder.module.base_model, len(decoder.spec.layers)).layers
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in layers)
    assert not any("forward" in layer.__dict__ for layer in layers)
    after = read_on(decoder, SequenceCache(decoder.spec, "dense"), some_ids(20), 20)
    assert torch.equal(before, after)


def test_failed_prefill_leaves_no_residuals(three_layers) -> None:
    recompute, residuals, cache = read_and_kept(three_layers)

    def fail(row: int, layer: int, recorded: object) -> None:
        if layer == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recompute.read(BatchSegment(cache, (5, 6)), residuals, fail)
    assert {len(residuals.before(layer)) for layer in residuals.layers} == {READ}
    assert not any(layer._forward_pre_hooks for layer in three_layers.module.model.layers)


class _NondeterministicProjection(nn.Module):
    """Projection whose outputs differ from call to call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(rows) * self.calls


def test_model_without_recompute_support_is_refused() -> None:
    module = tiny("llama")
    module.model.layers[1].self_attn.v_proj = _NondeterministicProjection(
        module.model.layers[1].self_attn.v_proj
    )
    with Decoder(module) as decoder, pytest.raises(ModelError, match="Layer 1 of Llama"):
        assert decoder.recompute


def test_ambiguous_layer_lists_are_refused() -> None:
    base = tiny("llama").base_model
    base.others = nn.ModuleList([nn.Identity(), nn.Identity()])
    with pytest.raises(ModelError, match="has 2 lists of 2 modules"):
        BaseModelLayers(base, 2)
