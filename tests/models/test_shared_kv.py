"""Layers that attend to the entries of an earlier layer hold nothing, and see what it holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures.families_latent import FAMILIES
from builders import tiers_of
from larder.cache import SequenceCache
from larder.core import CacheError, ModelSpec, Plan
from larder.interop import LarderCache
from larder.models import Decoder, wrap_model
from model_runs import native_logits, read_on, some_ids

TOLERANCE = 1e-4  # float32, on logits whose spread is 0.5 or more
SOURCES = [None, None, None, 1, 2, 1]  # of the tiny Gemma 3n: layers 1 and 2 are read by others
SHARING_FORMS = ("dense", "ragged", "compact", "paired")
IDS = some_ids(40)


@pytest.fixture(scope="module")
def model() -> Any:
    (family,) = (family for family in FAMILIES if family.name == "Gemma 3n")
    return family.model()


@pytest.fixture(scope="module")
def decoder(model: Any) -> Decoder:
    """Decoder that leaves the model its own attention between calls."""
    own = wrap_model(model)
    own.share()
    return own


def separate(spec: ModelSpec) -> ModelSpec:
    """Spec in which every layer holds entries of its own."""
    return replace(spec, layers=tuple(replace(layer, kv_source=None) for layer in spec.layers))


def recorded_logits(cache: SequenceCache, layer: int, head: int) -> Tensor:
    logits = cache.layers[layer].take_logits()
    assert logits is not None
    return logits[:, cache.entries(layer).rows(head)]


def kept_rows(cache: SequenceCache, layer: int) -> Plan:
    """Plan that keeps other entries in every head of a layer."""
    lengths = cache.lengths()[layer]
    stays = torch.arange(sum(lengths)) % 3 != 0
    stays[: lengths[0] // 2] = True
    return Plan.from_mask(stays, lengths)


def test_kv_sources_are_detected(decoder: Decoder) -> None:
    assert [layer.kv_source for layer in decoder.spec.layers] == SOURCES
    assert [layer.index for layer in decoder.spec.managed] == [1]
    assert [layer.index for layer in decoder.spec.windows] == [0, 2]


@pytest.mark.parametrize("form", SHARING_FORMS)
def test_blocks_and_steps_equal_the_model(model: Any, decoder: Decoder, form: str) -> None:
    held = SequenceCache(decoder.spec, form, **tiers_of(form))
    got = torch.cat([read_on(decoder, held, IDS[:30], 9), read_on(decoder, held, IDS[30:], 1)])
    assert (got - native_logits(model, IDS)).abs().max() < TOLERANCE
    assert held.lengths()[3:] == ((0, 0),) * 3


def test_plan_applies_to_all_sharing_layers(decoder: Decoder) -> None:
    shared = SequenceCache(decoder.spec, "ragged")
    apart = SequenceCache(separate(decoder.spec), "ragged")
    for each in (shared, apart):
        read_on(decoder, each, IDS[:30], 30)
        for layer in (1,) if each is shared else (1, 3, 5):
            each.apply(layer, kept_rows(each, layer))
    pairs = [read_on(decoder, each, IDS[30:36], 3) for each in (shared, apart)]
    assert torch.equal(*pairs)
    for each in (shared, apart):
        each.record_logits([1])
    assert torch.equal(*(read_on(decoder, each, IDS[36:37], 1) for each in (shared, apart)))
    assert torch.equal(*(recorded_logits(each, 1, head=1) for each in (shared, apart)))


@torch.no_grad()
def test_sharing_layers_see_the_prompt_before_eviction(model: Any) -> None:
    policy = "whole() > protect(sinks=2, recent=4) > snapkv(window=4) > uniform()"
    held = LarderCache(model, policy, 12)
    got = model(torch.tensor([IDS]), past_key_values=held).logits[0]
    assert held.lengths()[0][1] == (12, 12)
    assert (got - native_logits(model, IDS)).abs().max() < TOLERANCE


def test_failed_block_is_rolled_back(model: Any, decoder: Decoder) -> None:
    held = SequenceCache(decoder.spec, "dense")
    first = read_on(decoder, held, IDS[:20], 20)
    error = RuntimeError("between source and reader")

    def fail(*args: object) -> None:
        raise error

    hook = model.model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="between"):
        read_on(decoder, held, IDS[20:30], 10)
    hook.remove()
    assert all(store.pending is None for store in held.layers)
    got = torch.cat([first, read_on(decoder, held, IDS[20:], 20)])
    assert (got - native_logits(model, IDS)).abs().max() < TOLERANCE


def test_saved_and_forked_caches_continue(decoder: Decoder) -> None:
    held = SequenceCache(decoder.spec, "ragged")
    read_on(decoder, held, IDS[:30], 30)
    held.apply(1, kept_rows(held, 1))
    restored = SequenceCache.restore(decoder.spec, held.state(), held.meta())
    forked = held.fork()
    moved, meta = forked.release_state(torch.device("cpu")), forked.meta()
    adopted = SequenceCache.adopt(decoder.spec, moved, meta)
    got = [read_on(decoder, each, IDS[30:], 5) for each in (held, restored, adopted)]
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


def test_empty_copy_has_the_dtype_of_its_source(decoder: Decoder) -> None:
    spec = replace(decoder.spec, dtype=torch.bfloat16)
    for cache in (held := SequenceCache(spec, "ragged"), held.fork()):
        entries = cache.entries(3)
        assert entries.keys.dtype is entries.values.dtype is torch.bfloat16
        assert not sum(entries.lengths) and not entries.keys.numel()


def test_unsupported_sharing_is_refused(decoder: Decoder) -> None:
    with pytest.raises(CacheError, match="cannot share"):
        SequenceCache(decoder.spec, "tiered", **tiers_of("tiered"))
    held = SequenceCache(decoder.spec, "ragged")
    with pytest.raises(CacheError, match="shares the entries of layer 1"):
        held.apply(3, Plan.from_mask(torch.zeros(0, dtype=torch.bool), (0, 0)))
