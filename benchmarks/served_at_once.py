"""Answers of a server to sessions at once, against the same sessions one by one.

    python benchmarks/served_at_once.py [--model smollm2] [--sessions 8] [--words 300] [--rounds 5]
        [--inter-token-latency 1000]

`larder serve` runs in its own process and answers over HTTP with streaming. Each round has new
sessions; the two ways take turns. Printed are the tokens per CPU second of the server (Linux) for
whole answers, prefill included, and the median and range of the ratio over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _server import Server, StreamedAnswer, run_server


def answer(server: Server, options: argparse.Namespace, name: str) -> StreamedAnswer:
    text = " ".join(f"{name} saw {number} birds." for number in range(options.words // 4))
    body = {
        "model": options.model,
        "session_id": name,
        "messages": [{"role": "user", "content": f"{text} Tell a long story about them."}],
        "max_tokens": options.new_tokens,
        "temperature": 0,
    }
    given = server.chat(body)
    if given.error:
        raise RuntimeError(f"{name} was refused: {given.error}")
    return given


def cpu_seconds(server: Server) -> float:
    """CPU time of the server so far."""
    fields = Path(f"/proc/{server.process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tokens_per_second(
    server: Server, options: argparse.Namespace, way: str, width: int
) -> tuple[float, int]:
    """Tokens per CPU second with `width` sessions at a time, and the number of tokens."""
    started = cpu_seconds(server)
    with ThreadPoolExecutor(width) as clients:
        names = [f"{way}-{number}" for number in range(options.sessions)]
        given = list(clients.map(lambda name: answer(server, options, name), names))
    tokens = sum(each.usage["completion_tokens"] for each in given)
    return tokens / (cpu_seconds(server) - started), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Sessions at once against one by one.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inter-token-latency", type=int, default=1000)
    options = parser.parse_args()
    serve = ["--model", options.model, "--dtype", options.dtype, "--policy", options.policy]
    serve += ["--inter-token-latency", str(options.inter_token_latency)]
    ratios = list[float]()
    with tempfile.TemporaryDirectory() as home, run_server(Path(home), serve) as server:
        for number in range(options.rounds + 1):
            alone, _ = tokens_per_second(server, options, f"alone-{number}", 1)
            together, tokens = tokens_per_second(
                server, options, f"together-{number}", options.sessions
            )
            if number:  # the first round warms up
                ratios.append(together / alone)
                print(
                    f"{alone:6.1f} {together:6.1f} tokens/CPU s, {tokens} tokens, {ratios[-1]:.2f}"
                )
    print(f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
