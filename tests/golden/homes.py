"""Goldens of data on disk: folders that an earlier version wrote, and continued sessions.

A home is a LARDER_HOME with chats, readings, a server's sessions, or archives. It is written once
by `build`, kept as bytes, and `opened` by a Larder that must find everything in it: the next answer
is the golden's, and the cache it came from was restored.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zstandard

from golden.access import run, serving
from golden.clients import fetched, post, post_bytes
from golden.comparison import FIXTURES, MASK, Golden, masked

FOLDER = FIXTURES / "homes"
KEY = FOLDER / "key"
IDS = FOLDER / "ids.json"  # of the conversation and the response that each server keeps
# Written again wherever they are missing; digests name files of the machine they were made on.
PASSING = ("rates", "digests.json")
# Other on every run.
CHANCE = ("saved", "torch", "transformers", "created_at", "completed_at", "made", "last_used")

SHORT = ("--budget", "40", "--max-new-tokens", "6")
EPISODES = 'episodes(embedder="tokens", count=2, segment=1) > blockwise() > patched() > pooled()'
CHATS = {
    "plain": ("--policy", "snapkv_blockwise", "--codec", "raw"),
    "packed": ("--policy", "keydiff", "--codec", "entropy"),
    "small": ("--policy", "streaming_llm", "--codec", "int4"),
    "episodes": ("--policy", EPISODES, "--codec", "int8"),
}
SAID = ("My cat is called Mira.", "The opera evening is on August 6.")
ASKED = "What is my cat called?"
READING = {
    "messages": [
        {"role": "system", "content": "Session 1, Monday May 1"},
        {"role": "user", "content": "The repair of the attic window is on July 5."},
        {"role": "assistant", "content": "I will remember that."},
        {"role": "user", "content": "My grandfather was a plumber."},
    ]
}
QUESTION = "When is the repair of the attic window?"
BOUNDED = ("--budget", "40", "--codec", "int4")
# A reading for every form that a cache has.
READINGS = {
    "full": ("--policy", "full", "--codec", "int8"),
    "limited": ("--policy", "keydiff", *BOUNDED),
    "episodes": ("--policy", EPISODES, *BOUNDED),
    "quantized": ("--policy", "kivi_blockwise", *BOUNDED),
    "paired": ("--policy", "minicache", *BOUNDED),
    "compact": ("--policy", "infinipot", *BOUNDED),
    "merged": ("--policy", "d2o", "--budget", "40", "--codec", "int8"),
    "parked": ("--policy", "icecache_small", *BOUNDED),
    "rebuilt": ("--policy", "kv_direct", "--budget", "14"),
}
BRIEF = ("rebuilt",)  # readings of the first sentence alone: their caches take many bytes
QUICK = ("full", "limited", "episodes")
UNREADABLE = "paired"  # kept whole, but not read back as it was written: see its test
ARCHIVES = ("small", "episodes")
ASK = {"model": "seed", "max_output_tokens": 6}
SERVERS: dict[str, dict[str, Any]] = {
    "server_prefix": {"policy": "full", "codec": "int8"},
    "server_chat": {"policy": EPISODES, "budget": "48", "codec": "int8"},
    "server_sealed": {"policy": "full", "codec": "int4", "key_file": KEY},
}


def build() -> None:
    """Write every home, every archive, and the key."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    KEY.write_text("5e" * 32 + "\n")
    with _packed("chats") as home:
        _hold_chats(home)
        for name in READINGS:
            _keep_reading(name, home, ())
        for name in ARCHIVES:
            _done("cache", "export", name, FOLDER / f"{name}.larder", home=home)
    with _packed("chats_sealed") as home:
        sealed = ("--key-file", KEY)
        _hold_chat("small", home, SAID, sealed)
        _keep_reading("limited", home, sealed)
    kept: dict[str, Any] = {}
    for name, options in SERVERS.items():
        with _packed(name) as home, serving(home, max_new_tokens=6, **options) as url:
            kept[name] = _talk_to_server(url)
            if name == "server_prefix":
                exported = post_bytes(f"{url}/v1/sessions/first/export")
                (FOLDER / "server.larder").write_bytes(exported)
    IDS.write_text(json.dumps(kept, indent=1) + "\n")


