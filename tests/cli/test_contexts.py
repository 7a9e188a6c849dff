"""`larder ask --context`: several documents for the same questions, kept for the next time."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_results import Run, complaint, document, write

ASKED = ("-q", "Where does Peter live?", "--max-new-tokens", "6")


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    cat = write(tmp_path / "cat.txt", "Mira is the cat of Vera. She sleeps on the red sofa. " * 3)
    return cat, write(tmp_path / "baker.md", "Peter lives in Berlin and works as a baker. " * 3)


@pytest.mark.extended
def test_contexts_are_prefilled_once_and_reused(run: Run, texts: tuple[Path, Path]) -> None:
    cat, baker = texts
    words = ("--keep", "--json", *ASKED)
    first = document(run("ask", cat, "--context", baker, *words))
    again = document(run("ask", "--context", baker, "--context", cat, *words, "--policy", "ape"))
    assert (
        "blended(recompute=0.15)" in first["policy"] and "Berlin" in first["answers"][0]["answer"]
    )
    assert first["contexts"]["cached_tokens"] == 0 < first["contexts"]["recomputed_tokens"]
    assert again["contexts"]["tokens"] == first["contexts"]["tokens"][::-1]
    assert again["contexts"]["cached_tokens"] == sum(again["contexts"]["tokens"])


def test_contexts_under_a_budget_are_one_text(run: Run, texts: tuple[Path, Path]) -> None:
    words = [word for text in texts for word in ("--context", text)]
    result = document(run("ask", *words, *ASKED, "--budget", "48", "--json"))
    assert result["budget_tokens"] == 48 and result["contexts"]["cached_tokens"] == 0


def test_invalid_context_arguments_are_refused(
    run: Run, talk: Path, texts: tuple[Path, Path]
) -> None:
    assert "--context" in complaint(run("ask", *ASKED), 2)
    assert "no document" in complaint(run("ask", talk, "--context", texts[0], *ASKED), 1)


def test_layers_and_models_to_share_with_are_checked_first(run: Run, texts) -> None:
    """Nothing is read, and no model is loaded, before the options fit together."""
    words = ("ask", "--context", texts[0], *ASKED)
    for options, why in (
        (("--share-layer", "2"), "need --keep"),
        (("--keep", "--share-layer", "0"), "before layer 1 or a later one"),
        (("--keep", "--reuse-from", "seed"), "go together"),
        (("--keep", "--recompute-layers", "1-2"), "go together"),
        (("--keep", "--reuse-from", "seed", "--recompute-layers", "2-1"), "is START-STOP"),
        (("--keep", "--reuse-from", "other", "--recompute-layers", "1-2"), "nothing that other"),
    ):
        assert why in complaint(run(*words, *options), 2)
    assert run(*words, "--keep", "--share-layer", "1", "--json").exit_code == 0
    itself = ("--keep", "--reuse-from", "seed", "--recompute-layers", "1-2")
    assert "this model itself" in complaint(run(*words, *itself), 1)
