"""Studies are read as written, and unknown names are refused with the nearest name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from larder import LarderError, Policy
from larder.core import InputError, UnknownName, UsageError
from larder.session import PRESETS
from larder_bench.execution.runner import parse_measure, validate_study
from larder_bench.results.tables import SCALES
from larder_bench.studies.cells import cells_of, distinct_cells
from larder_bench.studies.methods import parse_variant
from larder_bench.studies.study import CONTROLS, Study, StudyTask, read_study, study_names

TEXT = """
name = "tiny"
claim = "None."
measure = ["forced", "generated"]
budgets = ["1/4", "64"]
files = 2
first_seed = 3
policies = ["snapkv", "kivi:exact"]
controls = ["full", "rag_2k"]
[[tasks]]
spelling = "passkey()"
tokens = [200, 300]
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return str(path)


def test_study_file_is_parsed(tmp_path: Path) -> None:
    study = read_study(written(tmp_path, TEXT))
    assert study.tasks == (StudyTask("passkey()", (200, 300)),)
    assert (study.models, study.matched, study.files) == (("seed",), ("bytes", "tokens"), 2)
    assert study.measure == ("forced", "generated")
    assert read_study(written(tmp_path, TEXT.replace('controls = ["full", "rag_2k"]', ""))) == (
        Study(**{**vars(study), "controls": CONTROLS})
    )


def test_every_cell_occurs_once(tmp_path: Path) -> None:
    cells = cells_of(read_study(written(tmp_path, TEXT)), "seed")
    # Lengths, seeds, measures; three subjects at two budgets, the full cache at its own alone.
    # Each at equal bytes and at equal tokens; text that is looked up comes to the same.
    assert len(cells) == 2 * 2 * 2 * 2 * (3 * 2 + 1)
    assert len({tuple(cell.head({}).items()) for cell in cells}) == len(cells)
    assert [cell.seed for cell in cells[:28]] == [3] * 28 and cells[28].seed == 4
    assert len(distinct_cells(cells)) == 2 * 2 * 2 * (2 * 2 * 2 + 2 + 1)
    assert distinct_cells(distinct_cells(cells)) == distinct_cells(cells)
    assert {cell.budget for cell in cells if cell.subject.name == "full"} == {"1/1"}


def test_policy_named_as_control_too_is_one() -> None:
    study = Study(
        "s", (StudyTask("passkey", (99,)),), policies=("random", "full"), budgets=("1/2",)
    )
    assert len(cells_of(study, "seed")) == 9 * 6 * 2


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("claim =", "clam =", UnknownName, "Did you mean 'claim'"),
        ("spelling =", "speling =", UnknownName, "Did you mean 'spelling'"),
        ("tokens = [200, 300]", "", UsageError, "missing required field `tokens`"),
        ("files = 2", 'files = "2"', UsageError, "Expected `int`, got `str` - at `.*files`"),
        ("files = 2", "files = 0", UsageError, "files must be 1 or more"),
        ('name = "tiny"', 'name = "a/b"', UsageError, "must be a valid file name"),
        ('name = "tiny"', 'name = ""', UsageError, "must be a valid file name"),
        ("first_seed = 3", "first_seed = -3", UsageError, "first_seed must be 0 or more, got -3"),
        ('"rag_2k"', '"rag2k"', UnknownName, "No control named 'rag2k'. Did you mean 'rag_2k'"),
        ("files = 2", 'matched = "byte"', UnknownName, "Did you mean 'bytes'"),
        ('name = "tiny"', "", UsageError, "missing required field `name`"),
        ("files = 2", "models = []", UsageError, "names no models"),
        ("files = 2", "matched = []", UsageError, "names no matched"),
        ('name = "tiny"', "name = tiny", InputError, "TOML"),
        ("snapkv", "snapvk", UnknownName, "Did you mean 'snapkv'"),
        ("kivi:exact", "kivi:exakt", UnknownName, "Did you mean 'exact'"),
        ("passkey()", "paskey()", UnknownName, "Did you mean 'passkey'"),
        ("generated", "generate", UnknownName, "Did you mean 'generated'"),
        ('"64"', '"5/4"', UsageError, "above 0"),
        ('"rag_2k"', '"rag_2k(size=4)"', UnknownName, "no parameter 'size'"),
    ],
)
def test_invalid_studies_are_refused(
    tmp_path: Path, old: str, new: str, kind: type[LarderError], message: str
) -> None:
    path = written(tmp_path, TEXT.replace(old, new, 1))
    with pytest.raises(kind, match=message.replace("(", r"\(")):
        validate_study(read_study(path))


