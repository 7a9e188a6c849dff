"""Tally of the example that a token belongs to: texts between blank lines (ShotKV).

Liu et al., "Can LLMs Maintain Fundamental Abilities under KV Cache Compression?" (2025),
arXiv:2502.01941, keeps or drops whole few-shot examples. The column is that of `sentence`, with
the tokens that end a paragraph in place of those that end a sentence.
"""

from __future__ import annotations

from larder.policy.tallies.sentence import SentenceTally


class ShotTally(SentenceTally):
    """Column `shot`."""

    columns = ("shot",)
    needs = frozenset({"blank_lines"})


Part = ShotTally