def chats() -> Any:
    """Chats and readings without a key: listed, verified, gone on with."""
    with opened("chats") as home:
        result = _listed(home, ())
        result["chats"] = {name: _hold_chat(name, home, (ASKED,), ()) for name in CHATS}
        result["readings"] = {name: _keep_reading(name, home, ()) for name in QUICK}
        after = _listed(home, ())
        after["sessions"]["packed"]["bytes"] = (
            MASK  # as many as the last bits of numbers compress to
        )
        return result | {"after": after}


def forms() -> Any:
    """Readings with caches of every form: restored, so that nothing is written again."""
    with opened("chats") as home:
        result = {name: _keep_reading(name, home, ()) for name in READINGS if name != UNREADABLE}
        return {"readings": result, "after": _listed(home, ())}


def paired_answer() -> str:
    """The answer from a cache whose layers share entries, when it comes back."""
    with opened("chats") as home:
        return _keep_reading(UNREADABLE, home, ())["answers"][0]["answer"]


def sealed_chats() -> Any:
    """Sealed chats: those of `chats` under a key."""
    with opened("chats_sealed") as home:
        sealed = ("--key-file", KEY)
        result = _listed(home, sealed)
        result["chat"] = _hold_chat("small", home, (ASKED,), sealed)
        result["reading"] = _keep_reading("limited", home, sealed)
        without = run("cache", "list", "--json", home=home)
        result["without_key"] = [without.code, json.loads(without.stdout)["error"]["type"]]
        return result | {"after": _listed(home, sealed)}


def lost_index() -> Any:
    """A store whose index is lost: built again from what lies in the store."""
    with opened("chats") as home:
        for file in home.glob("manifest.sqlite*"):
            file.unlink()
        return _listed(home, ())


def archives() -> Any:
    """Exported sessions, taken in by a home that has never seen them."""
    with TemporaryDirectory() as folder:
        home = Path(folder)
        for name in ARCHIVES:
            _done("cache", "import", FOLDER / f"{name}.larder", name, home=home)
        result = _listed(home, ())
        with serving(home, max_new_tokens=6, **SERVERS["server_prefix"]) as url:
            content = (FOLDER / "server.larder").read_bytes()
            # What was taken in is written behind the answer, so its durability is not told yet.
            taken = json.loads(post_bytes(f"{url}/v1/sessions/moved/import", content))
            result["taken_in"] = {name: value for name, value in taken.items() if name != "durable"}
            result["asked"] = _ask_server(url, "moved", [*_turns(url, "moved"), _user(ASKED)])
        return masked(result, CHANCE)


def server(name: str) -> Any:
    """A server's sessions, conversations and responses after a restart, gone on with."""
    options = SERVERS[name]
    with opened(name) as home:
        key = options.get("key_file")
        result = _listed(home, () if key is None else ("--key-file", key))
        with serving(home, max_new_tokens=6, **options) as url:
            result["before"] = _sessions(url)
            result["archive"] = _from_archive(url, **json.loads(IDS.read_text())[name])
            for session in ("first", "first~2", "forked"):
                turns = [*_turns(url, session), _user(ASKED)]
                result[f"asked {session}"] = _ask_server(url, session, turns)
            result["after"] = _sessions(url)
        return masked(result, CHANCE)


def logs() -> Any:
    """The file of a chat as it is written today, token by token."""
    with TemporaryDirectory() as folder:
        home = Path(folder)
        _hold_chat("plain", home, SAID, ())
        result = json.loads((home / "sessions" / "plain.json").read_text(encoding="utf-8"))
        return masked(result, CHANCE)


@contextmanager
def opened(name: str) -> Iterator[Path]:
    """A copy of a home."""
    content = zstandard.ZstdDecompressor().decompress((FOLDER / f"{name}.tar.zst").read_bytes())
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


@contextmanager
def _packed(name: str) -> Iterator[Path]:
    """A new home, kept as it is when the block is left."""
    with TemporaryDirectory() as folder:
        yield Path(folder)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for entry in sorted(Path(folder).iterdir()):
                if entry.name not in PASSING:
                    archive.add(entry, entry.name, filter=_anonymous)
        compressor = zstandard.ZstdCompressor(level=19)
        (FOLDER / f"{name}.tar.zst").write_bytes(compressor.compress(buffer.getvalue()))


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _hold_chats(home: Path) -> None:
    for name in CHATS:
        with _history(READING["messages"]) as file:
            arguments = ("--file", file) if name == "episodes" else ()
            _hold_chat(name, home, SAID, arguments)


