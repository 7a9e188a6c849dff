"""The installed program itself: entry points, silence when piped, quick help."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import larder
from cli_results import CAT, Run
from larder.cli.errors import handle_stdout_error

FULL_DISK = Path("/dev/full")
WAY_OUT = "send it to a file, or to /dev/null.\n"


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "larder", *map(str, words)]


def program(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m larder` the way a user would, with its output piped."""
    return subprocess.run(command(*words), capture_output=True, text=True, check=False)


@pytest.mark.extended
def test_error_of_the_program_is_one_line(tmp_path: Path) -> None:
    done = program("ask", tmp_path / "no.json", "-q", CAT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("larder: ") and done.stderr.count("\n") == 1


@pytest.mark.extended
@pytest.mark.skipif(not FULL_DISK.exists(), reason="this system has none")
@pytest.mark.parametrize(
    ("words", "buffered"),
    [
        # More than a buffer holds, so that writing fails and not the last flush.
        (("policy", "list", "--json"), ""),
        *((words, buffered) for words in (("--version",), ("--help",)) for buffered in ("", "1")),
    ],
)
def test_stdout_on_a_full_disk_is_reported_in_one_line(
    words: tuple[str, ...], buffered: str
) -> None:
    with FULL_DISK.open("w") as out:
        done = subprocess.run(
            command(*words),
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
        )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("larder: The output cannot be written (No space left")


@pytest.mark.extended
@pytest.mark.skipif(os.name == "nt", reason="a shell that closes streams")
@pytest.mark.parametrize(
    ("closed", "words", "code"),
    [
        (">&-", ("--version",), 1),
        ("2>&-", ("policy", "cite", "snapkv"), 0),
        (">&- 2>&-", ("--version",), 1),
    ],
)
def test_closed_stdout_is_an_error_and_closed_stderr_is_not(
    closed: str, words: tuple[str, ...], code: int
) -> None:
    line = f"{shlex.join(command(*words))} {closed}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr == ("larder: stdout is closed: " + WAY_OUT if closed == ">&-" else "")
    assert ("2404.14469" in done.stdout) == (code == 0)


def test_closed_pipe_is_silent() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    for buffered, words in (("", ("--version",)), ("1", ("--help",))):
        environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
        done = subprocess.run(
            command(*words), stdout=writes, stderr=subprocess.PIPE, check=False, env=environment
        )
        assert (done.returncode, done.stderr) == (1, b"")
    os.close(writes)


def test_file_error_is_not_a_stdout_error() -> None:
    with pytest.raises(FileNotFoundError):
        handle_stdout_error(FileNotFoundError(2, "No such file", "there.txt"))


def test_help_loads_no_model_library() -> None:
    code = (
        "import sys; from larder.cli.main import app; app(['--help'], standalone_mode=False); "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_missing_command_prints_help(run: Run) -> None:
    for words in ((), ("policy",)):
        result = run(*words)
        assert result.exit_code == 0 and "Usage:" in result.stdout
    assert run("--version").stdout == f"larder {larder.__version__}\n"


def test_every_command_shows_its_options(run: Run) -> None:
    for name in ("ask", "eval", "chat"):
        shown = run(name, "--help").stdout
        for option in ("--model", "--policy", "--budget", "--block", "--json", "--temperature"):
            assert option in shown, (name, option)
