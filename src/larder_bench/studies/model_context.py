"""Loaded model, with the conversations and embedded segments that its cells share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core import Conversation
from larder.engine import Engine
from larder_bench.datasets.prompt_templates import worded_chat
from larder_bench.datasets.sources import TaskSources
from larder_bench.results.rows import Row
from larder_bench.retrievals.base import SegmentIndex
from larder_bench.scoring.full_cache_reference import FullCacheReference, split_context
from larder_bench.scoring.recorded_scores import RecordedText
from larder_bench.scoring.teacher_forcing import answer_logits
from larder_bench.tasks.base import BenchTask

Logits = Float[Tensor, "N V"]

CACHED_CONVERSATIONS = 2  # conversations; cells of one follow each other


@dataclass(frozen=True, eq=False)
class ModelContext:
    """Objects that the cells of one model share.

    Args:
        engine: engine with the full cache.
        sources: data that tasks are built from.
        asked: number of questions of a conversation that are asked, the first ones; None for all.
    """

    engine: Engine
    sources: TaskSources
    asked: int | None = None
    passages: Callable[[Conversation, str, int], SegmentIndex] = field(init=False)
    conversation: Callable[[BenchTask, int, int], Conversation] = field(init=False)
    reference: Callable[[Conversation, int], FullCacheReference] = field(init=False)
    expected: Callable[[Conversation], dict[int, Logits]] = field(init=False)
    recorded: Callable[[Conversation, int], RecordedText] = field(init=False)

    def __post_init__(self) -> None:
        keep = lru_cache(maxsize=CACHED_CONVERSATIONS)
        object.__setattr__(self, "passages", keep(self._segment))
        object.__setattr__(self, "conversation", keep(self._build))
        object.__setattr__(self, "reference", lru_cache(maxsize=1)(self._read))
        object.__setattr__(self, "recorded", lru_cache(maxsize=1)(self._record))
        object.__setattr__(self, "expected", lru_cache(maxsize=1)(self._answer_logits))

    def row_fields(self) -> Row:
        """Fields of rows about the model, apart from its name."""
        spec = self.engine.loaded.decoder.spec
        return {
            "model_fingerprint": spec.fingerprint,
            "device": spec.device.type,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "wording": self.sources.wording.value,
        }

    def accelerator(self) -> str:
        """Name of the device; empty for the CPU."""
        device = self.engine.loaded.decoder.spec.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else ""

    def _segment(self, conversation: Conversation, embedder: str, size: int) -> SegmentIndex:
        loaded = self.engine.runtime.embedder(embedder)
        return SegmentIndex(conversation, self.engine.tokenizer, loaded, size)

    def _build(self, task: BenchTask, seed: int, tokens: int) -> Conversation:
        whole = worded_chat(task.make(seed, tokens, self.sources), self.sources.wording)
        return replace(whole, questions=whole.questions[: self.asked])

    def _read(self, conversation: Conversation, following: int) -> FullCacheReference:
        return FullCacheReference.of(
            self.engine, split_context(self.engine, conversation, following)
        )

    def _record(self, conversation: Conversation, following: int) -> RecordedText:
        passage = split_context(self.engine, conversation, following)
        ids = passage.source.ids + passage.following
        return RecordedText.of(self.engine, ids, following)

    def _answer_logits(self, conversation: Conversation) -> dict[int, Logits]:
        """Logits of the full cache at each token of a question's answer, by question."""
        memory = self.engine.read(conversation)
        answers = answer_logits(self.engine, memory, conversation.questions)
        return {one.question_index: one.logits for one in answers}
