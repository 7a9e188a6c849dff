"""Real clients against `larder serve` in its own process.

    python benchmarks/clients.py --python VENV/bin/python [--node FOLDER] [--model smollm2]

`VENV` has any of openai, anthropic, langchain-openai, openai-agents, inspect-ai, llm and lm_eval;
`FOLDER` has node_modules with ai, @ai-sdk/openai, @ai-sdk/openai-compatible and zod. The bundled
model answers, or that of `--model`; calls of tools are forced by their schemas. Rows go to
results/clients.jsonl; the exit status is 1 if a call fails, or takes longer than `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _server import run_server
from _timing import write

HERE = Path(__file__).parent
TEMPLATE = HERE / "tool_template.jinja"
NAME = "seed"  # as the clients call the model, whatever it is


def called(command: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Rows of a program that prints one per call, as they come.

    A program that prints none for `seconds` is ended; that, or another unusual end, is a row too.
    """
    is_late = threading.Event()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None

        def end() -> None:
            is_late.set()
            process.kill()

        while True:
            timer = threading.Timer(seconds, end)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if not line:
                break
            if line.startswith("{"):
                yield json.loads(line)
        if process.wait() not in (0, 1) or is_late.is_set():
            errors.seek(0)
            why = f"no call ended for {seconds:g} s" if is_late.is_set() else errors.read()[-2000:]
            name = Path(command[1]).name
            yield {"client": name, "version": "", "call": "", "seconds": seconds, "error": why}


def main() -> int:
    options, rows = _options(), list[dict[str, Any]]()
    served = ["--chat-template", str(TEMPLATE), "--served-model-name", NAME]
    served += ["--model", options.model] if options.model else []
    served += ["--dtype", options.dtype] if options.dtype else []
    with tempfile.TemporaryDirectory() as folder, run_server(Path(folder), served) as server:
        if options.python is not None:
            words = [server.url, *options.only]
            program = [options.python, str(HERE / "client_calls.py"), *words]
            rows += map(_shown, called(program, options.seconds))
        if options.node is not None:
            program = ["node", str(HERE / "client_calls.mjs"), server.url, options.node]
            rows += map(_shown, called(program, options.seconds))
    write(options.out, [row | {"model": options.model or "seed"} for row in rows])
    return 1 if not rows or any(row["error"] for row in rows) else 0


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """The row, which is printed."""
    outcome = row["error"] or "works"
    told = f"{row['client']} {row['version']} | {row['call']} | {row['seconds']} s | {outcome}"
    print(told, flush=True)
    return row


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="interpreter of the clients in Python")
    parser.add_argument("--node", help="folder with node_modules")
    parser.add_argument("--model", help="model that is served; the bundled one without it")
    parser.add_argument("--dtype", help="type of its weights")
    parser.add_argument("--only", nargs="*", default=[], help="packages in Python, instead of all")
    parser.add_argument("--seconds", type=float, default=300.0, help="longest time of one call")
    parser.add_argument("--out", type=Path, default=Path("results/clients.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
