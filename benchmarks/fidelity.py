"""How true every preset is to the full cache on real text, at equal bytes and without a task.

    python benchmarks/fidelity.py [PATH...] [--context 2000] [--following 128] ...

The beginning of every conversation (LoCoMo, RealTalk) is read under every preset with the budget
whose cache takes at most, and nearly, 1/4, 1/8 and 1/16 of the bytes of the full cache. The tokens
that really follow are then read behind both caches in scratch mode, and after each of them the two
next-token distributions are compared: KL(full || policy) in nats, whether the likeliest token is
the same, and how likely the real one is. Intervals are over conversations. Policies with a cache
per episode answer from the one that the last message leads to; those that must know a question
first are left out.

Results go to a JSONL file and are kept, as those of presets.py are; so are `--estimate` and
`--report`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from _cases import BASELINES, pairs
from _cells import Cell, Sizer, entries
from _running import DEMO, latest, named, parser, run

from larder import Engine, read_conversation
from larder.bench.measures.fidelity import compared
from larder.bench.rows import Row, known_rows
from larder.bench.tables import Scale, report
from larder.bench.truth import Truth, passage
from larder.session.memory import Memory
from larder.session.reading import gather

SCALES = (
    Scale("kl", "KL(full || policy) per token (nats, less is better)", digits=3),
    Scale("same", "Likeliest token is the same", digits=3),
    Scale("log_likelihood", "Log-likelihood of the real token (nats)", digits=3),
)


def main() -> None:
    options = _options()
    if options.report:
        rows = entries(latest(known_rows(options.out)))
        print(report({"all conversations": rows}, SCALES, BASELINES, pairs))
        return
    files = [file for path in options.data for file in _files(path)]
    chosen = [case for case in named(options) if not case.asks_first]
    engine = Engine.load(options.model, policy="full")
    sizer = Sizer(engine.loaded.decoder.spec)
    comparison = Comparison(engine, sizer, options.context, options.following)
    run(options, files, chosen, comparison.measure)


def _options() -> argparse.Namespace:
    options = parser(__doc__, "fidelity")
    options.add_argument("data", type=Path, nargs="*", default=[DEMO], help="files or folders")
    options.add_argument("--context", type=int, default=2000, help="tokens read, about")
    options.add_argument("--following", type=int, default=128, help="tokens compared at")
    return options.parse_args()


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.json")) if path.is_dir() else [path]


@dataclass(frozen=True)
class Comparison:
    """Reads passages at equal bytes and compares what comes next with what the full cache expects.

    Args:
        context: the most tokens of a beginning.
        following: tokens behind it.
        truths: what the full cache expects, by file, as far as it was asked for.
    """

    engine: Engine
    sizer: Sizer
    context: int
    following: int
    truths: dict[Path, Truth] = field(default_factory=dict)

    def measure(self, cell: Cell) -> Row:
        """One line: the figures of the cache, and how every token fared."""
        truth, policy = self._truth(cell.file), cell.case.policy
        source = truth.passage.source

        def read(tokens: int) -> Memory:
            return gather(self.engine.desk, source, policy.filled(tokens, None), {})

        memory, figures = self.sizer.read(cell, len(source.ids), read)
        return figures | {"items": compared(truth, memory)}

    def _truth(self, path: Path) -> Truth:
        if path not in self.truths:
            conversation = read_conversation(path)
            cut = passage(self.engine, conversation, self.following, self.context)
            self.truths[path] = Truth.of(self.engine, cut)
        return self.truths[path]


if __name__ == "__main__":
    main()
