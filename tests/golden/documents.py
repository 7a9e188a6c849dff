"""Goldens of the `--json` output of commands, successful and failed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from golden.access import run
from golden.comparison import FIXTURES, MASK, Golden, masked
from golden.homes import KEY, opened

TALKS = FIXTURES / "talks"
CHANCE = ("model_fingerprint", "environment")
LIMITED = ("--budget", "25%", "--max-new-tokens", "8")
EPISODES = 'episodes(embedder="tokens", count=2) > blockwise() > patched() > pooled()'
# Policies of all cache forms; the questions are those whose answers no rounding changes.
ASKED = {
    "full": ("--policy", "full", "--max-new-tokens", "8"),
    "snapkv_blockwise": ("--policy", "snapkv_blockwise", *LIMITED),
    "streaming_llm": ("--policy", "streaming_llm", *LIMITED),
    "keydiff": ("--policy", "keydiff", *LIMITED),
    "pyramidkv": ("--policy", "pyramidkv", *LIMITED),
    "adakv": ("--policy", "adakv", *LIMITED),
    "kvzip_blockwise": ("--policy", "kvzip_blockwise", *LIMITED),
    "exact_question": ("--policy", "exact_question", *LIMITED),
    "h2o": ("--policy", "h2o", *LIMITED),
    "d2o_blockwise": ("--policy", "d2o_blockwise", *LIMITED),
    "infinipot": ("--policy", "infinipot", *LIMITED),
    "kivi": ("--policy", "kivi", *LIMITED),
    "minicache": ("--policy", "minicache", *LIMITED),
    "icecache_small": ("--policy", "icecache_small", *LIMITED),
    "quest": ("--policy", "quest", *LIMITED),
    "kv_direct": ("--policy", "kv_direct", *LIMITED),
    "episodes": ("--policy", EPISODES, *LIMITED),
    "bytes": ("--policy", "snapkv_blockwise", "--budget", "1MiB", "--max-new-tokens", "8"),
    "sampled": ("--policy", "full", "--max-new-tokens", "8", "--temperature", "0.01"),
}
QUICK = ("full", "snapkv_blockwise", "episodes")
QUESTION = "What is the venue of my guitar class?"
SPOKEN = (
    "My cat is called Mira.",
    "The opera evening is on August 6.",
    "",
    "/nope",
    "What is my cat called?",
    "word " * 90,
)
# Of rows of the demo whose caches are bounded.
ANSWERED = ("answer", "episode", "new_tokens", "exact", "f1", "f1_stemmed", "prompt")
# A command line and how it fails, apart from the sentence.
FAILING: dict[str, tuple[str, ...]] = {
    "no file": ("ask", "{folder}/none.json", "-q", "Who?"),
    "no text": ("ask", "{folder}/empty.json", "-q", "Who?"),
    "broken": ("ask", "{folder}/broken.json", "-q", "Who?"),
    "no kind": ("ask", "{folder}/table.csv", "-q", "Who?"),
    "no question": ("ask", "{talk}", "-q", " "),
    "no questions": ("eval", "{folder}/plain.txt"),
    "no policy": ("ask", "{talk}", "-q", "Who?", "--policy", "snapvk"),
    "no parameter": ("ask", "{talk}", "-q", "Who?", "--policy", "snapkv(windw=3)"),
    "out of range": ("ask", "{talk}", "-q", "Who?", "--policy", "snapkv(kernel=4)"),
    "no sentence": ("ask", "{talk}", "-q", "Who?", "--policy", "snapkv(window="),
    "out of order": ("ask", "{talk}", "-q", "Who?", "--policy", "pooled() > snapkv()"),
    "small budget": ("ask", "{talk}", "-q", "Who?", "--policy", "snapkv", "--budget", "20"),
    "no budget": ("ask", "{talk}", "-q", "Who?", "--policy", "snapkv", "--budget", "many"),
    "no room": ("ask", "{talk}", "-q", "Who?", "--policy", "snapkv", "--budget", "1KiB"),
    "twice sized": ("ask", "{talk}", "-q", "Who?", "--policy", "full", "--budget", "64"),
    "no block": ("ask", "{talk}", "-q", "Who?", "--policy", "snapkv", "--block", "0"),
    "no temperature": ("ask", "{talk}", "-q", "Who?", "--temperature", "-1"),
    "no model": ("ask", "{talk}", "-q", "Who?", "--policy", "full", "--model", "./none"),
    "no codec": ("ask", "{talk}", "-q", "Who?", "--keep", "--codec", "int3"),
    "codec alone": ("ask", "{talk}", "-q", "Who?", "--codec", "int4"),
    "two questions": ("ask", "{talk}", "-q", "A?", "-q", "B?", "--policy", "exact_question"),
    "no option": ("ask", "{talk}", "-q", "Who?", "--nope"),
    "no number": ("ask", "{talk}", "-q", "Who?", "--seed", "many"),
    "no command": ("nope",),
    "no part": ("policy", "show", "snapvk"),
    "no citation": ("policy", "cite", "snapvk"),
    "no session": ("cache", "show", "none"),
    "no archive": ("cache", "import", "{talk}", "name"),
    "no key": ("cache", "seal"),
    "bad key": ("cache", "list", "--key-file", "{talk}"),
    "no study": ("bench", "--study", "none"),
    "no task": ("bench", "nope"),
    "nothing to run": ("bench",),
    "no rows": ("plot", "{folder}"),
    "no results": ("report", "{folder}/none.jsonl"),
    "open host": ("serve", "--host", "0.0.0.0"),
    "no replicas": ("serve", "--replicas", "2"),
    "no durability": ("serve", "--durability", "often"),
    "no eviction": ("serve", "--eviction", "nope"),
    "bad name": ("chat", "a\u200bb", "--policy", "full"),
    "share of nothing": ("chat", "--policy", "snapkv", "--budget", "20%"),
}


def answers() -> dict[str, Any]:
    """`larder ask` with some policies."""
    return {name: _asked(name) for name in QUICK}


def all_answers() -> dict[str, Any]:
    """`larder ask` with policies of every cache form."""
    return {name: _asked(name) for name in ASKED}


def scores() -> dict[str, Any]:
    """`larder eval` of one file, and of several with two policies."""
    return {
        "one": _document("eval", _talk(1), *ASKED["full"]),
        "several": _document("eval", _talk(2), _talk(3), *ASKED["keydiff"], "--against", "full"),
    }


def all_scores() -> dict[str, Any]:
    """`larder eval` of a folder of three files."""
    return {"folder": _document("eval", TALKS, *ASKED["keydiff"], "--against", "full")}


def demo() -> dict[str, Any]:
    """`larder demo`; answers of bounded caches depend on the machine and are left out."""
    rows = _document("demo", "--model", "seed")["rows"]
    return {row["name"]: row if row["name"] == "full" else masked(row, ANSWERED) for row in rows}


def serve() -> Any:
    """Document of `larder serve`, and its end when it is interrupted."""
    words = (sys.executable, "-m", "larder", "serve", "--port", "0", "--json")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = list(iter(server.stdout.readline, "}\n"))
        server.send_signal(signal.SIGINT)
        code = server.wait(60)
    return {
        "code": code,
        "document": masked(json.loads("".join([*lines, "}"])), ("url", "beyond_budget")),
    }


def chat() -> dict[str, Any]:
    """`larder chat` with a line that is refused and one that is no command."""
    words = ("chat", "--budget", "64", "--max-new-tokens", "8", "--policy")
    lines = "".join(f"{line}\n" for line in SPOKEN)
    return {
        "single": _document(*words, "keydiff", stdin=lines),
        "episodes": _document(*words, EPISODES, stdin=lines),
    }


def upkeep() -> dict[str, Any]:
    """Writing commands of `larder cache`: export, import, remove, upgrade, seal."""
    with opened("chats") as home, TemporaryDirectory() as folder:
        file = Path(folder) / "small.larder"
        result = {
            "export": _document("cache", "export", "small", file, home=home),
            "import": _document("cache", "import", file, "copy", home=home),
            "theirs": _document("cache", "import", file, "x", "--owner", "anne", home=home),
            "owned": _document("cache", "list", "--owner", "anne", home=home),
            "remove": _document("cache", "remove", "copy", home=home),
            "upgrade": _document("cache", "upgrade", home=home),
            "seal": _document("cache", "seal", "--key-file", KEY, home=home),
        }
        return masked(_placed(result, folder), ("saved", "torch", "transformers"))


def failures() -> dict[str, Any]:
    """Exit code, error type, and shape of the output, of commands that fail."""
    with _mistakes() as folder:
        places = {"folder": str(folder), "talk": str(_talk(1))}
        return {name: _failed(words, places) for name, words in FAILING.items()}


def _failed(words: tuple[str, ...], places: dict[str, str]) -> Any:
    result = run(*(word.format(**places) for word in words), "--json", stdin="Hi\n")
    assert "Traceback" not in result.stderr
    document = json.loads(result.stdout) if result.stdout else None
    lines = len(result.stderr.splitlines())
    return {
        "code": result.code,
        "begins": result.stderr[:8],
        "lines": lines,
        "document": masked(document, ("message",)),
    }


@contextmanager
def _mistakes() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        files = {"empty.json": "", "broken.json": '{"messages": [', "table.csv": "a,b"}
        for name, text in (files | {"plain.txt": "No question."}).items():
            (Path(folder) / name).write_text(text)
        yield Path(folder)


def _talk(number: int) -> Path:
    return TALKS / f"talk{number}.json"


def _document(*words: Any, stdin: str | None = None, home: Path | None = None) -> Any:
    result = run(*words, "--json", stdin=stdin, home=home)
    assert result.code == 0, (words, result)
    return masked(_placed(json.loads(result.stdout), str(TALKS)), CHANCE + ("message",))


def _placed(value: Any, folder: str) -> Any:
    """Document without the paths of a folder."""
    return json.loads(json.dumps(value).replace(folder, MASK))


def _asked(name: str) -> Any:
    return _document("ask", _talk(1), "-q", QUESTION, *ASKED[name])


SLOW: dict[str, Golden] = {
    "ask_forms": all_answers,
    "eval_folder": all_scores,
    "demo": demo,
    "serve": serve,
}
GOLDENS: dict[str, Golden] = {
    "ask": answers,
    "eval": scores,
    "chat": chat,
    "cache": upkeep,
    "failures": failures,
}
