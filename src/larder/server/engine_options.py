"""Engine arguments: memory, scheduling and names of a served model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from larder.core.errors import BadParameter
from larder.server.request_queue import SchedulingPolicy
from larder.store.ledger import ByteBudgets


@dataclass(frozen=True)
class EngineOptions:
    """Memory, scheduling and names of a served model.

    Args:
        budgets: capacity of device and host memory for caches, in bytes.
        eviction: name of the eviction policy of a full tier.
        rows: maximum number of sequences in one decode step.
        waiting: maximum number of queued requests.
        names: names of the model in requests, the first that of answers; none for its own.
        max_model_len: longest text with its answer, in tokens; None for what the model reads.
        prefill_chunk: most tokens of a prompt that are read between two tokens of other answers,
            for policies without eviction; None for a block.
        scheduling: order of the requests of one tenant.
        inter_token_seconds: wanted between two tokens of an answer while prompts are read, by which
            chunks of prompts are sized under policies without eviction; None for no such target.
        clock: seconds since 1970.

    Raises:
        BadParameter: `prefill_chunk` is out of range.
    """

    budgets: ByteBudgets = ByteBudgets()
    eviction: str = "lru"
    rows: int = 64
    waiting: int = 1024
    names: Sequence[str] = ()
    max_model_len: int | None = None
    prefill_chunk: int | None = None
    scheduling: SchedulingPolicy = SchedulingPolicy.PRIORITY
    inter_token_seconds: float | None = None
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise BadParameter(
                f"prefill_chunk must be 1 token or more, got {self.prefill_chunk}: give None for a "
                "block of the policy."
            )
