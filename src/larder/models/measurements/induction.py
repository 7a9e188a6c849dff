"""How much of its attention a head gives to what followed the same token before.

Tang et al., "RazorAttention: Efficient KV Cache Compression Through Retrieval Heads" (2024),
arXiv:2407.15891, section 3.2: induction heads. The highest of the query heads of a group counts,
as for `echo`.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.models.measurements._repeated_text import RepeatedText


@dataclass(frozen=True)
class Induction(RepeatedText):
    """Weight on the token after the same one in earlier readings of a repeated text."""

    ahead = 1


Part = Induction
