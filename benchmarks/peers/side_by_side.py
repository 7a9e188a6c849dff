"""Larder and NVIDIA/kvpress on the same model, inputs and budget, in alternating processes.

    python benchmarks/peers/side_by_side.py FILE --peer-python PATH [--share 4] [--rounds 3]

PATH is the interpreter of an environment in which kvpress is installed from its package (it needs
an older transformers than Larder). Per policy: exact match of greedy answers, bytes of keys and
values really held, highest memory of the whole process, prefill seconds, decode seconds per token.
Both read the whole context first, because kvpress has no block-wise prefill; nothing is protected.
One JSONL line per policy and side in results/peers.jsonl.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

OUT = Path("results/peers.jsonl")
PAIRS = {
    "none": "full",
    "random": "whole() > {bare} > random() > uniform(tokens={tokens})",
    "streaming_llm": "whole() > {bare} > sinks_and_window(sinks=4) > uniform(tokens={tokens})",
    "snapkv": "whole() > {bare} > snapkv(kernel=7) > uniform(tokens={tokens})",
    "keydiff": "whole() > {bare} > keydiff() > uniform(tokens={tokens})",
    "adakv(snapkv)": "whole() > {bare} > snapkv(kernel=7) > pooled(tokens={tokens})",
    "kvzip": "whole() > {bare} > reconstruct() > global(tokens={tokens})",
}
BARE = "protect(sinks=0, recent=0)"
MAX_NEW_TOKENS = 24


def main() -> None:
    options = _options()
    if options.ours:
        json.dump(_ours(json.load(sys.stdin)), sys.stdout)
        return
    job = _job(options)
    rows: list[dict[str, Any]] = []
    for press in PAIRS:
        sides: dict[str, list[dict[str, Any]]] = {"kvpress": [], "larder": []}
        for _ in range(options.rounds):
            asked = job | {"press": press}
            sides["kvpress"].append(_run([options.peer_python, str(_worker())], asked))
            sides["larder"].append(_run([sys.executable, __file__, "-", "--ours"], asked))
        for side, results in sides.items():
            rows.append(_row(press, side, results, job["expected"]))
            print(_line(rows[-1]))
    from _timing import environment, write

    write(
        OUT, [row | {"share": options.share, "file": options.file} | environment() for row in rows]
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--peer-python", default="python")
    parser.add_argument("--share", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _worker() -> Path:
    return Path(__file__).with_name("kvpress_worker.py")


def _job(options: argparse.Namespace) -> dict[str, Any]:
    """The same token ids for both sides."""
    from larder import Engine, read_conversation

    engine, conversation = Engine.load(policy="full"), read_conversation(options.file)
    text = "".join(message.content for message in conversation.messages)
    asked = [q for q in conversation.questions if q.answer in text and q.kind != "list"]
    return {
        "model": str(files("larder.models") / "seed"),
        "context": engine.scribe.write(conversation).ids,
        "questions": [engine.scribe.question(q.question) for q in asked],
        "expected": [engine.scribe.encode(q.answer) for q in asked],
        "stops": sorted(engine.stops),
        "kept": 1 / options.share,
        "threads": options.threads,
        "max_new_tokens": MAX_NEW_TOKENS,
        "path": options.file,
    }


def _ours(job: dict[str, Any]) -> dict[str, Any]:
    """The same job through Larder."""
    import torch
    import transformers

    from larder import Engine, read_conversation
    from larder.engine.sampling import Sampling

    torch.set_num_threads(job["threads"])
    tokens = round(len(job["context"]) * job["kept"])
    base = Engine.load(policy="full")
    engine = base.under(PAIRS[job["press"]].format(bare=BARE, tokens=tokens))
    conversation = read_conversation(job["path"])
    memory = engine.read(conversation)
    cache = memory.shelf.activate(0)
    answers, seconds, count = [], 0.0, 0
    for question in job["questions"]:
        mark, started = cache.next_position, time.perf_counter()
        cache.reserve(len(question) + MAX_NEW_TOKENS)
        reply = engine.speaker.reply(
            cache, tuple(question), Sampling(), MAX_NEW_TOKENS, (), _unheard
        ).ids
        cache.truncate(mark)
        seconds += time.perf_counter() - started
        count += len(reply) + 1
        answers.append(list(reply))
    cache.compact()
    return {
        "prefill_seconds": memory.figures.prefill_seconds,
        "decode_seconds_per_token": seconds / count,
        "kv_bytes": cache.nbytes,
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "answers": answers,
        "transformers": transformers.__version__,
    }


def _unheard(text: str) -> None:
    del text


def _run(command: list[str], job: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        command, input=json.dumps(job), capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout)


def _row(
    press: str, side: str, results: list[dict[str, Any]], expected: list[list[int]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": press, "side": side}
    good = [result for result in results if "failed" not in result]
    if not good:
        return row | {"failed": results[0]["failed"]}
    hits = [a == list(e) for a, e in zip(good[0]["answers"], expected, strict=True)]
    row |= {"exact": sum(hits) / len(hits), "questions": len(hits)}
    for name in ("prefill_seconds", "decode_seconds_per_token", "kv_bytes", "process_peak_bytes"):
        row[name] = statistics.median(result[name] for result in good)
    return row | {"transformers": good[0]["transformers"]}


def _line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['policy']:14} {row['side']:8} failed: {row['failed']}"
    return (
        f"{row['policy']:14} {row['side']:8} exact {row['exact']:.2f}  "
        f"KV {row['kv_bytes'] / 2**20:6.2f} MiB  peak {row['process_peak_bytes'] / 2**20:6.0f} MiB"
        f"  prefill {row['prefill_seconds']:6.2f} s  "
        f"decode {row['decode_seconds_per_token'] * 1000:6.2f} ms/token"
    )


if __name__ == "__main__":
    main()
