"""Commands of the how-to pages, on the bundled model."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import socket
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

from cli_results import Run
from larder.cli.errors import INTERRUPTED_EXIT_CODE

HOW_TO = Path(__file__).parents[2] / "docs" / "how_to"
COMMAND = re.compile(r"^ {4,}((?:larder|curl) (?:.*\\\n)*.*)$", re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    """Words of the indented commands of a page, lines that are continued joined."""
    text = (HOW_TO / f"{page}.md").read_text(encoding="utf-8")
    return [shlex.split(found.replace("\\\n", " ")) for found in COMMAND.findall(text)]


def on_the_seed_model(words: list[str], **values: str) -> list[str]:
    """Words of a command behind `larder`, with the bundled model and other values of options."""
    place = words.index("--model") + 1
    words = [*words[:place], "seed", *words[place + 1 :]]
    for option, value in values.items():
        place = words.index(f"--{option.replace('_', '-')}") + 1
        words[place] = value
    return words[1:]


@pytest.mark.extended
def test_commands_of_the_long_chat_page_run(run: Run) -> None:
    [chat] = commands("long_chat")
    words = on_the_seed_model(chat)
    done = run(*words, stdin="My cat is called Mira.\n/figures\n/episodes\n/quit\n")
    assert done.exit_code == 0, done.stderr
    assert "bytes" in done.stdout or "KiB" in done.stdout
    again = run(*words, stdin="What is she called?\n")
    assert again.exit_code == 0, again.stderr
    page = (HOW_TO / "long_chat.md").read_text(encoding="utf-8")
    for option in ("--budget 64MiB", "--codec int8", "--block 64"):
        assert option.split()[0] in page
        done = run("chat", "--model", "seed", *option.split(), stdin="Hello.\n")
        assert done.exit_code == 0, done.stderr


@pytest.mark.extended
def test_commands_of_the_team_server_page_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, curl = commands("serve_a_team")
    assert (serve[0], curl[0]) == ("larder", "curl")
    keys = tmp_path / "keys.txt"
    key = "0123456789abcdef"
    operator = "fedcba9876543210"
    keys.write_text(f"team {key}\nprometheus {operator} operator\n", encoding="utf-8")
    replies: dict[str, Any] = {}

    async def talk(config: uvicorn.Config) -> None:
        transport = httpx2.ASGITransport(config.app)  # pyright: ignore[reportArgumentType]
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            url = curl[1].replace("http://localhost:8000", "")
            headers = dict(curl[n + 1].split(": ") for n, word in enumerate(curl) if word == "-H")
            headers["Authorization"] = headers["Authorization"].replace("KEY", key)
            body = json.loads(curl[curl.index("-d") + 1])
            replies["without a key"] = await client.post(url, json=body)
            body |= {"model": "seed", "max_tokens": 2}
            replies["chat"] = await client.post(url, json=body, headers=headers)
            replies["page"] = await client.get("/", headers=headers)
            replies["a tenant"] = await client.get("/metrics", headers=headers)
            headers["Authorization"] = f"Bearer {operator}"
            replies["prometheus"] = await client.get("/metrics", headers=headers)

    def serving(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        del sockets
        asyncio.run(talk(self.config))
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", serving)
    places = {"store": str(tmp_path / "sessions"), "keys": str(keys)}
    done = run(*on_the_seed_model(serve, port="0", host="127.0.0.1", **places))
    assert done.exit_code == INTERRUPTED_EXIT_CODE, done.stderr
    assert replies["without a key"].status_code == 401
    assert replies["chat"].json()["choices"][0]["message"]["role"] == "assistant"
    assert replies["page"].status_code == replies["prometheus"].status_code == 200
    assert replies["a tenant"].status_code == 403
