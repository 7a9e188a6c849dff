"""What the policy commands tell about parts and presets, gathered from the files themselves."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from typing import Any

from larder.cli.citations import Citation, citations
from larder.core.errors import UnknownName
from larder.core.family import LISTING, unknown_name_message
from larder.core.spelling import name_of, parse, spell
from larder.policy.protect import Protect
from larder.session.beyond_budget import beyond_budget
from larder.session.policy import FAMILIES, REDUCTION_SLOTS, SLOTS, Policy
from larder.session.presets import PRESETS


@dataclass(frozen=True)
class PartParameter:
    """A parameter of a part: its type, its default as written, its range in words."""

    name: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True)
class PartDoc:
    """A part, as its file describes it."""

    name: str
    slot: str
    summary: str
    fields: tuple[PartParameter, ...]
    citations: tuple[Citation, ...]


@dataclass(frozen=True)
class PresetDoc:
    """A preset: its sentence as kept, written out in full, the papers of its parts, and what it
    holds beyond its budget."""

    name: str
    sentence: str
    full: str
    parts: tuple[PartDoc, ...]
    beyond_budget: tuple[str, ...]

    def record(self) -> dict[str, str]:
        """What a list tells of it: as `asdict`, without the pages of its parts."""
        return {"name": self.name, "sentence": self.sentence, "full": self.full}


def part_docs() -> list[PartDoc]:
    """Every part, slot by slot."""
    return [part_doc(kind, slot) for slot in SLOTS for kind in _part_classes(slot)]


def part_names() -> list[str]:
    """Every part by name, slot by slot."""
    return [
        name
        for slot in SLOTS
        for name in (["protect"] if slot == "protect" else FAMILIES[slot].names())
    ]


def preset_docs() -> list[PresetDoc]:
    """Every preset, in the order of its file."""
    return [preset_doc(name) for name in PRESETS]


def preset_doc(name: str) -> PresetDoc:
    """A preset by name."""
    policy = Policy.parse(name)
    return PresetDoc(name, PRESETS[name], str(policy), parts_of(policy), beyond_budget(policy))


def parts_of(policy: Policy) -> tuple[PartDoc, ...]:
    """The parts of a sentence, in order, with the papers that it uses.

    A part has several papers where its values are of different ones. How queries and heads are
    joined is of no paper of its own where it is as the scorer's paper says.
    """
    parts = ((slot, getattr(policy, slot)) for slot in SLOTS)
    pages = [_part_doc_with_values(part, slot) for slot, part in parts if part is not None]
    own = policy.scorer.published() or ()
    return tuple(
        replace(page, citations=()) if page.slot in REDUCTION_SLOTS and page.name in own else page
        for page in pages
    )


def _part_doc_with_values(part: Any, slot: str) -> PartDoc:
    page, [call] = part_doc(type(part), slot), parse(spell(part))
    cited = (citation for citation in page.citations if citation.covers(call.parameters))
    return replace(page, citations=tuple(cited))


def find_part(name: str) -> PartDoc:
    """A part by name.

    Raises:
        UnknownName: no part or preset has it.
    """
    pages = {kind.name: kind for kind in part_docs()}
    if name not in pages:
        known = sorted({*pages, *PRESETS})
        raise UnknownName(unknown_name_message("policy part or preset", name, known, LISTING))
    return pages[name]


def part_doc(kind: type, slot: str) -> PartDoc:
    """A part, from its class and its module."""
    text = inspect.getdoc(inspect.getmodule(kind)) or ""
    return PartDoc(
        name_of(kind), slot, _first_sentence(text), _fields(kind), tuple(citations(text))
    )


def _part_classes(slot: str) -> list[type]:
    if slot == "protect":
        return [Protect]
    return [FAMILIES[slot].load(name) for name in FAMILIES[slot].names()]


def _first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z])", paragraph)[0]


def _fields(kind: Any) -> tuple[PartParameter, ...]:
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):  # what a family shares is told by its base
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
    """What the `Args:` of a docstring say, by name; `sinks, recent: ...` speaks for both."""
    _, _, described = text.partition("Args:\n")
    described = described.split("\n\n")[0]
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + described):
        names, _, meaning = entry.strip().partition(":")
        found |= dict.fromkeys(re.split(r",\s*", names), " ".join(meaning.split()))
    return found
