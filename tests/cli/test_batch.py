"""`larder batch`: OpenAI's batch format in and out, resumed after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cli_results import Run, complaint, document

TEXT = "Mira is the cat of Vera. Peter lives in Berlin and works as a baker. " * 2


def chat(name: str, question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{TEXT}{question}"}]
    body = {"model": "seed", "messages": messages, "max_tokens": 4, **fields}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    return {
        result["custom_id"]: result for result in map(json.loads, path.read_text().splitlines())
    }


def test_results_are_in_the_format_of_openai(run: Run, tmp_path: Path) -> None:
    text = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "Once", "seed": 3}}
    lines = chat("a", "Where does Peter live?"), chat("b", "Who is Mira?"), text
    path = write_lines(tmp_path / "asked.jsonl", *lines, chat("d", "Why?", n=2))
    result = document(run("batch", path, "--max-new-tokens", "3", "--json"))
    assert (result["requests"], result["failed"], result["skipped"]) == (4, 1, 0)
    assert result["read_tokens"] < result["prompt_tokens"]
    results = read(tmp_path / "asked.results.jsonl")
    answer = results["a"]["response"]["body"]
    assert answer["object"] == "chat.completion" and answer["choices"][0]["finish_reason"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
    assert results["c"]["response"]["body"]["usage"]["completion_tokens"] <= 3
    assert results["d"]["response"]["status_code"] == 400 and "n is not" in str(results["d"])


def test_contexts_are_read_in_the_order_that_shares_most(run: Run, tmp_path: Path) -> None:
    boxes = {name: f"Box {name} holds {n + 3} coins. " * 3 for n, name in enumerate("abcd")}
    asked = {"1": "abc", "2": "dba", "3": "cab", "4": "aab"}

    def told_of(order: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        lines = [
            chat(name, "Why?", contexts=[boxes[each] for each in found], context_order=order)
            for name, found in asked.items()
        ]
        path = write_lines(tmp_path / f"{order}.jsonl", *lines)
        result = document(run("batch", path, "--json"))
        return result, read(tmp_path / f"{order}.results.jsonl")

    (given, _), (shared, answers) = told_of("given"), told_of("shared")
    assert given["failed"] == shared["failed"] == 0
    assert shared["read_tokens"] < 0.8 * given["read_tokens"]
    line = "The 3 texts above, the most relevant first: 3, 2, 1."
    opening = "".join(f"{boxes[name].rstrip()}\n\n" for name in "abd")
    whole = chat("2", "")
    whole["body"]["messages"][0]["content"] = f"{opening}{line}\n\n{TEXT}Why?"
    document(run("batch", write_lines(tmp_path / "whole.jsonl", whole), "--json"))
    found = read(tmp_path / "whole.results.jsonl")["2"]["response"]["body"]
    body = answers["2"]["response"]["body"]
    assert body["choices"] == found["choices"]
    assert body["usage"]["prompt_tokens"] == found["usage"]["prompt_tokens"]


def test_wrong_contexts_fail_alone(run: Run, tmp_path: Path) -> None:
    plain = {"custom_id": "f", "url": "/v1/completions", "body": {"prompt": "A", "contexts": []}}
    lines = [
        chat("a", "Who?", contexts=["A text."]),
        chat("b", "Who?", contexts="A text."),
        chat("c", "Who?", contexts=[" "]),
        chat("d", "Who?", contexts=["A text."], context_order="best"),
        chat("e", "Who?", contexts=["chunk-" + "0" * 64]),
        plain | {"body": {"prompt": "Once", "contexts": ["A text."]}},
        chat("g", "Who?", contexts={}),
        chat("h", "Who?", contexts=["Half \ud800."]),
        chat("i", "Who?"),
        chat("j", "Who?", contexts=None, context_order=None),
    ]
    lines[-2]["body"]["messages"][0]["contexts"] = ["A text."]
    path = write_lines(tmp_path / "asked.jsonl", *lines)
    assert document(run("batch", path, "--json"))["failed"] == 8
    found = read(tmp_path / "asked.results.jsonl")
    messages = {name: str(each["error"]) for name, each in found.items() if each["error"]}
    assert messages.keys() == set("bcdefghi")
    assert "a list of texts" in messages["b"] and "' '" in messages["c"]
    assert "'given', 'shared'" in messages["d"] and "send its text" in messages["e"]
    assert "contexts is not supported" in messages["f"]
    assert (
        "got {}" in messages["g"]
        and "surrogate" in messages["h"]
        and "Message 1 has" in messages["i"]
    )


def test_malformed_requests_fail_alone(run: Run, tmp_path: Path) -> None:
    half = {"custom_id": "d", "url": "/v1/completions", "body": {"prompt": "Half \ud800."}}
    lines = chat("a", "Who?"), chat("b", "Who?", stop=5), chat("c", "Who?", stop=["x", 1]), half
    path = write_lines(tmp_path / "asked.jsonl", *lines)
    assert document(run("batch", path, "--json"))["failed"] == 3
    found = read(tmp_path / "asked.results.jsonl")
    messages = {name: str(each["error"]) for name, each in found.items() if each["error"]}
    assert messages.keys() == set("bcd")
    assert (
        "got 5" in messages["b"]
        and "list of texts" in messages["c"]
        and "surrogate" in messages["d"]
    )


def test_interrupted_run_resumes(run: Run, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "asked.jsonl", chat("a", "Who?"), chat("b", "Where?"))
    out = tmp_path / "out.jsonl"
    document(run("batch", path, "--out", out, "--json"))
    whole = out.read_text().splitlines()
    out.write_text(whole[0] + "\n" + whole[1][:20])
    result = document(run("batch", path, "--out", out, "--json"))
    assert result["skipped"] == 1 and read(out).keys() == {"a", "b"}
    assert out.read_text().splitlines()[0] == whole[0]


def test_contexts_keep_their_order_in_a_resumed_run(run: Run, tmp_path: Path) -> None:
    boxes = {name: f"Box {name} holds {n + 3} coins. " * 3 for n, name in enumerate("abc")}
    lines = [
        chat(name, "Why?", contexts=[boxes[each] for each in order], context_order="shared")
        for name, order in {"1": "ab", "2": "cb"}.items()
    ]
    path, out = write_lines(tmp_path / "asked.jsonl", *lines), tmp_path / "out.jsonl"
    document(run("batch", path, "--out", out, "--json"))
    whole = read(out)
    out.write_text(json.dumps(whole["1"]) + "\n")
    document(run("batch", path, "--out", out, "--json"))
    usages = [each["2"]["response"]["body"]["usage"] for each in (whole, read(out))]
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"], "the line of the order is lost"


def test_invalid_batches_are_refused(run: Run, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "asked.jsonl", chat("a", "Who?"), chat("a", "Where?"))
    assert "twice" in complaint(run("batch", path), 1)
    assert "--policy" in complaint(run("batch", path, "--policy", "snapkv"), 2)
    assert "--memory" in complaint(run("batch", path, "--memory", "20%"), 2)
    write_lines(path, {"custom_id": "a", "url": "/v1/embeddings", "body": {}})
    assert "line 1: url must be" in complaint(run("batch", path), 1)
    path.write_text("Who?\n")
    assert "line 1: not JSON" in complaint(run("batch", path), 1)
    write_lines(path, chat("a", "Who?"))
    (tmp_path / "out.jsonl").write_text("something else\n")
    assert "no results" in complaint(run("batch", path, "--out", tmp_path / "out.jsonl"), 1)
