"""Comparison of Larder, NVIDIA/kvpress and caches of transformers on equal models, inputs and
budgets.

    python benchmarks/peers/side_by_side.py [TASK...] --peer-python PATH
        [--tokens 4000] [--files 3] [--budget 1/4] [--model seed] [--peer NAME]...
        [--estimate | --report]

PATH is the interpreter of an environment in which the peers are installed from their packages; they
need an older transformers than Larder is developed with. Create it like this (torch first,
otherwise it may bring gigabytes of libraries for accelerators):

    python3 -m venv peers
    peers/bin/pip install torch==2.13.0
    peers/bin/pip install kvpress optimum-quanto hqq torch==2.13.0

Every cell runs in a process of its own; Larder and peers alternate on each conversation, with the
same token ids and number of threads. A row has exact match of greedy answers; bytes of keys and
values actually held, counted by tensor storage on both sides (`_memory.py`), masked entries and
their indices included; the peak memory of the process, and its increase over the loaded model;
seconds of prefill (median of `--repeats`) by the clock and of the processor, to the first token of
an answer and between tokens. Times are meaningful if nothing else runs, and as ratios.

`--model random:qwen3-0.6b` gives the cost in a real model shape: its output is meaningless, so no
answer is scored and all have equal length; two questions are asked by default. Rows go to
results/peers.jsonl like those of `larder bench`; `larder report` and `larder plot` read them, and
an interrupted run resumes. `--report` prints the tables of measured rows and runs nothing.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _equal_pairs import EQUAL_PAIRS
from _jobs import PROCESS_PER_CELL, PROCESS_PER_POLICY, STUDY, ComparisonSetup, JobRunner, jobs_of
from _pairs import PAIRS, PeerPair, pairs_of
from _ratios import tables

from larder.core import LarderError
from larder_bench.execution.resumable_run import ResumableRun, RunProgress, estimate_seconds
from larder_bench.results.rows import Row, append_rows, cell_key, existing_rows, read_results

OUT = Path("results/peers.jsonl")
NEW_TOKENS = 32
NEAREST, EQUAL = "nearest", "equal"


def main() -> None:
    options = _options()
    try:
        if options.report:
            rows = [row for row in read_results([options.out]).cells if row["study"] == STUDY]
            print("\n".join(tables(_pairs(options), rows)))
            return
        with tempfile.TemporaryDirectory() as folder:
            _compare(options, ComparisonSetup.of(options, Path(folder), _command(options)))
    except LarderError as error:
        sys.exit(str(error))


def _compare(options: argparse.Namespace, setting: ComparisonSetup) -> None:
    pairs = _pairs(options)
    jobs = jobs_of(setting, pairs, options.tasks, options.tokens, options.budget)
    measure = JobRunner(setting, jobs).measure
    if options.estimate:
        estimates = estimate_seconds(jobs, lambda job: (job.policy, job.tokens), measure)
        for (policy, tokens), seconds in estimates.items():
            print(f"{policy:60} {tokens:9,} {seconds:8.0f} s")
        print(f"{'all':70} {sum(estimates.values()):8.0f} s")
        return
    run = ResumableRun(jobs, setting.head, cell_key, measure, options.out, {})
    known = {row.get("id") for row in existing_rows(options.out)}
    append_rows(
        options.out, [row for row in setting.environments.values() if row["id"] not in known]
    )
    run.run(_print_row)
    keys = {cell_key(setting.head(job)) for job in jobs}
    rows = [row for row in read_results([options.out]).cells if cell_key(row) in keys]
    print("\n".join(tables(pairs, rows)))


def _pairs(options: argparse.Namespace) -> list[PeerPair]:
    return pairs_of(options.peer, EQUAL_PAIRS if options.pairs == EQUAL else PAIRS)


def _print_row(row: Row, progress: RunProgress) -> None:
    outcome = row.get("refused", "")
    if not outcome:
        held = f"KV {row['kv_bytes'] / 2**20:.2f} MiB"
        exact = [item.get("own", item["exact"]) for item in row["items"] if item["counts"]]
        right = f"exact {sum(exact)}/{len(exact)}, " if exact else ""
        outcome = f"{right}{held}, prefill {row['prefill_seconds']:.2f} s"
    done = f"{progress.done}/{progress.total}, {progress.left_seconds:.0f} s left"
    print(f"{done}  {row['policy']} {row['budget']} seed {row['seed']}: {outcome}", file=sys.stderr)


def _command(options: argparse.Namespace) -> str:
    """Command that reproduces the rows."""
    words = ["python", "benchmarks/peers/side_by_side.py", *options.tasks]
    words += ["--tokens", ",".join(map(str, options.tokens)), "--files", str(options.files)]
    words += ["--first-seed", str(options.first_seed)] if options.first_seed else []
    words += [word for budget in options.budget for word in ("--budget", budget)]
    words += ["--model", options.model, "--repeats", str(options.repeats)]
    words += ["--threads", str(options.threads)]
    words += ["--device", options.device] if options.device != "cpu" else []
    words += ["--dtype", options.dtype] if options.dtype != "float32" else []
    words += ["--questions", str(options.questions)] if options.questions else []
    words += ["--new-tokens", str(options.new_tokens)] if options.new_tokens != NEW_TOKENS else []
    words += ["--pairs", options.pairs] if options.pairs != NEAREST else []
    words += ["--question", options.question] if options.question != "after" else []
    words += ["--process", options.process] if options.process != PROCESS_PER_CELL else []
    words += [word for peer in options.peer for word in ("--peer", peer)]
    folder = [] if options.corpus is None else ["--corpus", "FOLDER"]
    return shlex.join([*words, *folder, "--peer-python", "PYTHON"])


def _options() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    whole = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("tasks", nargs="*", default=["lifelog()"], metavar="TASK")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--tokens", type=whole, default=[4000])
    parser.add_argument("--files", type=_from(1), default=3)
    parser.add_argument("--first-seed", type=_from(0), default=0)
    parser.add_argument("--budget", action="append", default=[], help="default 1/4")
    parser.add_argument("--model", default="seed")
    parser.add_argument("--peer", action="append", default=[], help="default all")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=_from(1), default=1)
    parser.add_argument("--repeats", type=_from(1), default=3, help="number of timed prefills")
    parser.add_argument(
        "--questions", type=_from(0), default=0, help="questions of each conversation; default all"
    )
    parser.add_argument(
        "--pairs",
        choices=[NEAREST, EQUAL],
        default=NEAREST,
        help="the nearest policies of Larder, or those with the parameters of kvpress's defaults",
    )
    parser.add_argument("--question", choices=["after", "inside"], default="after")
    parser.add_argument(
        "--process",
        choices=[PROCESS_PER_CELL, PROCESS_PER_POLICY],
        default=PROCESS_PER_CELL,
        help="one process for each cell, or for all conversations of a method, without warm-up",
    )
    most = "maximum tokens of an answer"
    parser.add_argument("--new-tokens", type=_from(1), default=NEW_TOKENS, help=most)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--estimate", action="store_true", help="run only one cell of each kind")
    parser.add_argument("--report", action="store_true", help="only print the tables of --out")
    options = parser.parse_args()
    options.budget = options.budget or ["1/4"]
    return options


def _from(least: int) -> Callable[[str], int]:
    """Parser of whole numbers from `least` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"write a whole number from {least} on, not {text!r}")
        return int(text)

    return number


if __name__ == "__main__":
    main()
