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
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from _cases import BASELINES, pairs
from _cells import Cell, Sizer, entries
from _running import DEMO, latest, named, parser, run
from jaxtyping import Float
from torch import Tensor

from larder import Engine, read_conversation
from larder.bench.divergence import divergence
from larder.bench.rows import Row, known_rows
from larder.bench.tables import Scale, report
from larder.core.errors import InputError
from larder.core.types import Mode
from larder.models.passes import Row as Tokens
from larder.session.memory import Memory
from larder.session.reading import Source, gather
from larder.session.transcript import Transcript

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
class Passage:
    """The beginning of a conversation, and the tokens that follow it."""

    source: Source
    following: tuple[int, ...]

    @property
    def cue(self) -> str:
        """What was said last, by which an episode is found."""
        message = self.source.conversation.messages[-1]
        return message.utterance or message.content


@dataclass(frozen=True)
class Comparison:
    """Reads passages at equal bytes and compares what comes next with what the full cache expects.

    Args:
        context: the most tokens of a beginning, which ends with a message.
        following: tokens behind it.
        passages, truths: those cut and computed so far, by file.
    """

    engine: Engine
    sizer: Sizer
    context: int
    following: int
    passages: dict[Path, Passage] = field(default_factory=dict)
    truths: dict[Path, Float[Tensor, "N V"]] = field(default_factory=dict)

    def measure(self, cell: Cell) -> Row:
        """One line: the figures of the cache, and how every token fared."""
        passage, true = self._passage(cell.file), self._truth(cell.file)
        policy, desk = cell.case.policy, self.engine.desk

        def read(tokens: int) -> Memory:
            return gather(desk, passage.source, policy.filled(tokens, None), {})

        memory, figures = self.sizer.read(cell, len(passage.source.ids), read)
        logits = self._expected(memory, passage)
        real = torch.tensor(passage.following[1:])[:, None]
        likelihoods = logits[:-1].log_softmax(-1).gather(1, real)[:, 0]
        told = zip(
            divergence(true, logits)[:-1].tolist(),
            (true.argmax(-1) == logits.argmax(-1))[:-1].tolist(),
            likelihoods.tolist(),
            strict=True,
        )
        items = [
            {"kl": round(kl, 5), "same": same, "log_likelihood": round(lk, 4), "counts": True}
            for kl, same, lk in told
        ]
        return figures | {"items": items}

    def _passage(self, path: Path) -> Passage:
        if path not in self.passages:
            conversation = read_conversation(path)
            written = self.engine.scribe.write(conversation)
            ids, spans = written.ids, written.spans
            count = sum(stop <= self.context for _, stop in spans)
            cut = spans[count - 1][1] if count else 0
            if not count or len(ids) < cut + self.following:
                raise InputError(f"{path} is too short for {self.context} tokens and what follows.")
            begun = replace(conversation, messages=conversation.messages[:count], questions=())
            source = Source(begun, Transcript(ids[:cut], spans[:count]))
            self.passages[path] = Passage(source, ids[cut : cut + self.following])
        return self.passages[path]

    def _truth(self, path: Path) -> Float[Tensor, "N V"]:
        """What the full cache expects after each token that follows."""
        if path not in self.truths:
            passage, policy = self._passage(path), self.engine.policy
            memory = gather(self.engine.desk, passage.source, policy, {})
            self.truths[path] = self._expected(memory, passage)
        return self.truths[path]

    def _expected(self, memory: Memory, passage: Passage) -> Float[Tensor, "N V"]:
        cache, _ = memory.recall(passage.cue)
        rows, wanted = [Tokens(cache, passage.following)], range(len(passage.following))
        return self.engine.loaded.decoder.predict(rows, Mode.SCRATCH, wanted)


if __name__ == "__main__":
    main()
