"""Texts of keyed needles in prose that benchmarks share, in the wording of the model."""

from __future__ import annotations

from pathlib import Path

from larder.core import Conversation
from larder.engine import Engine
from larder_bench.datasets.prompt_templates import worded_chat
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.task_prompts import Wording
from larder_bench.tasks.base import parse_task

TASK = "needles(kind='magic', needles=4, hay='prose')"
TOKENS = 1500


def needle_texts(
    engine: Engine, model: str, corpus: Path, seeds: range, tokens: int = TOKENS
) -> list[Conversation]:
    """Texts of the study `ruler`, or of another length, one per seed."""
    wording = Wording.of_model(model, bool(engine.tokenizer.tokenizer.chat_template))
    sources = TaskSources(engine.tokenizer.count_tokens, corpus, None, wording)
    task = parse_task(TASK)
    return [worded_chat(task.make(seed, tokens, sources), wording) for seed in seeds]
