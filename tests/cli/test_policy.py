"""`larder policy`: everything is found in the files, above all every paper."""

from __future__ import annotations

import inspect
import re

import pytest

from cli_results import Run, complaint, document
from larder import Policy
from larder.cli.part_docs import Citation, citations, part_doc, part_docs, part_names, preset_docs
from larder.core import RECALLS, Family
from larder.session import FAMILIES, PRESETS

KNOWN = {**FAMILIES, "recall": RECALLS}
CITING = [
    (slot, name)
    for slot in (
        "session",
        "schedule",
        "scorer",
        "budget",
        "compensation",
        "storage",
        "timing",
        "recall",
    )
    for name in KNOWN[slot].names()
]


NOT_ON_ARXIV = (
    "CaM: Cache Merging for Memory-efficient LLMs Inference",
    "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction",
    "OracleKV: Oracle Guidance for Question-Independent KV Cache Compression",
)


@pytest.mark.parametrize(("slot", "name"), CITING)
def test_every_citation_of_a_part_is_found(slot: str, name: str) -> None:
    text = docstring(KNOWN[slot], name)
    found = citations(text)
    # Counted apart from the pattern that finds them: a quoted title with a year behind it.
    assert len(found) == len(re.findall(r'"\s+\(\d{4}\)', text))
    assert all(c.authors and (c.arxiv or c.title in NOT_ON_ARXIV) for c in found)
    assert all(len(citation.title.split()) > 2 for citation in found), "a title is cut short"
    assert bool(found) != bool(re.search(r"\b[Nn]o paper\b", text))


@pytest.mark.parametrize("name", ["snapkv", "keydiff", "reconstruct", "patched"])
def test_scorers_with_a_paper_name_it(name: str) -> None:
    assert citations(docstring(FAMILIES["scorer"], name))


@pytest.mark.parametrize("name", RECALLS.names())
def test_shared_fields_are_documented_for_every_recall_index(name: str) -> None:
    page = part_doc(RECALLS.load(name), "recall")
    assert all(field.meaning for field in page.fields)
    assert {"tokens", "dense"} < {field.name for field in page.fields}


def docstring(family: Family, name: str) -> str:
    return inspect.getdoc(inspect.getmodule(family.load(name))) or ""


def test_citations_of_every_form_are_parsed() -> None:
    text = (
        "Keeps Things. It does.\n\n"
        'Li et al., "A: Title\nover Lines" (2024),\narXiv:2404.14469, section 4.1, eq. 3 (window\n'
        'of 32). As Corallo and Papotti, "FINCH" (2024), arXiv:2408.00167; also Ann de Boer, '
        'B. Lee and Cy Ng, "Third" (1979).'
    )
    first, second, third = citations(text)
    assert first == Citation(
        "Li et al.", "A: Title over Lines", 2024, "2404.14469", "section 4.1, eq. 3"
    )
    assert (second.authors, second.arxiv, second.where) == ("Corallo and Papotti", "2408.00167", "")
    assert (third.authors, third.year, third.arxiv) == ("Ann de Boer, B. Lee and Cy Ng", 1979, "")
    assert str(third) == 'Ann de Boer, B. Lee and Cy Ng, "Third" (1979)'


def test_text_without_a_citation_has_none() -> None:
    assert citations('Says "so" (see arXiv:2404.14469). In 2024, "that" happened.') == []


@pytest.mark.extended
def test_list_names_everything(run: Run) -> None:
    result = run("policy", "list")
    assert result.exit_code == 0
    for name in (*PRESETS, *part_names()):
        assert re.search(rf"^{name}\b", result.stdout, re.MULTILINE), name
    reply = document(run("policy", "list", "--json"))
    assert [preset["name"] for preset in reply["presets"]] == list(PRESETS)
    assert {part["slot"] for part in reply["parts"]} == {*FAMILIES, "protect"}


@pytest.mark.extended
def test_list_entries_equal_their_pages(run: Run) -> None:
    result = document(run("policy", "list", "--json"))
    for preset in result["presets"][::15]:
        page = document(run("policy", "show", preset["name"], "--json"))["preset"]
        assert preset == {name: page[name] for name in ("name", "sentence", "full")}
        assert preset["sentence"] == PRESETS[preset["name"]]
    for part in result["parts"][::17]:
        assert document(run("policy", "show", part["name"], "--json"))["part"] == part


def test_every_page_has_a_summary_and_meanings() -> None:
    for page in part_docs():
        assert page.summary and len(page.summary) < 200
        assert all(field.meaning for field in page.fields), page.name


def test_presets_are_written_out() -> None:
    for page in preset_docs():
        assert Policy.parse(page.full) == Policy.parse(page.name)


def test_show_prints_parameters_and_papers_of_a_part(run: Run) -> None:
    shown = run("policy", "show", "sensitivity").stdout
    for word in ("a budget", "alpha", "2.0", "0 is uniform", "open", '"larder"', "2509.17396"):
        assert word in shown


