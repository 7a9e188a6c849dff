"""Prediction across layers at 1/16 of the bfloat16 bytes: see `larder.store.codecs._joint`.

Shutova et al., "Cache Me If You Must: Adaptive Key-Value Quantization for Large Language Models"
(AQUA-KV, 2025), arXiv:2501.19392, section 3, for prediction from the layer below.
"""

from __future__ import annotations

from typing import ClassVar

from larder.store.codecs._joint import JointCodec


class Predictive16(JointCodec):
    """Predicted from the decoded layer below, range coded, in a sixteenth of the bfloat16 bytes."""

    share: ClassVar[float] = 1 / 16


Part = Predictive16
