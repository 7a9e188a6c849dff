"""Exhibits of measures, on a tiny model with random weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from larder.cache import CacheLayer
from larder.core import BadParameter
from larder.models import wrap_model
from larder.session import build_caches
from larder_bench.execution.runner import StudyRunner, parse_measure
from larder_bench.measures.decode import StepTimings
from larder_bench.profiling.step_profiler import StepProfiler, profile_steps
from larder_bench.profiling.synthetic_cache import append_random_entries, random_cache
from larder_bench.results.rows import Row, read_results
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.study import Study, StudyTask
from tiny_models import tiny

LIFELOG = StudyTask('lifelog(questions=2, kinds="single")', (260,))
ROUNDED = "blockwise() > sinks_and_window() > uniform() > quantized(bits=4) > every_step()"
PARKED = (
    "blockwise() > protect(sinks=4, recent=8) > sinks_and_window() > uniform() > park() > "
    "flat(dense=0) > lagged(tokens=4)"
)
PROMPTS = 'prompts(utterances=2, step=50, embedder="tokens")'


def run(bench: ModelContext, out: Path, policies: tuple[str, ...], **changes: object) -> list[Row]:
    """The cells of a study."""
    values: dict[str, object] = {
        "name": "tiny",
        "tasks": (LIFELOG,),
        "models": ("random:qwen3-tiny",),
        "policies": policies,
        "budgets": ("1/2",),
        "matched": ("tokens",),
        "files": 1,
        "controls": (),
    }
    running = StudyRunner(Study(**(values | changes)), out, lambda model: bench, 1)  # pyright: ignore
    running.run()
    return running.rows()


def test_prompts_replace_the_question(bench: ModelContext, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    asked, read = run(bench, out, ("exact_question",), measure=(PROMPTS, "forced"))
    near, far, exact = read_results([out]).exhibits_of("prompt")
    assert [row["percentile"] for row in (near, far, exact)] == [25.0, 75.0, None]
    assert exact["items"] == asked["items"] and len(asked["items"]) == 2
    bare = [{n: v for n, v in item.items() if n != "similarity"} for item in asked["items"]]
    assert bare == read["items"] and asked["budget_tokens"] == read["budget_tokens"]
    for one, other in zip(near["items"], far["items"], strict=True):
        assert 1 > one["similarity"] > other["similarity"]
        assert one["log_likelihood"] != other["log_likelihood"]


def test_policies_without_a_prompt_are_refused(bench: ModelContext, tmp_path: Path) -> None:
    keydiff, many = (
        run(bench, tmp_path / f"{name}.jsonl", (name,), measure=(measure,))[0]["refused"]
        for name, measure in (
            ("keydiff", PROMPTS),
            ("exact_question", 'prompts(utterances=900, embedder="tokens")'),
        )
    )
    assert "keydiff does not score by the question" in keydiff
    assert "fewer than the 900 of a prompt" in many
    with pytest.raises(BadParameter, match="step must be from 1 to 50"):
        parse_measure("prompts(step=60)")


@pytest.mark.slow
@pytest.mark.parametrize("policy", [ROUNDED, PARKED])
def test_random_entries_take_the_bytes_of_a_text(
    bench: ModelContext, tmp_path: Path, policy: str
) -> None:
    text = StudyTask("passkey()", (240,))
    asked = dict(budgets=("64",), tasks=(text,), measure=("forced",))
    [read] = run(bench, tmp_path / "read.jsonl", (policy,), **asked)
    text = StudyTask("passkey()", (read["context_tokens"],))
    asked |= {"tasks": (text,), "measure": ("decode(steps=3)",)}
    [row] = run(bench, tmp_path / "rows.jsonl", (policy,), **asked)
    assert row["full_kv_bytes"] == read["full_kv_bytes"]
    assert row["active_kv_bytes"] == pytest.approx(read["active_kv_bytes"], rel=0.03)
    assert row["kv_bytes"] - row["slow_kv_bytes"] == row["active_kv_bytes"]
    if policy == ROUNDED:
        assert row["slow_kv_bytes"] == 0 and row["kv_bytes"] < 0.3 * row["full_kv_bytes"]
        return
    parked = (read["context_tokens"] - 64) / read["context_tokens"] * read["full_kv_bytes"]
    assert parked < row["slow_kv_bytes"] < 1.5 * parked
    quiet, due = read_results([tmp_path / "rows.jsonl"]).exhibits_of("breakdown")
    assert [row["step"] for row in (quiet, due)] == ["step", "step in which entries go"]
    names = [[part["name"] for part in row["parts"]] for row in (quiet, due)]
    assert set(names[0]) == {"attention", "search", "gather", "insert", "policy", "model"}
    assert set(names[1]) - set(names[0]) == {"park", "evict"}
    assert 0 < row["policy_share"] < 1


def test_costs_are_processor_time(
    bench: ModelContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, inner = tmp_path / "rows.jsonl", build_caches

    def waiting(*given: Any) -> Any:
        time.sleep(0.5)
        return inner(*given)

    monkeypatch.setattr("larder_bench.measures.reading.build_caches", waiting)
    asked = {"tasks": (StudyTask("text()", (64,)),), "measure": ("cost(steps=1)", "reading")}
    cost, reading = run(bench, out, ("streaming_llm",), **asked)
    assert 0 < cost["prefill_seconds"] < 0.5 <= reading["prefill_seconds"]
    assert cost["tokens_per_second"] > 0
    steps = [row["step"] for row in read_results([out]).exhibits_of("breakdown")]
    assert steps[:2] == ["reading", "step"]


def test_nested_time_is_counted_once() -> None:
    times = iter([0.0, 1.0, 2.0, 5.0, 7.0, 10.0])
    spent = StepProfiler(lambda: next(times))
    inner = spent.wrap(lambda: None, "search")
    outer = spent.wrap(inner, "attention")
    assert spent.step(outer) == {"search": 3.0, "attention": 6.0 - 3.0, "model": 10.0 - 6.0}
    before = CacheLayer.attend
    with profile_steps(lambda: 0.0):
        assert CacheLayer.attend is not before
    assert CacheLayer.attend is before


def test_prefill_time_is_split_by_purpose(bench: ModelContext, tmp_path: Path) -> None:
    out, asked = tmp_path / "rows.jsonl", ("keydiff", "epicache", "full")
    keydiff, epicache, full = run(bench, out, asked, measure=("reading",), budgets=("128",))
    assert keydiff["active_kv_bytes"] < full["active_kv_bytes"] <= full["peak_kv_bytes"]
    parts = {
        row["policy"]: {part["name"]: part["p50"] for part in row["parts"]}
        for row in read_results([out]).exhibits_of("breakdown")
    }
    assert parts["keydiff"]["prompts"] == 0 < parts["epicache"]["prompts"]
    assert 0 < keydiff["policy_share"] < 1 and epicache["prefill_seconds"] > 0
    assert sum(parts["keydiff"].values()) == pytest.approx(keydiff["prefill_seconds"], abs=1e-3)


@pytest.mark.extended
def test_exact_search_over_single_entries_recalls_what_is_largest(
    bench: ModelContext, tmp_path: Path
) -> None:
    asked = dict(measure=("recall(questions=2, steps=3, first=0)",), budgets=("64",))
    paged = PARKED.replace("dense=0", "dense=0, page=16")
    exact, pages = (
        run(bench, tmp_path / f"{number}.jsonl", (policy,), **asked)[0]
        for number, policy in enumerate((PARKED, paged))
    )
    assert [item["kind"] for item in exact["items"]] == ["layer 0", "layer 1"] * 2
    for item in exact["items"]:
        assert item["recall_1"] == item["recall_3"] == item["recall_5"] == 1.0
    for item in (*exact["items"], *pages["items"]):
        assert item["mass"] < item["possible"] < 1  # two query heads share what is fetched
    assert min(item["recall_5"] for item in pages["items"]) < 1
    assert pages["page_fill"] > 0.8 and pages["index_bytes_per_key"] > 0
    shown = read_results([tmp_path / "0.jsonl"]).exhibits_of("recall")
    places = {(row["layer"], row["step"]) for row in shown}
    assert places == {(None, None), *((layer, step) for layer in (0, 1) for step in (1, 2, 3))}
    [refused] = run(bench, tmp_path / "2.jsonl", ("h2o",), **asked)
    assert "h2o offloads nothing" in refused["refused"]


def test_recall_measure_searches_below_the_break_even(
    bench: ModelContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or rows of a policy that recalls would be those of the full cache."""
    asked = dict(measure=("recall(questions=1, steps=2, first=0)",), budgets=("64",))
    (searched,) = run(bench, tmp_path / "searched.jsonl", (PARKED,), **asked)
    monkeypatch.setenv("LARDER_RECALL_BREAK_EVEN", "100000")
    (faster,) = run(bench, tmp_path / "faster.jsonl", (PARKED,), **asked)
    assert searched["items"] and faster["items"] == searched["items"]


