"""Real clients against `larder serve` in its own process.

    python benchmarks/clients.py --python VENV/bin/python [--node FOLDER] [--model smollm2]

`VENV` has any of openai, anthropic, langchain-openai, openai-agents, inspect-ai, llm and lm_eval;
`FOLDER` has node_modules with ai, @ai-sdk/openai, @ai-sdk/openai-compatible and zod. The bundled
model answers, or that of `--model`, with an adapter of random weights beside it; calls of tools are
forced by their schemas. In float32 log-likelihoods are compared with those of transformers. Calls
with images follow, to a server over a model of random weights that sees. Rows go to
results/clients.jsonl; the exit status is 1 if a call fails, or takes longer than `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _acceptance_calls import ADAPTED, TOLERANCE
from _image_model import save_image_model
from _server import run_server
from _timing import write
from client_calls import EMBEDDER, IMAGES_OPTION
from peft import LoraConfig, get_peft_model  # pyright: ignore

from larder.models import LoadedModel, load

HERE = Path(__file__).parent
TEMPLATE = HERE / "tool_template.jinja"
NAME = "seed"  # as the clients call the model, whatever it is
MOST_GROWTH = 64 << 20  # bytes of the server's memory, under hostile requests
ROW_FIELDS = {"client", "version", "call", "seconds", "error"}  # of all rows


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


def save_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Save an adapter of random weights."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: Any = get_peft_model(model, config)  # pyright: ignore
    adapted.save_pretrained(str(folder))
    adapted.unload()


def resident_bytes(process: int) -> int:
    """Resident memory of a process."""
    pages = Path(f"/proc/{process}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def checked(row: dict[str, Any], loaded: LoadedModel) -> dict[str, Any]:
    """Row whose memory and log-likelihoods are checked.

    Hostile requests must leave memory as it was; the largest difference of the log-likelihoods of
    lm-eval from transformers' goes into the row.
    """
    if "health_seconds" in row and row["grown_bytes"] > MOST_GROWTH:
        return row | {"error": row["error"] or f"{row['grown_bytes']:,} bytes more are resident"}
    scored = row.pop("likelihoods", None)
    if scored is None or loaded.decoder.spec.dtype != torch.float32:
        return row
    loaded.decoder.release()
    worst = max(
        abs(value - own_likelihood(loaded, context, continuation))
        for context, continuation, value, _ in scored
    )
    error = "" if worst <= TOLERANCE else f"log-likelihoods differ by {worst:.2g}"
    return row | {"likelihoods": len(scored), "worst": worst, "error": row["error"] or error}


def own_likelihood(loaded: LoadedModel, context: str, continuation: str) -> float:
    """Log-likelihood of a continuation by transformers; without a context, behind the token that
    begins texts, or else ends them.
    """
    tokenizer = loaded.tokenizer
    ids = tokenizer.encode(context + continuation, add_special_tokens=False)
    first = len(tokenizer.encode(context, add_special_tokens=False))
    if not context:
        begin = tokenizer.bos_token_id
        ids, first = [tokenizer.eos_token_id if begin is None else begin, *ids], 1
    with torch.no_grad():
        logits = loaded.decoder.module(torch.tensor([ids])).logits[0, first - 1 : -1].float()
    return logits.log_softmax(-1)[range(len(ids) - first), ids[first:]].sum().item()


def main() -> int:
    options, rows = _options(), list[dict[str, Any]]()
    loaded = load(options.model or NAME, dtype=options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        rows += _text_rows(options, loaded, Path(folder))
        rows += _image_rows(options, loaded, Path(folder, "images"))
    write(options.out, rows)
    return 1 if not rows or any(row["error"] for row in rows) else 0


def _text_rows(
    options: argparse.Namespace, loaded: LoadedModel, folder: Path
) -> Iterator[dict[str, Any]]:
    """Rows of calls without images."""
    served = ["--chat-template", str(TEMPLATE), "--served-model-name", NAME]
    served += ["--embedding-model", EMBEDDER]
    served += ["--model", options.model] if options.model else []
    served += ["--dtype", options.dtype] if options.dtype else []
    save_adapter(loaded.decoder.module, folder / ADAPTED)
    served += ["--adapter", f"{ADAPTED}={folder / ADAPTED}"]
    with run_server(folder / "home", served) as server:
        resident = resident_bytes(server.process)
        for program in _programs(options, server.url):
            for row in called(program, options.seconds):
                row["grown_bytes"] = resident_bytes(server.process) - resident
                resident += row["grown_bytes"]
                yield _shown(checked(row, loaded)) | {"model": options.model or NAME}


def _image_rows(
    options: argparse.Namespace, loaded: LoadedModel, folder: Path
) -> Iterator[dict[str, Any]]:
    """Rows of calls with images."""
    save_image_model(loaded.tokenizer, folder)
    served = ["--model", str(folder), "--served-model-name", NAME]
    with run_server(folder / "home", served) as server:
        for program in _programs(options, server.url, IMAGES_OPTION):
            for row in called(program, options.seconds):
                yield _shown(row) | {"model": "images"}


def _programs(options: argparse.Namespace, url: str, *more: str) -> Iterator[list[str]]:
    """Programs of clients."""
    if options.python is not None:
        yield [options.python, str(HERE / "client_calls.py"), url, *more, *options.only]
    if options.node is not None:
        yield ["node", str(HERE / "client_calls.mjs"), url, options.node, *more]


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """The row, which is printed."""
    outcome = row["error"] or "works"
    result = f"{row['client']} {row['version']} | {row['call']} | {row['seconds']} s | {outcome}"
    figures = {name: row[name] for name in row.keys() - ROW_FIELDS}
    result += f" | {json.dumps(figures)}" if figures else ""
    print(result, flush=True)
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
