"""How much of its attention a head gives to where the same token stood before.

Tang et al., "RazorAttention: Efficient KV Cache Compression Through Retrieval Heads" (2024),
arXiv:2407.15891, section 3.2: echo heads. Of the query heads that share a kv head the highest
counts, as Huawei's msModelSlim documents it, which ships the method. It also takes the mean over
pairs of readings, where ours adds up all earlier readings that a token can look at.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.models.measurements._repeated_text import RepeatedText


@dataclass(frozen=True)
class Echo(RepeatedText):
    """Weight on the same token in earlier readings of a repeated text."""

    ahead = 0


Part = Echo
