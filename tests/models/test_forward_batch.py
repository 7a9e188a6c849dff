"""Forward passes over caches: their effects by mode, and the rollback of a failed pass."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import a_plan
from covering import covering
from larder.cache import PageArena, RecurrentState, SequenceCache
from larder.core import (
    AppendKind,
    CacheError,
    Codec,
    InputError,
    LayerPairing,
    Mode,
    ModelError,
    OffloadSpec,
    Plan,
    RecomputeSource,
    RecomputeSpec,
)
from larder.models import BatchSegment, Decoder, ForwardBatch, LayerActivations
from larder.ops import AttentionBackend, attention, paged_attention, quantized_attention
from larder.recall import Flat, SparQ, Wave
from model_runs import read_on, some_ids
from tiny_models import tiny

CPU = torch.device("cpu")


def recordings(decoder, cache, ids, mode) -> dict[int, LayerActivations]:
    seen: dict[int, LayerActivations] = {}

    def watch(row: int, layer: int, recorded: LayerActivations) -> None:
        assert row == 0
        seen[layer] = recorded

    decoder.read([BatchSegment(cache, ids)], mode, watch)
    return seen


def test_probe_does_not_change_the_cache(architecture, adopted) -> None:
    decoder = adopted(architecture)
    cache = SequenceCache(decoder.spec, "ragged")
    read_on(decoder, cache, some_ids(12), 5)
    before = cache.state()
    probed = recordings(decoder, cache, some_ids(4, seed=1), Mode.PROBE)
    assert all(torch.equal(t, before[name]) for name, t in cache.state().items())
    assert cache.next_position == 12
    appended = recordings(decoder, cache, some_ids(4, seed=1), Mode.APPEND)
    assert probed.keys() == appended.keys() == {0, 1}
    assert probed[1].positions.tolist() == [12, 13, 14, 15]
    for name in ("queries", "keys", "values"):  # the first layer does not depend on attention
        assert torch.equal(vars(probed[0])[name], vars(appended[0])[name])
    assert torch.equal(cache.entries(1).head_keys(0)[-4:], appended[1].keys[0])


HAND_OVERS = 6
OWN_ATTENTION = "attention_backend.attend"
RECALLED = Flat(tokens=4, page=2, dense=0)
FORMS_OF_A_LAYER: dict[str, dict[str, Any]] = {
    "dense": {"form": "dense"},
    "window": {"form": "ragged"},
    "ragged": {"form": "ragged"},
    "graded": {"form": "ragged", "codecs": (Codec(4, 4, 4),)},
    "paired": {"form": "paired", "pairing": LayerPairing(start=0.0)},
    "compact": {"form": "compact"},
    "tiered": {"form": "tiered", "parking": OffloadSpec(RECALLED, None)},
    "all recalled": {"form": "tiered", "parking": OffloadSpec(replace(RECALLED, tokens=64), None)},
    "quantized slow tier": {
        "form": "tiered",
        "parking": OffloadSpec(RECALLED, None, Codec(4, 4, 4)),
    },
    "union": {"form": "tiered", "parking": OffloadSpec(replace(RECALLED, union=4), None)},
    "estimated": {
        "form": "tiered",
        "parking": OffloadSpec(Wave(tokens=16, page=2, size=2, update=4, dense=0), None),
    },
    "sampled": {"form": "tiered", "parking": OffloadSpec(SparQ(tokens=4, dense=0), None)},
    "corrected": {"form": "tiered", "parking": OffloadSpec(replace(RECALLED, corrected=2), None)},
    "rebuilt": {"form": "rebuilt", "rebuilding": RecomputeSpec()},
    "read again": {"form": "rebuilt", "rebuilding": RecomputeSpec(RecomputeSource.IDS)},
}


@pytest.mark.parametrize("name, kind, count", covering(FORMS_OF_A_LAYER, AppendKind, [1, 4]))
def test_call_depth_from_model_to_kernel_is_bounded(
    adopted, monkeypatch, name, kind, count
) -> None:
    """The walk of docs/structure.md, from the attention function to each kernel that it reaches."""
    decoder = adopted("gemma3" if name == "window" else "llama")
    cache = SequenceCache(decoder.spec, **FORMS_OF_A_LAYER[name])
    read_on(decoder, cache, some_ids(24), 24)
    for layer in decoder.spec.managed:
        cache.apply(layer.index, _rejection(cache, layer.index, name))
    walks = _watch_kernels(monkeypatch)
    for step in range(3):  # later steps correct or read again
        decoder.read(
            [BatchSegment(cache, some_ids(count, seed=step), append_kind=kind)], Mode.APPEND
        )
    decoder.read([BatchSegment(cache, some_ids(count))], Mode.SCRATCH)
    assert walks and len(max(walks, key=len)) <= HAND_OVERS, max(walks, key=len)


@pytest.mark.parametrize("count", [1, 4])
def test_call_depth_to_paged_attention_is_bounded(monkeypatch, count) -> None:
    decoder = Decoder(tiny("llama"))
    decoder.use_pages(PageArena(decoder.spec, 80, 8, AttentionBackend.CPU))
    try:
        caches = [SequenceCache(decoder.spec, "ragged") for _ in range(2)]
        for cache in caches:
            read_on(decoder, cache, some_ids(24), 24)
        walks = _watch_kernels(monkeypatch)
        decoder.read([BatchSegment(cache, some_ids(count)) for cache in caches], Mode.APPEND)
        assert sum("paged" in walk[-1] or "block_tables" in walk[-1] for walk in walks) >= 2
        assert len(max(walks, key=len)) <= HAND_OVERS, max(walks, key=len)
    finally:
        decoder.release()


def _rejection(cache: SequenceCache, layer: int, name: str) -> Plan:
    """A plan that puts entries of every head wherever the form puts them."""
    count = cache.lengths()[layer]
    if name in ("graded", "paired", "dense"):
        grades = torch.zeros(sum(count), dtype=torch.int8)
        grades[::2] = name != "dense"
        return Plan(torch.arange(sum(count)), count, grades=grades)
    return a_plan([range(length - 4, length) for length in count], count)


def _watch_kernels(monkeypatch) -> list[list[str]]:
    """Functions between the model and each kernel, for every call from now on."""
    walks: list[list[str]] = []
    kernels = {
        id(vars(attention)[f"{kind}_attention"]) for kind in ("causal", "ragged", "windowed")
    }
    kernels |= {id(quantized_attention.quantized_attention)}
    kernels.add(id(paged_attention.paged_attention))
    for module in [m for n, m in sys.modules.items() if n.startswith("larder.cache.")]:
        for own, kernel in list(vars(module).items()):
            if id(kernel) in kernels:
                monkeypatch.setattr(module, own, _watched(kernel, walks))
    return walks


def _watched(kernel: Callable[..., Any], walks: list[list[str]]) -> Callable[..., Any]:
    def watch(*args: object, **named: object) -> object:
        frames = [f for f in traceback.extract_stack() if "src/larder" in f.filename]
        names = [f"{Path(f.filename).stem}.{f.name}" for f in frames]
        is_stack = "decoder_stack._run" in names  # in the place of the model's layers
        first = names.index("decoder_stack._run") + 1 if is_stack else names.index(OWN_ATTENTION)
        walks.append(names[first:])
        return kernel(*args, **named)

    return watch


def test_scratch_does_not_change_the_cache(architecture, adopted) -> None:
    decoder = adopted(architecture)
    cache = SequenceCache(decoder.spec, "ragged")
    read_on(decoder, cache, some_ids(12), 5)
    before, size = cache.state(), cache.nbytes
    recordings(decoder, cache, some_ids(7, seed=1), Mode.SCRATCH)
    assert all(torch.equal(t, before[name]) for name, t in cache.state().items())
    assert (cache.nbytes, cache.next_position) == (size, 12)


@pytest.mark.parametrize(
    "form, block, failing", [("dense", 11, 1), ("ragged", 1, 0), ("ragged", 11, 1)]
)
def test_failed_forward_pass_is_rolled_back(
    architecture, adopted, monkeypatch, form, block, failing
) -> None:
    decoder, ids = adopted(architecture), some_ids(40)
    cache, twin = (SequenceCache(decoder.spec, form) for _ in range(2))
    for each in (cache, twin):
        read_on(decoder, each, ids[:20], 10)

    def fail(row: int, layer: int, recorded: LayerActivations) -> None:
        if layer == failing:
            raise MemoryError("no more")

    with pytest.raises(MemoryError):
        decoder.read([BatchSegment(cache, ids[20 : 20 + block])], Mode.APPEND, fail)
    assert cache.next_position == 20
    for layer in decoder.spec.managed:
        assert torch.equal(
            cache.entries(layer.index).packed_positions(),
            twin.entries(layer.index).packed_positions(),
        )
    got, expected = (read_on(decoder, each, ids[20:], 7) for each in (cache, twin))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_forward_pass_missing_a_layer_is_refused(adopted) -> None:
    decoder = adopted("llama")
    cache = SequenceCache(decoder.spec, "ragged")
    batch = ForwardBatch([BatchSegment(cache, (5,))], Mode.APPEND, torch.device("cpu"), None)
    batch.called.add(1)
    with pytest.raises(ModelError, match=r"Layers \[0\]"):
        batch.finish()


def test_forward_pass_missing_a_layer_is_rolled_back(adopted, monkeypatch) -> None:
    decoder = adopted("llama")
    cache, twin = (SequenceCache(decoder.spec, "ragged") for _ in range(2))
    for each in (cache, twin):
        read_on(decoder, each, some_ids(12), 5)
    finish = ForwardBatch.finish

    def deaf(batch: ForwardBatch, recurrent: Sequence[RecurrentState]) -> None:
        batch.called.discard(1)
        finish(batch, recurrent)

    with monkeypatch.context() as patch:
        patch.setattr(ForwardBatch, "finish", deaf)
        with pytest.raises(ModelError, match=r"Layers \[1\]"):
            decoder.read([BatchSegment(cache, some_ids(4))], Mode.APPEND)
    assert cache.next_position == 12
    assert cache.lengths() == twin.lengths()


@pytest.mark.parametrize("mode", [Mode.APPEND, Mode.SCRATCH])
def test_forward_pass_failing_after_a_plan_invalidates_the_cache(adopted, mode) -> None:
    decoder = adopted("llama")
    cache, other = (SequenceCache(decoder.spec, "ragged") for _ in range(2))
    for each in (cache, other):
        read_on(decoder, each, some_ids(12), 5)

    def plan_and_fail(row: int, layer: int, recorded: LayerActivations) -> None:
        if (row, layer) == (0, 0):
            lengths = cache.entries(0).lengths
            cache.apply(0, a_plan([range(0, length, 2) for length in lengths], lengths))
        if layer == 1:
            raise MemoryError("no more")

    rows = [BatchSegment(cache, some_ids(4)), BatchSegment(other, some_ids(4))]
    with pytest.raises(MemoryError):
        decoder.read(rows, mode, plan_and_fail)
    for use in (
        cache.state,
        cache.fork,
        lambda: cache.entries(1),
        lambda: cache.release_state(CPU),
    ):
        with pytest.raises(CacheError, match="read the text again"):
            use()
    with pytest.raises(CacheError, match="read the text again"):
        decoder.read([BatchSegment(cache, some_ids(4))], Mode.APPEND)
    assert other.lengths() == ((12, 12), (12, 12))  # nothing was planned here: it is taken back
    read_on(decoder, other, some_ids(4), 4)


@pytest.mark.parametrize(
    "ids, rule", [((), "no tokens"), ((5, 128), "id 128"), ((-1,), "id -1"), ((5, -3, 7), "id -3")]
)
def test_ids_outside_the_vocabulary_are_refused(adopted, ids, rule) -> None:
    decoder = adopted("llama")
    cache = SequenceCache(decoder.spec, "ragged")
    with pytest.raises(InputError, match=rule):
        decoder.read([BatchSegment(cache, ids)], Mode.APPEND)
    assert cache.next_position == 0
