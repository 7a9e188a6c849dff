"""`larder train` without labels: tests of weights, with the training and later, and of codecs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_results import CAT, Run, complaint
from larder.training import RestoreTraining
from learned_gates import random_soft_prompt


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """RestoreKV whose weights are random, and whose metric counts passages."""

    def fit(self, decoder, passages, seed, progress):
        progress(1, 1)
        return random_soft_prompt(decoder, seed, tokens=8)

    monkeypatch.setattr(RestoreTraining, "fit", fit)
    monkeypatch.setattr(
        RestoreTraining,
        "test",
        lambda self, decoder, layers, passages: {"passages": float(len(passages))},
    )


@pytest.mark.extended
def test_weights_trained_without_tests_are_tested_later(run: Run, quick: None) -> None:
    sizes = ("--tokens", "600", "--passage-tokens", "300", "--seed", "2")
    trained = run("train", "restorekv", *sizes, "--test-tokens", "0", "--json")
    assert trained.exit_code == 0, trained.stderr
    result = json.loads(trained.stdout)
    assert result["card"]["metrics"] == {}
    file = Path(result["file"])
    weights = ("--weights", str(file))
    tested = run("train", "restorekv", *sizes, *weights, "--test-tokens", "300", "--json")
    assert tested.exit_code == 0, tested.stderr
    card = json.loads(tested.stdout)["card"]
    metrics = card.pop("metrics")
    assert metrics["test_passages"] == 1 and metrics["test_tokens"] >= 300
    assert card == {name: value for name, value in result["card"].items() if name != "metrics"}


def test_test_tokens_of_a_method_with_labels_are_refused(run: Run) -> None:
    done = run("train", "kvzap", "--test-tokens", "300")
    assert done.exit_code == 2 and "not for kvzap" in done.stderr


@pytest.mark.parametrize("method", ["labels", "predictive", "kvtc"])
def test_options_that_a_method_does_not_use_are_refused(run: Run, method: str) -> None:
    given = complaint(run("train", method, "--weights", "gates.safetensors"), 2)
    assert f"not of {method}" in given and "leave it out" in given
    assert f"not for {method}" in complaint(run("train", method, "--slots", "16"), 2)


def test_missing_file_of_weights_is_named(run: Run, tmp_path: Path) -> None:
    missing = tmp_path / "gates.safetensors"
    assert f"{missing} does not exist" in complaint(run("train", "trim", "--weights", missing), 1)


def test_missing_weights_error_names_the_model_as_it_runs(run: Run, talk: Path) -> None:
    gated = ("ask", talk, "-q", CAT, "--policy", "whole() > trim() > uniform()")
    assert "`larder train trim --model seed`," in complaint(run(*gated), 1)
    lower = complaint(run(*gated, "--dtype", "bfloat16"), 1)
    assert "`larder train trim --model seed --dtype bfloat16`," in lower


@pytest.mark.extended
@pytest.mark.parametrize(("keys_r2", "is_reported"), [(-0.21, True), (0.18, False)])
def test_predictions_below_the_mean_are_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch, keys_r2: float, is_reported: bool
) -> None:
    def tested(tables, samples, step, split):
        return {f"{split}_keys_r2": keys_r2, f"{split}_keys_worst_r2": -0.5}

    monkeypatch.setattr("larder.training.predictive.tested", tested)
    sizes = ("--tokens", "300", "--passage-tokens", "150")
    done = run("train", "predictive", *sizes, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["card"]["metrics"]["test_keys_r2"] == keys_r2
    assert ("test keys r2 -0.21" in done.stderr and "--corpus" in done.stderr) == is_reported
    assert "worst" not in done.stderr
