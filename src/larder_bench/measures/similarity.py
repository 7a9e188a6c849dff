"""Change of each layer's keys when most of the past is masked: a profile of the model.

M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 3.2, eq. 8 and 9, figures 4a
and 9. The text of the task is read twice, once with the full context and once with the context that
block-wise eviction would leave, and keys are compared (`larder.models.measurements.sensitivity`).
It does not depend on the policy, so it is measured with the full cache only.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core import BadParameter, UsageError
from larder.models import SensitivityProfile, layer_similarities
from larder_bench.measures.base import Measure
from larder_bench.results.rows import Row
from larder_bench.studies.cells import Cell
from larder_bench.studies.methods import PolicyMethod
from larder_bench.studies.model_context import ModelContext


@dataclass(frozen=True)
class SimilarityMeasure(Measure):
    """Cosines of keys, an item per layer.

    Args:
        blocks: number of blocks of the text; a token sees its own block up to itself.
        overlap: share of the previous block that it sees as well.
        sinks: number of first tokens that every token sees.
    """

    blocks: int = 4
    overlap: float = 0.5
    sinks: int = 32

    def __post_init__(self) -> None:
        if self.blocks < 2:
            raise BadParameter(f"similarity.blocks must be 2 or more, got {self.blocks}.")
        if not 0 <= self.overlap <= 1:
            raise BadParameter(f"similarity.overlap must be in [0, 1], got {self.overlap}.")
        if self.sinks < 0:
            raise BadParameter(f"similarity.sinks must be 0 or more, got {self.sinks}.")

    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        subject, decoder = cell.subject, bench.engine.loaded.decoder
        if not isinstance(subject, PolicyMethod) or not subject.variant.is_full:
            raise UsageError(
                f"similarity is a profile of the model, which {subject.name} does not change: "
                "take --control full alone."
            )
        ids = bench.engine.tokenizer.encode_conversation(
            bench.conversation(cell.task, cell.seed, cell.tokens)
        ).ids
        block = -(-len(ids) // self.blocks)
        similarities = layer_similarities(
            decoder, ids, SensitivityProfile(len(ids), self.sinks, block, self.overlap)
        )
        nbytes = decoder.spec.full_bytes(len(ids))
        names = "full_kv_bytes", "kv_bytes", "active_kv_bytes", "peak_kv_bytes"
        layers = zip(decoder.spec.managed, similarities, strict=True)
        return {
            "context_tokens": len(ids),
            "bytes_share": 1.0,
            **dict.fromkeys(names, nbytes),
            "items": [
                {
                    "kind": f"layer {layer.index}",
                    "question": layer.index,
                    "turn": 0,
                    "depth": None,
                    "similarity": round(sigma, 5),
                    "counts": True,
                }
                for layer, sigma in layers
            ],
        }


Part = SimilarityMeasure
