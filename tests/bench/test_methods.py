"""The page of published systems equals what its source, the presets and the rows say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from larder.core import InputError
from larder.session import PRESETS
from larder_bench.reports.methods import (
    FIGURES,
    SOURCE,
    PublishedMethod,
    cost_text,
    figure_text,
    method_lines,
    read_methods,
    replace_methods,
)
from larder_bench.studies.study import CHECKOUT

PAGE = CHECKOUT / "docs" / "methods.md"


@pytest.fixture(scope="module")
def methods() -> list[PublishedMethod]:
    return read_methods(PAGE.parent / SOURCE)


@pytest.mark.extended
def test_methods_page_equals_the_generated_one(methods) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replace_methods(text, methods), "python -m larder_bench.reports.methods PAGE"


def test_every_preset_is_of_a_system(methods) -> None:
    named = [preset for method in methods for preset in method.presets]
    assert sorted(named) == sorted(set(named))
    assert set(PRESETS) == set(named)
    assert sum(method.area != "baseline" for method in methods) == 147


def test_figures_equal_the_rows() -> None:
    assert figure_text(FIGURES[0], ["full"]) == "0.74"
    assert figure_text(FIGURES[0], ["never_measured", "kvzip"]) == "0.72"
    assert figure_text(FIGURES[1], ["never_measured"]) == ""


def test_figure_has_a_mean_per_budget_of_the_first_study_that_has_the_policy() -> None:
    likelihood = next(figure for figure in FIGURES if figure.title == "likelihood after")
    counts = [len(figure_text(likelihood, [name]).split(", ")) for name in ("nacl", "leverage")]
    assert counts == [2, 1]
    assert figure_text(replace(likelihood, question="inside"), ["leverage"]) == ""


def test_budget_without_room_is_marked_refused() -> None:
    likelihood = next(figure for figure in FIGURES if figure.title == "likelihood after")
    assert figure_text(likelihood, ["arkvale"]) == "-0.70, refused"


def test_costs_are_multiples_of_the_full_cache() -> None:
    assert cost_text(["full"]) == "1.0, 1.0"
    reading, step = map(float, cost_text(["never_measured", "qaq"]).split(", "))
    assert reading > 5 and step > 10  # it quantizes its whole cache again at every step
    assert cost_text(["never_measured"]) == ""


def test_system_paper_is_the_least_cited_by_presets() -> None:
    assert (
        PublishedMethod("D2O", "policy", "built", ("d2o",), behavior="Seen.").cited()
        == "Wan et al. 2024, arXiv:2406.13035"
    )
    control = PublishedMethod(
        "Control", "policy", "built", ("random",), paper="none", behavior="Control."
    )
    assert control.cited() == ""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"state": "done"}, "names 'done'"),
        ({"area": "policies"}, "names 'policies'"),
        ({"presets": ("snapvk",)}, "names 'snapvk'"),
        ({"parts": ("snapvk",)}, "names 'snapvk'"),
        ({"presets": ()}, "presets or parts must be named"),
        ({"behavior": "As in the paper."}, "begins with one of Seen, Partly seen"),
        ({"behavior": ""}, "X needs a behavior"),
    ],
)
def test_unknown_values_are_refused(changed, message) -> None:
    known = {"name": "X", "area": "policy", "state": "built", "presets": ("snapkv",)}
    known |= {"behavior": "Seen."}
    with pytest.raises(InputError, match=message):
        PublishedMethod(**known | changed)


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    table = '[[method]]\nname = "X"\narea = "policy"\nstate = "missing"\n'
    (tmp_path / SOURCE).write_text(table * 2)
    with pytest.raises(InputError, match="X stands twice"):
        read_methods(tmp_path / SOURCE)


def test_counts_are_per_area() -> None:
    lines = list(method_lines([PublishedMethod("X", "learned", "missing", note="Why.")]))
    assert "1 systems: 1 missing." in lines
    assert "| X |  |  | missing |  |  |  |  |  |  |  | Why. |" in lines


def test_page_without_marks_is_refused() -> None:
    with pytest.raises(InputError, match="has no <!-- methods: begin -->"):
        replace_methods("text", [])
