"""The installed program itself: entry points, silence when piped, quick help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import larder
from commands import CAT, SMALL, Run


def program(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m larder` the way a user would, with its output piped."""
    line = [sys.executable, "-m", "larder", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_piped_it_says_nothing_but_the_result(talk: Path) -> None:
    done = program("ask", talk, "-q", CAT, *SMALL, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["schema"] == 1


def test_an_error_is_one_line(tmp_path: Path) -> None:
    done = program("ask", tmp_path / "no.json", "-q", CAT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("larder: ") and done.stderr.count("\n") == 1


def test_help_loads_no_model_library() -> None:
    code = (
        "import sys; from larder.cli.main import app; app(['--help'], standalone_mode=False); "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_without_a_command_it_helps(run: Run) -> None:
    for words in ((), ("policy",)):
        result = run(*words)
        assert result.exit_code == 0 and "Usage:" in result.stdout
    assert run("--version").stdout == f"larder {larder.__version__}\n"


def test_every_command_shows_its_options(run: Run) -> None:
    for name in ("ask", "eval", "chat"):
        shown = run(name, "--help").stdout
        for option in ("--model", "--policy", "--budget", "--block", "--json", "--temperature"):
            assert option in shown, (name, option)
