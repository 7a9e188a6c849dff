"""Errors of commands: one line on stderr, and the exit code of their kind."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, BloomForCausalLM
from typer.testing import CliRunner

from cli_results import CAT, Run, complaint, document, write
from larder.cli.errors import FileAccessError
from larder.cli.options import OutputOptions, command

SNAPKV = ("--policy", "snapkv_blockwise")
SEED_FOLDER = str(files("larder.models") / "seed")  # not taken for the model loaded once


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.json", "", "is empty"),
        ("blank.txt", " \n", "is blank"),
        ("broken.json", '{"messages": [', "broken JSON at line 1"),
        ("roles.json", [{"role": "robot", "content": "Hi"}], "unknown role 'robot'"),
        ("shape.json", {"words": []}, "no known shape"),
        ("none.json", {"messages": []}, "list of messages is empty"),
        ("table.csv", "a,b", "must end in one of"),
        ("table", "a,b", "has no ending: a file must end in one of"),
    ],
)
def test_invalid_conversation_files_are_refused(
    run: Run, tmp_path: Path, name: str, content: object, reason: str
) -> None:
    path = write(tmp_path / name, content)
    for words in (("ask", path, "-q", CAT), ("eval", path)):
        line = complaint(run(*words), 1)
        assert reason in line and name in line


def test_missing_conversation_file_is_refused(run: Run, tmp_path: Path) -> None:
    assert "does not exist" in complaint(run("ask", tmp_path / "no.json", "-q", CAT), 1)
    assert "does not exist" in complaint(run("eval", tmp_path / "no.json"), 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--budget", "20", *SNAPKV), "smaller than sinks + recent = 4 + 32"),
        (("--budget", "48", "--block", "64", *SNAPKV), "larger than the budget of 48"),
        (("--policy", "snapvk"), "--policy: No policy part or preset named 'snapvk'. Did you mean"),
        (("--policy", "snapkv(windw=3)"), "Did you mean 'window'?"),
        (("--policy", "snapkv(kernel=4)"), "--policy: snapkv.kernel must be odd, got 4"),
        (("--policy", "snapkv(window="), "does not parse"),
        (("--policy", "pooled() > snapkv()"), "out of order"),
        (("--block", "0", *SNAPKV), "--block must be at least 1 token, got 0"),
        (("--block", "-3", *SNAPKV), "--block must be at least 1 token, got -3"),
        (("--policy", "snapkv() > pooled(tokens=48)", "--budget", "40"), "give one of the two"),
        (("--policy", "full", "--block", "64"), "reads no blocks"),
        (("--policy", "full", "--budget", "64"), "contradicts unlimited()"),
        (("--budget", "many", *SNAPKV), "--budget 'many' is not a size"),
        (("--budget", "0", *SNAPKV), "must be above 0"),
        (("--budget", "1KiB", *SNAPKV), "holds no token"),
        (("--temperature", "-1"), "--temperature must be a finite number, 0 or more, got -1"),
        (("--temperature", "nan"), "--temperature must be a finite number"),
        (("--top-p", "0"), "--top-p must be in (0, 1], got 0"),
        (("--top-k", "-1"), "--top-k must be 0 (all) or more, got -1"),
        (("--seed", str(1 << 64)), "--seed must fit into 64 bits"),
        (("--max-new-tokens", "0", *SNAPKV), "--max-new-tokens must be at least 1, got 0"),
        (("--dtype", "int3", "--model", SEED_FOLDER), "dtype must be"),
        (("--device", "oven", "--model", SEED_FOLDER), "device must be a device that torch knows"),
        (("--device", "meta", "--model", SEED_FOLDER), "device must be a device that computes"),
    ],
)
def test_invalid_options_are_refused(
    run: Run, talk: Path, options: tuple[str, ...], reason: str
) -> None:
    assert reason in complaint(run("ask", talk, "-q", CAT, *options), 2)


def test_refusal_names_both_policies(run: Run, talk: Path) -> None:
    line = complaint(run("eval", talk, *SNAPKV, "--against", "snapvk"), 2)
    assert line.startswith("--against: ") and "Did you mean 'snapkv'" in line


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("ask",), "Missing option '--question'"),
        (("ask", "-q", "?"), "Nothing to read was given: name a FILE"),
        (("ask", "talk.json"), "Missing option"),
        (("ask", "talk.json", "-q", "?", "--block", "few"), "Invalid value"),
        (("ask", "talk.json", "-q", "?", "--nope"), "No such option: --nope"),
        (("nope",), "No such command 'nope'"),
        (("policy", "nope"), "No such command 'nope'"),
    ],
)
def test_wrong_usage_is_refused_with_a_hint_to_help(
    run: Run, words: tuple[str, ...], reason: str
) -> None:
    line = complaint(run(*words), 2)
    assert reason in line and "--help" in line


def test_question_longer_than_the_budget_is_refused(run: Run, talk: Path) -> None:
    result = run("ask", talk, "-q", "word " * 80, *SNAPKV, "--budget", "48")
    assert "more than the budget of 48" in complaint(result, 1)
    full = ("--policy", "full", "--max-new-tokens", "2")
    assert run("ask", talk, "-q", "word " * 80, *full).exit_code == 0


def test_blank_question_is_refused(run: Run, talk: Path) -> None:
    assert "question is empty" in complaint(run("ask", talk, "-q", " "), 2)


def test_undecodable_question_is_refused(run: Run, talk: Path) -> None:
    assert "not valid UTF-8" in complaint(run("ask", talk, "-q", "\udcff"), 2)


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (("ask", "no.json", "-q", "?"), 1, "InputError"),
        (("ask", "no.json"), 2, "UsageError"),
        (("policy", "show", "nope"), 2, "UnknownName"),
        (("eval", "no.json"), 1, "InputError"),
    ],
)
def test_json_errors_have_type_and_message(
    run: Run, words: tuple[str, ...], code: int, kind: str
) -> None:
    result = run(*words, "--json")
    reply = document(result)
    assert (result.exit_code, reply["schema"], reply["error"]["type"]) == (code, 1, kind)
    assert reply["error"]["message"] in result.stderr


def test_file_access_error_names_the_path(tmp_path: Path) -> None:
    app, path = typer.Typer(), tmp_path / "none" / "file"

    @app.command()
    @command
    def fails(options: OutputOptions) -> None:
        del options
        path.write_text("text")

    result = CliRunner().invoke(app, ["--json"])
    assert result.exit_code == 1 and document(result)["error"]["type"] == "FileAccessError"
    assert f"{path} cannot be used (No such file or directory): name another" in result.stderr
    assert isinstance(CliRunner().invoke(app, ["--debug"]).exception, FileAccessError)


def test_file_access_error_at_home_names_larder_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LARDER_HOME", str(tmp_path / "home" / "larder"))
    for path in (tmp_path / "home", tmp_path / "home" / "larder" / "store"):
        message = str(FileAccessError.of(OSError(13, "Permission denied", str(path))))
        assert f"{path} cannot be used (Permission denied): set LARDER_HOME to another" in message
    beside = FileAccessError.of(OSError(13, "Permission denied", str(tmp_path / "other")))
    assert "LARDER_HOME" not in str(beside)


def test_debug_raises_the_original_error(run: Run) -> None:
    result = run("ask", "no.json", "-q", "?", "--debug")
    assert type(result.exception).__name__ == "InputError"
    assert "larder: no.json does not exist" in result.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The bundled model as a local folder."""
    return Path(shutil.copytree(str(files("larder.models") / "seed"), tmp_path / "model"))