def test_show_prints_preset_and_part_of_one_name(run: Run) -> None:
    shown = run("policy", "show", "snapkv").stdout
    assert "a preset" in shown and "a scorer" in shown
    assert document(run("policy", "show", "snapkv", "--json")).keys() >= {"preset", "part"}


def test_show_prints_the_full_sentence(run: Run) -> None:
    sentence = "kvzip > quantized(bits=8)"
    shown = run("policy", "show", sentence).stdout
    assert str(Policy.parse(sentence)) in shown and f"{sentence}, a sentence" in shown
    page = document(run("policy", "show", sentence, "--json"))["policy"]
    assert page["sentence"] == "whole() > reconstruct() > global() > quantized(bits=8)"
    assert "a '(' is never closed" in complaint(run("policy", "show", "snapkv("), 2)


def test_show_of_an_unknown_name_suggests_the_nearest(run: Run) -> None:
    assert "Did you mean 'snapkv'" in complaint(run("policy", "show", "snapvk"), 2)


def test_cite_prints_the_papers_of_a_policy(run: Run) -> None:
    shown = run("policy", "cite", "epicache").stdout
    assert 'patched: Kim et al., "EpiCache' in shown and "FINCH" not in shown
    result = document(run("policy", "cite", "keydiff() > uniform()", "--json"))
    assert "2504.15364" in {citation["arxiv"] for citation in result["citations"]}
    assert "pooled: Feng et al." in run("policy", "cite", "pooled").stdout


@pytest.mark.parametrize(
    ("policy", "used", "unused"),
    [
        ("epicache", ["2509.17396"], ["2410.01518", "2408.00167", "2505.23416"]),
        ("infinipot_summarize", ["2410.01518"], ["2408.00167"]),
        ("exact_question", ["2408.00167"], ["2410.01518"]),
        ("razor_attention", ["2407.15891"], ["2410.10819", "2505.23416"]),
        ("duo_attention", ["2410.10819"], ["2407.15891", "2505.23416"]),
        ("rocketkv", ["2502.14051"], ["2504.00970", "2501.06807", "2502.14866"]),
        ("icecache", ["2604.10539"], ["2502.14051", "2504.00970", "2501.06807", "2502.14866"]),
        ("arkvale", [""], ["2406.10774"]),
        ("kivi", ["2402.02750"], ["2401.18079"]),
        ("uniform() > quantized(outliers=0.01)", ["2401.18079"], []),
        ("snapkv() > mean()", ["2404.14469"], []),
    ],
)
def test_policy_cites_the_papers_of_the_values_that_it_uses(
    run: Run, policy: str, used: list[str], unused: list[str]
) -> None:
    result = document(run("policy", "cite", policy, "--json"))
    cited = {citation["arxiv"] for citation in result["citations"]}
    assert cited >= set(used) and not cited & set(unused)


def test_part_cites_the_papers_of_all_its_values(run: Run) -> None:
    result = document(run("policy", "cite", "patched", "--json"))["citations"]
    assert [(one["arxiv"], one["values"]) for one in result] == [
        ("2509.17396", []),
        ("2410.01518", ['prompt="summarize"']),
        ("2408.00167", ['prompt="question"']),
        ("2503.04973", ['prompt="task"']),
        ("", ['prompt="guidance"']),
    ]


def test_values_of_citations_are_parameters_of_their_part() -> None:
    for page in part_docs():
        for value in (value for citation in page.citations for value in citation.values):
            name = re.split("=| > ", value)[0]
            assert name in {field.name for field in page.fields}, f"{page.name}: {value}"


@pytest.mark.parametrize(
    "name", ["drop", "episodic", "whole", "single", "protect", "whole() > random() > unlimited()"]
)
def test_parts_without_a_paper_say_so(run: Run, name: str) -> None:
    assert run("policy", "cite", name).stdout == f"{name}: no paper\n"
    assert document(run("policy", "cite", name, "--json"))["citations"] == []
    if name.isidentifier():
        assert run("policy", "show", name).stdout.endswith("\nno paper\n")


def test_list_names_every_paper_of_a_part(run: Run) -> None:
    rows = run("policy", "list").stdout.splitlines()
    for name in ("drop", "episodic", "whole", "single", "protect"):
        assert next(r for r in rows if r.startswith(name)).rstrip().endswith("no paper")
    shown = " ".join(" ".join(rows).split())
    for paper in ("2509.17396", "2410.01518", "2408.00167"):
        assert paper in shown
    assert "Corallo and Papotti" in shown


def test_several_authors_are_shortened() -> None:
    [one, two] = citations('A. Ba and C. Da, "T" (2020). E. Fa, G. Ha and I. Ja, "U" (2021).')
    assert (one.short, two.short) == ("A. Ba and C. Da 2020", "E. Fa et al. 2021")
