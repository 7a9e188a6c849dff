"""Labels have the differences between sentences, and the legend explains every label."""

from __future__ import annotations

from larder_bench.results.policy_labels import LONGEST, label_legend, policy_labels

BASE = "whole() > protect(sinks=4, recent=0.25) > column_mass() > {} > every_step()"
FOLDS = [BASE.format(one) for one in ("fold_ema()", 'fold_ema(likeness="values")', "drop()")]


def test_labels_show_the_distinguishing_parts() -> None:
    names = policy_labels(["d2o", *FOLDS[1:], BASE.format("uniform() > drop()")])
    assert list(names.values()) == ["d2o", "fold_ema(likeness=values)", "drop", "uniform, drop"]
    other = FOLDS[0].replace("recent=0.25", "recent=0.5")
    assert policy_labels([FOLDS[0], other]) == {FOLDS[0]: "recent=0.25", other: "recent=0.5"}


def test_single_long_and_duplicate_labels_are_shortened() -> None:
    alone = "episodic(tokens=9) > patched(prompt='question') > sensitivity()"
    assert policy_labels([alone]) == {alone: "episodic, patched, sensitivity"}
    assert policy_labels([FOLDS[0]]) == {FOLDS[0]: "policy 1"}
    pair = ["blockwise() > keydiff() > uniform()", "blockwise() > snapkv() > uniform()"]
    names = policy_labels(["snapkv", *pair])
    assert list(names.values()) == ["snapkv", "keydiff", "policy 2"]
    many = policy_labels([*FOLDS, alone, *pair, "rag_2k(tokens=9)", "a > ("])
    assert len(set(many.values())) == len(many) and many["a > ("] == "a > ("
    assert all(len(short) <= LONGEST for short in many.values())


def test_legend_explains_short_labels() -> None:
    names = policy_labels(["d2o", FOLDS[0]])
    assert label_legend(names)[2] == f"- policy 1: `{FOLDS[0]}`"
    assert label_legend(policy_labels(["d2o", "h2o"])) == []


def test_distinct_longer_labels_are_preferred_to_numbers() -> None:
    base = "episodes({}) > patched() > sensitivity()"
    result = [base.format(one) for one in ("count=2", "count=8", "representatives=1")]
    names = policy_labels([*result, "blockwise() > keydiff() > pooled()"])
    assert names[result[0]] == "episodes(count=2), patched, sensitivity"
    assert names[result[2]] == "episodes(representatives=1), patched, sensitivity"
