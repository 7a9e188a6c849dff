"""Real clients against `larder serve` in its own process.

    python benchmarks/clients.py --python VENV/bin/python [--node FOLDER] [--model smollm2]

`VENV` has any of openai, anthropic, langchain-openai, openai-agents, inspect-ai, llm and lm_eval;
`FOLDER` has node_modules with ai, @ai-sdk/openai, @ai-sdk/openai-compatible and zod. The bundled
model answers, or that of `--model`; calls of tools are forced by their schemas. Rows go to
results/clients.jsonl; the exit status is 1 if a call fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _server import run_server
from _timing import write

HERE = Path(__file__).parent
TEMPLATE = HERE / "tool_template.jinja"
NAME = "seed"  # as the clients call the model, whatever it is


def called(command: list[str]) -> list[dict[str, Any]]:
    """Rows of a program that prints one per call."""
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{command[:2]} printed no rows: {done.stderr[-2000:]}")
    return [json.loads(line) for line in lines]


def main() -> int:
    options, rows = _options(), list[dict[str, Any]]()
    served = ["--chat-template", str(TEMPLATE), "--served-model-name", NAME]
    served += ["--model", options.model] if options.model else []
    served += ["--dtype", options.dtype] if options.dtype else []
    with (
        tempfile.TemporaryDirectory() as folder,
        run_server(Path(folder), served) as server,
    ):
        if options.python is not None:
            words = [server.url, *options.only]
            rows += called([options.python, str(HERE / "client_calls.py"), *words])
        if options.node is not None:
            rows += called(["node", str(HERE / "client_calls.mjs"), server.url, options.node])
    write(options.out, [row | {"model": options.model or "seed"} for row in rows])
    for row in rows:
        outcome = row["error"] or "works"
        print(f"{row['client']} {row['version']} | {row['call']} | {row['seconds']} s | {outcome}")
    return 1 if not rows or any(row["error"] for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="interpreter of the clients in Python")
    parser.add_argument("--node", help="folder with node_modules")
    parser.add_argument("--model", help="model that is served; the bundled one without it")
    parser.add_argument("--dtype", help="type of its weights")
    parser.add_argument("--only", nargs="*", default=[], help="packages in Python, instead of all")
    parser.add_argument("--out", type=Path, default=Path("results/clients.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
