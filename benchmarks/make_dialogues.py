"""Generator of conversations with known answers, as files for `larder eval` and benchmarks.

    python benchmarks/make_dialogues.py [OUT] [--kinds 'lifelog > needles(hay="prose")'] [--files 9]
        [--tokens 1500] [--corpus FOLDER] [--data FOLDER] [--seed 0]

A kind is a task of `larder_bench.tasks` with its parameters, spelled like a policy; kinds are
separated by commas, or by ">" if they have parameters. With a corpus, `needles` are placed in its
prose unless `hay` is given. `mixed` and `bookings` need the dialogues of a corpus, and tasks on
public data sets their folders in that of `--data`; otherwise they are left out. Files are named
KIND-TOKENS-N.json; equal seeds give equal files.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

from larder.core import LarderError, public_name
from larder.models import load
from larder.session import TokenizerAdapter
from larder_bench.datasets.conversation_file import conversation_json
from larder_bench.datasets.haystack import Haystack
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask, parse_task
from larder_bench.tasks.needles import NeedlesTask

SEEDS = 1000  # files of one `--seed`
BORDER = re.compile(r"\s*(?:>|,(?![^(]*\)))\s*")


def main() -> None:
    options = _options()
    count = TokenizerAdapter(load("seed").tokenizer).count_tokens
    sources = TaskSources(count, options.corpus, options.data)
    options.out.mkdir(parents=True, exist_ok=True)
    for sentence in BORDER.split(options.kinds):
        task = _task(sentence, sources)
        try:
            _write(task, public_name(type(task)), sources, options)
        except LarderError as error:
            print(f"{sentence} left out: {error}", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("results/dialogues"))
    parser.add_argument("--kinds", default="lifelog,mixed,bookings,needles,recite")
    parser.add_argument("--files", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--corpus", type=Path, help="folder of prose and dialogues")
    parser.add_argument("--data", type=Path, help="folder with a folder per public data set")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _task(sentence: str, sources: TaskSources) -> BenchTask:
    task = parse_task(sentence)
    if isinstance(task, NeedlesTask) and sources.corpus is not None and "hay" not in sentence:
        return replace(task, hay=Haystack.PROSE)
    return task


def _write(task: BenchTask, kind: str, sources: TaskSources, options: argparse.Namespace) -> None:
    for number in range(options.files):
        conversation = task.make(options.seed * SEEDS + number, options.tokens, sources)
        path = options.out / f"{kind}-{options.tokens}-{number}.json"
        path.write_text(conversation_json(conversation), encoding="utf-8")
        print(
            path.name,
            len(conversation.messages),
            "messages,",
            len(conversation.questions),
            "questions",
        )


if __name__ == "__main__":
    main()
