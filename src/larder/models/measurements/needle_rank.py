"""Order of kv heads by how well their keys find hidden sentences again (REFORM).

Song et al., "Compress, Gather, and Recompute: REFORMing Long-Context Processing in Transformers"
(2025), arXiv:2506.01215, search with the vectors of a few heads, those under which what a question
asks for ranks best: of a text with hidden sentences, the tokens are ordered by the highest cosine
to a token of the question, and a head's number is the mean rank of the sentence's tokens, over the
number of tokens. Known to us at second hand; here vectors are keys before rotation, and texts are
needle passages made of the bundled text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from larder.core.errors import ModelError
from larder.models.attention_backend import AttentionInputs
from larder.models.decoder import Decoder
from larder.models.measurements._attention_capture import measure_layers
from larder.models.measurements._needles import NeedlePassage, NeedleSettings
from larder.models.measurements.base import Granularity, Measurement, SampleText
from larder.ops.rope import rotate


@dataclass(frozen=True)
class NeedleRank(Measurement):
    """Place of each kv head in the order of all, the best first, as a fraction in [0, 1).

    Args:
        needles: settings of the text.
    """

    needles: NeedleSettings = NeedleSettings()
    granularity = Granularity.KV_HEAD

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        passage = self.needles.passage(sample)
        radians = {layer.index: layer.radians for layer in decoder.spec.managed}

        def measure(inputs: AttentionInputs) -> list[float]:
            return needle_ranks(passage, unrotated(inputs, radians[inputs.layer])).tolist()

        return relative_ranks(measure_layers(decoder, passage.ids, measure))


def unrotated(inputs: AttentionInputs, radians: tuple[float, ...] | None) -> Float[Tensor, "K S D"]:
    """Float32 keys before rotation.

    Raises:
        ModelError: the layer rotates in a way that is not known.
    """
    if radians is None:
        raise ModelError(
            f"Layer {inputs.layer} rotates its keys in an unknown way, so that heads cannot be "
            "ordered by unrotated keys: take key_cosine() with share=1."
        )
    keys = inputs.keys.float()
    positions = torch.arange(keys.shape[1], device=keys.device)
    return rotate(keys, -positions, torch.tensor(radians, device=keys.device))


def needle_ranks(passage: NeedlePassage, keys: Float[Tensor, "K S D"]) -> Float[Tensor, " K"]:
    """Mean rank of the tokens of hidden sentences, over the tokens before the questions."""
    keys, total = F.normalize(keys, dim=-1), torch.zeros(len(keys), dtype=torch.float64)
    context = keys[:, : passage.context]
    for each in passage.needles:
        question_keys = keys[:, each.question : each.predicting[0] + 1]
        cosines = (context @ question_keys.transpose(1, 2)).amax(2)  # [K, S]
        order = cosines.argsort(dim=1, descending=True, stable=True)
        ranks = order.argsort(dim=1)[:, slice(*each.needle)]
        total += ranks.double().mean(1).cpu()
    return total / (len(passage.needles) * passage.context)


def relative_ranks(numbers: Sequence[float]) -> tuple[float, ...]:
    """Rank of each number in ascending order, as a fraction of how many there are."""
    order = sorted(range(len(numbers)), key=lambda head: numbers[head])
    index = {head: number for number, head in enumerate(order)}
    return tuple(index[head] / len(numbers) for head in range(len(numbers)))


Part = NeedleRank
