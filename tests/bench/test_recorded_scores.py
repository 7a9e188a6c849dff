"""Caches of one reading are those that each policy would have made by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from larder import Engine
from larder.core import BadParameter
from larder.models import wrap_model
from larder.prefill import PeakMemoryMeter
from larder.session import Policy, build_caches, common_prompts
from larder_bench.datasets.sources import TaskSources
from larder_bench.execution.runner import StudyRunner, parse_measure
from larder_bench.profiling.synthetic_cache import random_cache
from larder_bench.random_models import open_model
from larder_bench.scoring.recorded_scores import (
    NEXT,
    RECITED,
    RecordedText,
    compared_bytes,
    compared_full_bytes,
)
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.study import Study, StudyTask
from tiny_models import tiny

FOLLOWING, LENGTH = 8, 400
SENTENCES = (
    "whole() > reconstruct() > global()",
    "whole() > expected() > ada() > quantized(bits=4)",
    "whole() > snapkv(kernel=1) > global() > rdkv()",
    "whole() > snapkv() > uniform() > turboquant(bits=4)",
    "whole() > compactor() > uniform()",
    "whole() > snapkv() > criticality() > uniform()",
)
DENSE = "whole() > sinks_and_window() > uniform() > park() > flat(exact=0, dense={})"


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.manual_seed(0)
    return Engine(open_model("random:qwen3-tiny"), policy="full")


@pytest.fixture(scope="module")
def text(engine: Engine) -> RecordedText:
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(
        5, engine.loaded.decoder.vocab_size, (LENGTH + FOLLOWING,), generator=source
    )
    return RecordedText.of(engine, tuple(ids.tolist()), FOLLOWING)


@pytest.mark.extended
@pytest.mark.parametrize("sentence", SENTENCES)
def test_plan_on_a_copy_equals_a_prefill(engine: Engine, text: RecordedText, sentence: str) -> None:
    policy = Policy.parse(sentence)
    held = text.held(policy, 150)
    caches = build_caches(
        engine.runtime,
        policy.with_sizes(150, None),
        text.ids,
        [common_prompts(engine.tokenizer)],
        PeakMemoryMeter(),
    )
    alone = caches.activate(0)
    for layer in range(len(held.layers)):
        own, other = held.entries(layer), alone.entries(layer)
        assert own.lengths == other.lengths
        assert torch.equal(own.packed_positions(), other.packed_positions())
        assert torch.allclose(own.pack(own.keys), other.pack(other.keys), atol=1e-4)
    assert compared_bytes(held) < compared_full_bytes(text)


@pytest.mark.extended
@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_policies_with_other_dense_layers_do_not_share_scores(
    engine: Engine, text: RecordedText, first: int, second: int
) -> None:
    text.held(Policy.parse(DENSE.format(first)), 150)
    policy = Policy.parse(DENSE.format(second))
    alone = RecordedText(engine, text.ids, text.cache, text.probes, text.logits)
    held, expected = text.held(policy, 150), alone.held(policy, 150)
    assert list(text.scores(policy)) == list(range(second, len(held.layers)))
    for layer in range(len(held.layers)):
        assert held.entries(layer).lengths == expected.entries(layer).lengths


@pytest.mark.extended
def test_recorded_full_cache_has_probe_logits_and_full_bytes(text: RecordedText) -> None:
    assert set(text.probes) == {NEXT, RECITED}
    assert len(text.logits[NEXT]) == FOLLOWING - 1 and len(text.logits[RECITED]) == FOLLOWING
    full = compared_full_bytes(text)
    assert full <= compared_bytes(text.cache) <= 1.13 * full  # positions come on top


def test_compared_bytes_leave_sliding_windows_out() -> None:
    """A share is of what a budget changes, as the bytes of the full cache are."""
    cache = random_cache(wrap_model(tiny("gemma3")), "dense", LENGTH)
    managed = [store for store in cache.layers if store.layer.is_managed]
    assert 0 < len(managed) < len(cache.layers)
    halved = cache.spec.managed_bytes_per_token() // 2 * LENGTH  # float32, counted as bfloat16
    assert compared_bytes(cache) == sum(store.nbytes for store in managed) - halved


@pytest.mark.extended
def test_study_has_a_row_for_each_policy(engine: Engine, tmp_path: Path) -> None:
    bench = ModelContext(engine, TaskSources(engine.tokenizer.count_tokens))
    study = Study(
        name="tiny",
        tasks=(StudyTask("text(of='talk')", (400,)),),
        models=("random:qwen3-tiny",),
        policies=(SENTENCES[0], SENTENCES[1]),
        budgets=("1/2",),
        matched=("bytes",),
        files=1,
        controls=("full",),
        measure=("divergence(following=8)",),
    )
    running = StudyRunner(study, tmp_path / "rows.jsonl", lambda model: bench, 1)
    running.run()
    kvzip, rounded, full = running.rows()
    assert {item["kind"] for item in kvzip["items"]} == {"next", "recited"}
    assert kvzip["bytes_share"] <= 0.5 and rounded["bytes_share"] <= 0.5
    assert rounded["kept"] > kvzip["kept"]
    assert all(abs(item["kl"]) < 1e-5 for item in full["items"])
    with pytest.raises(BadParameter, match="following"):
        parse_measure("divergence(following=1)")


@pytest.mark.parametrize(("length", "following"), [(136, 8), (50, 8), (8, 8), (0, 8), (223, 64)])
def test_text_too_short_to_compare_is_refused(engine: Engine, length: int, following: int) -> None:
    least = {8: 129, 64: 160}[following]
    with pytest.raises(BadParameter, match=f"too short .*take one of {least} tokens or more"):
        RecordedText.of(engine, (7,) * length, following)


@pytest.mark.extended
@pytest.mark.parametrize(("length", "following"), [(129, 8), (160, 64)])
def test_shortest_text_is_compared(engine: Engine, length: int, following: int) -> None:
    source = torch.Generator().manual_seed(2)
    ids = torch.randint(
        5, engine.loaded.decoder.vocab_size, (length + following,), generator=source
    )
    text = RecordedText.of(engine, tuple(ids.tolist()), following)
    recited = text.probes[RECITED].ids[-following - 16 :]
    assert recited == text.ids[length // 2 : length // 2 + 16 + following]  # all of it was read
    assert text.held(Policy.parse(SENTENCES[0]), 40).managed_entries < length * 2 * 2
