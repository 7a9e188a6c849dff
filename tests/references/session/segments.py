"""Segments of a transcript or a short chat, filled one utterance or word after the other."""

from __future__ import annotations

from collections.abc import Callable

from larder import Message

Unit = tuple[int, str]


def slow_utterances(messages: tuple[Message, ...], size: int) -> list[str]:
    """Equation 4 as the released code does it: flatten, take `size` at a time."""
    utterances = [m for m in messages if m.role != "system"]
    texts = []
    while utterances:
        group, utterances = utterances[:size], utterances[size:]
        texts.append("\n".join((m.utterance.strip() or m.content).strip() for m in group))
    return texts


def slow_words(
    messages: tuple[Message, ...], size: int, weigh: Callable[[str], int]
) -> list[list[Unit]]:
    """Words with their message, as many in a row as weigh no more than `size`."""
    groups: list[list[Unit]] = []
    for index, message in enumerate(messages):
        if message.role == "system":
            continue
        for word in (message.utterance.strip() or message.content).split():
            held = sum(weigh(each) for _, each in groups[-1]) if groups else size
            if held + weigh(word) > size:
                groups.append([])
            groups[-1].append((index, word))
    return groups
