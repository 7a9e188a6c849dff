"""A loaded model, and what is made once for many cells: conversations, embedded segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from larder.bench.forced import answered
from larder.bench.passages import Passages
from larder.bench.rows import Row
from larder.bench.sources import Sources
from larder.bench.task import Task
from larder.bench.truth import Truth, passage
from larder.core.conversation import Conversation
from larder.engine.engine import Engine

Logits = Float[Tensor, "N V"]

HELD = 2  # conversations; cells of one follow each other


@dataclass(frozen=True, eq=False)
class Workbench:
    """What cells of one model share.

    Args:
        engine: under the full cache.
        sources: what tasks are made of.
    """

    engine: Engine
    sources: Sources
    passages: Callable[[Conversation, str, int], Passages] = field(init=False)
    conversation: Callable[[Task, int, int], Conversation] = field(init=False)
    truth: Callable[[Conversation, int], Truth] = field(init=False)
    expected: Callable[[Conversation], dict[int, Logits]] = field(init=False)

    def __post_init__(self) -> None:
        keep = lru_cache(maxsize=HELD)
        object.__setattr__(self, "passages", keep(self._cut))
        object.__setattr__(self, "conversation", keep(self._made))
        object.__setattr__(self, "truth", lru_cache(maxsize=1)(self._read))
        object.__setattr__(self, "expected", lru_cache(maxsize=1)(self._asked))

    def told(self) -> Row:
        """What rows tell of the model, beside its name."""
        spec = self.engine.loaded.decoder.spec
        return {
            "model_fingerprint": spec.fingerprint,
            "device": spec.device.type,
            "dtype": str(spec.dtype).removeprefix("torch."),
        }

    def accelerator(self) -> str:
        """The name of the device; empty where it is the processor."""
        device = self.engine.loaded.decoder.spec.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else ""

    def _cut(self, conversation: Conversation, embedder: str, size: int) -> Passages:
        loaded = self.engine.desk.embedder(embedder)
        return Passages(conversation, self.engine.scribe, loaded, size)

    def _made(self, task: Task, seed: int, tokens: int) -> Conversation:
        return task.make(seed, tokens, self.sources)

    def _read(self, conversation: Conversation, following: int) -> Truth:
        return Truth.of(self.engine, passage(self.engine, conversation, following))

    def _asked(self, conversation: Conversation) -> dict[int, Logits]:
        """By question, what the full cache expects at each token of its answer."""
        memory = self.engine.read(conversation)
        found = answered(self.engine, memory, conversation.questions)
        return {one.place: one.logits for one in found}
