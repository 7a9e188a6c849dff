"""The papers named in docstrings, found where they stand.

A citation is written: Authors, "title" (year), arXiv:id, section or equation. What follows the year
may be missing, and two citations may follow each other in one sentence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Words that authors' names are made of: capitalized, initials, and what joins them.
_OPENING = r"(?:After|Also|As|By|From|In|Like|See|The|With)\b"  # capitalized, but of a sentence
_NAME = r"(?:[^\W\d_a-z][\w'’-]*|[A-Z]\.|de|van|von|der|den)"
_JOIN = r"(?:, and | and |, | )"
_AUTHORS = rf"(?P<authors>(?!{_OPENING}){_NAME}(?:{_JOIN}{_NAME})*(?: et al\.)?)"
# Ends at the end of a sentence, at a bracket or a colon, but not within "eq. 3" or "3.2".
_WHERE = r"(?P<where>(?:sections?|eqs?\.|equations?|algorithm|appendix|table|figure)\b.*?)"
_CITATION = re.compile(
    rf'{_AUTHORS}, "(?P<title>[^"]+)" \((?P<year>\d{{4}})\)'
    r"(?:, arXiv[: ](?P<arxiv>\d{4}\.\d{4,5}))?"
    rf"(?:, (?:{_WHERE})(?=\.(?:\s+[A-Z\"]|$)|;|:|\)| \(|$))?"
)


@dataclass(frozen=True)
class Citation:
    """A paper, and the place in it that a part implements."""

    authors: str
    title: str
    year: int
    arxiv: str
    where: str

    def __str__(self) -> str:
        place = f", arXiv:{self.arxiv}" if self.arxiv else ""
        passage = f", {self.where}" if self.where else ""
        return f'{self.authors}, "{self.title}" ({self.year}){place}{passage}'

    @property
    def short(self) -> str:
        """As a table shows it."""
        first, comma, _ = self.authors.partition(",")
        who = f"{first} et al." if comma else first
        return f"{who} {self.year}" + (f", arXiv:{self.arxiv}" if self.arxiv else "")


def citations(docstring: str) -> list[Citation]:
    """Every full citation of a docstring, in order; one paragraph is one piece of text."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", docstring)]
    return [_citation(found) for text in paragraphs for found in _CITATION.finditer(text)]


def _citation(found: re.Match[str]) -> Citation:
    return Citation(
        found["authors"],
        found["title"],
        int(found["year"]),
        found["arxiv"] or "",
        (found["where"] or "").strip(),
    )
