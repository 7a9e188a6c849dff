"""Flags of `vllm serve`: each is an option of `larder serve`, or refused with the way out."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from cli_results import Run, complaint
from larder.cli.serve import ServeOptions, serve
from larder.cli.vllm_flags import ANSWERS

FLAG = re.compile(r"--[a-z0-9-]+")
OPTIONS = {f"--{field.name.replace('_', '-')}" for field in fields(ServeOptions)}
PAGE = Path(__file__).parents[2] / "docs/from_vllm.md"


def documented() -> set[str]:
    """Flags in the first column of docs/from_vllm.md."""
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {flag for row in rows for flag in FLAG.findall(row)}


def test_documented_flags_are_options_or_have_an_answer() -> None:
    assert len(ANSWERS) > 120
    assert documented() - OPTIONS == set(ANSWERS)
    assert len(documented() & OPTIONS) > 8


def test_answers_name_options_that_exist() -> None:
    named = {flag for answer in ANSWERS.values() for flag in FLAG.findall(answer)}
    assert named and named <= OPTIONS and not OPTIONS & set(ANSWERS)


def test_help_table_maps_vllm_flags_to_options() -> None:
    rows = [
        line.strip().split("  ", maxsplit=1)
        for line in (serve.__doc__ or "").splitlines()
        if line.strip().startswith("--")
    ]
    assert len(rows) > 12
    for flag, given in rows:
        assert set(FLAG.findall(flag)) <= set(ANSWERS)
        assert set(FLAG.findall(given)) <= OPTIONS | set(ANSWERS)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--gpu-memory-utilization", "0.9"), "Give --kv-budget"),
        (("--tensor_parallel_size=2",), "give --ray --replicas N"),
        (("--no-enable-prefix-caching",), "prefixes are always cached"),
        (("--compilation-config.mode", "3"), "--compilation-config.mode is a flag of vllm serve"),
        (("-tp", "2"), "-tp (--tensor-parallel-size) is a flag of vllm serve. A replica runs on"),
        (("-dp=2",), "-dp (--data-parallel-size) is a flag of vllm serve. Give --ray"),
        (("-O3",), "-O (--optimization-level) is a flag of vllm serve. Leave it out"),
        (("-q", "awq"), "-q (--quantization) is a flag of vllm serve. Leave it out"),
        (("--api-key", "secret"), "Give --keys FILE"),
        (("Qwen/Qwen3-0.6B",), "The model is named by --model"),
    ],
)
def test_command_line_of_vllm_is_refused_with_the_way_out(
    run: Run, words: tuple[str, ...], reason: str
) -> None:
    line = complaint(run("serve", *words), 2)
    assert reason in line and "secret" not in line


def test_other_unknown_options_and_commands_name_no_flag_of_vllm(run: Run) -> None:
    for words in (("serve", "--nope"), ("chat", "--tensor-parallel-size", "2")):
        line = complaint(run(*words), 2)
        assert "No such option" in line and "vllm" not in line
