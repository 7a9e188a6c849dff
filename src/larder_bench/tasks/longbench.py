"""LongBench, from a local folder.

Yushi Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding"
(2023), arXiv:2308.14508. The folder `longbench` of `--data` holds the release's `NAME.jsonl` (or
`data/NAME.jsonl`), with `input`, `context` and `answers` on each line. Seeds select lines
in turn; a context that is too long loses its middle, as in the released code. If the folder holds
the release's `dataset2prompt.json` (or `config/dataset2prompt.json`), its prompts are used, else
our own, plain ones. Besides this project's scores, generated answers get the data set's own: F1,
ROUGE-L, edit similarity, classes or numbers by set (`larder_bench.scoring.dataset_metrics`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from larder.core import Conversation, InputError, Question
from larder_bench.datasets.documents import document_conversation
from larder_bench.datasets.json_lines import Fields, load_sample, required_field
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask

PROMPTS = ("dataset2prompt.json", "config/dataset2prompt.json")
CONTEXT, INPUT = "{context}", "{input}"
SUMMARIZE = "Summarize the text on one page."
DEFAULT_QUESTIONS = {
    "gov_report": SUMMARIZE,
    "multi_news": SUMMARIZE,
    "vcsum": SUMMARIZE,
    "passage_count": "How many different paragraphs are there? Answer with the number alone.",
    "lcc": "Write the next line of the code.",
}
SET_METRICS: Mapping[str, str] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en"), "f1"),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), "f1"),
    "triviaqa": "f1_of_line",
    "multifieldqa_zh": "f1_characters",
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), "rouge_l"),
    "samsum": "rouge_l_of_line",
    **dict.fromkeys(("dureader", "vcsum"), "rouge_l_characters"),
    **dict.fromkeys(("trec", "lsht"), "classes"),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), "share_of_numbers"),
    "passage_count": "share_of_numbers",
    **dict.fromkeys(("lcc", "repobench-p"), "edit_similarity"),
}
ANSWER = "{question}\nAnswer in as few words as you can."


@dataclass(frozen=True)
class Longbench(BenchTask):
    """Sample of a set.

    Args:
        set: name of the set, such as "hotpotqa" or "hotpotqa_e".
    """

    set: str = "multifieldqa_en"

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        sample = load_sample("longbench", self.set, seed, sources)
        opening, prompt = self._prompts(sources)
        question_text = str(required_field(sample, "input", self.set)).strip()
        text = str(required_field(sample, "context", self.set))
        question = self._question(
            sample, question_text or DEFAULT_QUESTIONS.get(self._base, SUMMARIZE)
        )
        name = f"longbench-{tokens}-{seed}"
        if not question_text and not opening:
            prompt = "{question}"
        return document_conversation(name, text, question, tokens, sources, opening, prompt)

    @property
    def _base(self) -> str:
        """Name of the original set: sets of even lengths use its questions and metrics."""
        return self.set.removesuffix("_e")

    def _question(self, sample: Fields, text: str) -> Question:
        answers = required_field(sample, "answers", self.set)
        if not isinstance(answers, list) or not answers:
            raise InputError(f"a sample of {self.set} must have a list of 'answers'.")
        first, *others = map(str, answers)
        classes = tuple(map(str, sample.get("all_classes") or ()))
        scorer = SET_METRICS.get(self._base, "")
        return Question(text, first, self.set, others=tuple(others), scorer=scorer, classes=classes)

    def _prompts(self, sources: TaskSources) -> tuple[str, str]:
        """Prompt text before and after the context."""
        folder = sources.folder("longbench")
        for path in (folder / name for name in PROMPTS):
            if path.is_file():
                before, _, after = self._template(path, sources).partition(CONTEXT)
                after = after.replace("{", "{{").replace("}", "}}")
                return before, after.replace("{{input}}", "{question}").strip()
        return "", ANSWER

    def _template(self, path: Path, sources: TaskSources) -> str:
        templates = sources.once(path, lambda path: json.loads(path.read_text(encoding="utf-8")))
        if self._base not in templates:
            raise InputError(f"{path} has no prompt for {self._base!r}.")
        return templates[self._base]


Part = Longbench