def test_recall_is_measured_over_the_same_layers_and_head_sharing(
    bench: ModelContext, tmp_path: Path
) -> None:
    asked = dict(measure=("recall(questions=2, steps=1, first=1)",), budgets=("64",))
    parts = "dense=0", "dense=1", 'dense=1, heads="own"', "dense=2"
    policies = tuple(PARKED.replace("dense=0", part) for part in parts)
    every, one, own, none = run(bench, tmp_path / "rows.jsonl", policies, **asked)
    for row in (every, one, own):
        assert [item["kind"] for item in row["items"]] == ["layer 1"] * 2
    # With layer 0 whole both ask the same; what query heads chose for themselves is not half.
    assert own["items"] == one["items"]
    assert "first 2 layers dense, but recall counts from layer 1" in none["refused"]


def test_mean_step_is_over_a_whole_window() -> None:
    parts = [{"policy": 0.25, "model": 0.75}, {"model": 1.0}, {"policy": 1.0, "evict": 3.0}]
    timed = StepTimings(8, [1.0, 1.0, 4.0], [False, False, True], parts)
    assert timed.mean == (7 * 1.0 + 4.0) / 8
    assert timed.share == pytest.approx((7 * 0.125 + 4.0) / (7 * 1.0 + 4.0))
    assert [row["step"] for row in timed.exhibits()] == ["step", "step in which entries go"]
    always = StepTimings(1, [1.0, 2.0, 4.0], [True, True, True], parts)
    assert always.mean == 2.0 and len(always.exhibits()) == 1


def test_random_caches_hold_the_window_of_sliding_layers() -> None:
    decoder = wrap_model(tiny("gemma3"))
    cache = random_cache(decoder, "ragged", 16, spread=0.0, context=20)
    for layer, lengths in zip(decoder.spec.layers, cache.lengths(), strict=True):
        assert set(lengths) == {16 if layer.sliding_window is None else layer.sliding_window}
    append_random_entries(decoder, [cache], 1)
    assert cache.next_position == 21
