"""Seconds between two parts of a streamed answer while a long prompt of another client is read.

    python benchmarks/token_gaps.py [--model smollm2] [--words 1500] [--chunks 0 128]
        [--latencies 1000] [--policy full] [--budget 512]

`larder serve` runs in its own process, once for each number of `--chunks` (its `--prefill-chunk`; 0
for a block of the policy) and of `--latencies` (its `--inter-token-latency`, in milliseconds, by
which it sizes chunks). A client streams an answer alone, then another while a long prompt is read
beside it. Printed are the median of its gaps alone, the median, the 95th percentile and the longest
while the prompt is read, and the seconds to the first token of that prompt. Between two tokens of
an answer at most one chunk is read: without a latency the longest gap is that of one chunk and one
step. With one, decode steps also run between the layers of a chunk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from _server import Server, StreamedAnswer, run_server

TOKENS_BEFORE = 8  # of the answer, when the long prompt is sent


def answer(server: Server, model: str, words: int, new_tokens: int) -> StreamedAnswer:
    text = " ".join(f"{number} birds" for number in range(words // 2))
    message = {"role": "user", "content": f"I saw {text}. Tell a long story about them."}
    body = {"model": model, "messages": [message], "max_tokens": new_tokens, "temperature": 0}
    given = server.chat(body)
    if given.error:
        raise RuntimeError(f"a request was refused: {given.error}")
    return given


def main() -> None:
    options = _options()
    runs = [("chunks of", chunk, 0) for chunk in options.chunks]
    runs += [("latency of", 0, latency) for latency in options.latencies]
    for name, chunk, latency in runs:
        serve = ["--model", options.model, "--dtype", options.dtype, "--policy", options.policy]
        serve += ["--budget", options.budget] if options.budget else []
        serve += ["--prefill-chunk", str(chunk)] if chunk else []
        serve += ["--inter-token-latency", str(latency)]
        with tempfile.TemporaryDirectory() as home, run_server(Path(home), serve) as server:
            measurements = measured(server, options)
        print(f"{name} {chunk or latency or 'a block'}: {measurements}", flush=True)


def measured(server: Server, options: argparse.Namespace) -> str:
    """Gaps of an answer alone and beside a long prompt."""
    answer(server, options.model, 8, 4)  # warms up
    alone = answer(server, options.model, 12, options.new_tokens // 4)
    gaps = [after - before for before, after in pairwise(alone.times)]
    with ThreadPoolExecutor(1) as pool:
        started = time.perf_counter()
        short = pool.submit(answer, server, options.model, 16, options.new_tokens)
        time.sleep(alone.times[0] + TOKENS_BEFORE * statistics.median(gaps))
        sent = time.perf_counter() - started
        long = answer(server, options.model, options.words, 1)
        until, times = sent + long.times[0], short.result().times
    beside = [after - before for before, after in pairwise(times) if before >= sent]
    within = [
        gap for gap, after in zip(beside, times[-len(beside) :], strict=True) if after <= until
    ]
    return (
        f"{statistics.median(gaps):.3f} s alone; {len(within)} beside a prompt of "
        f"{long.usage['prompt_tokens']} tokens, median {statistics.median(within):.3f}, p95 "
        f"{sorted(within)[int(0.95 * (len(within) - 1))]:.3f}, longest "
        f"{max(within):.3f}; its first token after {long.times[0]:.2f} s"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--budget", help="budget of policies that evict")
    parser.add_argument("--words", type=int, default=1500, help="of the long prompt")
    parser.add_argument("--new-tokens", type=int, default=120, help="of the answer beside it")
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 128])
    parser.add_argument("--latencies", type=int, nargs="*", default=[1000])
    return parser.parse_args()


if __name__ == "__main__":
    main()
