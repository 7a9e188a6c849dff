"""Induction score of a head: its attention on the successors of earlier occurrences of a token.

Tang et al., "RazorAttention: Efficient KV Cache Compression Through Retrieval Heads" (2024),
arXiv:2407.15891, section 3.2: induction heads. The score of a kv head is the maximum over its query
heads, as for `echo`.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.models.measurements._attention_capture import RepeatedText


@dataclass(frozen=True)
class Induction(RepeatedText):
    """Weight on the successor of the same token in earlier repetitions of a text."""

    offset = 1


Part = Induction
