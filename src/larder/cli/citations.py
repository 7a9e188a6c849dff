"""The papers named in docstrings, found where they stand.

A citation is written: Authors, "title" (year), arXiv:id, section or equation. What follows the year
may be missing, and two citations may follow each other in one sentence. Values of parameters in
backticks between the start of the paragraph, or the citation before, and a citation, such as
`prompt="question"` or `outliers > 0`, say that it is the paper of these values alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from larder.core.spelling import Value

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
_VALUE = re.compile(r'`(?P<name>\w+)(?P<sign>=| > )(?P<value>"[^"`]*"|[\d.]+)`')


@dataclass(frozen=True)
class Citation:
    """A paper, and the place in it that a part implements.

    Args:
        values: the parameters, each as it is written, that it is the paper of; it is the paper of
            the whole part where there are none.
    """

    authors: str
    title: str
    year: int
    arxiv: str
    where: str
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f", arXiv:{self.arxiv}" if self.arxiv else ""
        passage = f", {self.where}" if self.where else ""
        return f'{self.authors}, "{self.title}" ({self.year}){place}{passage}'

    def covers(self, parameters: Mapping[str, Value]) -> bool:
        """Whether it is the paper of a part with these parameters."""
        return not self.values or any(_has_value(value, parameters) for value in self.values)

    @property
    def short(self) -> str:
        """As a table shows it."""
        first, comma, _ = self.authors.partition(",")
        who = f"{first} et al." if comma else first
        return f"{who} {self.year}" + (f", arXiv:{self.arxiv}" if self.arxiv else "")


def citations(docstring: str) -> list[Citation]:
    """Every full citation of a docstring, in order; one paragraph is one piece of text."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", docstring)]
    return [citation for text in paragraphs for citation in _citations_of_paragraph(text)]


def _citations_of_paragraph(paragraph: str) -> list[Citation]:
    cited: list[Citation] = []
    stop = 0
    for found in _CITATION.finditer(paragraph):
        values = _VALUE.finditer(paragraph, stop, found.start())
        cited.append(_citation(found, tuple(value[0].strip("`") for value in values)))
        stop = found.end()
    return cited


def _has_value(value: str, parameters: Mapping[str, Value]) -> bool:
    """Whether parameters have a value as a docstring writes it."""
    name, sign, wanted = re.split(r"(=| > )", value, maxsplit=1)
    held = parameters[name]
    if sign == "=":
        return str(held) == wanted.strip('"')
    return isinstance(held, int | float) and held > float(wanted)


def _citation(found: re.Match[str], values: tuple[str, ...]) -> Citation:
    return Citation(
        found["authors"],
        found["title"],
        int(found["year"]),
        found["arxiv"] or "",
        (found["where"] or "").strip(),
        values,
    )
