"""Models with recurrent layers through a decoder: states of sequences, and layers with gaps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Mamba2Config, Mamba2ForCausalLM, cache_utils

from architectures.families import Status
from architectures.families_hybrid import FAMILIES
from larder.cache import SequenceCache, TieredLayer
from larder.core import CacheError, FetchMode, Mode, ModelError, OffloadSpec, Plan, RecomputeSpec
from larder.models import BatchSegment, ContextChunk, Decoder, blend, recurrent, wrap_model
from larder.recall import Flat
from model_runs import read_on, some_ids

TOLERANCE = 1e-4
IDS = some_ids(40)
HYBRIDS = {family.name: family for family in FAMILIES if family.status is Status.SUPPORTED}
# A state of convolutions alone, and one of both kinds beside attention in the same layer.
SHAPES = ["LFM2", "Falcon-H1"]


@cache
def decoder_of(name: str) -> Decoder:
    decoder = wrap_model(HYBRIDS[name].model())
    decoder.share()
    return decoder


@torch.no_grad()
def own_steps(module: Any, prompt: tuple[int, ...], steps: int) -> tuple[Tensor, list[int]]:
    """Logits of a prompt's last token and of greedy steps, and the tokens, by transformers."""
    cached, ids, start = DynamicCache(config=module.config), list(prompt), 0
    rows, answer_ids = list[Tensor](), list[int]()
    for _ in range(steps):
        places = torch.arange(start, start + len(ids))[None]
        out = module(torch.tensor([ids]), position_ids=places, past_key_values=cached)
        rows.append(out.logits[0, -1].float())
        start, ids = start + len(ids), [int(rows[-1].argmax())]
        answer_ids += ids
    return torch.stack(rows), answer_ids


@pytest.mark.parametrize("name", HYBRIDS)
def test_blocks_and_greedy_steps_equal_transformers(name: str) -> None:
    decoder = decoder_of(name)
    expected, answer_ids = own_steps(decoder.module, IDS, 16)
    cached = SequenceCache(decoder.spec, "ragged")
    got = [read_on(decoder, cached, IDS, 13)[-1]]
    got += [read_on(decoder, cached, (token,), 1)[0] for token in answer_ids[:-1]]
    assert (torch.stack(got) - expected).abs().max() < TOLERANCE
    assert cached.recurrent.nbytes == decoder.spec.recurrent_bytes > 0


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_layers_are_those_with_attention(name: str) -> None:
    decoder = decoder_of(name)
    spec, own = decoder.spec, DynamicCache(config=decoder.module.config)
    decoder.module(torch.tensor([IDS]), past_key_values=own)
    cached = SequenceCache(spec, "ragged")
    read_on(decoder, cached, IDS, 13)
    cached.compact()
    numbers = [n for n, layer in enumerate(own.layers) if vars(layer).get("keys") is not None]
    assert [spec.number_of(layer.index) for layer in spec.layers] == numbers
    assert [layer.index for layer in spec.layers] == list(range(len(numbers)))
    for index, number in enumerate(numbers):
        keys = cached.entries(index).keys.unflatten(0, (spec.layers[index].kv_heads, -1))
        layer: Any = own.layers[number]
        assert torch.allclose(keys, layer.keys[0], atol=1e-4)
        assert "Attention" in type(decoder.attentions[index]).__name__
        assert decoder.attentions[index].layer_idx == number
    has_one_position = not name.startswith("Qwen3.5")  # of three per token, as for images
    assert all((layer.radians is not None) == has_one_position for layer in spec.layers)


