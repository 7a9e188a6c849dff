"""Blockwise prefill of several caches at once: one batched pass instead of one per episode.

The weights are read once per block for all caches of a group, which neither the EpiCache paper
(arXiv:2509.17396) nor its released code does. All caches of a group exist at the same time: the
bound on entries is that of `blockwise` times their number. Results equal `blockwise`. No paper.

On a CPU one pass for four episodes took 1.07 times as long as four passes and 1.4 times their
memory (`benchmarks/speed.py episodes`), so there the default builds caches one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from larder.core.errors import BadParameter
from larder.core.spec import POSITION_BYTES
from larder.core.types import TokenIds
from larder.ops.apportionment import even_ranges
from larder.prefill.base import Schedule, Steps, prefill_blocks
from larder.prefill.reader import PrefillGroup, PrefillReader, PrefillSequence

# Of free memory; the rest is for attention buffers, which the estimate leaves out.
USABLE_FRACTION = 0.5
# Activations of a token beside its keys and values, in widths of a layer's queries: hidden states,
# float32 queries and outputs, a gated MLP of four times the width. Twice the need of an 8B model.
ACTIVATION_WIDTHS = 32


class Together(Enum):
    """Number of caches in one pass, where it is not given.

    FITTING: as many as fit an accelerator's free memory; one on a CPU.
    ALL: all of them.
    """

    FITTING = "fitting"
    ALL = "all"


@dataclass(frozen=True)
class Episodic(Schedule):
    """Prefill of several caches together with a plan after every block.

    Args:
        tokens: M_block, the most tokens read between two plans; blocks have nearly equal
            lengths. Open, the smaller of 512 and the budget.
        together: most caches of one pass, in groups of nearly equal size; or `fitting`, as many as
            an accelerator's free memory holds and one on a CPU; or `all`.
    """

    tokens: int | None = None
    together: int | Together = Together.FITTING
    has_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise BadParameter(f"episodic.tokens must be at least 1, got {self.tokens}.")
        if isinstance(self.together, int) and self.together < 1:
            raise BadParameter(
                f'episodic.together must be at least 1 cache, "fitting" or "all", '
                f"got {self.together}."
            )

    @property
    def block_tokens(self) -> int | None:
        return self.tokens

    def steps(self, reader: PrefillReader, sequences: PrefillGroup, ids: TokenIds) -> Steps[None]:
        block = self.tokens or len(ids)
        most = self._together(reader, sequences, ids, block)
        groups = [sequences[start:stop] for start, stop in even_ranges(len(sequences), most)]
        return prefill_blocks(reader, groups, ids, block)

    def _together(
        self, reader: PrefillReader, sequences: PrefillGroup, ids: TokenIds, block: int
    ) -> int:
        if self.together is Together.ALL:
            return len(sequences)
        if self.together is Together.FITTING:
            return max_parallel_caches(reader, sequences, ids, block)
        return self.together


Part = Episodic


def free_device_bytes(device: torch.device) -> int | None:
    """Free memory for new tensors; None on a CPU and other devices that do not report it."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def max_parallel_caches(
    reader: PrefillReader, sequences: PrefillGroup, ids: TokenIds, block: int
) -> int:
    """Number of caches to build together: at least one.

    One on a CPU, where several at once are not faster and hold more memory.

    Args:
        ids: tokens to be read.
        block: most tokens of a block.
    """
    free = free_device_bytes(reader.decoder.spec.device)
    if free is None:
        return 1
    each = max(
        cache_bytes(reader, sequence, ids, block) + activation_bytes(reader, sequence, ids[:block])
        for sequence in sequences
    )
    return max(1, min(len(sequences), int(free * USABLE_FRACTION) // each))


def cache_bytes(reader: PrefillReader, sequence: PrefillSequence, ids: TokenIds, block: int) -> int:
    """Most bytes of a sequence's cache: budget and block, and a copy of one layer."""
    spec, longest = reader.decoder.spec, sequence.cache.next_position + len(ids)
    layers: list[int] = []
    for layer in spec.layers:
        if layer.kv_source is not None:
            continue
        bound = layer.sliding_window or reader.quotas[layer.index]
        entry = layer.bytes_per_token(spec.dtype) + layer.kv_heads * POSITION_BYTES
        layers.append(min(bound + block, longest) * entry)
    return sum(layers) + max(layers)


def activation_bytes(reader: PrefillReader, sequence: PrefillSequence, block: TokenIds) -> int:
    """Most activation bytes of a sequence's tokens in a forward pass."""
    prompts = reader.planner.scorer.scratch(block, len(block), sequence.prompts)
    tokens = max(len(block), *(scratch.tokens for scratch in prompts), 0)
    spec = reader.decoder.spec
    width = max(layer.query_heads * layer.head_dim for layer in spec.layers)
    return tokens * width * ACTIVATION_WIDTHS * spec.dtype.itemsize
