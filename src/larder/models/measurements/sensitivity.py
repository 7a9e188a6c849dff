"""Sensitivity of a layer: mean cosine of its keys with and without a mask over most of the past.

Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 3.2, eq. 8 and 9.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.progress import Progress, no_progress
from larder.core.types import Keys, Queries, TokenIds
from larder.models.attention_backend import AttentionInputs
from larder.models.decoder import Decoder
from larder.models.measurements.base import Granularity, Measurement, SampleText
from larder.ops.attention import masked_attention

CHUNK_TOKENS = 256  # queries whose attention is computed at a time

# From query and key indices to the mask of visible keys [Q, S].
MaskFunction = Callable[[Int[Tensor, " Q"], Int[Tensor, " S"]], Bool[Tensor, "Q S"]]


@dataclass(frozen=True)
class SensitivityProfile:
    """Text length and mask of the measurement.

    The paper uses 16384 tokens in blocks of 4096; the defaults are a quarter of that, in the same
    proportions, so that a laptop measures a model in seconds to minutes.

    Args:
        tokens: N, length of the text.
        sinks: first tokens that every later token sees.
        block: a token sees its own block, up to itself.
        overlap: share of the previous block that it sees as well, its last part, in [0, 1].
    """

    tokens: int = 4096
    sinks: int = 32
    block: int = 1024
    overlap: float = 0.5

    def __post_init__(self) -> None:
        if self.tokens < 2 or self.block < 1 or self.sinks < 0 or not 0 <= self.overlap <= 1:
            raise BadParameter(
                f"profile needs tokens >= 2, block >= 1, sinks >= 0 and overlap in [0, 1], got "
                f"{self}."
            )


def block_mask(
    profile: SensitivityProfile, rows: Int[Tensor, " Q"], columns: Int[Tensor, " S"]
) -> Bool[Tensor, "Q S"]:
    """Mask that imitates block-wise eviction."""
    reach = int(profile.block * profile.overlap)
    first = (rows[:, None] // profile.block) * profile.block - reach
    return causal_mask(rows, columns) & ((columns < profile.sinks) | (columns >= first))


def causal_mask(rows: Int[Tensor, " Q"], columns: Int[Tensor, " S"]) -> Bool[Tensor, "Q S"]:
    """Plain causal mask."""
    return columns <= rows[:, None]


def layer_similarities(
    decoder: Decoder, ids: TokenIds, profile: SensitivityProfile, progress: Progress = no_progress
) -> tuple[float, ...]:
    """Sigma of every managed layer: mean cosine of its keys with and without the mask.

    The first forward records the keys of all managed layers; the second compares layer by layer.
    Attention is computed in chunks of queries.

    Args:
        progress: receives the layers of both forwards that are done, and all.

    Raises:
        BadParameter: the text is shorter than the profile asks for.
    """
    if len(ids) < profile.tokens:
        raise BadParameter(f"The profile needs {profile.tokens} tokens, got {len(ids)}.")
    keys: dict[int, Keys] = {}
    similarities: dict[int, float] = {}

    managed = [layer.index for layer in decoder.spec.managed]

    def keep(layer: int, own: Keys) -> None:
        progress(len(keys), 2 * len(managed))
        keys[layer] = own

    def compare(layer: int, own: Keys) -> None:
        progress(len(managed) + len(similarities), 2 * len(managed))
        plain = keys.pop(layer)
        similarities[layer] = float(F.cosine_similarity(plain.float(), own.float(), dim=-1).mean())

    passes = (
        _MaskedAttention(causal_mask, managed, keep),
        _MaskedAttention(partial(block_mask, profile), managed, compare),
    )
    for layers in passes:
        decoder.forward_uncached(ids[: profile.tokens], layers)
    return tuple(similarities[index] for index in managed)


class _MaskedAttention:
    """Attention of every layer under one mask, with a callback for the keys of some layers."""

    def __init__(
        self, mask: MaskFunction, shown: Collection[int], show: Callable[[int, Keys], None]
    ) -> None:
        self._mask = mask
        self._shown = shown
        self._show = show

    def attend(self, inputs: AttentionInputs) -> Queries:
        keys, values = inputs.keys, inputs.values
        if inputs.layer in self._shown:
            self._show(inputs.layer, keys)
        parts: list[Tensor] = []
        positions = torch.arange(keys.shape[1], device=keys.device)
        for rows in positions.split(CHUNK_TOKENS):
            columns = positions[: len(rows) + int(rows[0])]  # no later one is seen
            mask = self._mask(rows, columns)
            if inputs.sliding_window is not None:
                mask = mask & (columns > rows[:, None] - inputs.sliding_window)
            if inputs.chunk is not None:
                mask = mask & (columns // inputs.chunk == rows[:, None] // inputs.chunk)
            state = masked_attention(
                inputs.queries[:, rows],
                keys[:, : len(columns)],
                values[:, : len(columns)],
                inputs.scaling,
                mask,
                inputs.softcap,
            )
            parts.append(inputs.output(state))
        return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class SensitivityMeasurement(Measurement):
    """Mean cosine per layer, 1 for keys that do not change.

    Args:
        profile: text length and mask.
    """

    profile: SensitivityProfile = SensitivityProfile()
    granularity = Granularity.LAYER

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        ids = sample.ids(self.profile.tokens)
        return layer_similarities(decoder, ids, self.profile, sample.progress)


Part = SensitivityMeasurement
