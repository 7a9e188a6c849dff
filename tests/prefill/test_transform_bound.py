"""Bytes of transform-coded caches: while a text is read block by block, and while generating."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from safetensors.torch import save_file

from larder.cache import SequenceCache, TransformLayer, state_of, storage_bytes, tables_path
from larder.core import Mode
from larder.models import BatchSegment, Decoder, wrap_model
from larder.prefill import PeakMemoryMeter
from larder.session import Policy, build_caches
from model_runs import id_runtime, some_ids
from tiny_models import tiny
from transforms import some_tables

TOKENS, CONTEXT, BLOCK = 160, 480, 64
CODERS = ["planes", "entropy", "widths"]


@dataclass
class RecordingMeter(PeakMemoryMeter):
    """Meter that keeps the bytes and the entries that caches hold after every change."""

    held: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def observe(self, caches: Sequence[SequenceCache], passing_bytes: int) -> None:
        super().observe(caches, passing_bytes)
        [cache] = caches
        self.held.append((cache.nbytes, cache.managed_entries))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return wrap_model(tiny("llama", head_dim=32))


@pytest.fixture(autouse=True)
def calibrated(decoder: Decoder) -> None:
    path = tables_path(decoder.spec.fingerprint, "transform")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state_of({layer.index: some_tables(layer) for layer in decoder.spec.layers}), path)


def token_bytes(decoder: Decoder) -> int:
    """Bytes of an exact token in all layers, its positions included."""
    item = decoder.spec.dtype.itemsize
    return sum(layer.kv_heads * (2 * layer.head_dim * item + 4) for layer in decoder.spec.managed)


def built(decoder: Decoder, schedule: str, coder: str) -> tuple[SequenceCache, RecordingMeter]:
    storage = f'transform(coder="{coder}", bits=3)'
    parts = f"protect(sinks=2, recent=2) > keydiff() > global() > {storage}"
    policy = Policy.parse(f"{schedule} > {parts}").with_sizes(TOKENS, None)
    meter = RecordingMeter()
    caches = build_caches(id_runtime(decoder), policy, some_ids(CONTEXT), [{}], meter)
    return caches.activate(0), meter


@pytest.mark.extended
@pytest.mark.parametrize("coder", CODERS)
def test_blocks_are_read_within_the_budget_and_a_block(decoder: Decoder, coder: str) -> None:
    cache, meter = built(decoder, f"blockwise(tokens={BLOCK})", coder)
    budget, block = TOKENS * token_bytes(decoder), BLOCK * token_bytes(decoder)
    fixed = 16 * sum(layer.kv_heads for layer in decoder.spec.managed)  # starts and lengths
    assert max(held for held, _ in meter.held) <= budget + block + fixed
    assert 0.9 * budget <= cache.nbytes <= budget + fixed
    assert cache.managed_entries > TOKENS * sum(layer.kv_heads for layer in decoder.spec.managed)


@pytest.mark.parametrize("coder", CODERS)
def test_whole_texts_fill_the_budget(decoder: Decoder, coder: str) -> None:
    cache, _ = built(decoder, "whole()", coder)
    budget = TOKENS * token_bytes(decoder)
    fixed = 16 * sum(layer.kv_heads for layer in decoder.spec.managed)
    assert 0.9 * budget <= cache.nbytes <= budget + fixed
    tensors = [each for layer in cache.layers for each in layer.own_tensors()]
    assert storage_bytes(tensors) <= cache.nbytes


def test_generated_entries_are_exact_until_a_block_is_full(decoder: Decoder) -> None:
    cache, _ = built(decoder, "whole()", "planes")
    exact = list[int]()
    for token in range(140):
        decoder.forward_logits([BatchSegment(cache, (token % 50,))], Mode.APPEND, [0])
        layers = [layer for layer in cache.layers if isinstance(layer, TransformLayer)]
        exact.append(max(max(layer.full_precision_lengths) for layer in layers))
    kept = exact[0] - 1
    assert exact[:20] == [kept + 1 + n for n in range(20)]
    assert max(exact) <= kept + 64 + 2
    assert min(exact[70:]) <= kept + 2
