"""A row of a batch equals the same row alone."""

from __future__ import annotations

import pytest
import torch

from builders import FORM_NAMES, tiers_of
from covering import covering
from larder.cache import SequenceCache
from larder.core import Mode
from larder.engine import SamplingParams, StoppingCriteria
from larder.engine.generate import generate
from larder.models import BatchSegment
from model_runs import native_logits, read_on, some_ids
from tiny_models import ARCHITECTURES

MODES = (Mode.APPEND, Mode.SCRATCH)
CONTEXTS = (0, 21, 9, 2)  # tokens that each row has read before
PROMPTS = (13, 1, 6, 3)
NEW = 5
GENERATIONS = {
    "dense": ("dense", SamplingParams()),
    "ragged": ("ragged", SamplingParams()),
    "sampled": ("ragged", SamplingParams(temperature=1.0, top_k=9, seed=4)),
}
# Every form in both modes where windows slide and where they do not, the other models in some.
PACKED = [
    *((name, form, mode) for name in ("llama", "gemma3") for form in FORM_NAMES for mode in MODES),
    *((name, "ragged", Mode.APPEND) for name in ("qwen2", "qwen3", "mistral", "phi3")),
    *((name, "dense", Mode.SCRATCH) for name in ("qwen2", "qwen3", "mistral", "phi3")),
]


def rows(decoder, form: str) -> list[SequenceCache]:
    """Caches with contexts of different lengths."""
    caches = [SequenceCache(decoder.spec, form, **tiers_of(form)) for _ in CONTEXTS]
    for number, (cache, count) in enumerate(zip(caches, CONTEXTS, strict=True)):
        if count:
            read_on(decoder, cache, some_ids(count, seed=number), 8)
    return caches


def prompts() -> list[tuple[int, ...]]:
    return [some_ids(count, seed=10 + number) for number, count in enumerate(PROMPTS)]


@pytest.mark.parametrize("architecture, form, mode", PACKED)
def test_packed_logits_equal_single_sequences(architecture, adopted, form, mode) -> None:
    decoder = adopted(architecture)
    pairs = list(zip(rows(decoder, form), prompts(), strict=True))
    packed = decoder.forward_logits(
        [BatchSegment(cache, ids) for cache, ids in pairs], mode, range(sum(PROMPTS))
    ).split(PROMPTS)
    again = zip(rows(decoder, form), prompts(), packed, strict=True)
    for cache, ids, together in again:
        alone = decoder.forward_logits([BatchSegment(cache, ids)], mode, range(len(ids)))
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture, generation", covering(ARCHITECTURES, GENERATIONS))
def test_batched_generation_equals_single_sequences(architecture, generation, adopted) -> None:
    decoder, (form, sampling) = adopted(architecture), GENERATIONS[generation]
    together = generate(decoder, rows(decoder, form), prompts(), sampling, StoppingCriteria(NEW))
    for cache, ids, answer_ids in zip(rows(decoder, form), prompts(), together, strict=True):
        assert generate(decoder, [cache], [ids], sampling, StoppingCriteria(NEW)) == [answer_ids]
        assert len(answer_ids) == NEW
    assert len({tuple(answer_ids) for answer_ids in together}) > 1


def test_greedy_generation_equals_the_model(architecture, adopted, own) -> None:
    decoder, module = adopted(architecture), own(architecture)
    together = generate(
        decoder, rows(decoder, "ragged"), prompts(), SamplingParams(), StoppingCriteria(NEW)
    )
    for number, (count, ids, answer_ids) in enumerate(
        zip(CONTEXTS, prompts(), together, strict=True)
    ):
        context = some_ids(count, seed=number) if count else ()
        whole = (*context, *ids, *answer_ids)
        expected = native_logits(module, whole).argmax(-1)[len(whole) - NEW - 1 : -1]
        assert expected.tolist() == answer_ids


def test_early_stop_does_not_affect_other_sequences(adopted) -> None:
    decoder = adopted("llama")
    free = generate(
        decoder, rows(decoder, "ragged"), prompts(), SamplingParams(), StoppingCriteria(NEW)
    )
    stop = free[0][3]
    limits = StoppingCriteria(NEW, frozenset({stop}))
    stopped = generate(decoder, rows(decoder, "ragged"), prompts(), SamplingParams(), limits)
    for whole, cut in zip(free, stopped, strict=True):
        assert cut == (whole[: whole.index(stop)] if stop in whole else whole)


def test_packed_questions_continue_the_cache_separately(architecture, adopted) -> None:
    decoder = adopted(architecture)
    cache = SequenceCache(decoder.spec, "ragged")
    read_on(decoder, cache, some_ids(25), 10)
    packed = BatchSegment(cache, sum(prompts(), ()), PROMPTS)
    together = decoder.forward_logits([packed], Mode.SCRATCH, range(sum(PROMPTS))).split(PROMPTS)
    for ids, part in zip(prompts(), together, strict=True):
        alone = decoder.forward_logits([BatchSegment(cache, ids)], Mode.SCRATCH, range(len(ids)))
        torch.testing.assert_close(part, alone, atol=1e-4, rtol=0)
