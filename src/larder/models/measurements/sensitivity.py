"""How much each layer's keys change when most of the past is hidden: the mean cosine.

Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 3.2, eq. 8 and 9. How it is
measured stands in `larder.models.sensitivity`.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.models.decoder import Decoder
from larder.models.measurements.base import Granularity, Measurement, SampleText
from larder.models.sensitivity import SensitivityProfile, layer_similarities


@dataclass(frozen=True)
class SensitivityMeasurement(Measurement):
    """One number per layer, 1 for keys that do not change.

    Args:
        profile: the text's length and the mask.
    """

    profile: SensitivityProfile = SensitivityProfile()
    grain = Granularity.LAYER

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        return layer_similarities(decoder, sample.ids(self.profile.tokens), self.profile)


Part = SensitivityMeasurement
