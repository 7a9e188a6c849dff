"""Scoring prompts by how well attention from them finds a keyed number in prose.

The text is read whole; entries are then scored by attention from a prompt that is read behind it
and forgotten, a quarter stays, and the expected answer is scored by its likelihood. Prompts: the
question, the question with the given beginning of the answer, and with the answer itself, which no
method can know.

    python benchmarks/scoring_prompts.py --corpus FOLDER --model smollm2 --texts 6

Six texts with two questions each take about 15 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from _needles import needle_texts

from larder.core import Question
from larder.engine import Engine
from larder_bench.scoring.teacher_forcing import score_answers

POLICIES = {
    "heads compete": 'whole() > patched(prompt="question") > pooled()',
    "heads alike": 'whole() > patched(prompt="question") > uniform()',
}
QUESTIONS = 2  # of each text
SHARE = 4  # one entry of so many stays
BETWEEN = "<|im_end|>\n<|im_start|>assistant\n"  # of SmolLM2's template


def prompts(question: Question) -> dict[str, str]:
    """Scoring prompts by name."""
    prompt = f"{question.question}{BETWEEN}{question.answer_prefix}"
    return {
        "question": question.question,
        "question and beginning of the answer": prompt,
        "question and answer": f"{prompt} {question.answer}",
    }


def main(options: argparse.Namespace) -> None:
    engine = Engine.load(options.model, policy="full")
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for chat in needle_texts(engine, options.model, options.corpus, range(options.texts)):
        tokens = len(engine.tokenizer.encode_conversation(chat).ids) // SHARE
        full = engine.read(chat)
        for question in chat.questions[:QUESTIONS]:
            (one,) = score_answers(engine, full, [question])
            found.setdefault(("full cache", ""), []).append((one.log_likelihood, one.exact))
            for policy, spelling in POLICIES.items():
                for name, prompt in prompts(question).items():
                    reader = engine.under(spelling, str(tokens))
                    memory = reader.read(replace(chat, questions=(question,)), {"question": prompt})
                    (one,) = score_answers(engine, memory, [question])
                    found.setdefault((policy, name), []).append((one.log_likelihood, one.exact))
    for (policy, name), results in found.items():
        row = {
            "entries": policy,
            "scoring prompt": name,
            "log-likelihood per token": round(fmean(one[0] for one in results), 2),
            "exact": round(fmean(one[1] for one in results), 2),
            "questions": len(results),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=int, default=6)
    main(parser.parse_args())
