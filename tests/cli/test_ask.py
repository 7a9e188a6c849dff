"""`larder ask`: answers on stdout, one document with --json, a page with --explain."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cli_results import CAT, SMALL, WINDOW, Run, complaint, document, write
from larder import Answer, Engine

ONE_FILE = {
    "schema",
    "policy",
    "model",
    "context_tokens",
    "budget_tokens",
    "full_kv_bytes",
    "kv_bytes",
    "active_kv_bytes",
    "layers",
    "peak_kv_bytes",
    "prefill_seconds",
    "setup_seconds",
    "answers",
    "summary",
}


@pytest.mark.extended
def test_stdout_has_the_answer_only(run: Run, talk: Path) -> None:
    result = run("ask", talk, "-q", CAT, "--policy", "full", "--max-new-tokens", "8")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Mira\n", "")


def test_terminal_shows_the_answering_model(
    run: Run, talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = "larder.cli.ask.progress_console"
    monkeypatch.setattr(console, lambda: Console(file=sys.stderr, width=300))
    result = run("ask", talk, "-q", CAT, "--policy", "full", "--max-new-tokens", "8")
    assert result.stdout == "Mira\n"
    assert "the model is seed" in result.stderr and "--model smollm2" in result.stderr


def test_several_answers_are_printed_with_their_questions(run: Run, talk: Path) -> None:
    result = run("ask", talk, "-q", CAT, "-q", WINDOW, "--policy", "full")
    assert result.stdout == f"> {CAT}\nMira\n\n> {WINDOW}\nJuly 5\n"


def test_json_document_has_sizes_scores_and_answers(run: Run, talk: Path) -> None:
    result = document(run("ask", talk, "-q", CAT, "-q", "How is it?", *SMALL, "--json"))
    assert result.keys() == ONE_FILE
    assert (result["schema"], result["model"], result["budget_tokens"]) == (1, "seed", 48)
    assert result["policy"].startswith("single() > blockwise(tokens=48) > protect(")
    assert result["active_kv_bytes"] == result["kv_bytes"] < result["full_kv_bytes"]
    assert result["peak_kv_bytes"] > result["kv_bytes"]
    known, unknown = result["answers"]
    assert (known["expected"], known["kind"]) == ("Mira", "pets")
    assert known.keys() >= {"exact", "f1", "f1_stemmed", "decode_seconds", "new_tokens"}
    assert unknown.keys() == {"question", "answer", "decode_seconds", "new_tokens"}
    assert (result["summary"]["questions"], result["summary"]["errors"]) == (2, 0)


@pytest.mark.extended
def test_default_policy_depends_on_the_file(run: Run, talk: Path, tmp_path: Path) -> None:
    text = write(tmp_path / "text.txt", "Mira is a cat. Vera is a vet. " * 12)
    few = ("-q", CAT, "--budget", "64", "--max-new-tokens", "2", "--json")
    assert document(run("ask", talk, *few))["policy"].startswith("episodes(")
    assert "> reconstruct(" in document(run("ask", text, *few))["policy"]
    given = document(run("ask", text, *few, "--policy", "random"))
    assert "> random(" in given["policy"]


def test_offloaded_bytes_and_recalled_pages_are_reported(run: Run, talk: Path) -> None:
    policy = (
        "protect(sinks=2, recent=4) > uniform() > park() > flat(page=4, dense=0) > lagged(tokens=4)"
    )
    result = document(run("ask", talk, "-q", CAT, "--policy", policy, "--budget", "16", "--json"))
    assert result["active_kv_bytes"] < result["kv_bytes"]
    [answer] = result["answers"]
    assert answer["pages_recalled"] > 0 and 0 <= answer["page_hit_rate"] < 1
    assert result["summary"]["pages_recalled"] == answer["pages_recalled"]


def test_layers_beyond_the_budget_are_reported(run: Run, talk: Path) -> None:
    parts = "protect(sinks=2, recent=4) > sinks_and_window(sinks=2) > uniform() > park()"
    policy = f"{parts} > flat(page=4, dense=2) > lagged(tokens=4)"
    result = document(run("ask", talk, "-q", CAT, "--policy", policy, "--budget", "25%", "--json"))
    layers, full = result["layers"], result["full_kv_bytes"]
    dense = [each for each in layers if each["coverage"] == "dense"]
    assert [each["layer"] for each in dense] == [0, 1]
    assert {each["coverage"] for each in layers[2:]} == {"budget"}
    assert sum(each["active_kv_bytes"] for each in layers) == result["active_kv_bytes"]
    assert sum(each["full_kv_bytes"] for each in layers) == full
    assert result["active_kv_bytes"] > 0.4 * full  # of which the dense layers take
    assert all(each["active_kv_bytes"] >= each["full_kv_bytes"] for each in dense)
    held = sum(each["active_kv_bytes"] for each in layers[2:])
    assert held <= 0.3 * sum(each["full_kv_bytes"] for each in layers[2:])


def test_answers_name_their_episode(run: Run, talk: Path) -> None:
    policy = 'episodes(count=2, segment=1, embedder="tokens") > snapkv() > pooled()'
    result = document(run("ask", talk, "-q", CAT, "--policy", policy, "--budget", "48", "--json"))
    assert result["answers"][0]["episode"] in (0, 1)
    assert result["kv_bytes"] > result["active_kv_bytes"]


def test_streamed_and_collected_are_the_same(run: Run, talk: Path) -> None:
    options = ("--temperature", "1", "--top-k", "20", "--top-p", "0.9", "--seed", "3", *SMALL)
    streamed = run("ask", talk, "-q", "Tell me.", *options).stdout.strip()
    result = document(run("ask", talk, "-q", "Tell me.", *options, "--json"))
    assert result["answers"][0]["answer"] == streamed != ""


def test_text_file_is_answered(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "note.txt", "My cat is called Mira.\n\nShe sleeps all day.\n")
    assert run("ask", path, "-q", CAT, "--policy", "full").stdout == "Mira\n"


@pytest.mark.parametrize(
    "text", ["My cat is called Mira.\n", '[{"role": "user", "content": "My cat is called Mira."}]']
)
def test_text_or_conversation_on_stdin_is_answered(run: Run, text: str) -> None:
    assert run("ask", "-", "-q", CAT, "--policy", "full", stdin=text).stdout == "Mira\n"


def test_stdin_is_read_alone_and_not_empty(run: Run, talk: Path) -> None:
    beside = complaint(run("ask", "-", "--context", talk, "-q", CAT, stdin="A text."), 2)
    assert "stdin, which is read alone: save its text to a file" in beside
    assert "stdin is blank" in complaint(run("ask", "-", "-q", CAT, stdin="\n"), 1)


def test_second_file_is_refused_with_the_option_for_it(run: Run, talk: Path) -> None:
    line = complaint(run("ask", talk, talk, "-q", CAT), 2)
    assert "One FILE is read: give each further one as --context FILE." in line


def test_short_text_needs_no_budget(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "note.txt", "My cat is called Mira.\n")
    assert run("ask", path, "-q", CAT, "--policy", "snapkv").stdout == "Mira\n"


@pytest.mark.parametrize("policy", ["exact_question", "finch", "laq", "dapq"])
def test_question_aware_policies_take_one_question_only(run: Run, talk: Path, policy: str) -> None:
    options = ("--policy", policy, "--budget", "48", "--max-new-tokens", "4")
    assert run("ask", talk, "-q", CAT, *options).exit_code == 0
    two = run("ask", talk, "-q", CAT, "-q", WINDOW, *options)
    assert "for one question, got 2" in complaint(two, 2)


def test_task_prompt_is_given_by_name(run: Run, talk: Path) -> None:
    options = ("--policy", "task_aware", "--budget", "48", "--max-new-tokens", "4")
    result = ("--prompt", "task=Which pets are there, and what are they called?")
    assert run("ask", talk, "-q", CAT, "-q", WINDOW, *options, *result).exit_code == 0
    assert "--prompt task=TEXT" in complaint(run("ask", talk, "-q", CAT, *options), 2)
    for wrong in ("task", "=Pets", "task="):
        refused = run("ask", talk, "-q", CAT, *options, "--prompt", wrong)
        assert "--prompt takes NAME=TEXT" in complaint(refused, 2)


def test_explain_page_has_tokens_episodes_and_kept_counts(
    run: Run, talk: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    policy = 'episodes(count=2, segment=1, embedder="tokens") > snapkv() > pooled()'
    sizes = ("--policy", policy, "--budget", "48", "--max-new-tokens", "4")
    result = run("ask", talk, "-q", CAT, *sizes, "--explain", page, "--json")
    data = shown(page.read_text())
    reply = document(result)
    assert [len(data["messages"]), len(data["episodes"])] == [7, 2]
    assert sum(len(m["tokens"]) for m in data["messages"]) == reply["context_tokens"]
    assert data["answers"][0]["expected"] == "Mira"
    body = [
        "".join(m["tokens"][m["lead"] : len(m["tokens"]) - m["tail"]]) for m in data["messages"]
    ]
    assert body[1].strip() == "My cat is called Mira. She sleeps on the sofa all day."
    lengths = data["episodes"][0]["lengths"]
    assert sum(map(sum, lengths)) == 48 * sum(len(row) for row in lengths)


def test_explain_page_names_the_recall_index(run: Run, talk: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    sizes = ("--policy", "icecache_small", "--budget", "48", "--max-new-tokens", "4")
    assert run("ask", talk, "-q", CAT, *sizes, "--explain", page).exit_code == 0
    assert shown(page.read_text())["recalled_by"] == "dci"


@pytest.mark.extended
def test_explain_page_of_a_transcript_has_speakers_and_dates(run: Run, tmp_path: Path) -> None:
    talk = {
        "speaker_a": "Ann",
        "speaker_b": "Bob",
        "session_1_date_time": "8 May 2023",
        "session_1": [
            {"speaker": "Ann", "text": "My cat is called Mira.", "dia_id": "D1:1"},
            {"speaker": "Bob", "text": "How nice!", "dia_id": "D1:2"},
        ],
    }
    path = write(tmp_path / "locomo.json", {"conversation": talk, "qa": []})
    page = tmp_path / "page.html"
    result = run("ask", path, "-q", CAT, "--policy", "full", "--explain", page, "--json")
    messages = shown(page.read_text())["messages"]
    assert sum(len(m["tokens"]) for m in messages) == document(result)["context_tokens"]
    assert [m["speaker"] for m in messages] == ["", "Ann", "Bob", ""]
    assert [m["date"] for m in messages[1:]] == ["8 May 2023"] * 3
    assert messages[0]["role"] == "user" and messages[-1]["role"] == "assistant"


@pytest.mark.parametrize("page", ["nowhere/page.html", "."])
def test_unwritable_explain_path_is_refused(
    run: Run, talk: Path, tmp_path: Path, page: str
) -> None:
    result = run("ask", talk, "-q", CAT, "--explain", tmp_path / page)
    assert "is not a writable file path" in complaint(result, 2)


def test_failed_question_among_several_is_reported(run: Run, talk: Path) -> None:
    words = "word " * 80
    result = run("ask", talk, "-q", words, "-q", CAT, *SMALL, "--json")
    reply = document(result)
    assert result.exit_code == 0
    assert reply["answers"][0]["error"]["type"] == "InputError"
    assert "answer" in reply["answers"][1] and reply["summary"]["errors"] == 1
    shown = run("ask", talk, "-q", words, "-q", CAT, *SMALL)
    assert "more than the budget" in shown.stderr and f"> {CAT}" in shown.stdout


def test_interrupt_after_an_answer_prints_the_finished_answers(
    run: Run, talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Engine.ask

    def stopping(
        self: Engine, memory: object, question: str, *rest: object, **named: object
    ) -> Answer:
        if question == WINDOW:
            raise KeyboardInterrupt
        return ask(self, memory, question, *rest, **named)  # pyright: ignore

    monkeypatch.setattr(Engine, "ask", stopping)
    result = run("ask", talk, "-q", CAT, "-q", WINDOW, *SMALL, "--json")
    assert result.exit_code == 130
    assert [answer["question"] for answer in document(result)["answers"]] == [CAT]
    assert run("ask", talk, "-q", CAT, "-q", WINDOW, *SMALL).exit_code == 130


def test_interrupt_during_prefill_is_reported_as_an_error(
    run: Run, talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(self: Engine, *rest: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "read", stopping)
    result = run("ask", talk, "-q", CAT, "--json")
    assert result.exit_code == 130
    assert document(result)["error"]["type"] == "Interrupted"


def shown(page: str) -> dict:
    """The data that a page carries."""
    found = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.extended
def test_keep_saves_and_restores_the_prefill(
    run: Run, talk: Path, larder_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("ask", talk, "-q", CAT, *SMALL)
    first = run(*words)
    assert not (larder_home / "store").exists()
    assert run(*words, "--keep").stdout == first.stdout
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "read", lambda *_: pytest.fail("read again"))
        again = run(*words, "--keep")
    assert (again.exit_code, again.stdout, again.stderr) == (0, first.stdout, "")
    run("ask", talk, "-q", CAT, "--policy", "snapkv", "--budget", "56", "--keep")
    assert len(document(run("cache", "list", "--json"))["sessions"]) == 2, "another budget"
    assert "--keep" in complaint(run(*words, "--codec", "int4"), 2)


def test_schema_constrains_the_answer_and_bad_schemas_are_refused(
    run: Run, talk: Path, tmp_path: Path
) -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    schema = {"type": "object", "properties": {"cat": {"enum": ["Mira", "Rex"]}}}
    schema |= {"required": ["cat"], "additionalProperties": False}
    path = write(tmp_path / "schema.json", json.dumps(schema))
    asked = ("ask", talk, "-q", CAT, "--policy", "full", "--schema")
    result = run(*asked, path)
    assert json.loads(result.stdout)["cat"] in ("Mira", "Rex")
    for wrong, reason, code in (
        ("[]", "no JSON object", 1),
        ('{"not": {}}', "cannot be enforced", 2),
    ):
        bad = write(tmp_path / "wrong.json", wrong)
        assert reason in complaint(run(*asked, bad), code)
    assert "cannot be read" in complaint(run(*asked, tmp_path / "absent.json"), 1)
