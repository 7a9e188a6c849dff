"""Echo score of a head: its attention on earlier occurrences of the same token.

Tang et al., "RazorAttention: Efficient KV Cache Compression Through Retrieval Heads" (2024),
arXiv:2407.15891, section 3.2: echo heads. The score of a kv head is the maximum over its query
heads, as documented by Huawei's msModelSlim, which ships the method. It takes the mean over pairs
of repetitions; here the weights on all earlier repetitions are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.models.measurements._attention_capture import RepeatedText


@dataclass(frozen=True)
class Echo(RepeatedText):
    """Weight on the same token in earlier repetitions of a text."""

    offset = 0


Part = Echo
