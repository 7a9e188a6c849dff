"""Tiny corpus and tiny data sets in the formats of the public ones."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

from larder_bench.datasets.sources import DIALOGUES, PROSE, TaskSources

CITIES = ("Bern", "Lyon", "Oslo", "Rome", "Turin", "Vienna", "Graz", "Linz")


def words(text: str) -> int:
    return len(text.split())


def packed(path: Path, lines: list[object]) -> Path:
    with lzma.open(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def corpus(folder: Path) -> Path:
    """Folder with prose and dialogues, each of which books a train or a boat."""
    folder.mkdir(parents=True, exist_ok=True)
    packed(folder / PROSE, [". ".join(f"Sentence {n} of many" for n in range(90)) + "."])
    lines: list[object] = []
    for number, city in enumerate(CITIES * 12):
        noun = ("train", "boat")[number % 2]
        slots = {"city": city, "code": f"T{number}", "seats": str(number % 4)}
        statement = ", ".join(f"{slot} {value}" for slot, value in slots.items())
        facts = [
            {
                "noun": noun,
                "slot": slot,
                "value": value,
                "keys": [[s, v] for s, v in slots.items() if s != slot],
            }
            for slot, value in slots.items()
        ]
        turns = [["user", f"A {noun}: {statement}."], ["assistant", f"Booked, number {number}."]]
        lines.append({"turns": turns, "facts": facts})
    packed(folder / DIALOGUES.format(split="dev"), lines)
    return folder


def written(path: Path, data: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def lines_written(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def sessions(text: str) -> dict[str, Any]:
    """Ten sessions of 14 utterances; `text` is the field of the utterance."""
    found: dict[str, Any] = {}
    for session in range(1, 11):
        found[f"session_{session}_date_time"] = f"{session} May 2023"
        found[f"session_{session}"] = [
            {
                "speaker": ("Ann", "Bob")[number // 2 % 2],
                text: f"In talk {session} I said word{session}x{number} and nothing more.",
                "dia_id": f"D{session}:{number}",
            }
            for number in range(1, 15)
        ]
    return found


def asked(categories: int) -> list[dict[str, Any]]:
    """One question per session, some with two passages of evidence, and one about nothing."""
    found: list[dict[str, Any]] = []
    for session in range(1, 11):
        evidence = [f"D{session}:{session}"]
        if session % 3 == 0:
            evidence = [f"D{session}:3; D{session}:9.", f"D{session - 1}:4-D{session - 1}:6"]
        found.append(
            {
                "question": f"What was said in talk {session}?",
                "answer": f"word{session}x{session}",
                "category": 1 + session % categories,
                "evidence": evidence,
            }
        )
    return [*found, {"question": "Why?", "answer": "so", "category": 1, "evidence": []}]


def public_data(folder: Path) -> Path:
    """Folder with every public data set, in the format of its release."""
    talk = {"speaker_a": "Ann", "speaker_b": "Bob", **sessions("text")}
    adversarial = {"question": "Who flew?", "category": 5, "evidence": ["D1:1"]}
    written(folder / "locomo" / "one.json", {"conversation": talk, "qa": [adversarial, *asked(4)]})
    names = {"speaker_1": "Ann", "speaker_2": "Bob"}
    real = {"name": names, **sessions("clean_text"), "qa": asked(3)}
    written(folder / "realtalk" / "one.json", real)
    written(folder / "longmemeval" / "longmemeval_s.json", [stacked(n) for n in range(9)])
    lines_written(folder / "longbench" / "data" / "multifieldqa_en.jsonl", documents("answers"))
    lines_written(folder / "infinitebench" / "passkey.jsonl", documents("answer"))
    written(folder / "longbench_v2" / "data.json", [chosen(n) for n in range(3)])
    lines_written(folder / "ruler_qa" / "squad.jsonl", [paragraphs(n) for n in range(40)])
    (folder / "text").mkdir()
    for name in ("one.txt", "two.md"):
        text = "\n\n".join(f"Paragraph {n} of {name} has nine words in it." for n in range(200))
        (folder / "text" / name).write_text(text, encoding="utf-8")
    return folder


def paragraphs(number: int) -> dict[str, Any]:
    """Question that one paragraph answers, or two for each third; two questions share one."""
    sections = [f"Paragraph {number // 2} says {f'P{number // 2} ' * 20}and no more."]
    if number % 3 == 0:
        sections.append(f"Further on {number} it says {'ditto ' * 20}and no more.")
    answers = [f"P{number // 2}", f"p {number // 2}"]
    question = f"What does paragraph {number // 2} say, asks number {number}?"
    return {"question": question, "answers": answers, "context": sections}


def stacked(number: int) -> dict[str, Any]:
    """Question with two sessions of evidence, and others shared by all questions."""
    own, shared = [f"answer_{number}_{n}" for n in (1, 2)], [f"other_{n}" for n in range(20)]
    statement = f"My number {number} is N{number}."
    return {
        "question_id": f"q{number}_abs" if number == 8 else f"q{number}",
        "question_type": ("multi-session", "knowledge-update")[number % 2],
        "question": f"What is my number {number}?",
        "answer": f"N{number}",
        "question_date": "2024/01/01 (Mon) 00:00",
        "haystack_session_ids": [*shared, *own],
        "haystack_dates": [f"2023/05/{n + 1:02} (Tue) 10:00" for n in range(22)],
        "haystack_sessions": [
            [
                {"role": "user", "content": f"{id}: {'hum ' * 30}"},
                {"role": "assistant", "content": "Yes."},
            ]
            for id in shared
        ]
        + [[{"role": "user", "content": statement, "has_answer": True}] for _ in own],
        "answer_session_ids": own,
    }


def documents(answers: str) -> list[dict[str, Any]]:
    """Documents of different lengths, each with its question."""
    return [
        {
            "id": n,
            "_id": str(n),
            "context": "\n\n".join(f"Line {i} of document {n} is here." for i in range(400 + n)),
            "input": f"Which document is number {n}?",
            answers: [f"document {n}", f"the document {n}"],
            "options": [],
            "length": 400 + n,
            "dataset": "one",
            "language": "en",
            "all_classes": None,
        }
        for n in range(3)
    ]


def chosen(number: int) -> dict[str, Any]:
    """Document with four answers to choose from."""
    document = documents("answers")[number]
    return {
        "_id": str(number),
        "domain": "Many",
        "difficulty": ("easy", "hard")[number % 2],
        "length": "short",
        "question": document["input"],
        **{f"choice_{letter}": f"{letter.lower()}{number}" for letter in "ABCD"},
        "answer": "ABC"[number],
        "context": document["context"],
    }


def sources(folder: Path) -> TaskSources:
    """Sources of all tasks; tokens are words."""
    return TaskSources(words, corpus(folder / "corpus"), public_data(folder / "data"))
