"""A tiny corpus and tiny data sets, in the formats of the public ones."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

from larder.bench.sources import DIALOGUES, PROSE, Sources

CITIES = ("Bern", "Lyon", "Oslo", "Rome", "Turin", "Vienna", "Graz", "Linz")


def words(text: str) -> int:
    return len(text.split())


def packed(path: Path, lines: list[object]) -> Path:
    with lzma.open(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def corpus(folder: Path) -> Path:
    """Prose and dialogues, each of which books one thing."""
    folder.mkdir(parents=True, exist_ok=True)
    packed(folder / PROSE, [". ".join(f"Sentence {n} of many" for n in range(90)) + "."])
    lines: list[object] = []
    for number, city in enumerate(CITIES * 12):
        slots = {"city": city, "code": f"T{number}", "seats": str(number % 4)}
        said = ", ".join(f"{slot} {value}" for slot, value in slots.items())
        facts = [
            {
                "noun": "train",
                "slot": slot,
                "value": value,
                "keys": [[s, v] for s, v in slots.items() if s != slot],
            }
            for slot, value in slots.items()
        ]
        turns = [["user", f"A train: {said}."], ["assistant", f"Booked, number {number}."]]
        lines.append({"turns": turns, "facts": facts})
    packed(folder / DIALOGUES, lines)
    return folder


def sources(folder: Path) -> Sources:
    """Everything that any task may ask for; tokens are words."""
    return Sources(words, corpus(folder / "corpus"), None)
