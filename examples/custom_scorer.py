"""Custom scorer: a new method is a small class that works with all other parts."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from larder import Engine, Policy, read_conversation
from larder.core.observation import Observation
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class LongestKeys(Scorer):
    """The Euclidean length of each cached key."""

    def score(self, observation: Observation) -> torch.Tensor:
        heads = range(observation.layer.kv_heads)
        return torch.cat(
            [observation.entries.head_keys(head).float().norm(dim=-1) for head in heads]
        )


policy = replace(Policy.parse("blockwise() > pooled(tokens=96)"), scorer=LongestKeys())
engine = Engine.load(policy=policy)
memory = engine.read(read_conversation(Path(__file__).with_name("conversation.json")))
print(engine.ask(memory, "What is my dog called?").text)
