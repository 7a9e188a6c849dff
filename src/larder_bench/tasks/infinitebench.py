"""InfiniteBench, from a local folder.

Xinrong Zhang et al., "InfiniteBench: Extending Long Context Evaluation Beyond 100K Tokens" (2024),
arXiv:2402.13718. The folder `infinitebench` of `--data` holds the release's `NAME.jsonl`, with
`context`, `input`, `answer` and `options` on each line. Seeds select lines in turn; a
context that is too long loses its middle, as in the released code. Prompts are our own, plain ones;
for multiple choice the answer is one letter. Besides this project's scores, generated answers get
the set's own (`larder_bench.scoring.dataset_metrics`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from larder.core import Conversation, InputError, Question
from larder_bench.datasets.documents import document_conversation
from larder_bench.datasets.json_lines import Fields, load_sample, required_field
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask

DEFAULT_QUESTIONS = {
    "longbook_sum_eng": "Summarize the book.",
    "math_calc": "Give the value after each operation, as a list.",
    "longdialogue_qa_eng": "Who is the person whose name stands as $$MASK$$? Answer with the name.",
}
SET_METRICS: Mapping[str, str] = {
    **dict.fromkeys(("passkey", "number_string"), "first_digits"),
    **dict.fromkeys(("kv_retrieval", "longdialogue_qa_eng"), "among_words"),
    **dict.fromkeys(("longbook_choice_eng", "code_debug"), "choice"),
    "longbook_qa_eng": "f1",
    "longbook_qa_chn": "f1_characters",
    "longbook_sum_eng": "rouge_l_sum",
    "code_run": "last_number",
    "math_find": "first_number",
    "math_calc": "numbers_in_a_row",
}
ANSWER = "{question}\nAnswer in as few words as you can."
ONE_LETTER = "{question}\nAnswer with one letter alone."
LIST_ANSWER_SET = "math_calc"  # its answer is one list, not a list of answers


@dataclass(frozen=True)
class Infinitebench(BenchTask):
    """Sample of a set.

    Args:
        set: name of the set, such as "passkey" or "longbook_qa_eng".
    """

    set: str = "passkey"

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        sample = load_sample("infinitebench", self.set, seed, sources)
        text = str(required_field(sample, "context", self.set))
        options = [str(option) for option in sample.get("options") or ()]
        question = self._question(sample, options)
        prompt = ONE_LETTER if options else ANSWER
        name = f"infinitebench-{tokens}-{seed}"
        return document_conversation(name, text, question, tokens, sources, question_prompt=prompt)

    def _question(self, sample: Fields, options: list[str]) -> Question:
        text = str(required_field(sample, "input", self.set)).strip()
        text = text or DEFAULT_QUESTIONS.get(self.set, "")
        if not text:
            raise InputError(f"a sample of {self.set} must have an 'input'.")
        answers = self._answers(required_field(sample, "answer", self.set))
        if options:
            lettered = dict(zip(ascii_uppercase, options, strict=False))
            text = "\n".join([text, *(f"{key}. {option}" for key, option in lettered.items())])
            answers = _letters(answers, lettered)
        if not answers:
            raise InputError(f"a sample of {self.set} must have an 'answer' among its options.")
        scorer = SET_METRICS.get(self.set, "")
        return Question(text, answers[0], self.set, others=tuple(answers[1:]), scorer=scorer)

    def _answers(self, answer: Any) -> list[str]:
        if not isinstance(answer, list):
            return [str(answer)]
        return [str(answer)] if self.set == LIST_ANSWER_SET else [str(each) for each in answer]


def _letters(answers: list[str], options: dict[str, str]) -> list[str]:
    """Letters of the answers, then their texts; an answer may be a letter already."""
    right = [key for key, text in options.items() if text in answers or key in answers]
    return [*right, *(options[key] for key in right)]


Part = Infinitebench
