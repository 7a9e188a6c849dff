"""What judging and merging cost: their share of a decode step and of reading, preset by preset.

    python benchmarks/cost.py [decode] [prefill] [--presets "h2o;d2o"] [--threads 1]

decode    A cache as the policy holds it at 8K of context, 2,048 entries per head filled with random
          numbers; the same token read with the policy watching and without, in turn. What the
          policy does in a step is everything it does while the pass goes by: tallies, scores,
          selection, folds, eviction. Where entries go only every so often, both kinds of step are
          timed and the mean over a whole window is taken. Storages that are not exact hold
          what they keep of 8K tokens with random keys and values, block by block.
prefill   2,048 tokens read into 512 entries per head, by blocks of 512 where the policy reads
          blocks. The policy's part is the time of its observer, evictions included, of telling
          how surprising tokens are, and of the passes read behind the cache to judge by. What is
          left, the appended passes, is the floor; beside it stands the same schedule with random
          scores and no merging.

`judging_s` is the time of the policy's own code, measured inside the pass; `share` is that over all
the step or all the reading. For decode steps the difference of the two medians is given as well:
it holds what judging does to the processor's caches, and the noise of both. On a busy machine take
`--clock thread` (one thread only), which does not count what others use. Presets over a tenth are
marked. `qwen3-0.6b` is a random-weight model in that shape. One JSONL line per case in
results/cost.jsonl.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _models import load_model
from _timing import environment, write
from _watching import Clocked, Stuffing, Watch, over_window, shares_of

from larder import Policy
from larder.bench.filling import filled
from larder.cache.sequence import Form, SequenceCache
from larder.core.observation import Calibration
from larder.core.types import Mode
from larder.models.calibration import MEASUREMENTS
from larder.models.decoder import Decoder
from larder.models.passes import Row
from larder.policy.planner import Planner
from larder.policy.storage.exact import Exact
from larder.prefill.meter import Meter
from larder.prefill.reader import Lane, Reader
from larder.prefill.tending import Tending
from larder.session.presets import PRESETS
from larder.session.reading import entries_of

CONTEXT, HELD = 8192, 2048
READ, BUDGET, BLOCK = 2048, 512, 512
EPISODE_TOKENS, PROMPT_TOKENS = 400, 64
MOST_SHARE = 0.1
OUT = Path("results/cost.jsonl")
CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["decode", "prefill"])
    parser.add_argument("--presets", default="", help="names or sentences, by ';'; default: all")
    parser.add_argument("--model", default="qwen3-0.6b", choices=["seed", "qwen3-0.6b"])
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own number")
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--rounds", type=int, default=9, help="decode steps of each kind")
    parser.add_argument("--context", type=int, default=CONTEXT, help="decode: true length")
    parser.add_argument("--held", type=int, default=HELD, help="decode: entries per head")
    parser.add_argument("--read", type=int, default=READ, help="prefill: tokens read")
    parser.add_argument("--budget", type=int, default=BUDGET, help="prefill: entries per head")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    decoder = load_model(options.model)[1]
    names = options.presets.split(";") if options.presets else list(PRESETS)
    floors: dict[str, float] = {}
    for part in options.parts:
        print(f"\n{part}: {options.model}, {torch.get_num_threads()} threads")
        for name in names:
            measure = _decode if part == "decode" else _prefill
            row = measure(name, decoder, options, floors)
            settings = {"part": part, "preset": name, "model": options.model}
            settings |= {"clock": options.clock, "rounds": options.rounds}
            write(OUT, [settings | row | environment()])
            mark = "  over a tenth" if row["share"] > MOST_SHARE else ""
            figures = "  ".join(f"{key} {row[key]:8.4f}" for key in row if key.endswith("_s"))
            print(f"  {name:18} {row['share']:6.1%}  {figures}{mark}", flush=True)


def _decode(
    name: str, decoder: Decoder, options: argparse.Namespace, floors: dict[str, float]
) -> dict[str, Any]:
    """Steps in which entries go and steps in which none do, weighed over a window of both."""
    del floors
    policy = Policy.parse(name).filled(options.held, None)
    excess = policy.timing.excess()
    due = _steps(decoder, policy, excess or 0, options)
    if not excess:
        return due
    quiet = _steps(decoder, policy, 0, options)
    return over_window(due, quiet, excess)


@torch.no_grad()
def _steps(
    decoder: Decoder, policy: Policy, excess: int, options: argparse.Namespace
) -> dict[str, float]:
    """Steps over a cache with `excess` entries per head above its budget, watched and not."""
    clock, planner = CLOCKS[options.clock], _calibrated(policy, decoder)
    whole = policy.budget.tokens is None or policy.budget.tokens >= options.context
    entries = options.context if whole else options.held + excess
    form = Form.DENSE if whole else Form.RAGGED
    if policy.storage == Exact():
        pristine = filled(decoder, form, entries, planner.ledger, 0.0, options.context)
    else:
        pristine = _reading(Stuffing(decoder, clock), policy, options, options.context)[1]
    cache = pristine.fork() if excess else pristine
    layers = tuple(layer.index for layer in decoder.spec.managed)
    held = options.held if whole else entries_of(policy, decoder.spec)
    reading = policy.timing.reading_tokens(held)
    generated, context = held - reading or options.held // 8, max(options.context, held)
    quotas = planner.quotas(reading, context, layers, _facts(policy, decoder))
    starts = (options.context - generated,)
    tending = Tending(planner, held, (quotas,), starts, decoder.foresee)
    alone, watched, judging = [], [], []
    for number in range(options.rounds + 1):
        if excess:
            cache = pristine.fork()
        cache.allocate(64)
        mark, before, row = cache.next_position, cache.managed_entries, Row(cache, (7,))
        started = clock()
        decoder.predict([row], Mode.APPEND, [0])
        alone.append(clock() - started)
        cache.truncate(mark)
        started = clock()
        watch = Watch(clock, tending.observer([0], [row], [number + generated]))
        setting_up = clock() - started
        decoder.predict([row], Mode.APPEND, [0], watch)
        watched.append(clock() - started)
        judging.append(watch.seconds + setting_up)
        if cache.managed_entries > before:
            cache.truncate(mark)  # nothing went: steps would grow longer
    return shares_of(*(statistics.median(values[1:]) for values in (judging, watched, alone)))


def _prefill(
    name: str, decoder: Decoder, options: argparse.Namespace, floors: dict[str, float]
) -> dict[str, Any]:
    """One reading under the policy, and once per schedule one with random scores."""
    policy = Policy.parse(name).filled(options.budget, None)
    clock = CLOCKS[options.clock]
    clocked = Clocked(decoder, clock)
    seconds, _ = _reading(clocked, policy, options, options.read)
    schedule = str(policy.schedule)
    if schedule not in floors:
        plain = _plain(policy)
        floors[schedule] = _reading(Clocked(decoder, clock), plain, options, options.read)[0]
    behind = clocked.judging + clocked.scratch
    return {
        "share": behind / seconds,
        "read_s": seconds,
        "judging_s": clocked.judging,
        "scratch_s": clocked.scratch,
        "random_read_s": floors[schedule],
        "passes": len(clocked.passes),
    }


def _plain(policy: Policy) -> Policy:
    """The same schedule with random scores, and what is rejected dropped."""
    schedule = type(policy.schedule).__name__.lower()
    if policy.budget.tokens is None or policy.schedule.tokens is None:
        schedule = "whole"
    block = "" if policy.schedule.tokens is None else f"tokens={policy.schedule.tokens}"
    tokens = policy.budget.tokens or BUDGET
    return Policy.parse(f"{schedule}({block}) > random() > uniform(tokens={tokens})")


@torch.no_grad()
def _reading(
    clocked: Clocked, policy: Policy, options: argparse.Namespace, count: int
) -> tuple[float, SequenceCache]:
    """Read so many tokens into one cache, as a session does."""
    decoder, clock, storage = clocked.decoder, clocked.clock, policy.storage
    planner = _calibrated(policy, decoder)
    tokens, ids = entries_of(policy, decoder.spec), _ids(decoder, count)
    layers = tuple(layer.index for layer in decoder.spec.managed)
    quotas = planner.quotas(tokens, len(ids), layers, _facts(policy, decoder))
    whole = all(quota >= len(ids) for quota in quotas.values())
    exact = whole and storage == Exact()
    own = (Form(storage.form), planner.ledger, storage.codecs, storage.pairing)
    book = {name: _ids(decoder, PROMPT_TOKENS) for name in policy.scorer.wanted()}
    if "episode" in book:
        book["episode"] = _ids(decoder, EPISODE_TOKENS)
    lane = Lane(SequenceCache(decoder.spec, *(Form.DENSE,) if exact else own), book)
    reader = Reader(clocked, planner, tokens, quotas, Meter())  # type: ignore[arg-type]
    started = clock()
    policy.schedule.read(reader, [lane], ids, _blind)
    return clock() - started, lane.cache


def _calibrated(policy: Policy, decoder: Decoder) -> Planner:
    """The policy's planner, with random measurements."""
    layers = decoder.spec.managed
    return policy.planner.under(_facts(policy, decoder), tuple(layer.index for layer in layers))


def _facts(policy: Policy, decoder: Decoder) -> Calibration:
    layers, source = decoder.spec.managed, random.Random(0)
    grains = {name: MEASUREMENTS.load(name).grain for name in sorted(policy.calibrations)}
    counts = {name: sum(map(grain.count, layers)) for name, grain in grains.items()}
    return {name: tuple(source.random() for _ in range(n)) for name, n in counts.items()}


def _ids(decoder: Decoder, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(count)
    top = min(decoder.vocabulary, 4096)
    return tuple(torch.randint(6, top, (count,), generator=generator).tolist())


def _blind(*seen: object) -> None:
    """Watches nothing, and tells of no progress."""


if __name__ == "__main__":
    main()