def _hold_chat(name: str, home: Path, lines: tuple[str, ...], more: tuple[Any, ...]) -> Any:
    text = "".join(f"{line}\n" for line in lines)
    return _done("chat", name, *CHATS[name], *SHORT, *more, stdin=text, home=home)


def _keep_reading(name: str, home: Path, more: tuple[Any, ...]) -> Any:
    with _history(READING["messages"][:2] if name in BRIEF else READING["messages"]) as file:
        words = ("ask", file, "-q", QUESTION, "--keep", *READINGS[name], *more)
        return _done(*words, "--max-new-tokens", "6", home=home)


@contextmanager
def _history(messages: list[dict[str, str]]) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "window.json"
        file.write_text(json.dumps({"messages": messages}))
        yield file


def _done(*words: Any, home: Path, stdin: str | None = None) -> Any:
    result = run(*words, "--json", stdin=stdin, home=home)
    assert (result.code, result.stderr) == (0, ""), (words, result)
    return masked(json.loads(result.stdout), CHANCE)


def _listed(home: Path, more: tuple[Any, ...]) -> dict[str, Any]:
    """Output of `larder cache` for a home, in order of names."""
    sessions = _done("cache", "list", *more, home=home)["sessions"]
    names = sorted(each["session"] for each in sessions)
    shown = {name: _done("cache", "show", name, *more, home=home) for name in names}
    verified = _done("cache", "verify", *more, home=home)
    problems = {each["session"]: each["problems"] for each in verified["sessions"]}
    return {"sessions": shown, "problems": dict(sorted(problems.items()))}


def _talk_to_server(url: str) -> dict[str, str]:
    """Two turns, an edited message, a fork, a response in a conversation; the ids of these."""
    turns: list[dict[str, str]] = []
    for line in SAID:
        turns.append(_user(line))
        turns.append(_assistant(_ask_server(url, "first", turns)["answer"]))
    _ask_server(url, "first", [*turns[:2], _user("My dog is called Rex.")])
    post(f"{url}/v1/sessions/first/fork", {"name": "forked"})
    post(f"{url}/v1/sessions/first/pin", {})
    conversation = post(f"{url}/v1/conversations", {})["id"]
    response = post(f"{url}/v1/responses", ASK | {"input": SAID[0], "conversation": conversation})
    return {"conversation": conversation, "response": response["id"]}


def _from_archive(url: str, conversation: str, response: str) -> Any:
    """Archive beside sessions, and a response that continues from it."""
    result = {
        "conversation": fetched(f"{url}/v1/conversations/{conversation}"),
        "items": fetched(f"{url}/v1/conversations/{conversation}/items"),
        "response": fetched(f"{url}/v1/responses/{response}"),
        "input_items": fetched(f"{url}/v1/responses/{response}/input_items"),
    }
    asked = ASK | {"input": ASKED, "previous_response_id": response}
    return result | {"went_on": masked(post(f"{url}/v1/responses", asked), ("id", "session"))}


def _ask_server(url: str, session: str, turns: list[dict[str, str]]) -> Any:
    asked = {"model": "seed", "messages": turns, "max_tokens": 6}
    result = post(f"{url}/v1/chat/completions", asked, x_session_id=session)
    [choice] = result["choices"]
    ended = {"answer": choice["message"]["content"], "reason": choice["finish_reason"]}
    return ended | {"usage": result["usage"], "kv": result["kv"]}


def _turns(url: str, session: str) -> list[dict[str, str]]:
    kept = fetched(f"{url}/v1/sessions/{session}/kept")
    return [{"role": turn["role"], "content": turn["text"]} for turn in kept["turns"]]


def _sessions(url: str) -> dict[str, Any]:
    result = fetched(f"{url}/v1/sessions")["data"]
    return {each["id"]: each for each in sorted(result, key=lambda each: each["id"])}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SLOW: dict[str, Golden] = {"homes/forms": forms}
GOLDENS: dict[str, Golden] = {
    "homes/chats": chats,
    "homes/chats_sealed": sealed_chats,
    "homes/lost_index": lost_index,
    "homes/archives": archives,
    "homes/chat_log": logs,
    **{f"homes/{name}": partial(server, name) for name in SERVERS},
}