@pytest.mark.parametrize("name", SHAPES)
def test_packed_sequences_are_independent(name: str) -> None:
    decoder = decoder_of(name)
    alone = [SequenceCache(decoder.spec, "ragged") for _ in range(2)]
    expected = [read_on(decoder, alone[0], IDS[:9], 9), read_on(decoder, alone[1], IDS[9:], 31)]
    rows = [SequenceCache(decoder.spec, "ragged") for _ in range(2)]
    segments = [BatchSegment(rows[0], IDS[:9]), BatchSegment(rows[1], IDS[9:])]
    got = decoder.forward_logits(segments, Mode.APPEND, [8, 39])
    assert torch.allclose(got, torch.stack([own[-1] for own in expected]), atol=1e-4)
    before = rows[0].state()
    parts = (4, 3)
    scratch = BatchSegment(rows[0], IDS[:4] + IDS[20:23], sections=parts)
    got = decoder.forward_logits([scratch], Mode.SCRATCH, [3, 6])
    assert all(torch.equal(before[key], own) for key, own in rows[0].state().items())
    expected = [read_on(decoder, rows[0].fork(), ids, 9)[-1] for ids in (IDS[:4], IDS[20:23])]
    assert torch.allclose(got, torch.stack(expected), atol=1e-4)


def moved(cached: SequenceCache) -> SequenceCache:
    place, meta = torch.device("cpu"), cached.meta()
    return SequenceCache.adopt(cached.spec, cached.fork().release_state(place), meta)


def restored(cached: SequenceCache) -> SequenceCache:
    return SequenceCache.restore(cached.spec, cached.state(), cached.meta())


@pytest.mark.parametrize("copy", [SequenceCache.fork, restored, moved])
@pytest.mark.parametrize("name", SHAPES)
def test_copy_continues_identically(
    name: str, copy: Callable[[SequenceCache], SequenceCache]
) -> None:
    decoder = decoder_of(name)
    cached = SequenceCache(decoder.spec, "ragged")
    read_on(decoder, cached, IDS[:20], 20)
    other = copy(cached)
    assert other.nbytes == copy(cached).nbytes >= decoder.spec.recurrent_bytes
    expected = read_on(decoder, cached, IDS[20:], 7)
    assert torch.equal(read_on(decoder, other, IDS[20:], 7), expected)


@pytest.mark.parametrize("name", SHAPES)
def test_failed_call_changes_nothing(name: str) -> None:
    decoder = decoder_of(name)
    cached, calm = (SequenceCache(decoder.spec, "ragged") for _ in range(2))
    for own in (cached, calm):
        read_on(decoder, own, IDS[:20], 20)
    last = decoder.body.layers[-1]
    handle = last.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read_on(decoder, cached, IDS[20:30], 10)
    handle.remove()
    assert cached.recurrent is not calm.recurrent
    assert torch.equal(read_on(decoder, cached, IDS[20:], 7), read_on(decoder, calm, IDS[20:], 7))


def test_rollback_to_a_checkpoint_restores_the_recurrent_state() -> None:
    decoder = decoder_of("LFM2")
    cached = SequenceCache(decoder.spec, "ragged")
    read_on(decoder, cached, IDS[:20], 20)
    start = cached.checkpoint()
    expected = read_on(decoder, cached, IDS[20:], 7)
    with pytest.raises(CacheError, match=r"from 40 tokens to 20, .* roll_back\(\)"):
        cached.truncate(20)
    cached.roll_back(start)
    assert cached.next_position == 20
    assert torch.equal(read_on(decoder, cached, IDS[20:], 7), expected)


def test_parts_that_recompute_earlier_tokens_are_refused() -> None:
    decoder = decoder_of("LFM2")
    with pytest.raises(CacheError, match=r"recompute\(\) reads earlier tokens again"):
        SequenceCache(decoder.spec, "rebuilt", rebuilding=RecomputeSpec())
    recall = Flat(tokens=16, page=4, dense=0, corrected=2)
    with pytest.raises(CacheError, match="corrected= reads earlier tokens again"):
        SequenceCache(decoder.spec, "tiered", parking=OffloadSpec(recall))
    cached = SequenceCache(decoder.spec, "dense")
    read_on(decoder, cached, IDS[:20], 20)
    before = cached.state()
    with pytest.raises(CacheError, match="cannot be read 5 tokens before the end"):
        decoder.read([BatchSegment(cached, IDS[:5], shift=-5)], Mode.SCRATCH)
    assert all(torch.equal(before[key], own) for key, own in cached.state().items())
    with pytest.raises(ModelError, match="recurrent layers"):
        blend(decoder, [ContextChunk(IDS[:20])])


