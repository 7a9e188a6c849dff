"""Presets: those under a paper's bare name are the paper's method."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from larder import Policy
from larder.core import parse
from larder.prefill import Blockwise, Whole
from larder.session import PRESETS
from larder_bench.results.rows import read_rows
from larder_bench.studies.methods import parse_variant
from larder_bench.studies.study import CHECKOUT

READ_WHOLE = (
    *("snapkv", "adakv", "pyramidkv", "chunkkv", "chunkkv_reuse", "criticalkv", "prefixkv"),
    *("windowkv", "kvzip", "kvcompose", "expected", "h2o", "tova", "laq", "dapq"),
    *("razor_attention", "kivi", "mikv", "arkv", "think", "minicache"),
)
READ_IN_BLOCKS = (
    "streaming_llm",
    "keydiff",
    "infinipot",
    "caote",
    "roco",
    "sirllm",
    "lacache",
    "finch",
)
RENAMED = frozenset(
    {*READ_WHOLE, "infinipot", "infinipot_summarize", "snapkv_pooled"}
    | {f"{name}_blockwise" for name in ("snapkv", "kvzip", "h2o", "d2o", "kivi")}
)


def part_names(sentence: str) -> list[str]:
    return [call.name for call in parse(sentence)]


@pytest.mark.parametrize("name", [*READ_WHOLE, "elastic_cache", "headkv", "qaq"])
def test_presets_of_whole_prompt_papers_are_whole(name: str) -> None:
    assert isinstance(Policy.parse(name).schedule, Whole)


@pytest.mark.parametrize("name", READ_IN_BLOCKS)
def test_presets_of_blockwise_papers_are_blockwise(name: str) -> None:
    assert isinstance(Policy.parse(name).schedule, Blockwise)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("snapkv", "whole() > snapkv() > uniform()"),
        ("adakv", "whole() > snapkv() > ada(safeguard=0.2)"),
        ("kvzip", "whole() > reconstruct() > global()"),
        (
            "d2o",
            "whole() > protect(sinks=4, recent=0.25) > column_mass() > inverse_variance() > "
            "fold_ema() > every_step()",
        ),
        (
            "infinipot",
            "blockwise() > protect(sinks=0, recent=0) > infinipot() > uniform() > compact()",
        ),
    ],
)
def test_bare_preset_name_is_the_published_form(name: str, sentence: str) -> None:
    assert str(Policy.parse(name)) == str(Policy.parse(sentence))


def test_blockwise_presets_are_named_blockwise() -> None:
    forms = [name for name in PRESETS if name.endswith("_blockwise")]
    methods = ("snapkv", "kvzip", "h2o", "d2o", "kivi")
    assert forms == [f"{name}_blockwise" for name in methods]
    for name in forms:
        assert isinstance(Policy.parse(name).schedule, Blockwise)
        assert isinstance(Policy.parse(name.removesuffix("_blockwise")).schedule, Whole)


def committed() -> Iterator[tuple[str, str]]:
    """The policies of committed rows, and their sentences."""
    for path in sorted((CHECKOUT / "studies" / "results").glob("*.jsonl.zst")):
        for row in read_rows(path):
            if {"policy", "spelling"} <= row.keys():
                yield row["policy"], row["spelling"]


@pytest.mark.extended
def test_committed_rows_match_their_policy_names() -> None:
    rows = {(name, sentence) for name, sentence in committed() if name.partition(":")[0] in RENAMED}
    assert len(rows) > 10
    for name, sentence in sorted(rows):
        assert part_names(sentence) == part_names(str(parse_variant(name).policy)), name