@pytest.mark.extended
def test_studies_are_found_by_name() -> None:
    with pytest.raises(UnknownName, match="No study named 'nothing_like_it'"):
        read_study("nothing_like_it")
    for name in study_names():
        study = read_study(name)
        assert study.name == name
        # Where nobody asks a question, no control can need one; prompts and caches of one reading
        # are held against it, and what is recalled against what exact search recalls.
        wanted = {"forced": CONTROLS, "generated": CONTROLS, "recall": CONTROLS[3:4]}
        wanted |= {"prompts": (), "divergence": ()}
        kind = study.measure[0].partition("(")[0]
        controls = wanted.get(kind, CONTROLS[:2]) if study.policies else CONTROLS[:1]
        presets = {policy.split(" > ")[0] for policy in study.policies}
        if kind in ("forced", "generated") and presets == {"larder"}:
            controls = CONTROLS[:1]  # goals in points of the full cache
        if name == "icecache_tasks":  # the table of the paper has exact search
            controls = (*controls, "exact_topk")
        assert set(study.controls) == set(controls), name
        assert study.claim and validate_study(study)
        if (paper := study.paper) is not None:
            assert paper.differs and re.search(r'[^"]+, ".+" \(\d{4}\), .+, .+', paper.cite)


def test_preset_variants_are_parsed() -> None:
    assert str(parse_variant("h2o_blockwise:whole").policy) == str(parse_variant("h2o").policy)
    assert str(parse_variant("h2o:blockwise").policy) == str(parse_variant("h2o_blockwise").policy)
    both = parse_variant("kivi:blockwise:exact")
    assert both.name == "kivi:blockwise:exact"
    assert "> blockwise() >" in str(both.policy) and "quantized" not in str(both.policy)
    assert str(parse_variant("d2o_blockwise:whole").policy) == str(parse_variant("d2o").policy)
    with pytest.raises(UnknownName, match="Did you mean 'whole'"):
        parse_variant("h2o:hole")


def test_policies_act_as_rows_spell_them() -> None:
    """Bits that were measured of a model take no place of those in the spelling."""
    assert Policy.parse("larder").unnamed == {"bits"}
    policy = parse_variant("larder").policy
    assert policy == Policy.parse("larder") and not policy.unnamed


BASELINES = ("kvzip_blockwise", "infinipot_summarize", "random")
COSTS = ("reading", "stages", "decode", "cost")  # measures of bytes and seconds alone


def test_baselines_have_the_layer_budgets_of_epicache() -> None:
    epicache = parse_variant("epicache").policy
    assert "protect(sinks=0, recent=0)" in PRESETS["epicache"] and "floor=" in PRESETS["epicache"]
    for name in BASELINES:
        twin = parse_variant(f"{name}:sensitivity").policy
        assert (twin.budget, twin.protect) == (epicache.budget, epicache.protect)
        assert twin.schedule == parse_variant("random").policy.schedule
    alone = parse_variant("epicache:pooled").policy
    assert alone == replace(epicache, budget=parse_variant("snapkv_pooled").policy.budget)


def test_every_study_of_epicache_has_baselines_under_its_layer_budgets() -> None:
    asked = [
        study
        for study in map(read_study, study_names())
        if "epicache" in study.policies and study.measure[0] not in COSTS
    ]
    assert len(asked) > 15
    for study in asked:
        assert {f"{name}:sensitivity" for name in BASELINES} <= set(study.policies), study.name


def test_d2o_tables_have_a_random_baseline() -> None:
    papers = [study.paper for study in map(read_study, study_names()) if study.paper is not None]
    tables = [one.values for one in papers if "2406.13035" in one.cite]
    answers = [[one for one in table if one.scale in SCALES] for table in tables]
    for values in filter(None, answers):
        places = {(v.budget, v.task) for v in values if v.policy in ("d2o_blockwise", "d2o")}
        beside = {(v.budget, v.task) for v in values if "random" in (v.policy, v.above)}
        assert places == beside and places


def test_measure_spelling_is_parsed() -> None:
    assert parse_measure("fidelity(following=8)") != parse_measure("fidelity")
    with pytest.raises(LarderError, match="not one measure"):
        parse_measure("forced > generated")
