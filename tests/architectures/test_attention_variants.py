"""Softcaps, sinks and chunks of real models in every form of cache, against the model alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from architectures.families import families
from builders import FORM_NAMES, tiers_of
from covering import covering
from larder.cache import SequenceCache
from larder.core import CacheError, Mode, Plan, RecomputeSource, RecomputeSpec
from larder.interop import LarderCache
from larder.models import (
    AttentionInputs,
    BatchSegment,
    CausalAttention,
    Decoder,
    squared_errors,
    wrap_model,
)
from model_runs import native_logits, read_on, some_ids

READ, STEPS, BLOCK, NEAR = 40, 4, 9, 5  # tokens
IDS = some_ids(READ + STEPS)
TOLERANCE = 1e-4
# Caches that attend to evicted entries too.
LOSSLESS: dict[str, dict[str, Any]] = {
    "tiered": {"form": "tiered", **tiers_of("tiered")},
    "rebuilt": {"form": "rebuilt", **tiers_of("rebuilt")},
    "reread": {"form": "rebuilt", "rebuilding": RecomputeSpec(RecomputeSource.IDS)},
}


@cache
def models(name: str) -> tuple[Decoder, torch.Tensor]:
    """Decoder, and the logits of the model alone."""
    family = next(row for row in families() if row.name == name)
    expected = native_logits(family.model(), IDS)
    return wrap_model(family.model()), expected


VARIANTS = ["Gemma 2", "GPT-OSS", "Llama 4"]
variants = pytest.mark.parametrize("name", VARIANTS)


@pytest.mark.parametrize("name, form", covering(VARIANTS, FORM_NAMES))
def test_blocks_and_steps_equal_the_model(name: str, form: str) -> None:
    decoder, expected = models(name)
    held = SequenceCache(decoder.spec, form, **tiers_of(form))
    got = torch.cat(
        [read_on(decoder, held, IDS[:READ], BLOCK), read_on(decoder, held, IDS[READ:], 1)]
    )
    assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.extended
@variants
@pytest.mark.parametrize("options", LOSSLESS.values(), ids=LOSSLESS)
def test_logits_over_offloaded_or_recomputed_entries_equal_the_model(
    name: str, options: dict[str, Any]
) -> None:
    """Offloaded or recomputed entries count as those that were kept."""
    decoder, expected = models(name)
    held = SequenceCache(decoder.spec, **options)
    decoder.read([BatchSegment(held, IDS[:READ])], Mode.APPEND)
    latest = torch.arange(READ - NEAR, READ)
    for layer in decoder.spec.managed:
        held.apply(layer.index, Plan(torch.cat([latest, latest + READ]), (NEAR, NEAR)))
    assert held.lengths()[decoder.spec.managed[0].index] == (NEAR, NEAR)
    got = read_on(decoder, held, IDS[READ:], 1)
    assert (got - expected[READ:]).abs().max() < TOLERANCE


@variants
def test_eviction_error_under_a_mask_that_hides_nothing_is_zero(name: str) -> None:
    """A mask that hides nothing changes nothing: sinks keep their share."""
    decoder, _ = models(name)
    changes: list[float] = []

    def measure(inputs: AttentionInputs) -> None:
        rows = torch.arange(len(IDS))
        change, whole = squared_errors(inputs, rows, torch.ones(len(rows), len(rows)).bool())
        changes.append(float((change / whole).max()))

    decoder.forward_uncached(IDS, CausalAttention(measure))
    assert max(changes) < 1e-8


@pytest.mark.parametrize("lengths", [(READ, 7, 20), (17, READ)])
def test_batched_rows_in_different_chunks_equal_the_model(lengths: tuple[int, ...]) -> None:
    """Each row has the chunks and the temperatures of its own positions."""
    decoder, expected = models("Llama 4")
    rows = [SequenceCache(decoder.spec, "ragged") for _ in lengths]
    for held, length in zip(rows, lengths, strict=True):
        read_on(decoder, held, IDS[:length], BLOCK)
    batch = [
        BatchSegment(held, IDS[length : length + 3])
        for held, length in zip(rows, lengths, strict=True)
    ]
    got = decoder.forward_logits(batch, Mode.APPEND, range(3 * len(rows)))
    for own, length in zip(got.split(3), lengths, strict=True):
        assert (own - expected[length : length + 3]).abs().max() < TOLERANCE


def test_completed_chunk_is_freed() -> None:
    decoder, _ = models("Llama 4")
    [chunked] = decoder.spec.windows
    held = SequenceCache(decoder.spec, "ragged")
    for length, entries in ((15, 15), (16, 16), (17, 1), (33, 1)):
        read_on(decoder, held, IDS[held.next_position : length], 1)
        assert held.lengths()[chunked.index] == (entries,) * chunked.kv_heads


@torch.no_grad()
def test_export_of_chunked_layers_is_refused() -> None:
    family = next(row for row in families() if row.name == "Llama 4")
    model = family.model()
    held = LarderCache(model, "full")
    model(torch.tensor([IDS]), past_key_values=held)
    with pytest.raises(CacheError, match="which is not exchanged"):
        held.to_dynamic_cache()
