"""Log loss of the answers to questions about a text: a cartridge, and KVzip at as many entries.

The text is a conversation whose questions have answers; none of them is trained on, since
self-study sees the text alone. Each answer is scored behind its question, and so are three answers
to other questions: since a cartridge also learns how short an answer is, the share of questions
whose own answer is the likeliest says what it knows. With --train the cartridge is trained first,
as `larder train cartridge FILE --slots N` does.

    python benchmarks/cartridge.py FILE --model smollm2 --dtype bfloat16 --slots 256 --train
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random
from statistics import fmean

import torch

from larder.cache import SequenceCache
from larder.core import Conversation, Mode
from larder.engine import Engine
from larder.evaluation import Bootstrap
from larder.models import BatchSegment, cartridge_path
from larder.session import read_conversation
from larder.training import CartridgeSettings, StudyCounts, train_cartridge

OTHERS = 3  # answers that an answer is compared with
POLICIES = {
    "full": "whole() > unlimited()",
    "cartridge": "cartridge(slots={slots}) > unlimited()",
    "kvzip": "whole() > reconstruct() > global(tokens={slots})",
    "kvzip_uniform": "whole() > reconstruct() > uniform(tokens={slots})",
    "streaming_llm": "whole() > sinks_and_window() > uniform(tokens={slots})",
    "random": "whole() > random() > uniform(tokens={slots})",
}


def log_losses(
    engine: Engine, conversation: Conversation, seed: int
) -> tuple[list[float], list[float], int]:
    """Mean negative log-likelihood of each answer, whether it is the likeliest, bytes of the cache.

    The end of turn is part of an answer. It is compared with answers to other questions.
    """
    memory, source = engine.read(conversation), Random(seed)
    cache, found, is_best = memory.caches.activate(0), list[float](), list[float]()
    answers = sorted({one.answer for one in conversation.questions})
    for one in conversation.questions:
        others = [answer for answer in answers if answer != one.answer]
        asked = conversation.question_prompt.format(question=one.question)
        scores = answer_losses(
            engine, cache, asked, [one.answer, *source.sample(others, min(OTHERS, len(others)))]
        )
        found.append(scores[0])
        is_best.append(float(scores[0] == min(scores)))
    return found, is_best, cache.nbytes


def answer_losses(
    engine: Engine, cache: SequenceCache, asked: str, answers: list[str]
) -> list[float]:
    """Mean negative log-likelihood of several answers to a question."""
    question = engine.tokenizer.encode_question(asked)
    encoded = [engine.tokenizer.encode_answer(answer) for answer in answers]
    ids, rows = list[int](), list[int]()
    for answer in encoded:
        first = len(ids) + len(question)
        rows += range(first - 1, first - 1 + len(answer))
        ids += [*question, *answer]
    sections = tuple(len(question) + len(answer) for answer in encoded)
    segment = BatchSegment(cache, tuple(ids), sections)
    logits = engine.runtime.decoder.forward_logits([segment], Mode.SCRATCH, rows).float()
    parts = zip(logits.split([len(answer) for answer in encoded]), encoded, strict=True)
    return [float(torch.nn.functional.cross_entropy(x, torch.tensor(own))) for x, own in parts]


def train(engine: Engine, conversation: Conversation, args: argparse.Namespace) -> None:
    counts = StudyCounts(*(int(number) for number in args.study.split(",")))
    settings = CartridgeSettings(
        args.slots, args.epochs, args.batch_tokens, args.rate, seed=args.seed, study=counts
    )
    started = time.perf_counter()

    def progress(done: int, total: int) -> None:
        if done % 50 == 0:
            print(f"step {done} of {total}, {time.perf_counter() - started:.0f} s", flush=True)

    learned, ids = train_cartridge(engine.under("full"), conversation, settings, progress)
    learned.save(cartridge_path(engine.runtime.decoder.spec.fingerprint, ids, args.slots))
    print(learned.card.dumps(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--study", default="160,80,40,16", help="conversations of each kind")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engine, conversation = Engine.load(args.model, dtype=args.dtype), read_conversation(args.file)
    if args.train:
        train(engine, conversation, args)
    found = dict[str, list[float]]()
    for name in args.policies.split(","):
        own = engine.under(POLICIES[name].format(slots=args.slots))
        found[name], is_best, held = log_losses(own, conversation, args.seed)
        row = {"policy": name, "nll": fmean(found[name]), "likeliest": fmean(is_best)}
        print(json.dumps({**row, "bytes": held, "answers": found[name]}), flush=True)
    if {"cartridge", "kvzip"} <= found.keys():
        pairs = ([[x] for x in found[name]] for name in ("cartridge", "kvzip"))
        less = Bootstrap().difference(*pairs)
        print(f"cartridge less kvzip {less.mean:+.4f} [{less.low:+.4f} {less.high:+.4f}]")


if __name__ == "__main__":
    main()
