"""Documentation of policy parts and presets, read from their docstrings and fields."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from typing import Any

from larder.core.errors import UnknownName
from larder.core.registry import LISTING, public_name, unknown_name_message
from larder.core.spelling import Value, parse, spell
from larder.policy.attention_reduction import NoAggregation, NoHeadRule
from larder.policy.protect import Protect
from larder.session.capacity import beyond_budget
from larder.session.policy import FAMILIES, REDUCTION_SLOTS, SLOTS, Policy
from larder.session.presets import PRESETS

# Authors: capitalized words and initials, and what joins them.
_OPENING = r"(?:After|Also|As|By|From|In|Like|See|The|With)\b"  # capitalized, but not a name
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
class PartParameter:
    """Parameter of a part: type, default as written, and meaning with range."""

    name: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True)
class PartDoc:
    """Documentation of a part: slot, first sentence of its module, parameters, citations."""

    name: str
    slot: str
    summary: str
    fields: tuple[PartParameter, ...]
    citations: tuple[Citation, ...]


@dataclass(frozen=True)
class PresetDoc:
    """Documentation of a preset or of another sentence.

    Args:
        name: name of the preset, or the sentence as it was given.
        sentence: its short spelling.
        full: the spelling with every parameter.
        parts: its parts, with the citations that apply to its parameters.
        beyond_budget: clauses on memory that the budget does not cover.
    """

    name: str
    sentence: str
    full: str
    parts: tuple[PartDoc, ...]
    beyond_budget: tuple[str, ...]

    def record(self) -> dict[str, str]:
        """Name and spellings, as in the list of presets."""
        return {"name": self.name, "sentence": self.sentence, "full": self.full}


def part_docs() -> list[PartDoc]:
    """Documentation of every part, by slot."""
    return [part_doc(kind, slot) for slot in SLOTS for kind in _part_classes(slot)]


def part_names() -> list[str]:
    """Names of all parts, by slot."""
    return [
        name
        for slot in SLOTS
        for name in (["protect"] if slot == "protect" else FAMILIES[slot].names())
    ]


def preset_docs() -> list[PresetDoc]:
    """Documentation of every preset, in definition order."""
    return [preset_doc(name) for name in PRESETS]


def preset_doc(name: str) -> PresetDoc:
    """Documentation of a preset."""
    policy = Policy.parse(name)
    return PresetDoc(name, PRESETS[name], str(policy), parts_of(policy), beyond_budget(policy))


def sentence_doc(sentence: str) -> PresetDoc:
    """Documentation of a sentence.

    Raises:
        LarderError: it does not parse.
    """
    policy = Policy.parse(sentence)
    text = policy.short
    return PresetDoc(sentence, text, str(policy), parts_of(policy), beyond_budget(policy))


def parts_of(policy: Policy) -> tuple[PartDoc, ...]:
    """Parts of a policy in order, with the citations that apply to their parameters.

    A part has several citations where its parameter values come from different papers. Reductions
    over queries and heads have none where they are the scorer's default.
    """
    parts = ((slot, getattr(policy, slot)) for slot in SLOTS)
    named = (
        (slot, part)
        for slot, part in parts
        if part is not None and not isinstance(part, NoAggregation | NoHeadRule)
    )
    pages = [_part_doc_with_values(part, slot) for slot, part in named]
    reduction = policy.scorer.default_reduction() or ()
    return tuple(
        replace(page, citations=())
        if page.slot in REDUCTION_SLOTS and page.name in reduction
        else page
        for page in pages
    )


def _part_doc_with_values(part: Any, slot: str) -> PartDoc:
    page, [call] = part_doc(type(part), slot), parse(spell(part))
    cited = (citation for citation in page.citations if citation.covers(call.parameters))
    return replace(page, citations=tuple(cited))


def find_part(name: str) -> PartDoc:
    """Documentation of a part by name.

    Raises:
        UnknownName: no part or preset has this name.
    """
    pages = {kind.name: kind for kind in part_docs()}
    if name not in pages:
        known = sorted({*pages, *PRESETS})
        raise UnknownName(unknown_name_message("policy part or preset", name, known, LISTING))
    return pages[name]


def part_doc(kind: type, slot: str) -> PartDoc:
    """Documentation of a part, from its class and its module."""
    text = inspect.getdoc(inspect.getmodule(kind)) or ""
    return PartDoc(
        public_name(kind), slot, _first_sentence(text), _fields(kind), tuple(citations(text))
    )


def _part_classes(slot: str) -> list[type]:
    if slot == "protect":
        return [Protect]
    return [FAMILIES[slot].load(name) for name in FAMILIES[slot].names()]


def _first_sentence(text: str) -> str:
    """First sentence of the first paragraph."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z])", paragraph)[0]


def _fields(kind: Any) -> tuple[PartParameter, ...]:
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):  # the base documents fields shared by its family
        meanings |= _argument_descriptions(inspect.cleandoc(base.__doc__ or ""))
    return tuple(
        PartParameter(f.name, _type(f.type), _default(f), meanings.get(f.name, ""))
        for f in fields(kind)
        if f.init
    )


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else annotation.__name__


def _default(f: Any) -> str:
    if f.default is MISSING:
        return "required"
    if f.default is None:
        return "open"
    return repr(f.default.value if isinstance(f.default, Enum) else f.default).replace("'", '"')


def _argument_descriptions(text: str) -> dict[str, str]:
    """Descriptions under `Args:` by name; `sinks, recent: ...` describes both."""
    _, _, described = text.partition("Args:\n")
    described = described.split("\n\n")[0]
    descriptions: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + described):
        names, _, meaning = entry.strip().partition(":")
        descriptions |= dict.fromkeys(re.split(r",\s*", names), " ".join(meaning.split()))
    return descriptions


@dataclass(frozen=True)
class Citation:
    """Paper, and the passage of it that a part implements.

    Args:
        where: section, equation or figure; empty for the whole paper.
        values: parameter values, such as `name="x"`, that the paper is cited for; empty for the
            whole part.
    """

    authors: str
    title: str
    year: int
    arxiv: str
    where: str
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        arxiv = f", arXiv:{self.arxiv}" if self.arxiv else ""
        passage = f", {self.where}" if self.where else ""
        return f'{self.authors}, "{self.title}" ({self.year}){arxiv}{passage}'

    def covers(self, parameters: Mapping[str, Value]) -> bool:
        """Test if the citation applies to a part with these parameters."""
        return not self.values or any(_has_value(value, parameters) for value in self.values)

    @property
    def short(self) -> str:
        """First author, year and arXiv id, for tables."""
        first, comma, _ = self.authors.partition(",")
        authors = f"{first} et al." if comma else first
        return f"{authors} {self.year}" + (f", arXiv:{self.arxiv}" if self.arxiv else "")


def citations(docstring: str) -> list[Citation]:
    """All full citations in a docstring, in order; none spans two paragraphs."""
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


def _has_value(condition: str, parameters: Mapping[str, Value]) -> bool:
    """Test parameters against a value from a docstring: `name=value` or `name > number`."""
    name, sign, expected = re.split(r"(=| > )", condition, maxsplit=1)
    value = parameters[name]
    if sign == "=":
        return str(value) == expected.strip('"')
    return isinstance(value, int | float) and value > float(expected)


def _citation(match: re.Match[str], values: tuple[str, ...]) -> Citation:
    return Citation(
        match["authors"],
        match["title"],
        int(match["year"]),
        match["arxiv"] or "",
        (match["where"] or "").strip(),
        values,
    )
