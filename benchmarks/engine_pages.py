"""Generation by an engine over pages and captured graphs against the same engine without pages.

    python benchmarks/engine_pages.py                         on a GPU: shape of Qwen3-0.6B, random
    python benchmarks/engine_pages.py --device cpu --tiny     every path in seconds

Each prompt is read under a policy, then all of them are continued together, without and with pages
in turn. Times are milliseconds of a step of all prompts, prefill taken off (two lengths of answers,
medians of the rounds). `equal` is the share of tokens that both give before their first difference:
1 in float32; in bfloat16 attention rounds otherwise, and random weights tell the tokens apart by
little, so that answers drift. Exits with 1 if the share in float32 is below 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from larder.engine import Engine
from larder.models import PageUse, describe_steps, set_pages
from larder.session import empty_cache
from larder_bench.random_models import open_model

POLICIES = ("full", "snapkv", "keydiff", "streaming_llm", "h2o")
WORDS = ("harbour", "ledger", "green", "tower", "lantern", "orchard", "keeps", "paints", "seven")


def prompts(rows: int, words: int) -> list[str]:
    """Texts of different lengths."""
    return [
        " ".join(WORDS[(row + 3 * index + index * index) % len(WORDS)] for index in range(count))
        for row, count in enumerate(words + 7 * row for row in range(rows))
    ]


def run(engine: Engine, texts: list[str], new_tokens: int) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds of a generation from all texts, and the tokens."""
    device = engine.loaded.decoder.spec.device
    started = time.perf_counter()
    found = engine.generate(texts, max_new_tokens=new_tokens)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, [each.ids for each in found]


def equal_share(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> float:
    """Share of the tokens before the first difference of each sequence."""
    same = total = 0
    for mine, theirs in zip(one, other, strict=True):
        pairs = zip(mine, theirs, strict=False)
        same += next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(theirs)))
        total += max(len(mine), len(theirs))
    return same / max(1, total)


def step_milliseconds(engine: Engine, texts: list[str], options: argparse.Namespace) -> float:
    """Time of one step of all texts, without prefill."""
    short, long = 2, 2 + options.steps
    times = [run(engine, texts, count)[0] for count in (short, long)]
    return 1000 * (times[1] - times[0]) / options.steps


def compare(engine: Engine, name: str, rows: int, options: argparse.Namespace) -> float:
    """Print a row of the table, and return the share of equal tokens."""
    engine = engine.under(name, None if name == "full" else options.budget)
    decoder, texts = engine.loaded.decoder, prompts(rows, options.words)
    answers: dict[PageUse, list[tuple[int, ...]]] = {}
    times: dict[PageUse, list[float]] = {PageUse.OFF: [], PageUse.ON: []}
    arenas = {}
    how = ""
    for use in times:  # also to warm up: libraries load, graphs are captured
        set_pages(decoder, use)
        _, answers[use] = run(engine, texts, 2 + options.steps)
        arenas[use] = decoder.spec, decoder.captured
        if use is PageUse.ON:
            policy = engine.read(texts[0]).policy
            how = describe_steps(decoder, empty_cache(policy, decoder.spec))
    for _ in range(options.rounds):
        for use, own in times.items():
            decoder.spec, decoder.captured = arenas[use]
            own.append(step_milliseconds(engine, texts, options))
    plain, paged = (statistics.median(own) for own in times.values())
    share = equal_share(*answers.values())
    print(
        f"{rows:3} rows  {name:14} plain {plain:8.3f} ms  pages {paged:8.3f} ms  "
        f"ratio {paged / plain:5.2f}  equal {share:.3f}  {how}",
        flush=True,
    )
    return share


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--words", type=int, default=300, help="of the shortest prompt")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240.0, help="no further case after it")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try every path")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.model, options.words, options.budget = "random:qwen3-tiny", 60, 64
        options.steps, options.rounds, options.rows = 6, 1, [1, 2]
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("torch sees no GPU: run this with one, or --device cpu --tiny.", file=sys.stderr)
        return 2
    worst, started = 1.0, time.monotonic()
    for dtype in options.dtypes:
        engine = Engine(open_model(options.model, options.device, dtype))
        print(f"{options.model}, {dtype}, {options.device}, torch {torch.__version__}", flush=True)
        for rows in options.rows:
            for name in options.policies:
                if time.monotonic() - started > options.seconds:
                    print(f"{rows} rows of {name} were not measured: no time is left.")
                    continue
                share = compare(engine, name, rows, options)
                worst = min(worst, share) if dtype == "float32" else worst
    if worst < 1:
        print(f"In float32 only {worst:.3f} of the tokens are equal.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
