"""Principal components over all layers at 1/16 of the bfloat16 bytes: see `_principal`.

Staniszewski and Lancucki, "KV Cache Transform Coding for Compact Storage in LLM Inference" (KVTC,
2025), arXiv:2511.01815.
"""

from __future__ import annotations

from typing import ClassVar

from larder.store.codecs._principal import PrincipalCodec


class Kvtc16(PrincipalCodec):
    """Principal components in a sixteenth of the bfloat16 bytes, beside exact ends."""

    share: ClassVar[str] = "1/16"


Part = Kvtc16