def test_model_without_an_attention_interface_is_refused(run: Run, talk: Path, copy: Path) -> None:
    config = BloomConfig(vocab_size=8192, hidden_size=16, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(copy)
    assert "AttentionInterface" in complaint(run("ask", talk, "-q", CAT, "--model", copy), 1)


def test_model_folder_without_weights_is_refused(run: Run, talk: Path, copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "no weights" in complaint(run("ask", talk, "-q", CAT, "--model", copy), 1)


def test_non_finite_weights_are_refused(run: Run, talk: Path, copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert "not finite" in complaint(run("ask", talk, "-q", CAT, "--model", copy), 1)


def test_missing_model_folder_is_refused(run: Run, talk: Path, tmp_path: Path) -> None:
    line = complaint(run("ask", talk, "-q", CAT, "--model", tmp_path / "no"), 1)
    assert "does not exist: check its name" in line


def test_folder_without_a_model_is_refused(run: Run, talk: Path, tmp_path: Path) -> None:
    assert "no config.json" in complaint(run("ask", talk, "-q", CAT, "--model", tmp_path), 1)


def test_unreachable_hub_name_is_refused(run: Run, talk: Path) -> None:
    result = run("ask", talk, "-q", CAT, "--model", "nobody/nothing", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["type"] == "ModelError"
    assert len(result.stderr.splitlines()) == 1
