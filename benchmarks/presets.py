"""All presets on conversations with known answers, at equal bytes.

    python benchmarks/presets.py [FOLDER] [--kinds lifelog,recite] [--shares 1/4,1/8] ...

Every file KIND-SIZE-N.json of the folder (see make_dialogues.py) is read under every preset with
the budget whose cache takes at most, and nearly, 1/4, 1/8 and 1/16 of the bytes of the full cache;
positions, columns and scales count. Policies with one cache per episode have that for each cache.
All questions are then scored in packed passes in which nothing is evicted: exact match of greedy
decoding, and log-likelihood of the expected answer; a recital item by item.

Results go to a JSONL file, one line per file, policy and share. Lines already there are kept, so a
run that was stopped goes on, and new presets are added by running again under the same `--code`.
`--estimate` measures one file per policy and says how long all take. `--report` prints tables in
Markdown and runs nothing: every preset, every preset against random and against H2O, and pairs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from _cases import BASELINES, pairs
from _cells import Cell, Sizer, entries
from _running import DEMO, latest, named, parser, run

from larder import Conversation, Engine, read_conversation
from larder.bench.forced import Forced, force, parts_of
from larder.bench.items import items_of
from larder.bench.recite import KIND as RECITE
from larder.bench.rows import Row, known_rows
from larder.bench.tables import Scale, report
from larder.core.conversation import Question
from larder.session.memory import Memory

KINDS = "lifelog,mixed,bookings,needles,recite"
SCALES = (
    Scale("exact", "Exact match", digits=2),
    Scale("log_likelihood", "Log-likelihood per token (nats)", digits=2),
)


def main() -> None:
    options = _options()
    if options.report:
        rows = [row for row in latest(known_rows(options.out)) if _kind(row) in options.kinds]
        groups = {
            kind: entries([row for row in rows if _kind(row) == kind]) for kind in options.kinds
        }
        groups["all but recite"] = entries([row for row in rows if _kind(row) != RECITE])
        print(report(groups, SCALES, BASELINES, pairs))
        return
    run(options, _files(options), named(options), Scorer.load(options.model).measure)


def _options() -> argparse.Namespace:
    options = parser(__doc__, "presets")
    options.add_argument("data", type=Path, nargs="?", default=DEMO)
    options.add_argument("--kinds", default=f"{KINDS},conversation", type=lambda t: t.split(","))
    return options.parse_args()


def _files(options: argparse.Namespace) -> list[Path]:
    files = sorted(options.data.glob("*.json"), key=lambda path: (len(path.stem), path.stem))
    return [path for kind in options.kinds for path in files if path.stem.split("-")[0] == kind]


def _kind(row: Row) -> str:
    return row["file"].split("-")[0]


@dataclass(frozen=True)
class Scorer:
    """Reads files at equal bytes and scores their questions."""

    engine: Engine
    sizer: Sizer

    @staticmethod
    def load(model: str) -> Scorer:
        engine = Engine.load(model, policy="full")
        return Scorer(engine, Sizer(engine.loaded.decoder.spec))

    def measure(self, cell: Cell) -> Row:
        """One line: the figures of the cache, and how every item fared."""
        conversation = _conversation(cell.file)
        questions = conversation.questions
        memory, figures = self._read(cell, conversation, questions[0])
        results = force(self.engine, memory, questions[:1] if cell.case.asks_first else questions)
        if cell.case.asks_first:
            for question in questions[1:]:
                memory, _ = self._read(cell, conversation, question)
                results += force(self.engine, memory, [question])
        return figures | {"items": self._items(conversation, results)}

    def _read(
        self, cell: Cell, conversation: Conversation, question: Question
    ) -> tuple[Memory, Row]:
        policy = cell.case.policy
        prompts = {"question": question.question} if cell.case.asks_first else {}

        def read(tokens: int) -> Memory:
            budget = None if cell.case.is_full else str(tokens)
            return self.engine.under(policy, budget).read(conversation, prompts)

        context = len(self.engine.scribe.write(conversation).ids)
        return self.sizer.read(cell, context, read)

    def _items(self, conversation: Conversation, results: list[Forced]) -> list[Row]:
        """What is scored: every answer that the text states, and every item of a recital."""
        text = "".join(message.content for message in conversation.messages)
        items: list[Row] = []
        for result in results:
            answer, parts, spans = result.question.answer, [result], [(0, None)]
            if result.question.kind == RECITE:
                spans = items_of(answer)
                parts = parts_of(result, self.engine.scribe, spans)
            items += [
                {
                    "kind": result.question.kind,
                    "exact": part.exact,
                    "log_likelihood": round(part.log_likelihood, 4),
                    "counts": answer[start:stop].strip() in text,
                }
                for part, (start, stop) in zip(parts, spans, strict=True)
            ]
        return items


@lru_cache(maxsize=128)
def _conversation(path: Path) -> Conversation:
    return read_conversation(path)


if __name__ == "__main__":
    main()