def test_pages_are_fetched_ahead_for_the_next_layer_with_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that is offloaded is recalled, so that logits are those of a full cache."""
    decoder = decoder_of("LFM2")
    parking = OffloadSpec(Flat(tokens=40, page=4, dense=0, fetch=FetchMode.AHEAD))
    cached = SequenceCache(decoder.spec, "tiered", parking=parking)
    full = SequenceCache(decoder.spec, "ragged")
    for own in (cached, full):
        read_on(decoder, own, IDS, 40)
    kept = torch.cat([torch.arange(36, 40), torch.arange(76, 80)])
    for layer in decoder.spec.layers:
        cached.apply(layer.index, Plan(kept, (4, 4)))
    fetched, fetch = list[int](), TieredLayer.fetch

    def note(tier: TieredLayer, queries: Tensor) -> None:
        fetched.append(tier.layer.index)
        fetch(tier, queries)

    monkeypatch.setattr(TieredLayer, "fetch", note)
    got, expected = (read_on(decoder, own, IDS[:3], 1) for own in (cached, full))
    assert torch.allclose(got, expected, atol=1e-4)
    assert fetched == [1] * 3


def test_state_of_another_model_is_not_restored() -> None:
    spec = decoder_of("LFM2").spec
    cached = SequenceCache(spec, "ragged")
    read_on(decoder_of("LFM2"), cached, IDS[:20], 20)
    state, meta = cached.state(), cached.meta()
    name = "recurrent.0.conv.0"
    with pytest.raises(CacheError, match="has 1 tensors of recurrent layers, but the model has 2"):
        SequenceCache.restore(spec, {key: state[key] for key in state if key != name}, meta)
    with pytest.raises(CacheError, match=r"recurrent.0.conv.0 of the saved cache is \(64, 2\)"):
        SequenceCache.restore(spec, {**state, name: state[name][:, 1:]}, meta)


def test_model_that_cannot_continue_its_state_is_refused() -> None:
    [jamba] = [family for family in FAMILIES if family.name == "Jamba"]
    assert jamba.status is Status.REFUSED
    module = jamba.model()
    before = module.config._attn_implementation
    with pytest.raises(ModelError, match="do not continue from a state over several tokens"):
        wrap_model(module)
    assert module.config._attn_implementation == before


def test_model_without_attention_is_refused() -> None:
    sizes: dict[str, Any] = {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1}
    config = Mamba2Config(vocab_size=128, hidden_size=64, num_hidden_layers=2, **sizes)
    with pytest.raises(ModelError, match="has 2 layers and none with attention"):
        wrap_model(Mamba2ForCausalLM(config))


def test_restored_bfloat16_states_continue_identically() -> None:
    decoder = wrap_model(HYBRIDS["Falcon-H1"].model(torch.bfloat16))
    dtypes = {tensor.name.partition(".")[0]: tensor.dtype for tensor in decoder.spec.recurrent}
    assert dtypes["conv"] is torch.bfloat16
    cached = SequenceCache(decoder.spec, "ragged")
    read_on(decoder, cached, IDS[:20], 7)
    other = restored(cached)
    assert torch.equal(
        read_on(decoder, other, IDS[20:30], 3), read_on(decoder, cached, IDS[20:30], 3)
    )


@pytest.mark.parametrize("kind", ["linear_attention", "mamba"])
def test_transformers_without_recurrent_caches_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.delattr(cache_utils, "LinearAttentionCacheLayerMixin")
    config = SimpleNamespace(layer_types=[kind, "attention"])
    config.get_text_config = lambda: config
    with pytest.raises(ModelError, match="install transformers 5.23 or later"):
        recurrent.recurrent_layers(config)
